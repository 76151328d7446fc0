"""Where memory goes: the pool is whole pages, exactly as planned, and what does not fit is refused with numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from nibble.attention.planner.memory import CPU_SHARE, GRAPH_ROW_BYTES, IDLE_FACTOR, MemoryPlan
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.step_memory import RESERVE
from nibble.attention.planner.support import MAX_STAGED_TOKENS
from nibble.config import Config
from nibble.engine.graphs import Graphs, live
from nibble.engine.page_tables import PageTables
from nibble.errors import CapacityError
from nibble.hardware import GIB, Hardware, lookup_gpu
from nibble.model_spec import ModelSpec
from planning import QWEN3_8B, memory_plan, memory_planner, mha, model_spec

CPU = Hardware("cpu", 0, 32 * GIB)
SMALL = model_spec(mha(2, 64), context=512, weights=1 << 20)


def made(
    model: ModelSpec, machine: Hardware, *, declared: bool = False, **options: Any
) -> tuple[MemoryPlan, Any]:
    config = Config(model="m", **options)
    plan = resolve(config, model, machine, declared=declared)
    return memory_plan(config, model, machine, plan), plan


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3", "nvfp4", "mxfp4", "k8v4"])
@pytest.mark.parametrize("machine", [CPU, lookup_gpu("h200")], ids=str)
def test_the_pool_is_whole_pages(kv_format: str, machine: Hardware) -> None:
    money, plan = made(QWEN3_8B, machine, kv_format=kv_format, kv_layers="0=fp8_e4m3", max_running=8)
    assert money.pool == money.pages * plan.layout.bytes_per_page
    assert money.tokens == money.pages * plan.page_size
    assert money.bytes_per_token == plan.layout.bytes_per_token
    assert money.weights + money.workspace + money.reserve + money.pool <= machine.memory


def test_a_gpu_is_filled_to_the_reserve() -> None:
    money, plan = made(QWEN3_8B, lookup_gpu("h200"))
    free = lookup_gpu("h200").memory * (1 - RESERVE) - money.weights - money.workspace
    assert 0 <= free - money.pool < plan.layout.bytes_per_page + 1
    assert money.limit == "free memory"


@pytest.mark.parametrize(("prefix_cache", "times"), [(True, IDLE_FACTOR), (False, 1)])
def test_a_small_model_does_not_fill_a_gpu(prefix_cache: bool, times: int) -> None:
    money, _ = made(SMALL, lookup_gpu("h200"), prefix_cache=prefix_cache, max_running=4)
    assert money.tokens == times * 4 * 512


def test_a_cpu_gives_what_requests_fill_and_a_share_at_most() -> None:
    small, _ = made(SMALL, CPU, max_running=4)
    large, plan = made(QWEN3_8B, CPU)
    assert (small.tokens, small.limit) == (4 * 512, "max_running x max_context")
    assert 0 <= CPU.memory * CPU_SHARE - large.pool < plan.layout.bytes_per_page
    assert large.limit == "25% of memory"


def test_kv_memory_is_honoured_to_the_page() -> None:
    money, plan = made(SMALL, CPU, kv_memory="2500000", max_running=4)
    assert 0 <= 2_500_000 - money.pool < plan.layout.bytes_per_page
    assert money.limit == "kv_memory"


def test_kv_memory_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"--kv-memory 200GiB does not fit: .* leaves 1[23]\d\.\d+ GiB"):
        made(QWEN3_8B, lookup_gpu("h200"), kv_memory="200GiB")


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CapacityError, match="nothing is left for the cache") as caught:
        made(replace(QWEN3_8B, weight_bytes=140 * GIB), lookup_gpu("h200"))
    assert "token-budget" not in str(caught.value)  # which frees nothing of the weights
    with pytest.raises(CapacityError, match=r"a smaller --token-budget \(now 8192\) would help"):
        made(replace(QWEN3_8B, weight_bytes=133 * GIB), lookup_gpu("h200"))


@pytest.mark.parametrize("options", [{"max_running": 2}, {"max_running": 200, "max_context": 64}])
def test_a_pool_too_small_says_what_would_help(options: dict[str, Any]) -> None:
    """All the numbers of the message are tried."""
    with pytest.raises(CapacityError, match="the pool is too small") as caught:
        made(SMALL, CPU, kv_memory="200KiB", **options)
    text = str(caught.value)
    memory = re.search(r"--kv-memory (\d+MiB)", text)
    assert memory
    made(SMALL, CPU, **{**options, "kv_memory": memory[1]})
    cheaper = {
        f"max_{name}": int(value) for name, value in re.findall(r"--max-(running|context) (\d+)", text)
    }
    assert cheaper
    made(SMALL, CPU, **{**options, **cheaper, "kv_memory": "200KiB"})


def test_staging_is_priced_by_its_bound() -> None:
    plain: dict[str, Any] = {"kv_format": "nvfp4", "kv_window": 0}
    native, _ = made(QWEN3_8B, lookup_gpu("b200"), **plain, attention_backend="triton")
    staged, _ = made(QWEN3_8B, lookup_gpu("b200"), **plain, prefill_backend="fa4", decode_backend="triton")
    k_and_v_in_bf16, one_in_float32 = 2 * 8 * 128 * 2, 8 * 128 * 4
    assert native.staging == 0
    assert staged.staging == MAX_STAGED_TOKENS * (k_and_v_in_bf16 + one_in_float32)


def test_a_small_model_stages_no_more_than_it_has() -> None:
    staged, plan = made(
        SMALL,
        lookup_gpu("b200"),
        kv_format="nvfp4",
        prefill_backend="fa4",
        decode_backend="triton",
        max_running=3,
    )
    assert plan.page_size == 64
    assert staged.staging == 3 * 512 * (2 * 8 * 64 * 2 + 8 * 64 * 4)


def test_a_kernels_workspace_is_planned() -> None:
    """Prompts through a kernel that dequantises pages piece by piece: pages in bfloat16, and two parts in float32."""
    config, machine = Config(model="m", kv_format="nvfp4"), lookup_gpu("h200")
    plan = resolve(config, QWEN3_8B, machine)
    pieces = {route.row.workspace for group in plan.groups for route in group.routes} - {0}
    assert len(pieces) == 1, "some route of this plan has a workspace"
    planned = pieces.pop() * 8 * 128 * 2 * 2 + 2 * 4 * 8192 * 32 * 128
    assert (
        memory_planner(config, QWEN3_8B, machine, plan).kernel_bytes
        == planned
        <= memory_plan(config, QWEN3_8B, machine, plan).staging
    )


@pytest.mark.parametrize("machine", [CPU, lookup_gpu("h200")], ids=str)
def test_page_tables_are_planned(machine: Hardware) -> None:
    plans = {rows: made(SMALL, machine, max_running=rows)[0] for rows in (4, 1004)}
    tables = {rows: PageTables(rows + 1, plans[4].table_width, "cpu") for rows in plans}
    sizes = {rows: table.table_RN.nbytes + table.latest_R.nbytes for rows, table in tables.items()}
    assert plans[1004].table_width == plans[4].table_width
    assert plans[1004].tables - plans[4].tables >= sizes[1004] - sizes[4]
    assert all(plans[rows].tables >= sizes[rows] for rows in plans)


def test_buffers_of_decode_steps_are_planned() -> None:
    config, machine = Config(model="m", max_running=64), lookup_gpu("h200")
    planner = memory_planner(config, QWEN3_8B, machine, resolve(config, QWEN3_8B, machine))
    buffers = Graphs(planner.graph_sizes, torch.device("cpu"), live)
    size = buffers.inputs.nbytes + buffers.cu_seqlens_q.nbytes + buffers.rows.nbytes
    assert planner.graph_sizes[-1] * GRAPH_ROW_BYTES == size - 4, "all but the end of the last request"
    assert planner.table_bytes > size


SMALL_HOST = replace(lookup_gpu("h200"), host=16 * GIB)


@pytest.mark.parametrize("options", [{}, {"kv_memory": "2MiB"}])
@pytest.mark.parametrize(
    ("model", "machine"), [(SMALL, CPU), (QWEN3_8B, lookup_gpu("h200")), (SMALL, SMALL_HOST)], ids=str
)
def test_more_requests_than_tables_have_room_for_are_refused(
    model: ModelSpec, machine: Hardware, options: dict[str, Any]
) -> None:
    with pytest.raises(CapacityError, match=r"a smaller --max-running \(now 1000000000\)"):
        made(model, machine, max_running=1_000_000_000, **options)
