"""What a plan rests on that may not be so: packages to be installed, and kernels that were never run on such a GPU.

These notes are about a plan for another machine, or one that nobody has tried; a plan says them without --explain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from nibble.attention.planner import evidence, state_support
from nibble.attention.planner.plan import GroupPlan, Plan, Route
from nibble.attention.planner.support import BackendInfo
from nibble.hardware import Hardware

GPU_EXTRA = frozenset({"triton", "cuda.bindings"})
"""Modules that `pip install '.[gpu]'` brings, beside torch; pyproject.toml has the list."""
EXTRA = "pip install '.[gpu]'"


def untested(plan: Plan, hardware: Hardware) -> Iterator[str]:
    """Yield the chosen backends that never passed their tests on such a GPU, with their phases."""
    ledger = evidence.read_ledger(evidence.shipped_ledger())
    verified = {entry.key for entry in ledger}
    phases: dict[str, dict[str, None]] = {}
    for group in plan.groups:
        for route in group.routes:
            if (*_need(plan, group, route), hardware.arch) not in verified:
                phases.setdefault(route.backend, {})[str(route.phase)] = None
    names = [f"{name} ({', '.join(entries)})" for name, entries in phases.items()]
    states = state_support.untested(plan.states, plan.state_format, hardware, ledger)
    names += [
        f"recurrent layers of {rule} in {plan.state_format} ({missing})" for rule, missing in states.items()
    ]
    if names:
        where = "a CPU" if hardware.is_cpu else f"SM{hardware.arch}"
        yield f"declared, never run on {where}: {', '.join(names)}"


def _need(plan: Plan, group: GroupPlan, route: Route) -> tuple[str, str, str, str]:
    """Return what the ledger calls a route, but for the GPU."""
    layers = {entry.layer: entry for entry in plan.layout.layers}
    stored = layers[plan.owner[group.layers[0]]]
    return route.backend, str(route.phase), group.group.kind, route.stage_to or stored.format_key


def packages(
    plan: Plan, table: Mapping[str, BackendInfo], resolve: Callable[[Mapping[str, BackendInfo]], Plan | None]
) -> Iterator[str]:
    """Yield the chosen backends that need more than the extra `gpu`, and what would be chosen without them.

    Args:
        plan: For another machine.
        table: All backends.
        resolve: Plans the same with other backends, None where there is no plan.
    """
    chosen_names = dict.fromkeys(route.backend for route in plan.routes)
    extra = {name: table[name] for name in chosen_names if set(table[name].packages) - GPU_EXTRA}
    if not extra:
        return
    bare = {
        name: replace(info, adapter=None, missing=info.install) if set(info.packages) - GPU_EXTRA else info
        for name, info in table.items()
    }
    without = resolve(bare)
    instead = f"; without: {_routes(without)}" if without and without.runnable else ""
    installs = ", ".join(f"{name}: {info.install}" for name, info in extra.items())
    yield f"needs more than {EXTRA} ({installs}){instead}"


def _routes(plan: Plan) -> str:
    """Return who serves each phase, in short."""
    phases: dict[str, dict[str, None]] = {}
    for route in plan.routes:
        phases.setdefault(str(route), {})[str(route.phase)] = None
    return ", ".join(f"{name} ({', '.join(entries)})" for name, entries in phases.items())
