"""Pieces that the flash attention kernels share: queries, the state of an online softmax, rows of output, split-KV.

A format's words decode into PARTS tiles, and part j has the values j, j + PARTS, j + 2 * PARTS... of a row
(codecs/__init__.py). So queries are loaded part by part, and sums are stored part by part.

Where there are few queries, several programs share the keys of a request, and their results are combined (split-KV).
How many do is computed on the device, from the lengths that stand there, so that a captured CUDA graph stays right when
they change. Each program gets about as many keys as any other in the batch, and the grid depends on no length.

Shape suffixes: M rows of a tile (query tokens x heads), N keys of a tile, W words of a row, D values of a head,
R requests, K sizes of a share, S splits. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import MIN_REQUESTS, SPREAD_TOKENS, cdiv, next_power_of_2

LOG2E = tl.constexpr(1.4426950408889634)
# Where a running maximum starts. Not -inf, whose difference with itself is NaN.
MIN_PEAK = tl.constexpr(-1e30)
MAX_FP16 = tl.constexpr(65504.0)


@triton.jit
def load_queries(
    q, offset_M, live_M, PARTS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr
):
    """Load query rows as PARTS tiles [M, WIDTH], whose values meet those of the parts of keys.

    Args:
        q: Pointer to the queries.
        offset_M: Offset of each row's first value.
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
        part = load_values(q, offset_M, live_M, tl.arange(0, WIDTH) * PARTS + j, DIM, DTYPE)
        parts += (part,)  # type: ignore[assignment]
    return parts


@triton.jit
def load_values(q, offset_M, live_M, value_D, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Load values of query rows -> [M, D]; see load_queries. value_D: which, in the order of the result."""
    keep = live_M[:, None] & (value_D < DIM)[None, :]
    x = tl.load(q + offset_M[:, None] + value_D[None, :], mask=keep, other=0.0)
    # bfloat16 and float32 reach further than float16, in which some formats decode
    if x.dtype != tl.float16 and tl.float16 == DTYPE:
        x = tl.clamp(x.to(tl.float32), -MAX_FP16, MAX_FP16, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


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
def store_rows(out_M, sums, factor_M, live_M, DIM: tl.constexpr):
    """Store sums times a factor, to rows of DIM values: each part's where they belong between the others'."""
    PARTS: tl.constexpr = len(sums)
    for j in tl.static_range(PARTS):
        value = tl.arange(0, sums[j].shape[1]) * PARTS + j
        keep = live_M[:, None] & (value < DIM)[None, :]
        mean = (sums[j] * factor_M[:, None]).to(out_M.dtype.element_ty)
        tl.store(out_M[:, None] + value[None, :], mean, mask=keep)


# ---- split-KV --------------------------------------------------------------------------------------------------------

MIN_KEYS_PER_SPLIT = tl.constexpr(256)
"""Keys from which a program of its own is worth while."""
TAIL_COST = tl.constexpr(0.3)
"""Part of a share's time that the GPU waits for the last program, where not all run at once."""
LAUNCH_COST_KEYS = tl.constexpr(80.0)
"""Keys that are read in the time in which a program starts."""
SHARE_SIZES = 8
"""Sizes of a share of keys that are compared with each other."""
MAX_LIST_SPLITS = 32
LAUNCH_COST_TILES = 3.0
"""Tiles, in the time of which a program over a list of tokens starts and leaves what it has to be combined."""
MOST_PROGRAMS = 65535
"""In the last dimension of a grid: CUDA's limit."""


@triton.jit
def _split_counts(keys_R, live_R, concurrency, K: tl.constexpr):
    """Return how many programs share each request's keys: together at most requests + K / 2 * concurrency.

    Of K sizes of a share, up to twice what is fair, the one that is done first. Programs that all run at once take as
    long as the longest. Others keep the GPU busy until the last of them has it for itself.
    """
    fair = tl.sum(keys_R) / concurrency
    each_K = tl.maximum(fair * (1.0 + tl.arange(0, K)) * (2.0 / K), MIN_KEYS_PER_SPLIT)
    splits_KR = tl.maximum(tl.ceil(keys_R[None, :] / each_K[:, None]), 1.0) * live_R[None, :]
    programs_K = tl.sum(splits_KR, 1)
    longest_K = tl.max(keys_R[None, :] / tl.maximum(splits_KR, 1.0), 1)
    queued_K = fair + TAIL_COST * longest_K + LAUNCH_COST_KEYS * programs_K / concurrency
    best = tl.argmin(tl.where(programs_K <= concurrency, longest_K, queued_K), 0)
    return tl.sum(tl.where((tl.arange(0, K) == best)[:, None], splits_KR, 0.0), 0).to(tl.int32)


@triton.jit
def assign_split(program, seq_lens, requests, concurrency, max_keys, R: tl.constexpr, K: tl.constexpr):
    """Assign a share of a request's keys to a program.

    Args:
        program: Index of the program among those of one tile of queries.
        seq_lens: Pointer to the stored tokens of each request.
        requests: How many requests there are.
        concurrency: How many programs run at a time.
        max_keys: Most keys that a request sees.
        R: Requests, padded to a power of two.
        K: Sizes of a share that are compared.

    Returns:
        The request (`requests` or more for a program too many), the index of its split, and how many it has.
    """
    r_R = tl.arange(0, R)
    keys_R = tl.minimum(tl.load(seq_lens + r_R, mask=r_R < requests, other=0), max_keys).to(tl.float32)
    splits_R = _split_counts(keys_R, (r_R < requests).to(tl.float32), concurrency, K)
    request = tl.sum((tl.cumsum(splits_R) <= program).to(tl.int32))
    before = tl.sum(tl.where(r_R < request, splits_R, 0))
    return request, program - before, tl.sum(tl.where(r_R == request, splits_R, 0))


@triton.jit
def take_split(program, seq_lens, requests, concurrency, max_keys, SPLIT: tl.constexpr, FIXED: tl.constexpr,
               R: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Return the request of a program, the index of its split, and how many splits the request has.

    Arguments are those of assign_split. SPLIT: whether keys are split; FIXED: whether splits are the same in every
    batch, and of how many keys.
    """
    request, split, splits = program, 0, 1
    if SPLIT and FIXED:
        request, split = program % requests, program // requests
    elif SPLIT:
        request, split, splits = assign_split(program, seq_lens, requests, concurrency, max_keys, R, K)
    return request, split, splits


@triton.jit
def store_plan(plan, program, request, split, splits, SPLIT: tl.constexpr, FIXED: tl.constexpr):
    """Tell combine_kernel where the parts of a request are, by the first of its programs."""
    if SPLIT and not FIXED and split == 0:
        tl.store(plan + 2 * request, program)
        tl.store(plan + 2 * request + 1, splits)


@triton.jit
def split_bounds(past, first, last, split, splits, WINDOW: tl.constexpr, N: tl.constexpr):
    """Return the keys of a split, and those among them that need no mask.

    Args:
        past: Keys before the queries of the request.
        first: First query of the tile, counted from the request's first.
        last: Last query of the tile.
        split: Index of the split.
        splits: How many the request has.
        WINDOW: Tokens that a query sees, 0 for all.
        N: Keys of a tile.

    Returns:
        start, inner, outer, stop: [start, stop) is the split's share of the keys that any of the queries sees, and
        [inner, outer) within it is what all of them see. All but stop are at whole tiles.
    """
    start, stop, inner = 0, tl.maximum(past + last + 1, 0), 0
    if WINDOW:
        start = tl.maximum(past + first + 1 - WINDOW, 0) // N * N
        inner = tl.cdiv(tl.maximum(past + last + 1 - WINDOW, 0), N) * N
    outer = tl.maximum(past + first + 1, 0) // N * N
    # A whole number of tiles, so that only the last split has a partial one.
    each = tl.cdiv(stop - start, N * splits) * N
    start += split * each
    stop = tl.minimum(start + each, stop)
    inner = tl.minimum(tl.maximum(inner, start), stop)
    return start, inner, tl.maximum(tl.minimum(outer, stop), inner), stop


@triton.jit
def fixed_bounds(past, first, last, split, SIZE: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr):
    """Return the keys of split number `split` where splits are keys [split * SIZE, (split + 1) * SIZE) in every batch.

    Arguments and result are those of split_bounds.
    """
    start, inner, outer, stop = split_bounds(past, first, last, 0, 1, WINDOW, N)
    start, stop = tl.maximum(start, split * SIZE), tl.minimum(stop, (split + 1) * SIZE)
    inner = tl.minimum(tl.maximum(inner, start), stop)
    return start, inner, tl.maximum(tl.minimum(outer, stop), inner), stop


@triton.jit
def fixed_splits(past, first, last, SIZE: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr):
    """Return the first split of fixed bounds that a tile of queries sees, and the one behind the last."""
    start, _, _, stop = split_bounds(past, first, last, 0, 1, WINDOW, N)
    return start // SIZE, tl.cdiv(stop, SIZE)


@triton.jit
def merge_states(a, b):
    """Merge two softmaxes, b's keys behind a's: peaks [M], totals [M], and parts of sums [M, W].

    A softmax over no keys changes nothing, bit for bit. Products and sums are fused as they stand here, whatever the
    kernel, so that programs that share keys come to what a single one does.
    """
    peak_M, total_M, sums = a
    b_peak_M, b_total_M, b_sums = b
    top_M = tl.maximum(peak_M, b_peak_M)
    a_M, b_M = tl.exp2(peak_M - top_M), tl.exp2(b_peak_M - top_M)
    merged = ()
    for j in tl.static_range(len(sums)):
        scale = tl.broadcast_to(b_M[:, None], b_sums[j].shape)
        merged += (tl.fma(b_sums[j], scale, sums[j] * a_M[:, None]),)  # type: ignore[assignment]
    return top_M, tl.fma(b_total_M, b_M, total_M * a_M), merged


@triton.jit
def store_part(parts, stats, state, scale, split, token_M, head_M, live_M, tokens, HEADS: tl.constexpr,
               DIM: tl.constexpr):  # fmt: skip
    """Store the softmax over a split of fixed bounds for combine_fixed_kernel.

    Args:
        parts: Pointer to float32 [splits, tokens, HEADS, DIM].
        stats: Pointer to float32 [splits, tokens, HEADS, 3]: peaks, totals, and what values are multiplied by.
        state: Peaks, totals, and parts of sums.
        scale: What values are multiplied by.
        split: Index of the split.
        token_M: The query token of each row, among those of the batch.
        head_M: Its query head.
        live_M: Which rows there are.
        tokens: Of the batch.
        HEADS: Query heads.
        DIM: Values of a row.
    """
    peak_M, total_M, sums = state
    part_M = ((tl.zeros(peak_M.shape, tl.int64) + split) * tokens + token_M) * HEADS + head_M
    store_rows(parts + part_M * DIM, sums, tl.full(peak_M.shape, 1.0, tl.float32), live_M, DIM)
    tl.store(stats + 3 * part_M, peak_M, mask=live_M)
    tl.store(stats + 3 * part_M + 1, total_M, mask=live_M)
    tl.store(stats + 3 * part_M + 2, tl.zeros_like(peak_M) + scale, mask=live_M)


@triton.jit(
    do_not_specialize=["tokens"], do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "sinks"]
)
def combine_fixed_kernel(
    out, parts, stats, cu_seqlens_q, seq_lens, sinks, tokens, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a row in the order of keys, as a program does that has all of them.

    Grid: query tokens of a request, query heads, requests. Arguments are those of store_part; TOKENS: query tokens of a
    tile, which see the same splits.
    """
    # --- load: which splits there are
    token, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(cu_seqlens_q + request)
    count = tl.load(cu_seqlens_q + request + 1) - begin
    if token >= count:
        return
    first = token // TOKENS * TOKENS
    past = tl.load(seq_lens + request) - count
    low, high = fixed_splits(past, first, tl.minimum(first + TOKENS, count) - 1, SIZE, WINDOW, N)
    d_D, keep_D = tl.arange(0, WIDTH), tl.arange(0, WIDTH) < DIM
    peak, total, factor = (
        tl.full([1], MIN_PEAK, tl.float32),
        tl.zeros([1], tl.float32),
        tl.zeros([1], tl.float32),
    )
    if SINKS:
        peak, total = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32) * LOG2E, total + 1.0
    state = peak, total, (tl.zeros([1, WIDTH], tl.float32),)

    # --- accumulate
    for split in range(low, high):
        row = ((tl.zeros([1], tl.int64) + split) * tokens + begin + token) * HEADS + head
        part = tl.load(parts + row[:, None] * DIM + d_D[None, :], mask=keep_D[None, :], other=0.0)
        state = merge_states(state, (tl.load(stats + 3 * row), tl.load(stats + 3 * row + 1), (part,)))
        factor = tl.load(stats + 3 * row + 2)

    # --- store
    _, total, sums = state
    # A row that sees no key at all becomes zeros, not NaN.
    factor = factor / tl.where(total == 0.0, 1.0, total)
    out_row = (begin + token).to(tl.int64) * HEADS + head + tl.arange(0, 1)
    store_rows(out + out_row * DIM, sums, factor, tl.full([1], True, tl.int1), DIM)


@triton.jit
def _first_part_row(program, tile, tiles, head, heads, M: tl.constexpr):
    """Return the first row of what a program leaves to be combined."""
    return ((program * tiles + tile) * heads + head).to(tl.int64) * M


@triton.jit
def natural_lse(peak, total, empty):
    """Return the natural logarithm of a sum of weights, whose peak is in powers of two; -inf where it is empty."""
    return tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) / LOG2E)


@triton.jit
def store_tile(
    out, out_lse, parts, lse, peak_M, total_M, empty_M, sums, factor_M, row_M, head_M, live_M, program, tile, group,
    splits, GROUP: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Store the result of a program whose grid is tiles of queries, groups of heads, and requests or splits.

    It is final where the request has one split; else its part and log-sum-exp are left for combine_kernel.

    Args:
        out: Pointer to [tokens, heads, DIM].
        out_lse: Pointer to float32 [tokens, heads], natural logarithms; None where they are not needed.
        parts: Pointer to float32 [programs, tiles, groups, M, DIM].
        lse: Pointer to float32 [programs, tiles, groups, M], in powers of two.
        peak_M: Largest score of each row.
        total_M: Sum of each row's weights; 1 where no key was seen.
        empty_M: Where no key was seen.
        sums: Parts of the weighted values, [M, W] each.
        factor_M: What sums are to be multiplied by.
        row_M: The query token of each row, among those of the batch.
        head_M: Its query head.
        live_M: Which rows there are.
        program: Index in the last dimension of the grid.
        tile: Tile of the request's queries.
        group: Group of heads.
        splits: Splits of the request.
        GROUP: Heads of a group.
        DIM: Values of a row.
        SPLIT: Whether keys may be split.
        M: Rows of a tile.
    """
    if splits == 1:
        out_M = row_M.to(tl.int64) * (tl.num_programs(1) * GROUP) + head_M
        store_rows(out + out_M * DIM, sums, factor_M, live_M, DIM)
        if out_lse is not None:
            tl.store(out_lse + out_M, natural_lse(peak_M, total_M, empty_M), mask=live_M)
    elif SPLIT:
        first = _first_part_row(program, tile, tl.num_programs(0), group, tl.num_programs(1), M)
        part_M = first + tl.arange(0, M)
        store_rows(parts + part_M * DIM, sums, factor_M, live_M, DIM)
        # A log-sum-exp of -inf gives this part no weight in combine_kernel.
        lse_M = tl.where(empty_M, float("-inf"), peak_M + tl.log2(total_M))
        tl.store(lse + part_M, lse_M, mask=live_M)


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["cu_seqlens_q"])
def combine_kernel(
    out, out_lse, parts, lse, plan, cu_seqlens_q, tiles, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a row: their mean, weighted by what each saw.

    Grid: query tokens of a request, query heads, requests. Arguments are those of store_tile; plan: int32
    [requests, 2], the first program of each request and its splits. S: splits that are combined at a time.
    """
    # --- load: which programs left parts of this row
    TOKENS: tl.constexpr = M // GROUP
    token, query_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program, splits = tl.load(plan + 2 * request), tl.load(plan + 2 * request + 1)
    begin = tl.load(cu_seqlens_q + request)
    # One split was stored to `out` at once. The grid is as high as the longest request, so there may be no such row.
    if (splits == 1) | (begin + token >= tl.load(cu_seqlens_q + request + 1)):
        return
    tile, row = token // TOKENS, token % TOKENS * GROUP + query_head % GROUP
    heads = tl.num_programs(1) // GROUP
    d_D = tl.arange(0, WIDTH)
    peak, total, mean_D = tl.full([], MIN_PEAK, tl.float32), 0.0, tl.zeros([WIDTH], tl.float32)

    # --- accumulate
    for first in range(0, splits, S):
        split_S = first + tl.arange(0, S)
        part_S = _first_part_row(program + split_S, tile, tiles, query_head // GROUP, heads, M) + row
        lse_S = tl.load(lse + part_S, mask=split_S < splits, other=float("-inf"))
        keep = (split_S < splits)[:, None] & (d_D < DIM)[None, :]
        part_SD = tl.load(parts + part_S[:, None] * DIM + d_D[None, :], mask=keep, other=0.0)
        # a split in which a row sees no key holds anything, NaN included
        part_SD = tl.where((lse_S != float("-inf"))[:, None], part_SD, 0.0)
        top = tl.maximum(peak, tl.max(lse_S, 0))
        weight_S, rescale = tl.exp2(lse_S - top), tl.exp2(peak - top)
        total = total * rescale + tl.sum(weight_S, 0)
        mean_D = mean_D * rescale + tl.sum(part_SD * weight_S[:, None], 0)
        peak = top

    # --- store
    # A row that sees no key at all becomes zeros, not NaN.
    mean_D /= tl.where(total == 0.0, 1.0, total)
    out_row = (begin + token).to(tl.int64) * tl.num_programs(1) + query_head
    tl.store(out + out_row * DIM + d_D, mean_D.to(out.dtype.element_ty), mask=d_D < DIM)
    if out_lse is not None:
        tl.store(out_lse + out_row, natural_lse(peak, total, total == 0.0))


def concurrency_of(programs: int, max_seq_len: int) -> int:
    """Return how many programs keys are split among, of those that run at a time; 0 where requests are short."""
    return programs if max_seq_len > MIN_KEYS_PER_SPLIT.value else 0


def padded_requests(requests: int) -> int:
    """Return how many requests a kernel is compiled for that serves so many."""
    return max(next_power_of_2(requests), MIN_REQUESTS)


def workspace(
    out: Tensor, requests: int, concurrency: int, rows: int, dim: int
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Allocate what programs leave to be combined.

    Args:
        out: The output. It stands in for the workspace where keys are not split.
        requests: Requests of the batch.
        concurrency: Programs that run at a time; keys are split if more than 1.
        rows: Rows of all tiles and groups of a request.
        dim: Values of a row.

    Returns:
        How many programs one tile of queries and group of heads has; float32 parts of rows and their log-sum-exps, and
        int32 [requests, 2]: the first program of each request and its splits.
    """
    if concurrency <= 1:
        return requests, out, out, out
    # The bound of _split_counts(): lengths stand on the device, and the grid depends on none.
    programs = requests + SHARE_SIZES // 2 * concurrency
    return (
        programs,
        out.new_empty(programs * rows, dim, dtype=torch.float32),
        out.new_empty(programs * rows, dtype=torch.float32),
        out.new_empty(requests, 2, dtype=torch.int32),
    )


def fixed_workspace(
    out: Tensor, splits: int, requests: int, max_query_len: int, spread: bool | None
) -> tuple[bool, Tensor, Tensor]:
    """Allocate what programs leave that share fixed splits.

    Args:
        out: The output [T, H, D]. It stands in for the workspace where splits are not shared.
        splits: Of the longest request.
        requests: Of the batch.
        max_query_len: Query tokens of a request, at most.
        spread: Whether splits are shared; by the number of queries if None.

    Returns:
        Whether they are; float32 parts of rows [S, T, H, D], and their statistics [S, T, H, 3] (store_part).
    """
    if spread is None:
        few = max_query_len == 1 or len(out) <= SPREAD_TOKENS
        spread = few and splits > 1 and requests * splits <= MOST_PROGRAMS
    if not spread:
        return False, out, out
    parts = out.new_empty(splits, *out.shape, dtype=torch.float32)
    return True, parts, out.new_empty(splits, *out.shape[:2], 3, dtype=torch.float32)


def splits_of(programs: int, num_tiles: int, concurrency: int) -> int:
    """Choose the splits of a list that are done first.

    Args:
        programs: How many programs there are without splitting.
        num_tiles: Tiles of a list.
        concurrency: Programs that run at a time.

    Returns:
        Splits of each list.
    """

    def time(splits: int) -> float:
        waves, combining = cdiv(programs * splits, concurrency), LAUNCH_COST_TILES if splits > 1 else 0.0
        return waves * (cdiv(num_tiles, splits) + LAUNCH_COST_TILES) + combining

    return min(range(1, min(MAX_LIST_SPLITS, max(num_tiles, 1)) + 1), key=time)
