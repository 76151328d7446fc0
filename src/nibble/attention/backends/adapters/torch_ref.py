"""Define attention over a paged cache, in plain torch, for every format and phase.

It reads pages in their own format, a bounded span at a time, and dequantises them as it goes. All arithmetic is
float32. An answer must not depend on who else is in the batch, nor on how a prompt was cut, so a query's result is
made of tiles at fixed key positions, each with its own softmax, folded in order: a tile that a query cannot see adds
an exact zero, and the shapes of the products do not change with the batch.

Shape suffixes: T tokens, B requests, n new tokens of each, N pages of a request, L keys of a span, t tiles of a span,
K keys of a tile, H query heads, G KV heads, R query rows of a KV head (n * H / G, padded), D values of a head.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.attention.layer import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels.mla import naive as sparse
from nibble.kernels.types import AttentionBatch, AttentionParams

TILE = 256
SPAN_VALUES = 1 << 18
"""Most dequantised values of one stream at a time: what stays in a core's cache."""
SCORES = 1 << 24
"""Most scores at a time."""
BATCHED = 8
"""Requests with up to so many new tokens are computed together; longer prompts one by one."""


def _pad_rows(rows: int) -> int:
    """Return the rows of a matrix product that holds `rows`."""
    # With fewer, the sum of a row may be added in another order, and would depend on the batch.
    return rows if rows >= 8 else 4 if rows <= 4 else 8


@dataclass(frozen=True, slots=True)
class _Span:
    """Keys [start, start + tiles * TILE)."""

    start: int
    counts: tuple[int, ...]
    """How many of them each request has."""
    hidden: Tensor
    """bool [B, 1, t, R, K]: which keys each query does not see."""


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Some rows of a batch, n tokens of each of `requests`, and the keys that they may look at."""

    rows: slice
    n: int
    requests: slice
    spans: tuple[_Span, ...]


class TorchRef(AttentionBackend):
    """The reference adapter. Its state: where the queries of a batch may look."""

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Hashable:
        """Return query heads of a KV head, values of a stream, window, and whether the attention is dense."""
        keys = view.keys.stream
        return q_THD.shape[1] // keys.heads, keys.values, params.window, params.topk_slots_TK is None

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> tuple[_Rectangle, ...]:
        """Cut the batch into rectangles of queries and keys; into none where its tokens are chosen one by one."""
        if params.topk_slots_TK is not None:
            return ()
        heads, keys = q_THD.shape[1], view.keys.stream
        group = heads // keys.heads
        return tuple(_rectangles(batch, group, keys.values, params.window, heads, q_THD.device))

    def forward(
        self,
        q_THD: Tensor,
        view: KVView,
        batch: AttentionBatch,
        params: AttentionParams,
        state: tuple[_Rectangle, ...],
    ) -> Tensor:
        """Attend rectangle by rectangle, in float32."""
        if params.topk_slots_TK is not None:
            latents = view.keys
            return sparse.sparse_mla_attention(
                q_THD, latents.paged, latents.stream.rope, params.topk_slots_TK, params.scale
            )
        outputs = [_attend(q_THD, rect, view, batch.page_table_BN[rect.requests], params) for rect in state]
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).to(q_THD.dtype)


def _rectangles(
    batch: AttentionBatch, group: int, values: int, window: int | None, heads: int, device: torch.device
) -> Iterator[_Rectangle]:
    """Cut a batch into rectangles that keep within the bounds on keys and scores."""
    row = 0
    max_requests = (
        max(1, SPAN_VALUES // (max(batch.seq_lens) * values)) if max(batch.query_lens) <= BATCHED else 1
    )
    for first, last in _equal_runs(batch.query_lens, max_requests):
        n, seq_lens = batch.query_lens[first], batch.seq_lens[first:last]
        # Only single prompts are longer than this.
        step = max(BATCHED, SCORES // (heads * len(seq_lens) * max(seq_lens)))
        for start in range(0, n, step):
            stop = min(start + step, n)
            lens = tuple(length - n + stop for length in seq_lens)
            rows = slice(row + start, row + start + (stop - start) * len(lens))
            spans = tuple(_spans(lens, stop - start, group, values, window, device))
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
    lens: tuple[int, ...], n: int, group: int, values: int, window: int | None, device: torch.device
) -> Iterator[_Span]:
    """Yield key ranges that start on a tile and cover all that the last n tokens of requests of `lens` tokens see."""
    positions_Bn = torch.tensor(lens, device=device)[:, None] + torch.arange(-n, 0, device=device)
    rows = n * group
    positions_BR = F.pad(positions_Bn.repeat_interleave(group, 1), (0, _pad_rows(rows) - rows))[
        :, None, :, None
    ]
    # Down to a tile's start: tiles lie at the same keys in every batch.
    first = 0 if window is None else max(0, min(lens) - n - window + 1) // TILE * TILE
    step = max(1, SPAN_VALUES // (len(lens) * values) // TILE) * TILE
    for start in range(first, max(lens), step):
        stop = min(start + step, max(lens))
        keys = torch.arange(start, start + -(-(stop - start) // TILE) * TILE, device=device).view(-1, 1, TILE)
        hidden = keys > positions_BR
        if window is not None:
            hidden |= keys <= positions_BR - window
        yield _Span(start, tuple(max(0, min(length, stop) - start) for length in lens), hidden.unsqueeze(1))


def _attend(
    q_THD: Tensor, rect: _Rectangle, view: KVView, page_table_BN: Tensor, params: AttentionParams
) -> Tensor:
    """Attend over one rectangle -> float32 [B * n, H, Dv]."""
    B, n, H, G = len(page_table_BN), rect.n, q_THD.shape[1], view.keys.stream.heads
    rows, padding = n * H // G, _pad_rows(n * H // G) - n * H // G
    q_BnGHD = q_THD[rect.rows].float().view(B, n, G, H // G, -1)
    q_BGRD = F.pad(q_BnGHD.transpose(1, 2).flatten(2, 3) * params.scale, (0, 0, 0, padding))
    tiles = [_tiles(q_BGRD, view, page_table_BN, params, span) for span in rect.spans]
    peak, weight, values = (
        tiles[0] if len(tiles) == 1 else (torch.cat(part, 2) for part in zip(*tiles, strict=True))
    )
    sinks_GR = None
    if params.sinks_H is not None:
        sinks_GR = F.pad(params.sinks_H.float().view(G, 1, H // G).expand(-1, n, -1).flatten(1), (0, padding))
    out_BGRD = _fold(peak, weight, values, sinks_GR)[:, :, :rows]
    return out_BGRD.unflatten(2, (n, H // G)).transpose(1, 2).reshape(B * n, H, -1)


def _tiles(
    q_BGRD: Tensor, view: KVView, page_table_BN: Tensor, params: AttentionParams, span: _Span
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax of each tile by itself: its peak and sum [B, G, t, R], and its values [B, G, t, R, D]."""
    size, tiles, longest = view.page_size, span.hidden.shape[2], max(span.counts)
    first, last = span.start // size, -(-(span.start + longest) // size)
    k_BGLD, v_BGLD = view.dequantize_heads(
        page_table_BN[:, first:last], span.start - first * size, span.counts, tiles * TILE
    )
    scores = q_BGRD.unsqueeze(2) @ k_BGLD.unflatten(2, (tiles, TILE)).transpose(-1, -2)
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores.masked_fill_(span.hidden, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    # The peak of a tile that a query cannot see is -inf, and -inf less -inf would be NaN.
    weights = scores.sub_(peak.clamp(min=-1e30)).exp_()
    return peak.squeeze(-1), weights.sum(-1), weights @ v_BGLD.unflatten(2, (tiles, TILE))


def _fold(peak: Tensor, weight: Tensor, values: Tensor, sinks_GR: Tensor | None) -> Tensor:
    """Join tiles -> [B, G, R, D]."""
    # Sums go tile by tile: a tile that holds nothing for a query adds an exact zero.
    top = peak.amax(2)
    if sinks_GR is not None:
        top = torch.maximum(top, sinks_GR)
    share = (peak - top.unsqueeze(2)).exp_()
    weights, parts = (share * weight).unbind(2), (share.unsqueeze(-1) * values).unbind(2)
    total = weights[0] if sinks_GR is None else (sinks_GR - top).exp() + weights[0]
    out = parts[0]
    for tile_weight, part in zip(weights[1:], parts[1:], strict=True):
        total, out = total + tile_weight, out + part
    return out / total.unsqueeze(-1)
