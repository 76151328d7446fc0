"""The adapters of FlashInfer's kernels, over a stand-in that checks its arguments and computes in torch (tests/support/vendor.py).

Every case that their rows allow on a GPU goes through the conformance suite's own check. What the stand-in cannot show,
whether the package does what its documentation says, is for `NIBBLE_TEST_GPU=1 pytest tests/conformance`.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import recorded
import vendor
from conformance import test_rows as rows
from conformance.test_rows import Case, Shape
from nibble.attention import backends
from nibble.attention.backends import flashinfer as flashinfer_facts
from nibble.attention.backends import missing_requirement
from nibble.attention.backends.adapters import flashinfer
from nibble.attention.backends.vendor import KernelPackages
from nibble.attention.layer import attention
from nibble.attention.planner.plan import Route
from nibble.attention.planner.resolve import resolve
from nibble.attention.step import PreparedBatch
from nibble.cache.pool import KVView, PagedPool
from nibble.cache.scales import ONE, KVScales, LayerScales, StreamScale
from nibble.config import Config
from nibble.errors import BackendError, ConfigError
from nibble.hardware import Hardware, lookup_gpu
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import Phase
from planning import DEEPSEEK_V3, QWEN3_8B, memory_plan, memory_planner

STAND_INS = {
    "flashinfer": [f"BatchPrefillWithPagedKVCacheWrapper.{name}" for name in ("__init__", "plan", "run")],
    "flashinfer.mla": [f"BatchMLAPagedAttentionWrapper.{name}" for name in ("__init__", "plan", "run")],
    "flashinfer.decode": ["xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache"],
    "flashinfer.prefill": ["trtllm_batch_context_with_kv_cache"],
}
GPUS = {
    90: Hardware("a GPU", 90, 1 << 30),
    100: Hardware("a GPU", 100, 1 << 30),
    120: Hardware("a GPU", 120, 1 << 30),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> vendor.Calls:
    monkeypatch.setattr(rows, "DTYPE", "bfloat16")
    monkeypatch.setattr(rows, "DEVICE", "cpu")
    return vendor.install(monkeypatch)


def on(patch: pytest.MonkeyPatch, arch: int) -> None:
    """As if tensors were on such a GPU, as far as the adapters ask."""
    patch.setattr(rows, "HARDWARE", GPUS[arch])
    patch.setattr(flashinfer, "capability", lambda x: arch)


def cases(name: str, arch: int) -> Iterator[tuple[Case, Route]]:
    """What the rows allow there; of staged formats one."""
    info = backends.get(name)
    for index, row in enumerate(info.support):
        for case in rows.cases_of(info, index, row) if arch in (row.arch or ()) else ():
            route = rows.route_for(case)
            usual = rows.dtype_of(case) == rows.DTYPE  # float16 is left to GPUs
            if route and usual and (route.stage_to is None or case.format == "mxfp4"):
                yield case, route


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch", "formats"),
    [
        ("flashinfer", 90, {"bf16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "mxfp4"}),
        ("flashinfer", 120, {"bf16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "mxfp4"}),
        ("trtllm_mha", 90, {"bf16"}),
        ("trtllm_mha", 100, {"bf16", "fp8_e4m3"}),
        ("trtllm_mha", 120, {"bf16", "fp8_e4m3", "nvfp4"}),
    ],
)
def test_what_the_rows_allow_conforms(
    name: str, arch: int, formats: set[str], calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, arch)
    found = list(cases(name, arch))
    for case, route in found:
        for batch in rows.BATCHES[case.phase]:
            rows.check(case, route, batch)
            if route.row.lse and not route.stage_to:
                rows.check_partial(case, route, batch)
    assert {case.format for case, _ in found} == formats
    assert calls.ran


def scene(backend: str, case: Case, pool_scales: KVScales = ONE) -> rows.Scene:
    route = rows.route_for(case)
    assert route
    made = rows.scene(case, route, rows.BATCHES[case.phase][0])
    if pool_scales is ONE:
        return made
    pool = PagedPool(made.ctx.plan.layout, made.ctx.pool.pages, pool_scales, poison=True)
    return replace(made, ctx=replace(made.ctx, pool=pool))


def find(name: str, **wanted: Any) -> Case:
    info = backends.get(name)
    for index, row in enumerate(info.support):
        for case in rows.cases_of(info, index, row):
            route = rows.route_for(case) if all(getattr(case, k) == v for k, v in wanted.items()) else None
            if route and route.stage_to is None:
                return case
    raise AssertionError(f"no case of {name} with {wanted}")


MLA = Shape(kind="mla", heads=1, dim=512 + 64, group=16, page=32, rope=64)


@pytest.mark.parametrize("shape", [Shape(), MLA], ids=["mha", "mla"])
def test_one_plan_serves_all_layers_of_a_step(
    shape: Shape, calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 90)
    made = scene("flashinfer", find("flashinfer", phase=Phase.EXTEND, format="bf16", shape=shape))
    adapter, view, (segment,) = made.ctx.backends["flashinfer"], made.ctx.pool.view(0), made.ctx.meta.batches
    for _ in range(4):
        attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    assert (len(calls.planned), len(calls.made), len(calls.ran)) == (1, 1, 4)
    assert calls.made[0].backend == "fa3"

    def again(start: AttentionBatch) -> AttentionBatch:
        return AttentionBatch.from_lens(
            start.phase, start.start, start.query_lens, start.seq_lens, start.page_table_BN
        )

    def attend(prepared: PreparedBatch) -> None:
        prepared.attend(made.q_THD, view, made.spec)

    after, third = (
        PreparedBatch(adapter, None, again(segment), view.page_size, made.spec.window) for _ in range(2)
    )
    attend(after)
    attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    for step in (after, third, third):
        attend(step)
    assert (len(calls.planned), len(calls.made)) == (3, 2), "two steps at a time have wrappers of their own"
    attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    assert (len(calls.planned), len(calls.made)) == (4, 2), (
        "whose wrapper another step has is planned for again"
    )


def test_a_wrapper_whose_step_is_over_is_planned_anew(
    calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 90)
    made = scene("flashinfer", find("flashinfer", phase=Phase.DECODE, format="bf16", shape=Shape()))
    attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    (segment,) = made.ctx.meta.batches
    for _ in range(5):
        step = AttentionBatch.from_lens(
            segment.phase, 0, segment.query_lens, segment.seq_lens, segment.page_table_BN
        )
        made.ctx.backends["flashinfer"].attend(made.q_THD, made.ctx.pool.view(0), step, made.spec)
    assert (len(calls.planned), len(calls.made)) == (6, 2)
    assert {wrapper.backend for wrapper in calls.made} == {"fa2"}, "FA3 is slow over one token"


def test_layers_with_other_windows_and_caps_have_plans_of_their_own(
    calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 90)
    made = scene("flashinfer", find("flashinfer", phase=Phase.EXTEND, format="bf16", shape=Shape()))
    attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    (segment,) = made.ctx.meta.batches
    adapter, view = made.ctx.backends["flashinfer"], made.ctx.pool.view(0)
    other = PreparedBatch(adapter, None, segment, view.page_size, 7)
    for _ in range(2):
        other.attend(made.q_THD, view, replace(made.spec, window=7, softcap=5.0))
    planned = [(p["window_left"], p["logits_soft_cap"]) for p in calls.planned]
    assert planned == [(-1, 0.0), (6, 5.0)], "their window does not count the present token"


def scales(k: float | tuple[float, ...], v: float) -> KVScales:
    return KVScales("test", {0: LayerScales({"k": StreamScale(k, None), "v": StreamScale(v, None)})})


@pytest.mark.parametrize(
    ("name", "arch", "kv_format"),
    [
        ("flashinfer", 90, "fp8_e4m3"),
        ("flashinfer", 90, "nvfp4"),
        ("trtllm_mha", 120, "nvfp4"),
        ("trtllm_mha", 100, "fp8_e4m3"),
    ],
)
def test_global_scales_of_keys_and_values_each_go_where_they_belong(
    name: str, arch: int, kv_format: str, calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, arch)
    case = find(name, phase=Phase.DECODE, format=kv_format, shape=Shape(dim=128, heads=1, group=8, page=64))
    plain, other = scene(name, case), scene(name, case, scales(0.02, 0.005))
    for made in (plain, other):
        for stored in made.ctx.pool.views.values():
            assert stored.streams["k"].scale.dim() == 0
    out = []
    for made in (plain, other):
        new = 300
        slots = torch.arange(new)
        generator = torch.Generator().manual_seed(1)
        kv = {n: torch.randn(new, 1, 128, generator=generator).bfloat16() for n in "kv"}
        made.ctx.pool.write(0, kv, slots)
        pages = torch.arange(-(-new // 64), dtype=torch.int32)[None]
        segment = AttentionBatch.from_lens(Phase.DECODE, 0, (1,), (new,), pages)
        q = torch.randn(1, 8, 128, generator=generator).bfloat16()
        adapter = made.ctx.backends[name]
        found = adapter.attend(q, made.ctx.pool.view(0), segment, made.spec)
        expected = backends.create(backends.get("torch_ref")).attend(
            q, made.ctx.pool.view(0), segment, made.spec
        )
        assert (found.float() - expected.float()).norm() <= 0.01 * expected.float().norm()
        out.append(found)
    assert not torch.equal(out[0], out[1]), "the scales do something"
    if name == "trtllm_mha":
        assert calls.ran[-1]["bmm1_scale"] == pytest.approx(0.02 * 128**-0.5)
        assert calls.ran[-1]["bmm2_scale"] == pytest.approx(0.005)


def test_scales_of_single_heads_are_refused_with_what_would_work(
    calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 90)
    case = find("flashinfer", phase=Phase.DECODE, format="fp8_e4m3", shape=Shape())
    made = scene("flashinfer", case, scales((0.1, 0.2), 0.1))
    with pytest.raises(BackendError, match=r"one scale for all heads of 'k'.*--attention-backend triton"):
        attention(made.ctx, 0, made.q_THD, made.streams, made.spec)


def test_latents_of_another_shape_are_refused(calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 90)
    made = scene(
        "flashinfer",
        replace(
            find("flashinfer", phase=Phase.DECODE, format="bf16", shape=MLA), shape=replace(MLA, rope=32)
        ),
    )
    with pytest.raises(
        BackendError, match="latents of 512 values and 64 rotary ones, and these have 544 and 32"
    ):
        attention(made.ctx, 0, made.q_THD, made.streams, made.spec)


@pytest.mark.parametrize("arch", [90, 100])
def test_a_recorded_step_reads_lengths_from_the_device(
    arch: int, calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tape in place of a CUDA graph: what changes in place is seen, and a row without tokens is zeros."""
    on(monkeypatch, arch)
    shape = Shape(dim=128, heads=1, group=8, page=64)
    made = scene("trtllm_mha", find("trtllm_mha", phase=Phase.DECODE, format="bf16", shape=shape))
    attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    recorded.check("trtllm_mha", made, shape)


def test_a_wrong_flag_would_be_seen(calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail: an adapter that passes windows on as they are does not conform."""
    on(monkeypatch, 90)
    case = find(
        "flashinfer",
        phase=Phase.EXTEND,
        format="bf16",
        shape=Shape(dim=256, group=2, page=128, softcap=5.0, window=100),
    )
    route = rows.route_for(case)
    assert route
    right = flashinfer.FlashInfer.kind

    def wrong(self: Any, q: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Any:
        return right(self, q, view, batch, replace(params, window=(params.window or 0) + 1))

    monkeypatch.setattr(flashinfer.FlashInfer, "kind", wrong)
    with pytest.raises(AssertionError, match="error"):
        rows.check(case, route, ((500, 2),))


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_the_stand_in_asks_for_nothing_that_the_package_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the package itself is installed."""
    real = {name: pytest.importorskip(name) for name in STAND_INS}
    vendor.install(monkeypatch)
    for module, names in STAND_INS.items():
        for path in names:
            ours, theirs = (
                set(inspect.signature(operator.attrgetter(path)(x)).parameters)
                for x in (sys.modules[module], real[module])
            )
            assert ours <= theirs, f"{module}.{path} does not know {ours - theirs}"


# What the package needs


@pytest.mark.parametrize(
    ("version", "cuda", "compiles", "says"),
    [
        ("0.6.11", "13.0", True, "flashinfer-python 0.7.2 or later, and 0.6.11 is installed: pip install"),
        ("0.7.2", None, True, "a CUDA build of PyTorch"),
        (
            "0.7.2.post1",
            "13.0",
            False,
            "its kernels compiled, which takes nvcc or the package flashinfer_jit_cache",
        ),
        ("0.10.0", "13.0", True, None),
        (None, "13.0", True, None),
    ],
)
@pytest.mark.parametrize("name", ["flashinfer", "trtllm_mha"])
def test_what_is_lacking_is_named_with_its_cure(
    name: str, version: str | None, cuda: str | None, compiles: bool, says: str | None,
    calls: vendor.Calls, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def found(package: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(metadata, "version", found)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(flashinfer_facts, "_compiles", lambda: compiles)
    lack = missing_requirement(backends.get(name))
    assert (says in lack if lack else False) if says else lack is None


def test_a_missing_package_is_a_reason_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backends, "import_problem", lambda package: "is missing" if package == "flashinfer" else None
    )
    asked = Config(model="m", kv_format="nvfp4", attention_backend="flashinfer")
    made = resolve(asked, QWEN3_8B, lookup_gpu("h200"), backends.available_backends())
    reason = "flashinfer cannot run here: it needs the package flashinfer, which is missing: pip install 'flashinfer-python>=0.7.2'"
    assert any(note.startswith(reason) for note in made.notes)
    alone = {
        name: info for name, info in backends.available_backends().items() if name in {"flashinfer", "sdpa"}
    }
    with pytest.raises(
        ConfigError,
        match=r"flashinfer +would serve it, but needs the package flashinfer, which is missing: pip",
    ):
        resolve(Config(model="m", kv_format="bf16"), DEEPSEEK_V3, lookup_gpu("h200"), alone)


BREAKS = {
    "raise RuntimeError('no driver')": "is broken (RuntimeError: no driver)",
    "raise SystemExit(3)": "is broken (SystemExit: 3)",
    "import other_that_is_nowhere": "is broken (ModuleNotFoundError: No module named 'other_that_is_nowhere')",
    "": "is missing",
}


@pytest.mark.parametrize("code", BREAKS)
def test_a_broken_parent_of_a_package_is_a_reason_and_not_an_error(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lame_parent").mkdir()
    (tmp_path / "lame_parent/__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("lame_parent", None)
    info = replace(backends.get("triton"), packages=("lame_parent.kernels",), install="pip install it")
    assert (
        missing_requirement(info) == f"the package lame_parent.kernels, which {BREAKS[code]}: pip install it"
    )
    assert missing_requirement(replace(info, packages=("nowhere_at_all.kernels",))) == (
        "the package nowhere_at_all.kernels, which is missing: pip install it"
    )
    offer = KernelPackages(("lame_parent.kernels",), "pip install it", lambda module: None)
    with pytest.raises(BackendError, match=r"lame_parent\.kernels cannot be imported .*: pip install it"):
        offer.load()


def test_a_package_that_cannot_be_looked_for_is_a_reason_and_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lame = ModuleType("lame")
    assert lame.__spec__ is None  # for which find_spec raises
    monkeypatch.setitem(sys.modules, "lame", lame)
    with pytest.raises(BackendError, match=r"lame is broken \(ValueError: .*\): pip install it"):
        KernelPackages(("lame.kernels",), "pip install it", lambda module: None).load()


@pytest.mark.parametrize("adapter", [flashinfer.FlashInfer, flashinfer.TrtllmMha])
def test_a_package_that_breaks_when_imported_is_explained(
    adapter: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flashinfer", "flashinfer.decode"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        BackendError, match=r"flashinfer.* cannot be imported \(ModuleNotFoundError.*pip install"
    ):
        adapter()


def test_the_workspace_is_in_the_budget_once_for_each_backend() -> None:
    machine = lookup_gpu("rtx5090")
    both = Config(model="m", kv_format="bf16", prefill_backend="flashinfer", decode_backend="trtllm_mha")
    plan = resolve(both, QWEN3_8B, machine)
    held = 2 * flashinfer_facts.WORKSPACE + flashinfer_facts.PLANS
    assert memory_planner(both, QWEN3_8B, machine, plan).backend_bytes == held
    own = Config(model="m", kv_format="bf16", attention_backend="triton")
    without = resolve(own, QWEN3_8B, machine)
    assert memory_planner(own, QWEN3_8B, machine, without).backend_bytes == 0
    # both record their decode steps, so nothing else differs
    assert (
        memory_plan(both, QWEN3_8B, machine, plan).runtime
        == memory_plan(own, QWEN3_8B, machine, without).runtime + held
    )
