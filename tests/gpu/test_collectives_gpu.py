"""Sums over two GPUs that write to one another's memory: values of all sizes, in graphs, and an end without the other.

Skipped where there are no two GPUs, or they are not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu/test_collectives_gpu.py
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels.collectives import push
from nibble.kernels.collectives.processes import NcclCollectives, abort, store

peer_memory = pytest.importorskip("nibble.kernels.collectives.peer_memory")  # needs CUDA's bindings

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SIZE, ROWS, VALUES = 2, 8, 4096
mp: Any = torch.multiprocessing


def connected(rank: int, port: int) -> NcclCollectives:
    torch.cuda.set_device(rank)
    return NcclCollectives(
        store("127.0.0.1", port, rank, SIZE), rank, SIZE, torch.device("cuda", rank), one_host=True
    )


def expected(group: NcclCollectives, x: Tensor) -> Tensor:
    return group.all_gather(x).float().sum(0).bfloat16()


def values(rank: int, port: int) -> None:
    # A second group of a process finds ranks as the first did.
    for number in range(2):
        group = connected(rank, port + number)
        assert group._push is not None, group.note
        rng = torch.Generator(group.device).manual_seed(rank)
        sizes = torch.Generator().manual_seed(0)
        for _ in range(200):
            count = 8 * int(torch.randint(1, push.MOST_BYTES // 16 + 1, (1,), generator=sizes))
            x = torch.randn(count, device=group.device, generator=rng).bfloat16()
            assert torch.equal(group._push(x), expected(group, x))
        in_graphs(group, rng)
        group.barrier()
        group.close()


def in_graphs(group: NcclCollectives, rng: torch.Generator) -> None:
    """Sums of sums, one launch behind the other, replayed without a stop."""
    add, x = group._push, torch.randn(ROWS, VALUES, device=group.device, generator=rng).bfloat16()
    assert add is not None
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        y = x
        for _ in range(50):
            y = add(y) * 0.5
    for _ in range(100):
        graph.replay()
    z = x
    for _ in range(50):
        z = expected(group, z) * 0.5
    assert torch.equal(y, z)


def stopped(rank: int, port: int) -> None:
    group = connected(rank, port)
    group.barrier()
    if rank:
        os._exit(0)  # it sends nothing, and its memory goes with it
    assert group._push is not None
    for _ in range(20):  # writes, too, to memory whose owner is gone
        group._push(torch.ones(ROWS, VALUES, device=group.device).bfloat16())
    time.sleep(1)
    assert not torch.cuda.current_stream().query()
    abort()
    until = time.monotonic() + 2
    while not torch.cuda.current_stream().query() and time.monotonic() < until:
        time.sleep(0.01)
    assert torch.cuda.current_stream().query()
    assert torch.ones(4, device=group.device).sum().item() == 4
    os._exit(0)  # as a store without the other rank would not end


def refused(rank: int, port: int) -> None:
    """One rank cannot: all add up by NCCL."""
    if rank:
        peer_memory._opened = lambda values: driver_says_no()
    group = connected(rank, port)
    assert group._push is None
    assert "NCCL" in group.note
    x = torch.full((ROWS, VALUES), rank + 1.0, device=group.device).bfloat16()
    assert torch.equal(group.all_reduce(x), expected(group, x))
    group.barrier()
    group.close()


def driver_says_no() -> int:
    raise BackendError("planted")


@pytest.mark.parametrize(("work", "port"), [(values, 29671), (stopped, 29681), (refused, 29691)])
def test_sums(work: Any, port: int) -> None:
    mp.spawn(work, (port,), nprocs=SIZE)
