"""The reuse that an exact window leaves, on the traces of benchmarks/prefix_replay.py, made smaller."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    try:
        import prefix_replay
    finally:
        sys.path.pop(0)
    return prefix_replay


@pytest.mark.parametrize(("window", "pages"), [(64, 4096), (128, 8192)])
@pytest.mark.parametrize("every", [0, 7])
def test_conversations_keep_their_reuse(traces, window, pages, every):
    """A pool in which one snapshot of each conversation fits into the budget, and some more."""
    trace, pool = traces.conversations(count=16, systems=2), traces.Pool(pages, preempt_every=every)
    base, result = traces.replay(trace, pool), traces.replay(trace, replace(pool, window=window))
    assert result.reused >= 0.95 * base.reused
    assert bool(result.preemptions) is bool(every)


def test_too_small_a_budget_loses_reuse_and_nothing_else(traces):
    trace, pool = traces.conversations(count=16, systems=2), traces.Pool(1024)
    base, result = traces.replay(trace, pool), traces.replay(trace, replace(pool, window=128))
    assert 0 < result.reused < 0.95 * base.reused and result.misses and result.evicted


def test_a_crowd_replays_nothing(traces):
    trace, pool = traces.crowd(), traces.Pool(2048, max_running=64)
    base, result = traces.replay(trace, pool), traces.replay(trace, replace(pool, window=128))
    assert result.reused == base.reused > 0 and result.replayed == 0
