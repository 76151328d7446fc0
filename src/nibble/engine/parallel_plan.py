"""What is planned of a model that is divided among GPUs, and what cannot be had with it yet. It loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nibble.attention.planner.plan import graph_sizes
from nibble.attention.planner.step_memory import CPU_STEP_TOKENS, GPU_STEP_TOKENS
from nibble.cache.layout import CacheLayout
from nibble.config import Config
from nibble.drafts import GPU_VERIFY_TOKENS
from nibble.errors import ConfigError
from nibble.hardware import Hardware
from nibble.model_spec import ModelSpec
from nibble.models.parallel_ways import ATTENTION, EXPERTS, Ways
from nibble.models.quantization import Handling, Weights

SIZES = (2, 4, 8)
"""Numbers of GPUs that a plan proposes."""
COLLECTIVES = 768 << 20
"""Bytes that NCCL, and memory that ranks write to, take of each GPU."""


def of_rank(hardware: Hardware, size: int) -> Hardware:
    """Return what one of `size` ranks has of the machine: a GPU, or its part of a CPU's memory."""
    if size == 1:
        return hardware
    memory = hardware.memory // size if hardware.is_cpu else hardware.memory - COLLECTIVES
    return replace(hardware, memory=memory, host=hardware.host and hardware.host // size)


def with_rows(hardware: Hardware, config: Config, model_spec: ModelSpec) -> Hardware:
    """Return what a rank has left beside the rows that it gathers, where ranks attend for requests of their own."""
    if not config.attention_dp:
        return hardware
    step_tokens = config.token_budget or (CPU_STEP_TOKENS if hardware.is_cpu else GPU_STEP_TOKENS)
    # As if one rank had all of them: the parts of all ranks are gathered in equal sizes.
    values = config.tp * step_tokens * model_spec.hidden_size
    if not hardware.is_cpu:
        # Logits of steps over buffers, recorded or not: as they are kept, of which those of one rank are in every plan,
        # and where they are gathered and put side by side.
        rows = max(graph_sizes(config.max_running)[-1], GPU_VERIFY_TOKENS if config.drafts else 0)
        values += (3 * config.tp - 1) * rows * model_spec.vocab_size
    return replace(hardware, memory=hardware.memory - values * (4 if hardware.is_cpu else 2))


def ways(config: Config) -> Ways:
    """Return how a model is divided; raise ConfigError where there is nothing to divide it among."""
    for is_on, option in (
        (config.expert_parallel, "--expert-parallel"),
        (config.attention_dp, "--attention-dp"),
    ):
        if is_on and config.tp == 1:
            raise ConfigError(f"{option} divides a model among GPUs: say how many by --tp N, or leave it out")
    return Ways.of(config)


def check(config: Config, weights: Weights | None, model_spec: ModelSpec) -> None:
    """Raise ConfigError for what is not served over several GPUs.

    Args:
        config: what is requested.
        weights: what becomes of quantised weights.
        model_spec: of a rank.
    """
    if config.tp == 1:
        return
    is_foreign = weights is not None and weights.handling is Handling.TRANSFORMERS
    refusals = (
        (
            config.compile_cache, "--compile-cache",
            "compiled code of a rank is not kept; kernels that Triton compiled are, without this option",
        ),
        (
            bool(config.watch_fidelity), "--watch-fidelity",
            "one rank sees its own heads alone; nibble eval and nibble certify measure with --tp",
        ),
        (
            is_foreign, "such weights",
            "only Transformers unpacks them, as a whole; choose a checkpoint in another format, or quantise one in "
            "BF16 as it loads (--weights)",
        ),
    )  # fmt: skip
    for is_asked, what, why in refusals:
        if is_asked:
            raise ConfigError(f"{what} with --tp {config.tp} is not served: {why}")
    if config.attention_dp:
        _check_requests(config, model_spec)


def _check_requests(config: Config, model_spec: ModelSpec) -> None:
    """Raise ConfigError for what is not served where each GPU attends for requests of its own."""
    refusals = (
        (
            bool(config.hisparse),
            "--hisparse",
            "host tiers have one schedule of pages, and not one of each GPU",
        ),
        (
            bool(model_spec.states),
            "a model with recurrent states",
            "states of each GPU's requests are not kept yet",
        ),
    )
    for is_asked, what, why in refusals:
        if is_asked:
            raise ConfigError(f"{what} with --attention-dp is not served: {why}")


def memory_notes(config: Config, tokens: int) -> tuple[str, ...]:
    """Return how many tokens all GPUs keep, where each keeps those of its own requests.

    Args:
        config: what is requested.
        tokens: that one of them has room for.
    """
    if not config.attention_dp:
        return ()
    return (
        f"all {config.tp} GPUs keep {config.tp * tokens:,} tokens, each {tokens:,} of its own requests; one request "
        f"has at most {tokens:,}",
    )


def require_one_gpu(config: Config, what: str) -> None:
    """Raise ConfigError for what runs the model in the engine's process alone, and would wait for the other ranks."""
    if config.tp > 1:
        raise ConfigError(
            f"{what} with --tp {config.tp} is not served: it needs the whole model on one GPU, or in the memory of the "
            "host (--device cpu); what it writes is served with --tp"
        )


def whole_layout(layout: CacheLayout, model_spec: ModelSpec) -> CacheLayout:
    """Return what all ranks store of a token together, of what one of them does."""
    if model_spec.tp == 1:
        return layout
    layers = (
        replace(
            layer,
            streams=tuple(
                replace(entry, stream=replace(entry.stream, heads=model_spec.kv_heads[layer.layer]))
                if entry.stream.name in ("k", "v")
                else entry
                for entry in layer.streams
            ),
        )
        for layer in layout.layers
    )
    return replace(layout, layers=tuple(layers))


def notes(model_spec: ModelSpec) -> Iterator[str]:
    """Yield what users should know of a divided model."""
    if model_spec.tp == 1:
        return
    if ATTENTION in model_spec.ways:
        yield (
            f"data-parallel attention: each of {model_spec.tp} GPUs attends for requests of its own, with all heads, "
            "and keeps their cache alone"
        )
    yield (
        f"tensor parallelism: each layer is divided among {model_spec.tp} GPUs; heads, bytes of weights and tokens "
        "are those of one of them"
    )
    if EXPERTS in model_spec.ways:
        yield "expert parallelism: each GPU has an equal number of whole experts"
    by_requests = ATTENTION in model_spec.ways
    own = {stream.heads for group in model_spec.groups for stream in group.streams}
    if (
        any(heads and heads < model_spec.tp for heads in model_spec.kv_heads)
        and own == {1}
        and not by_requests
    ):
        most = max(model_spec.kv_heads)
        what = "latents" if most == 1 else f"KV heads ({most})"
        yield f"{what} are kept by several GPUs, as there are fewer than {model_spec.tp} of a token"
    if model_spec.replicated:
        yield f"every GPU computes all of: {', '.join(model_spec.replicated)}"
