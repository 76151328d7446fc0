"""What `nibble plan --explain` says: every backend in every phase, with what stands behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.attention import backends
from nibble.attention.planner import evidence, explain
from nibble.attention.planner.evidence import LedgerEntry, update_ledger
from nibble.attention.planner.explain import Cell, Status
from nibble.attention.planner.options import PlanRequest
from nibble.attention.planner.resolve import resolve
from nibble.config import Config
from nibble.hardware import lookup_gpu
from nibble.model_spec import ModelSpec, Phase
from planning import DEEPSEEK_V3, DEEPSEEK_V32, GPT_OSS, MODELS, QWEN3_8B

SEEN = LedgerEntry(
    "cuda", "decode", "mha", "nvfp4", 90, "NVIDIA H200", "2026-11-20", {"torch": "2.11.0", "triton": "3.6"}
)


@pytest.fixture(autouse=True)
def only_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update_ledger(tmp_path / "ledger.json", [SEEN])
    monkeypatch.setattr(evidence, "shipped_ledger", lambda: tmp_path / "ledger.json")


def found(model_spec: ModelSpec, gpu: str, **options: Any) -> tuple[list[Cell], list[str]]:
    request = PlanRequest(
        Config(model="m", **options), model_spec, lookup_gpu(gpu), backends.all_backends(), True, False
    )
    plan = resolve(request.config, model_spec, request.hardware, declared=True)
    mine = list(explain.cells(request, plan))
    for group in plan.groups:
        chosen = {(cell.need.phase, cell.backend) for cell in mine if cell.planned and cell.group is group}
        assert chosen == {(route.phase, route.backend) for route in group.routes}
    return mine, list(explain.as_lines(mine, request))


def test_a_cell_is_verified_declared_staged_or_refused() -> None:
    mine, lines = found(QWEN3_8B, "h200", kv_format="nvfp4", kv_transforms="none", kv_window=0)
    status = {(cell.backend, cell.need.phase): cell.status for cell in mine}
    assert [key for key, value in status.items() if value is Status.VERIFIED] == [("cuda", Phase.DECODE)]
    assert status["triton", Phase.DECODE] is Status.DECLARED
    assert (status["fa3", Phase.EXTEND], status["fa3", Phase.DECODE]) == (Status.STAGED, Status.ON_REQUEST)
    assert status["cutlass_mla", Phase.DECODE] is Status.REFUSED
    assert "  verified on NVIDIA H200, 2026-11-20 (torch 2.11.0, triton 3.6): cuda" in lines
    assert "    cutlass_mla: only for mla" in lines
    assert not any(line.startswith("    cuda") for line in lines)
    head = "full: layers 0-35 in nvfp4 (mha, packing hnd), page 64, head_dim 128, group 4, bfloat16 on SM90"
    assert head in lines


def test_every_refusal_has_a_reason_and_nothing_else_does() -> None:
    for model_spec, gpu, kv_format in (
        (QWEN3_8B, "a100", "k8v4"), (DEEPSEEK_V3, "b200", "fp8_e4m3"), (MODELS["glm-5"], "h200", "fp8_ds_mla"),
        (GPT_OSS, "rtx5090", "mxfp4"),
    ):  # fmt: skip
        for cell in found(model_spec, gpu, kv_format=kv_format)[0]:
            assert bool(cell.reasons) == (cell.status not in {Status.VERIFIED, Status.DECLARED}), cell


def test_staging_that_was_allowed_need_not_be_asked_for() -> None:
    mine, lines = found(QWEN3_8B, "h200", kv_format="nvfp4", allow_staging=True)
    assert not any(cell.status is Status.ON_REQUEST for cell in mine)
    (line,) = (line for line in lines if line.startswith("  fa3 "))
    assert line.split() == ["fa3", "staged", "staged", "staged", "staged"]


def test_nothing_is_to_be_asked_for_where_it_would_not_help() -> None:
    """A host tier has no staging, allowed or not."""
    fp8 = {"kv_format": "fp8_ds_mla", "page_size": 64}
    without, _ = found(DEEPSEEK_V32, "h200", **fp8)
    hot, lines = found(DEEPSEEK_V32, "h200", **fp8, hisparse="on")
    status = {(cell.backend, cell.need.phase): cell.status for cell in without}
    assert status["flashmla", Phase.EXTEND] is Status.STAGED
    assert not any(cell.status in {Status.STAGED, Status.ON_REQUEST} for cell in hot)
    assert any("flashmla (prefill, extend): " in line for line in lines)


def test_each_group_and_scheme_has_a_table() -> None:
    _, lines = found(GPT_OSS, "h200", kv_format="nvfp4", kv_layers="0=fp8_e4m3")
    heads = [line.partition(" (")[0] for line in lines if ": layers " in line]
    assert heads == ["window: layers 0 in fp8_e4m3", "window: layers 2-22 by 2 in nvfp4+rot",
                     "full: layers 1-23 by 2 in nvfp4+rot"]  # fmt: skip


def test_the_ledger_that_ships_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert evidence.read_ledger(evidence.shipped_ledger())
