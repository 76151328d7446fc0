"""The adapters of FlashMLA and of FlashAttention 3 and 4, over stand-ins that check their arguments and compute in torch
(tests/support/vendor_hopper.py), as each package that brings the kernels.

What the stand-ins cannot show, whether kernels do what their sources say, is for `NIBBLE_TEST_GPU=1 pytest
tests/conformance`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import recorded
import vendor_hopper
from conformance import test_rows as rows
from conformance.test_rows import Case, Shape
from nibble.attention import backends
from nibble.attention.backends import flash_attention as flash_attention_facts
from nibble.attention.backends import flashmla as flashmla_facts
from nibble.attention.backends import missing_requirement
from nibble.attention.backends.adapters import flash_attention, flashmla
from nibble.attention.layer import attention
from nibble.attention.planner.plan import Route
from nibble.attention.planner.resolve import require_runnable, resolve
from nibble.attention.step import PreparedBatch
from nibble.config import Config
from nibble.errors import BackendError
from nibble.hardware import Hardware, lookup_gpu
from nibble.kernels import import_problem
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import Phase
from planning import DEEPSEEK_V3, QWEN3_8B

MLA = Shape(kind="mla", heads=1, dim=512 + 64, group=20, page=64, rope=64)
SMALL = Shape(kind="mla", heads=1, dim=512 + 64, group=16, page=32, rope=64)
DSA = Shape(kind="dsa", heads=1, dim=512 + 64, group=40, page=64, rope=64, top_k=24)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if tensors were on such a GPU."""
    monkeypatch.setattr(rows, "DTYPE", "bfloat16")
    monkeypatch.setattr(rows, "DEVICE", "cpu")
    monkeypatch.setattr(rows, "HARDWARE", Hardware("a GPU", 90, 1 << 30))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def cases(name: str) -> Iterator[tuple[Case, Route]]:
    """What the rows allow; of staged formats two, one of 4 bits."""
    info = backends.get(name)
    for index, row in enumerate(info.support):
        if rows.HARDWARE.arch not in (row.arch or ()):
            continue
        for case in rows.cases_of(info, index, row):
            route = rows.route_for(case)
            usual = rows.dtype_of(case) == rows.DTYPE  # float16 is left to GPUs
            if route and usual and (route.stage_to is None or case.format in {"nvfp4", "fp8_ds_mla"}):
                yield case, route


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "kind", "formats"),
    [
        ("flashmla", "sgl", {"bf16", "fp8_ds_mla", "nvfp4"}),
        ("fa3", "own", {"bf16", "nvfp4", "fp8_ds_mla"}),
        ("fa3", "vllm", {"bf16", "nvfp4", "fp8_ds_mla"}),
        ("fa4", "own", {"bf16", "nvfp4"}),
    ],
)
def test_what_the_rows_allow_conforms(
    name: str, kind: str, formats: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = vendor_hopper.install(monkeypatch, name, kind)
    found = list(cases(name))
    for case, route in found:
        batches = rows.BATCHES[case.phase]
        for batch in batches[:1] if route.stage_to else batches:  # dequantising first is tested elsewhere
            rows.check(case, route, batch)
            if route.row.lse and not route.stage_to:
                rows.check_partial(case, route, batch)
    assert {case.format for case, _ in found} == formats
    assert calls.ran


def find(name: str, **wanted: Any) -> tuple[Case, Route]:
    """A case whose format is read as it is."""
    for case, route in cases(name):
        if route.stage_to is None and all(getattr(case, key) == value for key, value in wanted.items()):
            return case, route
    raise AssertionError(f"no case of {name} with {wanted}")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("flashmla", "source"), ("flashmla", "vllm"), ("flashmla", "sglang"), ("fa3", "sglang")],
)
@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.VERIFY])
def test_other_packages_serve_too(
    name: str, kind: str, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = vendor_hopper.install(monkeypatch, name, kind)
    shapes = {"flashmla": (MLA, DSA), "fa3": (SMALL, MLA, Shape(group=4, sinks=True, window=20))}
    for shape in shapes[name]:
        case, route = find(name, phase=phase, shape=shape)
        for batch in rows.BATCHES[phase]:
            rows.check(case, route, batch)
    assert calls.ran


def test_a_schedule_is_made_once_for_all_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = vendor_hopper.install(monkeypatch, "flashmla", "sgl")
    case, route = find("flashmla", phase=Phase.DECODE, shape=MLA)
    made = rows.scene(case, route, rows.BATCHES[Phase.DECODE][0])
    adapter, view, (segment,) = made.ctx.backends["flashmla"], made.ctx.pool.view(0), made.ctx.meta.batches
    attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    again = AttentionBatch.from_lens(
        segment.phase, 0, segment.query_lens, segment.seq_lens, segment.page_table_BN
    )
    prepared = PreparedBatch(adapter, None, again, view.page_size, made.spec.window)
    for _ in range(2):
        attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
        prepared.attend(made.q_THD, view, made.spec)
    assert len(calls.schedules) == 2 and len(calls.ran) == 5


@pytest.mark.parametrize(
    ("name", "shape", "stored"),
    [
        ("flashmla", MLA, "bf16"),
        ("flashmla", DSA, "bf16"),
        ("flashmla", DSA, "fp8_ds_mla"),
        ("fa3", SMALL, "bf16"),
        ("fa3", MLA, "bf16"),
        ("fa3", Shape(group=4, sinks=True, window=20), "bf16"),
    ],
)
def test_a_recorded_step_reads_lengths_from_the_device(
    name: str, shape: Shape, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor_hopper.install(monkeypatch, name, "sgl" if name == "flashmla" else "vllm")
    case, route = find(name, phase=Phase.DECODE, shape=shape, format=stored)
    made = rows.scene(case, route, rows.BATCHES[Phase.DECODE][0])
    attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    recorded.check(name, made, shape)


def test_drafts_at_the_wrong_end_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail: drafts of fewer tokens than the most must be the last of their rows, which see all."""
    vendor_hopper.install(monkeypatch, "flashmla", "sgl")
    case, route = find("flashmla", phase=Phase.VERIFY, shape=MLA)

    def first(batch: AttentionBatch, device: torch.device) -> torch.Tensor:
        most = max(batch.query_lens)
        return torch.tensor([i * most + j for i, n in enumerate(batch.query_lens) for j in range(n)])

    monkeypatch.setattr(flashmla, "_end_aligned_rows", first)
    with pytest.raises(AssertionError, match="error"):
        rows.check(case, route, rows.BATCHES[Phase.VERIFY][1])


def test_a_chosen_token_is_minus_one_or_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail: what fills up a row of chosen tokens is read, if it is any other number."""
    vendor_hopper.install(monkeypatch, "flashmla", "sgl")
    case, route = find("flashmla", phase=Phase.DECODE, shape=DSA, format="fp8_ds_mla")
    monkeypatch.setattr(
        flashmla, "_pad_topk", lambda x: torch.nn.functional.pad(x, (0, 128 - x.shape[1]), value=0)
    )
    with pytest.raises(AssertionError):
        rows.check(case, route, rows.BATCHES[Phase.DECODE][0])


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.EXTEND])
def test_fa4_serves_latents_on_blackwell(phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "HARDWARE", Hardware("a GPU", 100, 1 << 30))
    calls = vendor_hopper.install(monkeypatch, "fa4", "own")
    case, route = find("fa4", phase=phase, shape=SMALL)
    for batch in rows.BATCHES[phase]:
        rows.check(case, route, batch)
    assert calls.ran[-1]["qv"]


def test_a_page_that_holds_a_tile_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail: what lies beyond a request's end in such a page is fetched with it, and is poison here."""
    vendor_hopper.install(monkeypatch, "fa3", "own")
    case, route = find("fa3", phase=Phase.EXTEND, shape=MLA)
    rows.check(case, route, rows.BATCHES[Phase.EXTEND][0])
    monkeypatch.setattr(flash_attention, "_splits", lambda page, dim: 1)
    with pytest.raises(BackendError, match="whole tile"):
        rows.check(case, route, rows.BATCHES[Phase.EXTEND][0])


def test_pages_in_parts_are_counted_once_for_all_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor_hopper.install(monkeypatch, "fa3", "own")
    right, splits = flash_attention._split_table, []
    table = right(torch.tensor([[4, 0, 2], [7, 3, 0]], dtype=torch.int32), 2)
    assert table.tolist() == [[8, 9, 0, 1, 4, 5], [14, 15, 6, 7, 0, 1]] and table.dtype is torch.int32
    assert right(table, 1) is table
    monkeypatch.setattr(
        flash_attention, "_split_table", lambda table, count: splits.append(count) or right(table, count)
    )
    case, route = next(
        (case, route)
        for case, route in cases("fa3")
        if case.phase is Phase.DECODE
        and not route.stage_to
        and flash_attention._splits(case.shape.page, case.shape.dim) > 1
    )
    made = rows.scene(case, route, rows.BATCHES[Phase.DECODE][0])
    for _ in range(2):
        attention(made.ctx, 0, made.q_THD, made.streams, made.spec)
    assert splits == [flash_attention._splits(case.shape.page, case.shape.dim)]
    assert [flash_attention._splits(page, dim) for page, dim in ((64, 128), (128, 192), (32, 256), (64, 256), (128, 576))] == [
        1, 2, 1, 2, 4,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_windows_are_counted_without_the_present_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = vendor_hopper.install(monkeypatch, name, "own")
    shape = Shape(dim=128, heads=1, group=4, page=32, window=37)
    case, route = find(name, phase=Phase.EXTEND, shape=shape)
    rows.check(replace(case, shape=replace(shape, softcap=5.0)), route, ((500, 2),))
    assert calls.ran[-1]["window_size"] == (36, 0) and calls.ran[-1]["softcap"] == 5.0


def test_four_bits_are_decoded_by_flashmla_when_staging_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor_hopper.install(monkeypatch, "flashmla", "sgl")
    asked = Config(
        model="m",
        kv_format="nvfp4",
        prefill_backend="torch_ref",
        decode_backend="flashmla",
        allow_staging=True,
    )
    plan = resolve(asked, DEEPSEEK_V3, lookup_gpu("h200"), backends.available_backends())
    require_runnable(plan)
    route = plan.route(0, Phase.DECODE)
    assert str(route) == "flashmla (staged to bf16)" and not route.graphs and plan.layout.page_size == 64
    # over a scene of that format, through attention/layer.py
    (case,) = [
        c for c, r in cases("flashmla") if c.format == "nvfp4" and c.phase is Phase.DECODE and c.shape == MLA
    ]
    staged = rows.route_for(case)
    assert staged and staged.stage_to == "bf16"
    rows.check(case, staged, rows.BATCHES[Phase.DECODE][0])


def test_latents_of_another_shape_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("flashmla", "sgl"), ("fa3", "own")):
        vendor_hopper.install(monkeypatch, name, kind)
        case, route = find(name, phase=Phase.DECODE, shape=MLA if name == "flashmla" else SMALL)
        odd = replace(case, shape=replace(case.shape, rope=32))
        made = rows.scene(odd, route, rows.BATCHES[Phase.DECODE][0])
        with pytest.raises(BackendError, match="512 values and 64 rotary ones, and these have 544 and 32"):
            attention(made.ctx, 0, made.q_THD, made.streams, made.spec)


# What the packages need


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("flashmla", "sgl", None),
        ("flashmla", "vllm", None),
        ("flashmla", "half", "without its legacy half (built with FLASH_MLA_BUILD_LEGACY=0)"),
        ("flashmla", "late", "is of September 2026 or later"),
        ("flashmla", "early", "is older than January 2026"),
        ("fa3", "own", None),
        ("fa3", "vllm", None),
        ("fa3", "bare", "flash_attn_interface was built without PAGEDKV: pip install sglang-kernel"),
        ("fa3", "without", "has no FA3 (no such file)"),
    ],
)
def test_what_is_lacking_is_named_with_its_cure(
    name: str, kind: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor_hopper.install(monkeypatch, name, kind)
    info = backends.get(name)
    lack = missing_requirement(info)
    assert (lack is not None and says in lack and f": {info.install}" in lack) if says else lack is None
    if says:
        with pytest.raises(BackendError, match="pip install"):
            backends.create(info)


def test_a_package_that_breaks_when_imported_is_a_reason_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor_hopper.install(monkeypatch, "flashmla", "sgl")
    monkeypatch.setitem(sys.modules, "flash_mla.flash_mla_interface", None)
    asked = Config(model="m", kv_format="bf16", decode_backend="flashmla")
    made = resolve(asked, DEEPSEEK_V3, lookup_gpu("h200"), backends.available_backends())
    reason = "flashmla cannot run here: it needs kernels that work here, and flash_mla.flash_mla_interface cannot be imported"
    assert any(note.startswith(reason) and "pip install sgl-flash-mla" in note for note in made.notes)


def test_a_package_of_another_make_is_a_reason_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor_hopper.install(monkeypatch, "flashmla", "half")
    monkeypatch.delattr(sys.modules["flash_mla.flash_mla_interface"], "get_ops")
    lack = missing_requirement(backends.get("flashmla"))
    assert lack and "flash_mla.flash_mla_interface is not as expected (AttributeError" in lack


def test_another_package_is_tried_where_one_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = vendor_hopper.install(monkeypatch, "flashmla", "late")
    vendor_hopper.install(monkeypatch, "flashmla", "vllm", calls)
    assert missing_requirement(backends.get("flashmla")) is None
    case, route = find("flashmla", phase=Phase.DECODE, shape=MLA)
    rows.check(case, route, rows.BATCHES[Phase.DECODE][0])
    assert calls.ran


def test_of_an_engine_only_the_kernels_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('an engine starts')")
    (folder / "__init__.py").write_text("")
    (folder / "flash_attn_interface.py").write_text(
        "FA3_AVAILABLE = True\ndef flash_attn_varlen_func(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("vllm", "vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert missing_requirement(backends.get("fa3")) is None
    assert flash_attention_facts.FA3_KERNELS.load().__file__ == str(folder / "flash_attn_interface.py")
    assert "vllm" not in sys.modules
    with pytest.raises(RuntimeError, match="an engine starts"):
        importlib.import_module("vllm")
    for name in names:
        sys.modules.pop(name, None)


def test_without_a_gpu_build_of_torch_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor_hopper.install(monkeypatch, "fa3", "own")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "a CUDA build of PyTorch" in (missing_requirement(backends.get("fa3")) or "")


def test_a_missing_package_is_a_reason_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "import_problem", lambda package: "is missing")
    made = resolve(
        Config(model="m", kv_format="bf16", attention_backend="fa3"),
        QWEN3_8B,
        lookup_gpu("h200"),
        backends.available_backends(),
    )
    reason = "fa3 cannot run here: it needs the package flash_attn_interface or sgl_kernel or vllm, which is missing"
    assert any(note.startswith(reason) for note in made.notes)


@pytest.mark.filterwarnings("ignore")  # of the packages' own
@pytest.mark.parametrize(
    ("offer", "stand_ins"),
    [
        (
            flashmla_facts.KERNELS,
            {
                "flash_mla_with_kvcache": vendor_hopper._FlashMLA.with_kvcache,
                "flash_mla_sparse_fwd": vendor_hopper._FlashMLA.sparse_fwd,
            },
        ),
        (
            flash_attention_facts.FA3_KERNELS,
            {
                "flash_attn_with_kvcache": vendor_hopper._FA3.flash_attn_with_kvcache,
                "flash_attn_varlen_func": vendor_hopper._FA3.flash_attn_varlen_func,
            },
        ),
    ],
    ids=["flashmla", "fa3"],
)
def test_the_stand_in_asks_for_nothing_that_the_package_does_not_know(
    offer: Any, stand_ins: dict[str, Any]
) -> None:
    """Where one of the packages itself is installed."""
    if offer.unavailable_reason() or all(map(import_problem, offer.packages)):
        pytest.skip("no such package here")
    real = offer.load()
    for name, ours in stand_ins.items():
        if hasattr(real, name) and not (
            name == "flash_attn_varlen_func" and hasattr(real, "flash_attn_with_kvcache")
        ):
            lacking = (
                set(inspect.signature(ours).parameters)
                - {"self"}
                - set(inspect.signature(getattr(real, name)).parameters)
            )
            assert not lacking, f"{name} does not know {lacking}"
