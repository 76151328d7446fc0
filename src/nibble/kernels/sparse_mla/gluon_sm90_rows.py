"""Rows of sparse_hopper.py that come and go: queries, dealt into the pieces that those of latents stand in, and means,
put in order again. By 16 bytes a thread, which the values of one piece are not in a row.

Shape suffixes: M rows of a tile (heads), W values of a row. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nibble.kernels.mla.gluon_sm90 import LARGEST_FP16


@gluon.jit
def dealt(x, PARTS: gl.constexpr):
    """Values of rows -> PARTS tensors, part j of which has the values j, j + PARTS, j + 2 * PARTS..."""
    if PARTS == 1:
        parts = (x,)
    elif PARTS == 2:
        parts = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    else:
        even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        parts = (a, b, c, d)  # type: ignore[assignment]
    return parts


@gluon.jit
def _joined(parts):
    """The opposite of _dealt."""
    if len(parts) == 2:
        joined = gl.join(parts[0], parts[1])
    else:
        joined = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]))
    return gl.reshape(joined, [parts[0].shape[0], parts[0].shape[1] * len(parts)])


@gluon.jit
def rows_of(q, q_stride_H, row_M, live_M, factor, SKIP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr,
             DTYPE: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Rows of WIDTH query values from SKIP on, of which DIM there are, times a factor."""
    value_W = SKIP + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = (q + row_M * q_stride_H)[:, None] + value_W[None, :]
    x = gl.load(at, mask=live_M[:, None] & (value_W < DIM)[None, :], other=0.0)
    x = x.to(gl.float32) * factor
    if gl.float16 == DTYPE:
        x = gl.where(x > LARGEST_FP16, LARGEST_FP16, gl.where(x < -LARGEST_FP16, -LARGEST_FP16, x))
    return x.to(DTYPE)


@gluon.jit
def write(out, first, pieces, GROUP: gl.constexpr, RANK: gl.constexpr, PLAIN: gl.constexpr, M: gl.constexpr,
           LAYOUT: gl.constexpr):  # fmt: skip
    """Means out of shared memory to where they belong."""
    OUT: gl.constexpr = out.dtype.element_ty
    COUNT: gl.constexpr = len(pieces)
    loaded = ()
    for j in gl.static_range(COUNT):
        loaded += (pieces[j].index(0).load(LAYOUT).to(OUT, bitcast=True),)  # type: ignore[assignment]
    if PLAIN:
        for j in gl.static_range(COUNT):
            _put(out, first, loaded[j], j * (RANK // COUNT), GROUP, RANK, M, LAYOUT)
    else:
        JOINED: gl.constexpr = gl.BlockedLayout([1, 8 * COUNT], [1, 32], [4, 1], [1, 0])
        values = gl.convert_layout(_joined(loaded), JOINED)
        _put(out, first, values, 0, GROUP, RANK, M, JOINED)


@gluon.jit
def _put(out, first, values, SKIP: gl.constexpr, GROUP: gl.constexpr, RANK: gl.constexpr, M: gl.constexpr,
         LAYOUT: gl.constexpr):  # fmt: skip
    row_M = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    value_W = SKIP + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = (out + (first + row_M) * RANK)[:, None] + value_W[None, :]
    gl.store(at, values, mask=(row_M < GROUP)[:, None].broadcast_to(values.shape))
