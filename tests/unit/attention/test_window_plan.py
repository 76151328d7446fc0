"""Who reads near tokens, in plans: backends, a kernel of its own in decode steps on GPUs, and draft tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nibble.attention.backends import all_backends
from nibble.attention.planner.explain import as_dict, as_text
from nibble.attention.planner.plan import GroupPlan, cuda_graph_blocker
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import BackendInfo
from nibble.attention.planner.verify_memory import verify_graph_blocker
from nibble.config import Config
from nibble.errors import Unsupported
from nibble.hardware import GIB, Hardware, lookup_gpu
from nibble.model_spec import Phase
from planning import DEEPSEEK_V32, QWEN3_8B, mha, model_spec

CPU, H200 = Hardware("cpu", 0, 32 * GIB), lookup_gpu("h200")
SMALL = model_spec(mha(2, 64), context=512, weights=1 << 20)


def config(**options: Any) -> Config:
    return Config(model="m", **{"kv_format": "nvfp4", "kv_window": 64, **options})


def phases(group: GroupPlan) -> set[Phase]:
    return {route.phase for route in group.near_routes}


def test_heads_have_kernels_on_a_gpu() -> None:
    plan = resolve(config(), QWEN3_8B, H200)
    (group,) = plan.groups
    assert group.near_kernel and not group.near_routes
    assert ": the kernel for near tokens\n" in as_text(plan)
    shown = as_dict(plan, None)["groups"][0]["near_routes"]
    assert {phase: route["backend"] for phase, route in shown.items()} == dict.fromkeys(Phase, "near")
    assert cuda_graph_blocker(plan) is None and verify_graph_blocker(plan) is None


def test_a_backend_serves_them_without_triton() -> None:
    table = {
        **all_backends(),
        "triton": replace(all_backends()["triton"], adapter=None, missing="the package"),
    }
    plan = resolve(config(), QWEN3_8B, H200, table, declared=True)
    (group,) = plan.groups
    assert not group.near_kernel and phases(group) == set(Phase)
    assert "the kernel for near tokens" not in as_text(plan)


def test_a_cpu_reads_them_as_it_reads_all() -> None:
    plan = resolve(config(), SMALL, CPU)
    assert not plan.groups[0].near_kernel and phases(plan.groups[0]) == set(Phase)
    assert "the newest 64 tokens in float32: torch_ref\n" in as_text(plan)


@pytest.mark.parametrize("tokens", [0, 64])
def test_nothing_is_said_without_a_window(tokens: int) -> None:
    plan = resolve(config(kv_window=tokens), QWEN3_8B, H200)
    assert ("newest" in as_text(plan)) == ("near_routes" in as_dict(plan, None)["groups"][0]) == bool(tokens)
    assert plan.groups[0].near_kernel == bool(tokens)


def drafts_quantised_only() -> dict[str, BackendInfo]:
    """The reference alone, which serves draft tokens over quantised pages, but not over near ones."""
    reference = all_backends()["torch_ref"]
    rows = [
        narrowed
        for row in reference.support
        for narrowed in (
            replace(row, phase=set(Phase) - {Phase.VERIFY}),
            replace(row, phase={Phase.VERIFY}, format={"nvfp4"}),
        )
    ]
    return {"torch_ref": replace(reference, support=tuple(rows))}


def test_drafts_need_both_parts() -> None:
    """A route for far tokens alone would fail at the first draft."""
    table = drafts_quantised_only()
    without = resolve(config(kv_window=0), SMALL, CPU, table)
    assert without.groups[0].route(Phase.VERIFY)
    plan = resolve(config(), SMALL, CPU, table)
    assert phases(plan.groups[0]) == set(Phase) - {Phase.VERIFY}
    with pytest.raises(Unsupported):
        plan.route(0, Phase.VERIFY)


def test_no_draft_reaches_a_host_tier() -> None:
    plan = resolve(config(kv_format="nvfp4_ds_mla", hisparse="on"), DEEPSEEK_V32, H200)
    assert Phase.VERIFY not in phases(plan.groups[0])
