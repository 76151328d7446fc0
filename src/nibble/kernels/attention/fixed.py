"""Attention whose rows depend on nothing but their query and the keys that it sees, bit for bit, in Triton.

Splits of keys lie where they lie in every batch, each has a softmax of its own over tiles at fixed keys, and they are
merged in their order (flash.py). Products are turned: keys, and then values, are on the left, where they fill the
tensor cores' tile of 64, and rows of queries are the other side, of 8 to 64. So one instruction serves a decode step
and a prompt (on Hopper wgmma m64nMk16), and a row's sums are made in the same order whatever stands beside it. A decode
step wastes next to nothing on rows that it has not.

Tiles are decoded in the registers that the tensor cores read. A word holds several neighbouring values of a row, which
suits keys: their parts are summed over. Values are not, and a part of them may be narrower than a tile: then TIMES
copies of the words lie below one another, and each is shifted to another part.

Shape suffixes: T query tokens, H query heads, D values of a head, M rows of queries of a tile, N keys of a tile, W
words of a row, V places of values in a tile. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import FIXED_SPLIT, GPU, cdiv, flash, gpu_of, next_power_of_2
from nibble.kernels.attention.triton import StoredTokens, stored_tokens
from nibble.kernels.codecs import DECODERS, tiles
from nibble.kernels.codecs import small_floats as floats
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged

MIN_VALUES = tl.constexpr(64)
"""Values of the smallest tile of Hopper's wgmma."""
MIN_ROWS, FEW_ROWS = 8, 16
"""Rows of the smallest tile of queries, and of the next."""
MANY_ROWS = 64
"""Rows of the largest, of heads of up to WIDE values; beyond, half as many."""
WIDE = 128


# ---- tiles of keys and values ----------------------------------------------------------------------------------------


@triton.constexpr_function
def _shift_ptx(bits: int) -> str:
    """Return PTX that moves two words of 16 bits down, by `bits` times $2, and their neighbours' bits into them."""
    return f"{{ .reg .b32 n; and.b32 n, $2, 15; mul.lo.u32 n, n, {bits}; shr.b32 $0, $1, n; }}"


@triton.jit
def _shifted(items, parts, BITS: tl.constexpr):
    """Move words down by so many parts of BITS bits. What comes in from above is no part of the result."""
    if floats.HAS_PTX:
        PTX: tl.constexpr = _shift_ptx(BITS)
        moved = tl.inline_asm_elementwise(PTX, "=r,r,r", [items, parts], tl.int16, is_pure=True, pack=2)
    else:
        moved = items >> parts * BITS
    return moved


@triton.jit
def _read(stream, page, first, n_N, stop, head, MASKED: tl.constexpr):
    """Load a tile of words, and their block scales: [N, W] both; 0 where there are none."""
    slot_N, keep_N = tiles.slots_of(first, n_N, stream.PAGE_SIZE), first + n_N < stop
    scales = tiles.read_scales(stream, page, slot_N, head, keep_N, 1, MASKED)
    items = tiles.read_words(stream, page, slot_N, head, keep_N, 1, MASKED)
    if stream.EACH:
        scales = tiles.spread(scales, items.shape, 1)
    return items, scales


@triton.jit
def _repeat(items, TIMES: tl.constexpr):
    """Repeat rows [N, W] -> [N, TIMES * W]."""
    N: tl.constexpr = items.shape[0]
    W: tl.constexpr = items.shape[1]
    return tl.reshape(tl.broadcast_to(items[:, None, :], [N, TIMES, W]), [N, TIMES * W])


@triton.jit
def _load_values(stream, part_V, page, first, n_N, stop, head, MASKED: tl.constexpr, TIMES: tl.constexpr):
    """Load a tile of values as PARTS / TIMES tiles [N, V].

    Number j of them has at place v the value part_V[v] + j * TIMES of word v % W.
    """
    items, scales = _read(stream, page, first, n_N, stop, head, MASKED)
    if TIMES > 1:
        items = _repeat(items, TIMES)
        if stream.EACH:
            scales = _repeat(scales, TIMES)
        items = _shifted(items, tl.broadcast_to(part_V[None, :], items.shape), 16 // stream.PARTS)
    decoded = stream.DECODE(items, scales, stream.DTYPE)
    values = ()
    for j in tl.static_range(0, stream.PARTS, TIMES):
        values += (decoded[j],)  # type: ignore[assignment]
    return values


# ---- attention -------------------------------------------------------------------------------------------------------


@triton.jit
def _scores(q, k, page, first, n_N, stop, head, position_M, unit, softcap, WINDOW: tl.constexpr,
            SOFTCAP: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Return products of keys and queries [N, M], -inf where a query does not see a key. Capped: powers of two."""
    items, scales = _read(k, page, first, n_N, stop, head, MASKED)
    keys = k.DECODE(items, scales, k.DTYPE)
    scores = tl.dot(keys[0], q[0], input_precision="ieee")
    for j in tl.static_range(1, len(keys)):
        scores = tl.dot(keys[j], q[j], scores, input_precision="ieee")
    if SOFTCAP:  # softcap * tanh(score / softcap), times log2(e)
        cap = softcap * flash.LOG2E
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (unit * 2.0 * flash.LOG2E / softcap))))
    if MASKED:
        visible = (first + n_N)[:, None] <= position_M[None, :]
        if WINDOW:
            visible &= (first + n_N)[:, None] > position_M[None, :] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _accumulate(
    state, q, k, v, part_V, table, head, position_M, start, stop, unit, softcap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, N: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Add keys [start, stop), in whole tiles, to the state of an online softmax.

    What is multiplied and added is fused as it stands here, in every kernel alike.
    """
    peak_M, total_NM, sums = state
    n_N = tl.arange(0, N)
    base = 1.0 if SOFTCAP else unit * flash.LOG2E
    page = tiles.pages_of(table, start, n_N, stop, k.PAGE_SIZE)
    for first in tl.range(start, stop, N):
        # pages are looked up a tile early
        next_page = tiles.pages_of(table, first + N, n_N, stop, k.PAGE_SIZE)
        scores_NM = _scores(
            q, k, page, first, n_N, stop, head, position_M, unit, softcap, WINDOW, SOFTCAP, MASKED
        )
        # --- softmax
        top_M = tl.maximum(peak_M, tl.max(scores_NM, 0) * base)
        below_NM = tl.broadcast_to(-top_M[None, :], scores_NM.shape)
        weights_NM = tl.exp2(tl.fma(scores_NM, tl.full(scores_NM.shape, base, tl.float32), below_NM))
        rescale_M = tl.exp2(peak_M - top_M)
        # summed up in the end: a sum over warps would cost a barrier
        total_NM = tl.fma(total_NM, tl.broadcast_to(rescale_M[None, :], total_NM.shape), weights_NM)
        # --- accumulate
        values = _load_values(v, part_V, page, first, n_N, stop, head, MASKED, TIMES)
        weights, updated = weights_NM.to(v.DTYPE), ()
        for j in tl.static_range(len(values)):
            part = tl.dot(tl.trans(values[j]), weights, sums[j] * rescale_M[None, :], input_precision="ieee")
            updated += (part,)  # type: ignore[assignment]
        peak_M, page, sums = top_M, next_page, updated
    return peak_M, total_NM, sums


@triton.jit
def _no_sums(v, M: tl.constexpr, TIMES: tl.constexpr):
    """Return the sums of no values."""
    sums = ()
    for _ in tl.static_range(0, v.PARTS, TIMES):
        sums += (tl.zeros([v.items.WIDTH * TIMES, M], tl.float32),)  # type: ignore[assignment]
    return sums


@triton.jit
def _attend(
    q, k, v, part_V, table, head, position_M, bounds, unit, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Return the softmax over a split: peaks and totals [M], and sums of values, [V, M] each.

    Only the tiles at both ends need masks (flash.split_bounds).
    """
    start, inner, outer, stop = bounds
    state = tl.full([M], flash.MIN_PEAK, tl.float32), tl.zeros([N, M], tl.float32), _no_sums(v, M, TIMES)
    if WINDOW:
        state = _accumulate(state, q, k, v, part_V, table, head, position_M, start, inner, unit, softcap, WINDOW,
                            SOFTCAP, True, N, TIMES)  # fmt: skip
    state = _accumulate(state, q, k, v, part_V, table, head, position_M, inner, outer, unit, softcap, WINDOW,
                        SOFTCAP, False, N, TIMES)  # fmt: skip
    peak_M, total_NM, sums = _accumulate(state, q, k, v, part_V, table, head, position_M, outer, stop, unit,
                                         softcap, WINDOW, SOFTCAP, True, N, TIMES)  # fmt: skip
    return peak_M, tl.sum(total_NM, 0), sums


@triton.jit
def _rows(sums, TIMES: tl.constexpr):
    """Return sums [V, M] of all parts as rows of values [M, D]."""
    M: tl.constexpr = sums[0].shape[1]
    W: tl.constexpr = sums[0].shape[0] // TIMES
    parts = ()
    for j in tl.static_range(len(sums)):
        part_MW = tl.trans(sums[j])
        if TIMES > 1:
            part_MW = tl.reshape(tl.trans(tl.reshape(part_MW, [M, TIMES, W]), 0, 2, 1), [M, W * TIMES])
        parts += (part_MW,)  # type: ignore[assignment]
    rows_MD = tiles.interleave(parts, len(sums))
    if TIMES > 1 and len(sums) > 1:
        apart = tl.trans(tl.reshape(rows_MD, [M, W, TIMES, len(sums)]), 0, 1, 3, 2)
        rows_MD = tl.reshape(apart, [M, W * TIMES * len(sums)])
    return rows_MD


@triton.jit(
    do_not_specialize=["requests", "tokens", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens", "sinks"],
)
def fixed_kernel(
    q, out, parts, stats, places, k, v, table, cu_seqlens_q, seq_lens, sinks, scale, softcap, requests, tokens,
    table_stride, q_stride_T, q_stride_H, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPREAD: tl.constexpr, SIZE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of queries over all splits of a request's keys, or over one if SPREAD.

    Grid: tiles of a request's queries, KV heads, and requests, times splits if SPREAD. Then parts and stats are what
    combine_fixed_kernel merges (flash.py). places: 0, 1, 2...; from memory, because only what is loaded comes to where
    the tensor cores read without a detour.
    """
    # --- which request, queries and keys
    TOKENS: tl.constexpr = M // GROUP
    # the last tiles see the most keys, so they go first
    tile, head, program = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, split = program, 0
    if SPREAD:
        request, split = program % requests, program // requests
    begin = tl.load(cu_seqlens_q + request)
    count = tl.load(cu_seqlens_q + request + 1) - begin
    first = tile * TOKENS
    if first >= count:
        return
    past = tl.load(seq_lens + request) - count
    last = tl.minimum(first + TOKENS, count) - 1
    low, high = flash.fixed_splits(past, first, last, SIZE, WINDOW, N)
    if SPREAD:
        if (split < low) | (split >= high):
            return
        low, high = split, split + 1
    row_M = tl.arange(0, M)
    token_M, query_head_M = first + row_M // GROUP, head * GROUP + row_M % GROUP
    live_M = (row_M < TOKENS * GROUP) & (token_M < count)

    # --- load queries
    offset_M = (begin + token_M).to(tl.int64) * q_stride_T + query_head_M * q_stride_H
    rows = flash.load_queries(q, offset_M, live_M, k.PARTS, k.items.WIDTH, K_DIM, k.DTYPE)
    queries = ()
    for j in tl.static_range(k.PARTS):
        queries += (tl.trans(rows[j]),)  # type: ignore[assignment]

    # --- accumulate
    WIDTH: tl.constexpr = v.items.WIDTH
    TIMES: tl.constexpr = min(max(MIN_VALUES // WIDTH, 1), v.PARTS)
    part_V = tl.load(places + tl.arange(0, WIDTH * TIMES) // WIDTH)
    table += request.to(tl.int64) * table_stride
    unit, factor = scale * tiles.global_scale(k, head), tiles.global_scale(v, head)
    if SPREAD:
        bounds = flash.fixed_bounds(past, first, last, split, SIZE, WINDOW, N)
        peak_M, total_M, sums = _attend(queries, k, v, part_V, table, head, past + token_M, bounds, unit, softcap,
                                        WINDOW, SOFTCAP, M, N, TIMES)  # fmt: skip
        flash.store_part(parts, stats, (peak_M, total_M, (_rows(sums, TIMES),)), factor, split, begin + token_M,
                         query_head_M, live_M, tokens, tl.num_programs(1) * GROUP, V_DIM)  # fmt: skip
        return
    peak_M, total_M = tl.full([M], flash.MIN_PEAK, tl.float32), tl.zeros([M], tl.float32)
    if SINKS:
        peak_M = tl.load(sinks + query_head_M, mask=live_M, other=0.0).to(tl.float32) * flash.LOG2E
        total_M += 1.0
    state = peak_M, total_M, _no_sums(v, M, TIMES)
    for part in range(low, high):
        bounds = flash.fixed_bounds(past, first, last, part, SIZE, WINDOW, N)
        fresh = _attend(queries, k, v, part_V, table, head, past + token_M, bounds, unit, softcap, WINDOW, SOFTCAP,
                        M, N, TIMES)  # fmt: skip
        state = flash.merge_states(state, fresh, 0)

    # --- store
    _, total_M, sums = state
    # A row that sees no key at all becomes zeros, not NaN.
    factor_M = factor / tl.where(total_M == 0.0, 1.0, total_M)
    out_M = (begin + token_M).to(tl.int64) * (tl.num_programs(1) * GROUP) + query_head_M
    flash.store_rows(out + out_M * V_DIM, (_rows(sums, TIMES),), factor_M, live_M, V_DIM)


# ---- shapes of tiles -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FixedTile:
    """How a program is tiled."""

    rows: int
    keys: int
    """The same for any number of rows, for they decide how keys are summed up."""
    warps: int
    """Likewise."""
    stages: int
    """Stages of loads in flight."""
    registers: int | None = None
    """Most registers of a thread."""


def fixed_tiles(group: int, k: Paged, v: Paged, query: torch.dtype, gpu: GPU) -> tuple[FixedTile, ...]:
    """Return the tiles that serve queries, from the fewest rows to the most: of one arithmetic, all of them.

    Args:
        group: Query heads of a KV head.
        k: Pages of the keys.
        v: Pages of the values.
        query: The query's dtype.
        gpu: Sizes of the GPU.
    """
    return _fixed_tiles(next_power_of_2(group), stored_tokens(k, v), query.itemsize, gpu)


@functools.cache
def _fixed_tiles(group: int, kv: StoredTokens, item: int, gpu: GPU) -> tuple[FixedTile, ...]:
    most = MANY_ROWS if kv.dim <= WIDE else MANY_ROWS // 2
    rows = sorted({max(rows, group) for rows in (MIN_ROWS, FEW_ROWS, most)})
    smallest = next(
        tile
        for keys in (64, 32, 16)
        for tile in _staged(rows[0], keys)
        if _memory_of(tile, kv, item) <= gpu.memory
    )
    # Two programs or more of a processor hide what each waits for.
    chosen = (
        next((tile for most in (gpu.memory // 2, gpu.memory) for tile in _staged(count, smallest.keys)
              if _memory_of(tile, kv, item) <= most), None)
        for count in rows
    )  # fmt: skip
    return tuple(tile for tile in chosen if tile)


def _staged(rows: int, keys: int) -> Iterator[FixedTile]:
    yield from (FixedTile(rows, keys, 4, stages) for stages in (3, 2, 1))


def _memory_of(tile: FixedTile, kv: StoredTokens, item: int) -> int:
    """Return the bytes of shared memory that a tile takes, or somewhat more."""
    dim = next_power_of_2(kv.dim)
    return tile.keys * tile.stages * kv.bytes + tile.rows * (dim + tile.keys) * item


# ---- launch ----------------------------------------------------------------------------------------------------------


@functools.cache
def _places(device: torch.device) -> Tensor:
    """Return 0, 1, 2... on a device: copied, which cannot go unnoticed into a CUDA graph."""
    return torch.arange(MIN_VALUES.value, dtype=torch.int16).to(device)


def _tiles(stream: Paged, query: torch.dtype) -> tiles.Tiles:
    """Return the stream as a kernel's argument, in the dtype that decodes with the least work."""
    half = DECODERS[stream.format.name].half
    return tiles.Tiles.of(stream, query if half is None or query == torch.float32 else half)


def fixed_attention(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams, *,
    shape: FixedTile | None = None, size: int = FIXED_SPLIT, spread: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return attention as naive.py defines it, in which a row depends on nothing but its query and the keys it sees.

    Splits of keys begin at multiples of `size`. They are merged by one program, or by a second launch where programs
    share them, with the same bits.

    Args:
        q_THD: Queries, request after request.
        k: Pages of the keys.
        v: Pages of the values.
        batch: The pages and lengths of requests.
        params: Scale, window, capping and sinks.
        shape: Another tile than the fastest.
        size: Keys of a split.
        spread: Whether programs share the splits; by the number of queries if left out.

    Returns:
        [T, H, D] in the query's dtype.
    """
    tokens, heads, dim = q_THD.shape
    group, requests, max_query_len = heads // k.heads, len(batch.seq_lens_B), max(batch.query_lens)
    if shape is None:
        known = fixed_tiles(group, k, v, q_THD.dtype, gpu_of(q_THD.device))
        shape = next((tile for tile in known if tile.rows >= max_query_len * group), known[-1])
    num_tiles, splits = cdiv(max_query_len, shape.rows // group), cdiv(max(batch.seq_lens), size)
    out = q_THD.new_empty(tokens, heads, v.dim)
    spread, parts, stats = flash.fixed_workspace(out, splits, requests, max_query_len, spread)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    sinks, has_sinks = q_THD if params.sinks_H is None else params.sinks_H, params.sinks_H is not None
    window = params.window or 0
    fixed_kernel[(num_tiles, k.heads, requests * splits if spread else requests)](
        q_THD, out, parts, stats, _places(q_THD.device), _tiles(k, q_THD.dtype), _tiles(v, q_THD.dtype),
        batch.page_table_BN, batch.cu_seqlens_q_B1, batch.seq_lens_B, sinks, params.scale, params.softcap or 0.0,
        requests, tokens, batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1),
        group, dim, v.dim, window, params.softcap is not None, has_sinks, spread, size, shape.rows, shape.keys,
        num_warps=shape.warps, num_stages=shape.stages, maxnreg=shape.registers,
    )  # fmt: skip
    if spread:
        flash.combine_fixed_kernel[(max_query_len, heads, requests)](
            out, parts, stats, batch.cu_seqlens_q_B1, batch.seq_lens_B, sinks, tokens, heads, shape.rows // group,
            v.dim, next_power_of_2(v.dim), size, window, has_sinks, shape.keys, num_warps=1,
        )  # fmt: skip
    return out
