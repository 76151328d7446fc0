"""Call what needs torch alone: the definition of attention, the attention that torch brings, and its FlexAttention.

Shape suffixes: T tokens, B requests, n new tokens of each, N pages of a request, L stored tokens or keys of a span,
t tiles of a span, K keys of a tile, H query heads, G KV heads, R query rows of a KV head (n * H / G, padded), D values
of a head. Of FlexAttention: Q blocks of queries, K blocks of keys, S slots of B * n.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.attention.backends.adapters import capability
from nibble.attention.backends.builtin import CUDNN_DIM
from nibble.attention.planner.support import MAX_STAGED_TOKENS
from nibble.attention.step import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels import attention, cdiv
from nibble.kernels.attention.naive import MIN_LSE, PartialAttention
from nibble.kernels.mla import naive as mla
from nibble.kernels.types import AttentionBatch, AttentionParams

if TYPE_CHECKING:  # torch's compiler takes a second to import
    from torch.nn.attention.flex_attention import BlockMask

# The definition

# Pages are read in their own format, a bounded span at a time, and dequantised as it goes. All arithmetic is float32.
# An answer must not depend on who else is in the batch, nor on how a prompt was cut, so a query's result is made of
# tiles at fixed key positions, each with its own softmax, folded in order: a tile that a query cannot see adds an exact
# zero, and the shapes of the products do not change with the batch.

TILE = 256
SPAN_VALUES = 1 << 18
"""Most dequantised values of one stream at a time: what stays in a core's cache."""
SCORES = 1 << 24
"""Most scores at a time."""
BATCHED = 8
"""Requests with up to so many new tokens are computed together; longer prompts one by one."""


def _pad_rows(rows: int, dim: int) -> int:
    """Return the rows of a matrix product that holds `rows`, of sums over `dim` values."""
    # With fewer, the sum of a row may be added in another order, and would depend on the batch.
    least = 16 if dim > 160 else 8 if dim > 64 or rows > 4 else 4
    return max(rows, least)


@dataclass(frozen=True, slots=True)
class _Span:
    """Keys [start, start + tiles * TILE)."""

    start: int
    counts: tuple[int, ...]
    """How many of them each request has."""
    hidden: Tensor
    """bool [B, 1, t, R, K]: which keys each query does not see."""
    before: tuple[int, ...]
    """How many keys of each request come before a window, so that no query sees them."""


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Some rows of a batch, n tokens of each of `requests`, and the keys that they may look at."""

    rows: slice
    n: int
    requests: slice
    spans: tuple[_Span, ...]


_Rectangles = tuple[_Rectangle, ...]


class TorchRef(AttentionBackend):
    """The adapter of the definition. Its state: where the queries of a batch may look."""

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Hashable:
        """Return query heads of a KV head, sizes of keys and values, window, and whether the attention is dense."""
        keys = view.keys.stream
        is_dense = params.topk_slots_TK is None
        return q_THD.shape[1] // keys.heads, keys.dim, keys.values, params.window, is_dense

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> _Rectangles:
        """Cut the batch into rectangles of queries and keys; into none where its tokens are chosen one by one."""
        if params.topk_slots_TK is not None:
            return ()
        return tuple(_rectangles(q_THD, view, batch, params.window))

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _Rectangles
    ) -> Tensor:
        """Attend rectangle by rectangle, in float32."""
        return self.forward_partial(q_THD, view, batch, params, state).values_THD.to(q_THD.dtype)

    def forward_partial(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _Rectangles
    ) -> PartialAttention:
        """Attend rectangle by rectangle -> float32 values."""
        if params.topk_slots_TK is not None:
            keys, rope = view.keys.paged, view.keys.stream.rope
            return mla.partial_sparse_mla_attention(
                q_THD, keys, rope, params.topk_slots_TK, params.scale, params.sinks_H
            )
        outputs = [
            _attend_rectangle(q_THD, rect, view, batch.page_table_BN[rect.requests], params) for rect in state
        ]
        values_THD, lse_HT = zip(*outputs, strict=True)
        return PartialAttention(torch.cat(values_THD), torch.cat(lse_HT, 1))


def _rectangles(
    q_THD: Tensor, view: KVView, batch: AttentionBatch, window: int | None
) -> Iterator[_Rectangle]:
    """Cut a batch into rectangles that keep within the bounds on keys and scores."""
    row, heads, keys = 0, q_THD.shape[1], view.keys.stream
    group, values = heads // keys.heads, keys.values
    max_requests = 1
    if max(batch.query_lens) <= BATCHED:
        max_requests = max(1, SPAN_VALUES // (max(*batch.seq_lens, 1) * values))
    for first, last in _equal_runs(batch.query_lens, max_requests):
        n, seq_lens = batch.query_lens[first], batch.seq_lens[first:last]
        # Only single prompts are longer than this.
        step = max(BATCHED, SCORES // (heads * len(seq_lens) * max(*seq_lens, 1)))
        for start in range(0, n, step):
            stop = min(start + step, n)
            lens = tuple(length - n + stop for length in seq_lens)
            rows = slice(row + start, row + start + (stop - start) * len(lens))
            padded = _pad_rows((stop - start) * group, q_THD.shape[2])
            spans = tuple(_spans(lens, stop - start, group, padded, values, window, q_THD.device))
            yield _Rectangle(rows, stop - start, slice(first, last), spans)
        row += n * len(seq_lens)


def _equal_runs(lens: tuple[int, ...], size: int) -> Iterator[tuple[int, int]]:
    """Yield index ranges of neighbours with equal lengths, at most `size` at a time."""
    first = 0
    for i in range(1, len(lens) + 1):
        if i == len(lens) or lens[i] != lens[first] or i - first == size:
            yield first, i
            first = i


def _spans(
    lens: tuple[int, ...],
    n: int,
    group: int,
    padded: int,
    values: int,
    window: int | None,
    device: torch.device,
) -> Iterator[_Span]:
    """Yield key ranges that start on a tile and cover all that the last n tokens of requests of `lens` tokens see.

    Each token has `group` rows; those of all are padded to `padded`.
    """
    positions_Bn = torch.tensor(lens, device=device)[:, None] + torch.arange(-n, 0, device=device)
    positions_BR = F.pad(positions_Bn.repeat_interleave(group, 1), (0, padded - n * group))
    positions_BR = positions_BR[:, None, :, None]
    # Down to a tile's start: tiles lie at the same keys in every batch.
    first = 0 if window is None else max(0, min(lens) - n - window + 1) // TILE * TILE
    step = max(1, SPAN_VALUES // (len(lens) * values) // TILE) * TILE
    # At least one tile, which may hold nothing for anybody.
    end = max(*lens, first + 1)
    for start in range(first, end, step):
        stop = min(start + step, end)
        keys = torch.arange(start, start + cdiv(stop - start, TILE) * TILE, device=device).view(-1, 1, TILE)
        hidden = keys > positions_BR
        if window is not None:
            hidden |= keys <= positions_BR - window
        counts = tuple(max(0, min(length, stop) - start) for length in lens)
        before = (0,) * len(lens)
        if window is not None:
            before = tuple(max(0, min(length - n - window + 1, stop) - start) for length in lens)
        yield _Span(start, counts, hidden.unsqueeze(1), before)


def _attend_rectangle(
    q_THD: Tensor, rect: _Rectangle, view: KVView, page_table_BN: Tensor, params: AttentionParams
) -> PartialAttention:
    """Attend over one rectangle -> float32 values [B * n, H, Dv]."""
    B, n, H, G = len(page_table_BN), rect.n, q_THD.shape[1], view.keys.stream.heads
    rows = n * H // G
    padding = _pad_rows(rows, q_THD.shape[2]) - rows
    q_BnGHD = q_THD[rect.rows].float().view(B, n, G, H // G, -1)
    q_BGRD = F.pad(q_BnGHD.transpose(1, 2).flatten(2, 3) * params.scale, (0, 0, 0, padding))
    tiles = [_tiles(q_BGRD, view, page_table_BN, params, span) for span in rect.spans]
    peak, weight, values = (
        tiles[0] if len(tiles) == 1 else (torch.cat(part, 2) for part in zip(*tiles, strict=True))
    )
    sinks_GR = None
    if params.sinks_H is not None:
        sinks_GR = F.pad(params.sinks_H.float().view(G, 1, H // G).expand(-1, n, -1).flatten(1), (0, padding))
    out_BGRD, lse_BGR = _fold(peak, weight, values, sinks_GR)
    out_BnGRD, lse_BnGR = (
        x[:, :, :rows].unflatten(2, (n, H // G)).transpose(1, 2) for x in (out_BGRD, lse_BGR)
    )
    return PartialAttention(out_BnGRD.reshape(B * n, H, -1), lse_BnGR.reshape(B * n, H).T)


def _tiles(
    q_BGRD: Tensor, view: KVView, page_table_BN: Tensor, params: AttentionParams, span: _Span
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax of each tile by itself: its peak and sum [B, G, t, R], and its values [B, G, t, R, D]."""
    size, tiles, longest = view.page_size, span.hidden.shape[2], max(span.counts)
    first, last = span.start // size, cdiv(span.start + longest, size)
    k_BGLD, v_BGLD = view.dequantize_heads(
        page_table_BN[:, first:last], span.start - first * size, span.counts, tiles * TILE
    )
    for row, count in zip(v_BGLD, span.before, strict=True):
        # Pages before a window may be another request's by now, and hold NaN, which no weight of 0 removes.
        row[:, :count] = 0
    scores = q_BGRD.unsqueeze(2) @ k_BGLD.unflatten(2, (tiles, TILE)).transpose(-1, -2)
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores.masked_fill_(span.hidden, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    # The peak of a tile that a query cannot see is -inf, and -inf less -inf would be NaN.
    weights = scores.sub_(peak.clamp(min=-1e30)).exp_()
    return peak.squeeze(-1), weights.sum(-1), weights @ v_BGLD.unflatten(2, (tiles, TILE))


def _fold(peak: Tensor, weight: Tensor, values: Tensor, sinks_GR: Tensor | None) -> tuple[Tensor, Tensor]:
    """Join tiles -> values [B, G, R, D] and log-sum-exps [B, G, R]."""
    # Sums go tile by tile: a tile that holds nothing for a query adds an exact zero.
    top = peak.amax(2).clamp(min=MIN_LSE)
    if sinks_GR is not None:
        top = torch.maximum(top, sinks_GR)
    share = (peak - top.unsqueeze(2)).exp_()
    weights, parts = (share * weight).unbind(2), (share.unsqueeze(-1) * values).unbind(2)
    total = weights[0] if sinks_GR is None else (sinks_GR - top).exp() + weights[0]
    out = parts[0]
    for tile_weight, part in zip(weights[1:], parts[1:], strict=True):
        total, out = total + tile_weight, out + part
    # The largest of the weights is 1, unless a query sees nothing at all.
    return out / total.clamp(min=0.5).unsqueeze(-1), top + total.log()


# The attention that torch brings

HALVES = (torch.bfloat16, torch.float16)


_QueryBlocks = tuple[attention.QueryBlock, ...] | None


class SDPA(AttentionBackend):
    """The adapter of torch's scaled_dot_product_attention and of the fused kernels behind it.

    Its state: how a batch is cut into blocks for the fused kernels. It is None where those do not serve, and then the
    batch is computed request by request.
    """

    def kind(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> bool | None:
        """Return whether cuDNN's kernel is used; None where a mask is needed."""
        k, v = view.streams["k"].paged, view.streams["v"].paged
        fused = q_THD.is_cuda and q_THD.dtype in HALVES and attention.serves(k, v)
        # A window needs a mask, which the fused kernels do not take; and they are made for prompts.
        if not fused or params.window is not None or batch.phase.decodes:
            return None
        # cuDNN's kernel is the faster one on data centre GPUs since Hopper.
        is_datacentre = capability(q_THD) // 10 in {9, 10}
        return is_datacentre and q_THD.shape[2] <= CUDNN_DIM and torch.backends.cudnn.is_available()

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> _QueryBlocks:
        """Cut the batch, unless a mask is needed."""
        cudnn = self.kind(q_THD, view, batch, params)
        if cudnn is None:
            return None
        return attention.plan_blocks(batch, view.page_size, cudnn=cudnn)

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _QueryBlocks
    ) -> Tensor:
        """Attend by the fused kernels where the batch was cut for them, else request by request."""
        if state is None:
            return _masked(q_THD, view, batch, params)
        k, v = view.streams["k"].paged, view.streams["v"].paged
        return attention.prefill_attention(q_THD, k, v, state, params)

    def forward_partial(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _QueryBlocks
    ) -> PartialAttention:
        """Attend by the fused kernels -> values in float32, or in the query's dtype."""
        assert (
            state is not None
        )  # torch's function returns no log-sum-exp, and rows with masks do not promise it
        k, v = view.streams["k"].paged, view.streams["v"].paged
        return attention.partial_prefill_attention(q_THD, k, v, state, params)


def _masked(q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
    """Attend request by request, with a mask."""
    outputs = []
    for i, q_nHD in enumerate(q_THD.split(batch.query_lens)):
        length = batch.seq_lens[i]
        pages = batch.page_table_BN[i : i + 1, : cdiv(length, view.page_size)]
        k_GLD, v_GLD = (
            view.streams[name].dequantize(pages, q_THD.dtype)[0, :length].transpose(0, 1) for name in "kv"
        )
        key = torch.arange(length, device=q_THD.device)
        # The new tokens are the last of those that are stored.
        query = key[length - len(q_nHD) :, None]
        visible_nL = key <= query
        if params.window is not None:
            visible_nL &= key > query - params.window
        out_HnD = F.scaled_dot_product_attention(
            q_nHD.transpose(0, 1)[None],
            k_GLD[None],
            v_GLD[None],
            attn_mask=visible_nL,
            scale=params.scale,
            enable_gqa=True,
        )[0]
        outputs.append(out_HnD.transpose(0, 1))
    return torch.cat(outputs)


# FlexAttention

# Windows are blocks of keys that are left out, and a mask within those that are not; caps are an expression; a sink
# scales the result by what the sum of the softmax becomes with it. Which blocks of keys a block of queries sees is
# computed from lengths, once for all layers of a step: no mask of queries by keys is ever made on a GPU.

BLOCK = 128
"""Queries and keys of a block of the mask. Stored tokens are padded to whole blocks, so that there are few shapes."""
PACKED = BLOCK // 2
"""Most query rows of a KV head that are left to torch's kernel for decoding, which has all of them in one block of the
next power of two. That must divide BLOCK: with more torch finds no kernel at all (torch 2.11: NoValidChoicesError)."""
VARIANTS = 64
"""Kernels that may be compiled: for a model one for each phase, head, window and cap, with some room."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests that are computed together."""

    rows: slice
    page_table_BN: Tensor
    lens_B: Tensor
    most: int
    """New tokens of a request, with padding."""
    length: int
    """Stored tokens of a request, with padding."""
    row_T: Tensor | None
    """Rows of the part's tokens in [B * n]; None where those are all."""
    mask: BlockMask


_Parts = tuple[_Part, ...]


class FlexAttention(AttentionBackend):
    """The adapter of FlexAttention. Its state: how a batch is cut, and what the requests of each part see."""

    def __init__(self) -> None:
        import torch._dynamo as dynamo

        # Beyond the limit the compiler would go on without compiling, and say nothing.
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, VARIANTS)

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Hashable:
        """Return the window."""
        return params.window

    def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> _Parts:
        """Cut the batch and build the masks of its parts."""
        return tuple(_parts(batch, view.page_size, params.window))

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _Parts
    ) -> Tensor:
        """Attend part by part."""
        with_lse = params.sinks_H is not None  # which are added by it
        outputs = [_attend_part(q_THD[part.rows], view, part, params, with_lse)[0] for part in state]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def forward_partial(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _Parts
    ) -> PartialAttention:
        """Attend part by part -> values in the query's dtype."""
        outputs = [_attend_part(q_THD[part.rows], view, part, params, True) for part in state]
        values_THD = torch.cat([values_THD for values_THD, _ in outputs])
        lse_TH = torch.cat([lse_TH for _, lse_TH in outputs if lse_TH is not None])
        # What torch leaves of a query that sees nothing depends on its kernel.
        return PartialAttention(values_THD.masked_fill(lse_TH.isneginf()[..., None], 0.0), lse_TH.T)


def _parts(batch: AttentionBatch, page_size: int, window: int | None) -> Iterator[_Part]:
    """Yield neighbours that fit into MAX_STAGED_TOKENS padded stored tokens, and prompts of more than a block alone."""
    row, first, device = 0, 0, batch.page_table_BN.device
    step = max(1, MAX_STAGED_TOKENS // _round_up(max(*batch.seq_lens, 1)))
    alone = [i if count > BLOCK else -1 - i // step for i, count in enumerate(batch.query_lens)]
    for _, group in groupby(alone):
        requests = slice(first, first + len(tuple(group)))
        counts, lens = batch.query_lens[requests], batch.seq_lens[requests]
        most, length, row_T = max(counts), _round_up(max(*lens, 1)), None
        if min(counts) < most:
            places = [torch.arange(i * most, i * most + count) for i, count in enumerate(counts)]
            row_T = torch.cat(places).to(device)
        lens_B, counts_B = (torch.tensor(values, device=device) for values in (lens, counts))
        yield _Part(
            rows=slice(row, row + sum(counts)),
            page_table_BN=batch.page_table_BN[requests, : cdiv(max(lens), page_size)],
            lens_B=lens_B,
            most=most,
            length=length,
            row_T=row_T,
            mask=_block_mask(lens_B, lens_B - counts_B, most, length, window),
        )
        row, first = row + sum(counts), requests.stop


def _round_up(length: int) -> int:
    """Return a multiple of BLOCK."""
    return cdiv(length, BLOCK) * BLOCK


def _block_mask(lens_B: Tensor, before_B: Tensor, most: int, length: int, window: int | None) -> BlockMask:
    """Return which blocks of keys each block of queries sees, and the mask within those.

    Args:
        lens_B: stored tokens of each request.
        before_B: those of them before the first query, which is token before_B itself.
        most: queries of a request, with padding.
        length: stored tokens of a request, with padding.
        window: tokens that a query sees, if not all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= before_B[b] + q) & (kv < lens_B[b])

    reach = length + most if window is None else window

    def windowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return causal(b, h, q, kv) & (kv > before_B[b] + q - reach)

    device, blocks = lens_B.device, cdiv(length, BLOCK)
    first_Q = torch.arange(0, most, BLOCK, device=device)
    positions_BQ = before_B[:, None] + first_Q
    last_BQ = torch.minimum(positions_BQ + BLOCK, lens_B[:, None]) - 1
    # A block of padding still needs one block of keys; the mask hides all of it.
    last_BQ = torch.maximum(last_BQ, torch.zeros_like(last_BQ))
    start_BQ = torch.minimum((positions_BQ - reach + 1).clamp(min=0), last_BQ) // BLOCK
    counts_BQ = last_BQ // BLOCK - start_BQ + 1
    order_K = torch.arange(blocks, device=device)
    indices_BQK = (start_BQ[..., None] + order_K).clamp(max=blocks - 1)
    return BlockMask.from_kv_blocks(
        counts_BQ[:, None].int(),
        indices_BQK[:, None].int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=causal if window is None else windowed,
        seq_lengths=(most, length),
        compute_q_blocks=False,  # which gradients are for
    )


def _attend_part(
    q_THD: Tensor, view: KVView, part: _Part, params: AttentionParams, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return values [T, H, D], and log-sum-exps [T, H] if they are wanted."""
    k_BGLD, v_BGLD = (_gather(view, name, part, q_THD.dtype) for name in "kv")
    q_BnHD = _pad_queries(q_THD, part)
    output: Any = _kernel(q_THD.is_cuda)(
        q_BnHD.transpose(1, 2),
        k_BGLD,
        v_BGLD,
        score_mod=_score_mod(params.softcap) if params.softcap else None,
        block_mask=part.mask,
        scale=params.scale,
        enable_gqa=True,
        return_lse=with_lse,
        kernel_options=_options(part.most * q_THD.shape[1] // k_BGLD.shape[1]),
    )
    if not with_lse:
        return _rows(output, part), None
    out_BHnD, lse_BHn = output
    if params.sinks_H is not None:
        assert lse_BHn is not None, "sinks need the log-sum-exp"
        # Sinks only add to the softmax's sum.
        sinks_H1 = params.sinks_H.float()[:, None]
        share_BHn = torch.sigmoid(lse_BHn - sinks_H1)
        out_BHnD = (out_BHnD * share_BHn.unsqueeze(-1)).to(out_BHnD.dtype)
        lse_BHn = torch.logaddexp(lse_BHn.float(), sinks_H1)
    return _rows(out_BHnD, part), _rows(lse_BHn, part)


def _rows(x_BHn: Tensor, part: _Part) -> Tensor:
    """Return the rows of the part's tokens."""
    x_TH = x_BHn.transpose(1, 2).flatten(0, 1)
    return x_TH if part.row_T is None else x_TH[part.row_T]


def _options(rows: int) -> dict[str, bool]:
    """Return kernel options for so many query rows of a KV head."""
    # Torch looks at tokens alone, and takes its kernel for decoding where a prompt has less than 128.
    return {"FORCE_USE_FLEX_ATTENTION": True} if rows > PACKED else {}


def _gather(view: KVView, name: str, part: _Part, dtype: torch.dtype) -> Tensor:
    """Return [B, G, L, D], with zeros behind each request's tokens."""
    values_BLGD = view.streams[name].dequantize(part.page_table_BN, dtype)[:, : part.length]
    values_BLGD = F.pad(values_BLGD, (0, 0, 0, 0, 0, part.length - values_BLGD.shape[1]))
    behind_BL = torch.arange(part.length, device=part.lens_B.device) >= part.lens_B[:, None]
    # A NaN that lies there would reach the result although it is masked.
    return values_BLGD.masked_fill(behind_BL[..., None, None], 0.0).transpose(1, 2)


def _pad_queries(q_THD: Tensor, part: _Part) -> Tensor:
    if part.row_T is None:
        return q_THD.unflatten(0, (-1, part.most))
    q_SHD = q_THD.new_zeros(len(part.lens_B) * part.most, *q_THD.shape[1:])
    return q_SHD.index_copy_(0, part.row_T, q_THD).unflatten(0, (-1, part.most))


@cache
def _score_mod(cap: float) -> Callable[..., Tensor]:
    """Return a function of the scores: one for each cap, so that it is compiled once."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


@cache
def _kernel(on_gpu: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    def interpreted(*args: Any, **options: Any) -> Any:
        # It warns of being slow: on a CPU it is what can be had without a compiler.
        with warnings.catch_warnings(action="ignore"):
            return flex_attention(*args, **options)

    return torch.compile(flex_attention) if on_gpu else interpreted
