"""Triton twin of kernels/sparse_mla/__init__.py: flash attention over a list of slots, whose latents are gathered row by row.

A program takes a group of heads of one query token, and a share of its list. Shares, where there are too few tokens to
fill the GPU, are as many as the shapes say, so a CUDA graph may keep them; a second launch joins them. A list ends
behind its last slot that is somebody's. What is stored how is said in decoders_latent.py; no kernel names a format.

SM90 has a kernel of its own (sparse_hopper.py), which reads the same sections.

Shape suffixes: T query tokens, H query heads, K slots of a list, M rows of a tile (heads), N latents of a tile, W words
of a section, S shares, R values of a row. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.attention.triton import GPU, gpu_of
from nibble.kernels.attention.triton_kernel import LOG2E, LOWEST, _queries, _store
from nibble.kernels.codecs.decoders_latent import APART, LATENTS, sections, serves
from nibble.kernels.codecs.tiles import _rows, decoded
from nibble.kernels.mla.triton import HOPPER, NARROW, ROWS, Shape, _begun, _bytes, _group, _power, _product
from nibble.kernels.sizes import next_power_of_2
from nibble.kernels.types import Paged

__all__ = ["Shape", "attend", "serves", "shape_of"]

MOST_SHARES = 32
STARTING = 3.0
"""Tiles, in the time of which a program starts and leaves what it has to be joined."""


# ---- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _end(slots, count, L: tl.constexpr):
    """Where a list of slots ends: behind the last that is somebody's."""
    k_L = tl.arange(0, L)
    there_L = tl.load(slots + k_L, mask=k_L < count, other=-1) >= 0
    return tl.max(tl.where(there_L, k_L + 1, 0), 0)


@triton.jit
def _share(split, splits, stop, N: tl.constexpr):
    """A share [start, stop) of a list, in whole tiles."""
    each = tl.cdiv(stop, N * splits) * N
    start = split * each
    return start, tl.minimum(start + each, stop)


@triton.jit
def _gathered(section, slot_N):
    """The parts of a tile, a row for each slot; zeros for nobody."""
    keep_N = slot_N >= 0
    slot_N = tl.where(keep_N, slot_N, 0)
    page_N, slot_N = (slot_N // section.PAGE_SIZE).to(tl.int64), slot_N % section.PAGE_SIZE
    words = _rows(section.words, page_N, slot_N, 0, keep_N, 1, True)
    scales = 0
    if section.EACH:
        codes = _rows(section.blocks, page_N, slot_N, 0, keep_N, 1, True)
        scales = section.DECODE_SCALE(codes, section.DTYPE)
    return decoded(section, words, scales, 1)


@triton.jit
def _fold(
    state, q, q_rope, latent, rope, slots, start, stop, unit, plain, ROPE: tl.constexpr, STAGES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Folds latents [start, stop) of a list into the state of an online softmax: peaks, totals and sums.

    unit: what products of decoded values are short of to be scores in powers of two; plain: of rotary values APART.
    """
    peak_M, total, sums = state
    n_N = tl.arange(0, N)
    slot_N = tl.load(slots + start + n_N, mask=start + n_N < stop, other=-1)
    for first in tl.range(start, stop, N, num_stages=STAGES):
        parts = _gathered(latent, slot_N)
        nothing = tl.zeros([M, N], tl.float32)
        rotary = nothing
        if ROPE:
            rotary = _product(nothing, q_rope, _gathered(rope, slot_N))
        if ROPE == APART:
            scores = _product(nothing, q, parts) * unit + rotary * plain
        else:
            scores = _product(rotary, q, parts) * unit
        scores = tl.where((slot_N >= 0)[None, :], scores, float("-inf"))
        slot_N = tl.load(slots + first + N + n_N, mask=first + N + n_N < stop, other=-1)
        top_M = tl.maximum(peak_M, tl.max(scores, 1))
        weights = tl.exp2(scores - top_M[:, None])
        fade = tl.exp2(peak_M - top_M)[:, None]
        total = total * fade + weights
        weights = weights.to(latent.DTYPE)
        faded = ()
        for j in tl.static_range(len(parts)):
            part = tl.dot(weights, parts[j], sums[j] * fade, input_precision="ieee")
            faded += (part,)  # type: ignore[assignment]
        peak_M, sums = top_M, faded
    return peak_M, total, sums


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def sparse_kernel(
    q, out, parts, lse, latent, rope, global_scale, slots, scale, count, slots_stride, q_stride_T, q_stride_H,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr, ROPE: tl.constexpr,
    FOLD: tl.constexpr, STAGES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Grid: query tokens x groups of GROUP heads, and shares of a list. L: a power of two that `count` is within."""
    GROUPS: tl.constexpr = HEADS // GROUP
    program, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token, group = (program // GROUPS).to(tl.int64), program % GROUPS
    slots += token * slots_stride
    start, stop = _share(split, splits, _end(slots, count, L), N)
    row_M = tl.arange(0, M)
    live_M, head_M = row_M < GROUP, group * GROUP + row_M

    at_M = token * q_stride_T + head_M * q_stride_H
    queries = _queries(q, at_M, live_M, latent.PARTS, latent.words.WIDTH, RANK, latent.DTYPE)
    q_rope = queries
    if ROPE:
        q_rope = _queries(q + RANK, at_M, live_M, rope.PARTS, rope.words.WIDTH, ROPE_DIM, rope.DTYPE)
    state = _begun(latent.PARTS, latent.words.WIDTH, M, N)
    whole, plain = tl.load(global_scale) * FOLD, scale * LOG2E
    state = _fold(
        state, queries, q_rope, latent, rope, slots, start, stop, plain * whole, plain, ROPE, STAGES, M, N
    )

    peak_M, total, sums = state
    total_M = tl.sum(total, 1)
    nothing_M = total_M == 0.0  # was seen
    total_M = tl.where(nothing_M, 1.0, total_M)
    factor_M = whole / total_M
    if splits == 1:
        _store(out + (token * HEADS + head_M) * RANK, sums, factor_M, live_M, RANK)
    else:
        place_M = (token * splits + split) * HEADS + head_M
        _store(parts + place_M * RANK, sums, factor_M, live_M, RANK)
        lse_M = tl.where(nothing_M, float("-inf"), peak_M + tl.log2(total_M))
        tl.store(lse + place_M, lse_M, mask=live_M)


@triton.jit
def join_kernel(
    out, parts, lse, HEADS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    S: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid: query tokens, and heads. The mean of a row's shares, weighted by what each saw.

    PARTS: into so many a row's values were dealt, each of which lies in one piece. They are read as they lie, many at a
    time, and put in order when there is only one of each.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s_S, r_R = tl.arange(0, S), tl.arange(0, R)
    place_S = (token * SPLITS + s_S) * HEADS + head
    lse_S = tl.load(lse + place_S, mask=s_S < SPLITS, other=float("-inf"))
    seen_S = lse_S != float("-inf")
    weight_S = tl.exp2(lse_S - tl.maximum(tl.max(lse_S, 0), LOWEST))
    total = tl.sum(weight_S, 0)
    weight_S /= tl.where(total == 0.0, 1.0, total)
    keep = seen_S[:, None] & (r_R < RANK)[None, :]
    part_SR = tl.load(parts + place_S[:, None] * RANK + r_R[None, :], mask=keep, other=0.0)
    mean_R = tl.sum(part_SR * weight_S[:, None], 0)
    value_R = r_R % (RANK // PARTS) * PARTS + r_R // (RANK // PARTS)
    tl.store(out + (token * HEADS + head) * RANK + value_R, mean_R.to(out.dtype.element_ty), mask=r_R < RANK)


# ---- the launch ------------------------------------------------------------------------------------------------------


def shape_of(group: int, latents: Paged, rope: int, query: torch.dtype, gpu: GPU) -> Shape:
    """The tile for so many heads of a token."""
    return next(
        shape
        for shape in _shapes(group, latents, rope, query, gpu)
        if shape.hopper or _bytes(shape, latents, rope, query.itemsize) <= gpu.memory
    )


def _shapes(group: int, latents: Paged, rope: int, query: torch.dtype, gpu: GPU) -> Iterator[Shape]:
    """From the fastest to the smallest."""
    if gpu.arch == HOPPER:
        from nibble.kernels.sparse_mla import gluon_sm90 as sparse_hopper

        if sparse_hopper.serves(latents, rope, query, gpu.memory):
            yield Shape(sparse_hopper.ROWS, sparse_hopper.TILE, 4, 1, 1, True)
    rows = _power(group)
    for tile in (32, 16):
        yield Shape(rows, tile, 8 if rows > NARROW else 4, 2, 1)
    yield Shape(rows, 16, 4, 1, 1)


def attend(
    q_THD: Tensor, latents: Paged, rope: int, topk_slots_TK: Tensor, scale: float, *, shape: Shape | None = None,
    splits: int | None = None,
) -> Tensor:  # fmt: skip
    """See kernels/sparse_mla/__init__.py. splits: shares of a list."""
    (tokens, heads, dim), gpu = q_THD.shape, gpu_of(q_THD.device)
    rank, group, most = dim - rope, _group(heads, ROWS), topk_slots_TK.shape[1]
    out = q_THD.new_empty(tokens, heads, rank)
    if tokens == 0:
        return out
    shape = shape or shape_of(group, latents, rope, q_THD.dtype, gpu)
    programs = tokens * heads // group
    if splits is None:
        splits = splits_of(programs, -(-most // shape.latents), shape.programs * gpu.processors)
    parts = lse = out
    if splits > 1:
        parts = out.new_empty(tokens, splits, heads, rank, dtype=torch.float32)
        lse = out.new_empty(tokens, splits, heads, dtype=torch.float32)
    latent, rotary, kind = sections(latents, rope, q_THD.dtype)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    topk_slots_TK = topk_slots_TK if topk_slots_TK.stride(1) == 1 else topk_slots_TK.contiguous()
    common = (
        q_THD, out, parts, lse, latent, rotary, latents.scale, topk_slots_TK, scale, most, topk_slots_TK.stride(0),
        q_THD.stride(0), q_THD.stride(1), heads, group, rank, rope, kind,
        LATENTS[latents.format.name].decoder.fold,
    )  # fmt: skip
    longest, dealt = next_power_of_2(max(most, 16)), 1
    if shape.hopper:
        from nibble.kernels.sparse_mla import gluon_sm90 as sparse_hopper

        dealt = sparse_hopper.launch((programs, splits), latents.format.name, common, longest)
    else:
        sparse_kernel[(programs, splits)](
            *common, shape.stages, shape.rows, shape.latents, longest,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    if splits > 1:
        join_kernel[(tokens, heads)](
            out, parts, lse, heads, rank, splits, dealt,
            next_power_of_2(splits), next_power_of_2(rank),
        )  # fmt: skip
    return out


def splits_of(programs: int, tiles: int, slots: int) -> int:
    """Shares of a list of so many tiles, for as many programs without: those which are done first, if `slots` programs
    run at a time.
    """

    def time(splits: int) -> float:
        waves = -(-programs * splits // slots)
        return waves * (-(-tiles // splits) + STARTING) + (STARTING if splits > 1 else 0.0)

    return min(range(1, min(MOST_SHARES, max(tiles, 1)) + 1), key=time)
