"""Recorded decode steps: one CUDA graph for each size, over buffers that stay where they are.

What a step computes is in engine/model_runner.py.

Shape suffixes: B rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from nibble.errors import BackendError

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function, and returns one that repeats over the same memory all that it did on the device."""


class Buffers:
    """What a recorded step reads and writes.

    Args:
        max_rows: most rows of a step.
        device: where steps run.
    """

    # All tensors of steps are made in inference mode: to a compiled model others look different.
    @torch.inference_mode()
    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.inputs = torch.zeros(3 * max_rows, dtype=torch.int64, device=device)
        """Of a step of B rows: rows of the page tables, positions and token ids, B int64 each."""
        self.cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        """0, 1, 2, ...: where requests of one token begin."""
        self.rows = torch.arange(max_rows, device=device)
        """0, 1, 2, ...: the rows whose logits are computed."""
        self.logits = torch.empty(0, device=device)
        """[max_rows, V], allocated by the first step."""

    def clear(self, size: int) -> None:
        """Set the inputs of a step of `size` rows to padding."""
        self.inputs.zero_()
        # Positions are the second third. They must be -1, since 0 is a real token's position.
        self.inputs[size : 2 * size] = -1

    def store_logits(self, logits_BV: Tensor) -> None:
        """Copy a step's logits, so that their own memory serves the next graph too."""
        if not len(self.logits):
            self.logits = logits_BV.new_empty(len(self.rows), logits_BV.shape[1])
        self.logits[: len(logits_BV)].copy_(logits_BV)


class Graphs:
    """Decode steps of several sizes.

    Args:
        sizes: rows of a step, ascending.
        device: where steps run.
        record: how a step is recorded.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, record: Record) -> None:
        self.sizes = tuple(sizes)
        self.buffers = Buffers(self.sizes[-1], device)
        self._record = record
        self._replays: dict[int, Callable[[], None]] = {}

    def size_for(self, count: int) -> int:
        """Return the smallest size with room for `count` requests."""
        return next(size for size in self.sizes if size >= count)

    @torch.inference_mode()
    def record(self, decode: Callable[[int, Buffers], None]) -> None:
        """Record decode(size, buffers) for all sizes.

        Raises:
            BackendError: a graph cannot hold a step.
        """
        # The largest first: the others then fit into its memory.
        for size in reversed(self.sizes):
            self.buffers.clear(size)
            try:
                self._replays[size] = self._record(partial(decode, size, self.buffers))
            # The start explains it by the memory plan (explain_out_of_memory).
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a kernel does that a graph cannot hold
                raise BackendError(
                    f"a decode step of {size} requests cannot be recorded as a CUDA graph ({error}); "
                    "serve without graphs: --no-graphs"
                ) from error

    def replay(self, size: int) -> None:
        """Compute a step of `size` rows from the buffers' inputs to their logits."""
        self._replays[size]()


class CudaGraphs:
    """Records on a stream of its own, into memory that all its graphs share."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record `run` and return what replays it."""
        # The buffers were filled on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # What happens the first time only, loading and tuning of kernels, must not be recorded.
            run()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may call CUDA in the meantime.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


def live(run: Callable[[], None]) -> Callable[[], None]:
    """Record nothing: the step over the same buffers is computed each time."""
    return run
