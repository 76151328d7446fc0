"""From a loaded Transformers model to what is decided of its cache: model spec, plan and scales."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch

from nibble.attention import backends
from nibble.attention.planner import evidence
from nibble.attention.planner.resolve import require_runnable, resolve
from nibble.cache import scales as kv_scales
from nibble.cache.scales import KVScales
from nibble.config import Config, configured
from nibble.engine.build import CHUNK, measure_scales, resolve_scales, tokenizer_of
from nibble.engine.calibration import builtin_texts
from nibble.engine.plan import Design
from nibble.errors import ConfigError, ScaleError
from nibble.hardware import probe
from nibble.models.observe import BYTES, observe_skeleton, skeleton
from nibble.models.refusals import check_config

OPTIONS = (
    "kv_format", "kv_layers", "kv_scales", "kv_memory", "page_size", "attention_backend", "prefill_backend",
    "decode_backend", "allow_staging", "max_context", "tuned",
)  # fmt: skip
"""Fields of Config that say something of a cache alone; the others are about an engine, or are facts of the model."""

Prompt = str | Sequence[int]


def design(model: Any, options: dict[str, Any]) -> Design:
    """Return what is decided of a cache for `model`; raise ConfigError (Unsupported) with the reason."""
    config = _config(model, options)
    hardware = probe(config.device)
    check_config(model.config)
    bare: Any = skeleton(deepcopy(model.config))  # it changes the config
    # A wrapped or patched class may attend differently from what was observed.
    if type(bare) is not type(model):
        raise ConfigError(
            f"the model is a {type(model).__name__}, and Nibble can only judge what Transformers makes of its config, "
            f"a {type(bare).__name__}; give that model itself, as AutoModelForCausalLM loads it"
        )
    model_spec = observe_skeleton(bare, config.model, config.dtype, config.max_context)
    table = backends.available_backends()
    times = evidence.load_tuned(hardware, table) if config.tuned else evidence.NO_RANKINGS
    plan = resolve(config, model_spec, hardware, table, measured=times)
    require_runnable(plan)
    return Design(config, hardware, model_spec, plan)


def _config(model: Any, options: dict[str, Any]) -> Config:
    names = {option.name for option in fields(Config)}
    if engine_options := sorted(name for name in options if name in names and name not in OPTIONS):
        raise ConfigError(
            f"{', '.join(engine_options)} is an option of Nibble's engine, not of a cache; options here: "
            f"{', '.join(OPTIONS)}"
        )
    return configured(model=_name(model), dtype=_dtype(model), device=_device(model), **options)


def _name(model: Any) -> str:
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise ConfigError(
            f"a NibbleCache is made for a model of Transformers that generates, not for a {type(model).__name__}; of a "
            "wrapped model (PEFT, torch.compile) give the inner one"
        )
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def _dtype(model: Any) -> str:
    name = str(model.dtype).removeprefix("torch.")
    if name not in BYTES:
        raise ConfigError(f"the model computes in {name}; a NibbleCache needs one of {', '.join(BYTES)}")
    return name


def _device(model: Any) -> str:
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1:
        raise ConfigError(
            f"the model lies on {', '.join(sorted(devices))}; a NibbleCache needs all of it on one device "
            "(from_pretrained without device_map='auto', or with one GPU visible)"
        )
    kind = torch.device(devices.pop()).type
    if kind not in {"cpu", "cuda"}:
        raise ConfigError(f"the model lies on {kind}, and Nibble runs on cpu and cuda; move it there first")
    return kind


def scales_for(decided: Design, model: Any, calibrate: Sequence[Prompt] | None) -> KVScales:
    """Return the KV scales of a plan, measured where that is requested.

    Args:
        decided: The plan, and for whom.
        model: The model with Nibble's attention.
        calibrate: Texts or token ids to measure on, None for what the config says.

    Raises:
        ScaleError: Some are missing.
    """
    source = decided.config.kv_scales
    if calibrate is None and source == "calibrate":
        calibrate = builtin_texts()
    if calibrate is not None:
        return measure_scales(decided, model, _encoded(decided, calibrate), CHUNK)
    # a model without a name has no checkpoint to look at
    has_checkpoint = bool(getattr(model, "name_or_path", ""))
    scales = resolve_scales(decided, source) if has_checkpoint or source != "auto" else kv_scales.NONE
    kv_scales.require(decided.plan.layout, scales)
    return scales


def _encoded(decided: Design, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
    if isinstance(prompts, str):
        raise ScaleError("calibrate must be a list of texts, or of lists of token ids, not one text")
    if not any(isinstance(prompt, str) for prompt in prompts):
        return list(prompts)  # type: ignore[arg-type]
    tokenizer = tokenizer_of(decided.config.model)
    if tokenizer is None:
        raise ScaleError(
            f"calibration on text needs a tokenizer, and {decided.config.model} has none; give calibrate=[token ids]"
        )
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
