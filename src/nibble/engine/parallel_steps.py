"""Steps of ranks that attend for requests of their own: the numbers of each rank's, and where its logits lie.

Rank 0 keeps the books of all ranks' page tables. A rank that has no request in a step computes rows of padding, as all
ranks take part in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from nibble.engine.request import ScheduledRequest
from nibble.engine.step_numbers import StepNumbers


class Books(Protocol):
    """A runner with the page tables of a rank."""

    def step_numbers(self, scheduled: Sequence[ScheduledRequest], every: bool) -> StepNumbers:
        """Return the numbers of a step."""
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
    num_rows = 0
    for rank, one in enumerate(books):
        own = [(place, item) for place, item in enumerate(scheduled) if item.request.lease.rank == rank]
        numbers.append(one.step_numbers([item for _, item in own], every))
        keys += [(key, num_rows + row) for row, key in enumerate(_logit_keys(own, every))]
        num_rows += _length(numbers[-1].inputs[3])
    sizes = tuple(tuple(_length(step.inputs[part]) for step in numbers) for part in (0, 3))
    return [replace(step, rank_rows=sizes) for step in numbers], [row for _, row in sorted(keys)]


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _logit_keys(own: Sequence[tuple[int, ScheduledRequest]], every: bool) -> Iterator[tuple[int, int, int]]:
    """Yield a rank's rows of logits in its order, each as what a batch of all requests has it by (logit_rows())."""
    if every:
        yield from ((0, place, row) for place, item in own for row in range(item.num_tokens))
        return
    yield from ((0, place, 0) for place, item in own if item.samples_token)
    yield from ((1, place, row) for place, item in own for row in item.logprob_rows)
