"""What is decided of drafts before weights load: who drafts, how many tokens, and what cannot be combined yet."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nibble.attention.planner.memory import MemoryPlan
from nibble.config import Config
from nibble.drafts import GPU_DRAFTS, SpeculativeSpec, verify_tokens
from nibble.engine import drafters
from nibble.engine.cache_plan import CachePlan
from nibble.engine.drafters.base import DrafterInfo
from nibble.errors import ConfigError
from nibble.hardware import Hardware
from nibble.model_spec import ModelSpec

if TYPE_CHECKING:
    from nibble.engine.speculative import Speculation

VOCAB_PADDING = 1024
"""Most tokens by which vocabularies of the same tokenizer differ."""


def check(config: Config, model_spec: ModelSpec, hardware: Hardware) -> None:
    """Raise ConfigError where drafts cannot be had with the rest of the config."""
    spec = config.drafts
    if spec is None:
        return
    info = drafters.get(spec.drafter)
    if info.takes_path != bool(spec.path):
        form = f"{info.name}:PATH" if info.takes_path else info.name
        raise ConfigError(f"--speculative {config.speculative}: write it as {form}")
    if config.offload:
        raise ConfigError(
            "--speculative and --hisparse cannot be combined yet: a hot buffer is for one new token of a request; "
            "leave one of them out"
        )
    if config.deterministic and not hardware.is_cpu:
        raise ConfigError(
            "--speculative and --deterministic cannot be combined on a GPU: a step that verifies drafts computes in "
            "another order than one that decodes; leave one of them out"
        )


def max_tokens(spec: SpeculativeSpec, info: DrafterInfo, hardware: Hardware) -> int:
    """Return the most draft tokens of a request and step."""
    return spec.tokens or min(info.max_tokens, info.max_tokens if hardware.is_cpu else GPU_DRAFTS)


def note(config: Config, hardware: Hardware) -> str:
    """Return what drafts there are, for the plan's notes; empty where nobody drafts."""
    spec = config.drafts
    if spec is None:
        return ""
    most = max_tokens(spec, drafters.get(spec.drafter), hardware)
    cache = (
        f" ({spec.path}{f', its cache in {spec.kv_format}' if spec.kv_format else ''})" if spec.path else ""
    )
    how = "by what was accepted, down to none" if spec.tokens is None else "in every step"
    return f"drafts by {spec.drafter}{cache}: up to {most} tokens of a request and step, {how}"


def draft_config(config: Config, model_spec: ModelSpec) -> Config | None:
    """Return the config of the model that drafts, if one does: its own scheme, and what concerns the machine.

    Args:
        config: of the large model.
        model_spec: the large model.
    """
    spec = config.drafts
    if spec is None or not spec.path:
        return None
    names = (
        "download_dir", "trust_remote_code", "dtype", "device", "threads", "max_running", "token_budget",
        "prefix_cache", "compile", "compile_cache", "graphs", "seed",
    )  # fmt: skip
    common = {name: getattr(config, name) for name in names}
    if spec.kv_format:
        common["kv_format"] = spec.kv_format
    return Config(model=spec.path, kv_window=0, max_context=None, **common)


def room(budget: MemoryPlan) -> int:
    """Return the cache's bytes: pages, the exact window and recurrent states."""
    return budget.pool + sum(part.bytes for part in (budget.exact, budget.states) if part)


def checked(draft: CachePlan, model_spec: ModelSpec) -> CachePlan:
    """Return the plan of a model that drafts, with no more context than it needs.

    Args:
        draft: its plan.
        model_spec: the large model.

    Raises:
        ConfigError: it cannot draft for the large model.
    """
    small = draft.model_spec
    if small.states:
        raise ConfigError(
            f"{draft.config.model} cannot draft: it has layers that keep a recurrent state, and they do not take "
            "tokens back; choose a model without, or --speculative lookup"
        )
    # Rows of an embedding may be padded to another number, so a few more or fewer say nothing.
    if abs(small.vocab_size - model_spec.vocab_size) > VOCAB_PADDING:
        raise ConfigError(
            f"{draft.config.model} cannot draft for {model_spec.model}: it has {small.vocab_size} tokens, and not "
            f"{model_spec.vocab_size}; choose a smaller model with the same tokenizer"
        )
    context = min(small.max_context, model_spec.max_context)
    return replace(
        draft,
        config=replace(draft.config, max_context=context),
        model_spec=replace(small, max_context=context),
    )


def speculation(config: Config, hardware: Hardware, vocab_size: int, *parts: Any) -> Speculation | None:
    """Return who drafts in an engine, if anybody does.

    Args:
        config: of the engine.
        hardware: the machine.
        vocab_size: tokens of the model.
        parts: what the drafter is made of.
    """
    from nibble.engine.speculative import Speculation

    spec = config.drafts
    if spec is None:
        return None
    info = drafters.get(spec.drafter)
    return Speculation(
        name=info.name,
        drafter=drafters.create(info, *parts),
        max_tokens=max_tokens(spec, info, hardware),
        adapts=spec.tokens is None,
        step_tokens=verify_tokens(hardware.is_cpu),
        vocab_size=vocab_size,
        overlaps=not hardware.is_cpu,
    )
