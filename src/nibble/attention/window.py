"""The exact window: a query reads the newest tokens in the compute dtype, and all others from quantised pages.

A query at position p reads token j exactly where p - j < window. This depends on positions alone, so an answer depends
neither on chunking nor on prefix hits. A step's batch is attended to twice, and both parts are merged by log-sum-exp:

    far     the quantised pages, by queries that stand `window` tokens further to the front: to a backend they are the
            last tokens of a request that is so much shorter
    near    pages in the compute dtype, with a sliding window

The near part of a decode step reads exact pages, which hold what is kept of each request (cache/snapshots.py). Of a
prompt only its end is kept. On a GPU a kernel reads keys and values of its new tokens as the model gave them, and those
before them from exact pages (kernels/near). Else its near part reads scratch pages: copies of the exact pages before
its first new token, and the new tokens. The layers of a step share them, one after the other.

Shape suffixes: T tokens of the step, B requests of a batch, N pages of a request, C pages that are copied, H heads,
D values of a head, K chosen tokens, W near tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import lcm

import torch
from torch import Tensor

from nibble.attention.planner.plan import Plan
from nibble.attention.planner.window_memory import TILE
from nibble.attention.sinks import SinkParts, split_sinks
from nibble.cache.pool import KVView, PagedPool, StreamView
from nibble.cache.scales import NONE
from nibble.kernels import cdiv
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.transfer import to_device
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged


def far_params(params: AttentionParams, window: int) -> AttentionParams | None:
    """Return what the far part asks for; None where the layer's own window leaves nothing of it.

    Args:
        params: what the layer asks for.
        window: tokens of the exact window.
    """
    if params.window is not None and params.window <= window:
        return None
    # A sink joins the softmax once: in the near part, which is never empty.
    shorter = None if params.window is None else params.window - window
    return replace(params, window=shorter, sinks_H=None)


def near_params(params: AttentionParams, window: int) -> AttentionParams:
    """Return what the near part asks for.

    Args:
        params: what the layer asks for.
        window: tokens of the exact window.
    """
    return replace(params, window=min(window, params.window or window))


# ---- far -------------------------------------------------------------------------------------------------------------


def far_batch(batch: AttentionBatch, window: int) -> AttentionBatch | None:
    """Return the far part of a batch, None where all tokens are near. Its rows count from 0.

    The first queries of a request may see none of its far tokens.

    Args:
        batch: the requests.
        window: tokens of the exact window.
    """
    seq_lens = tuple(max(0, length - window) for length in batch.seq_lens)
    if not any(seq_lens):
        return None
    # On the device, since a CUDA graph may hold it.
    shorter = (batch.seq_lens_B - window).clamp(min=0)
    return replace(
        batch,
        start=0,
        stop=batch.stop - batch.start,
        seq_lens=seq_lens,
        seq_lens_B=shorter,
        num_omitted=batch.num_omitted + window,
    )


def rows_with_far_tokens(far: AttentionBatch) -> AttentionBatch:
    """Return the far part of a prompt from the first row that sees any of it. The rows of several requests all stay.

    To compute the rows before costs little, but their output would have to be put before that of the others: a copy.

    Args:
        far: from far_batch.
    """
    blind = far.query_lens[0] - far.seq_lens[0]
    if len(far.query_lens) > 1 or blind <= 0:
        return far
    counts_B1 = far.cu_seqlens_q_B1.clamp(max=far.seq_lens[0])
    return replace(far, start=blind, query_lens=far.seq_lens, cu_seqlens_q_B1=counts_B1)


# ---- near ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scratch:
    """How scratch pages are filled for a batch."""

    num_pages: int
    source_C: Tensor
    """int64 exact pages that are copied, to target_C."""
    target_C: Tensor
    slot_mapping_T: Tensor
    """int64: the scratch slot of each of the batch's new tokens."""


@dataclass(frozen=True, slots=True)
class NearBatch:
    """The near part of a batch."""

    batch: AttentionBatch
    """Over exact pages, or over scratch pages. Its rows count from 0, and its tokens from base_B."""
    base_B: Tensor
    """int32: where the tokens of each request begin that it counts."""
    scratch: Scratch | None


def near_batch(batch: AttentionBatch, window: int, page_size: int, empty_page: int) -> NearBatch:
    """Return the near part of a batch.

    Args:
        batch: the requests, with their exact pages.
        window: tokens of the exact window.
        page_size: tokens of a page.
        empty_page: an exact page of zeros.
    """
    assert batch.exact_table_BN is not None
    if batch.phase.decodes:
        return _over_exact_pages(batch, batch.exact_table_BN, window, page_size, empty_page)
    return _over_scratch(batch, batch.exact_table_BN, window, page_size)


def _over_exact_pages(
    batch: AttentionBatch, exact_table_BN: Tensor, window: int, page_size: int, empty_page: int
) -> NearBatch:
    """Return the near part of a decode step: on the device alone, since a CUDA graph may hold it."""
    new = max(batch.query_lens)
    # The first token that any of the queries sees, and from where tokens are counted. Rows that pad a request see
    # zeros before it.
    new_B = new if batch.new_B is None else batch.new_B
    first_B1 = (batch.seq_lens_B - new_B - window + 1).clamp(min=0)[:, None]
    step = lcm(TILE, page_size)
    base_B1 = first_B1 // step * step
    reach = step + window + new
    columns_N = torch.arange(cdiv(reach, page_size), device=base_B1.device)
    columns_BN = base_B1 // page_size + columns_N
    table_BN = exact_table_BN.gather(1, columns_BN.clamp(max=exact_table_BN.shape[1] - 1).long())
    # What lies before is not kept, and others may write there.
    table_BN = torch.where(columns_BN < first_B1 // page_size, empty_page, table_BN)
    lens = tuple(
        min(length, reach) if batch.bounds else length - _base(length, new, window, step)
        for length in batch.seq_lens
    )
    base_B = base_B1[:, 0]
    near = replace(
        batch,
        start=0,
        stop=batch.stop - batch.start,
        seq_lens=lens,
        page_table_BN=table_BN.int(),
        seq_lens_B=batch.seq_lens_B - base_B,
    )
    return NearBatch(near, base_B, None)


def _base(length: int, new: int, window: int, step: int) -> int:
    """Return from where tokens are counted: the last multiple of `step` that no near token comes before."""
    return max(0, length - new - window + 1) // step * step


def _over_scratch(batch: AttentionBatch, exact_table_BN: Tensor, window: int, page_size: int) -> NearBatch:
    bases, lens, first_pages, first_slots = list[int](), list[int](), list[int](), list[int]()
    copied: list[tuple[int, int, int]] = []
    num_pages, row, step = 0, 0, lcm(TILE, page_size)
    for i, (new, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        base, start = _base(length, new, window, step), length - new
        # Scratch pages of a request follow each other: page n of the request is scratch page n + offset.
        offset = num_pages - base // page_size
        first = max(0, start - window + 1)
        copied += [(i, page, page + offset) for page in range(first // page_size, cdiv(start, page_size))]
        # Slots of its new tokens are their rows, and so much more.
        first_slots.append(start + offset * page_size - row)
        first_pages.append(num_pages)
        bases.append(base)
        lens.append(length - base)
        num_pages += cdiv(length - base, page_size)
        row += new
    rows, columns, targets = zip(*copied, strict=True) if copied else ((), (), ())
    # One copy to the device.
    parts = (rows, columns, targets, first_slots, first_pages, bases, lens)
    sent = to_device(list(chain(*parts)), torch.int64, exact_table_BN.device)
    sent_parts = sent.split([len(part) for part in parts])
    rows_C, columns_C, target_C, first_slots_B, first_pages_B, base_B, lens_B = sent_parts
    near = replace(
        batch,
        start=0,
        stop=row,
        seq_lens=tuple(lens),
        page_table_BN=_page_table(first_pages_B, lens, page_size, num_pages),
        seq_lens_B=lens_B.int(),
        exact_table_BN=None,
    )
    counts_B = batch.cu_seqlens_q_B1.diff()
    slot_mapping_T = torch.arange(row, device=sent.device)
    slot_mapping_T = slot_mapping_T + first_slots_B.repeat_interleave(counts_B, 0, output_size=row)
    scratch = Scratch(num_pages, exact_table_BN[rows_C, columns_C].long(), target_C, slot_mapping_T)
    return NearBatch(near, base_B.int(), scratch)


def _page_table(first_pages_B: Tensor, lens: list[int], page_size: int, num_pages: int) -> Tensor:
    """Return int32 [B, N]: scratch pages, those of a request one after the other; behind them those of the next."""
    columns_N = torch.arange(cdiv(max(lens), page_size), device=first_pages_B.device)
    return (first_pages_B[:, None] + columns_N).clamp(max=num_pages - 1).int()


class ScratchPages:
    """Scratch pages of a step, which its layers fill one after the other."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._planes: dict[tuple[str, torch.Size], Tensor] = {}

    def view(self, exact: KVView, streams: Mapping[str, Tensor]) -> KVView:
        """Fill the pages for a layer, and return them.

        Args:
            exact: the layer's exact pages.
            streams: the batch's new tokens [T, H, D] by stream.
        """
        filled = {name: self._fill(entry, streams[name]) for name, entry in exact.streams.items()}
        return replace(exact, streams=filled)

    def _fill(self, entry: StreamView, x_THD: Tensor) -> StreamView:
        (pages,) = entry.planes
        scratch = self._plane(entry.stream.name, pages)
        scratch.index_copy_(0, self._scratch.target_C, pages.index_select(0, self._scratch.source_C))
        scratch.flatten(0, 1).index_copy_(0, self._scratch.slot_mapping_T, x_THD.to(pages.dtype))
        return replace(entry, planes=(scratch,))

    def _plane(self, name: str, pages: Tensor) -> Tensor:
        # Layers of one shape share them.
        key = name, pages.shape[1:]
        if key not in self._planes:
            # Zeros, because a slot that nothing is written to may lie in a tile that is read.
            self._planes[key] = pages.new_zeros(self._scratch.num_pages, *pages.shape[1:])
        return self._planes[key]


# ---- chosen tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """The tokens that queries of sparse attention have chosen, in two parts."""

    far_TK: Tensor
    """int32 positions, ascending, PAD_INDEX at the end."""
    near_TW: Tensor
    """int32: the near ones, as the near part counts tokens; PAD_INDEX for those that are not chosen."""


def split_choice(topk_indices_TK: Tensor, batch: AttentionBatch, base_B: Tensor, window: int) -> SplitChoice:
    """Return chosen tokens in a far and a near part.

    Args:
        topk_indices_TK: int32 positions, ascending, PAD_INDEX at the end.
        batch: the requests.
        base_B: where the near part begins to count tokens.
        window: tokens of the exact window.
    """
    position_T1, base_T1 = (x[:, None] for x in _by_token(batch, base_B))
    distance_TK = position_T1 - topk_indices_TK
    # A row that pads a step stands before all tokens: whatever it is said to have chosen is none.
    topk_indices_TK = topk_indices_TK.masked_fill(distance_TK < 0, PAD_INDEX)
    is_near_TK = (topk_indices_TK >= 0) & (distance_TK < window)
    # Near ones are the last of an ascending list.
    far_TK = topk_indices_TK.masked_fill(is_near_TK, PAD_INDEX)
    # A column more takes what is not near.
    chosen_TW = torch.zeros(len(far_TK), window + 1, dtype=torch.bool, device=far_TK.device)
    chosen_TW.scatter_(1, torch.where(is_near_TK, distance_TK, window).long(), is_near_TK)
    near_TW = position_T1 - base_T1 - torch.arange(window, device=far_TK.device)
    return SplitChoice(far_TK, near_TW.masked_fill(~chosen_TW[:, :window], PAD_INDEX).int())


def _by_token(batch: AttentionBatch, base_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each row's token, and the base of its request."""
    total = batch.stop - batch.start
    if len(batch.query_lens) == total:
        return batch.seq_lens_B - 1, base_B
    counts_B = batch.cu_seqlens_q_B1.diff()
    row_T = torch.arange(total, device=base_B.device)
    # The last row of a request is its last token.
    shift_B = batch.seq_lens_B - batch.cu_seqlens_q_B1[1:]
    shift_T, base_T = (x.repeat_interleave(counts_B, 0, output_size=total) for x in (shift_B, base_B))
    return row_T + shift_T, base_T


# ---- both ------------------------------------------------------------------------------------------------------------


class WindowParts:
    """A batch in two parts, which the layers of a step share.

    Args:
        batch: the requests.
        exact: the exact window and its pages.
    """

    def __init__(self, batch: AttentionBatch, exact: ExactCache) -> None:
        self.far = far_batch(batch, exact.tokens)
        self._batch, self._exact = batch, exact

    @cached_property
    def near(self) -> NearBatch:
        """Return the near part, which all layers read but for prompts with a kernel of their own (kernels/near)."""
        exact = self._exact
        return near_batch(self._batch, exact.tokens, exact.pool.layout.page_size, exact.empty_page)

    @cached_property
    def far_rows(self) -> AttentionBatch | None:
        """Return the far part without first rows that see none of it."""
        return rows_with_far_tokens(self.far) if self.far else None

    @cached_property
    def sinks(self) -> SinkParts | None:
        """Return what differs in layers with sinks."""
        exact = self._exact
        return split_sinks(self._batch, self.far, exact.tokens, exact.sinks, exact.pool.layout.page_size)

    @cached_property
    def scratch(self) -> ScratchPages | None:
        """Return the near part's scratch pages, if it has any."""
        return ScratchPages(self.near.scratch) if self.near.scratch else None


class ExactCache:
    """The newest tokens of requests in the compute dtype, and the first ones.

    Args:
        tokens: how near a token must be to be read exactly.
        pool: the exact pages, the last of which stays empty.
        sinks: first tokens that are read exactly however far they are, in whole pages.
    """

    def __init__(self, tokens: int, pool: PagedPool, sinks: int = 0) -> None:
        self.tokens = tokens
        self.pool = pool
        self.sinks = sinks
        self.empty_page = pool.pages - 1
        pool.clear_page(self.empty_page)

    @classmethod
    def empty(cls, plan: Plan, device: torch.device) -> ExactCache:
        """Return one that keeps nothing but sinks of one request, for steps that are whole prompts."""
        pages = plan.sinks // plan.page_size + 1
        return cls(plan.window, PagedPool(plan.exact_layout, pages, NONE, device), plan.sinks)

    def keys_values(self, owner: int) -> tuple[Paged, Paged]:
        """Return the exact pages of a layer's keys and values."""
        streams = self.pool.view(owner).streams
        return streams["k"].paged, streams["v"].paged

    def view(self, owner: int, parts: WindowParts, streams: Mapping[str, Tensor]) -> KVView:
        """Return the pages of the near part for a layer.

        Args:
            owner: the layer whose pages it reads.
            parts: of the batch.
            streams: the batch's new tokens [T, H, D] by stream.
        """
        exact = self.pool.view(owner)
        return parts.scratch.view(exact, streams) if parts.scratch else exact
