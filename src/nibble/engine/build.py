"""Putting an engine together: from a Config to a running Engine, checking all that can be checked before weights load.

Owns build(). The only place that knows every part; decides nothing itself. Must not know of HTTP or the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nibble import formats
from nibble.attention import backends
from nibble.attention.planner.explain import staging_warnings
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import require_runnable, resolve
from nibble.cache import scales as kv_scales
from nibble.cache.manager import CacheManager
from nibble.cache.offload.host_pool import HostPool
from nibble.cache.offload.hot_buffer import HotBuffers
from nibble.cache.offload.residency import Residency
from nibble.cache.pool import PagedPool
from nibble.cache.scales import KVScales
from nibble.config import Config
from nibble.engine.batch import Batch, ScheduledRequest
from nibble.engine.calibration import MIN_TOKENS, Recorder, builtin_texts
from nibble.engine.engine import Engine
from nibble.engine.error_monitor import ErrorMonitor
from nibble.engine.model_runner import ModelRunner
from nibble.engine.page_tables import PageTables
from nibble.engine.plan import Design, EnginePlan, plan_engine
from nibble.engine.reference_rows import ReferenceRows
from nibble.engine.request import Request
from nibble.engine.sampler import Sampler
from nibble.engine.scheduler import Scheduler
from nibble.engine.structured_output import Grammars
from nibble.engine.tokenizer import Tokenizer
from nibble.engine.warmup import StartupReport, out_of_memory_explained, warm_up
from nibble.errors import ScaleError
from nibble.model_spec import INDEX
from nibble.models import kv_scales as checkpoint_scales
from nibble.models.checkpoint import download, load
from nibble.models.forward import compiled
from nibble.models.hub import locate
from nibble.models.refusals import load_config

CALIBRATION_TOKENS = 8192
CHUNK = 512
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "merges.txt")


@dataclass(frozen=True)
class EngineParts:
    """What an engine consists of beside weights."""

    plan: EnginePlan
    tokenizer: Tokenizer | None
    texts: Sequence[str] | None
    """Texts to measure KV scales with, None where `scales` has them."""
    scales: KVScales


def plan_parts(config: Config, calibrate: Sequence[str] | None = None) -> EngineParts:
    """Return all that can be prepared and checked before weights load.

    Raises:
        ConfigError: The combination cannot be served here, or scales are missing.
        WeightError: The checkpoint is missing or broken.
        CapacityError: The memory does not suffice.
    """
    engine_plan = plan_engine(config)
    require_runnable(engine_plan.plan)
    tokenizer = tokenizer_of(config.model)
    texts = builtin_texts() if calibrate is None and config.kv_scales == "calibrate" else calibrate
    scales = kv_scales.NONE if texts is not None else resolve_scales(engine_plan, config.kv_scales)
    if texts is None:
        for store in engine_plan.plan.stores:
            kv_scales.require(store, scales)
    elif tokenizer is None:
        raise ScaleError("calibration reads text, and this checkpoint has no tokenizer; use --kv-scales FILE")
    return EngineParts(engine_plan, tokenizer, texts, scales)


def build(
    config: Config,
    calibrate: Sequence[str] | None = None,
    *,
    poison: bool = False,
    tested: bool = True,
) -> tuple[Engine, EnginePlan]:
    """A running engine. calibrate: texts to measure KV scales with, instead of config.kv_scales.

    poison: fill the pool with bytes that decode to NaN where a format can, to show reads of unwritten slots. tested:
    make the start-up test.
    """
    ready, startup = plan_parts(config, calibrate), StartupReport()
    made, tokenizer, texts, scales = ready.plan, ready.tokenizer, ready.texts, ready.scales
    startup.notes += filter(None, [made.warning])
    with startup.part("weights"):
        model = load(
            load_config(config.model, config.index_topk),
            made.model_spec,
            made.plan.dtype,
            made.hardware.device,
        )
    if texts is not None and tokenizer is not None:
        with startup.part("calibration"):
            prompts = [tokenizer.encode(text) for text in texts]
            scales = measure_scales(made, model, prompts, made.budget.step_tokens)
    with out_of_memory_explained(made.budget):
        frames, device = made.budget.frames, made.hardware.device
        pool = PagedPool(made.plan.layout, made.budget.pages, scales, device, frames=frames, poison=poison)
        tier = _tier(made, pool, scales)
    engine = _engine(made, model, pool, scales, tokenizer, tier)
    watch = _watch(made)  # before the start looks at the memory that is left, and used after it
    warm_up(engine.runner, config, made.budget, startup, engine.scheduler.limit, tested=tested)
    engine.runner.error_monitor = watch
    startup.notes += staging_warnings(made.plan, made.budget.context)
    engine.startup = startup
    return engine, made


def _tier(made: EnginePlan, pool: PagedPool, scales: KVScales) -> HotBuffers | None:
    """The host tier of the plan, if it has one, and pages for it."""
    tier = made.plan.tier
    if tier is None or not made.budget.host:
        return None
    residency = Residency(pool.pages, pool.frames, tier.buffer // made.plan.page_size)
    host = HostPool(tier.layout, pool.pages, scales, pool.device)
    index_layers = [layer for layer, view in pool.views.items() if INDEX in view.streams]
    return HotBuffers(residency, host, pool, index_layers, made.config.max_running + 2)


def _watch(made: EnginePlan) -> ErrorMonitor | None:
    """What compares the cache with rows in the model's own precision, if the config asks for it."""
    config = made.config
    if not config.watch_fidelity:
        return None
    with out_of_memory_explained(made.budget):
        rows = ReferenceRows(made.plan, made.model_spec.max_context, torch.device(made.hardware.device))
    return ErrorMonitor(rows, config.watch_fidelity, config.fidelity_alert, config.seed)


def _engine(
    made: EnginePlan,
    model: nn.Module,
    pool: PagedPool,
    scales: KVScales,
    tokenizer: Tokenizer | None,
    tier: HotBuffers | None,
) -> Engine:
    config, plan = made.config, made.plan
    residency = tier.residency if tier else None
    manager = CacheManager(pool.pages, plan.page_size, config.prefix_cache, residency)
    scheduler = Scheduler(
        manager,
        max_running=config.max_running,
        token_budget=made.budget.step_tokens,
        max_context=made.model_spec.max_context,
    )
    tables = PageTables(config.max_running + 1, made.budget.table_width, made.hardware.device)
    run = compiled(model) if config.compile and not made.hardware.is_cpu else None
    eos_ids, vocabulary = _eos(model, tokenizer), made.model_spec.vocab_size
    return Engine(
        scheduler=scheduler,
        runner=ModelRunner(model, plan, pool, adapters(plan), tables, run, tier),
        sampler=Sampler(config.seed),
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        namespace=f"{plan.layout.fingerprint}/{scales.version}",
        vocab_size=vocabulary,
        grammars=Grammars(tokenizer, vocabulary, eos_ids) if tokenizer else None,
        overlap=not made.hardware.is_cpu,
    )


def adapters(plan: Plan) -> dict[str, Any]:
    """One adapter for every backend of the plan; a vendor package is imported here, in its constructor."""
    names = {route.backend for group in plan.groups for route in group.routes}
    infos = [backends.get(name) for name in sorted(names)]
    return {info.name: backends.create(info) for info in infos if info.runnable}


def tokenizer_of(model: str) -> Tokenizer | None:
    """The model's tokenizer; None for a local checkpoint that has no tokenizer files."""
    path = Path(locate(model))
    if path.exists() and not any(found for name in TOKENIZER_FILES for found in path.glob(name)):
        return None
    return Tokenizer(str(path) if path.exists() else model)


def resolve_scales(made: Design, source: str) -> KVScales:
    """Scales as `source` says: `auto` from the checkpoint, `one`, or a file; raises ScaleError and WeightError.

    None are looked for where the plan needs none.
    """
    if source == "one":
        return kv_scales.ONE
    if source != "auto":
        return kv_scales.load(Path(source), made.model_spec.layers)
    return (
        checkpoint_scales.read(download(made.config.model))
        if any(map(kv_scales.needs_scales, made.plan.stores))
        else kv_scales.NONE
    )


def _eos(model: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    found: set[int] = set(tokenizer.eos_ids if tokenizer else ())
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, Iterable) else set() if ids is None else {ids}
    return frozenset(found)


def measure_scales(
    made: Design, model: nn.Module, prompts: Iterable[Sequence[int]], step_tokens: int
) -> KVScales:
    """KV scales from running token sequences through the model over an unquantised cache. Raises ScaleError."""
    plain = resolve(_plain(made), made.model_spec, made.hardware, backends.available_backends())
    length = min(made.model_spec.max_context, CALIBRATION_TOKENS)
    pages = -(-length // plain.page_size)
    recorder = Recorder(plain.layout, pages, made.hardware.device)
    runner = ModelRunner(model, plain, recorder, adapters(plain), PageTables(1, pages, made.hardware.device))
    manager = CacheManager(pages, plain.page_size, prefix_cache=False)
    seen = 0
    for prompt in prompts:
        room = prompt[: CALIBRATION_TOKENS - seen]
        for start in range(0, len(room), length):
            run_prompt(runner, manager, room[start : start + length], step_tokens)
        seen += len(room)
    if seen < MIN_TOKENS:
        raise ScaleError(f"calibration needs at least {MIN_TOKENS} tokens of text, and got {seen}")
    return recorder.scales(f"calibration on {seen} tokens")


def _plain(made: Design) -> Config:
    return replace(made.config, kv_format=formats.plain(made.plan.dtype).name, kv_layers="", hisparse="")


def run_prompt(
    runner: ModelRunner, manager: CacheManager, ids: Sequence[int], chunk: int
) -> list[torch.Tensor]:
    """Teacher-forced logits [T, V] of `ids`, chunk by chunk, over pages of their own. With a host tier every chunk
    looks at what has been there.

    manager: of the runner's pool, with room for all. chunk: most tokens of a step, though no more than CHUNK, as the
    logits of all of them are computed at once.
    """
    chunk = min(chunk, CHUNK)
    request = Request("score", ids)
    request.lease = manager.open(request.token_ids, "", private=True)
    found = []
    try:
        manager.reserve(request.lease, len(ids))
        for start in range(0, len(ids), chunk):
            manager.round_trip(request.lease)
            work = ScheduledRequest.next_chunk(request, min(chunk, len(ids) - start))
            found.append(runner.forward(Batch((work,)), every=True))
            manager.commit(request.lease, request.token_ids, work.end)
    finally:
        manager.release(request.lease)
    return found
