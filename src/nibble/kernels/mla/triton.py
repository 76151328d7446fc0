"""Triton twin of kernels/mla/__init__.py: flash attention in which a tile of latents is loaded and decoded once, and is both
keys and values.

A program takes a tile of rows, which are query tokens times query heads, and a share of the latents that they see.
Shares are dealt on the device from the lengths that stand there, and joined by a second launch (attention_kernel.py).
What is stored how is said in decoders_latent.py; no kernel names a format.

SM90 has a kernel of its own (mla_hopper.py), which reads the same sections.

Shape suffixes: T query tokens, H query heads, M rows of a tile, N latents of a tile, W words of a section. Names in
capitals are constants of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.attention.triton import GPU, MANY, SIZES, gpu_of
from nibble.kernels.attention.triton_kernel import (
    LEAST_KEYS,
    LOG2E,
    LOWEST,
    _assigned,
    _bounds,
    _place,
    _queries,
    _store,
    combine_kernel,
)
from nibble.kernels.codecs.decoders_latent import APART, LATENTS, sections, serves
from nibble.kernels.codecs.tiles import _rows, decoded, pages_of, slots_of
from nibble.kernels.sizes import cdiv, next_power_of_2
from nibble.kernels.types import AttentionBatch, Paged

__all__ = ["Shape", "attend", "serves", "shape_of"]

HOPPER = 90
ROWS = 64
"""Most rows of a tile, unless a token has more heads that no smaller number divides."""
NARROW = 32
"""Rows up to which four warps do, where nothing is decoded."""
LEAST_ROW = 128
"""Bytes of packed values of a row that mla_hopper.py reads at least."""
SCRATCH = 1024 + 256
"""Bytes of shared memory that a program takes beside its tiles, those that the hardware reserves included."""


# ---- the kernel ------------------------------------------------------------------------------------------------------


@triton.jit
def _read(section, page, first, n_N, stop, MASKED: tl.constexpr):
    """Words of a tile, and block scales decoded before they are spread; 0 where there are none."""
    slot_N, keep_N = slots_of(first, n_N, section.PAGE_SIZE), first + n_N < stop
    scales = 0
    if section.EACH:
        codes = _rows(section.blocks, page, slot_N, 0, keep_N, 1, MASKED)
        scales = section.DECODE_SCALE(codes, section.DTYPE)
    return _rows(section.words, page, slot_N, 0, keep_N, 1, MASKED), scales


@triton.jit
def _product(scores, q, parts):
    """Adds the products of queries and the parts of a section."""
    for j in tl.static_range(len(parts)):
        scores = tl.dot(q[j], tl.trans(parts[j]), scores, input_precision="ieee")
    return scores


@triton.jit
def _fold(
    state, q, q_rope, latent, rope, table, position_M, start, stop, unit, plain, ROPE: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Folds latents [start, stop), in whole tiles, into the state of an online softmax: peaks, totals and sums.

    unit: what products of decoded values are short of to be scores in powers of two; plain: of rotary values APART.
    """
    peak_M, total, sums = state
    n_N = tl.arange(0, N)
    page = pages_of(table, start, n_N, stop, latent.PAGE_SIZE)
    for first in tl.range(start, stop, N, num_stages=STAGES):
        words, scales = _read(latent, page, first, n_N, stop, MASKED)
        parts = decoded(latent, words, scales, 1)
        nothing = tl.zeros([M, N], tl.float32)
        rotary = nothing
        if ROPE:
            words, scales = _read(rope, page, first, n_N, stop, MASKED)
            rotary = _product(nothing, q_rope, decoded(rope, words, scales, 1))
        page = pages_of(table, first + N, n_N, stop, latent.PAGE_SIZE)
        if ROPE == APART:
            scores = _product(nothing, q, parts) * unit + rotary * plain
        else:
            scores = _product(rotary, q, parts) * unit
        if MASKED:
            scores = tl.where((first + n_N)[None, :] <= position_M[:, None], scores, float("-inf"))
        top_M = tl.maximum(peak_M, tl.max(scores, 1))
        weights = tl.exp2(scores - top_M[:, None])
        fade = tl.exp2(peak_M - top_M)[:, None]
        total = total * fade + weights  # summed up in the end: a sum over warps would cost a barrier
        weights = weights.to(latent.DTYPE)
        faded = ()
        for j in tl.static_range(len(parts)):
            part = tl.dot(weights, parts[j], sums[j] * fade, input_precision="ieee")
            faded += (part,)  # type: ignore[assignment]
        peak_M, sums = top_M, faded
    return peak_M, total, sums


@triton.jit
def _begun(PARTS: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The state of a softmax over nothing."""
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([M, WIDTH], tl.float32),)  # type: ignore[assignment]
    return tl.full([M], LOWEST, tl.float32), tl.zeros([M, N], tl.float32), sums


@triton.jit(
    do_not_specialize=["requests", "slots", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def mla_kernel(
    q, out, parts, lse, plan, latent, rope, global_scale, table, cu_seqlens_q, seq_lens, scale, requests, slots,
    table_stride, q_stride_T, q_stride_H, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr,
    ROPE: tl.constexpr, FOLD: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of a request's queries, groups of GROUP heads, and requests; if SPLIT, requests + K / 2 * slots."""
    TOKENS: tl.constexpr = M // GROUP
    tile, group, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, split, splits = program, 0, 1
    if SPLIT:
        request, split, splits = _assigned(program, seq_lens, requests, slots, 1 << 30, R, K)
        if request >= requests:
            return
        if split == 0:
            tl.store(plan + 2 * request, program)
            tl.store(plan + 2 * request + 1, splits)
    begin = tl.load(cu_seqlens_q + request)
    count = tl.load(cu_seqlens_q + request + 1) - begin
    first = tile * TOKENS
    if first >= count:
        return
    past = tl.load(seq_lens + request) - count
    last = tl.minimum(first + TOKENS, count) - 1
    row_M = tl.arange(0, M)
    token_M, head_M = first + row_M // GROUP, group * GROUP + row_M % GROUP
    live_M = (row_M < TOKENS * GROUP) & (token_M < count)

    at_M = (begin + token_M).to(tl.int64) * q_stride_T + head_M * q_stride_H
    queries = _queries(q, at_M, live_M, latent.PARTS, latent.words.WIDTH, RANK, latent.DTYPE)
    q_rope = queries
    if ROPE:
        q_rope = _queries(q + RANK, at_M, live_M, rope.PARTS, rope.words.WIDTH, ROPE_DIM, rope.DTYPE)
    state = _begun(latent.PARTS, latent.words.WIDTH, M, N)
    _, inner, outer, stop = _bounds(past, first, last, split, splits, 0, N)
    table += request.to(tl.int64) * table_stride
    whole, plain = tl.load(global_scale) * FOLD, scale * LOG2E
    unit = plain * whole
    state = _fold(state, queries, q_rope, latent, rope, table, past + token_M, inner, outer, unit, plain,
                  ROPE, STAGES, False, M, N)  # fmt: skip
    state = _fold(state, queries, q_rope, latent, rope, table, past + token_M, outer, stop, unit, plain,
                  ROPE, 1, True, M, N)  # fmt: skip

    peak_M, total, sums = state
    total_M = tl.sum(total, 1)
    nothing_M = total_M == 0.0  # was seen
    total_M = tl.where(nothing_M, 1.0, total_M)
    factor_M = whole / total_M
    if splits == 1:
        out_M = (begin + token_M).to(tl.int64) * (tl.num_programs(1) * GROUP) + head_M
        _store(out + out_M * RANK, sums, factor_M, live_M, RANK)
    elif SPLIT:
        place_M = _place(program, tile, tl.num_programs(0), group, tl.num_programs(1), M) + tl.arange(0, M)
        _store(parts + place_M * RANK, sums, factor_M, live_M, RANK)
        lse_M = tl.where(nothing_M, float("-inf"), peak_M + tl.log2(total_M))
        tl.store(lse + place_M, lse_M, mask=live_M)


# ---- the launch ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile: rows, and latents; warps, stages of loads in flight, and programs that a processor is expected to run at
    a time. hopper: by mla_hopper.py, which has no stages.
    """

    rows: int
    latents: int
    warps: int
    stages: int
    programs: int
    hopper: bool = False


def shape_of(rows: int, group: int, latents: Paged, rope: int, query: torch.dtype, gpu: GPU) -> Shape:
    """The tile for so many query tokens x heads of a request, `group` of which are one token's."""
    wide = (
        replace(shape, rows=max(shape.rows, _power(group))) for shape in _shapes(rows, latents, query, gpu)
    )
    return next(
        shape for shape in wide if shape.programs * _bytes(shape, latents, rope, query.itemsize) <= gpu.memory
    )


def _shapes(rows: int, latents: Paged, query: torch.dtype, gpu: GPU) -> Iterator[Shape]:
    """From the fastest to the smallest."""
    if gpu.arch == HOPPER and _suits_hopper(latents, query):
        fitting, parts = min(_power(rows), ROWS), _parts(latents)
        if parts == 4 and fitting == 16:
            yield Shape(16, 64, 4, 1, 2, True)
        yield Shape(fitting, 64, 4 if parts == 1 and fitting <= NARROW else 8, 1, 1, True)
    for tile in (32, 16):
        yield Shape(min(ROWS, _power(rows)), tile, 8 if rows > NARROW else 4, 2, 1)
    yield Shape(16, 16, 4, 1, 1)


def _suits_hopper(latents: Paged, query: torch.dtype) -> bool:
    """Whether mla_hopper.py can read the latents: by 16 bytes, a full tile of words, plain values as queries are."""
    kind, data = LATENTS[latents.format.name], latents.planes_PHS[0]
    wide = data.shape[3] * data.itemsize >= LEAST_ROW if kind.decoder.parts > 1 else data.dtype == query
    copied = (data, latents.planes_PHS[-1]) if kind.apart else (data,)
    alike = not kind.apart or latents.planes_PHS[-1].dtype == query
    scales = latents.planes_PHS[1:2] if kind.decoder.parts > 1 and kind.decoder.block else ()
    aligned = all(_aligned(plane, 16) for plane in copied) and all(_aligned(plane, 4) for plane in scales)
    return query.itemsize == 2 and wide and alike and aligned


def _aligned(plane_PHS: Tensor, size: int) -> bool:
    """Whether rows begin at multiples of so many bytes, which is what an asynchronous copy takes at a time."""
    return all(x * plane_PHS.itemsize % size == 0 for x in (plane_PHS.storage_offset(), plane_PHS.stride(2)))


def _parts(latents: Paged) -> int:
    return LATENTS[latents.format.name].decoder.parts


def _power(x: int) -> int:
    return max(next_power_of_2(x), 16)


def _bytes(shape: Shape, latents: Paged, rope: int, item: int) -> int:
    """Shared memory of a program, roughly: queries, weights, tiles as they are stored, and as they are decoded."""
    rank = _power(latents.dim - rope)
    whole = rank + (_power(rope) if rope else 0)
    stored = sum(plane[0, 0, 0].nbytes for plane in latents.planes_PHS)
    packed, apart = _parts(latents) > 1, LATENTS[latents.format.name].apart
    tile = (rank if apart else whole) * item if packed else 0
    tile += stored * ((1 if packed else 2) if shape.hopper else shape.stages)
    return shape.latents * tile + shape.rows * (whole + shape.latents) * item + SCRATCH


def attend(
    q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch, scale: float, longest: int = MANY, *,
    shape: Shape | None = None, slots: int | None = None,
) -> Tensor:  # fmt: skip
    """See kernels/mla/__init__.py. slots: programs that run at a time for one tile of queries; latents are split among them if
    more than 1.
    """
    (tokens, heads, dim), gpu = q_THD.shape, gpu_of(q_THD.device)
    rank, count, most = dim - rope, len(batch.seq_lens_B), max(batch.query_lens)
    group = _group(heads, shape.rows if shape else ROWS)
    shape = shape or shape_of(most * group, group, latents, rope, q_THD.dtype, gpu)
    tiles, groups = cdiv(most, shape.rows // group), heads // group
    if slots is None:
        slots = shape.programs * gpu.processors // (tiles * groups) if longest > LEAST_KEYS.value else 0
    split = slots > 1
    programs = count + SIZES // 2 * slots if split else count
    out = q_THD.new_empty(tokens, heads, rank)
    parts, lse, plan = (
        _workspace(programs * tiles * groups * shape.rows, rank, count, out) if split else (out,) * 3
    )
    latent, rotary, kind = sections(latents, rope, q_THD.dtype)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    most_requests = max(next_power_of_2(count), 32)
    common = (
        q_THD, out, parts, lse, plan, latent, rotary, latents.scale, batch.page_table_BN, batch.cu_seqlens_q_B1,
        batch.seq_lens_B, scale, count, slots, batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1),
        group, rank, rope, kind, LATENTS[latents.format.name].decoder.fold, split,
    )  # fmt: skip
    if shape.hopper:
        from nibble.kernels.mla.gluon_sm90 import layouts, mla_hopper_kernel

        chosen = layouts(shape.rows, latent, rotary, most_requests, shape.warps)
        mla_hopper_kernel[(tiles, groups, programs)](
            *common, shape.rows, shape.latents, most_requests, SIZES, *chosen, num_warps=shape.warps
        )
    else:
        mla_kernel[(tiles, groups, programs)](
            *common, shape.stages, shape.rows, shape.latents, most_requests, SIZES,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    if split:
        combine_kernel[(most, heads, count)](
            out, parts, lse, plan, batch.cu_seqlens_q_B1, tiles,
            group, rank, next_power_of_2(rank), shape.rows, _at_once(slots, count),
        )  # fmt: skip
    return out


def _at_once(slots: int, requests: int) -> int:
    """Splits of a row that are joined at a time: a few where there are many requests, as rows are long."""
    return min(max(next_power_of_2(-(-slots // requests)), 4), 16)


def _group(heads: int, most: int) -> int:
    """Heads of one tile: as many as fit, in equal groups."""
    return next(group for group in range(min(heads, most), 0, -1) if heads % group == 0)


def _workspace(rows: int, rank: int, requests: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What programs leave to be combined: values and log-sum-exps of rows, and where those of each request begin."""
    return (
        like.new_empty(rows, rank, dtype=torch.float32),
        like.new_empty(rows, dtype=torch.float32),
        like.new_empty(requests, 2, dtype=torch.int32),
    )
