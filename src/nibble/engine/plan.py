"""Everything that is decided of an engine before weights load, without torch where the model was observed before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path

from nibble.attention import backends
from nibble.attention.planner import evidence, explain
from nibble.attention.planner.caveats import packages, untested
from nibble.attention.planner.defaults import BEST, Defaults
from nibble.attention.planner.memory import MemoryPlan, MemoryPlanner
from nibble.attention.planner.plan import Plan, cuda_graph_blocker
from nibble.attention.planner.resolve import attempt, find_smaller, resolve
from nibble.attention.planner.support import BackendInfo
from nibble.config import Config
from nibble.engine import parallel_plan, speculation_plan
from nibble.engine.cache_plan import CachePlan
from nibble.engine.scale_source import usable_transforms
from nibble.errors import CapacityError, ConfigError, NibbleError
from nibble.formats import scheme as schemes
from nibble.hardware import Hardware, probe
from nibble.kernels import cdiv
from nibble.model_spec import ONLINE, ModelSpec
from nibble.models import activations, online, quantization
from nibble.models.hub import local_folder, locate_config, own_kv_formats, pinned
from nibble.models.observations import observe_model
from nibble.models.varying import require_invariant
from nibble.spec import AUTO, CacheSpec


@dataclass(frozen=True)
class EnginePlan(CachePlan):
    """Everything that is decided before weights load."""

    _: KW_ONLY
    budget: MemoryPlan
    draft: Config | None = None
    """Of the model that drafts, if one does."""


@dataclass(frozen=True, slots=True)
class PrintablePlan(Plan):
    """A plan that knows of its model, machine and memory, so that it prints as `nibble plan` does."""

    text: str = ""

    @classmethod
    def of(cls, engine_plan: EnginePlan) -> PrintablePlan:
        """Return the plan of `engine_plan`."""
        plan = engine_plan.plan
        values = {entry.name: getattr(plan, entry.name) for entry in fields(plan)}
        return cls(**values, text=as_text(engine_plan, engine_plan.budget))

    def __str__(self) -> str:
        return self.text


def as_text(cache_plan: CachePlan, budget: MemoryPlan | None) -> str:
    """Return what `nibble plan` prints: the model, the machine, the routes, and the memory, where it suffices."""
    heading = f"{cache_plan.config.model} ({cache_plan.model_spec.family}) on {cache_plan.hardware}"
    lines = parallel_plan.memory_notes(cache_plan.config, budget.tokens) if budget else ()
    return "\n".join((heading, explain.as_text(cache_plan.plan, budget), *lines))


def plan_engine(
    config: Config,
    hardware: Hardware | None = None,
    *,
    declared: bool = False,
    by_times: bool = True,
    published: bool = False,
    calibrated: bool = False,
) -> EnginePlan:
    """Plan an engine: the routes, then the memory.

    Args:
        config: What is requested; see plan_cache().
        hardware: Another machine, None for this one.
        declared: Let `auto` also choose backends that this version knows but cannot run.
        by_times: Follow times that were measured on this machine, unless `config` says no.
        published: Take a config that came with Nibble for a hub model that is not here.
        calibrated: KV scales will be measured, whatever `config` says of them.

    Raises:
        ConfigError: The combination or the model cannot be served.
        WeightError: The checkpoint is missing or broken.
        CapacityError: The memory does not suffice.
    """
    options = {"declared": declared, "by_times": by_times, "published": published}
    return plan_memory(plan_cache(config, hardware, calibrated=calibrated, **options))


def plan_cache(
    config: Config,
    hardware: Hardware | None = None,
    *,
    declared: bool = False,
    by_times: bool = True,
    published: bool = False,
    calibrated: bool = False,
) -> CachePlan:
    """Plan the routes and the layout of a cache, whether it fits in memory or not.

    A refusal's command has what differs from the defaults in `config`: what a caller decides for itself does not belong
    there.

    Args:
        config: What is requested.
        hardware: Another machine, on which every backend with an adapter may be chosen. On this machine (None) only
            those whose packages are here.
        declared: Let `auto` also choose backends that this version knows but cannot run.
        by_times: Follow times that were measured on this machine, unless `config` says no.
        published: Take a config that came with Nibble for a hub model that is not here.
        calibrated: KV scales will be measured, whatever `config` says of them.

    Raises:
        ConfigError: The combination or the model cannot be served.
        WeightError: The checkpoint is missing or broken.
    """
    here = hardware is None
    table = _backends(here)
    config, formats_note = _own_formats(pinned(config))
    hardware = _share(hardware or probe(config.device), config)
    spec = CacheSpec.from_config(config)
    dtype = spec.compute_dtype(hardware)
    source, source_note = locate_config(config.model) if published else (config.model, "")
    model_spec = observe_model(
        source, dtype, config.max_context, config.index_topk, trust_remote_code=config.trust_remote_code,
        weights=config.weights, ways=parallel_plan.ways(config),
    )  # fmt: skip
    model_spec = replace(model_spec, model=config.model)
    hardware = parallel_plan.with_rows(hardware, config, model_spec)
    if config.deterministic:
        require_invariant(model_spec, hardware)
    model_spec, weights = _count_weights(config, model_spec, dtype, hardware, here)
    stored = weights.stored if weights else None
    choice, why = activations.decide(config.activations, stored, _unpacked(weights), hardware)
    weight_notes = list(_weight_notes(weights, dtype, hardware, here)) if weights else []
    if weights and weights.handling is not quantization.Handling.TRANSFORMERS:  # whose kernels do as they do
        weight_notes += activations.notes(choice, why, weights.stored)
    # Times of this machine say nothing about another one.
    tuned = here and by_times and config.tuned
    times = evidence.load_tuned(hardware, table) if tuned else evidence.NO_RANKINGS
    parallel_plan.check(config, weights, model_spec)
    speculation_plan.check(config, model_spec, hardware)
    drafts_note = speculation_plan.note(config, hardware)
    preface = (source_note, formats_note, *parallel_plan.notes(model_spec), *weight_notes, drafts_note)
    plan = resolve(config, model_spec, hardware, table, declared=declared, measured=times)
    facts = config, hardware, model_spec, plan, here, declared, BEST, times, preface, weights, choice
    cache_plan = _annotated(CachePlan(*facts), table)
    return cache_plan if calibrated else with_usable_transforms(cache_plan, local_folder)


def with_usable_transforms(
    cache_plan: CachePlan, folder_of: Callable[[str], Path | None], *, measures: bool = True
) -> CachePlan:
    """Return the plan with no more transforms, of those that are left to Nibble, than there are KV scales for.

    Args:
        cache_plan: The plan with all that the model allows.
        folder_of: Returns the folder of a model's checkpoint, None where it is not on this machine.
        measures: Whether scales that are missing can be measured at the start.
    """
    transforms, why = usable_transforms(cache_plan, folder_of, measures=measures)
    before = cache_plan.defaults
    if transforms == before.transforms:
        return cache_plan
    return with_defaults(cache_plan, replace(before, transforms=transforms, notes=(*before.notes, why)))


def _own_formats(config: Config) -> tuple[Config, str]:
    """Return the config with the KV formats that the checkpoint names by layer, if kv_format is `auto`, and a note."""
    if config.kv_format not in {AUTO, schemes.ALIASES[AUTO]}:
        return config, ""
    folder = local_folder(config.model)
    path = own_kv_formats(folder) if folder else None
    if path is None:
        return config, ""
    if config.kv_format == AUTO:
        return replace(
            config, kv_format=str(path)
        ), f"KV formats: the checkpoint's own, by layer, of {path.name}"
    return config, f"the checkpoint names KV formats by layer, in {path.name}; --kv-format auto takes them"


def with_defaults(cache_plan: CachePlan, defaults: Defaults) -> CachePlan:
    """Return a plan with other defaults, resolved anew; raise ConfigError."""
    table = _backends(cache_plan.here)
    plan = resolve(
        cache_plan.config, cache_plan.model_spec, cache_plan.hardware, table,
        declared=cache_plan.declared, measured=cache_plan.times, best=defaults,
    )  # fmt: skip
    return _annotated(replace(cache_plan, plan=plan, defaults=defaults), table)


def _annotated(cache_plan: CachePlan, table: Mapping[str, BackendInfo]) -> CachePlan:
    """Return the plan of a new resolution with all notes."""
    notes = (*cache_plan.preface, *_caveats(cache_plan, table), *cache_plan.plan.notes)
    return replace(cache_plan, plan=replace(cache_plan.plan, notes=tuple(filter(None, notes))))


def _caveats(cache_plan: CachePlan, table: Mapping[str, BackendInfo]) -> Iterator[str]:
    """Yield what to know of a plan's backends: packages, GPUs on which they never ran, decode steps without graphs."""
    config, hardware, plan = cache_plan.config, cache_plan.hardware, cache_plan.plan

    def resolve_with(backends: Mapping[str, BackendInfo]) -> Plan | None:
        return attempt(config, cache_plan.model_spec, hardware, backends, cache_plan.defaults)

    if not (cache_plan.here or cache_plan.declared):
        yield from packages(plan, table, resolve_with)
    yield from untested(plan, hardware)
    # Slow enough to be worth a note.
    if config.graphs and not hardware.is_cpu and (blocker := cuda_graph_blocker(plan)):
        yield blocker


def _share(hardware: Hardware, config: Config) -> Hardware:
    """Return the hardware with the part of its memory that may be used; raise ConfigError for a part of a CPU's."""
    utilization = config.gpu_memory_utilization
    if utilization is None:
        return parallel_plan.of_rank(hardware, config.tp)
    if hardware.is_cpu:
        raise ConfigError(
            "--gpu-memory-utilization is for GPUs; on a CPU --kv-memory says how much the cache may have"
        )
    share = replace(hardware, memory=int(hardware.memory * utilization))
    return parallel_plan.of_rank(share, config.tp)


def _count_weights(
    config: Config, model_spec: ModelSpec, dtype: str, hardware: Hardware, here: bool
) -> tuple[ModelSpec, quantization.Weights | None]:
    """Return the model with its weights as they lie in memory, and what becomes of them where they are quantised."""
    stored, full = model_spec.stored_weights, model_spec.weight_bytes
    if stored is None:
        if config.quantized_weights == quantization.Handling.PACKED.value:
            raise ConfigError(
                "--quantized-weights packed: this checkpoint's weights are not quantised, or by a method that is not "
                "known here; leave the option out, or quantise them as they load (--weights nvfp4)"
            )
        return model_spec, None
    weights = quantization.plan_weights(config, stored, full, dtype, hardware, here=here)
    return replace(model_spec, weight_bytes=weights.bytes), weights


def _unpacked(weights: quantization.Weights | None) -> str:
    """Return why matrices do not stay packed; empty where they do."""
    if weights is None or weights.handling is quantization.Handling.PACKED:
        return ""
    is_foreign = weights.handling is quantization.Handling.TRANSFORMERS
    what = "Transformers loads these weights" if is_foreign else "weights are unpacked here"
    return what + (f" ({weights.why})" if weights.why else "")


def _weight_notes(weights: quantization.Weights, dtype: str, hardware: Hardware, here: bool) -> Iterator[str]:
    """Return what is to be known of quantised weights."""
    if weights.stored.method == ONLINE:
        return online.notes(weights, dtype, hardware)
    return quantization.notes(weights, dtype, hardware, here=here)


def plan_memory(cache_plan: CachePlan) -> EnginePlan:
    """Plan the memory for routes and a layout; raise CapacityError, with the nearest config that fits.

    A model that drafts has its weights and workspaces, and of the cache's bytes as many tokens.
    """
    config, hardware, model_spec = cache_plan.config, cache_plan.hardware, cache_plan.model_spec
    draft_config = speculation_plan.draft_config(config, model_spec)
    if draft_config is None:
        return _plan_memory(cache_plan)
    here = cache_plan.here
    draft = plan_cache(draft_config, None if here else hardware, declared=cache_plan.declared)
    draft = speculation_plan.checked(draft, model_spec)
    planner = MemoryPlanner(CacheSpec.from_config(draft.config), draft.model_spec, draft.hardware, draft.plan)
    memory = speculation_plan.DraftMemory.of(draft, planner, model_spec, cache_plan.plan.dtype)
    smaller = replace(hardware, memory=hardware.memory - memory.beside_pages)
    room = speculation_plan.room(_plan_memory(replace(cache_plan, hardware=smaller)).budget)
    sizes = [plan.layout.bytes_per_token for plan in (cache_plan.plan, draft.plan)]
    own = room * sizes[0] // sum(sizes)
    main = _plan_memory(replace(cache_plan, hardware=smaller, config=replace(config, kv_memory=str(own))))
    note = replace(memory, pages=room - own).note(draft.config.model)
    return replace(
        main,
        config=config,
        hardware=hardware,
        plan=replace(main.plan, notes=(*main.plan.notes, note)),
        draft=replace(draft.config, kv_memory=str(room - own)),
    )


def _plan_memory(cache_plan: CachePlan) -> EnginePlan:
    """Plan the memory of one model.

    An exact window that was left to Nibble gives way where it does not fit.
    """
    spec, window = CacheSpec.from_config(cache_plan.config), cache_plan.plan.window
    try:
        engine_plan = _with_budget(cache_plan, spec)
        if spec.requires_window or not _lacks_snapshots(engine_plan, spec):
            return engine_plan
        why = (
            "its share of the cache holds no snapshot of a prefix, without which prefixes would not be reused"
        )
    except CapacityError as error:
        if spec.requires_window or not window:
            raise _refused(cache_plan, spec, error) from None
        why = f"{window} tokens do not fit ({str(error).partition('; what would help')[0]})"
    without = with_defaults(cache_plan, cache_plan.defaults.without_window(why))
    try:
        return _with_budget(without, spec)
    except CapacityError as error:
        raise _refused(without, spec, error) from None


def _lacks_snapshots(engine_plan: EnginePlan, spec: CacheSpec) -> bool:
    """Return whether there is an exact window, and no room for the snapshot of a single prefix."""
    exact, plan = engine_plan.budget.exact, engine_plan.plan
    return exact is not None and spec.prefix_cache and exact.snapshots < cdiv(plan.window, plan.page_size)


def _with_budget(cache_plan: CachePlan, spec: CacheSpec) -> EnginePlan:
    parts = {entry.name: getattr(cache_plan, entry.name) for entry in fields(CachePlan)}
    planner = MemoryPlanner(spec, cache_plan.model_spec, cache_plan.hardware, cache_plan.plan)
    return EnginePlan(**parts, budget=planner.plan())


def _refused(cache_plan: CachePlan, spec: CacheSpec, error: CapacityError) -> CapacityError:
    """Return the error with what the memory lacks, and the nearest config that fits."""
    config, model_spec, hardware = cache_plan.config, cache_plan.model_spec, cache_plan.hardware
    planner = MemoryPlanner(spec, model_spec, hardware, cache_plan.plan)
    lacking = planner.least_bytes > hardware.memory
    summary = f"{model_spec.model} does not fit: {planner.shortfall}\n" * lacking
    ways = f"{error}{_more_gpus(cache_plan)}" if lacking else str(error)
    refused = CapacityError(f"{summary}{ways}")
    refused.suggestion = find_smaller(
        config, model_spec, hardware, _backends(cache_plan.here),
        declared=cache_plan.declared, best=cache_plan.defaults,
    )  # fmt: skip
    return refused


def _more_gpus(cache_plan: CachePlan) -> str:
    """Return among how few GPUs a model fits that one does not hold; empty where none are enough or served."""
    config, here = cache_plan.config, cache_plan.here
    hardware = None if here else cache_plan.hardware
    if cache_plan.hardware.is_cpu or config.tp > 1:
        return ""
    # With less than its weights, nothing needs to be tried.
    weights, memory = cache_plan.model_spec.weight_bytes, cache_plan.hardware.memory
    for size in (size for size in parallel_plan.SIZES if weights < size * memory):
        # The share that may be used is in `hardware` already.
        options = replace(
            config, tp=size, gpu_memory_utilization=config.gpu_memory_utilization if here else None
        )
        try:
            divided = plan_cache(options, hardware, declared=cache_plan.declared, published=not here)
            MemoryPlanner(
                CacheSpec.from_config(options), divided.model_spec, divided.hardware, divided.plan
            ).plan()
        except CapacityError:
            continue
        # This is about one GPU, so what several would be refused for is left unsaid.
        except NibbleError:
            return ""
        return f"; it needs --tp {size}, so many of these GPUs"
    return ""


def _backends(here: bool) -> Mapping[str, BackendInfo]:
    # For another machine it does not matter which packages are installed here.
    return backends.available_backends() if here else backends.all_backends()
