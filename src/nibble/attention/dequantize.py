"""Staging: dequantising pages into a workspace, for a backend that cannot read the cache's format.

The only place where that happens, always declared by a route and priced by the plan (explain.py). The workspace is made
for the requests at hand, never for the whole pool; pages that a window has left behind are not staged. Must not know of
any one backend or format.

Shape suffixes: B requests, N pages of a request, L tokens (N * page_size).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nibble import formats
from nibble.attention.planner.plan import STAGED_PACKING
from nibble.attention.planner.support import MAX_STAGED_TOKENS
from nibble.cache import packing as packings
from nibble.cache.view import KVView, StreamView
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import INDEX


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests that are staged together. stored_BN: their pages in the pool; batch: they, over pages of their own."""

    stored_BN: Tensor
    batch: AttentionBatch


_known: WeakKeyDictionary[AttentionBatch, dict[tuple[int, int | None], tuple[_Part, ...]]] = (
    WeakKeyDictionary()
)
"""Parts by page size and window: the layers of a step share them, and with them what backends plan for each."""


def dequantize_pages(
    view: KVView, batch: AttentionBatch, target: str, window: int | None = None
) -> Iterator[tuple[KVView, AttentionBatch]]:
    """Cuts `batch` into parts of at most MAX_STAGED_TOKENS, each with a view of its pages in the plain format `target`."""
    known, key = _known.setdefault(batch, {}), (view.page_size, window)
    if key not in known:
        known[key] = tuple(_parts(_within(batch, view.page_size, window), view.page_size))
    for part in known[key]:
        streams = {
            name: _stage(stream, part.stored_BN, view.page_size, target)
            for name, stream in view.streams.items()
            if name != INDEX
        }
        yield replace(view, streams=streams), part.batch


def _stage(stream: StreamView, page_table_BN: Tensor, page_size: int, target: str) -> StreamView:
    codec = formats.get(target)
    (plane,) = codec.planes(stream.stream)
    values_BLHD = stream.dequantize(page_table_BN, plane.torch_dtype)
    pages = values_BLHD.flatten(0, 1).unflatten(0, (-1, page_size))
    return StreamView(stream.stream, codec, packings.get(STAGED_PACKING), (pages,), stream.scale)


def _within(batch: AttentionBatch, page_size: int, window: int | None) -> AttentionBatch:
    """Without the leading pages that no new token sees. Masks look at distances only, so tokens may be counted anew."""
    if window is None:
        return batch
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    skipped = [max(0, stored - new - window + 1) // page_size for new, stored in lens]
    if not any(skipped):
        return batch
    seq_lens = [stored - skip * page_size for stored, skip in zip(batch.seq_lens, skipped, strict=True)]
    rows = [row[skip:] for row, skip in zip(batch.page_table_BN, skipped, strict=True)]
    page_table_BN = pad_sequence(rows, batch_first=True)[:, : -(-max(seq_lens) // page_size)]
    return AttentionBatch.from_lens(batch.phase, batch.start, batch.query_lens, seq_lens, page_table_BN)


def _parts(batch: AttentionBatch, page_size: int) -> Iterator[_Part]:
    """Runs of requests whose padded pages hold at most MAX_STAGED_TOKENS; at least one request each."""
    count, width = batch.page_table_BN.shape
    step = max(1, MAX_STAGED_TOKENS // max(width * page_size, 1))
    own_BN = torch.arange(min(step, count) * width, dtype=torch.int32, device=batch.page_table_BN.device)
    own_BN = own_BN.view(-1, width)
    if step >= count:  # lengths stay where they are: to send them again would make the host wait
        yield _Part(batch.page_table_BN, replace(batch, page_table_BN=own_BN))
        return
    start = batch.start
    for first in range(0, count, step):
        some = slice(first, first + step)
        query_lens, seq_lens, stored_BN = (
            batch.query_lens[some],
            batch.seq_lens[some],
            batch.page_table_BN[some],
        )
        part = AttentionBatch.from_lens(batch.phase, start, query_lens, seq_lens, own_BN[: len(query_lens)])
        yield _Part(stored_BN, part)
        start = part.stop
