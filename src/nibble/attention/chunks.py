"""Chunked attention: a token sees the tokens of its own chunk, so a chunk is attended over like a request of its own.

A step's requests are cut where chunks begin. Page tables begin with the chunk's first page, and lengths count from
there. Keys are stored with their rotary positions, and masks look at distances only, so every backend serves the
result as it is; none knows of chunks.

Shape suffixes: B requests, P pieces of requests, N pages of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from nibble.kernels import cdiv
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import Phase


@dataclass(frozen=True, slots=True)
class _Piece:
    """The new tokens of a request within one chunk."""

    request: int
    first: int
    """Where the chunk begins."""
    count: int
    """New tokens."""
    stored: int
    """Tokens of the chunk, the new ones included."""


def cut_at_chunks(batch: AttentionBatch, page_size: int, chunk: int) -> AttentionBatch:
    """Return a batch over the same rows, whose requests are what `batch` has in each chunk.

    Args:
        batch: the requests.
        page_size: tokens of a page, a divisor of `chunk`.
        chunk: tokens of a chunk.
    """
    if batch.phase is Phase.DECODE:
        return _last_chunks(batch, page_size, chunk)
    pieces = list(_pieces(batch, chunk))
    table_BN, device = batch.page_table_BN, batch.page_table_BN.device
    width = cdiv(max(piece.stored for piece in pieces), page_size)
    first_P1 = torch.tensor([[piece.first // page_size] for piece in pieces], device=device)
    columns_PN = (first_P1 + torch.arange(width, device=device)).clamp(max=table_BN.shape[1] - 1)
    rows_P1 = torch.tensor([[piece.request] for piece in pieces], device=device)
    counts, lens = [piece.count for piece in pieces], [piece.stored for piece in pieces]
    cut = AttentionBatch.from_lens(batch.phase, batch.start, counts, lens, table_BN[rows_P1, columns_PN])
    exact_BN = batch.exact_table_BN
    return cut if exact_BN is None else replace(cut, exact_table_BN=exact_BN[rows_P1, columns_PN])


def _pieces(batch: AttentionBatch, chunk: int) -> Iterator[_Piece]:
    for request, (count, stored) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        position = stored - count
        while position < stored:
            first = position // chunk * chunk
            end = min(first + chunk, stored)
            yield _Piece(request, first, end - position, end - first)
            position = end


def _last_chunks(batch: AttentionBatch, page_size: int, chunk: int) -> AttentionBatch:
    """Return the batch of a decode step: on the device alone, since a CUDA graph may hold it."""
    first_B = (batch.seq_lens_B - 1).clamp(min=0) // chunk * chunk
    width = min(batch.page_table_BN.shape[1], chunk // page_size)
    pages_N = torch.arange(width, device=first_B.device)
    columns_BN = (first_B[:, None] // page_size + pages_N).clamp(max=batch.page_table_BN.shape[1] - 1).long()
    exact_BN = batch.exact_table_BN
    return replace(
        batch,
        seq_lens=tuple(
            min(length, chunk) if batch.bounds else (length - 1) % chunk + 1 for length in batch.seq_lens
        ),
        page_table_BN=batch.page_table_BN.gather(1, columns_BN),
        exact_table_BN=None if exact_BN is None else exact_BN.gather(1, columns_BN),
        seq_lens_B=batch.seq_lens_B - first_B,
    )
