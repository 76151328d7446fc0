"""Plans of published models on every generation of GPUs, in every scheme, held against tests/golden/plans.txt.

Two views of the table of facts: as declared, as if every adapter and package were here; and bare, with what torch
brings. A line is a plan: schemes, page size and packing, and who serves P(refill), E(xtend), D(ecode), V(erify); or a
refusal: its first line, and the options of the command that works. To accept a change, read the difference after

    NIBBLE_UPDATE_GOLDEN=1 python -m pytest tests/golden/test_matrix.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest

from nibble.attention.backends import all_backends
from nibble.attention.planner.defaults import BEST
from nibble.attention.planner.options import PlanRequest
from nibble.attention.planner.plan import GroupPlan, Plan
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import BackendInfo
from nibble.config import Config
from nibble.engine.plan import CachePlan, plan_memory
from nibble.errors import CapacityError, ConfigError, NibbleError
from nibble.formats import scheme as schemes
from nibble.hardware import GIB, Hardware, lookup_gpu
from nibble.model_spec import ModelSpec
from planning import MODELS, memory_planner, parse_command

GOLDEN = Path(__file__).with_name("plans.txt")
MACHINES = {"cpu": Hardware("cpu", 0, 32 * GIB)} | {
    name: lookup_gpu(name) for name in ("a100", "l40s", "h200", "b200", "rtx5090")
}
EDGES = "nvfp4;edges=fp8_e4m3"
SCHEMES = (*schemes.names(), EDGES)
EVERY, BARE = "every backend", "bare"
WITH_TORCH = (None, "pip install triton")
"""How to get what torch brings on Linux."""


def config(scheme: str) -> Config:
    kv_format, _, edges = scheme.partition(";edges=")
    return Config(model="m", kv_format=kv_format, kv_layers=f"0,-1={edges}" if edges else "")


def bare() -> dict[str, BackendInfo]:
    """The backends where no optional package is installed."""
    return {
        name: info if info.install in WITH_TORCH else replace(info, adapter=None, missing=info.install)
        for name, info in all_backends().items()
    }


def made(view: str, model_spec: ModelSpec, machine: Hardware, asked: Config) -> Plan:
    if view == BARE:
        return resolve(asked, model_spec, machine, bare())
    return resolve(asked, model_spec, machine, declared=not machine.is_cpu)


def routes(group: GroupPlan) -> str:
    """`P,E sdpa; D cuda; V triton`."""
    served = groupby(group.routes, key=str)
    return "; ".join(f"{','.join(route.phase[0].upper() for route in same)} {who}" for who, same in served)


def plan_line(plan: Plan) -> str:
    by_routes: dict[str, dict[str, None]] = {}
    for group in plan.groups:
        name = group.group.name if len({entry.scheme for entry in plan.groups}) == 1 else group.scheme
        by_routes.setdefault(routes(group), {})[name] = None
    alike = len(by_routes) == 1
    where = [text if alike else f"{'+'.join(names)}: {text}" for text, names in by_routes.items()]
    return f"{plan.page_size} {plan.layout.packing}  {' | '.join(where)}"


def refusal_line(error: ConfigError, machine: Hardware) -> str:
    first = re.sub(r" \(layers [0-9, by-]+\)|; formats that fit.*", "", str(error).partition("\n")[0])
    # Weights in 16 bits do not fit on many of these machines; the routes are what is recorded here.
    suggestion = error.suggestion.as_command() if error.suggestion else "NOTHING"
    for word in ("nibble plan m ", f" --gpu {machine.name}", " --declared"):
        suggestion = suggestion.replace(word, "")
    return f"refused: {first} -> {suggestion}"


def line(view: str, model_spec: ModelSpec, machine: Hardware, scheme: str) -> str:
    try:
        return plan_line(made(view, model_spec, machine, config(scheme)))
    except ConfigError as error:
        return refusal_line(error, machine)


def section(view: str, model: str) -> Iterator[str]:
    """The plans of one model. What is so on all machines comes first; then machines with the same plans share a block,
    and schemes with the same plan a line."""
    cells = {
        (name, scheme): line(view, MODELS[model], machine, scheme)
        for (name, machine), scheme in product(MACHINES.items(), SCHEMES)
    }
    same = [scheme for scheme in SCHEMES if len({cells[name, scheme] for name in MACHINES}) == 1]
    blocks: dict[str, list[str]] = {}
    for name in MACHINES:
        rest = {scheme: cells[name, scheme] for scheme in SCHEMES if scheme not in same}
        blocks.setdefault("\n".join(block(rest)), []).append(name)
    yield f"== {model}, {view}"
    yield from block({scheme: cells["cpu", scheme] for scheme in same})
    for text, machines in blocks.items():
        yield f"  {', '.join(machines)}\n{text}"


def block(lines: Mapping[str, str]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for scheme, text in lines.items():
        found.setdefault(text, []).append(scheme)
    yield from (f"    {' '.join(names)} | {text}" for text, names in found.items())


def sizes(model: str) -> str:
    """Bytes a token in all layers, by scheme."""
    found = []
    for scheme in SCHEMES:
        try:
            plan = made(EVERY, MODELS[model], MACHINES["h200"], config(scheme))
        except ConfigError:
            continue
        found.append(f"{scheme} {plan.layout.bytes_per_token}")
    return f"== {model}, bytes a token\n    {'; '.join(found)}"


@cache
def everything() -> str:
    lines = [sizes(model) for model in MODELS]
    lines += [text for view, model in product((EVERY, BARE), MODELS) for text in section(view, model)]
    return "\n".join(lines) + "\n"


def by_section(text: str) -> Mapping[str, str]:
    parts = [part.partition("\n") for part in text.split("== ")[1:]]
    return {head: body for head, _, body in parts}


def test_plans_are_as_recorded() -> None:
    if os.environ.get("NIBBLE_UPDATE_GOLDEN"):
        GOLDEN.write_text(everything())
    recorded, now = by_section(GOLDEN.read_text()), by_section(everything())
    assert list(now) == list(recorded)
    changed = [head for head in now if now[head] != recorded[head]]
    assert not changed, "\n".join(f"{head}\nwas\n{recorded[head]}is\n{now[head]}" for head in changed)


ASKED = ("attention_backend", "prefill_backend", "decode_backend")
GPUS = ("h200", "b200", "rtx5090")
ASKING = ("llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "deepseek-v3.2")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("view", [EVERY, BARE])
def test_every_refusal_of_a_scheme_names_a_command_that_works(model: str, view: str) -> None:
    for machine, scheme in product(MACHINES.values(), SCHEMES):
        try:
            made(view, MODELS[model], machine, config(scheme))
        except ConfigError as error:
            follow(error, model, bare() if view == BARE else all_backends(), machine)


@pytest.mark.parametrize("model", ASKING)
@pytest.mark.parametrize("backend", all_backends())
def test_every_refusal_of_a_backend_names_a_command_that_works(model: str, backend: str) -> None:
    """What it names neither stages pages nor falls to plain torch, but where that was asked for."""
    for gpu, scheme, option in product(GPUS, ("bf16", "nvfp4"), ASKED):
        asked = replace(config(scheme), **{option: backend})
        try:
            made(EVERY, MODELS[model], MACHINES[gpu], asked)
        except ConfigError as error:
            for route in follow(error, model, all_backends(), MACHINES[gpu]).groups[0].routes:
                slow = route.stage_to is not None or route.row.gathers
                assert not slow or route.backend == backend, f"{asked}: {error}"


SMALL = (*MACHINES.values(), lookup_gpu("l4"), Hardware("cpu", 0, 24 * GIB))


@pytest.mark.parametrize("model", MODELS)
def test_what_does_not_fit_gets_a_command_that_does_or_none(model: str) -> None:
    """On every machine, in a scheme of many bytes and one of few, with options that need memory."""
    options: list[dict[str, Any]] = [
        {},
        {"kv_memory": "10TiB"},
        {"kv_memory": "1MiB"},
        {"max_running": 10**9},
    ]
    for machine, scheme, extra in product(SMALL, ("bf16", "nvfp4"), options):
        asked = replace(config(scheme), **extra)
        plan = resolve(asked, MODELS[model], machine)
        cache_plan = CachePlan(asked, machine, MODELS[model], plan, here=False)
        try:
            plan_memory(cache_plan)
        except CapacityError as error:
            if error.suggestion:
                assert not error.suggestion.shortfall
                follow(error, model, all_backends(), machine)
            else:
                # Not even one token of the smallest scheme fits.
                assert MODELS[model].weight_bytes > 0.8 * machine.memory
                assert "does not fit: needs at least" in str(error)


@pytest.mark.parametrize(("page", "instead"), [(256, 128), (8, 16)])
def test_another_page_size_is_proposed_before_plain_torch(page: int, instead: int) -> None:
    """Which reads pages of any size, many times slower."""
    for backend in ("fa3", "triton"):
        asked = Config(model="m", page_size=page, attention_backend=backend)
        with pytest.raises(ConfigError, match=f"what works: nibble .*--page-size {instead} ") as refusal:
            resolve(asked, MODELS["llama-3.1-8b"], MACHINES["h200"])
        made = follow(refusal.value, "llama-3.1-8b", all_backends(), MACHINES["h200"])
        assert {route.backend for route in made.groups[0].routes} == {backend}


def follow(refusal: NibbleError, model: str, table: Mapping[str, BackendInfo], machine: Hardware) -> Plan:
    """The plan of the command that a refusal names; it fits in memory, or the refusal says that it does not."""
    assert refusal.suggestion, refusal
    asked, named, declared = parse_command(refusal.suggestion.as_command())
    assert named.arch == machine.arch
    plan = resolve(asked, MODELS[model], machine, table, declared=declared)
    usual = "float32" if machine.is_cpu else "bfloat16"
    model_spec = PlanRequest(asked, MODELS[model], machine, table).model_in_dtype(usual)
    planned = memory_planner(asked, model_spec, machine, plan)
    if refusal.suggestion.shortfall:
        assert "what works" not in str(refusal) and "which does not fit: needs at least" in str(refusal)
        with pytest.raises(CapacityError):
            planned.plan()
    else:
        try:
            planned.plan()
        except CapacityError:
            # An exact window that nobody asked for gives way.
            assert asked.kv_window is None and plan.window
            without = BEST.without_window()
            plan = resolve(asked, MODELS[model], machine, table, declared=declared, best=without)
            memory_planner(asked, model_spec, machine, plan).plan()
    return plan


def test_plain_torch_on_a_gpu_is_said_to_be_slow() -> None:
    plan = resolve(config("fp32"), MODELS["minicpm3-4b"], MACHINES["h200"])
    assert any("torch_ref gathers pages in plain torch, many times slower" in note for note in plan.notes)
    plan = resolve(config("nvfp4"), MODELS["minicpm3-4b"], MACHINES["h200"])
    assert not any("plain torch" in note for note in plan.notes)
