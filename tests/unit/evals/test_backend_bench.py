"""Races of backends: who may enter, that each is called as an engine calls it, and that nobody wrong is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.attention import backends
from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.planner import support
from nibble.attention.planner.options import PlanRequest
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import BackendInfo, Origin, Support
from nibble.config import Config
from nibble.evals import fixtures
from nibble.evals import tune as race
from nibble.evals.fixtures import make_fixture
from nibble.evals.tune import Result, entrants, fastest
from nibble.hardware import Hardware, lookup_gpu, probe
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import LayerGroup, ModelSpec, Phase, Stream
from planning import GEMMA2, QWEN3_8B, model_spec

STREAMS = (Stream("k", 2, 32), Stream("v", 2, 32))
SMALL = model_spec(LayerGroup("full", "mha", STREAMS, (0, 1), 4))
DECODE, EXTEND = fixtures.parse_workload(Phase.DECODE, "2x40"), fixtures.parse_workload(Phase.EXTEND, "8+33")


def backend(
    name: str, adapter: Callable[[], Any], origin: Origin = Origin.PORTABLE, **more: Any
) -> BackendInfo:
    row = Support(phase=frozenset(Phase), kind=frozenset({"mha"}), format=None, **more)
    return BackendInfo(name=name, support=(row,), summary="", origin=origin, adapter=adapter)


def changed(how: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    """An adapter that does something to the right answer."""

    class Changed(TorchRef):
        def forward(self, *args: Any) -> Tensor:
            return how(super().forward(*args))

    return Changed


def fails(_: Tensor) -> Tensor:
    raise RuntimeError("no such kernel\nat all")


def ready(
    table: dict[str, BackendInfo],
    scheme: str = "fp32",
    of: ModelSpec = SMALL,
    machine: Hardware | None = None,
) -> tuple[PlanRequest, Plan]:
    config, hardware = Config(model="m", kv_format=scheme), machine or probe("cpu")
    return PlanRequest(config, of, hardware, table, False, False), resolve(config, of, hardware, table)


def raced(table: dict[str, BackendInfo], work: Any = DECODE, **more: Any) -> dict[str, Result]:
    request, plan = ready(table, **more)
    (part,) = support.scheme_groups(request.spec, request.model_spec)
    return {result.name: result for result in race.bench_backends(request, plan, part, work)}


def test_one_failure_is_its_own_and_nobody_wrong_is_timed() -> None:
    found = raced({
        "broken": backend("broken", changed(fails), Origin.OWN),
        "wrong": backend("wrong", changed(lambda x: x * 1.01)),
        "nan": backend("nan", changed(lambda x: x.index_fill(0, torch.tensor([0]), float("nan")))),
        "right": backend("right", TorchRef),
    })  # fmt: skip
    assert found["broken"].failure == "RuntimeError: no such kernel at all" and found["broken"].in_plan
    assert "a wrong answer has no speed" in found["wrong"].failure and found["wrong"].ms is None
    assert "relative error inf" in found["nan"].failure
    assert found["right"].ms and not found["right"].failure and not found["right"].in_plan
    assert found["right"].read_bytes == 2 * 40 * 2 * 2 * 32 * 4
    assert fastest(list(found.values())) == found["right"]


def test_who_is_much_slower_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def noted(x: Tensor) -> Tensor:
        called.append(1)
        return x

    def once_ms(request: PlanRequest, call: Callable[[], object]) -> float:
        """An hour of the slow one, and nothing of another."""
        before = len(called)
        call()
        return 3_600_000.0 * (len(called) - before)

    monkeypatch.setattr(race, "_once_ms", once_ms)
    found = raced({"slow": backend("slow", changed(noted)), "right": backend("right", TorchRef, Origin.OWN)})
    assert found["slow"].rough and found["slow"].ms == 3_600_000.0 and not found["right"].rough
    # To be judged, and to be timed twice.
    assert len(called) == 3


def test_who_plans_long_for_a_step_is_not_hopeless_at_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[AttentionBatch] = []

    class Plans(TorchRef):
        def prepare(self, q: Tensor, view: Any, batch: AttentionBatch, params: Any) -> Any:
            planned.append(batch)
            return super().prepare(q, view, batch, params)

    def once_ms(request: PlanRequest, call: Callable[[], object]) -> float:
        """Of a plan an hour, and of a call nothing."""
        before = len(planned)
        call()
        return 3_600_000.0 * (len(planned) - before)

    monkeypatch.setattr(race, "_once_ms", once_ms)
    found = raced({"plans": backend("plans", Plans), "right": backend("right", TorchRef, Origin.OWN)})
    assert planned and found["plans"].ms and not found["plans"].rough


def test_staging_leaves_out_what_no_window_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an engine: a race over all pages would price staging too high."""
    seen: list[int] = []

    class Noting(TorchRef):
        def forward(self, q: Tensor, view: Any, batch: AttentionBatch, params: Any, state: Any) -> Tensor:
            seen.append(max(batch.seq_lens))
            return super().forward(q, view, batch, params, state)

    row = Support(phase=frozenset(Phase), kind=frozenset({"mha"}), format=frozenset({"fp32"}))
    plain = BackendInfo(name="plain", support=(row,), summary="", adapter=Noting)
    windowed = model_spec(LayerGroup("window", "mha", STREAMS, (0, 1), 4, window=20))
    work = fixtures.parse_workload(Phase.EXTEND, "8+200")
    table = {"plain": plain, "right": backend("right", TorchRef, Origin.OWN)}
    found = raced(table, work, scheme="nvfp4", of=windowed)["plain, staged"]
    assert found.ms and not found.failure and max(seen) <= 8 + 20 + 16


def test_what_a_backend_works_out_is_asked_of_it_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[AttentionBatch] = []
    seen: list[AttentionBatch] = []

    class Noting(TorchRef):
        def prepare(self, q: Tensor, view: Any, batch: AttentionBatch, params: Any) -> Any:
            steps.append(batch)
            return super().prepare(q, view, batch, params)

        def forward(self, q: Tensor, view: Any, batch: AttentionBatch, params: Any, state: Any) -> Tensor:
            seen.append(batch)
            return super().forward(q, view, batch, params, state)

    # The number of a step's calls follows from the time of one.
    monkeypatch.setattr(race, "_once_ms", lambda request, call: call() is None)
    result = raced({"noting": backend("noting", Noting)})["noting"]
    assert result.ms and steps and len(seen) == 2 + (len(steps) - 1) * fixtures.CALLS


def test_pages_are_scattered_and_layers_outgrow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    request, _ = ready({"a": backend("a", TorchRef)}, "nvfp4")
    (part,) = support.scheme_groups(request.spec, request.model_spec)
    work = fixtures.parse_workload(Phase.EXTEND, "32+512")
    monkeypatch.setattr(fixtures, "l2_bytes", lambda device: 50_000)
    scene = make_fixture(part, work, 16, "hnd", "float32", "cpu")
    pages = scene.batch.page_table_BN[0].tolist()
    assert sorted(pages) == list(range(34)) and pages != sorted(pages)
    asked = 32 * 4 * 32 * 4
    assert scene.layers == -(-fixtures.L2_TIMES * 50_000 // (scene.read_bytes + asked)) > 1
    assert scene.read_bytes == 544 * 2 * (32 // 2 + 32 // 16) * 2
    assert [(rows.start, part.seq_lens) for rows, part in scene.samples] == [(0, (520,)), (24, (544,))]
    windowed = replace(part, group=replace(part.group, window=20))
    assert (
        make_fixture(windowed, work, 16, "hnd", "float32", "cpu").read_bytes == scene.read_bytes * 52 // 544
    )


def test_who_may_enter() -> None:
    table = dict(backends.all_backends())
    request, plan = ready(table, "nvfp4", QWEN3_8B, lookup_gpu("h200"))
    (part,) = support.scheme_groups(request.spec, request.model_spec)

    def names(phase: Phase, only: tuple[str, ...] = ()) -> list[str]:
        found = entrants(request, plan, part, phase, only)
        assert all(entrant.route.fits(entrant.page, entrant.packing) for entrant in found)
        return [e.route.backend + "*" * bool(e.route.stage_to) for e in found]

    decode = names(Phase.DECODE)
    assert (
        decode[0] == "cuda" and "triton" in decode and "torch_ref" not in decode
    )  # what the others are checked by
    assert not any(name.endswith("*") for name in decode)
    extend = names(Phase.EXTEND)
    assert len(extend) == len(set(extend)) and {"sdpa", "triton", "flashinfer", "flashinfer*"} <= set(extend)
    assert names(Phase.DECODE, ("torch_ref", "cuda")) == ["cuda", "torch_ref"]
    alone, of = (
        {"torch_ref": table["torch_ref"]},
        ready({"torch_ref": table["torch_ref"]}, "nvfp4", GEMMA2, lookup_gpu("h200")),
    )
    windowed = support.scheme_groups(of[0].spec, of[0].model_spec)[0]
    assert [e.route.backend for e in entrants(*of, windowed, Phase.DECODE)] == list(alone)


def test_an_entrant_gets_pages_that_it_reads() -> None:
    odd = backend("odd", TorchRef, page=frozenset({48}), packing=frozenset({"nhd"}))
    found = raced({"first": backend("first", TorchRef, Origin.OWN), "odd": odd}, EXTEND)
    assert (found["odd"].page, found["odd"].packing) == (48, "nhd") and not found["odd"].in_plan
    assert found["first"].page == 16 and found["first"].in_plan and found["odd"].ms
