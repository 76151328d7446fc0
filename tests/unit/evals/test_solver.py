"""The solver against all assignments one by one, on small tables."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nibble.evals.solver import Choice, Option, frontier, least_cost, least_loss

# Halves add up without rounding, so that equal sums are equal.
OPTIONS = st.builds(Option, st.integers(0, 12), st.integers(0, 40).map(lambda n: n / 2))
TABLES = st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=5)


def sums(parts: list[list[Option]]) -> list[tuple[int, float]]:
    """The cost and the loss of every assignment."""
    return [
        (sum(option.cost for option in chosen), sum(option.loss for option in chosen))
        for chosen in itertools.product(*parts)
    ]


def check(choice: Choice, parts: list[list[Option]]) -> None:
    """The indices of a choice are what it says they come to."""
    options = [options[index] for options, index in zip(parts, choice.indices, strict=True)]
    assert choice.cost == sum(option.cost for option in options)
    assert choice.loss == sum(option.loss for option in options)


@given(TABLES, st.integers(0, 60))
def test_the_least_loss_within_a_cost(parts: list[list[Option]], cost: int) -> None:
    within = [loss for size, loss in sums(parts) if size <= cost]
    choice = least_loss(frontier(parts), cost)
    assert (choice is None) == (not within)
    if choice:
        check(choice, parts)
        assert choice.cost <= cost
        assert choice.loss == min(within)


@given(TABLES, st.integers(0, 200).map(lambda n: n / 2))
def test_the_least_cost_within_a_loss(parts: list[list[Option]], loss: float) -> None:
    within = [size for size, lost in sums(parts) if lost <= loss]
    choice = least_cost(frontier(parts), loss)
    assert (choice is None) == (not within)
    if choice:
        check(choice, parts)
        assert choice.loss <= loss
        assert choice.cost == min(within)


@given(TABLES)
def test_no_choice_of_the_front_is_dominated(parts: list[list[Option]]) -> None:
    front = frontier(parts)
    assert [choice.cost for choice in front] == sorted({choice.cost for choice in front})
    assert all(a.loss > b.loss for a, b in itertools.pairwise(front))
    for size, loss in sums(parts):
        assert any(choice.cost <= size and choice.loss <= loss for choice in front)


def test_greed_would_be_wrong() -> None:
    """The best single step, 4 nats for 3 bytes, leaves no room for the two that save 6 together."""
    parts = [
        [Option(0, 4.0), Option(3, 0.0)],
        [Option(0, 3.0), Option(2, 0.0)],
        [Option(0, 3.0), Option(2, 0.0)],
    ]
    choice = least_loss(frontier(parts), 4)
    assert choice
    assert choice.indices == (0, 1, 1)


def test_many_layers_are_no_matter() -> None:
    options = [Option(64 * size, 1.0 / (size * size)) for size in (9, 13, 16, 25, 32)]
    front = frontier([options] * 80)
    assert len(front) <= 80 * (32 - 9) + 1
    choice = least_loss(front, 64 * 80 * 12)
    assert choice
    assert choice.cost <= 64 * 80 * 12
    assert choice.loss == pytest.approx(min(c.loss for c in front if c.cost <= 64 * 80 * 12))
