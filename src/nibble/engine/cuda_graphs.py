"""Recorded decode steps: one CUDA graph for each size, over buffers that stay where they are.

Owns Buffers, Graphs and the ways of recording. What a step computes is the runner's business (engine/model_runner.py).

Shape suffixes: B rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from nibble.errors import BackendError

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function and returns what repeats, over the same memory, all that it did on the device."""


class Buffers:
    """What a recorded step reads and writes, with room for `most` rows.

    inputs: for a step of B rows table rows, positions and ids, B int64 each. logits: [most, V], made by the first step.
    starts, rows: 0, 1, 2... as int32, where requests of one token begin; and as int64, the rows to compute logits of.
    """

    @torch.inference_mode()  # as all tensors of steps are made: to a compiled model others look different
    def __init__(self, most: int, device: torch.device) -> None:
        self.inputs = torch.zeros(3 * most, dtype=torch.int64, device=device)
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.rows = torch.arange(most, device=device)
        self.logits = torch.empty(0, device=device)

    def clear(self, size: int) -> None:
        """Inputs of a step that is all padding."""
        self.inputs.zero_()
        self.inputs[size : 2 * size] = -1

    def keep(self, logits_BV: Tensor) -> None:
        """Takes a step's logits over, so that their own memory serves the next graph too."""
        if not len(self.logits):
            self.logits = logits_BV.new_empty(len(self.rows), logits_BV.shape[1])
        self.logits[: len(logits_BV)].copy_(logits_BV)


class Graphs:
    """Decode steps of several sizes. sizes: ascending."""

    def __init__(self, sizes: Sequence[int], device: torch.device, record: Record) -> None:
        self.sizes = tuple(sizes)
        self.buffers = Buffers(self.sizes[-1], device)
        self._record = record
        self._replays: dict[int, Callable[[], None]] = {}

    def size_for(self, count: int) -> int:
        """The smallest size with room for `count` requests."""
        return next(size for size in self.sizes if size >= count)

    @torch.inference_mode()
    def record(self, decode: Callable[[int, Buffers], None]) -> None:
        """Records decode(size, buffers) for all sizes, the largest first: the others then fit into its memory."""
        for size in reversed(self.sizes):
            self.buffers.clear(size)
            try:
                self._replays[size] = self._record(partial(decode, size, self.buffers))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a kernel does that a graph cannot hold
                raise BackendError(
                    f"a decode step of {size} requests cannot be recorded as a CUDA graph ({error}); "
                    "serve without graphs: --no-graphs"
                ) from error

    def replay(self, size: int) -> None:
        """Computes a step of `size` rows from the buffers' inputs to their logits."""
        self._replays[size]()


class CudaGraphs:
    """Records on a stream of its own, into memory that all its graphs share."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # what happens the first time only (loading and tuning of kernels) must not be recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


def live(run: Callable[[], None]) -> Callable[[], None]:
    """Records nothing: a step over the same buffers, computed anew each time."""
    return run
