"""Products with packed matrices: the definition, and how the library's kernels are prepared and tested.

A stand-in for `humming-kernels` computes by the definition of what it is given, so that what Nibble hands over counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels import ahead, gated
from nibble.kernels import quantized_linear as operation
from nibble.kernels.quantized_linear import (
    Preparation,
    cuda,
    fp8_blocks,
    naive,
    quantized_gated_linear,
    quantized_linear,
)
from nibble.kernels.quantized_linear.matrix import PackedMatrix, merged
from nibble.kernels.weight_formats import (
    GROUP,
    Activations,
    WeightFormat,
    activations_unserved,
    bytes_kept,
    unserved,
)

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from packed_weights import KINDS, quantize

RANDOM = torch.Generator().manual_seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def served(matrix: PackedMatrix) -> tuple[PackedMatrix, Tensor]:
    """In the layout of its kernels, which have passed their test."""
    prepare = Preparation([matrix])
    prepared = prepare(matrix)
    prepare.test([prepared])
    return prepared


def matrix_of(name: str, rows: int = 128, columns: int = 256) -> PackedMatrix:
    kind = KINDS[name]
    weight = torch.randn(rows, columns, generator=RANDOM).bfloat16()
    return replace(quantize(weight, kind.format), activations=kind.activations)


def as_multiplied(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """The values of inputs, quantised where the matrix says so, by a plain loop over tokens and groups."""
    if not matrix.activations:
        return x
    rows = x.float().reshape(-1, x.shape[-1]).clone()
    width = GROUP if matrix.activations is Activations.GROUP else x.shape[-1]
    for row in rows:
        for first in range(0, len(row), width):
            part = row[first : first + width]
            scale = part.abs().max() / 448 if matrix.input_scale is None else matrix.input_scale
            part[:] = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return rows.view(x.shape)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_integers_fill_words(bits: int, dim: int) -> None:
    values = torch.randint(1 << bits, (16, 24), generator=RANDOM, dtype=torch.int32)
    packed = naive.pack_words(values, bits, dim)
    assert packed.dtype == torch.int32 and packed.shape[dim] == values.shape[dim] * bits // 32
    torch.testing.assert_close(naive.unpack_words(packed, bits, dim), values)
    first = packed.flatten()[0].item() & ((1 << bits) - 1)
    assert first == values[0, 0]


def test_the_definition_by_hand() -> None:
    codes = naive.pack_words(torch.tensor([[1, 2, 3, 4, 15, 0, 9, 8]]), 4, 1)
    scale = torch.tensor([[2.0, 0.5]])
    plain = PackedMatrix(WeightFormat("uint4", 4), codes, scale, torch.float32)
    assert naive.dequantize(plain).tolist() == [[-14, -12, -10, -8, 3.5, -4, 0.5, 0]]
    zero = naive.pack_words(torch.tensor([[1, 15]] * 8), 4, 0)
    format = WeightFormat("uint4", 4, has_zero=True)
    asymmetric = PackedMatrix(format, codes.repeat(8, 1), scale.repeat(8, 1), torch.float32, zero=zero)
    assert naive.dequantize(asymmetric)[7].tolist() == [0, 2, 4, 6, 0, -7.5, -3, -3.5]
    e2m1 = PackedMatrix(
        WeightFormat("e2m1", 4, "e8m0", has_global=True), codes, torch.tensor([[127, 128]], dtype=torch.uint8),
        torch.float32, global_scale=torch.tensor([10.0]),
    )  # fmt: skip
    assert naive.dequantize(e2m1).tolist() == [[5, 10, 15, 20, -120, 0, -10, -0.0]]


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_unpacked_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = matrix_of(name), torch.randn(3, 2, 256, generator=RANDOM)
    expected = as_multiplied(x, matrix) @ naive.dequantize(matrix).T
    monkeypatch.setattr(naive, "ROWS", 48)
    dtype = matrix.dtype if matrix.activations else x.dtype
    torch.testing.assert_close(quantized_linear(x, matrix), expected.to(dtype))


@pytest.mark.parametrize("name", KINDS)
def test_merged_matrices_are_those_of_their_parts(name: str) -> None:
    parts = [matrix_of(name), matrix_of(name, 64), matrix_of(name, 32)]
    whole = merged(parts)
    assert whole.shape == (224, 256) and whole.nbytes >= sum(part.nbytes for part in parts) - 8
    torch.testing.assert_close(naive.dequantize(whole), torch.cat([naive.dequantize(part) for part in parts]))


def test_what_kernels_do_not_multiply() -> None:
    format = WeightFormat("uint4", 128)
    assert not unserved(format, 256, 512, "bfloat16")
    assert "tiles" in unserved(format, 64, 512, "bfloat16") and not unserved(format, 64, 512, "float32")
    assert "whole groups" in unserved(format, 256, 192, "bfloat16")
    assert "groups of 256" in unserved(WeightFormat("uint4", 256), 256, 512, "bfloat16")
    assert "float16" in unserved(WeightFormat("e4m3"), 256, 512, "float16")
    assert "fill words" in unserved(WeightFormat("uint4", has_zero=True), 4, 512, "float32")
    assert bytes_kept(format, 64, 512, "bfloat16") is None
    assert bytes_kept(format, 256, 512, "bfloat16") == 256 * 512 // 2 + 2 * 256 * 4


class Library:
    """A stand-in: kernels for up to 16 rows and for more. `wrong` makes an error of one of them.

    `misread` makes one of the scales of FP8 activations.
    """

    def __init__(self) -> None:
        self.wrong: Callable[[int, Tensor], Tensor] = lambda rows, y: y
        self.misread: Callable[[Tensor | None], Tensor | None] = lambda x_scale: x_scale
        self.launches: list[int] = []
        self.matrices: dict[str, PackedMatrix] = {}

    def config(
        self, rows: int, columns: int, schema: Any, inputs: Any, torch_dtype: torch.dtype, device: Any
    ) -> Any:
        text = f"{rows} x {columns} {schema} {inputs} {torch_dtype}"
        return SimpleNamespace(
            to_str=lambda: text, schema=schema, inputs=inputs, dtype=torch_dtype, sm_version=90
        )

    def transform(self, config: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Another layout: what is last comes first."""
        schema = config.schema
        kinds = {"float8e4m3": "e4m3", "float4e2m1": "e2m1", "float8e8m0": "e8m0"}
        scales = kinds.get(schema.bs_dtype, "")
        blocks, (rows, words) = schema.weight_scale_type == "block", tensors["weight"].shape
        assert scales or schema.bs_dtype == (
            "float32" if blocks else str(config.dtype).removeprefix("torch.")
        )
        if blocks:
            assert schema.weight_scale_group_size_n == 128 and tensors["weight_scale"].dtype == torch.float32
            assert tensors["weight_scale"].shape == (rows // 128, words * 4 // 128)
        self.inputs, self.blocks = config.inputs, blocks
        assert tensors["weight"].dtype == torch.int32 and ("zero_point" in tensors) == schema.has_zero_point
        assert blocks or schema.weight_scale_type == (
            "group" if schema.weight_scale_group_size else "channel"
        )
        second = tensors.get("weight_scale_2")
        assert schema.weight_scale_2_type == (
            "none" if second is None else "tensor" if len(second) == 1 else "channel"
        )
        assert second is None or second.dtype == (torch.float32 if len(second) == 1 else config.dtype)
        self.kind = (
            kinds.get(schema.b_dtype, schema.b_dtype),
            schema.weight_scale_group_size,
            scales,
            config.dtype,
        )
        return {name: tensor.flip(0) for name, tensor in tensors.items() if tensor.dim() > 1} | (
            {} if second is None else {"weight_scale_2": second}
        )

    def launch(self, **given: Any) -> Tensor:
        (kind, group, scales, dtype), zero = self.kind, given["zero_point"]
        assert given["configs"].tolist()[:2] == [0, 16] and not given["locks"].any()
        format = WeightFormat(kind, group, scales, zero is not None, given["weight_scale_2"] is not None)
        scale, codes, x_scale = given["weight_scale"].flip(0), given["inputs"], given["input_scale"]
        scale = scale.repeat_interleave(128, 0) if self.blocks else scale
        self.check_inputs(codes, x_scale, dtype)
        matrix = PackedMatrix(
            format, given["weight"].flip(0), scale.view(torch.uint8) if scales else scale, dtype,
            zero=None if zero is None else zero.flip(0), global_scale=given["weight_scale_2"],
        )  # fmt: skip
        self.launches.append(len(codes))
        return self.wrong(len(codes), naive.quantized_linear(codes, matrix, self.misread(x_scale)))

    def check_inputs(self, codes: Tensor, x_scale: Tensor | None, dtype: torch.dtype) -> None:
        if self.inputs is None:
            assert x_scale is None and codes.dtype == dtype
            return
        assert x_scale is not None and x_scale.is_contiguous() and x_scale.dtype == torch.float32
        assert codes.dtype == torch.float8_e4m3fn and self.inputs.a_dtype == "float8e4m3"
        shapes = {
            "dynamic_group": (len(codes), codes.shape[1] // 128),
            "dynamic_token": (len(codes), 1),
            "static_tensor": (1,),
        }
        mode = self.inputs.input_quant_mode
        assert x_scale.shape == shapes[mode]
        assert self.inputs.input_scale_group_size == (128 if mode == "dynamic_group" else 0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    stand_in = Library()

    def module(name: str, **content: Any) -> None:
        entry = ModuleType(name)
        vars(entry).update(content)
        monkeypatch.setitem(sys.modules, name, entry)

    def kernels(config: str, tuning_config: list[Any], device: Any) -> Tensor:
        return torch.tensor(
            [[first, last, i, 0] for i, (first, last, _) in enumerate(tuning_config)]
        ).flatten()

    def settings(config: Any, shape_m: int, device: Any) -> dict[str, int]:
        return {"rows": 16 if shape_m <= 16 else 64}

    for name in ("_kernels", "_compiling"):
        monkeypatch.setattr(operation._humming(), name, {})
    launcher = SimpleNamespace(launch_kernel=stand_in.launch)
    module("humming", ops=launcher)
    module("humming.schema", HummingWeightSchema=SimpleNamespace, HummingInputSchema=SimpleNamespace)
    module(
        "humming.transform",
        prepare_layer_config=stand_in.config,
        transform_humming_tensors=stand_in.transform,
    )
    module("humming.kernel", __path__=[])
    module("humming.kernel.humming", HummingKernel=SimpleNamespace(prepare_kernels=kernels))
    module("humming.tune", get_heuristics_config=settings)
    yield stand_in


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_merged", [False, True])
def test_the_library_is_given_what_it_should_multiply(name: str, is_merged: bool, library: Library) -> None:
    matrix = merged([matrix_of(name), matrix_of(name)]) if is_merged else matrix_of(name)
    others = [matrix, replace(matrix)]
    prepare = Preparation(others)
    (packed, locks), other = prepare(others[0]), prepare(others[1])
    assert not library.launches
    prepare.test([(packed, locks), other])
    assert packed.layout and packed.shape == matrix.shape
    assert packed.nbytes == matrix.nbytes or is_merged or name == "fp8a8"
    # Each kernel twice, for the first of two matrices that are alike.
    assert library.launches == [1, 1, 17, 17]
    x = torch.randn(2, 3, 256, generator=RANDOM).bfloat16()
    expected = as_multiplied(x, matrix).float() @ naive.dequantize(matrix).T
    assert (quantized_linear(x, packed, locks) - expected).norm() <= 0.005 * expected.norm()
    assert quantized_linear(x[:0], packed, locks).shape == (0, 3, matrix.rows)


@pytest.mark.parametrize("rows", [1, 17])
def test_a_wrong_kernel_is_refused(rows: int, library: Library) -> None:
    library.wrong = lambda tokens, y: y.roll(1, -1) if tokens == rows else y
    with pytest.raises(
        BackendError, match=f"{rows} rows times 128 x 256 weights .uint4, groups of 128. are off by"
    ):
        served(matrix_of("int4"))


@pytest.mark.parametrize(
    ("name", "misread"),
    [
        ("fp8rowa8", lambda scale: scale.amax().expand_as(scale)),
        ("fp8a8", lambda scale: scale.amax(0, keepdim=True).expand_as(scale)),
        ("fp8a8", lambda scale: scale.flip(1)),
    ],
    ids=[
        "of the tensor instead of the token",
        "of the group instead of token and group",
        "of groups, exchanged",
    ],
)
def test_scales_of_activations_that_are_misread_are_refused(
    name: str, misread: Callable[[Tensor], Tensor], library: Library
) -> None:
    matrix = matrix_of(name)
    served(matrix)
    library.misread = misread
    with pytest.raises(BackendError, match="the start-up test failed"):
        served(matrix)


def test_activations_by_hand() -> None:
    x = torch.zeros(2, 256)
    x[0, 0], x[0, 1], x[0, 128], x[1, 3] = 448.0, 0.3, -2.0, 1e-3
    codes, scale = naive.quantize_activations(x, Activations.GROUP)
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == (2, 2)
    torch.testing.assert_close(scale, torch.tensor([[448.0, 2.0], [1e-3, naive.TINY]]) / 448)
    assert codes[0, [0, 1, 128]].float().tolist() == [448.0, 0.3125, -448.0] and codes[1, 3].float() == 448
    codes, scale = naive.quantize_activations(x, Activations.TOKEN)
    torch.testing.assert_close(scale, torch.tensor([[448.0], [1e-3]]) / 448)
    assert codes[0, [0, 128]].float().tolist() == [448.0, -2.0]
    codes, scale = naive.quantize_activations(x, Activations.TENSOR, torch.tensor([0.5]))
    # What is beyond the scale's range is clipped.
    assert scale.tolist() == [0.5] and codes[0, [0, 128]].float().tolist() == [448.0, -4.0]
    assert (
        naive.quantize_activations(torch.full((1, 128), torch.nan), Activations.TOKEN)[0]
        .float()
        .isnan()
        .all()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (1152, 128), (96, 96), (4736, 4736), (2432, 128)])
def test_activations_in_one_launch(columns: int, group: int, dtype: torch.dtype) -> None:
    """To the byte those of the definition, for rows of any stride."""
    from nibble.kernels.quantized_linear import triton as fast

    x_TK = (torch.randn(5, 2 * columns, generator=RANDOM) * 3).to(dtype)[:, :columns].to(DEVICE)
    x_TK[1, :group], x_TK[2, 3], x_TK[4] = 0, 1e4, 1e-12
    codes, scale = fast.quantize_activations(x_TK, group)
    expected, expected_scale = naive.quantize_groups(x_TK, group)
    assert scale.equal(expected_scale) and codes.view(torch.uint8).equal(expected.view(torch.uint8))


def test_activations_that_are_no_numbers_stay_so() -> None:
    from nibble.kernels.quantized_linear import triton as fast

    x_TK = torch.ones(2, 256, device=DEVICE)
    x_TK[0, 130] = torch.nan
    codes, _ = fast.quantize_activations(x_TK, 128)
    assert codes.float().isnan().nonzero().tolist() == [[0, 130]]


@pytest.mark.slow
@pytest.mark.parametrize("activations", [x for x in Activations if x])
def test_compiled_activations_are_those_of_the_definition(activations: Activations) -> None:
    x, scale = torch.randn(3, 5, 256, generator=RANDOM).bfloat16(), torch.tensor([0.01])
    compiled = torch.compile(naive.quantize_activations, fullgraph=True, dynamic=True)
    for rows in (1, 3):
        for actual, expected in zip(
            compiled(x[:rows], activations, scale),
            naive.quantize_activations(x[:rows], activations, scale),
            strict=True,
        ):
            torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-3, atol=2**-9)
            assert (actual.float() != expected.float()).float().mean() <= 0.01


def test_merged_matrices_see_one_scale_of_inputs() -> None:
    parts = [
        replace(matrix_of("fp8row"), activations=Activations.TENSOR, input_scale=torch.tensor([scale]))
        for scale in (0.01, 0.03, 0.02)
    ]
    assert merged(parts).input_scale.tolist() == pytest.approx([0.03])  # type: ignore[union-attr]
    blocks = [matrix_of("fp8a8"), matrix_of("fp8a8")]
    assert merged(blocks).key.is_blocked
    # Rows of a block would be in two matrices.
    assert not merged([*blocks, matrix_of("fp8a8", 64)]).key.is_blocked


def test_what_fp8_activations_are_not_multiplied_by() -> None:
    group, token = Activations.GROUP, Activations.TOKEN
    assert not activations_unserved(WeightFormat("e4m3", 128), group)
    assert not activations_unserved(WeightFormat("e4m3"), token)
    assert "FP8 weights alone" in activations_unserved(WeightFormat("uint4", 128), group)
    assert "scales of 128 inputs or rows" in activations_unserved(WeightFormat("e4m3", 32, "e8m0"), group)
    assert "activations in such groups" in activations_unserved(WeightFormat("e4m3", 128), token)


def test_settings_that_were_measured_come_before_the_library_s_own(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nibble.kernels.quantized_linear import humming, schedules

    matrix = matrix_of("fp8a8", 256, 512)
    assert schedules.size_class(matrix.shape) == 3 and schedules.size_class((6144, 4096)) == 10
    mine = {"block_shape": (8, 128, 256)}
    entry = 90, "e4m3, groups of 128", "group", 3
    monkeypatch.setattr(schedules, "COMMON", {})
    monkeypatch.setattr(schedules, "MEASURED", {entry: {1: mine, 8: {"block_shape": (8, 512, 64)}}})
    config = humming.layer_config(matrix.key, torch.device("cpu"))
    ranges = humming._schedules(matrix.key, config, torch.device("cpu"), 0)
    # Tiles of 512 outputs do not divide the matrix.
    assert ranges[0] == [0, 1, mine] and ranges[1][:2] == [1, 16] and ranges[1][2] == {"rows": 16}
    assert humming._schedules(matrix_of("fp8", 256, 512).key, config, torch.device("cpu"), 0)[0][:2] == [
        0,
        16,
    ]
    # Up to so many rows are multiplied elsewhere.
    assert humming._schedules(matrix.key, config, torch.device("cpu"), 8)[0][:2] == [0, 16]
    monkeypatch.setattr(schedules, "COMMON", {90: {"use_pdl": True}})
    ranges = humming._schedules(matrix.key, config, torch.device("cpu"), 0)
    assert [settings["use_pdl"] for *_, settings in ranges] == [True] * 3
    config.sm_version = 80
    assert humming._schedules(matrix.key, config, torch.device("cpu"), 0)[0][2] == {"rows": 16}


def test_kernels_that_are_compiled_ahead_are_compiled_once(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, calls = sys.modules["humming.kernel.humming"].HummingKernel, list[str]()  # type: ignore[attr-defined]
    own = kernels.prepare_kernels

    def prepare_kernels(config: str, **options: Any) -> Tensor:
        calls.append(os.environ.get("HUMMING_DISABLE_PARALLEL_BUILD", "in parallel"))
        table: Tensor = own(config, **options)
        return table

    monkeypatch.setattr(kernels, "prepare_kernels", prepare_kernels)
    first, second = matrix_of("int4"), matrix_of("fp8", 256, 512)
    operation._humming().compile_ahead({first.key}, first.codes.device)
    prepare = Preparation([first, second])
    for matrix in (first, second):
        assert operation._humming().rows_of(prepare(matrix)[0]) == [1, 17]
    assert calls == ["in parallel"] * 2


def test_kernels_that_are_compiled_ahead_fail_where_they_are_needed(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: str, **options: Any) -> Tensor:
        raise AssertionError("does not compile")

    matrix, kernels = matrix_of("int4"), sys.modules["humming.kernel.humming"].HummingKernel  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "prepare_kernels", fail)
        operation._humming().compile_ahead({matrix.key}, matrix.codes.device)
        prepare = Preparation([matrix])
        packed, locks = prepare(matrix)
        x = torch.ones(1, 256).bfloat16()
        with pytest.raises(BackendError, match="does not compile"):
            quantized_linear(x, packed, locks)
        with pytest.raises(BackendError, match="does not compile"):
            prepare.test([(packed, locks)])
    assert served(matrix)[0].layout


def test_only_launches_wait_for_kernels(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, kernels = Event(), sys.modules["humming.kernel.humming"].HummingKernel  # type: ignore[attr-defined]
    own = kernels.prepare_kernels

    def slowly(config: str, **options: Any) -> Tensor:
        assert compiled.wait(60)
        table: Tensor = own(config, **options)
        return table

    monkeypatch.setattr(kernels, "prepare_kernels", slowly)
    library.wrong = lambda tokens, y: y.roll(1, -1) if tokens == 17 else y
    matrix, x = matrix_of("fp8a8"), torch.ones(2, 256).bfloat16()
    expected = quantized_linear(x, matrix)
    try:
        prepare = Preparation([matrix])
        packed, locks = prepare(matrix)
        with ahead.rehearsal():
            assert not quantized_linear(x, packed, locks).any()
            prepare.test([(packed, locks)])
        assert not library.launches
        Timer(0.2, compiled.set).start()
        torch.testing.assert_close(quantized_linear(x, packed, locks), expected)
        assert compiled.is_set()
    finally:
        compiled.set()
    with pytest.raises(BackendError, match="17 rows times"):
        prepare.test([(packed, locks)])


def test_a_kernel_that_takes_a_row_for_another_is_refused(library: Library) -> None:
    library.wrong = lambda tokens, y: y.roll(16, 0) if tokens > 16 else y
    with pytest.raises(BackendError, match="17 rows times"):
        served(matrix_of("int4"))


def test_a_kernel_that_leaves_its_locks_is_refused(library: Library) -> None:
    library.wrong = lambda tokens, y: y * (len(library.launches) % 2)
    with pytest.raises(BackendError, match="the start-up test failed"):
        served(matrix_of("int4"))


def test_a_library_that_fails_says_what_would_work(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**given: Any) -> Any:
        raise AssertionError("no NVRTC")

    monkeypatch.setattr(sys.modules["humming.schema"], "HummingWeightSchema", fail)
    with pytest.raises(BackendError, match=r"no NVRTC.*--quantized-weights unpacked"):
        served(matrix_of("int4"))
    assert operation.TOLERANCE == 0.01


def test_what_is_served_is_tested_for_the_rows_of_steps(library: Library) -> None:
    first, second = matrix_of("int4"), matrix_of("int4", 256)
    prepare = Preparation([first, second])
    (packed, locks), other = prepare(first), prepare(second)
    with pytest.raises(BackendError, match="1 rows times"):
        prepare.test([(replace(packed, scale=torch.zeros_like(packed.scale)), locks), other])
    library.launches.clear()
    prepare.test([(packed, locks), other], most_rows=16)
    assert library.launches == [1, 1] * 2, "no step has 17 rows"
    prepare.test([])
    assert len(library.launches) == 4, "once"


def test_a_launch_that_fails_says_what_to_do(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**arguments: Any) -> Tensor:
        raise AssertionError("invalid device image")

    packed, locks = served(matrix_of("int4"))
    monkeypatch.setattr(sys.modules["humming"].ops, "launch_kernel", fail)  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match=r"invalid device image.*--quantized-weights unpacked"):
        quantized_linear(torch.ones(1, 256).bfloat16(), packed, locks)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "int4", "int4z"])
def test_a_gate_behind_a_product_is_that_of_the_rounded_product(name: str) -> None:
    matrix, x = matrix_of(name), torch.randn(2, 5, 256, generator=RANDOM).bfloat16()
    y = quantized_gated_linear(x, matrix)
    assert torch.equal(y, gated.naive.gate(quantized_linear(x, matrix))) and y.shape == (2, 5, 64)
    assert quantized_gated_linear(x[:, :0], matrix).shape == (2, 0, 64)


@pytest.mark.parametrize("slice_bytes", [1, 2 * 256 * 2 * 704 * 2, 1 << 30])
@pytest.mark.parametrize("half", [192, 704, 3 * 704 + 64])
def test_gated_products_of_slices(half: int, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and what they gate meet, whatever is dequantised at a time; stand-ins do what kernels do."""
    matrix, x = matrix_of("fp8", 2 * half), torch.randn(5, 256, generator=RANDOM).bfloat16()
    slices = list[int]()

    def unpack(matrix: PackedMatrix, first: int, out_NK: Tensor) -> None:
        assert first % cuda.UNPACK_SIZE == len(out_NK) % cuda.UNPACK_SIZE == 0
        out_NK.copy_(naive.dequantize(matrix, first, first + len(out_NK)))

    def multiply(x: Tensor, weight: Tensor, *, out_TN: Tensor) -> Tensor:
        slices.append(out_TN.shape[1])
        return out_TN.copy_(gated.naive.gated_linear(x, weight))

    monkeypatch.setattr(cuda, "SLICE", slice_bytes)
    monkeypatch.setattr(cuda, "unpack", unpack)
    monkeypatch.setattr(cuda.gated, "gated_linear", multiply)
    y = cuda.many_gated_linear(x, matrix).float()
    expected = gated.naive.gated_linear(x, naive.dequantize(matrix).to(x.dtype)).float()
    assert (y - expected).norm() <= 1e-2 * expected.norm()
    most = {1: 704, 1 << 30: half}.get(slice_bytes, 2 * 704)
    assert max(slices) == min(most, half) and sum(slices) == half


def plain_product(
    codes_TK: Tensor, scale_GT: Tensor, weight_NK: Tensor, scale_BG: Tensor, dtype: torch.dtype
) -> Tensor:
    """What both kernels of blocks are given, multiplied in float32."""
    assert codes_TK.dtype == torch.float8_e4m3fn and codes_TK.is_contiguous() and scale_GT.is_contiguous()
    assert weight_NK.dtype == torch.uint8 and scale_GT.shape == (codes_TK.shape[1] // 128, len(codes_TK))
    x_TK = codes_TK.float() * scale_GT.T.repeat_interleave(128, 1)
    scale_NK = scale_BG.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (x_TK @ (weight_NK.view(torch.float8_e4m3fn).float() * scale_NK).T).to(dtype)


@pytest.mark.parametrize("tokens", [1, 64, 65, 80, 131])
def test_blocks_come_to_their_kernels(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from nibble.kernels.linear import sm90

    calls = list[int]()

    def scaled_mm(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
        calls.append(len(x))
        return plain_product(x, x_scale.T, w.T.contiguous().view(torch.uint8), w_scale.T, out_dtype)

    monkeypatch.setattr(fp8_blocks, "serves_key", lambda key, device: key.activations is Activations.GROUP)
    monkeypatch.setattr(sm90, "scaled_linear", plain_product)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    matrix = matrix_of("fp8a8", 256, 512)
    packed, locks = served(matrix)
    assert packed.layout == fp8_blocks.LAYOUT and packed.nbytes == 256 * 512 + 4 * 2 * 4
    calls.clear()
    x = torch.randn(1, tokens, 512, generator=RANDOM).bfloat16()
    torch.testing.assert_close(quantized_linear(x, packed, locks), quantized_linear(x, matrix))
    assert calls == ([] if tokens <= 64 else [-(-tokens // 16) * 16])
