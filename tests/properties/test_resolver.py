"""The resolver, held to what it promises for any backends, models and machines that one can make up."""

from __future__ import annotations

from dataclasses import fields, replace
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nibble.attention.planner import suggestion
from nibble.attention.planner.defaults import BEST
from nibble.attention.planner.plan import STAGED_PACKING, Plan, Route
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import BackendInfo, Origin, SchemeGroup, Support, scheme_groups
from nibble.config import Config
from nibble.errors import ConfigError, Unsupported
from nibble.hardware import GIB, Hardware
from nibble.model_spec import LayerGroup, ModelSpec, Phase
from nibble.spec import CacheSpec
from planning import gqa, memory_plan, model_spec, parse_command

FORMATS = ("bf16", "fp8_e4m3", "nvfp4")
PAGES = (16, 64)
PACKINGS = ("nhd", "hnd")
ARCHS = (80, 90)
NAMES = ("a", "b", "c", "d")
BOTH = (False, True)
FAST = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def some(values: tuple[object, ...]) -> st.SearchStrategy[frozenset[object]]:
    return st.frozensets(st.sampled_from(values), min_size=1)


def rows() -> st.SearchStrategy[Support]:
    return st.builds(
        Support,
        phase=some(tuple(Phase)),
        kind=st.just(frozenset({"mha"})),
        format=st.none() | some(FORMATS),
        packing=st.none() | some(PACKINGS),
        arch=st.none() | some(ARCHS),
        page=st.none() | some(PAGES),
        window=st.none() | some(BOTH),
        gathers=st.booleans(),
        lse=st.booleans(),
    )


@st.composite
def tables(draw: st.DrawFn) -> dict[str, BackendInfo]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    adapters = st.sampled_from((None, object))
    return {
        name: BackendInfo(
            name=name,
            support=tuple(draw(st.lists(rows(), max_size=4))),
            summary="",
            origin=draw(st.sampled_from(Origin)),  # few, so that ties are common
            adapter=draw(adapters),
        )
        for name in names
    }


@st.composite
def configs(draw: st.DrawFn, table: dict[str, BackendInfo]) -> Config:
    named = st.none() | st.sampled_from(sorted(table))
    return Config(
        model="m",
        kv_format=draw(st.sampled_from(FORMATS)),
        kv_layers=draw(st.sampled_from(("", "0=fp8_e4m3", "1,3=nvfp4"))),
        kv_window=draw(st.sampled_from((None, 0))),
        kv_transforms=draw(st.sampled_from(("auto", "none"))),
        page_size=draw(st.none() | st.sampled_from(PAGES)),
        prefill_backend=draw(named),
        decode_backend=draw(named),
        allow_staging=draw(st.booleans()),
    )


@st.composite
def questions(draw: st.DrawFn) -> tuple[dict[str, BackendInfo], Config, ModelSpec, Hardware, bool]:
    table = draw(tables())
    window = LayerGroup("window", "mha", gqa(64), (0, 2), 16, window=128)
    full = LayerGroup("full", "mha", gqa(64), (1, 3), 16)
    model = draw(st.sampled_from((model_spec(window, full), model_spec(replace(full, layers=(0, 1, 2, 3))))))
    machine = Hardware("sm", draw(st.sampled_from(ARCHS)), 80 * GIB)
    return table, draw(configs(table)), model, machine, draw(st.booleans())


def attempt(
    table: dict[str, BackendInfo], config: Config, model: ModelSpec, machine: Hardware, declared: bool
) -> Plan | None:
    """The plan, if any; no remedy is searched for, which takes nine tenths of the time of a refusal."""
    try:
        with mock.patch.object(suggestion, "find", return_value=None):
            return resolve(config, model, machine, table, declared=declared)
    except Unsupported:
        return None


def serves(
    row: Support,
    part: SchemeGroup,
    phase: Phase,
    machine: Hardware,
    page: int,
    packing: str,
    stage_to: str | None,
) -> bool:
    need = part.need(phase, machine, "bfloat16", page, packing)
    if stage_to:
        need = replace(need, format=stage_to, packing=STAGED_PACKING)
    allowed = {
        asked.name: (getattr(row, asked.name), getattr(need, asked.name))
        for asked in fields(row)
        if hasattr(need, asked.name)
    }
    # A row that returns the log-sum-exp serves those who do not need it, too.
    returns, needed = allowed.pop("lse")
    return returns >= needed and all(values is None or value in values for values, value in allowed.values())


@FAST
@given(questions())
def test_every_route_is_served_by_its_row(question: tuple) -> None:
    table, config, model, machine, declared = question
    made = attempt(*question)
    if made is None:
        return
    assert made.window in {0, 0 if config.kv_window == 0 else BEST.window}
    parts = scheme_groups(CacheSpec.from_config(config), model, made.window, BEST.transforms)
    for group, part in zip(made.groups, parts, strict=True):
        assert bool(group.near_routes or group.near_kernel) == bool(made.window)
        assert (group.layers, group.scheme) == (part.layers, part.scheme.name)
        assert {route.phase for route in group.routes} >= {Phase.PREFILL, Phase.EXTEND, Phase.DECODE}
        for route in group.routes:
            assert route.row in table[route.backend].support
            assert serves(
                route.row, part, route.phase, machine, made.page_size, made.layout.packing, route.stage_to
            )
            check_asked(config, table, route, declared)
    assert config.page_size in {None, made.page_size}


def check_asked(config: Config, table: dict[str, BackendInfo], route: Route, declared: bool) -> None:
    """A route is the one that was named; `auto` does not take what cannot run; staging was asked for where it must be."""
    asked = config.backend_for(route.phase.decodes)
    assert route.backend == asked or (asked == "auto" and (declared or route.runnable))
    assert route.runnable == table[route.backend].runnable
    assert not (route.stage_to and route.phase.decodes) or config.allow_staging


@FAST
@given(questions())
def test_a_refusal_means_that_no_storage_serves_all(question: tuple) -> None:
    table, config, model, machine, declared = question
    if attempt(*question) is not None:
        return
    found = scheme_groups(CacheSpec.from_config(config), model)
    for page in (config.page_size,) if config.page_size else (1, 16, 32, 64, 128):
        for packing in PACKINGS:
            assert not all(
                possible(table, config, part, phase, machine, page, packing, declared)
                for part in found
                for phase in (Phase.PREFILL, Phase.EXTEND, Phase.DECODE)
            )


def possible(
    table: dict[str, BackendInfo],
    config: Config,
    part: SchemeGroup,
    phase: Phase,
    machine: Hardware,
    page: int,
    packing: str,
    declared: bool,
) -> bool:
    asked = config.backend_for(phase.decodes)
    among = [i for i in table.values() if (asked == "auto" and (declared or i.runnable)) or i.name == asked]
    ways = [None, "bf16"] if config.allow_staging or not phase.decodes else [None]
    return any(
        serves(row, part, phase, machine, page, packing, way)
        for info in among
        for row in info.support
        for way in ways
    )


@FAST
@given(questions(), st.randoms())
def test_the_order_of_backends_does_not_matter(question: tuple, random: object) -> None:
    table, *rest = question
    names = list(table)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert attempt({name: table[name] for name in names}, *rest) == attempt(table, *rest)


@FAST
@given(questions(), st.lists(rows(), max_size=4), st.booleans())
def test_another_backend_never_turns_success_into_refusal(
    question: tuple, extra: list[Support], runs: bool
) -> None:
    table, *rest = question
    if attempt(table, *rest) is None:
        return
    newcomer = BackendInfo(name="0", support=tuple(extra), summary="", adapter=object if runs else None)
    assert attempt({**table, "0": newcomer}, *rest) is not None


@FAST
@given(questions())
def test_a_remedy_works(question: tuple) -> None:
    table, config, model, machine, declared = question
    try:
        resolve(config, model, machine, table, declared=declared)
    except Unsupported as error:
        if error.refusal.suggestion:
            again, _, said = parse_command(error.refusal.suggestion.as_command())
            plan = resolve(again, model, machine, table, declared=said)
            if not error.refusal.suggestion.shortfall:
                memory_plan(again, model, machine, plan)


@FAST
@given(questions())
def test_only_planned_errors_are_raised(question: tuple) -> None:
    table, config, model, machine, declared = question
    try:
        resolve(config, model, machine, table, declared=declared, verify=True)
    except ConfigError as error:
        assert str(error)
