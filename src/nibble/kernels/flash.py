"""Pieces that the flash attention kernels share: queries, the state of an online softmax, and rows of output.

A format's words decode into PARTS tiles, and part j has the values j, j + PARTS, j + 2 * PARTS... of a row
(codecs/__init__.py). So queries are loaded part by part, and sums are stored part by part.

Shape suffixes: M rows of a tile (query tokens x heads), N keys of a tile, W words of a row. Names in capitals are
constants of a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MIN_PEAK = tl.constexpr(
    -1e30
)  # where a running maximum starts; not -inf, whose difference with itself is NaN
MAX_FP16 = tl.constexpr(65504.0)


@triton.jit
def load_queries(
    q, at_M, live_M, PARTS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr
):
    """Load query rows as PARTS tiles [M, WIDTH], whose values meet those of the parts of keys.

    Args:
        q: Pointer to the queries.
        at_M: Offset of each row's first value.
        live_M: Which rows there are; the others become zeros.
        PARTS: Parts of a decoded word of keys.
        WIDTH: Words of a row of keys, padded to a power of two.
        DIM: Values of a row.
        DTYPE: What keys are decoded into.

    Returns:
        A tuple of PARTS tiles of DTYPE.
    """
    parts = ()
    for j in tl.static_range(PARTS):
        value = tl.arange(0, WIDTH) * PARTS + j
        x = tl.load(
            q + at_M[:, None] + value[None, :], mask=live_M[:, None] & (value < DIM)[None, :], other=0.0
        )
        # bfloat16 and float32 reach further than float16, in which some formats decode
        if x.dtype != tl.float16 and tl.float16 == DTYPE:
            x = tl.clamp(x.to(tl.float32), -MAX_FP16, MAX_FP16, propagate_nan=tl.PropagateNan.ALL)
        parts += (x.to(DTYPE),)  # type: ignore[assignment]
    return parts


@triton.jit
def dot_parts(scores, q, parts):
    """Add the products of queries and keys, both in parts: [M, W] x [N, W] -> [M, N]."""
    for j in tl.static_range(len(parts)):
        scores = tl.dot(q[j], tl.trans(parts[j]), scores, input_precision="ieee")
    return scores


@triton.jit
def init_state(PARTS: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return the state of a softmax over no keys: peaks [M], totals [M, N], and PARTS sums of values [M, WIDTH]."""
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([M, WIDTH], tl.float32),)  # type: ignore[assignment]
    return tl.full([M], MIN_PEAK, tl.float32), tl.zeros([M, N], tl.float32), sums


@triton.jit
def update_state(state, scores, values, DTYPE: tl.constexpr):
    """Add a tile of keys to the state: scores [M, N] in powers of two, values as parts [N, W] of DTYPE."""
    peak_M, total, sums = state
    top_M = tl.maximum(peak_M, tl.max(scores, 1))
    weights = tl.exp2(scores - top_M[:, None])
    rescale = tl.exp2(peak_M - top_M)[:, None]
    total = total * rescale + weights  # summed up in the end: a sum over warps would cost a barrier
    return top_M, total, add_values(sums, weights.to(DTYPE), values, rescale)


@triton.jit
def add_values(sums, weights, values, rescale):
    """Rescale the sums [M, W] by [M, 1], and add the weighted values of a tile, part by part."""
    updated = ()
    for j in tl.static_range(len(values)):
        part = tl.dot(weights, values[j], sums[j] * rescale, input_precision="ieee")
        updated += (part,)  # type: ignore[assignment]
    return updated


@triton.jit
def store_rows(at_M, sums, factor_M, live_M, DIM: tl.constexpr):
    """Store sums times a factor, to rows of DIM values: each part's where they belong between the others'."""
    PARTS: tl.constexpr = len(sums)
    for j in tl.static_range(PARTS):
        value = tl.arange(0, sums[j].shape[1]) * PARTS + j
        keep = live_M[:, None] & (value < DIM)[None, :]
        mean = (sums[j] * factor_M[:, None]).to(at_M.dtype.element_ty)
        tl.store(at_M[:, None] + value[None, :], mean, mask=keep)
