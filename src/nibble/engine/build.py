"""Build an engine from a Config, checking all that can be checked before weights load.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn

from nibble import threads
from nibble.attention.planner.explain import staging_warnings
from nibble.attention.planner.resolve import require_runnable
from nibble.attention.planner.state_memory import SPARE_SLOTS
from nibble.attention.window import ExactCache
from nibble.bytecode import keep_bytecode
from nibble.cache import scales as kv_scales
from nibble.cache.hot_buffer import HotBuffers, host_latents
from nibble.cache.manager import CacheManager
from nibble.cache.pool import PagedPool
from nibble.cache.rank_managers import RankManagers
from nibble.cache.residency import Residency
from nibble.cache.scales import KVScales
from nibble.cache.state_pool import StatePool
from nibble.config import Config, SamplingParams
from nibble.engine import certificate_lookup, head_start, parallel_plan
from nibble.engine.cache_books import cache_manager
from nibble.engine.calibration import CALIBRATION_TOKENS, builtin_texts, measure, tokens_of_start
from nibble.engine.draft_steps import HeadForward
from nibble.engine.engine import Engine, check_request
from nibble.engine.error_monitor import ErrorMonitor, ReferenceRows
from nibble.engine.memory_check import explain_out_of_memory
from nibble.engine.model_runner import ModelRunner, adapters
from nibble.engine.page_tables import PageTables
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.engine.rank_hosts import RankHosts
from nibble.engine.ranks import Rank, Ranks, Start
from nibble.engine.request import Batch, Request, ScheduledRequest
from nibble.engine.sampler import Sampler
from nibble.engine.scale_source import AUTO, GIVEN_TEXTS, Origin, ScaleSource, find_source, resolve_scales
from nibble.engine.scheduler import Scheduler
from nibble.engine.speculation_plan import speculation
from nibble.engine.startup_report import StartupReport
from nibble.engine.structured_output import Grammars
from nibble.engine.tokenizer import Tokenizer, eos_ids_of, require_tokenizer, tokenizer_of
from nibble.engine.warmup import most_rows, warm_up
from nibble.errors import ConfigError, ScaleError
from nibble.hardware import Hardware
from nibble.kernels import linear
from nibble.kernels.collectives import broadcast
from nibble.models import compile_cache, invariant, parallel
from nibble.models.checkpoint import download, load, prepare_model
from nibble.models.checkpoint_scales import has_weights
from nibble.models.forward import Forward, compiled, plain_invariant
from nibble.models.generation_config import SamplingDefaults, sampling_defaults
from nibble.models.heads import load_config
from nibble.models.hub import local_folder, pinned, split_head
from nibble.models.linear import check_kernels
from nibble.models.observe import context_limits
from nibble.models.parallel_experts import choose_own
from nibble.models.parallel_layers import drop_repeated_biases, join
from nibble.models.parallel_rows import ROWS, Rows, gather_rows
from nibble.models.parallel_ways import Ways
from nibble.models.quantization import Handling, require_readable
from nibble.spec import CacheSpec
from nibble.threads import LoadMeter, usable_cpus

CHUNK = 512
"""Most tokens of a step that computes the logits of all of them."""
STEP_LOGITS = 1 << 25
"""Most logits of a step for log-probabilities of prompts: 128 MiB in float32, which the memory plan's reserve has."""


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of beside weights."""

    plan: EnginePlan
    tokenizer: Tokenizer | None
    sampling_defaults: SamplingDefaults
    source: ScaleSource
    texts: Sequence[str] | None = None
    """Texts to measure KV scales with; None: `scales` are the scales."""
    scales: KVScales = kv_scales.NONE
    target: Engine | None = None
    """Of the model that a head drafts for, where this is one."""


def plan_parts(
    config: Config, calibrate: Sequence[str] | None = None, target: Engine | None = None
) -> EngineParts:
    """Plan an engine, and load and check all that needs no weights.

    Args:
        config: what is requested.
        calibrate: texts to measure KV scales with, instead of config.kv_scales.
        target: of the model that a head drafts for, if this is one.

    Raises:
        ConfigError: the combination or the model cannot be served, or KV scales are missing (ScaleError).
        WeightError: the checkpoint is missing or broken.
        CapacityError: the memory does not suffice.
    """
    engine_plan = _runnable(plan_engine(config, calibrated=calibrate is not None))
    # From here on weights are needed.
    had_weights = has_weights(local_folder(engine_plan.config.model))
    model = pinned(config, weights=True).model
    if not had_weights and config.kv_scales == AUTO and calibrate is None:
        download(model)
        # KV scales that it brings have a say in the transforms.
        engine_plan = _runnable(plan_engine(config))
    defaults = sampling_defaults(model, config.generation_config)
    own_tokenizer = partial(tokenizer_of, model, config.chat_template, config.trust_remote_code)
    tokenizer = target.tokenizer if target else own_tokenizer()
    _check_tokenizers(engine_plan, tokenizer)
    source = GIVEN_TEXTS if calibrate is not None else find_source(engine_plan, download)
    scales = resolve_scales(engine_plan, source) if source.origin is not Origin.MEASURED else None
    if config.require_quality:
        # Its fingerprint is taken of the weights.
        download(model)
    certificate_lookup.require(engine_plan, scales)
    if scales is not None:
        return EngineParts(engine_plan, tokenizer, defaults, source, scales=scales, target=target)
    if tokenizer is None:
        raise ScaleError("calibration reads text, and this checkpoint has no tokenizer; use --kv-scales FILE")
    texts = builtin_texts() if calibrate is None else calibrate
    return EngineParts(engine_plan, tokenizer, defaults, source, texts, target=target)


def _check_tokenizers(engine_plan: EnginePlan, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError where a model drafts whose tokens are other ones."""
    draft = engine_plan.draft
    if draft is None or tokenizer is None or split_head(draft.model)[0]:
        return
    other = tokenizer_of(pinned(draft).model, trust_remote_code=draft.trust_remote_code)
    if other is not None and not tokenizer.is_like(other):
        raise ConfigError(
            f"{draft.model} cannot draft for {engine_plan.config.model}: their tokenizers differ; choose a smaller "
            "model with the same one"
        )


def preflight(
    configs: Sequence[Config], prompts: Sequence[str], options: Mapping[str, Any]
) -> SamplingParams:
    """Raise what LLM() or its generate() would raise at once, before a caller waits for weights to load.

    A prompt that is too long passes: its limit depends on the pages that are left beside the weights.

    Args:
        configs: of one model.
        prompts: texts to be answered.
        options: fields of SamplingParams, of all prompts.

    Returns:
        The parameters of all prompts, with the model's defaults.
    """
    # All configs are of one model, so the first one's tokenizer and vocabulary check the prompts.
    parts = [plan_parts(config) for config in configs]
    params = parts[0].sampling_defaults.params(**options)
    vocab_size, tokenizer = parts[0].plan.model_spec.vocab_size, require_tokenizer(parts[0].tokenizer)
    for prompt in prompts:
        check_request(tokenizer.encode(prompt), params, vocab_size, tokenizer)
    if params.grammar is not None:
        Grammars(tokenizer, vocab_size, tokenizer.eos_ids).matcher(params.grammar)
    return params


def _runnable(engine_plan: EnginePlan) -> EnginePlan:
    """Return the plan; raise ConfigError where it cannot run, or its weights cannot be read."""
    require_runnable(engine_plan.plan)
    require_readable(engine_plan.model_spec.stored_weights)
    return engine_plan


@keep_bytecode()
def build(
    config: Config,
    calibrate: Sequence[str] | None = None,
    *,
    poison: bool = False,
    test: bool = True,
    target: Engine | None = None,
) -> tuple[Engine, EnginePlan]:
    """Return a running engine, and its plan.

    Args:
        config: what is requested.
        calibrate: texts to measure KV scales with, instead of config.kv_scales.
        poison: fill the pool with bytes that decode to NaN where a format can, to show reads of unwritten slots.
        test: whether to run the start-up test.
        target: of the model that a head drafts for, if this is one.

    Raises:
        ConfigError: the combination or the model cannot be served, or KV scales are missing (ScaleError).
        WeightError: the checkpoint is missing or broken.
        CapacityError: the memory does not suffice.
        BackendError: the start-up test failed.
    """
    # It begins before the model is loaded, so that there is something to measure.
    meter = LoadMeter()
    startup = StartupReport()
    with startup.part("plan"):
        parts = plan_parts(config, calibrate, target)
    build_parts = partial(_build, parts, startup, meter, poison=poison, test=test)
    if config.tp == 1:
        return build_parts(None), parts.plan
    hosts = RankHosts.of_environment()
    here = config.tp // len(hosts.addresses) if hosts else config.tp
    if not parts.plan.hardware.is_cpu and here > torch.cuda.device_count():
        raise ConfigError(
            f"--tp {config.tp} needs {here} GPUs here, and this machine has {torch.cuda.device_count()}"
        )
    if not parts.plan.hardware.is_cpu and torch.distributed.is_initialized():
        raise ConfigError(
            f"--tp {config.tp}: GPUs of this process share a model already, or it uses torch.distributed itself; close "
            "the other model, or start this one in a process of its own"
        )
    elsewhere = (hosts.programs(config.tp), hosts.places(config.tp)) if hosts else ()
    ranks = Ranks(config.tp, parts.plan.hardware.device, *elsewhere)
    try:
        return build_parts(ranks), parts.plan
    except ConfigError:
        # Where it shows on all ranks alike, who says it first must not matter.
        raise
    except Exception as error:
        reason = ranks.explained(error)
        if reason is error:
            raise
        raise reason from error
    finally:
        # None is left of a start that failed.
        if not ranks.is_serving:
            ranks.close()


def _build(
    parts: EngineParts,
    startup: StartupReport,
    meter: LoadMeter,
    ranks: Ranks | None,
    *,
    poison: bool,
    test: bool,
) -> Engine:
    """Return a running engine; see build()."""
    engine_plan, config = parts.plan, parts.plan.config
    startup.meaning = engine_plan.plan.meaning
    startup.notes += filter(None, [engine_plan.warning, *engine_plan.plan.default_notes])
    startup.notes += parallel_plan.memory_notes(config, engine_plan.budget.tokens)
    if not engine_plan.hardware.is_cpu:
        # Loading tries kernels already.
        with startup.part("compiler"):
            compile_cache.begin(config.compile, config.compile_cache)
    here = ranks.start(partial(_start_message, parts, poison)) if ranks else None
    startup.notes += filter(None, [getattr(here.group, "note", "")] if here else [])
    model, scales = _load(parts, startup, meter, here)
    # Again, because scales that were measured now are another matter than those that were to be measured.
    startup.certificate = certificate_lookup.require(engine_plan, scales)
    if here:
        spec, layout = engine_plan.model_spec, engine_plan.plan.layout
        scales = kv_scales.part(scales, layout, spec.kv_heads, *astuple(here.shard))
    plan, budget, device = engine_plan.plan, engine_plan.budget, engine_plan.hardware.device
    with explain_out_of_memory(budget):
        exact = _exact_cache(engine_plan, poison)
        pool = PagedPool(
            plan.layout, budget.pages, scales, device, frames=budget.frames, poison=poison,
            exact=exact.pool if exact else None,
        )  # fmt: skip
        tier = _tier(engine_plan, pool, scales)
        states = _state_pool(engine_plan, poison)
    engine = _engine(engine_plan, model, pool, scales, parts.tokenizer, tier, exact, states, parts.target)
    engine.ranks = engine.runner.followers = ranks
    # It takes its memory before the start checks what is left, and runs only after the start.
    error_monitor = _error_monitor(engine_plan, pool.device)
    warm_up(engine.runner, config, budget, startup, engine.scheduler.limit, test=test)
    engine.runner.error_monitor = error_monitor
    startup.notes += staging_warnings(plan, budget.context)
    engine.startup, engine.sampling_defaults = startup, parts.sampling_defaults
    drafter = _draft_model(engine_plan, engine, test=test)
    engine.speculation = speculation(config, engine_plan.hardware, engine.vocab_size, *drafter)
    if engine.speculation and (head := engine.speculation.head):
        engine.scheduler.reusable = lambda request: min(request.num_reusable_tokens, head.reusable(request))
        if engine.speculation.overlaps:
            head.tables = engine.runner.tables
    if ranks:
        ranks.serve()
    return engine


def _start_message(parts: EngineParts, poison: bool, port: int) -> Start:
    """Return what the other ranks need to do as this one does."""
    config, is_cpu = parts.plan.config, parts.plan.hardware.is_cpu
    # They share the CPUs that this process may use, of which replicas have a part each.
    all_threads = config.threads or min(torch.get_num_threads(), usable_cpus())
    hosts = RankHosts.of_environment()
    ranks_here = config.tp // (len(hosts.addresses) if hosts else 1)
    threads = max(1, all_threads // ranks_here) if is_cpu else None
    if threads:
        torch.set_num_threads(threads)
    return Start(parts.plan, _prompts(parts), _most_tokens(parts), parts.scales, port, threads, poison)


def follow(start: Start, rank: Rank) -> ModelRunner:
    """Return the runner of a rank other than 0: what build() makes, over its part of the model."""
    engine_plan = start.engine_plan
    if not engine_plan.hardware.is_cpu:
        compile_cache.use_cache_folder()
    model = _divided_model(engine_plan, rank)
    scales = start.scales
    if start.prompts is not None:
        scales = _measure(engine_plan, model, start.prompts, start.most_tokens, rank)
    scales = kv_scales.part(
        scales, engine_plan.plan.layout, engine_plan.model_spec.kv_heads, *astuple(rank.shard)
    )
    budget, config, hardware = engine_plan.budget, engine_plan.config, engine_plan.hardware
    with explain_out_of_memory(budget):
        exact = _exact_cache(engine_plan, start.poison)
        pool = PagedPool(
            engine_plan.plan.layout, budget.pages, scales, hardware.device, frames=budget.frames,
            poison=start.poison, exact=exact.pool if exact else None,
        )  # fmt: skip
        tier = _tier(engine_plan, pool, scales)
        states = _state_pool(engine_plan, start.poison)
    tables = PageTables(
        config.max_running + 1, budget.table_width, hardware.device, exact.empty_page if exact else None,
        states is not None,
    )  # fmt: skip
    run, plan = _forward(config, hardware, model), engine_plan.plan
    return ModelRunner(model, plan, pool, adapters(plan), tables, run, tier, exact, states)


def _divided_model(engine_plan: EnginePlan, rank: Rank) -> Any:
    """Load and prepare a rank's part of the model."""
    config, spec, weights = engine_plan.config, engine_plan.model_spec, engine_plan.weights
    whole = load_config(config.model, config.index_topk, trust_remote_code=config.trust_remote_code)
    part = parallel.divide(whole, Ways.of(config)).config
    division = parallel.Division(whole, part, rank.shard)
    model: Any = load(
        part, spec, engine_plan.plan.dtype, rank.device,
        handling=weights.handling if weights else Handling.UNPACKED, weights=config.weights,
        activations=engine_plan.activations, division=division,
    )  # fmt: skip
    drop_repeated_biases(model, division.layout, rank.shard)
    choose_own(model, division.layout.whole_experts, rank.shard)
    own = replace(spec, vocab_size=part.get_text_config().vocab_size)
    # Rank 0 before the others, which take the results of its trials of kernels, and compute as it does.
    tries = model.device.type == "cuda"
    if rank.shard.rank and tries:
        linear.of_rank_0.update(broadcast(rank.group, model.device))
    prepare_model(model, own, deterministic=config.deterministic)
    if not rank.shard.rank and tries:
        broadcast(rank.group, model.device, linear.results)
    join(model, division.layout, rank.shard, rank.group, rank.number, deterministic=config.deterministic)
    if config.attention_dp:
        rows = Rows(rank.group, rank.number)
        setattr(model, ROWS, rows)
        gather_rows(model, division.layout, rows)
    return model


def _draft_model(engine_plan: EnginePlan, engine: Engine, *, test: bool) -> tuple[Any, ...]:
    """Return what a model that drafts is made of, where one does: an engine that nobody submits requests to."""
    if engine_plan.draft is None:
        return ()
    # The threads are the large model's.
    config = replace(
        engine_plan.draft, threads=torch.get_num_threads() if engine_plan.hardware.is_cpu else None
    )
    target = engine if split_head(config.model)[0] else None
    with engine.startup.part("draft head" if target else "draft model"):
        draft, draft_plan = build(config, test=test, target=target)
    scheduler = draft.scheduler
    sampler = Sampler(engine_plan.config.seed)
    return draft.runner, scheduler.manager, sampler, draft_plan.budget.step_tokens, scheduler.limit


def _load(
    parts: EngineParts, startup: StartupReport, meter: LoadMeter, rank: Rank | None
) -> tuple[nn.Module, KVScales]:
    """Load the weights, choose the threads, and measure KV scales where there are texts for it."""
    engine_plan, config = parts.plan, parts.plan.config
    dtype, device = engine_plan.plan.dtype, engine_plan.hardware.device
    if rank:
        with startup.part("weights"):
            return _with_scales(parts, startup, _divided_model(engine_plan, rank), rank)
    with startup.part("weights"):
        model_config = load_config(
            config.model, config.index_topk, trust_remote_code=config.trust_remote_code
        )
        weights = engine_plan.weights
        model = load(
            model_config, engine_plan.model_spec, dtype, device,
            handling=weights.handling if weights else Handling.UNPACKED, weights=config.weights,
            activations=engine_plan.activations,
        )  # fmt: skip
    with startup.part("preparation"):
        if parts.target:
            cast(Any, model).share(parts.target.runner.model)
        prepare_model(model, engine_plan.model_spec, deterministic=config.deterministic)
        head_start.let_read(model, engine_plan)
    if engine_plan.hardware.is_cpu or config.threads:
        startup.notes += filter(None, [threads.apply(config.threads, engine_plan.budget.weights, meter)])
    return _with_scales(parts, startup, model, None)


def _with_scales(
    parts: EngineParts, startup: StartupReport, model: nn.Module, rank: Rank | None
) -> tuple[nn.Module, KVScales]:
    """Return a model with its KV scales; of a rank, those of all heads."""
    engine_plan, scales, prompts = parts.plan, parts.scales, _prompts(parts)
    if prompts is None:
        startup.kv_scales = parts.source.summary(engine_plan.config.model)
    else:
        start = perf_counter()
        if parts.target:
            prompts = [head_start.calibration_prompt(model, parts.target, prompts[0])]
        scales = _measure(engine_plan, model, prompts, _most_tokens(parts), rank)
        if parts.target:
            # Steps of the start go beyond them, and nobody else needs them.
            cast(Any, model).example_states = None
        seconds = startup.seconds["calibration"] = perf_counter() - start
        startup.kv_scales = parts.source.report(engine_plan.config.model, scales, seconds)
    startup.notes += scales.notes
    return model, scales


def _prompts(parts: EngineParts) -> list[list[int]] | None:
    """Return the token ids that KV scales are measured on, if they are."""
    if parts.texts is None:
        return None
    assert parts.tokenizer is not None
    return [parts.tokenizer.encode(text) for text in parts.texts]


def _most_tokens(parts: EngineParts) -> int:
    return CALIBRATION_TOKENS if parts.source is GIVEN_TEXTS else tokens_of_start(parts.plan)


def _measure(
    engine_plan: EnginePlan, model: nn.Module, prompts: Sequence[Sequence[int]], most: int, rank: Rank | None
) -> KVScales:
    # Scales are measured with packed layers: not before their kernels have passed their test.
    check_kernels(model, most_rows(engine_plan.config, engine_plan.budget))
    scales, spec = measure(engine_plan, model, rank, prompts, most), engine_plan.model_spec
    for store in engine_plan.plan.stores:
        own = kv_scales.part(scales, store, spec.kv_heads, *astuple(rank.shard)) if rank else scales
        kv_scales.require(store, own)
    return scales


def _tier(engine_plan: EnginePlan, pool: PagedPool, scales: KVScales) -> HotBuffers | None:
    """Return the host tier of the plan with its pages, if it has one."""
    tier = engine_plan.plan.tier
    # Without bytes on the host the device has room for all pages, and a tier would have nothing to hold.
    if tier is None or not engine_plan.budget.host:
        return None
    residency = Residency(pool.pages, pool.frames, tier.buffer // engine_plan.plan.page_size)
    host = host_latents(tier.layout, pool.pages, scales, pool.device)
    return HotBuffers(residency, host, pool, engine_plan.config.max_running + 2)


def _exact_cache(engine_plan: EnginePlan, poison: bool) -> ExactCache | None:
    """Return the pages of the exact window, if the plan has one."""
    plan, exact = engine_plan.plan, engine_plan.budget.exact
    if exact is None:
        return None
    pool = PagedPool(
        plan.exact_layout, exact.pages + 1, kv_scales.NONE, engine_plan.hardware.device, poison=poison
    )
    return ExactCache(plan.window, pool, plan.sinks)


def _state_pool(engine_plan: EnginePlan, poison: bool) -> StatePool | None:
    """Return the slots of recurrent states, if the model has any."""
    states, device = engine_plan.budget.states, engine_plan.hardware.device
    if states is None:
        return None
    return StatePool(
        engine_plan.plan.states, states.slots + SPARE_SLOTS, states.format, engine_plan.plan.dtype, device,
        max_drafts=CacheSpec.from_config(engine_plan.config).max_drafts, poison=poison,
        invariant=engine_plan.config.deterministic,
    )  # fmt: skip


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
    model: Any,
    pool: PagedPool,
    scales: KVScales,
    tokenizer: Tokenizer | None,
    tier: HotBuffers | None,
    exact: ExactCache | None,
    states: StatePool | None,
    target: Engine | None,
) -> Engine:
    config, plan, hardware = engine_plan.config, engine_plan.plan, engine_plan.hardware
    residency, max_context = tier.residency if tier else None, engine_plan.model_spec.max_context
    budget = engine_plan.budget
    scheduler = Scheduler(
        cache_manager(engine_plan, pool.pages, residency),
        max_running=budget.requests or config.max_running,
        token_budget=budget.step_tokens,
        max_context=max_context,
        can_grow=max_context < context_limits(model.config.get_text_config())[1],
        max_logprob_rows=max(1, STEP_LOGITS // engine_plan.model_spec.vocab_size),
    )
    empty_page = exact.empty_page if exact else None
    make_tables = partial(
        PageTables, config.max_running + 1, budget.table_width, empty_page=empty_page, has_states=states is not None
    )  # fmt: skip
    run = _forward(config, hardware, model)
    if split_head(config.model)[0]:
        verified = target.runner.tables.verified if target else None
        run = HeadForward(model, run, config.max_running + 1, verified)
    eos_ids, vocab_size = eos_ids_of(model, tokenizer), engine_plan.model_spec.vocab_size
    tables = make_tables(device=hardware.device)
    runner = ModelRunner(model, plan, pool, adapters(plan), tables, run, tier, exact, states)
    if config.attention_dp:
        # Numbers alone: what they are about lies at the other ranks.
        runner.keep_books([make_tables(device="cpu") for _ in range(1, config.tp)])
    return Engine(
        scheduler=scheduler,
        runner=runner,
        sampler=Sampler(config.seed, fixed_shapes=config.deterministic),
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        # Pages of another layout or of other scales must never be shared.
        namespace=f"{plan.fingerprint}/{scales.version}",
        vocab_size=vocab_size,
        grammars=Grammars(tokenizer, vocab_size, eos_ids) if tokenizer else None,
        # A CPU computes a step while it is launched, so there is nothing to overlap with.
        overlap=not hardware.is_cpu,
    )


def _forward(config: Config, hardware: Hardware, model: Any) -> Forward | None:
    """Return how the model is run, None for as it is written."""
    # A CPU's packed products keep the promise of --deterministic anyway.
    if hardware.is_cpu:
        return None
    if config.deterministic:
        return compiled(model, invariant.backend) if config.compile else plain_invariant(model)
    # What a head shares with its model is not among what a file of code is found by.
    keep = config.compile_cache and not split_head(config.model)[0]
    return compiled(model, keep=keep) if config.compile else None


def run_prompt(
    runner: ModelRunner, manager: CacheManager | RankManagers, ids: Sequence[int], chunk: int
) -> list[Tensor]:
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
        for start in range(0, len(ids), chunk):
            manager.reserve(request.lease, min(start + chunk, len(ids)))
            # With a host tier every chunk attends over tokens that have been there.
            manager.round_trip(request.lease)
            item = ScheduledRequest.next_chunk(request, min(chunk, len(ids) - start))
            # A recorded step leaves them where the next one does.
            logits.append(runner.forward(Batch((item,)), every=True).clone())
            manager.commit(request.lease, request.token_ids, item.end)
        if runner.followers:
            runner.followers.settle()
    finally:
        manager.release(request.lease)
    return logits
