"""Which tokens a step computes, as lists: ids, rows whose logits are needed, rows that are not stored; and as integers.

Shape suffixes: B requests, L rows of each in a recorded step with drafts, S rows whose logits are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from nibble.engine.page_tables import PackedInts, PageTables
from nibble.engine.request import ScheduledRequest
from nibble.kernels import cdiv
from nibble.kernels.recurrence.types import StateMetadata, ones_behind
from nibble.kernels.step_inputs import ON_DEVICE, accept
from nibble.model_spec import Phase

MIN_SPLIT, SPLIT_MULTIPLE = 32, 8
"""With a host tier, steps of so many requests are split in two, at a multiple of SPLIT_MULTIPLE."""


def _state_slot(item: ScheduledRequest) -> int:
    slot = item.request.lease.state_slot
    assert slot is not None, "a lease has a slot of recurrent states from its first step on"
    return slot


def logit_rows(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    """Return the rows of the step whose logits are needed: those that are sampled from, then logprob_rows."""
    starts = list(accumulate((item.num_tokens for item in scheduled), initial=0))
    sampled = [
        row
        for end, item in zip(starts[1:], scheduled, strict=True)
        if item.samples_token
        for row in range(end - 1 - len(item.drafts), end)
    ]
    first_rows = zip(starts[:-1], scheduled, strict=True)
    return sampled + [start + at - item.start for start, item in first_rows for at in item.logprob_rows]


def sampled_rows(scheduled: Sequence[ScheduledRequest], rows: Sequence[int], padding_row: int) -> list[int]:
    """Return for each sampled token the row of the page tables that the next step takes it from.

    Args:
        scheduled: requests.
        rows: of each.
        padding_row: stands for those of tokens beside drafts, which no step takes.
    """
    sampled = list[int]()
    for row, item in zip(rows, scheduled, strict=True):
        if item.samples_token:
            sampled += [padding_row] * (1 + len(item.drafts)) if item.drafts else [row]
    return sampled


def pad_rows(values: list[int]) -> list[int]:
    """Repeat an entry that is alone: a single row is summed in another order on a CPU than one of several."""
    # torch.compile specialises on size 1, too, which would mean a second compilation (models/forward.py).
    return values * 2 if len(values) == 1 else values


def unwritten(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    """Return the rows of tokens that are computed again and lie in the prefix cache: their pages are not written."""
    rows, first = list[int](), 0
    for item in scheduled:
        rows += range(first, first + min(max(item.write_from - item.start, 0), item.num_tokens))
        first += item.num_tokens
    return rows


def unkept(scheduled: Sequence[ScheduledRequest], page_size: int) -> list[int]:
    """Return the rows of tokens that are too old at the end of the step to be kept in exact pages."""
    rows, first = list[int](), 0
    for item in scheduled:
        exact_pages = item.request.lease.exact_pages
        for page in range(item.start // page_size, cdiv(item.end, page_size)):
            if page not in exact_pages:
                start, stop = max(page * page_size, item.start), min((page + 1) * page_size, item.end)
                rows += range(first + start - item.start, first + stop - item.start)
        first += item.num_tokens
    return rows


def token_ids(scheduled: Iterable[ScheduledRequest]) -> list[int]:
    """Return the ids of all tokens; negative ones of those that the host does not know yet (PageTables.resolve_ids)."""
    token_ids: list[int] = []
    for item in scheduled:
        num_kept = item.num_tokens - len(item.drafts)
        ids = item.request.token_ids[item.start : item.start + num_kept]
        # The list ends with the last token that the host knows, so a slice may be one short.
        token_ids += ids if len(ids) == num_kept else [*ids, ON_DEVICE]
        token_ids += item.drafts
    return token_ids


def padded_token_ids(scheduled: Sequence[ScheduledRequest], tokens: int) -> list[int]:
    """Return so many ids of each request: those of its new tokens are the last ones, and the first of them is repeated.

    So rows of padding are like the row after them, which experts do with what they read anyway.
    """
    result = list[int]()
    for item in scheduled:
        ids = item.request.token_ids
        first = ids[item.start] if item.start < len(ids) else ON_DEVICE
        # A request that decodes has one token beside its drafts.
        result += [first] * (tokens - len(item.drafts))
        result += item.drafts
    return result


@lru_cache(64)
def padded_logit_rows(new: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Return the rows of new tokens where each request has so many rows, and its new tokens are the last of them.

    Args:
        new: new tokens of each request.
        tokens: rows of each.
    """
    ends = range(tokens, tokens * len(new) + 1, tokens)
    return tuple(row for end, count in zip(ends, new, strict=True) for row in range(end - count, end))


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """The inputs of a recorded step with drafts."""

    rows_B: Tensor
    """Rows of the page tables."""
    ends_B: Tensor
    """Stored tokens of each request, the new ones included; 0: padding."""
    new_B: Tensor
    """New tokens of each."""
    ids_BL: Tensor
    """Ids, as padded_token_ids has them."""
    logit_rows_S: Tensor
    """Rows whose logits are computed, in the order in which they are sampled from; one for each row of the step."""

    @staticmethod
    def length(requests: int, rows: int) -> int:
        """Return how many integers there are of so many requests with so many rows each."""
        return requests * (3 + 2 * rows)

    @classmethod
    def of(cls, inputs: Tensor, requests: int, rows: int) -> VerifyInputs:
        """Return the parts of a step's inputs."""
        total = requests * rows
        rows_B, ends_B, new_B, ids, logit_rows_S = inputs[: cls.length(requests, rows)].split(
            (requests, requests, requests, total, total)
        )
        return cls(rows_B, ends_B, new_B, ids.view(requests, rows), logit_rows_S)

    @torch.inference_mode()
    def accept(self, tokens_S: Tensor, tables: PageTables) -> None:
        """Let the device note which drafts count, before the host reads what was sampled behind each new token."""
        assert tables.verified and tables.drafts_KR is not None
        numbers = self.rows_B, self.ends_B, self.new_B, self.ids_BL
        accept(*numbers, tokens_S, tables.verified, tables.drafts_KR)


LONG_PROMPTS = 1024
"""Rows without logits from which on it pays to attend for the others alone."""


def attends_for_logits_only(scheduled: Sequence[ScheduledRequest]) -> bool:
    """Return whether a step's last layer had better attend for the rows of its logits alone.

    Of each request these are its last row, if any: several would read its tokens again and again, and exact pages hold
    what the last one sees.
    """
    if any(item.logprob_rows or item.drafts for item in scheduled):
        return False
    return sum(item.num_tokens - item.samples_token for item in scheduled) >= LONG_PROMPTS


class PhaseGroup:
    """Requests of one phase in a step, and where their numbers lie in the packed integers."""

    def __init__(self, pairs: Sequence[tuple[ScheduledRequest, int]], packed: PackedInts) -> None:
        """Add the numbers of requests and their rows of the page tables."""
        scheduled = [item for item, _ in pairs]
        self.phase = scheduled[0].phase
        self.query_lens = tuple(item.num_tokens for item in scheduled)
        self.seq_lens = tuple(item.end for item in scheduled)
        self.cu_seqlens_q = packed.add(accumulate(self.query_lens, initial=0))
        self.seq_lens_at = packed.add(self.seq_lens)
        self.rows = packed.add(row for _, row in pairs)

    @classmethod
    def of_step(
        cls,
        scheduled: Sequence[ScheduledRequest],
        rows: Sequence[int],
        packed: PackedInts,
        most_prompts: int | None,
    ) -> list[PhaseGroup]:
        """Return the groups of a step: one of each phase, and several of many prompts.

        Args:
            scheduled: what the step has, in the order of phases (Batch.from_scheduled).
            rows: of its requests in the page tables.
            packed: the integers of the step.
            most_prompts: most requests of a group that computes prompts; None: any number.
        """
        groups = list[PhaseGroup]()
        for phase, of_phase in groupby(zip(scheduled, rows, strict=True), key=lambda pair: pair[0].phase):
            pairs = tuple(of_phase)
            most = most_prompts if most_prompts and not phase.decodes else len(pairs)
            groups += [cls(pairs[first : first + most], packed) for first in range(0, len(pairs), most)]
        return groups

    @classmethod
    def of_padding(cls, row: int, packed: PackedInts) -> PhaseGroup:
        """Return one row of padding that decodes.

        Args:
            row: of padding in the page tables.
            packed: the integers of the step.
        """
        group = cls.__new__(cls)
        group.phase, group.query_lens, group.seq_lens = Phase.DECODE, (1,), (1,)
        group.cu_seqlens_q, group.seq_lens_at, group.rows = (packed.add(x) for x in ([0, 1], [1], [row]))
        return group

    @classmethod
    def of_tokens(
        cls, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int], packed: PackedInts
    ) -> PhaseGroup:
        """Return some tokens of a step as requests that decode.

        Args:
            tokens: which ones.
            positions: of all tokens.
            rows: of all tokens' requests in the page tables.
            packed: the integers of the step.
        """
        group, count = cls.__new__(cls), len(tokens)
        group.phase, group.query_lens = Phase.DECODE, (1,) * count
        group.seq_lens = tuple(positions[token] + 1 for token in tokens)
        group.cu_seqlens_q, group.seq_lens_at = packed.add(range(count + 1)), packed.add(group.seq_lens)
        group.rows = packed.add(rows[token] for token in tokens)
        return group


class StateRows:
    """Where the numbers of a step's recurrent states lie in the packed integers."""

    def __init__(self, scheduled: Sequence[ScheduledRequest], packed: PackedInts) -> None:
        """Add the numbers of requests."""
        lengths = [item.num_tokens for item in scheduled]
        self._max_length = max(lengths)
        self._ones = ones_behind(lengths)
        self._slots = packed.add(_state_slot(item) for item in scheduled)
        self._starts = packed.add(item.start for item in scheduled)
        self._cu_seqlens = packed.add(accumulate(lengths, initial=0))
        self._settled: slice | None = None
        if any(item.drafts for item in scheduled):
            self._settled = packed.add(item.num_tokens - len(item.drafts) for item in scheduled)

    def metadata(self, sent: Tensor, invariant: bool) -> StateMetadata:
        """Return the same on the device."""
        slots_B, starts_B, cu_seqlens_B1 = (
            sent[part].int() for part in (self._slots, self._starts, self._cu_seqlens)
        )
        settled_B = None if self._settled is None else sent[self._settled].int()
        return StateMetadata(
            slots_B, starts_B, cu_seqlens_B1, self._max_length, settled_B, None, invariant, *self._ones
        )


def verify_states(inputs: VerifyInputs, slots_B: Tensor, length: int, *, invariant: bool) -> StateMetadata:
    """Return what recurrent layers are told: the rows that pad a request are one of their own, without a slot."""
    # Of rows that decode or verify, the first one stays whatever becomes of the others.
    settled_B, starts_B = inputs.new_B.clamp(max=1), inputs.ends_B - inputs.new_B
    slots_B = torch.where(inputs.new_B > 0, slots_B, -1)
    ends_B = torch.arange(length, length * len(slots_B) + 1, length, device=slots_B.device)

    def interleaved(padding_B: Tensor, own_B: Tensor) -> Tensor:
        return torch.stack((padding_B, own_B), 1).flatten().int()

    none_B = torch.zeros_like(starts_B)
    cu_seqlens = nn.functional.pad(interleaved(ends_B - inputs.new_B, ends_B), (1, 0))
    return StateMetadata(
        interleaved(none_B - 1, slots_B), interleaved(none_B, starts_B), cu_seqlens, length,
        interleaved(none_B, settled_B), invariant=invariant,
    )  # fmt: skip


def token_slots(
    table_RN: Tensor, rows_T: Tensor, positions_T: Tensor, page_size: int, skipped: Tensor
) -> Tensor:
    """Return the slot of each token of a step, -1 where it is not stored.

    Args:
        table_RN: pages.
        rows_T: the row of each token's request.
        positions_T: of tokens.
        page_size: tokens of a page.
        skipped: int64, which tokens are not stored.
    """
    pages_T = table_RN[rows_T, positions_T // page_size].long()
    slots_T = pages_T * page_size + positions_T % page_size
    return slots_T.index_fill_(0, skipped, -1) if len(skipped) else slots_T


def split_points(size: int, *, has_tier: bool) -> tuple[int, ...]:
    """Return where attention batches of `size` decodes begin and end."""
    # With a host tier there are two. What one has selected is fetched while the other selects, and the first attends
    # while the rest is fetched.
    half = cdiv(size, 2 * SPLIT_MULTIPLE) * SPLIT_MULTIPLE
    return (0, half, size) if has_tier and size >= MIN_SPLIT else (0, size)
