"""gated_linear: silu(x Wg^T) * (x Wu^T), the first product of an MLP and the gate behind it.

A weight [2N, K] has the rows of gates first. Few rows are multiplied and joined by the kernel of kernels/linear, where
that wins its trial. Of many rows libraries write both halves, which another kernel reads again: a fortieth of the time
of a prompt. gated_sm90.cu keeps them in registers; a trial at the first prompt decides for each shape. What is left is
a library's product, with the gate in Triton behind it. The torch reference is naive.py.

Shape suffixes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nibble.kernels import ahead, gpu_of, linear, triton_present
from nibble.kernels.gated import cuda, naive

MIN_BYTES = linear.MIN_BYTES
"""Bytes of a weight from which on it pays."""
TILE = 64
"""Rows of a weight are a multiple of it, and so are inputs, of four times as much: kernels/linear has no masks."""
MANY_ROWS = 512
"""Rows from which on gated_sm90.cu is tried."""
TRIAL_ROWS, CALLS, ROUNDS = 4096, 20, 3
"""Of a trial: long enough for the GPU to reach the clock that its power allows."""
_wins: dict[tuple[torch.device, torch.dtype, torch.Size], bool] = {}


def may_serve(weight_2NK: Tensor) -> bool:
    """Return whether kernels may compute the gate with the product of this weight, whose halves it joins."""
    rows, inputs = weight_2NK.shape
    return (
        weight_2NK.dtype in {torch.bfloat16, torch.float16}
        and weight_2NK.is_contiguous()
        and weight_2NK.nbytes >= MIN_BYTES
        and rows % TILE == inputs % (4 * TILE) == 0
    )


def gated_linear(x: Tensor, weight_2NK: Tensor) -> Tensor:
    """Compute silu(x Wg^T) * (x Wu^T) for a weight that may_serve() accepts, [..., K] -> [..., N]."""
    y: Tensor = torch.ops.nibble.gated_linear(x, weight_2NK)
    return y


# An operator, so that a compiler of models leaves the choice to the time of the call, when the number of rows is known.
def _gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    if not (weight.is_cuda and triton_present()):
        return naive.gated_linear(x, weight)
    rows = x.numel() // x.shape[-1]
    way = linear.way_of(weight, rows)
    if way == linear.TRITON:
        from nibble.kernels.linear import triton

        return triton.linear(x, weight, None, gated=True)
    if way == linear.CUDA:
        from nibble.kernels.linear import sm90

        return sm90.linear(x, weight, gated=True)
    if rows >= MANY_ROWS and _is_faster(weight):
        if ahead.is_rehearsal():
            _in_two(x, weight)
        return cuda.gated_linear(x, weight)
    return _in_two(x, weight)


def _in_two(x: Tensor, weight: Tensor) -> Tensor:
    from nibble.kernels.gated.triton import gate

    y = torch.nn.functional.linear(x, weight)
    return gate(y.view(-1, y.shape[-1])).view(*y.shape[:-1], -1)


def _is_faster(weight: Tensor) -> bool:
    """Return whether gated_sm90.cu is right and faster for a shape, by a trial in each process."""
    key = weight.device, weight.dtype, weight.shape
    if key not in _wins and not torch.cuda.is_current_stream_capturing():
        if not cuda.serves(weight.shape, weight.dtype, gpu_of(weight.device).arch):
            _wins[key] = False
        elif ahead.is_rehearsal():
            return True  # both compile, as the trial runs both
        else:
            _wins[key] = _trial(weight)
    return _wins.get(key, False)


def _trial(weight: Tensor) -> bool:
    x = torch.randn(TRIAL_ROWS, weight.shape[1], device=weight.device).to(weight.dtype)
    try:
        expected, y = (multiply(x, weight).float() for multiply in (_in_two, cuda.gated_linear))
        times = [
            [_ms(multiply, x, weight) for multiply in (_in_two, cuda.gated_linear)] for _ in range(ROUNDS)
        ]
    except Exception:  # of whatever kind: then it does not win
        return False
    in_two, in_one = map(min, zip(*times, strict=True))
    return bool((y - expected).norm() <= linear.MAX_ERROR * expected.norm()) and in_one < in_two


def _ms(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        multiply(x, weight)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_library.define("gated_linear(Tensor x, Tensor weight) -> Tensor")
_library.impl("gated_linear", _gated_linear, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::gated_linear", _fake, lib=_library)
