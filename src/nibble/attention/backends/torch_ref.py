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
MIN_ROWS = 8
"""Matrix products of fewer rows may sum in another order, and so would depend on the batch."""
SPAN_VALUES = 1 << 22
"""Bound on the dequantised values of one stream at a time."""
SCORES = 1 << 24
"""Bound on the scores held at a time."""


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Requests with equally many new tokens. positions_Bn: where each of these stands. key_stop: keys to look at."""

    q_BnHD: Tensor
    positions_Bn: Tensor
    kv_lens_B: Tensor
    pages_BN: Tensor
    key_stop: int


class TorchRef:
    """The reference adapter."""

    def attend(self, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec) -> Tensor:
        pieces = [_attend(rectangle, view, spec) for rectangle in _rectangles(q_THD, view, segment)]
        return torch.cat(pieces).to(q_THD.dtype)


def _rectangles(q_THD: Tensor, view: KVView, segment: Segment) -> Iterator[_Rectangle]:
    """Cuts a segment into rectangles that keep within the bounds on keys and scores."""
    row = 0
    for first, last in _equal_runs(segment.q_lens, _batch(view, segment)):
        count, n = last - first, segment.q_lens[first]
        q_BnHD = q_THD[row : row + count * n].unflatten(0, (count, n))
        row += count * n
        kv_lens_B = torch.tensor(segment.kv_lens[first:last], device=q_THD.device)
        positions_Bn = (kv_lens_B - n)[:, None] + torch.arange(n, device=q_THD.device)
        longest = max(segment.kv_lens[first:last])
        step = max(MIN_ROWS, SCORES // (q_THD.shape[1] * count * longest))
        for start in range(0, n, step):
            stop = min(start + step, n)
            key_stop = longest - n + stop
            rows, pages_BN = slice(start, stop), segment.pages_BN[first:last]
            yield _Rectangle(q_BnHD[:, rows], positions_Bn[:, rows], kv_lens_B, pages_BN, key_stop)


def _batch(view: KVView, segment: Segment) -> int:
    """How many requests may be computed together; prompts one by one, so that each keeps its own length."""
    values = max(segment.kv_lens) * view.streams["k"].stream.values
    return max(1, SPAN_VALUES // values) if max(segment.q_lens) <= MIN_ROWS else 1


def _equal_runs(lens: tuple[int, ...], most: int) -> Iterator[tuple[int, int]]:
    """Index ranges of neighbours with equal lengths, `most` at a time."""
    first = 0
    for i in range(1, len(lens) + 1):
        if i == len(lens) or lens[i] != lens[first] or i - first == most:
            yield first, i
            first = i


def _attend(rect: _Rectangle, view: KVView, spec: AttentionSpec) -> Tensor:
    """One rectangle -> float32 [B * n, H, Dv]."""
    B, n, H, _ = rect.q_BnHD.shape
    G = view.streams["k"].stream.heads
    q_BGRD = rect.q_BnHD.float().unflatten(2, (G, H // G)).permute(0, 2, 1, 3, 4).flatten(2, 3) * spec.scale
    rows = n * H // G
    q_BGRD = F.pad(q_BGRD, (0, 0, 0, max(0, MIN_ROWS - rows)))
    positions_BR = F.pad(rect.positions_Bn.repeat_interleave(H // G, 1), (0, max(0, MIN_ROWS - rows)))
    tiles = [
        tile for start, stop in _spans(rect, view, spec)
        for tile in _tiles(q_BGRD, positions_BR, rect, view, spec, start, stop)
    ]  # fmt: skip
    sinks_GR = None
    if spec.sinks_H is not None:
        sinks_GR = F.pad(spec.sinks_H.float().view(G, 1, H // G).expand(-1, n, -1).flatten(1), (0, q_BGRD.shape[2] - rows))
    out_BGRD = _fold(tiles, sinks_GR)[:, :, :rows]
    return out_BGRD.unflatten(2, (n, H // G)).permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)


def _spans(rect: _Rectangle, view: KVView, spec: AttentionSpec) -> Iterator[tuple[int, int]]:
    """Key ranges [start, stop) that begin on a tile, cover all visible keys, and hold a bounded number of values."""
    first = 0
    if spec.window is not None:
        first = max(0, int(rect.positions_Bn[:, 0].min()) - spec.window + 1) // TILE * TILE
    per_token = len(rect.q_BnHD) * view.streams["k"].stream.values
    step = max(1, SPAN_VALUES // per_token // TILE) * TILE
    for start in range(first, rect.key_stop, step):
        yield start, min(start + step, rect.key_stop)


_Tile = tuple[Tensor, Tensor, Tensor]
"""max_BGR, sum_BGR and out_BGRD of one tile: the softmax's parts before they are joined."""


def _tiles(
    q_BGRD: Tensor, positions_BR: Tensor, rect: _Rectangle, view: KVView, spec: AttentionSpec, start: int, stop: int
) -> list[_Tile]:
    k_BGtKD, v_BGtKD = (_read(view, name, rect, start, stop) for name in ("k", "v"))
    scores = q_BGRD.unsqueeze(2) @ k_BGtKD.transpose(-1, -2)
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    keys_tK = torch.arange(start, start + k_BGtKD.shape[2] * TILE, device=scores.device).view(-1, TILE)
    seen = keys_tK[None, :, None] <= positions_BR[:, None, :, None]
    if spec.window is not None:
        seen &= keys_tK[None, :, None] > positions_BR[:, None, :, None] - spec.window
    scores.masked_fill_(~seen.unsqueeze(1), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.clamp(min=-1e30)).exp_()
    out_BGtRD = weights @ v_BGtKD
    parts = (top.squeeze(-1), weights.sum(-1), out_BGtRD)
    return list(zip(*(part.unbind(2) for part in parts), strict=True))


def _read(view: KVView, name: str, rect: _Rectangle, start: int, stop: int) -> Tensor:
    """Dequantised keys or values of positions [start, stop) -> [B, G, t, K, D], zeros where nothing is stored."""
    size = view.page_size
    first, last = start // size, -(-stop // size)
    x_BLGD = view.streams[name].gather(rect.pages_BN[:, first:last])[:, start - first * size :][:, : stop - start]
    if len(rect.kv_lens_B) > 1:  # shorter requests own nothing there, and what lies there may be NaN
        unused = torch.arange(start, stop, device=x_BLGD.device) >= rect.kv_lens_B[:, None]
        x_BLGD = x_BLGD.masked_fill(unused[:, :, None, None], 0.0)
    B, L, G, D = x_BLGD.shape
    tiles = -(-L // TILE)
    x_BGLD = x_BLGD.new_zeros(B, G, tiles * TILE, D)
    x_BGLD[:, :, :L] = x_BLGD.transpose(1, 2)
    return x_BGLD.view(B, G, tiles, TILE, D)


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
