"""What ranks tell one another beside tensors of layers, over threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from nibble.kernels.collectives import broadcast
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
