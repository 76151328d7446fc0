"""gated_linear: silu(x Wg^T) * (x Wu^T), the first product of an MLP and the gate behind it.

A weight [2N, K] has the rows of gates first. Few rows are multiplied and joined by the kernels of kernels/linear. Of
many rows libraries write both halves, which another kernel reads again: a fortieth of the time of a prompt.
gated_sm90.cu keeps them in registers. As of plain products, trials at load decide for each shape. What is left is a
library's product, with the gate in Triton behind it. The torch reference is naive.py.

Shape suffixes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.kernels import gpu_of, linear, triton_present
from nibble.kernels.gated import cuda, naive
from nibble.kernels.linear import CUDA, TORCH, TRITON, Multiply, Operation

MIN_BYTES = linear.MIN_BYTES
"""Bytes of a weight from which on it pays."""
TILE = 64
"""Rows of a weight are a multiple of it, and so are inputs, of four times as much: kernels/linear has no masks."""
MANY_ROWS, ANY_ROWS = 512, 1 << 30
"""Rows from which on gated_sm90.cu computes them; and up to which."""


def may_serve(weight_2NK: Tensor) -> bool:
    """Return whether kernels may compute the gate with the product of this weight, whose halves it joins."""
    rows, inputs = weight_2NK.shape
    return (
        weight_2NK.dtype in {torch.bfloat16, torch.float16}
        and weight_2NK.is_contiguous()
        and weight_2NK.nbytes >= MIN_BYTES
        and rows % TILE == inputs % (4 * TILE) == 0
    )


def _ways(weight: Tensor, most: int) -> dict[str, Multiply]:
    """Return the ways to compute it with a weight on a GPU, for rows up to so many."""
    ways: dict[str, Multiply] = {TORCH: _in_two}
    if most <= linear.TRITON_ROWS:
        ways[TRITON] = _by_triton
    is_many = most == ANY_ROWS and weight.is_cuda
    if linear.is_cuda_served(weight, most) or (
        is_many and cuda.serves(weight.shape, weight.dtype, gpu_of(weight.device).arch)
    ):
        ways[CUDA] = _by_cuda
    return ways


OPERATION = Operation("gated-", _ways, {**linear.TRIALS, MANY_ROWS - 1: MANY_ROWS // 2, ANY_ROWS: 2048})


def gated_linear(x: Tensor, weight_2NK: Tensor) -> Tensor:
    """Compute silu(x Wg^T) * (x Wu^T) for a weight that may_serve() accepts, [..., K] -> [..., N].

    Weights that are known at load take trials there (linear.decide with OPERATION); others are the library's.
    """
    y: Tensor = torch.ops.nibble.gated_linear(x, weight_2NK)
    return y


# An operator, so that a compiler of models leaves the choice to the time of the call, when the number of rows is known.
def _gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    if not (weight.is_cuda and triton_present()):
        return naive.gated_linear(x, weight)
    way = linear.way_of(weight, x.numel() // x.shape[-1], operation=OPERATION)
    return _RUN[way](x, weight, None)


def _by_triton(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
    from nibble.kernels.linear import triton

    return triton.linear(x, weight, None, gated=True)


def _by_cuda(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
    from nibble.kernels.linear import sm90

    if x.numel() // x.shape[-1] <= sm90.MOST_ROWS:
        return sm90.linear(x, weight, gated=True)
    return cuda.gated_linear(x, weight)


def _in_two(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
    return gate(F.linear(x, weight))


def gate(y: Tensor) -> Tensor:
    """Return silu(the first half) * the second half of each row, [..., 2N] -> [..., N]."""
    if not (y.is_cuda and triton_present()):
        return naive.gate(y)
    from nibble.kernels.gated.triton import gate

    return gate(y.view(-1, y.shape[-1])).view(*y.shape[:-1], y.shape[-1] // 2)


_RUN: dict[str, Multiply] = {TORCH: _in_two, TRITON: _by_triton, CUDA: _by_cuda}


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_library.define("gated_linear(Tensor x, Tensor weight) -> Tensor")
_library.impl("gated_linear", _gated_linear, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::gated_linear", _fake, lib=_library)
