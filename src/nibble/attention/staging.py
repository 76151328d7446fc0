"""Staging: dequantising pages into a workspace, for a backend that cannot read the cache's format.

The only place where that happens, always declared by a route and priced by the plan (price.py). The workspace is made
for the requests at hand, never for the whole pool; pages that a window has left behind are not staged. Must not know of
any one backend or format.

Shape suffixes: B requests, N pages of a request, L tokens (N * page_size).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nibble import formats
from nibble.attention.metadata import Segment
from nibble.attention.plan import STAGED_PACKING
from nibble.cache import packing as packings
from nibble.cache.view import KVView, StreamView
from nibble.geometry import INDEX

MAX_TOKENS = 1 << 17
"""Bound of the workspace: tokens staged at once, unless a single request has more."""


def staged(
    view: KVView, segment: Segment, target: str, window: int | None = None
) -> Iterator[tuple[KVView, Segment]]:
    """Cuts `segment` into parts of at most MAX_TOKENS, each with a view of its pages in the plain format `target`."""
    for part in _parts(_within(segment, view.page_size, window), view.page_size):
        count, width = part.pages_BN.shape
        own = torch.arange(count * width, dtype=torch.int32, device=part.pages_BN.device).view(count, width)
        streams = {
            name: _stage(stream, part.pages_BN, view.page_size, target)
            for name, stream in view.streams.items()
            if name != INDEX
        }
        yield replace(view, streams=streams), replace(part, pages_BN=own)


def _stage(stream: StreamView, pages_BN: Tensor, page_size: int, target: str) -> StreamView:
    codec = formats.get(target)
    (plane,) = codec.planes(stream.stream)
    values_BLHD = stream.values(pages_BN, plane.torch_dtype)
    pages = values_BLHD.flatten(0, 1).unflatten(0, (-1, page_size))
    return StreamView(stream.stream, codec, packings.get(STAGED_PACKING), (pages,), stream.scale)


def _within(segment: Segment, page_size: int, window: int | None) -> Segment:
    """Without the leading pages that no new token sees. Masks look at distances only, so tokens may be counted anew."""
    if window is None:
        return segment
    lens = zip(segment.q_lens, segment.kv_lens, strict=True)
    skipped = [max(0, stored - new - window + 1) // page_size for new, stored in lens]
    if not any(skipped):
        return segment
    kv_lens = [stored - skip * page_size for stored, skip in zip(segment.kv_lens, skipped, strict=True)]
    rows = [row[skip:] for row, skip in zip(segment.pages_BN, skipped, strict=True)]
    pages_BN = pad_sequence(rows, batch_first=True)[:, : -(-max(kv_lens) // page_size)]
    return Segment.of(segment.phase, segment.start, segment.q_lens, kv_lens, pages_BN)


def _parts(segment: Segment, page_size: int) -> Iterator[Segment]:
    """Runs of requests whose padded pages hold at most MAX_TOKENS; at least one request each."""
    width = segment.pages_BN.shape[1] * page_size
    step = max(1, MAX_TOKENS // max(width, 1))
    start = segment.start
    for first in range(0, len(segment.q_lens), step):
        q_lens, kv_lens = segment.q_lens[first : first + step], segment.kv_lens[first : first + step]
        part = Segment.of(segment.phase, start, q_lens, kv_lens, segment.pages_BN[first : first + step])
        yield part
        start = part.stop
