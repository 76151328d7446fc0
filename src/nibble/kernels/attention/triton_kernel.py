"""The kernels of attention.py: flash attention over pages in their own formats, and the joining of split keys.

A program takes a tile of rows, which are query tokens times the query heads of one KV head, and a share of the keys
that they see. Must not know of formats (decoders.py) nor of what lies where in a page (tiles.py).

How many programs share a request's keys is worked out on the device, from the lengths that stand there: each gets
about as many keys as any other in the batch, whatever the lengths are, and the grid depends on none of them.

Shape suffixes: M rows of a tile, N keys of a tile, W words of a row, D values of a head, R requests, S splits. Names in
capitals are constants of a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nibble.kernels.codecs.tiles import (
    decoded,
    global_scale,
    interleaved,
    pages_of,
    read_scales,
    read_words,
    slots_of,
)

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # where a peak begins; not -inf, whose difference with itself is NaN
LARGEST_FP16 = tl.constexpr(65504.0)
LEAST_KEYS = tl.constexpr(256)  # for which a program of its own is worth while
WAITING = tl.constexpr(0.3)  # of a share's time, that the GPU waits for the last program
STARTING = tl.constexpr(80.0)  # keys, in the time of which a program starts


@triton.jit
def _shares(keys_R, live_R, slots, K: tl.constexpr):
    """How many programs share each request's keys: all told, at most requests + K / 2 * slots.

    Of K sizes of a share, up to twice what is fair, the one that is done first. Programs that all run at once take as
    long as the longest. Others keep the GPU busy until the last of them has it for itself.
    """
    fair = tl.sum(keys_R) / slots
    each_K = tl.maximum(fair * (1.0 + tl.arange(0, K)) * (2.0 / K), LEAST_KEYS)
    shares_KR = tl.maximum(tl.ceil(keys_R[None, :] / each_K[:, None]), 1.0) * live_R[None, :]
    programs_K = tl.sum(shares_KR, 1)
    longest_K = tl.max(keys_R[None, :] / tl.maximum(shares_KR, 1.0), 1)
    queued_K = fair + WAITING * longest_K + STARTING * programs_K / slots
    best = tl.argmin(tl.where(programs_K <= slots, longest_K, queued_K), 0)
    return tl.sum(tl.where((tl.arange(0, K) == best)[:, None], shares_KR, 0.0), 0).to(tl.int32)


@triton.jit
def _assigned(program, seq_lens, requests, slots, most, R: tl.constexpr, K: tl.constexpr):
    """The request that a program works for, which share of its keys is the program's, and of how many. No request sees
    more than `most`. A program too many gets request `requests` or more.
    """
    r_R = tl.arange(0, R)
    keys_R = tl.minimum(tl.load(seq_lens + r_R, mask=r_R < requests, other=0), most).to(tl.float32)
    shares_R = _shares(keys_R, (r_R < requests).to(tl.float32), slots, K)
    request = tl.sum((tl.cumsum(shares_R) <= program).to(tl.int32))
    before = tl.sum(tl.where(r_R < request, shares_R, 0))
    return request, program - before, tl.sum(tl.where(r_R == request, shares_R, 0))


@triton.jit
def _queries(
    q, at_M, live_M, PARTS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr
):
    """Query rows -> PARTS tiles [M, WIDTH], whose values meet those of the parts of keys."""
    parts = ()
    for j in tl.static_range(PARTS):
        value = tl.arange(0, WIDTH) * PARTS + j
        x = tl.load(
            q + at_M[:, None] + value[None, :], mask=live_M[:, None] & (value < DIM)[None, :], other=0.0
        )
        if x.dtype != tl.float16 and tl.float16 == DTYPE:
            x = tl.clamp(x.to(tl.float32), -LARGEST_FP16, LARGEST_FP16, propagate_nan=tl.PropagateNan.ALL)
        parts += (x.to(DTYPE),)  # type: ignore[assignment]
    return parts


@triton.jit
def _scales(k, v, page, first, n_N, stop, head, MASKED: tl.constexpr, JOIN: tl.constexpr):
    """Block scales of a tile of keys, and of its values."""
    slot_N, keep_N = slots_of(first, n_N, k.PAGE_SIZE), first + n_N < stop
    k_scales = read_scales(k, page, slot_N, head, keep_N, 1 if JOIN else 0, MASKED)
    return k_scales, read_scales(v, page, slot_N, head, keep_N, 1, MASKED)


@triton.jit
def _tile(
    tiles, scales, page, first, n_N, stop, head, AXIS: tl.constexpr, MASKED: tl.constexpr, JOIN: tl.constexpr
):
    """The parts of a tile of keys or values, or the one tile that they are joined to."""
    slot_N, keep_N = slots_of(first, n_N, tiles.PAGE_SIZE), first + n_N < stop
    words = read_words(tiles, page, slot_N, head, keep_N, AXIS, MASKED)
    parts = decoded(tiles, words, scales, AXIS)
    if JOIN:
        parts = (interleaved(parts, tiles.PARTS),)
    return parts


@triton.jit
def _scores(q, keys, key_N, position_M, unit, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
            MASKED: tl.constexpr, JOIN: tl.constexpr):  # fmt: skip
    """Products of queries and keys; -inf where a query does not see a key. If they are capped, in powers of two."""
    scores = tl.dot(q[0], tl.trans(keys[0]) if JOIN else keys[0], input_precision="ieee")
    for j in tl.static_range(1, len(keys)):
        scores = tl.dot(q[j], keys[j], scores, input_precision="ieee")
    if SOFTCAP:  # softcap * tanh(score / softcap), times log2(e)
        scores = softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (unit * 2.0 * LOG2E / softcap))))
    if MASKED:
        seen = key_N[None, :] <= position_M[:, None]
        if WINDOW:
            seen &= key_N[None, :] > position_M[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _fold(
    state, q, k, v, table, head, position_M, start, stop, unit, softcap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, JOIN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Folds keys [start, stop), in whole tiles, into the state of an online softmax: peaks, totals and sums of values.

    Pages are known a tile ahead. So are block scales where tiles are not joined: there they come through registers,
    decoded before they are spread over threads. Joined tiles that were decoded go to shared memory, keys and values at
    once for a single barrier.
    """
    EARLY: tl.constexpr = JOIN and v.PARTS > 1
    peak_M, total, sums = state
    n_N = tl.arange(0, N)
    base = 1.0 if SOFTCAP else unit * LOG2E
    page, ahead = pages_of(table, start, n_N, stop, k.PAGE_SIZE), (0, 0)
    if not JOIN:
        ahead = _scales(k, v, page, start, n_N, stop, head, True, JOIN)
    for first in tl.range(start, stop, N):
        next_page = pages_of(table, first + N, n_N, stop, k.PAGE_SIZE)
        if JOIN:
            scales = _scales(k, v, page, first, n_N, stop, head, MASKED, JOIN)
        else:
            scales, ahead = ahead, _scales(k, v, next_page, first + N, n_N, stop, head, True, JOIN)
        keys = _tile(k, scales[0], page, first, n_N, stop, head, 1 if JOIN else 0, MASKED, JOIN)
        if EARLY:
            values = _tile(v, scales[1], page, first, n_N, stop, head, 1, MASKED, JOIN)
        scores = _scores(q, keys, first + n_N, position_M, unit, softcap, WINDOW, SOFTCAP, MASKED, JOIN)
        top_M = tl.maximum(peak_M, tl.max(scores, 1) * base)
        weights = tl.exp2(scores * base - top_M[:, None])
        fade_M = tl.exp2(peak_M - top_M)
        # What is not joined is summed up in the end: a sum over warps would cost a barrier.
        total = total * fade_M + tl.sum(weights, 1) if JOIN else total * fade_M[:, None] + weights
        if not EARLY:
            values = _tile(v, scales[1], page, first, n_N, stop, head, 1, MASKED, JOIN)
        weights = weights.to(v.DTYPE)
        faded = ()
        for j in tl.static_range(len(values)):
            part = tl.dot(weights, values[j], sums[j] * fade_M[:, None], input_precision="ieee")
            faded += (part,)  # type: ignore[assignment]
        peak_M, sums, page = top_M, faded, next_page
    return peak_M, total, sums


@triton.jit
def _bounds(past, first, last, split, splits, WINDOW: tl.constexpr, N: tl.constexpr):
    """Of queries `first` to `last` of a request, with `past` keys before its queries: a split's share [start, stop) of
    the keys that any of them sees, and within it [inner, outer), which all of them see. All but stop is at whole tiles.
    """
    start, stop, inner = 0, tl.maximum(past + last + 1, 0), 0
    if WINDOW:
        start = tl.maximum(past + first + 1 - WINDOW, 0) // N * N
        inner = tl.cdiv(tl.maximum(past + last + 1 - WINDOW, 0), N) * N
    outer = tl.maximum(past + first + 1, 0) // N * N
    each = tl.cdiv(stop - start, N * splits) * N
    start += split * each
    stop = tl.minimum(start + each, stop)
    inner = tl.minimum(tl.maximum(inner, start), stop)
    return start, inner, tl.maximum(tl.minimum(outer, stop), inner), stop


@triton.jit
def _begun(sinks, query_head_M, live_M, split, PARTS: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr,
           JOIN: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The state of a softmax over nothing; or over the sink, a key without a value, in the first of the splits."""
    peak_M = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32) if JOIN else tl.zeros([M, N], tl.float32)
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([M, WIDTH], tl.float32),)  # type: ignore[assignment]
    if SINKS and split == 0:
        peak_M = tl.load(sinks + query_head_M, mask=live_M, other=0.0).to(tl.float32) * LOG2E
        total += 1.0 if JOIN else 1.0 / N
    return peak_M, total, sums


@triton.jit
def _store(at_M, sums, factor_M, live_M, DIM: tl.constexpr):
    """Sums times a factor, to rows of DIM values: those of each part to where they belong between the others'."""
    PARTS: tl.constexpr = len(sums)
    for j in tl.static_range(PARTS):
        value = tl.arange(0, sums[j].shape[1]) * PARTS + j
        keep = live_M[:, None] & (value < DIM)[None, :]
        mean = (sums[j] * factor_M[:, None]).to(at_M.dtype.element_ty)
        tl.store(at_M[:, None] + value[None, :], mean, mask=keep)


@triton.jit(
    do_not_specialize=["requests", "slots", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens", "sinks"],
)
def attend_kernel(
    q, out, parts, lse, plan, k, v, table, cu_seqlens_q, seq_lens, sinks, scale, softcap, requests, slots, table_stride,
    q_stride_T, q_stride_H, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, JOIN: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of a request's queries, KV heads, and requests; if SPLIT, requests + K / 2 * slots."""
    TOKENS: tl.constexpr = M // GROUP
    tile, head, program = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, split, splits = program, 0, 1
    if SPLIT:
        most = WINDOW + TOKENS if WINDOW else 1 << 30
        request, split, splits = _assigned(program, seq_lens, requests, slots, most, R, K)
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
    token_M, query_head_M = first + row_M // GROUP, head * GROUP + row_M % GROUP
    live_M = (row_M < TOKENS * GROUP) & (token_M < count)

    K_PARTS: tl.constexpr = 1 if JOIN else k.PARTS
    V_PARTS: tl.constexpr = 1 if JOIN else v.PARTS
    at_M = (begin + token_M).to(tl.int64) * q_stride_T + query_head_M * q_stride_H
    queries = _queries(q, at_M, live_M, K_PARTS, k.words.WIDTH * k.PARTS // K_PARTS, K_DIM, k.DTYPE)
    state = _begun(
        sinks, query_head_M, live_M, split, V_PARTS, v.words.WIDTH * v.PARTS // V_PARTS, SINKS, JOIN, M, N
    )
    start, inner, outer, stop = _bounds(past, first, last, split, splits, WINDOW, N)
    table += request.to(tl.int64) * table_stride
    unit = scale * global_scale(k, head)
    if WINDOW:
        state = _fold(state, queries, k, v, table, head, past + token_M, start, inner, unit, softcap,
                      WINDOW, SOFTCAP, True, JOIN, N)  # fmt: skip
    state = _fold(state, queries, k, v, table, head, past + token_M, inner, outer, unit, softcap,
                  WINDOW, SOFTCAP, False, JOIN, N)  # fmt: skip
    state = _fold(state, queries, k, v, table, head, past + token_M, outer, stop, unit, softcap,
                  WINDOW, SOFTCAP, True, JOIN, N)  # fmt: skip

    peak_M, total, sums = state
    total_M = total if JOIN else tl.sum(total, 1)
    nothing_M = total_M == 0.0  # was seen
    total_M = tl.where(nothing_M, 1.0, total_M)
    factor_M = global_scale(v, head) / total_M
    if splits == 1:
        out_M = (begin + token_M).to(tl.int64) * (tl.num_programs(1) * GROUP) + query_head_M
        _store(out + out_M * V_DIM, sums, factor_M, live_M, V_DIM)
    elif SPLIT:
        place_M = _place(program, tile, tl.num_programs(0), head, tl.num_programs(1), M) + tl.arange(0, M)
        _store(parts + place_M * V_DIM, sums, factor_M, live_M, V_DIM)
        lse_M = tl.where(nothing_M, float("-inf"), peak_M + tl.log2(total_M))
        tl.store(lse + place_M, lse_M, mask=live_M)


@triton.jit
def _place(program, tile, tiles, head, heads, M: tl.constexpr):
    """The first row of what a program leaves to be combined."""
    return ((program * tiles + tile) * heads + head).to(tl.int64) * M


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["cu_seqlens_q"])
def combine_kernel(
    out, parts, lse, plan, cu_seqlens_q, tiles, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Grid: query tokens of a request, query heads, requests. The mean of a row's splits, weighted by what each saw."""
    TOKENS: tl.constexpr = M // GROUP
    token, query_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program, splits = tl.load(plan + 2 * request), tl.load(plan + 2 * request + 1)
    begin = tl.load(cu_seqlens_q + request)
    if (splits == 1) | (
        begin + token >= tl.load(cu_seqlens_q + request + 1)
    ):  # it is in `out`, or there is none
        return
    tile, row, heads = (
        token // TOKENS,
        token % TOKENS * GROUP + query_head % GROUP,
        tl.num_programs(1) // GROUP,
    )
    d_D = tl.arange(0, WIDTH)
    peak, total, mean_D = tl.full([], LOWEST, tl.float32), 0.0, tl.zeros([WIDTH], tl.float32)
    for first in range(0, splits, S):
        split_S = first + tl.arange(0, S)
        place_S = _place(program + split_S, tile, tiles, query_head // GROUP, heads, M) + row
        lse_S = tl.load(lse + place_S, mask=split_S < splits, other=float("-inf"))
        there = (split_S < splits)[:, None] & (d_D < DIM)[None, :]
        part_SD = tl.load(parts + place_S[:, None] * DIM + d_D[None, :], mask=there, other=0.0)
        part_SD = tl.where((lse_S != float("-inf"))[:, None], part_SD, 0.0)
        top = tl.maximum(peak, tl.max(lse_S, 0))
        weight_S, fade = tl.exp2(lse_S - top), tl.exp2(peak - top)
        total = total * fade + tl.sum(weight_S, 0)
        mean_D = mean_D * fade + tl.sum(part_SD * weight_S[:, None], 0)
        peak = top
    mean_D /= tl.where(total == 0.0, 1.0, total)
    row_of_out = (begin + token).to(tl.int64) * tl.num_programs(1) + query_head
    tl.store(out + row_of_out * DIM + d_D, mean_D.to(out.dtype.element_ty), mask=d_D < DIM)
