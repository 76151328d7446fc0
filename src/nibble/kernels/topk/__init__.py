"""topk: the largest values of short rows, and the largest one of long rows, with their places.

A router of experts chooses among a few hundred values, where torch.topk takes two launches that were made for long
rows; a sampler takes one token of a whole vocabulary, where torch.max reads a row with few programs.

Shape suffixes: R rows, E values of a short row, K largest of these; S rows of logits, V values of a long row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.topk import naive
from nibble.kernels.topk.naive import NO_TOKEN

__all__ = ["NO_TOKEN", "draw_likeliest", "likeliest", "serves", "topk"]

MAX_VALUES, MAX_K = 1024, 32
"""The longest row that topk() serves, and the most of its values."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serves(dtype: torch.dtype, values: int, k: int) -> bool:
    """Return whether topk() serves rows of so many values."""
    return dtype in DTYPES and 0 < k <= values <= MAX_VALUES and k <= MAX_K


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values along the last dimension, descending, and their places.

    As torch.topk: NaN is larger than all others. Of equal values the first comes first.

    Args:
        x: [..., E], with a dtype and sizes that serves() accepts.
        k: How many.

    Returns:
        Values [..., K] in the dtype of x, and int64 [..., K].
    """
    values, indices = torch.ops.nibble.topk(x, k)
    return values, indices


def likeliest(x_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token that each row of logits makes likeliest, the first of several.

    Args:
        x_SV: Logits.

    Returns:
        int64 [S], a token of the vocabulary in any case; and the same with NO_TOKEN where a value of the row is NaN.
    """
    if _has_kernels(x_SV) and x_SV.dtype in DTYPES and x_SV.stride(1) == 1:
        from nibble.kernels.topk import triton as fast

        return fast.likeliest(x_SV)
    return naive.likeliest(x_SV)


def draw_likeliest(x_SV: Tensor, ids_V: Tensor | None, tokens_S: Tensor, chances_S: Tensor) -> None:
    """Write the token that each row of logits makes likeliest, the first of several, and its chance.

    The chance is that of softmax; of several infinite values each has the same. It is NaN where a value is.

    Args:
        x_SV: Logits.
        ids_V: int64 id of each value; None: its place.
        tokens_S: int64, for the ids.
        chances_S: float64, for the chances; computed in float32.
    """
    if _has_kernels(x_SV) and x_SV.dtype in DTYPES and x_SV.stride(1) == 1:
        from nibble.kernels.topk import triton as fast

        return fast.draw_likeliest(x_SV, ids_V, tokens_S, chances_S)
    return naive.draw_likeliest(x_SV, ids_V, tokens_S, chances_S)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and triton_present()


# An operator, so that it lies in the graph of a compiled model.
def _topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if not _has_kernels(x):
        return naive.topk(x, k)
    from nibble.kernels.topk import triton as fast

    return fast.topk(x, k)


def _shapes(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_library.define("topk(Tensor x, int k) -> (Tensor, Tensor)")
_library.impl("topk", _topk, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::topk", _shapes, lib=_library)
