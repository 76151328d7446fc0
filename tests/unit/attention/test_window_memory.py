"""The exact window's part of the memory plan: bounded shares, and refusals whose numbers work."""

from __future__ import annotations

import re

import pytest

from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.window_memory import EXACT_SHARE, SNAPSHOT_SHARE, request_bytes, running_pages
from nibble.cache.exact_window import ExactWindow, WindowBooks
from nibble.config import Config
from nibble.errors import CapacityError
from nibble.hardware import GIB, Hardware, lookup_gpu
from nibble.model_spec import ModelSpec
from planning import QWEN3_8B, memory_plan, mha, model_spec

CPU = Hardware("cpu", 0, 32 * GIB)
SMALL = model_spec(mha(2, 64), context=512, weights=1 << 20)


def planned(model: ModelSpec, machine: Hardware, **options: object) -> tuple[MemoryPlan, Plan]:
    config = Config(model="m", kv_format="nvfp4", **options)  # type: ignore[arg-type]
    plan = resolve(config, model, machine)
    return memory_plan(config, model, machine, plan), plan


def test_a_long_request_takes_little_more() -> None:
    """At 8K tokens the pages in the compute dtype are less than 8 % of those in NVFP4."""
    budget, plan = planned(QWEN3_8B, lookup_gpu("h200"), kv_window=64)
    assert budget.exact and (budget.exact.requests, plan.window, plan.page_size) == (256, 64, 64)
    plain = 8192 * plan.layout.bytes_per_token
    assert plain < request_bytes(plan, 8192) == plain + 2 * budget.exact.bytes_per_page < 1.08 * plain
    whole = budget.pool + budget.exact.bytes
    assert budget.exact.snapshots * budget.exact.bytes_per_page <= SNAPSHOT_SHARE * whole
    without, _ = planned(QWEN3_8B, lookup_gpu("h200"), kv_window=0)
    assert without.exact is None and without.pool > budget.pool


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("memory", ["6MiB", "64MiB", "1GiB"])
def test_all_requests_can_grow_at_once(memory: str, prefix_cache: bool) -> None:
    """Each into another page: snapshots give way, and where there are few, there are pages for it."""
    budget, plan = planned(SMALL, CPU, kv_window=64, kv_memory=memory, prefix_cache=prefix_cache)
    assert budget.exact
    window = ExactWindow(64, len(plan.owner), budget.exact.pages, budget.exact.snapshots)
    books = WindowBooks(window, plan.page_size)
    books.check_lease_room(budget.exact.requests - 1)
    assert bool(budget.exact.snapshots) == prefix_cache
    held = budget.exact.requests * (window.num_copies(plan.page_size) + 1) + budget.exact.snapshots
    assert held <= budget.exact.pages


@pytest.mark.parametrize("memory", ["6MiB", "64MiB"])
def test_first_tokens_have_pages_in_every_request(memory: str) -> None:
    budget, plan = planned(SMALL, CPU, kv_window=64, kv_sinks=40, kv_memory=memory)
    without, _ = planned(SMALL, CPU, kv_window=64, kv_memory=memory)
    assert budget.exact and without.exact and (plan.sinks, plan.page_size) == (48, 16)
    window = ExactWindow(
        64,
        len(plan.owner),
        budget.exact.pages,
        budget.exact.snapshots,
        num_sinks=plan.sinks // plan.page_size,
    )
    WindowBooks(window, plan.page_size).check_lease_room(budget.exact.requests - 1)
    assert running_pages(plan) == 3 + 4 + 1
    assert budget.exact.requests <= without.exact.requests and budget.staging > without.staging


def test_fewer_requests_run_where_memory_is_short() -> None:
    budget, _ = planned(SMALL, CPU, kv_window=64, kv_memory="4MiB")
    assert budget.exact and 1 <= budget.exact.requests < 256
    assert budget.exact.requests * budget.exact.bytes_per_page < EXACT_SHARE * (4 << 20)
    assert budget.pool + budget.exact.bytes <= 4 << 20


def test_a_window_is_no_longer_than_a_request() -> None:
    _, plan = planned(SMALL, CPU, kv_window=4096, max_context=100)
    assert plan.window == 100


@pytest.mark.parametrize("options", [{"kv_layers": "0-1=bf16"}, {"kv_window": 0}])
def test_there_is_none_where_nothing_is_quantised(options: dict[str, object]) -> None:
    budget, plan = planned(SMALL, CPU, **{"kv_window": 64, **options})
    assert not plan.window and budget.exact is None
    assert not any(group.near_routes for group in plan.groups)


def test_a_window_that_leaves_nothing_is_named() -> None:
    with pytest.raises(CapacityError, match=r"the exact window of 256 tokens takes .* a smaller --kv-window"):
        planned(SMALL, CPU, kv_window=256, kv_memory="200KiB")


def test_what_a_small_pool_needs_suffices() -> None:
    with pytest.raises(CapacityError, match="the pool is too small") as caught:
        planned(SMALL, CPU, kv_window=16, kv_memory="2000KiB")
    needed = re.search(r"--kv-memory (\d+MiB)", str(caught.value))
    assert needed and "--max-context -" not in str(caught.value)
    planned(SMALL, CPU, kv_window=16, kv_memory=needed[1])
