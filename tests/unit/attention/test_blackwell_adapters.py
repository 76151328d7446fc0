"""The adapters of FlashInfer's MLA kernels for big Blackwell, over stand-ins that check their arguments and compute in
torch (tests/support/vendor_blackwell.py)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import recorded
import vendor_blackwell
from conformance import test_rows as rows
from conformance.test_rows import Case, Shape
from nibble.attention import backends
from nibble.attention.backends.adapters import flashinfer
from nibble.attention.layer import attention
from nibble.attention.planner.plan import Route
from nibble.hardware import Hardware
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import Phase

BOTH = ("trtllm_mla", "cutlass_mla")
MLA = Shape(kind="mla", heads=1, dim=512 + 64, group=20, page=64, rope=64)


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "DTYPE", "bfloat16")
    monkeypatch.setattr(rows, "DEVICE", "cpu")
    monkeypatch.setattr(rows, "HARDWARE", Hardware("a GPU", 100, 1 << 30))


def cases(name: str) -> Iterator[tuple[Case, Route]]:
    """What the rows allow; of staged formats one, of 4 bits."""
    info = backends.get(name)
    for index, row in enumerate(info.support):
        for case in rows.cases_of(info, index, row):
            route = rows.route_for(case)
            usual = rows.dtype_of(case) == rows.DTYPE  # float16 is left to GPUs
            if route and usual and (route.stage_to is None or case.format == "nvfp4"):
                yield case, route


def find(name: str, phase: Phase) -> tuple[Case, Route]:
    return next(
        (c, r)
        for c, r in cases(name)
        if c.phase is phase and c.shape == MLA and c.format == "bf16" and not r.stage_to
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_what_the_rows_allow_conforms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = vendor_blackwell.install(monkeypatch, name)
    found = list(cases(name))
    for case, route in found:
        batches = rows.BATCHES[case.phase]
        for batch in batches[:1] if route.stage_to else batches:  # dequantising first is tested elsewhere
            rows.check(case, route, batch)
    assert {case.format for case, _ in found} == {"bf16", "nvfp4"}
    assert {case.phase for case, _ in found} == {Phase.DECODE, Phase.VERIFY} and calls.ran


@pytest.mark.parametrize("name", BOTH)
def test_a_recorded_step_reads_lengths_from_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape in place of a CUDA graph: what changes in place is seen, and a row without tokens is zeros."""
    calls = vendor_blackwell.install(monkeypatch, name)
    case, route = find(name, Phase.DECODE)
    made = rows.scene(case, route, rows.BATCHES[Phase.DECODE][0])
    attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    plans = len(calls.planned)
    recorded.check(name, made, MLA)
    assert len(calls.planned) == plans, "a wrapper is planned for a number of requests, once"


def test_a_scale_that_is_built_in_leaves_queries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = vendor_blackwell.install(monkeypatch, "cutlass_mla")
    case, route = find("cutlass_mla", Phase.DECODE)
    made = rows.scene(case, route, rows.BATCHES[Phase.DECODE][0])
    attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    view, adapter, (segment,) = (
        made.ctx.pool.view(0),
        made.ctx.backends["cutlass_mla"],
        made.ctx.meta.batches,
    )
    reference = backends.create(backends.get("torch_ref"))
    for scale in (flashinfer.CUTLASS_SCALE, 1.87 * flashinfer.CUTLASS_SCALE):
        spec = replace(made.spec, scale=scale)
        found = adapter.attend(made.q_THD, view, segment, spec)
        expected = reference.attend(made.q_THD, view, segment, spec)
        assert (found.float() - expected.float()).norm() <= 0.02 * expected.float().norm()
    assert [call["query"][1] for call in calls.ran] == [128, 128, 128]


def test_drafts_that_see_too_much_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail: a draft token sees no later one."""
    vendor_blackwell.install(monkeypatch, "cutlass_mla")
    case, route = find("cutlass_mla", Phase.VERIFY)
    right = flashinfer._split_tokens

    def wrong(segment: AttentionBatch, page: int) -> Any:
        made = right(segment, page)
        counts_B = segment.cu_seqlens_q_B1.diff()
        return replace(made, lens_T=segment.seq_lens_B.repeat_interleave(counts_B))

    monkeypatch.setattr(flashinfer, "_split_tokens", wrong)
    with pytest.raises(AssertionError, match="error"):
        rows.check(case, route, rows.BATCHES[Phase.VERIFY][1])


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_the_stand_in_asks_for_nothing_that_the_package_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the package itself is installed."""
    real = pytest.importorskip("flashinfer.mla")
    cutlass = vendor_blackwell._cutlass(vendor_blackwell.Calls([], [], []))
    gen = vendor_blackwell._Gen.trtllm_batch_decode_with_kv_cache_mla
    theirs = real.BatchMLAPagedAttentionWrapper
    pairs = [
        (gen, real.trtllm_batch_decode_with_kv_cache_mla),
        (cutlass.plan, theirs.plan),
        (cutlass.run, theirs.run),
    ]  # type: ignore[attr-defined]
    pairs.append((vendor_blackwell.MLAPlanMetadata.dense, real.MLAPlanMetadata.dense))
    for ours, known in pairs:
        lacking = set(inspect.signature(ours).parameters) - set(inspect.signature(known).parameters)
        assert not lacking, f"{known.__qualname__} does not know {lacking}"
