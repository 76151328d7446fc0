"""Triton kernels of attention: flash attention over pages in their own formats, for all phases, and merge_lse.

A program takes a tile of rows, which are query tokens times the query heads of one KV head, and a share of the keys
that they see (flash.py). What is stored how is the codecs' business: no kernel here names a format. Grids depend on
what a CUDA graph keeps: the number of requests, and of their query tokens.

Shape suffixes: T query tokens, H query heads, D values of a head, M rows of a tile, N keys of a tile, W words of a row,
R rows of a tile of merge_lse (a token's head each). Names in capitals are constants of a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import GPU, HEAD_DIMS, SM90, UNBOUNDED, cdiv, flash, gpu_of, next_power_of_2
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.codecs import DECODERS, tiles
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged

SPLITS_AT_ONCE = 64
"""Splits of a row that are combined at a time."""
MANY_ROWS = 65
"""Rows from which it makes no difference how many there are."""
MERGE_VALUES = 2048
"""Values of a tile of merge_lse."""


# ---- one arithmetic for prompts and decode steps ---------------------------------------------------------------------
#
# decode_fixed.cu says what is summed in which order.


@triton.constexpr_function
def _chunk_words(parts: int, dim: int) -> int:
    """Return the words of 32 bits that a lane of decode_fixed.cu reads at once, of four lanes that share a row.

    0 where it serves no such keys: then they are joined in the order of their dims.
    """
    return min(4, dim // (8 * parts)) if parts > 1 and dim in HEAD_DIMS else 0


@triton.jit
def _join_in_order(parts, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """Join parts of keys [N, W] in the order in which decode_fixed.cu has their dims -> [N, W * PARTS]."""
    N: tl.constexpr = parts[0].shape[0]
    D: tl.constexpr = parts[0].shape[1] * PARTS
    CHUNKS: tl.constexpr = D // (8 * PARTS * CHUNK)
    x = tiles.interleave(parts, PARTS)
    # chunks, lanes, words, and values of a word; those of a step of 16 come together
    if PARTS == 4:
        x = tl.permute(tl.reshape(x, [N, CHUNKS, 4, CHUNK, 2, 2, 2]), 0, 1, 3, 5, 2, 4, 6)
    else:
        x = tl.permute(tl.reshape(x, [N, CHUNKS, 4, CHUNK, 4]), 0, 1, 3, 2, 4)
    return tl.reshape(x, [N, D])


@triton.jit
def _dims_in_order(PARTS: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """Return the dim of each place of _join_in_order."""
    place = tl.arange(0, DIM)
    inner, lane, rest = place % 4, place // 4 % 4, place // 16
    if PARTS == 4:
        inner, rest = inner // 2 * 4 + rest % 2 * 2 + inner % 2, rest // 2
    return ((rest // CHUNK * 4 + lane) * CHUNK + rest % CHUNK) * 2 * PARTS + inner


@triton.jit
def _load_queries(
    q, offset_M, live_M, k, PARTS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Load query rows as values meet those of keys: in parts, or in the order of _join_in_order."""
    if CHUNK:
        order_D = _dims_in_order(k.PARTS, CHUNK, DIM)
        queries = (flash.load_values(q, offset_M, live_M, order_D, DIM, k.DTYPE),)
    else:
        queries = flash.load_queries(q, offset_M, live_M, PARTS, WIDTH, DIM, k.DTYPE)
    return queries


@triton.jit
def _sum_of_tile(x_MN):
    """Sum a tile's weights in one order: key n with n ^ 32, then n ^ 16, n ^ 8, n ^ 1, n ^ 4 and n ^ 2 -> [M]."""
    M: tl.constexpr = x_MN.shape[0]
    if x_MN.shape[1] == 64:
        x_MN = tl.sum(tl.reshape(x_MN, [M, 2, 32]), 1)
    if x_MN.shape[1] == 32:
        x_MN = tl.sum(tl.reshape(x_MN, [M, 2, 16]), 1)
    x_M8 = tl.sum(tl.reshape(x_MN, [M, 2, 8]), 1)
    x_M4 = tl.sum(tl.reshape(x_M8, [M, 4, 2]), 2)
    return tl.sum(tl.sum(tl.reshape(x_M4, [M, 2, 2]), 1), 1)


# ---- attention -------------------------------------------------------------------------------------------------------


@triton.jit
def _load_scales(k, v, page, first, n_N, stop, head, MASKED: tl.constexpr, JOIN: tl.constexpr):
    """Load the block scales of a tile of keys, and of its values."""
    slot_N, keep_N = tiles.slots_of(first, n_N, k.PAGE_SIZE), first + n_N < stop
    k_scales = tiles.read_scales(k, page, slot_N, head, keep_N, 1 if JOIN else 0, MASKED)
    return k_scales, tiles.read_scales(v, page, slot_N, head, keep_N, 1, MASKED)


@triton.jit
def _load_tile(
    stream, scales, page, first, n_N, stop, head, AXIS: tl.constexpr, MASKED: tl.constexpr, JOIN: tl.constexpr,
    CHUNK: tl.constexpr = 0,
):  # fmt: skip
    """Load the parts of a tile of keys or values, or the one tile that they are joined to, by CHUNK in order."""
    slot_N, keep_N = tiles.slots_of(first, n_N, stream.PAGE_SIZE), first + n_N < stop
    items = tiles.read_words(stream, page, slot_N, head, keep_N, AXIS, MASKED)
    parts = tiles.decode_tile(stream, items, scales, AXIS)
    if CHUNK:
        parts = (_join_in_order(parts, stream.PARTS, CHUNK),)
    elif JOIN:
        parts = (tiles.interleave(parts, stream.PARTS),)
    return parts


@triton.jit
def _scores(q, keys, key_N, position_M, unit, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
            MASKED: tl.constexpr, JOIN: tl.constexpr):  # fmt: skip
    """Return products of queries and keys, -inf where a query does not see a key. Capped, they are in powers of two."""
    scores = tl.dot(q[0], tl.trans(keys[0]) if JOIN else keys[0], input_precision="ieee")
    for j in tl.static_range(1, len(keys)):
        scores = tl.dot(q[j], keys[j], scores, input_precision="ieee")
    if SOFTCAP:  # softcap * tanh(score / softcap), times log2(e)
        cap = softcap * flash.LOG2E
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (unit * 2.0 * flash.LOG2E / softcap))))
    if MASKED:
        visible = key_N[None, :] <= position_M[:, None]
        if WINDOW:
            visible &= key_N[None, :] > position_M[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _accumulate(
    state, q, k, v, table, head, position_M, start, stop, unit, softcap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, JOIN: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Add keys [start, stop), in whole tiles, to the state of an online softmax: peaks, totals and sums of values."""
    # Decoded tiles that are joined go to shared memory: keys and values at once, for a single barrier.
    VALUES_FIRST: tl.constexpr = JOIN and v.PARTS > 1
    peak_M, total, sums = state
    n_N = tl.arange(0, N)
    base = 1.0 if SOFTCAP else unit * flash.LOG2E
    # Pages are looked up a tile early. So are block scales where tiles are not joined: there they come through
    # registers, decoded before they are spread over threads.
    page, next_scales = tiles.pages_of(table, start, n_N, stop, k.PAGE_SIZE), (0, 0)
    if not JOIN:
        next_scales = _load_scales(k, v, page, start, n_N, stop, head, True, JOIN)
    for first in tl.range(start, stop, N):
        # --- load
        next_page = tiles.pages_of(table, first + N, n_N, stop, k.PAGE_SIZE)
        if JOIN:
            scales = _load_scales(k, v, page, first, n_N, stop, head, MASKED, JOIN)
        else:
            scales, next_scales = next_scales, _load_scales(
                k, v, next_page, first + N, n_N, stop, head, True, JOIN
            )  # fmt: skip
        keys = _load_tile(k, scales[0], page, first, n_N, stop, head, 1 if JOIN else 0, MASKED, JOIN, CHUNK)
        if VALUES_FIRST:
            values = _load_tile(v, scales[1], page, first, n_N, stop, head, 1, MASKED, JOIN)
        # --- scores
        scores = _scores(q, keys, first + n_N, position_M, unit, softcap, WINDOW, SOFTCAP, MASKED, JOIN)
        # --- softmax
        top_M = tl.maximum(peak_M, tl.max(scores, 1) * base)
        rescale_M = tl.exp2(peak_M - top_M)
        if FIXED:  # what is fused is said, since compilers choose
            base_MN = tl.full(scores.shape, base, tl.float32)
            weights = tl.exp2(tl.fma(scores, base_MN, tl.broadcast_to(-top_M[:, None], scores.shape)))
            total = tl.fma(total, rescale_M, _sum_of_tile(weights))
        else:
            weights = tl.exp2(scores * base - top_M[:, None])
            # What is not joined is summed up in the end: a sum over warps would cost a barrier.
            total = total * rescale_M + tl.sum(weights, 1) if JOIN else total * rescale_M[:, None] + weights
        # --- accumulate
        if not VALUES_FIRST:
            values = _load_tile(v, scales[1], page, first, n_N, stop, head, 1, MASKED, JOIN)
        sums = flash.add_values(sums, weights.to(v.DTYPE), values, rescale_M[:, None])
        peak_M, page = top_M, next_page
    return peak_M, total, sums


@triton.jit
def _init_state(sinks, query_head_M, live_M, split, PARTS: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr,
                JOIN: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Return the state of a softmax over no keys; or over the sink, a key without a value, in the first split."""
    peak_M, total, sums = flash.init_state(PARTS, WIDTH, M, N)
    if JOIN:
        total = tl.zeros([M], tl.float32)
    if SINKS and split == 0:
        peak_M = tl.load(sinks + query_head_M, mask=live_M, other=0.0).to(tl.float32) * flash.LOG2E
        total += 1.0 if JOIN else 1.0 / N
    return peak_M, total, sums


@triton.jit
def _attend(
    state, q, k, v, table, head, position_M, bounds, unit, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    JOIN: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Add keys to the state of an online softmax; only the tiles at both ends need masks (flash.split_bounds)."""
    start, inner, outer, stop = bounds
    if WINDOW:
        state = _accumulate(state, q, k, v, table, head, position_M, start, inner, unit, softcap, WINDOW, SOFTCAP,
                            True, JOIN, N, CHUNK, FIXED)  # fmt: skip
    state = _accumulate(state, q, k, v, table, head, position_M, inner, outer, unit, softcap, WINDOW, SOFTCAP,
                        False, JOIN, N, CHUNK, FIXED)  # fmt: skip
    return _accumulate(state, q, k, v, table, head, position_M, outer, stop, unit, softcap, WINDOW, SOFTCAP,
                       True, JOIN, N, CHUNK, FIXED)  # fmt: skip


@triton.jit(
    do_not_specialize=["requests", "concurrency", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens", "sinks"],
)
def attention_kernel(
    q, out, out_lse, parts, lse, plan, k, v, table, cu_seqlens_q, seq_lens, sinks, scale, softcap, requests,
    concurrency, table_stride, q_stride_T, q_stride_H, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, JOIN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, K: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of queries over a split of a request's keys.

    Grid: tiles of a request's queries, KV heads, and requests; if SPLIT, requests + K / 2 * concurrency. FIXED: keys of
    a split, where splits are the same in every batch; a program has one if SPLIT, and merges all of them else. Then
    concurrency is the number of query tokens, lse the statistics of parts, and the grid has requests x splits.
    """
    # --- which request, queries and keys
    TOKENS: tl.constexpr = M // GROUP
    # the last tiles see the most keys, so they go first
    tile, head, program = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    max_keys = WINDOW + TOKENS if WINDOW else 1 << 30
    request, split, splits = flash.take_split(
        program, seq_lens, requests, concurrency, max_keys, SPLIT, FIXED, R, K
    )
    if SPLIT and request >= requests:
        return
    flash.store_plan(plan, program, request, split, splits, SPLIT, FIXED)
    begin = tl.load(cu_seqlens_q + request)
    count = tl.load(cu_seqlens_q + request + 1) - begin
    first = tile * TOKENS
    if first >= count:
        return
    past = tl.load(seq_lens + request) - count
    last = tl.minimum(first + TOKENS, count) - 1
    low, high = 0, 0
    if FIXED:
        low, high = flash.fixed_splits(past, first, last, FIXED, WINDOW, N)
        if SPLIT:
            if (split < low) | (split >= high):
                return
            low, high = split, split + 1
    row_M = tl.arange(0, M)
    token_M, query_head_M = first + row_M // GROUP, head * GROUP + row_M % GROUP
    live_M = (row_M < TOKENS * GROUP) & (token_M < count)

    # --- load queries
    K_PARTS: tl.constexpr = 1 if JOIN else k.PARTS
    V_PARTS: tl.constexpr = 1 if JOIN else v.PARTS
    offset_M = (begin + token_M).to(tl.int64) * q_stride_T + query_head_M * q_stride_H
    K_WIDTH: tl.constexpr = k.items.WIDTH * k.PARTS // K_PARTS
    V_WIDTH: tl.constexpr = v.items.WIDTH * v.PARTS // V_PARTS
    CHUNK: tl.constexpr = _chunk_words(k.PARTS, K_DIM) if FIXED else 0
    queries = _load_queries(q, offset_M, live_M, k, K_PARTS, K_WIDTH, K_DIM, CHUNK)
    # What programs with fixed splits leave is merged with the sink in the end.
    state = _init_state(
        sinks, query_head_M, live_M, split, V_PARTS, V_WIDTH, SINKS and not (FIXED and SPLIT), JOIN, M, N
    )

    # --- accumulate
    if not FIXED:
        bounds = flash.split_bounds(past, first, last, split, splits, WINDOW, N)
    table += request.to(tl.int64) * table_stride
    unit = scale * tiles.global_scale(k, head)
    if FIXED:
        for part in range(low, high):
            bounds = flash.fixed_bounds(past, first, last, part, FIXED, WINDOW, N)
            fresh = _init_state(sinks, query_head_M, live_M, 0, V_PARTS, V_WIDTH, False, JOIN, M, N)
            fresh = _attend(fresh, queries, k, v, table, head, past + token_M, bounds, unit, softcap, WINDOW, SOFTCAP,
                            JOIN, N, CHUNK, True)  # fmt: skip
            state = flash.merge_states(state, fresh)
        if SPLIT:
            flash.store_part(parts, lse, state, tiles.global_scale(v, head), split, begin + token_M, query_head_M,
                             live_M, concurrency, tl.num_programs(1) * GROUP, V_DIM)  # fmt: skip
            return
    else:
        state = _attend(state, queries, k, v, table, head, past + token_M, bounds, unit, softcap, WINDOW, SOFTCAP,
                        JOIN, N, CHUNK, False)  # fmt: skip

    # --- store
    peak_M, total, sums = state
    total_M = total if JOIN else tl.sum(total, 1)
    empty_M = total_M == 0.0
    total_M = tl.where(empty_M, 1.0, total_M)
    factor_M = tiles.global_scale(v, head) / total_M
    flash.store_tile(out, out_lse, parts, lse, peak_M, total_M, empty_M, sums, factor_M, begin + token_M, query_head_M,
               live_M, program, tile, head, splits, GROUP, V_DIM, SPLIT and not FIXED, M)  # fmt: skip


# ---- tiles -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """What a token's key and value are made of."""

    parts: int
    """Parts of a decoded word, the larger of both."""
    dim: int
    """Values of the wider one."""
    bytes: int
    """Bytes of both in a tile, whose rows are padded to powers of two."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a program is tiled, and how its tile is computed."""

    rows: int
    keys: int
    join: bool
    """Whether the parts of a tile of keys are joined."""
    warps: int
    stages: int
    """Stages of loads in flight."""
    programs: int
    """Programs that a processor is expected to run at a time."""


def shape_of(tokens: int, group: int, k: Paged, v: Paged, query: torch.dtype, gpu: GPU) -> TileShape:
    """Choose the fastest tile that fits into shared memory.

    Args:
        tokens: Query tokens of a request.
        group: Query heads of a KV head.
        k: Pages of the keys.
        v: Pages of the values.
        query: The query's dtype.
        gpu: Sizes of the GPU.

    Returns:
        The tile.
    """
    return _fitting(min(tokens * group, MANY_ROWS), group, stored_tokens(k, v), query.itemsize, gpu)


@functools.cache
def _fitting(rows: int, group: int, kv: StoredTokens, item: int, gpu: GPU) -> TileShape:
    wide = (replace(shape, rows=max(shape.rows, next_power_of_2(group))) for shape in _shapes(rows, kv, gpu))
    return next(shape for shape in wide if memory_of(shape, kv, item, gpu) <= gpu.memory)


def _shapes(rows: int, kv: StoredTokens, gpu: GPU) -> Iterator[TileShape]:
    """Yield tiles from the fastest to the smallest. Decoding a tile of keys pays if many rows share it."""
    dim = next_power_of_2(kv.dim)
    if rows <= 16:  # a warp decodes 64 values of a row, and no two the same
        warps = 4 if kv.parts < 4 else max(dim // 64, 1)
        first = TileShape(16, 64, False, warps, 3, 3 if warps == 4 else 8 // warps)
    elif rows < MANY_ROWS or gpu.arch != SM90:
        first = TileShape(64, 64, True, 4, 3, 2)
    else:
        first = TileShape(256 if dim <= 128 and kv.parts * dim >= 256 else 128, 64, True, 8, 3, 1)
    yield first
    yield replace(first, stages=2)
    for keys in (64, 32, 16):
        yield replace(first, rows=min(first.rows, 64), warps=min(first.warps, 4), stages=2, keys=keys)
    yield TileShape(16, 16, False, 4, 1, 1)


def memory_of(shape: TileShape, kv: StoredTokens, item: int, gpu: GPU) -> int:
    """Return the bytes of shared memory that a tile takes, or somewhat more.

    Args:
        shape: The tile.
        kv: What its keys and values are made of.
        item: Bytes of a query's value.
        gpu: Sizes of the GPU.

    Returns:
        Bytes.
    """
    dim = next_power_of_2(kv.dim)
    decoded_bytes = 2 * dim * item if shape.join and kv.parts > 1 else 0
    # Hopper multiplies weights of joined tiles from registers
    weights = 0 if shape.join and gpu.arch == SM90 else shape.rows * shape.keys * item
    return shape.keys * (shape.stages * kv.bytes + decoded_bytes) + shape.rows * dim * item + weights


def stored_tokens(k: Paged, v: Paged) -> StoredTokens:
    """Return what a token's key and value are made of."""
    parts = max(DECODERS[stream.format.name].parts for stream in (k, v))
    widths = [next_power_of_2(plane.shape[3]) * plane.itemsize for x in (k, v) for plane in x.planes_PHS]
    return StoredTokens(parts, max(k.dim, v.dim), sum(widths))


def stored_tiles(stream: Paged, query: torch.dtype, join: bool, fixed: bool = False) -> tiles.Tiles:
    """Return the stream as a kernel's argument.

    Joined tiles are in the query's dtype, so that the tensor cores may read the query where it was loaded to; over
    fixed splits in what decodes with the least work, as decode steps are.
    """
    half = DECODERS[stream.format.name].half
    dtype = query if (join and not fixed) or half is None or query == torch.float32 else half
    return tiles.Tiles.of(stream, dtype, copied=join)


# ---- launches --------------------------------------------------------------------------------------------------------


def paged_attention(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams,
    max_seq_len: int = UNBOUNDED, *, shape: TileShape | None = None, concurrency: int | None = None,
    lse_TH: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention as naive.py defines it, in one launch, or two where keys are split.

    Args:
        q_THD: Queries, request after request.
        k: Pages of the keys.
        v: Pages of the values.
        batch: The pages and lengths of requests.
        params: Scale, window, capping and sinks.
        max_seq_len: A bound on stored tokens where one is known, which is not so in a CUDA graph.
        shape: Another tile than the fastest.
        concurrency: Programs that run at a time for one tile of queries and KV head; keys are split if more than 1.
        lse_TH: Float32, contiguous: it receives the log-sum-exp.

    Returns:
        [T, H, D] in the query's dtype; of decode steps in float32 if the log-sum-exp is wanted too, for merging.
    """
    (tokens, heads, dim), gpu = q_THD.shape, gpu_of(q_THD.device)
    group, requests, max_query_len = heads // k.heads, len(batch.seq_lens_B), max(batch.query_lens)
    shape = shape or shape_of(max_query_len, group, k, v, q_THD.dtype, gpu)
    num_tiles = cdiv(max_query_len, shape.rows // group)
    if concurrency is None:
        running = shape.programs * gpu.processors // (num_tiles * k.heads)
        concurrency = flash.concurrency_of(running, max_seq_len)
    split = concurrency > 1
    # Of prompts there are many values, which take longer to store than to compute.
    rounds = lse_TH is None or not batch.phase.decodes
    out = q_THD.new_empty(tokens, heads, v.dim, dtype=q_THD.dtype if rounds else torch.float32)
    rows = num_tiles * k.heads * shape.rows
    programs, parts, lse, plan = flash.workspace(out, requests, concurrency, rows, v.dim)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    # Constants by position: each by name would take 0.15 us of the host, for every layer of a decode step.
    attention_kernel[(num_tiles, k.heads, programs)](
        q_THD, out, lse_TH, parts, lse, plan, *(stored_tiles(stream, q_THD.dtype, shape.join) for stream in (k, v)),
        batch.page_table_BN, batch.cu_seqlens_q_B1, batch.seq_lens_B,
        q_THD if params.sinks_H is None else params.sinks_H, params.scale, params.softcap or 0.0,
        requests, concurrency, batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1),
        group, dim, v.dim, params.window or 0, params.softcap is not None, params.sinks_H is not None, split,
        shape.join, shape.rows, shape.keys, flash.padded_requests(requests) if split else 1, flash.SHARE_SIZES, 0,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if split:
        flash.combine_kernel[(max_query_len, heads, requests)](
            out, lse_TH, parts, lse, plan, batch.cu_seqlens_q_B1, num_tiles,
            group, v.dim, next_power_of_2(v.dim), shape.rows, SPLITS_AT_ONCE,
        )  # fmt: skip
    return out


def partial_attention(
    q_THD: Tensor,
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    max_seq_len: int = UNBOUNDED,
) -> PartialAttention:
    """Return attention with its log-sum-exp; see paged_attention.

    Args:
        q_THD: Queries, request after request.
        k: Pages of the keys.
        v: Pages of the values.
        batch: The pages and lengths of requests.
        params: Scale, window, capping and sinks.
        max_seq_len: A bound on stored tokens where one is known.
    """
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    return PartialAttention(paged_attention(q_THD, k, v, batch, params, max_seq_len, lse_TH=lse_TH), lse_TH.T)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    a, a_lse, b, b_lse, out, lse, rows, a_stride_T, a_stride_H, b_stride_T, b_stride_H,
    a_lse_stride_H, a_lse_stride_T, b_lse_stride_H, b_lse_stride_T,
    HEADS: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merge attention over different keys. Grid: tiles of rows, each a head of a token."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token_R, head_R, keep_R = row_R // HEADS, row_R % HEADS, row_R < rows
    # --- softmax: how much each part weighs
    a_R = tl.load(a_lse + head_R * a_lse_stride_H + token_R * a_lse_stride_T, mask=keep_R, other=0.0)
    b_R = tl.load(b_lse + head_R * b_lse_stride_H + token_R * b_lse_stride_T, mask=keep_R, other=0.0)
    # A query may see no key in either part, and -inf less -inf is NaN.
    peak_R = tl.maximum(tl.maximum(a_R, b_R), flash.MIN_PEAK)
    a_R, b_R = tl.exp(a_R - peak_R), tl.exp(b_R - peak_R)
    # The larger weight is 1, unless both are 0.
    empty_R, total_R = a_R + b_R == 0.0, tl.maximum(a_R + b_R, 1.0)
    tl.store(lse + row_R, tl.where(empty_R, float("-inf"), peak_R + tl.log(total_R)), mask=keep_R)
    # --- accumulate: values without a weight are not loaded
    column_D = tl.arange(0, D)[None, :]
    keep_RD = keep_R[:, None] & (column_D < DIM)
    a += (token_R * a_stride_T + head_R * a_stride_H)[:, None]
    a_RD = tl.load(a + column_D, mask=keep_RD & (a_R > 0.0)[:, None], other=0.0)
    b += (token_R * b_stride_T + head_R * b_stride_H)[:, None]
    b_RD = tl.load(b + column_D, mask=keep_RD & (b_R > 0.0)[:, None], other=0.0)
    values_RD = a_RD.to(tl.float32) * (a_R / total_R)[:, None]
    values_RD += b_RD.to(tl.float32) * (b_R / total_R)[:, None]
    # --- store
    tl.store(out + row_R[:, None] * DIM + column_D, values_RD.to(out.dtype.element_ty), mask=keep_RD)


def merge_lse(a: PartialAttention, b: PartialAttention, dtype: torch.dtype) -> PartialAttention:
    """Merge attention over different keys in one launch; see naive.py.

    Args:
        a: Attention over some keys; the last dimension of its values must be contiguous.
        b: Attention of the same queries over other keys, likewise.
        dtype: Of the values returned.

    Returns:
        Attention over all of the keys.
    """
    tokens, heads, dim = a.values_THD.shape
    device = a.values_THD.device
    values_THD = torch.empty(tokens, heads, dim, dtype=dtype, device=device)
    lse_TH = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    width = next_power_of_2(dim)
    tile = max(1, MERGE_VALUES // width)
    if rows := tokens * heads:
        merge_kernel[(cdiv(rows, tile),)](
            a.values_THD, a.lse_HT, b.values_THD, b.lse_HT, values_THD, lse_TH, rows,
            *a.values_THD.stride()[:2], *b.values_THD.stride()[:2], *a.lse_HT.stride(), *b.lse_HT.stride(),
            HEADS=heads, DIM=dim, R=tile, D=width,
        )  # fmt: skip
    return PartialAttention(values_THD, lse_TH.T)
