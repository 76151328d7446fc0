"""What is decided of drafts before weights load: who drafts, how many tokens, and what cannot be combined yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nibble.attention.planner.memory import MemoryPlan, MemoryPlanner
from nibble.cache import scales as kv_scales
from nibble.config import Config
from nibble.drafts import (
    BUNDLED_HEADS,
    GPU_DRAFTS,
    GPU_VERIFY_TOKENS,
    WAITING_STATES,
    SpeculativeSpec,
    verify_tokens,
)
from nibble.engine import drafters
from nibble.engine.cache_plan import CachePlan
from nibble.engine.drafters.base import DrafterInfo
from nibble.errors import ConfigError
from nibble.hardware import Hardware, format_bytes
from nibble.model_spec import ModelSpec
from nibble.models.hub import MTP, local_folder, split_head

if TYPE_CHECKING:
    from nibble.engine.speculative import Speculation

VOCAB_PADDING = 1024
"""Most tokens by which vocabularies of the same tokenizer differ."""


def _spec(config: Config) -> SpeculativeSpec | None:
    """Return who drafts for a model; nobody drafts for a head, whose config says for whom it drafts."""
    return None if split_head(config.model)[0] else config.drafts


def check(config: Config, model_spec: ModelSpec, hardware: Hardware) -> None:
    """Raise ConfigError where drafts cannot be had with the rest of the config."""
    spec = _spec(config)
    if spec is None:
        return
    info = drafters.get(spec.drafter)
    if info.takes_path != bool(spec.path or _bundled_head(config, info)):
        form = f"{info.name}:PATH" if info.takes_path else info.name
        raise ConfigError(f"--speculative {config.speculative}: write it as {form}")
    if spec.kv_format and not (info.takes_path or info.is_head):
        raise ConfigError(
            f"--speculative {config.speculative}: {info.name} has no cache; write it as {info.name}"
        )
    if info.is_head and config.tp > 1:
        raise ConfigError(
            f"--speculative {config.speculative} and --tp {config.tp} cannot be combined yet: a head shares the tables "
            "of the vocabulary, of which each GPU has a part; --speculative lookup and draft:PATH work"
        )
    if config.offload and not hardware.is_cpu:
        raise ConfigError(
            "--speculative and --hisparse cannot be combined on a GPU yet: a hot buffer is for one new token of a "
            "request, so steps with drafts are not recorded; leave one of them out"
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
    spec = _spec(config)
    if spec is None:
        return ""
    most = max_tokens(spec, drafters.get(spec.drafter), hardware)
    info = drafters.get(spec.drafter)
    parts = [
        spec.path or _bundled_head(config, info),
        f"its cache in {spec.kv_format}" if spec.kv_format else "",
        "a prefix is reused as far as the head's own cache has it, too" if info.is_head else "",
    ]
    details = ", ".join(filter(None, parts))
    cache = f" ({details})" if details else ""
    how = "by what was accepted, down to none" if spec.tokens is None else "in every step"
    return f"drafts by {spec.drafter}{cache}: up to {most} tokens of a request and step, {how}"


def draft_config(config: Config, model_spec: ModelSpec) -> Config | None:
    """Return the config of the model that drafts, if one does: its own scheme, and what concerns the machine.

    Args:
        config: of the large model.
        model_spec: the large model.
    """
    spec = _spec(config)
    if spec is None:
        return None
    info = drafters.get(spec.drafter)
    if not info.is_head and not spec.path:
        return None
    names = (
        "download_dir", "trust_remote_code", "dtype", "device", "threads", "max_running", "token_budget",
        "prefix_cache", "compile", "compile_cache", "graphs", "seed",
    )  # fmt: skip
    common = {name: getattr(config, name) for name in names}
    if spec.kv_format:
        common["kv_format"] = spec.kv_format
    if not info.is_head:
        return Config(model=spec.path, kv_window=0, max_context=None, **common)
    path = spec.path or _bundled_head(config, info) or config.model
    # The first step of its drafts computes as many rows of a request as one that verifies them.
    common |= {name: getattr(config, name) for name in ("speculative", "speculative_tokens", "index_topk")}
    folder = local_folder(path)
    # A file of scales beside a model is of the model's own layers.
    has_scales = info.takes_path and folder is not None and (folder / kv_scales.FILE_NAME).exists()
    scales = "auto" if has_scales else "one" if config.kv_scales == "one" else "calibrate"
    return Config(model=f"{info.name}:{path}", kv_window=0, max_context=None, kv_scales=scales, **common)


def _bundled_head(config: Config, info: DrafterInfo) -> str:
    """Return the name of the head that comes with a bundled model, empty where none does."""
    return BUNDLED_HEADS.get(config.model, "") if info.is_head and info.takes_path else ""


def head_layers(draft: Config, model_spec: ModelSpec) -> tuple[int, ...] | None:
    """Return the layers of a model whose inputs a head reads, None where it reads the model's output.

    Args:
        draft: of the head.
        model_spec: of the model.

    Raises:
        ConfigError: the head is another model's.
    """
    from nibble.models.heads import HeadFacts, default_state_layers, load_config  # they import Transformers

    facts = HeadFacts.of(
        load_config(draft.model, draft.index_topk, trust_remote_code=draft.trust_remote_code)
    )
    assert facts is not None
    if facts.target_hidden_size and facts.target_hidden_size != model_spec.hidden_size:
        raise ConfigError(
            f"{draft.model} cannot draft for {model_spec.model}: it reads hidden states of {facts.target_hidden_size} "
            f"values, and the model's have {model_spec.hidden_size}; choose a head that was trained for this model"
        )
    if facts.kind == MTP:
        return None
    layers = facts.state_layers or default_state_layers(model_spec.layers)
    if not 1 <= min(layers) <= max(layers) <= model_spec.layers:
        raise ConfigError(
            f"{draft.model} cannot draft for {model_spec.model}: it reads what layers {', '.join(map(str, layers))} "
            f"get, and the model has {model_spec.layers}; choose a head that was trained for this model"
        )
    return layers


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes beside the large model's own, where a model or head drafts."""

    weights: int
    workspace: int
    states: int
    """Hidden states that a head reads: those of a step, and those that wait for a step of the head."""
    pages: int = 0

    @classmethod
    def of(cls, draft: CachePlan, planner: MemoryPlanner, large: ModelSpec, dtype: str) -> DraftMemory:
        """Return those of a plan.

        Args:
            draft: of the model or head.
            planner: of its memory.
            large: the model that it drafts for.
            dtype: the compute dtype.
        """
        states, weights = 0, draft.model_spec.weight_bytes
        if split_head(draft.config.model)[0]:
            step, max_running = planner.step.step_tokens, planner.spec.max_running
            of_layers, own = len(head_layers(draft.config, large) or (0,)), draft.model_spec.hidden_size
            # What the model leaves, with a copy; what the head reads of it, with those before, and as its step has it.
            values = step * (2 * of_layers * large.hidden_size + 3 * own)
            # Those that wait, and what recorded steps read of these and leave.
            waiting = (max_running + 1) * WAITING_STATES + GPU_VERIFY_TOKENS
            values += waiting * of_layers * large.hidden_size + (max_running + 1 + GPU_VERIFY_TOKENS) * own
            states = values * (4 if dtype == "float32" else 2)
        return cls(weights, planner.used_bytes - weights, states)

    @property
    def beside_pages(self) -> int:
        """Return what is taken before pages are divided."""
        return self.weights + self.workspace + self.states

    def note(self, name: str) -> str:
        """Return them as a line, for the plan's notes."""
        parts = {"weights": self.weights, "workspace": self.workspace, "hidden states": self.states}
        sizes = [f"{part} {format_bytes(size)}" for part, size in parts.items() if size]
        return f"{name} takes {', '.join(sizes)}, and pages of {format_bytes(self.pages)}"


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
    is_head = bool(split_head(draft.config.model)[0])
    if is_head:
        head_layers(draft.config, model_spec)
    if small.states:
        raise ConfigError(
            f"{draft.config.model} cannot draft: it has layers that keep a recurrent state, and they do not take "
            "tokens back; choose a model without, or --speculative lookup"
        )
    # Rows of an embedding may be padded to another number, so a few more or fewer say nothing.
    if abs(small.vocab_size - model_spec.vocab_size) > (0 if is_head else VOCAB_PADDING):
        what = (
            "a head that was trained for this model" if is_head else "a smaller model with the same tokenizer"
        )
        raise ConfigError(
            f"{draft.config.model} cannot draft for {model_spec.model}: it has {small.vocab_size} tokens, and not "
            f"{model_spec.vocab_size}; choose {what}"
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

    spec = _spec(config)
    if spec is None:
        return None
    info = drafters.get(spec.drafter)
    extra = (vocab_size, spec.tokens is None) if info.is_head else ()
    drafter: Any = drafters.create(info, *parts, *extra)
    return Speculation(
        name=info.name,
        drafter=drafter,
        head=drafter if info.is_head else None,
        needs_model=info.needs_model,
        max_tokens=max_tokens(spec, info, hardware),
        adapts=spec.tokens is None,
        step_tokens=verify_tokens(hardware.is_cpu),
        vocab_size=vocab_size,
        overlaps=not hardware.is_cpu,
    )
