"""Choose one option for each part so that the sum of losses is least within a sum of costs, or the other way round.

The loss of a whole is taken to be the sum of the losses that its parts cause one at a time, as ModelOpt's layer-wise
search for KV caches does (NVIDIA/Model-Optimizer#2272). Under that model the answer is exact:

    A choice for the first n parts is dominated if another one costs no more and loses no more. Costs and losses only
    add up, so whatever is chosen for the remaining parts, the other one stays at least as good in both; a dominated
    choice is never needed. What remains is the Pareto front of n parts, and the front of n + 1 parts is among the sums
    of a point of it and an option of the next part. The last front has, for every limit on the cost, a choice of the
    least loss within it, and for every limit on the loss, one of the least cost.

Costs are whole bytes, so a front has at most as many points as there are sums of bytes: a few thousand for a model of
80 layers, whose options cost multiples of the heads' bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One way to do a part."""

    cost: int
    loss: float


@dataclass(frozen=True, slots=True)
class Choice:
    """An option for each of the first parts."""

    cost: int = 0
    loss: float = 0.0
    index: int = -1
    """Of the last part's option."""
    before: Choice | None = None
    """The choice for the parts before the last one, None where there is no part."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Return the index of each part's option."""
        indices: list[int] = []
        choice = self
        while choice.before is not None:
            indices.append(choice.index)
            choice = choice.before
        return tuple(reversed(indices))


def frontier(parts: Sequence[Sequence[Option]]) -> tuple[Choice, ...]:
    """Return the choices of which none is dominated, costs ascending and losses descending."""
    front = [Choice()]
    for options in parts:
        front = _undominated(
            [
                Choice(choice.cost + option.cost, choice.loss + option.loss, index, choice)
                for choice in front
                for index, option in enumerate(options)
            ]
        )
    return tuple(front)


def _undominated(choices: list[Choice]) -> list[Choice]:
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.cost, choice.loss)):
        # Whatever stands in the front costs no more, and its last entry loses least.
        if not front or choice.loss < front[-1].loss:
            front.append(choice)
    return front


def least_loss(front: Sequence[Choice], cost: float) -> Choice | None:
    """Return the choice of the least loss that costs at most `cost`, None where all cost more."""
    return max(
        (choice for choice in front if choice.cost <= cost), key=lambda choice: choice.cost, default=None
    )


def least_cost(front: Sequence[Choice], loss: float) -> Choice | None:
    """Return the choice of the least cost that loses at most `loss`, None where all lose more."""
    return min(
        (choice for choice in front if choice.loss <= loss), key=lambda choice: choice.cost, default=None
    )
