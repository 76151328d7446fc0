"""Staging: pages of requests, dequantised into a workspace for a backend that cannot read the cache's format.

It is always declared by a route and priced by the plan (planner/explain.py). The workspace is made for the requests at
hand, never for the pool.

Shape suffixes: B requests, N pages of a request, L tokens of pages (N * page_size), H heads, D values of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nibble import formats
from nibble.attention.planner.plan import STAGED_PACKING
from nibble.attention.planner.support import MAX_STAGED_TOKENS
from nibble.cache import layout as packings
from nibble.cache.pool import KVView, StreamView
from nibble.kernels import cdiv
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import INDEX


@dataclass(frozen=True, slots=True)
class PagePart:
    """Requests that are attended to together."""

    batch: AttentionBatch
    """The requests, over staged pages where their pages are dequantised first."""
    stored_BN: Tensor | None = None
    """Their pages in the pool, where those are dequantised."""


def cut_parts(batch: AttentionBatch, page_size: int, window: int | None) -> tuple[PagePart, ...]:
    """Cut a batch into parts whose padded pages hold at most MAX_STAGED_TOKENS; at least one request each.

    The layers of a step share the parts, and with them what backends prepare for each.

    Args:
        batch: the requests over their pages in the pool.
        page_size: tokens of a page.
        window: tokens that a query sees, if not all. Leading pages that no new token sees are left out.
    """
    batch = _within_window(batch, page_size, window)
    count, width = batch.page_table_BN.shape
    step = max(1, MAX_STAGED_TOKENS // max(width * page_size, 1))
    # Staged pages are numbered in the order in which they are dequantised.
    staged_BN = torch.arange(min(step, count) * width, dtype=torch.int32, device=batch.page_table_BN.device)
    staged_BN = staged_BN.view(-1, width)
    if step >= count:
        # Lengths stay where they are on the device: to send them again would make the host wait.
        return (PagePart(replace(batch, page_table_BN=staged_BN), batch.page_table_BN),)
    parts, start = [], batch.start
    for first in range(0, count, step):
        requests = slice(first, first + step)
        query_lens, seq_lens = batch.query_lens[requests], batch.seq_lens[requests]
        pages_BN = staged_BN[: len(query_lens)]
        part = AttentionBatch.from_lens(batch.phase, start, query_lens, seq_lens, pages_BN)
        parts.append(PagePart(part, batch.page_table_BN[requests]))
        start = part.stop
    return tuple(parts)


def _within_window(batch: AttentionBatch, page_size: int, window: int | None) -> AttentionBatch:
    """Return the batch without the leading pages that no new token sees."""
    if window is None:
        return batch
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    skipped = [max(0, stored - new - window + 1) // page_size for new, stored in lens]
    if not any(skipped):
        return batch
    # Masks look at distances only, so tokens may be counted from the first page that stays.
    seq_lens = [stored - skip * page_size for stored, skip in zip(batch.seq_lens, skipped, strict=True)]
    rows = [row[skip:] for row, skip in zip(batch.page_table_BN, skipped, strict=True)]
    page_table_BN = pad_sequence(rows, batch_first=True)[:, : cdiv(max(seq_lens), page_size)]
    return AttentionBatch.from_lens(batch.phase, batch.start, batch.query_lens, seq_lens, page_table_BN)


def dequantize_pages(view: KVView, part: PagePart, target: str) -> KVView:
    """Return a view of the part's pages in the plain format `target`.

    Args:
        view: the layer's pages in the pool.
        part: the requests, with their pages.
        target: the plain format.
    """
    assert part.stored_BN is not None
    codec, packing = formats.get(target), packings.get(STAGED_PACKING)
    streams: dict[str, StreamView] = {}
    for name, stored in view.streams.items():
        if name == INDEX:
            continue
        (plane,) = codec.planes(stored.stream)
        values_BLHD = stored.dequantize(part.stored_BN, plane.torch_dtype)
        pages = values_BLHD.flatten(0, 1).unflatten(0, (-1, view.page_size))
        streams[name] = StreamView(stored.stream, codec, packing, (pages,), stored.scale)
    return replace(view, streams=streams)
