"""Products with packed matrices: the definition, and how the library's kernels are prepared and tested.

A stand-in for `humming-kernels` computes by the definition of what it is given, so that what Nibble hands over counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels import quantized_linear as operation
from nibble.kernels.quantized_linear import naive, preparation, quantized_linear
from nibble.kernels.quantized_linear.matrix import PackedMatrix, merged
from nibble.kernels.weight_formats import WeightFormat, bytes_kept, unserved

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from packed_weights import KINDS, quantize

RANDOM = torch.Generator().manual_seed(0)


def matrix_of(name: str, rows: int = 128, columns: int = 256) -> PackedMatrix:
    return quantize(torch.randn(rows, columns, generator=RANDOM).bfloat16(), KINDS[name].format)


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
    expected = x @ naive.dequantize(matrix).T
    monkeypatch.setattr(naive, "ROWS", 48)
    torch.testing.assert_close(quantized_linear(x, matrix), expected)


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
    """A stand-in: kernels for up to 16 rows and for more. `wrong` makes an error of one of them."""

    def __init__(self) -> None:
        self.wrong: Callable[[int, Tensor], Tensor] = lambda rows, y: y
        self.launches: list[int] = []
        self.matrices: dict[str, PackedMatrix] = {}

    def config(self, rows: int, columns: int, schema: Any, torch_dtype: torch.dtype, device: Any) -> Any:
        text = f"{rows} x {columns} {schema} {torch_dtype}"
        return SimpleNamespace(to_str=lambda: text, schema=schema, dtype=torch_dtype)

    def transform(self, config: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Another layout: what is last comes first."""
        schema = config.schema
        kinds = {"float8e4m3": "e4m3", "float4e2m1": "e2m1", "float8e8m0": "e8m0"}
        scales = kinds.get(schema.bs_dtype, "")
        assert scales or schema.bs_dtype == str(config.dtype).removeprefix("torch.")
        assert tensors["weight"].dtype == torch.int32 and ("zero_point" in tensors) == schema.has_zero_point
        assert schema.weight_scale_type == ("group" if schema.weight_scale_group_size else "channel")
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
        scale = given["weight_scale"].flip(0)
        matrix = PackedMatrix(
            format, given["weight"].flip(0), scale.view(torch.uint8) if scales else scale, dtype,
            zero=None if zero is None else zero.flip(0), global_scale=given["weight_scale_2"],
        )  # fmt: skip
        rows = len(given["inputs"])
        self.launches.append(rows)
        return self.wrong(rows, naive.quantized_linear(given["inputs"], matrix))


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

    launcher = SimpleNamespace(launch_kernel=stand_in.launch)
    module("humming", ops=launcher)
    module("humming.schema", HummingWeightSchema=SimpleNamespace)
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
    prepare = preparation(others)
    (packed, locks), _ = prepare(others[0]), prepare(others[1])
    assert (packed.layout and packed.shape == matrix.shape and packed.nbytes == matrix.nbytes) or is_merged
    # Each kernel twice, for the first of two matrices that are alike.
    assert library.launches == [1, 1, 17, 17]
    x = torch.randn(2, 3, 256, generator=RANDOM).bfloat16()
    expected = naive.quantized_linear(x.flatten(0, 1), matrix).view(2, 3, -1)
    assert (quantized_linear(x, packed, locks) - expected).norm() <= 0.005 * expected.norm()
    assert quantized_linear(x[:0], packed, locks).shape == (0, 3, matrix.rows)


@pytest.mark.parametrize("rows", [1, 17])
def test_a_wrong_kernel_is_refused(rows: int, library: Library) -> None:
    library.wrong = lambda tokens, y: y.roll(1, -1) if tokens == rows else y
    with pytest.raises(
        BackendError, match=f"{rows} rows times 128 x 256 weights .uint4, groups of 128. are off by"
    ):
        preparation([matrix := matrix_of("int4")])(matrix)


def test_a_kernel_that_leaves_its_locks_is_refused(library: Library) -> None:
    library.wrong = lambda tokens, y: y * (len(library.launches) % 2)
    with pytest.raises(BackendError, match="the start-up test failed"):
        preparation([matrix := matrix_of("int4")])(matrix)


def test_a_library_that_fails_says_what_would_work(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**given: Any) -> Any:
        raise AssertionError("no NVRTC")

    monkeypatch.setattr(sys.modules["humming.schema"], "HummingWeightSchema", fail)
    with pytest.raises(BackendError, match=r"no NVRTC.*--quantized-weights unpacked"):
        preparation([matrix_of("int4")])
    assert operation.TOLERANCE == 0.01
