"""What ranks tell one another beside tensors of layers, and how they agree on a way to add up, over threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nibble.kernels.collectives import broadcast, processes
from thread_ranks import Meeting, ThreadCollectives


def test_all_ranks_have_what_rank_0_has() -> None:
    meeting, device = Meeting(3), torch.device("cpu")
    for values in ({"bfloat16-1x8x16-ab": True, "ö": False}, {}):
        with ThreadPoolExecutor(3) as pool:
            ranks = [
                pool.submit(
                    broadcast, ThreadCollectives(meeting, rank), device, {"other": rank} if rank else values
                )
                for rank in range(3)
            ]
            assert [rank.result(30) for rank in ranks] == [values] * 3


def test_a_rank_takes_the_trials_of_rank_0() -> None:
    from nibble.kernels import linear

    weight = torch.randn(8, 4)
    path = linear._trial_path(weight, linear.MMA_ROWS)
    key = linear._key(weight, linear.MMA_ROWS)
    try:
        for result in (linear.TRITON, linear.TORCH):
            linear._fastest.pop(key, None)
            linear.of_rank_0[path.name] = result
            assert linear._fastest_of(weight, linear.MMA_ROWS) == result
    finally:
        linear.of_rank_0.clear()
        linear._fastest.pop(key, None)
        linear.results.pop(path.name, None)


class Trial(processes.NcclCollectives):
    """A rank that is a thread, and tries a way to add up."""

    def __init__(self, group: ThreadCollectives) -> None:
        self.rank, self.size, self.device = group.rank, group.size, torch.device("cpu")
        self._group, self._ways = group, []

    def _all_agree(self, mine: bool) -> bool:
        return bool(self._group.all_gather(torch.tensor(mine)).all())

    def _by_nccl(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x)

    def _choose(self, ways: Any) -> str:
        self._ways = list(ways)
        return "measured"


class Push:
    """Adds up rightly, or by a fault: one rank's values are wrong, or never arrive."""

    def __init__(self, group: ThreadCollectives, fault: str) -> None:
        self._group, self._fault, self._stopped = group, fault if group.rank else "", threading.Event()

    def __call__(self, x: Tensor) -> Tensor:
        y = self._group.all_reduce(x)
        if self._fault == "lost":
            assert self._stopped.wait(30)
        return y + (self._fault == "wrong")

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()


@pytest.mark.parametrize("fault", ["", "wrong", "lost"])
def test_ranks_write_to_other_memory_only_where_all_have_the_sums(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where values are lost a timer ends the waiting; elsewhere it must not ring.
    monkeypatch.setattr(processes, "TRIAL_S", 0.05 if fault == "lost" else 30.0)
    meeting, size = Meeting(3), 3

    def rank(number: int) -> tuple[str, int]:
        group = ThreadCollectives(meeting, number)
        trial = Trial(group)
        return trial._tried(cast("Any", Push(group, fault))), len(trial._ways)

    with ThreadPoolExecutor(size) as pool:
        outcomes = list(pool.map(rank, range(size)))
    assert outcomes == [("", 0) if fault else ("measured", 2)] * size
