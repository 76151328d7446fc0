"""torch_ref: the definition of attention over a paged cache, in plain torch, for every format and phase.

Reads pages in their own format, a bounded span at a time, and dequantises them as it goes. All arithmetic is
float32. An answer must not depend on who else is in the batch, nor on how a prompt was cut, so a query's result is
made of tiles at fixed key positions, each with its own softmax, folded in order: a tile that a query cannot see adds
an exact zero, and the shapes of the products do not change with the batch.

Shape suffixes: T tokens, B requests, n new tokens of each, N pages of a request, L keys of a span, t tiles of a span,
K keys of a tile, H query heads, G KV heads, R query rows of a KV head (n * H / G, padded), D values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.attention.capability import BackendInfo, Phase, Row
from nibble.attention.metadata import AttentionSpec, Segment
from nibble.cache.view import KVView

TILE = 256
SPAN_VALUES = 1 << 18
"""Bound on the dequantised values of one stream at a time: what stays in a core's cache."""
SCORES = 1 << 24
"""Bound on the scores held at a time."""
BATCHED = 8
"""Requests with up to so many new tokens are computed together; longer prompts one by one."""


def padded(rows: int) -> int:
    """Rows of a matrix product: with fewer, the sum of a row may have another order, and depend on the batch."""
    return rows if rows >= 8 else 4 if rows <= 4 else 8


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Rows [start, stop) of a segment's tokens: requests [first, last) with n new tokens each, or some of these.

    spans: key ranges to read; for each, which keys a row sees (bool, to hide) and, where requests differ in length,
    which of them hold nothing.
    """

    rows: Tensor
    n: int
    requests: slice
    spans: tuple[tuple[int, int, Tensor, Tensor | None], ...]


class TorchRef:
    """The reference adapter. Where queries may look is the same for all layers of a step with the same window."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._rectangles: dict[tuple[int, int, int | None], tuple[_Rectangle, ...]] = {}

    def attend(self, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec) -> Tensor:
        if self._segment is not segment:
            self._segment, self._rectangles = segment, {}
        heads, values = q_THD.shape[1], view.streams["k"].stream.values
        key = heads // view.streams["k"].stream.heads, values, spec.window
        if key not in self._rectangles:
            self._rectangles[key] = tuple(_rectangles(segment, *key, heads, q_THD.device))
        pieces = [
            _attend(q_THD, rect, view, segment.pages_BN[rect.requests], spec)
            for rect in self._rectangles[key]
        ]
        return (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).to(q_THD.dtype)


def _rectangles(
    segment: Segment, group: int, values: int, window: int | None, heads: int, device: torch.device
) -> Iterator[_Rectangle]:
    """Cuts a segment into rectangles that keep within the bounds on keys and scores."""
    row = 0
    batch = max(1, SPAN_VALUES // (max(segment.kv_lens) * values)) if max(segment.q_lens) <= BATCHED else 1
    for first, last in _equal_runs(segment.q_lens, batch):
        count, n = last - first, segment.q_lens[first]
        rows_Bn = torch.arange(row, row + count * n, device=device).view(count, n)
        row += count * n
        kv_lens_B = torch.tensor(segment.kv_lens[first:last], device=device)
        positions_Bn = (kv_lens_B - n)[:, None] + torch.arange(n, device=device)
        longest = max(segment.kv_lens[first:last])
        step = max(BATCHED, SCORES // (heads * count * longest))
        for start in range(0, n, step):
            stop = min(start + step, n)
            span = max(1, SPAN_VALUES // (count * values) // TILE) * TILE
            spans = _spans(positions_Bn[:, start:stop], kv_lens_B, longest - n + stop, group, window, span)
            yield _Rectangle(rows_Bn[:, start:stop].flatten(), stop - start, slice(first, last), tuple(spans))


def _equal_runs(lens: tuple[int, ...], most: int) -> Iterator[tuple[int, int]]:
    """Index ranges of neighbours with equal lengths, `most` at a time."""
    first = 0
    for i in range(1, len(lens) + 1):
        if i == len(lens) or lens[i] != lens[first] or i - first == most:
            yield first, i
            first = i


def _spans(
    positions_Bn: Tensor, kv_lens_B: Tensor, key_stop: int, group: int, window: int | None, step: int
) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
    """Key ranges that begin on a tile and cover all visible keys, with hidden [B, 1, t, R, K] and unused [B, L]."""
    rows = positions_Bn.shape[1] * group
    positions_BR = F.pad(positions_Bn.repeat_interleave(group, 1), (0, padded(rows) - rows))[:, None, :, None]
    first = 0 if window is None else max(0, int(positions_Bn[:, 0].min()) - window + 1) // TILE * TILE
    for start in range(first, key_stop, step):
        stop = min(start + step, key_stop)
        keys = torch.arange(start, start + -(-(stop - start) // TILE) * TILE, device=positions_Bn.device)
        hidden = keys.view(-1, 1, TILE) > positions_BR
        if window is not None:
            hidden |= keys.view(-1, 1, TILE) <= positions_BR - window
        unused = None
        if len(kv_lens_B) > 1:  # shorter requests own nothing there, and what lies there may be NaN
            unused = keys[: stop - start] >= kv_lens_B[:, None]
        yield start, stop, hidden.unsqueeze(1), unused


def _attend(q_THD: Tensor, rect: _Rectangle, view: KVView, pages_BN: Tensor, spec: AttentionSpec) -> Tensor:
    """One rectangle -> float32 [B * n, H, Dv]."""
    B, n, H, G = len(pages_BN), rect.n, q_THD.shape[1], view.streams["k"].stream.heads
    rows = n * H // G
    q_BnHD = q_THD[rect.rows].float().view(B, n, G, H // G, -1)
    q_BGRD = F.pad(q_BnHD.transpose(1, 2).flatten(2, 3) * spec.scale, (0, 0, 0, padded(rows) - rows))
    tiles = [tile for span in rect.spans for tile in _tiles(q_BGRD, view, pages_BN, spec, *span)]
    sinks_GR = None
    if spec.sinks_H is not None:
        sinks_GR = spec.sinks_H.float().view(G, 1, H // G).expand(-1, n, -1).flatten(1)
        sinks_GR = F.pad(sinks_GR, (0, padded(rows) - rows))
    out_BGRD = _fold(tiles, sinks_GR)[:, :, :rows]
    return out_BGRD.unflatten(2, (n, H // G)).transpose(1, 2).reshape(B * n, H, -1)


_Tile = tuple[Tensor, Tensor, Tensor]
"""max_BGR, sum_BGR and out_BGRD of one tile: the softmax's parts before they are joined."""


def _tiles(
    q_BGRD: Tensor,
    view: KVView,
    pages_BN: Tensor,
    spec: AttentionSpec,
    start: int,
    stop: int,
    hidden: Tensor,
    unused: Tensor | None,
) -> list[_Tile]:
    """The tiles of one span of keys."""
    k_BGtKD = _read(
        view, "k", pages_BN, start, stop, None
    )  # whatever lies in unused slots, its scores are hidden
    v_BGtKD = _read(view, "v", pages_BN, start, stop, unused)
    scores = q_BGRD.unsqueeze(2) @ k_BGtKD.transpose(-1, -2)
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores.masked_fill_(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top.clamp(min=-1e30)).exp_()
    parts = (top.squeeze(-1), weights.sum(-1), weights @ v_BGtKD)
    return list(zip(*(part.unbind(2) for part in parts), strict=True))


def _read(view: KVView, name: str, pages_BN: Tensor, start: int, stop: int, unused: Tensor | None) -> Tensor:
    """Dequantised keys or values of positions [start, stop) -> [B, G, t, K, D], zeros where nothing is stored."""
    size = view.page_size
    first, last = start // size, -(-stop // size)
    tiles = -(-(stop - start) // TILE)
    x_BGLD = view.streams[name].gather_heads(
        pages_BN[:, first:last], start - first * size, stop - start, tiles * TILE, unused
    )
    return x_BGLD.unflatten(2, (tiles, TILE))


def _fold(tiles: list[_Tile], sinks_GR: Tensor | None) -> Tensor:
    """Joins tiles in order -> [B, G, R, D]."""
    top = tiles[0][0] if sinks_GR is None else torch.maximum(tiles[0][0], sinks_GR)
    for tile in tiles[1:]:
        top = torch.maximum(top, tile[0])
    total = torch.zeros_like(top) if sinks_GR is None else (sinks_GR - top).exp()
    out = torch.zeros_like(tiles[0][2])
    for peak, weight, values in tiles:
        share = (peak - top).exp()
        total = total + share * weight
        out = out + share.unsqueeze(-1) * values
    return out / total.unsqueeze(-1)


ANY_PHASE = frozenset(Phase)

BACKEND = BackendInfo(
    name="torch_ref",
    summary="the definition, in plain torch: every format, phase and machine; slow on a GPU",
    adapter=TorchRef,
    rows=(
        Row(
            phase=ANY_PHASE,
            kind=frozenset({"mha"}),
            format=None,
            packing=frozenset({"nhd", "hnd"}),
            prefer=-10,
            cites="tests/conformance",
        ),
    ),
)
