"""A small run of benchmarks/routing.py: the router holds its floors where simpler policies do not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import routing

PAGES = 1000


class Gathers(routing.Nibble):
    """A planted fault: only pages count."""

    policy = routing.Policy(queue=0, running=0, imbalance=0, overload=0)


class Scatters(routing.Nibble):
    """A planted fault: pages are worth nothing."""

    policy = routing.Policy(queue=1e6, running=1e6, imbalance=1e6)


@pytest.mark.parametrize("trace", ["chats", "documents"])
def test_the_floors_hold_and_bad_policies_are_caught(trace: str) -> None:
    replicas = 4
    sessions = routing.sessions_of(trace, replicas, 0.4, 1, PAGES)
    shared = routing.shared_reuse(sessions, replicas, PAGES)
    ours = routing.simulate(sessions, replicas, PAGES, routing.Nibble)
    assert ours.reuse >= routing.FLOOR_REUSE * shared and ours.load <= routing.CEILING_LOAD
    for policy in (routing.RoundRobin, Scatters):
        assert routing.simulate(sessions, replicas, PAGES, policy).reuse < routing.FLOOR_REUSE * shared
    assert routing.simulate(sessions, replicas, PAGES, Gathers).load > routing.CEILING_LOAD


def test_pages_are_evicted_in_it() -> None:
    """Else all that is simulated would be first sight."""
    sessions = routing.sessions_of("chats", 2, 0.4, 1, PAGES)
    assert routing.simulate(sessions, 2, PAGES, routing.Nibble).evicted > 0.5
