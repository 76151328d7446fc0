"""Steps of ranks that attend for requests of their own: the numbers of each rank's, and where its logits lie.

Rank 0 keeps the books of all ranks' page tables. A rank that has no request in a step computes rows of padding, as all
ranks take part in every layer. A recorded step has as many rows on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from nibble.engine.graphs import Graphs, rows_of
from nibble.engine.request import ScheduledRequest
from nibble.engine.step_numbers import StepNumbers


class Books(Protocol):
    """A runner with the page tables of a rank."""

    def step_numbers(self, scheduled: Sequence[ScheduledRequest], every: bool) -> StepNumbers:
        """Return the numbers of a step."""
        ...

    def replay_numbers(self, scheduled: Sequence[ScheduledRequest], size: int) -> StepNumbers:
        """Return the numbers of a recorded decode step."""
        ...


def numbers_by_rank(
    books: Sequence[Books], scheduled: Sequence[ScheduledRequest], every: bool
) -> tuple[list[StepNumbers], list[int]]:
    """Return the numbers of a step for each rank, and where the rows of the batch's logits lie among those of all.

    Args:
        books: what makes numbers, with the page tables of each rank.
        scheduled: requests of all ranks.
        every: whether the logits of every token are needed.
    """
    numbers, keys = list[StepNumbers](), list[tuple[tuple[int, int, int], int]]()
    num_rows, sampled = 0, _sampled_at(scheduled, len(books))
    for rank, one in enumerate(books):
        own = [(place, item) for place, item in enumerate(scheduled) if item.request.lease.rank == rank]
        numbers.append(_with_sampled(one.step_numbers([item for _, item in own], every), sampled[rank]))
        keys += [(key, num_rows + row) for row, key in enumerate(_logit_keys(own, every))]
        num_rows += _length(numbers[-1].inputs[3])
    sizes = tuple(tuple(_length(step.inputs[part]) for step in numbers) for part in (0, 3))
    return [replace(step, rank_rows=sizes) for step in numbers], [row for _, row in sorted(keys)]


def replay_numbers_by_rank(
    books: Sequence[Books], scheduled: Sequence[ScheduledRequest], graphs: Graphs
) -> tuple[list[StepNumbers], list[int]]:
    """Return the same of a step of decodes, which all ranks replay."""
    places = [
        [place for place, item in enumerate(scheduled) if item.request.lease.rank == rank]
        for rank in range(len(books))
    ]
    size, sampled = graphs.size_of(max(map(len, places))), _sampled_at(scheduled, len(books))
    numbers, rows = list[StepNumbers](), [0] * len(scheduled)
    for rank, one in enumerate(books):
        step = one.replay_numbers([scheduled[place] for place in places[rank]], size)
        # The logits of all ranks' rows.
        numbers.append(replace(_with_sampled(step, sampled[rank]), num_logits=len(books) * rows_of(size)))
        for row, place in enumerate(places[rank]):
            rows[place] = rank * rows_of(size) + row
    return numbers, rows


def _sampled_at(scheduled: Sequence[ScheduledRequest], ranks: int) -> list[list[int]]:
    """Return for each rank which of the tokens that a batch samples are of its requests."""
    sampling = [item.request.lease.rank for item in scheduled if item.samples_token]
    return [[at for at, owner in enumerate(sampling) if owner == rank] for rank in range(ranks)]


def _with_sampled(numbers: StepNumbers, sampled: Sequence[int]) -> StepNumbers:
    return replace(numbers, sampled_at=numbers.ints.add(sampled))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _logit_keys(own: Sequence[tuple[int, ScheduledRequest]], every: bool) -> Iterator[tuple[int, int, int]]:
    """Yield a rank's rows of logits in its order, each as what a batch of all requests has it by (logit_rows())."""
    if every:
        yield from ((0, place, row) for place, item in own for row in range(item.num_tokens))
        return
    yield from ((0, place, 0) for place, item in own if item.samples_token)
    yield from ((1, place, row) for place, item in own for row in item.logprob_rows)
