"""Steps that are recorded as CUDA graphs, over buffers that stay where they are, and replayed.

Shape suffixes: B rows of a decode step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nibble.attention.planner.plan import MIN_ROWS
from nibble.engine.page_tables import PageTables
from nibble.engine.step_tokens import VerifyInputs
from nibble.errors import BackendError
from nibble.kernels.capture import end_capture
from nibble.kernels.step_inputs import Verified, settle_inputs
from nibble.kernels.transfer import HostInputs

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function, and returns one that repeats over the same memory all that it did on the device."""


def rows_of(size: int) -> int:
    """Return the rows of a recorded decode step of `size` requests."""
    return max(size, MIN_ROWS)


def parts_of(output: Any) -> tuple[Tensor, Tensor | None]:
    """Return the logits and the hidden states of a pass; most models leave none."""
    return output if isinstance(output, tuple) else (output, None)


class Graphs:
    """Steps of several sizes, over buffers that stay where they are.

    Args:
        sizes: requests of a decode step, ascending; see rows_of().
        device: where steps run.
        record: how a step is recorded.
        verify_sizes: requests and rows of each in a step with drafts, largest first.
    """

    # All tensors of steps are made in inference mode: to a compiled model others look different.
    @torch.inference_mode()
    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        record: Record,
        verify_sizes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.sizes, self.verify_sizes = tuple(sizes), tuple(verify_sizes)
        max_decodes = rows_of(sizes[-1])
        max_rows = max(max_decodes, *(requests * rows for requests, rows in verify_sizes), 0)
        self.inputs = torch.zeros(3 * max_decodes, dtype=torch.int64, device=device)
        """Of a step of B rows: rows of the page tables, positions and token ids, B int64 each."""
        most_inputs = max(map(self.num_inputs, verify_sizes), default=0)
        self.verify_inputs = HostInputs(most_inputs, device)
        """Of a step with drafts, as VerifyInputs has them."""
        self.settled = torch.zeros(most_inputs, dtype=torch.int64, device=device)
        """The same with what the host did not know, where a step may be launched before the last is read."""
        self.cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        """0, 1, 2, ...: where requests of one token begin."""
        self.cu_seqlens_of = {
            (requests, rows): self.cu_seqlens_q[: requests + 1] * rows for requests, rows in verify_sizes
        }
        """The same of each step with drafts. Made here: a rehearsal launches no kernel of ours, so what these make is
        zero, and operators of torch rely on the sum of these lengths."""
        self.rows = torch.arange(max_rows, device=device)
        """0, 1, 2, ...: the rows whose logits are computed."""
        self.logits = torch.empty(0, device=device)
        """[num_ranks * max_rows, V], allocated by the first step."""
        self.num_ranks = 1
        """Whose rows have logits here: of several where each has requests of its own."""
        self.states: Tensor | None = None
        """Hidden states [max_rows, X], allocated by the first step, where a head drafts."""
        self._record = record
        self.is_captured = record is not live
        """Whether steps are recorded, and not computed each time."""
        self._replays: dict[int | tuple[int, int], Callable[[], None]] = {}

    def store_logits(self, logits_BV: Tensor, states_BX: Tensor | None = None) -> None:
        """Copy a step's logits and hidden states, so that their own memory serves the next graph too."""
        if states_BX is not None:
            if self.states is None:
                self.states = states_BX.new_zeros(len(self.rows), states_BX.shape[1])
            self.states[: len(states_BX)].copy_(states_BX)
        if not len(self.logits):
            self.logits = logits_BV.new_empty(self.num_ranks * len(self.rows), logits_BV.shape[1])
        self.logits[: len(logits_BV)].copy_(logits_BV)

    def size_of(self, requests: int) -> int:
        """Return the smallest decode step with room for so many requests."""
        return next(size for size in self.sizes if size >= requests)

    def decode_inputs(self, size: int) -> tuple[Tensor, ...]:
        """Return rows of the page tables, positions and token ids of a step of `size` requests."""
        rows = rows_of(size)
        return self.inputs[: 3 * rows].view(3, rows).unbind()

    def num_inputs(self, size: tuple[int, int]) -> int:
        """Return the inputs of a step with drafts."""
        return VerifyInputs.length(*size)

    def copy_inputs(self, size: tuple[int, int], verified: Verified | None) -> Tensor:
        """Copy the inputs of a step with drafts to the device, and return them there; steps record this.

        Args:
            size: requests and rows of each.
            verified: what the step before brought, where that may be something that the host does not know.
        """
        count, inputs = self.num_inputs(size), self.verify_inputs
        copied = inputs.copy(count)
        if verified is None:
            return copied
        total = inputs.HEADER + count
        settled = self.settled[:count]
        settle_inputs(
            inputs.on_device[:total],
            inputs.sent_ahead[:total],
            settled,
            size,
            self.target_rows_at(size),
            verified,
        )
        return settled

    def target_rows_at(self, size: tuple[int, int]) -> int:
        """Return where it lies in the inputs which row of the page tables each request has in the model's."""
        return 0

    def logit_rows(self, size: tuple[int, int], inputs: VerifyInputs) -> Tensor:
        """Return the rows of a step with drafts whose logits are computed."""
        return inputs.logit_rows_S

    def verify_size(self, requests: int, rows: int) -> tuple[int, int] | None:
        """Return the smallest step with drafts with room for so many requests and rows of each; None if none has it."""
        for size in reversed(self.verify_sizes):
            if size[0] >= requests and size[1] >= rows:
                return size
        return None

    @torch.inference_mode()
    def record(
        self, decode: Callable[[int, Graphs], None], verify: Callable[[tuple[int, int], Graphs], None]
    ) -> None:
        """Record decode(size, graphs) and verify(size, graphs) for all sizes.

        Raises:
            BackendError: a graph cannot hold a step.
        """
        self.verify_inputs.on_host.zero_()  # no request has any token
        # The largest first: the others then fit into its memory.
        for shape in self.verify_sizes:
            requests, rows = shape
            self._record_one(
                shape,
                partial(verify, shape, self),
                f"step of {requests} requests with {rows - 1} drafts each",
            )
        for size in reversed(self.sizes):
            self.inputs.zero_()
            # Positions must be -1, as in padding, since 0 is a real token's position.
            self.decode_inputs(size)[1].fill_(-1)
            self._record_one(size, partial(decode, size, self), f"decode step of {size} requests")

    def compile_accept(self, tables: PageTables) -> None:
        """Compile what notes which drafts count, where that is noted, by requests without tokens."""
        if tables.verified and self.verify_sizes:
            VerifyInputs.of(self.settled, *self.verify_sizes[0]).accept(self.rows, tables)

    def _record_one(self, size: int | tuple[int, int], run: Callable[[], None], name: str) -> None:
        try:
            self._replays[size] = self._record(run)
        # The start explains it by the memory plan (explain_out_of_memory).
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a kernel does that a graph cannot hold
            raise BackendError(
                f"a {name} cannot be recorded as a CUDA graph ({error}); serve without graphs: --no-graphs"
            ) from error

    def replay(self, size: int | tuple[int, int]) -> None:
        """Compute a step of this size from inputs to logits."""
        try:
            self._replays[size]()
        finally:
            # Also of a step that was interrupted once it was launched.
            if not isinstance(size, int):
                self.verify_inputs.note_step()


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

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let pieces be recorded in the body, which runs on a stream of its own."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.empty_cache()  # of what was computed on that stream beside the graphs

    def begin(self) -> Callable[[], Callable[[], None]]:
        """Begin a piece; what is returned ends it, and returns what replays it."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")

        def end() -> Callable[[], None]:
            end_capture(graph, self._stream.device_index, self._memory)
            return graph.replay

        return end

    def alias(self, x: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not keep it: it is another's as soon as x is gone."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        if not x.numel():
            return x
        flat = torch.as_tensor(_Memory(x.data_ptr(), size * x.element_size()), device=x.device)
        return flat.view(x.dtype).as_strided(x.shape, x.stride())


class _Memory:
    """Bytes of the device, for torch to make a tensor of."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 2,
        }  # fmt: skip


def live(run: Callable[[], None]) -> Callable[[], None]:
    """Record nothing: the step over the same buffers is computed each time."""
    return run
