"""Sinks: the first tokens of a request in the compute dtype, for all queries after them, beside an exact window.

Many models give the first tokens most of a query's weight, with keys far larger than others. A query at position p
reads tokens j of the first `sinks` exactly where p - j >= window too. So attention has three parts, each a call to a
kernel that knows nothing of this, merged by log-sum-exp (window.py has the other two):

    far     the quantised pages without the first ones: a request that is so much shorter, at both ends
    sinks   the exact pages of the first tokens, by requests of one query, which end where its near tokens begin
    near    as without sinks

A query is a row of the same kind whether it is computed in a prompt or in a decode step, so answers depend on positions
alone. Layers with a sliding window or chunks of their own do not see these tokens for long, and have no sinks.

Shape suffixes: T tokens of the batch, B requests, N pages of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import Phase

ROWS = 1024
"""Queries that are merged at a time: the parts of long prompts in float32 would take much memory."""


@dataclass(frozen=True, slots=True)
class SinkParts:
    """The parts of a batch that differ where there are sinks."""

    far: AttentionBatch | None
    """Without sinks; None where all tokens are near or sinks."""
    sinks: tuple[tuple[slice, AttentionBatch], ...]
    """Rows of the batch, and over exact pages a request for each of them; none where all sinks are near."""


def split_sinks(
    batch: AttentionBatch, far: AttentionBatch | None, window: int, sinks: int, page_size: int
) -> SinkParts | None:
    """Return the parts of a batch that differ where there are sinks; None without sinks.

    Args:
        batch: the requests, with their exact pages.
        far: its far part without sinks.
        window: tokens of the exact window.
        sinks: first tokens that are read exactly, a multiple of the page size.
        page_size: tokens of a page.
    """
    if not sinks:
        return None
    if far is None:
        return SinkParts(None, ())
    batches = tuple(_sink_batches(batch, window, sinks, page_size))
    return SinkParts(_after_sinks(far, sinks, page_size), batches)


def sink_params(params: AttentionParams, sinks: int) -> AttentionParams:
    """Return what the part over sinks asks for.

    Args:
        params: what the layer asks for.
        sinks: first tokens that are read exactly.
    """
    # Exact pages are read with a sliding window; this one hides nothing. Learned logits count in the near part.
    return replace(params, window=sinks, sinks_H=None)


def _after_sinks(far: AttentionBatch, sinks: int, page_size: int) -> AttentionBatch | None:
    """Return the far part without its first pages: positions matter only to what a query may see."""
    seq_lens = tuple(max(0, length - sinks) for length in far.seq_lens)
    if not any(seq_lens):
        return None
    return replace(
        far,
        seq_lens=seq_lens,
        seq_lens_B=(far.seq_lens_B - sinks).clamp(min=0),
        page_table_BN=far.page_table_BN[:, sinks // page_size :],
        num_omitted=far.num_omitted + sinks,
    )


def _sink_batches(
    batch: AttentionBatch, window: int, sinks: int, page_size: int
) -> Iterator[tuple[slice, AttentionBatch]]:
    """Yield each row of a batch as a request that ends where the row's near tokens begin, or where sinks end."""
    assert batch.exact_table_BN is not None
    table_BN = batch.exact_table_BN[:, : sinks // page_size]
    total, ends_B = batch.stop - batch.start, batch.seq_lens_B
    ends, starts_T1 = batch.seq_lens, batch.cu_seqlens_q_B1
    if len(batch.query_lens) < total:
        # The last row of a request is its last token.
        counts_B, rows_B = starts_T1.diff(), starts_T1[1:]
        table_BN, shift_T = (
            x.repeat_interleave(counts_B, 0, output_size=total) for x in (table_BN, ends_B - rows_B)
        )
        starts_T1 = torch.arange(total + 1, dtype=torch.int32, device=table_BN.device)
        ends_B = starts_T1[1:] + shift_T
        pairs = zip(batch.query_lens, batch.seq_lens, strict=True)
        ends = tuple(end for new, length in pairs for end in range(length - new + 1, length + 1))
    lens, lens_T = tuple(min(max(end - window, 0), sinks) for end in ends), (ends_B - window).clamp(0, sinks)
    for first in range(0, total, ROWS):
        rows = slice(first, min(first + ROWS, total))
        count = rows.stop - first
        yield (
            rows,
            AttentionBatch(
                Phase.DECODE, 0, count, (1,) * count, lens[rows], table_BN[rows].contiguous(), starts_T1[: count + 1],
                lens_T[rows], bounds=batch.bounds,
            ),
        )  # fmt: skip
