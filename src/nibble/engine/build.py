"""Build an engine from a Config, checking all that can be checked before weights load, and measure KV scales.

Scales are measured by a pool that records how large K and V become in each layer while texts run through the model. One
pass serves every scheme: largest magnitudes of K under each set of transforms follow from per-channel minima and maxima
of K and of its rotation. What scales mean is in cache/scales.py.

Shape suffixes: T tokens, H heads, D values of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nibble import formats
from nibble.attention import backends
from nibble.attention.planner.explain import staging_warnings
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import require_runnable, resolve
from nibble.cache import scales as kv_scales
from nibble.cache.hot_buffer import HotBuffers, host_latents
from nibble.cache.layout import CacheLayout
from nibble.cache.manager import CacheManager
from nibble.cache.pool import PagedPool
from nibble.cache.residency import Residency
from nibble.cache.scales import KVScales, LayerScales, StreamScale
from nibble.config import Config, SamplingParams
from nibble.engine.engine import Engine, StartupReport, check_request
from nibble.engine.error_monitor import ErrorMonitor, ReferenceRows
from nibble.engine.model_runner import ModelRunner, PageTables
from nibble.engine.plan import CachePlan, EnginePlan, plan_engine
from nibble.engine.request import Batch, Request, ScheduledRequest
from nibble.engine.sampler import Sampler
from nibble.engine.scheduler import Scheduler
from nibble.engine.structured_output import Grammars
from nibble.engine.tokenizer import Tokenizer, require_tokenizer
from nibble.engine.warmup import explain_out_of_memory, warm_up
from nibble.errors import ScaleError
from nibble.formats import transforms as transform
from nibble.kernels import cdiv
from nibble.model_spec import LATENT
from nibble.models.checkpoint import download, load, read_scales
from nibble.models.forward import compiled
from nibble.models.hub import locate
from nibble.models.refusals import load_config

CALIBRATION_TOKENS = 8192
"""Most tokens of text that scales are measured on."""
CHUNK = 512
"""Most tokens of a step that computes the logits of all of them."""
HEADROOM = 1.25
"""Scales leave room for values this much larger than any that was measured; a float format loses no precision by it."""
MIN_TOKENS = 64
"""Tokens below which scales are not trusted."""
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "merges.txt")


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of beside weights."""

    plan: EnginePlan
    tokenizer: Tokenizer | None
    texts: Sequence[str] | None
    """Texts to measure KV scales with; None: `scales` are the scales."""
    scales: KVScales


def plan_parts(config: Config, calibrate: Sequence[str] | None = None) -> EngineParts:
    """Plan an engine, and load and check all that needs no weights.

    Args:
        config: what is requested.
        calibrate: texts to measure KV scales with, instead of config.kv_scales.

    Raises:
        ConfigError: the combination or the model cannot be served, or KV scales are missing (ScaleError).
        WeightError: the checkpoint is missing or broken.
        CapacityError: the memory does not suffice.
    """
    engine_plan = plan_engine(config)
    require_runnable(engine_plan.plan)
    tokenizer = tokenizer_of(config.model)
    texts = builtin_texts() if calibrate is None and config.kv_scales == "calibrate" else calibrate
    # Texts come before every other source: scales are measured on them once the weights are loaded.
    scales = kv_scales.NONE if texts is not None else resolve_scales(engine_plan, config.kv_scales)
    if texts is None:
        for store in engine_plan.plan.stores:
            kv_scales.require(store, scales)
    elif tokenizer is None:
        raise ScaleError("calibration reads text, and this checkpoint has no tokenizer; use --kv-scales FILE")
    return EngineParts(engine_plan, tokenizer, texts, scales)


def preflight(configs: Sequence[Config], prompts: Sequence[str], params: SamplingParams) -> None:
    """Raise what LLM() or its generate() would raise at once, before a caller waits for weights to load.

    A prompt that is too long passes: its limit depends on the pages that are left beside the weights.

    Args:
        configs: of one model.
        prompts: texts to be answered.
        params: of all prompts.
    """
    # All configs are of one model, so the first one's tokenizer and vocabulary check the prompts.
    parts = [plan_parts(config) for config in configs]
    vocab_size, tokenizer = parts[0].plan.model_spec.vocab_size, require_tokenizer(parts[0].tokenizer)
    for prompt in prompts:
        check_request(tokenizer.encode(prompt), params, vocab_size, tokenizer)
    if params.grammar is not None:
        Grammars(tokenizer, vocab_size, tokenizer.eos_ids).matcher(params.grammar)


def build(
    config: Config, calibrate: Sequence[str] | None = None, *, poison: bool = False, test: bool = True
) -> tuple[Engine, EnginePlan]:
    """Return a running engine, and its plan.

    Args:
        config: what is requested.
        calibrate: texts to measure KV scales with, instead of config.kv_scales.
        poison: fill the pool with bytes that decode to NaN where a format can, to show reads of unwritten slots.
        test: whether to run the start-up test.

    Raises:
        ConfigError: the combination or the model cannot be served, or KV scales are missing (ScaleError).
        WeightError: the checkpoint is missing or broken.
        CapacityError: the memory does not suffice.
        BackendError: the start-up test failed.
    """
    parts, startup = plan_parts(config, calibrate), StartupReport()
    engine_plan = parts.plan
    startup.notes += filter(None, [engine_plan.warning])
    model, scales = _load(parts, startup)
    plan, budget, device = engine_plan.plan, engine_plan.budget, engine_plan.hardware.device
    with explain_out_of_memory(budget):
        pool = PagedPool(plan.layout, budget.pages, scales, device, frames=budget.frames, poison=poison)
        tier = _tier(engine_plan, pool, scales)
    engine = _engine(engine_plan, model, pool, scales, parts.tokenizer, tier)
    # It takes its memory before the start checks what is left, and runs only after the start.
    error_monitor = _error_monitor(engine_plan, pool.device)
    warm_up(engine.runner, config, budget, startup, engine.scheduler.limit, test=test)
    engine.runner.error_monitor = error_monitor
    startup.notes += staging_warnings(plan, budget.context)
    engine.startup = startup
    return engine, engine_plan


def _load(parts: EngineParts, startup: StartupReport) -> tuple[nn.Module, KVScales]:
    """Load the weights, and measure KV scales where there are texts for it."""
    engine_plan, tokenizer, scales = parts.plan, parts.tokenizer, parts.scales
    config, dtype, device = engine_plan.config, engine_plan.plan.dtype, engine_plan.hardware.device
    with startup.part("weights"):
        model_config = load_config(config.model, config.index_topk)
        model = load(model_config, engine_plan.model_spec, dtype, device)
    if parts.texts is not None and tokenizer is not None:
        with startup.part("calibration"):
            prompts = [tokenizer.encode(text) for text in parts.texts]
            scales = measure_scales(engine_plan, model, prompts, engine_plan.budget.step_tokens)
    return model, scales


def _tier(engine_plan: EnginePlan, pool: PagedPool, scales: KVScales) -> HotBuffers | None:
    """Return the host tier of the plan with its pages, if it has one."""
    tier = engine_plan.plan.tier
    # Without bytes on the host the device has room for all pages, and a tier would have nothing to hold.
    if tier is None or not engine_plan.budget.host:
        return None
    residency = Residency(pool.pages, pool.frames, tier.buffer // engine_plan.plan.page_size)
    host = host_latents(tier.layout, pool.pages, scales, pool.device)
    return HotBuffers(residency, host, pool, engine_plan.config.max_running + 2)


def _error_monitor(engine_plan: EnginePlan, device: torch.device) -> ErrorMonitor | None:
    """Return the error monitor, if the config asks for it."""
    config = engine_plan.config
    if not config.watch_fidelity:
        return None
    with explain_out_of_memory(engine_plan.budget):
        rows = ReferenceRows(engine_plan.plan, engine_plan.model_spec.max_context, device)
    return ErrorMonitor(rows, config.watch_fidelity, config.fidelity_alert, config.seed)


def _engine(
    engine_plan: EnginePlan,
    model: nn.Module,
    pool: PagedPool,
    scales: KVScales,
    tokenizer: Tokenizer | None,
    tier: HotBuffers | None,
) -> Engine:
    config, plan, hardware = engine_plan.config, engine_plan.plan, engine_plan.hardware
    residency = tier.residency if tier else None
    manager = CacheManager(pool.pages, plan.page_size, config.prefix_cache, residency)
    scheduler = Scheduler(
        manager,
        max_running=config.max_running,
        token_budget=engine_plan.budget.step_tokens,
        max_context=engine_plan.model_spec.max_context,
    )
    tables = PageTables(config.max_running + 1, engine_plan.budget.table_width, hardware.device)
    run = compiled(model) if config.compile and not hardware.is_cpu else None
    eos_ids, vocab_size = _eos_ids(model, tokenizer), engine_plan.model_spec.vocab_size
    return Engine(
        scheduler=scheduler,
        runner=ModelRunner(model, plan, pool, adapters(plan), tables, run, tier),
        sampler=Sampler(config.seed),
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        # Pages of another layout or of other scales must never be shared.
        namespace=f"{plan.layout.fingerprint}/{scales.version}",
        vocab_size=vocab_size,
        grammars=Grammars(tokenizer, vocab_size, eos_ids) if tokenizer else None,
        # A CPU computes a step while it is launched, so there is nothing to overlap with.
        overlap=not hardware.is_cpu,
    )


def adapters(plan: Plan) -> dict[str, Any]:
    """Return one adapter for every backend of the plan; its constructor imports the vendor's package."""
    names = {route.backend for group in plan.groups for route in group.routes}
    infos = [backends.get(name) for name in sorted(names)]
    return {info.name: backends.create(info) for info in infos if info.runnable}


def tokenizer_of(model: str) -> Tokenizer | None:
    """Return the model's tokenizer; None for a local checkpoint that has no tokenizer files."""
    path = Path(locate(model))
    if path.exists() and not any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
        return None
    return Tokenizer(str(path) if path.exists() else model)


def resolve_scales(cache_plan: CachePlan, source: str) -> KVScales:
    """Return KV scales; none are looked for where the plan needs none.

    Args:
        cache_plan: the plan, and the model that it is for.
        source: `auto` from the checkpoint, `one`, or a file.

    Raises:
        ScaleError: the file cannot be read, or has no scales of this model.
        WeightError: the checkpoint is missing or broken.
    """
    if source == "one":
        return kv_scales.ONE
    if source != "auto":
        return kv_scales.load(Path(source), cache_plan.model_spec.layers)
    if not any(map(kv_scales.needs_scales, cache_plan.plan.stores)):
        return kv_scales.NONE
    return read_scales(download(cache_plan.config.model))


def _eos_ids(model: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    eos_ids: set[int] = set(tokenizer.eos_ids if tokenizer else ())
    # Some models name a further end token, that of a turn, in generation_config alone.
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        eos_ids |= set(ids) if isinstance(ids, Iterable) else set() if ids is None else {ids}
    return frozenset(eos_ids)


def measure_scales(
    cache_plan: CachePlan, model: nn.Module, prompts: Iterable[Sequence[int]], step_tokens: int
) -> KVScales:
    """Measure KV scales: run prompts through the model over an unquantised cache.

    Args:
        cache_plan: the plan, and the model that it is for.
        model: with Nibble's attention.
        prompts: token ids; CALIBRATION_TOKENS of them at most are used.
        step_tokens: most tokens of a step.

    Raises:
        ScaleError: there are too few tokens.
    """
    plain_format = formats.plain(cache_plan.plan.dtype).name
    # Ranges are the model's own only if the cache that they are measured over rounds nothing.
    config = replace(cache_plan.config, kv_format=plain_format, kv_layers="", hisparse="")
    plan = resolve(config, cache_plan.model_spec, cache_plan.hardware, backends.available_backends())
    length = min(cache_plan.model_spec.max_context, CALIBRATION_TOKENS)
    pages = cdiv(length, plan.page_size)
    recorder = Recorder(plan.layout, pages, cache_plan.hardware.device)
    tables = PageTables(1, pages, cache_plan.hardware.device)
    runner = ModelRunner(model, plan, recorder, adapters(plan), tables)
    # The recorder sees writes, and a page from the prefix cache is not written again.
    manager = CacheManager(pages, plan.page_size, prefix_cache=False)
    num_tokens = 0
    for prompt in prompts:
        ids = prompt[: CALIBRATION_TOKENS - num_tokens]
        # A text that is longer than the context is measured as several prompts.
        for start in range(0, len(ids), length):
            run_prompt(runner, manager, ids[start : start + length], step_tokens)
        num_tokens += len(ids)
    if num_tokens < MIN_TOKENS:
        raise ScaleError(f"calibration needs at least {MIN_TOKENS} tokens of text, and got {num_tokens}")
    return recorder.scales(f"calibration on {num_tokens} tokens")


def run_prompt(runner: ModelRunner, manager: CacheManager, ids: Sequence[int], chunk: int) -> list[Tensor]:
    """Return teacher-forced logits [T, V] of `ids`, chunk by chunk, over pages of their own.

    Args:
        runner: of the model.
        manager: of the runner's pool, with room for all tokens.
        ids: the prompt.
        chunk: most tokens of a step, of which CHUNK at most are used.
    """
    # The logits of all tokens of a step are computed at once.
    chunk = min(chunk, CHUNK)
    request = Request("score", ids)
    # The logits of every token are needed, so no page may come from the prefix cache.
    request.lease = manager.open(request.token_ids, "", private=True)
    logits = []
    try:
        manager.reserve(request.lease, len(ids))
        for start in range(0, len(ids), chunk):
            # With a host tier every chunk attends over tokens that have been there.
            manager.round_trip(request.lease)
            item = ScheduledRequest.next_chunk(request, min(chunk, len(ids) - start))
            logits.append(runner.forward(Batch((item,)), every=True))
            manager.commit(request.lease, request.token_ids, item.end)
    finally:
        manager.release(request.lease)
    return logits


class _Range:
    """Per-channel minimum, maximum and sum of [T, H, D] values."""

    def __init__(self) -> None:
        self.low = self.high = self.total = torch.zeros(())
        self.count = 0

    def add(self, x_THD: Tensor) -> None:
        x_THD = x_THD.float()
        # A float32 sum over thousands of tokens would cost the mean its last digits.
        low, high, total = x_THD.amin(0), x_THD.amax(0), x_THD.double().sum(0)
        if self.count:
            low, high, total = self.low.minimum(low), self.high.maximum(high), self.total + total
        self.low, self.high, self.total = low, high, total
        self.count += len(x_THD)

    @property
    def mean(self) -> Tensor:
        return (self.total / self.count).float()

    def amax(self, shift: Tensor | float = 0.0) -> float:
        """Return the largest magnitude after `shift` is subtracted."""
        return float(torch.maximum(self.high - shift, shift - self.low).max())


class Recorder(PagedPool):
    """A pool that records the ranges of what is written to it."""

    def __init__(self, layout: CacheLayout, pages: int, device: str) -> None:
        super().__init__(layout, pages, kv_scales.NONE, device)
        self._ranges: dict[tuple[int, str], _Range] = {}

    def write(self, layer: int, streams: Mapping[str, Tensor], slot_mapping_T: Tensor) -> None:
        """Record the values, and store them.

        Args:
            layer: whose values these are.
            streams: [T, H, D] by name.
            slot_mapping_T: where they are stored.
        """
        for name, x_THD in streams.items():
            self._ranges.setdefault((layer, name), _Range()).add(x_THD)
            # The largest value of rotated keys does not follow from that of keys, so both are recorded.
            if name == "k":
                rotated = transform.get("rot").key(x_THD, None)
                self._ranges.setdefault((layer, "k+rot"), _Range()).add(rotated)
        super().write(layer, streams, slot_mapping_T)

    def scales(self, source: str) -> KVScales:
        """Return the scales of all layers.

        Raises:
            ScaleError: nothing was written, or nothing but zeros.
        """
        layers = {layer: self._layer(layer) for layer, name in self._ranges if name == "k"}
        # Transforms are for keys alone, so a latent has one scale.
        latents = {
            layer: LayerScales(_scales({LATENT: values.amax()}, layer))
            for (layer, name), values in self._ranges.items()
            if name == LATENT
        }
        return KVScales(source, {**layers, **latents})

    def _layer(self, layer: int) -> LayerScales:
        k, v, rotated = (self._ranges[layer, name] for name in ("k", "v", "k+rot"))
        mean_HD = k.mean
        amax = {
            "k": k.amax(),
            "v": v.amax(),
            "k+rot": rotated.amax(),
            "k+kmean": k.amax(mean_HD),
            # A rotation is linear, so the rotated mean is the mean of rotated keys.
            "k+kmean+rot": rotated.amax(transform.get("rot").key(mean_HD, None)),
        }
        return LayerScales(_scales(amax, layer), tuple(tuple(head) for head in mean_HD.tolist()))


def _scales(amax: Mapping[str, float], layer: int) -> dict[str, StreamScale]:
    if not all(0 < value < float("inf") for value in amax.values()):
        raise ScaleError(f"calibration saw {amax} as the largest values of layer {layer}; is the text empty?")
    return {name: StreamScale(value * HEADROOM, 1.0) for name, value in amax.items()}


def builtin_texts(characters: int = 1 << 16) -> Sequence[str]:
    """Return English and code that comes with every Python: the language reference of `help()`."""
    from pydoc_data.topics import topics

    return ["\n\n".join(topics[name] for name in sorted(topics))[:characters]]
