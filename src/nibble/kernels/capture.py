"""CUDA graphs of what a function launches, and what is left to do where that cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch


def capture(graph: torch.cuda.CUDAGraph, run: Callable[[], None], device: torch.device) -> None:
    """Record what run() launches on the current stream, which is not the default one, into memory of the graph's own.

    Raises:
        Exception: It cannot be recorded.
    """
    assert device.index is not None
    pool = torch.cuda.graph_pool_handle()
    # Other threads may call CUDA meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        run()
    finally:
        end_capture(graph, device.index, pool)


def end_capture(graph: torch.cuda.CUDAGraph, index: int, pool: tuple[int, int]) -> None:
    """End what capture_begin() has begun on the device with this index, with memory of this pool.

    Raises:
        Exception: What was launched cannot be recorded.
    """
    try:
        graph.capture_end()
    except Exception:
        # What the capture cannot hold has ended it, but not that memory is taken from its pool.
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, pool)
        raise
