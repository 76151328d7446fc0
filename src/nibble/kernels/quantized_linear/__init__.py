"""quantized_linear: y = x W^T for a matrix that is kept packed (kernels/weight_formats.py), or with a gate behind it.

naive.py defines it, and computes it on a CPU. On a GPU humming.py calls kernels of `humming-kernels`, for any number of
rows; cuda.py reads the same layout faster for a few and for many. fp8_blocks.py has FP8 by FP8 on SM90. A Preparation
brings matrices into their layout while kernels are compiled, which nothing waits for but the first launch, and later
holds each kernel against the definition.

Shape suffixes: T tokens, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels import UNBOUNDED, ahead, gated, triton_present
from nibble.kernels.gated.naive import gate as naive_gate
from nibble.kernels.quantized_linear import cuda, fp8_blocks, naive
from nibble.kernels.quantized_linear.matrix import NAIVE, KernelKey, PackedMatrix
from nibble.kernels.weight_formats import GROUP, Activations, WeightFormat

TOLERANCE = 0.01
"""Largest error of a kernel, norm over norm; in 16 bits both round by a quarter of that."""
TEST_SIZE = 100
"""Of random inputs, in scales that a checkpoint has for them: a few in a million are clipped."""
TEST_ROWS = 64
"""Random inputs of a test, of which each row of a product is one."""
GATED_ROWS = 16
"""Of so many rows one is compared where a gate is behind them: its definition takes several times their memory."""


def quantized_linear(x: Tensor, matrix: PackedMatrix, locks: Tensor | None = None) -> Tensor:
    """Compute x W^T.

    Args:
        x: [..., K] in the compute dtype; it is quantised first where the matrix says so.
        matrix: W.
        locks: What a Preparation returned with it; None in the layout NAIVE.

    Returns:
        [..., N] in the dtype of x.
    """
    x_scale = None
    if matrix.activations is not Activations.NONE:
        x, x_scale = quantize_activations(x, matrix.activations, matrix.input_scale)
    y: Tensor = torch.ops.nibble.quantized_linear(
        x, x_scale, matrix.codes, matrix.scale, matrix.zero, matrix.global_scale, locks, *matrix.facts
    )
    return y


def quantized_gated_linear(x: Tensor, matrix: PackedMatrix, locks: Tensor | None = None) -> Tensor:
    """Compute silu(x Wg^T) * (x Wu^T), the first product of an MLP and the gate behind it.

    Args:
        x: [..., K] in the compute dtype; it is not quantised.
        matrix: [2N, K], gates first.
        locks: As in quantized_linear().

    Returns:
        [..., N] in the dtype of x.
    """
    y: Tensor = torch.ops.nibble.quantized_gated_linear(
        x, matrix.codes, matrix.scale, matrix.zero, matrix.global_scale, locks, *matrix.facts
    )
    return y


def quantize_activations(
    x: Tensor, activations: Activations, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise inputs of a product to FP8, as naive.quantize_activations() does.

    A scale of the checkpoint's own is left to a compiler, which joins it with what computes the inputs.
    """
    if activations is Activations.TENSOR:
        return naive.quantize_activations(x, activations, input_scale)
    group = GROUP if activations is Activations.GROUP else x.shape[-1]
    codes, scale = torch.ops.nibble.quantize_activations(x, group)
    return codes, scale


def expected_product(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """Return what the definition says of x W^T, with inputs quantised as the matrix says."""
    if matrix.activations is Activations.NONE:
        return naive.quantized_linear(x, matrix)
    codes, scale = naive.quantize_activations(x, matrix.activations, matrix.input_scale)
    return naive.quantized_linear(codes, matrix, scale)


def compile_ahead(keys: Iterable[KernelKey], device: torch.device) -> None:
    """Begin to compile kernels on a GPU, while something else is done; a Preparation takes those that it needs.

    Args:
        keys: Of matrices that will probably come (matrix.py).
        device: Where they will be.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device(device.type, index)
    _humming().compile_ahead([key for key in keys if not fp8_blocks.serves_key(key, device)], device)


def prepared(matrix: PackedMatrix) -> tuple[PackedMatrix, Tensor]:
    """Return a matrix in the layout NAIVE on a GPU in that of its kernels, and the int32 locks of its products."""
    if fp8_blocks.serves_key(matrix.key, matrix.codes.device):
        return fp8_blocks.prepare(matrix)
    packed: tuple[PackedMatrix, Tensor] = _humming().explained(lambda: _humming().prepare(matrix))
    return packed


@dataclass(frozen=True, slots=True)
class KernelTest:
    """What kernels should compute with a matrix."""

    number: int
    """Of the matrix, in the order of preparation."""
    x: Tensor
    """[TEST_ROWS, K]."""
    expected: Tensor
    """[TEST_ROWS, N], by the definition over the matrix as it is stored."""

    def run(self, matrix: PackedMatrix, locks: Tensor, most_rows: int) -> None:
        """Raise BackendError unless each kernel computes that, for the least number of rows that calls it.

        Args:
            matrix: As it is served, in the layout of its kernels.
            locks: Of its products.
            most_rows: That will be multiplied; kernels for more are left out.
        """
        generator = torch.Generator(self.x.device).manual_seed(1)
        for tokens in _tested_rows(matrix):
            if tokens > most_rows:
                continue
            # In no order, so that a kernel that takes a row for another fails.
            rows = torch.randint(len(self.x), (tokens,), generator=generator, device=self.x.device)
            x, expected = self.x[rows], self.expected[rows]
            # Twice, as a kernel must leave its locks as they were.
            for _ in range(2):
                _compare(quantized_linear(x, matrix, locks), expected, tokens, matrix)
            # Of all matrices that could have a gate behind them: which have shows in the compiled graph.
            if cuda.is_many_gated(matrix, tokens):
                y_TN = quantized_gated_linear(x, matrix, locks)[::GATED_ROWS]
                _compare(
                    y_TN, naive_gate(expected[::GATED_ROWS]), tokens, matrix, " with the gate behind them"
                )


def _tested_rows(matrix: PackedMatrix) -> list[int]:
    """Return for each kernel of a matrix in its layout the least number of rows that calls it, or nearly."""
    if matrix.layout == fp8_blocks.LAYOUT:
        return [1, *(size + 1 for size in fp8_blocks.FEW_SIZES)]
    sizes = (1, cuda.FEW_TOKENS, cuda.MANY_TOKENS)
    own = [tokens for tokens in sizes if _implementation(matrix, tokens) is not None]
    return [*own, *_humming().rows_of(matrix)]


def _compare(y_TN: Tensor, expected_TN: Tensor, tokens: int, matrix: PackedMatrix, what: str = "") -> None:
    """Raise BackendError where rows of a product, which are overwritten, are not what the definition says."""
    norm = float(torch.linalg.vector_norm(expected_TN, dtype=torch.float32))
    error = float(torch.linalg.vector_norm(y_TN.sub_(expected_TN), dtype=torch.float32))
    # A matrix of zeros is right, too.
    if not error <= TOLERANCE * norm:
        raise BackendError(
            f"the start-up test failed: {tokens} rows times {matrix.shape[0]} x {matrix.shape[1]} weights "
            f"({matrix.format}){what} are off by {error:.3g} where the definition's norm is {norm:.3g}, and "
            f"{TOLERANCE:g} of it is allowed; serve with --quantized-weights unpacked, and please report this"
        )


class Preparation:
    """Brings matrices on a GPU into the layout of their kernels, which are compiled meanwhile.

    What is wrong with kernels is a BackendError, at a launch or in test().
    """

    def __init__(self, matrices: Iterable[PackedMatrix]) -> None:
        """Begin to compile the kernels of matrices in the layout NAIVE."""
        self._tests: dict[KernelKey, KernelTest] = {}
        self._count = 0
        by_key = {matrix.key: matrix for matrix in matrices}
        blocks, others = list[PackedMatrix](), list[PackedMatrix]()
        for key, matrix in by_key.items():
            (blocks if fp8_blocks.serves_key(key, matrix.codes.device) else others).append(matrix)
        if others:
            _humming().explained(lambda: _humming().compile_all(others))
        # What goes wrong shows in the test.
        with suppress(Exception), ahead.rehearsal():
            for matrix in blocks:
                fp8_blocks.compile_few(matrix)
        with suppress(Exception), ahead.rehearsal():
            for matrix in others:
                cuda.launch_gated(matrix)
                gated.gate(matrix.codes.new_empty(1, matrix.shape[0], dtype=matrix.dtype))

    def __call__(self, matrix: PackedMatrix) -> tuple[PackedMatrix, Tensor]:
        """Return one of them in the layout of its kernels, and the int32 locks of its products."""
        # With the first of each shape and format: its bytes will be gone, and a test needs kernels.
        if matrix.key not in self._tests:
            x = _test_inputs(matrix)
            self._tests[matrix.key] = KernelTest(self._count, x, expected_product(x, matrix))
        self._count += 1
        return prepared(matrix)

    def test(self, served: Sequence[tuple[PackedMatrix, Tensor]], most_rows: int = UNBOUNDED) -> None:
        """Raise BackendError unless kernels compute what the definition says; wait for them.

        In a rehearsal it does nothing, nor when it has been called before.

        Args:
            served: What was returned for each matrix, in order, as it is served.
            most_rows: That will be multiplied at a time.
        """
        if ahead.is_rehearsal() or not self._tests:
            return
        for key, test in self._tests.items():
            assert served[test.number][0].key == key
            _humming().explained(partial(test.run, *served[test.number], most_rows))
        self._tests.clear()
        # Products of thousands of rows, of whose sizes nothing else may be.
        torch.cuda.empty_cache()


def _test_inputs(matrix: PackedMatrix) -> Tensor:
    device = matrix.codes.device
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(TEST_ROWS, matrix.shape[1], generator=generator, device=device)
    if matrix.input_scale is not None:
        x = x * matrix.input_scale * TEST_SIZE
    return x.to(matrix.dtype)


def _implementation(matrix: PackedMatrix, tokens: int) -> Callable[[Tensor, PackedMatrix], Tensor] | None:
    """Return what multiplies so many tokens with a packed matrix; None: the library."""
    if cuda.is_few(matrix, tokens):
        return cuda.few_linear
    return cuda.many_linear if cuda.is_many(matrix, tokens) else None


def _humming() -> Any:
    from nibble.kernels.quantized_linear import humming

    return humming


def _matrix(
    codes: Tensor, scale: Tensor, zero: Tensor | None, global_scale: Tensor | None, locks: Tensor | None,
    shape: list[int], kind: str, group: int, scales: str, dtype: str, rounded: str, layout: str,
) -> PackedMatrix:  # fmt: skip
    """Return the matrix of an operator's arguments."""
    format = WeightFormat(kind, group, scales, zero is not None, global_scale is not None)
    dtypes = getattr(torch, dtype), getattr(torch, rounded)
    return PackedMatrix(
        format, codes, scale, *dtypes, zero, global_scale, layout=layout, shape=(shape[0], shape[1])
    )


# Operators, so that a compiler of models does not look into them.
def _quantized_linear(x: Tensor, x_scale: Tensor | None, *facts: Any) -> Tensor:
    matrix, locks = _matrix(*facts), facts[4]
    shape, layout = matrix.shape, matrix.layout
    x_TK = x.reshape(-1, shape[1])
    if x_scale is not None and len(x_TK) and x_scale.dim() > 1:
        x_scale = x_scale.reshape(len(x_TK), -1)
    if layout == NAIVE:
        y_TN = naive.quantized_linear(x_TK, matrix, x_scale)
    elif not len(x_TK):
        y_TN = x_TK.new_empty(0, shape[0], dtype=x.dtype if x_scale is None else matrix.dtype)
    else:
        assert locks is not None
        if layout == fp8_blocks.LAYOUT:
            assert x_scale is not None
            return fp8_blocks.linear(x_TK, x_scale, matrix).view(*x.shape[:-1], shape[0])
        own = _implementation(matrix, len(x_TK)) if x_scale is None else None
        y_TN = own(x_TK, matrix) if own else _humming().quantized_linear(x_TK, x_scale, matrix, locks)
    return y_TN.view(*x.shape[:-1], shape[0])


def _quantized_gated_linear(x: Tensor, *facts: Any) -> Tensor:
    matrix = _matrix(*facts)
    x_TK = x.reshape(-1, matrix.shape[1])
    if matrix.layout != NAIVE and cuda.is_many_gated(matrix, len(x_TK)):
        y_TN = cuda.many_gated_linear(x_TK, matrix)
    else:
        y_TN = gated.gate(_quantized_linear(x_TK, None, *facts))
    return y_TN.view(*x.shape[:-1], y_TN.shape[1])


def _quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    if not (x.is_cuda and triton_present()):
        codes, scale = naive.quantize_groups(x, group)
        return codes.contiguous(), scale.movedim(-1, 0).contiguous().movedim(0, -1)
    from nibble.kernels.quantized_linear import triton as fast

    codes_TK, scale_TG = fast.quantize_activations(x.reshape(-1, x.shape[-1]), group)
    return codes_TK.view(x.shape), scale_TG.T.view(scale_TG.shape[1], *x.shape[:-1]).movedim(0, -1)


def _codes_and_scales(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return tensors like codes and scales, for the compiler."""
    scale = x.new_empty(x.shape[-1] // group, *x.shape[:-1], dtype=torch.float32).movedim(0, -1)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale


def _result(x: Tensor, x_scale: Tensor | None, *arguments: Any) -> Tensor:
    """Return a tensor like the result, for the compiler."""
    shape, dtype = arguments[5], getattr(torch, arguments[9])
    return x.new_empty(*x.shape[:-1], shape[0], dtype=x.dtype if x_scale is None else dtype)


def _gated_result(x: Tensor, *facts: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], facts[5][0] // 2)


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_FACTS = (
    "Tensor codes, Tensor scale, Tensor? zero, Tensor? global_scale, Tensor? locks, int[] shape, str kind, int group, "
    "str scales, str dtype, str rounded, str layout"
)
_library.define("quantize_activations(Tensor x, int group) -> (Tensor, Tensor)")
_library.impl("quantize_activations", _quantize_activations, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::quantize_activations", _codes_and_scales, lib=_library)
_library.define(f"quantized_linear(Tensor x, Tensor? x_scale, {_FACTS}) -> Tensor")
_library.impl("quantized_linear", _quantized_linear, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::quantized_linear", _result, lib=_library)
# silu(the first half of x W^T) * the second.
_library.define(f"quantized_gated_linear(Tensor x, {_FACTS}) -> Tensor")
_library.impl("quantized_gated_linear", _quantized_gated_linear, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::quantized_gated_linear", _gated_result, lib=_library)
