"""Steps of ranks that attend for requests of their own: the numbers of each rank's, and where its logits lie.

Rank 0 keeps the books of all ranks' page tables. A rank that has no request in a step computes rows of padding, as all
ranks take part in every layer. A recorded step has as many rows on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nibble.engine.graphs import rows_of
from nibble.engine.request import ScheduledRequest
from nibble.engine.step_numbers import StepNumbers


class Books(Protocol):
    """A runner with the page tables of a rank."""

    def step_numbers(self, scheduled: Sequence[ScheduledRequest], every: bool) -> StepNumbers:
        """Return the numbers of a step."""
        ...

    def recorded_numbers(
        self, scheduled: Sequence[ScheduledRequest], size: int | tuple[int, int]
    ) -> StepNumbers:
        """Return the numbers of a recorded step."""
        ...


def numbers_by_rank(
    books: Sequence[Books], scheduled: Sequence[ScheduledRequest], every: bool
) -> list[StepNumbers]:
    """Return the numbers of a step for each rank.

    Args:
        books: what makes numbers, with the page tables of each rank.
        scheduled: requests of all ranks.
        every: whether the logits of every token are needed.
    """
    numbers, keys, num_rows = list[StepNumbers](), list[tuple[tuple[int, int, int], int]](), 0
    for own, one in zip(_by_rank(scheduled, len(books)), books, strict=True):
        numbers.append(one.step_numbers([item for _, item in own], every))
        keys += [(key, num_rows + row) for row, key in enumerate(_logit_keys(own, every))]
        num_rows += _length(numbers[-1].inputs[3])
    sizes = tuple(tuple(_length(step.inputs[part]) for step in numbers) for part in (0, 3))
    return _addressed([replace(step, rank_rows=sizes) for step in numbers], scheduled, keys)


def recorded_numbers_by_rank(
    books: Sequence[Books], scheduled: Sequence[ScheduledRequest], size: int | tuple[int, int]
) -> list[StepNumbers]:
    """Return the same of a step that all ranks replay.

    Args:
        books: what makes numbers, with the page tables of each rank.
        scheduled: requests of all ranks, which decode or verify drafts.
        size: of the recorded step, which has room for those of each.
    """
    rows_of_rank = rows_of(size) if isinstance(size, int) else size[0] * size[1]
    numbers, keys = list[StepNumbers](), list[tuple[int, int]]()
    for rank, own in enumerate(_by_rank(scheduled, len(books))):
        step = books[rank].recorded_numbers([item for _, item in own], size)
        # The logits of all ranks' rows.
        numbers.append(replace(step, num_logits=len(books) * rows_of_rank))
        places = [place for place, item in own for _ in range(item.num_tokens)]
        keys += [(place, rank * rows_of_rank + row) for row, place in enumerate(places)]
    return _addressed(numbers, scheduled, keys)


def _by_rank(scheduled: Sequence[ScheduledRequest], ranks: int) -> list[list[tuple[int, ScheduledRequest]]]:
    """Return the requests of each rank, with their places in the batch."""
    places = list(enumerate(scheduled))
    return [[pair for pair in places if pair[1].request.lease.rank == rank] for rank in range(ranks)]


def _addressed(
    numbers: Sequence[StepNumbers], scheduled: Sequence[ScheduledRequest], keys: Iterable[tuple[Any, int]]
) -> list[StepNumbers]:
    """Tell each rank which sampled tokens are its own, and rank 0 the rows of the batch's logits, in order of keys."""
    sampled = _sampled_at(scheduled, len(numbers))
    first, *others = (
        replace(step, sampled_at=step.ints.add(at)) for step, at in zip(numbers, sampled, strict=True)
    )
    return [replace(first, batch_rows=first.ints.add(row for _, row in sorted(keys))), *others]


def _sampled_at(scheduled: Sequence[ScheduledRequest], ranks: int) -> list[list[int]]:
    """Return for each rank which of the tokens that a batch samples are of its requests."""
    owners = [
        item.request.lease.rank
        for item in scheduled
        if item.samples_token
        for _ in range(1 + len(item.drafts))
    ]
    return [[at for at, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _logit_keys(own: Sequence[tuple[int, ScheduledRequest]], every: bool) -> Iterator[tuple[int, int, int]]:
    """Yield a rank's rows of logits in its order, each as what a batch of all requests has it by (logit_rows())."""
    if every:
        yield from ((0, place, row) for place, item in own for row in range(item.num_tokens))
        return
    sampling = ((place, item) for place, item in own if item.samples_token)
    yield from ((0, place, row) for place, item in sampling for row in range(1 + len(item.drafts)))
    yield from ((1, place, row) for place, item in own for row in item.logprob_rows)
