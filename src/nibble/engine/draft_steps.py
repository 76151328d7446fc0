"""Steps of a head that drafts: hidden states that wait for them, and those that are recorded.

A draft is a chain on the device. Its first step computes the rows that are new of each request, and draws a token
behind the last of them; each step that follows computes the row of the token that was drawn. Token, position and hidden
state go from one to the next in buffers, so that the host reads all drafts at once, at the end, or behind the step
that verifies them:

    waiting hidden states -> first -> token, state -> next -> token, state -> next -> ...

A recorded first step is one that verifies drafts (ModelRunner): as many rows for each request, of which the new ones
are the last. Those that follow are decode steps.

A chain may be launched before the host has read which of the last drafts count: how many rows are new, and their
tokens, the first step then takes from what the step that verifies those leaves on the device. So there are two chains
at a time that the host has not read, and two buffers that they are drawn into.

Shape suffixes: T tokens of a step, B requests, L rows of each, S rows that are sampled, H hidden size, X values of the
model's hidden states, V vocabulary, N hidden states that can wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nibble.attention.step import StepContext
from nibble.cache.lease import Lease
from nibble.drafts import MAX_DRAFTS, WAITING_STATES
from nibble.engine.graphs import Graphs, Record, rows_of
from nibble.engine.model_runner import ModelRunner
from nibble.engine.page_tables import PackedInts, PageTables
from nibble.engine.step_tokens import VerifyInputs
from nibble.kernels import topk
from nibble.kernels.step_inputs import Verified
from nibble.kernels.transfer import to_device
from nibble.models.forward import Forward, plain
from nibble.models.head_model import draft_ids


class WaitingStates:
    """Hidden states of rows that a head has not computed yet: the newest of each request, by position.

    They wait as the model leaves them, and are combined for the head when they are read: those of several steps at once
    where nobody drafts.

    Args:
        requests: that may have some at a time.
        head: that reads them.
    """

    @torch.inference_mode()
    def __init__(self, requests: int, head: Any) -> None:
        shape = requests * WAITING_STATES, head.state_size
        self.states_NX = torch.zeros(shape, dtype=head.dtype, device=head.device)
        self._head = head
        self._free = list(range(requests))

    def open(self) -> int | None:
        """Return the slot of another request, None where there is none left."""
        return self._free.pop() if self._free else None

    def close(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    def places(self, slot: int, start: int, stop: int) -> list[int]:
        """Return where hidden states of these positions lie."""
        first = slot * WAITING_STATES
        return [first + position % WAITING_STATES for position in range(start, stop)]

    def store(self, places: Sequence[int] | Tensor, states_TX: Tensor) -> None:
        """Keep hidden states of the model at these places."""
        if not isinstance(places, Tensor):
            places = to_device(places, torch.int64, states_TX.device)
        self.states_NX.index_copy_(0, places, states_TX)

    def load(self, places: Sequence[int]) -> Tensor:
        """Return those at these places, combined for the head [T, H]."""
        places_T = to_device(places, torch.int64, self.states_NX.device)
        return self._head.combine(self.states_NX.index_select(0, places_T))

    def at(self, slots_B: Tensor, positions_T: Tensor) -> Tensor:
        """Return those of some requests, which have as many positions each, combined for the head [T, H]."""
        places_BL = positions_T.view(len(slots_B), -1) % WAITING_STATES + slots_B[:, None] * WAITING_STATES
        return self._head.combine(self.states_NX.index_select(0, places_BL.flatten()))


class HeadForward:
    """Runs a head for one step: the hidden states of its rows come and go beside the step's numbers.

    Args:
        head: as a model.
        run: how it is run; None: as it is written.
        requests: that it may draft for at a time.
        verified: what the model's last step with drafts brought, where it notes that.
    """

    def __init__(
        self, head: Any, run: Forward | None, requests: int, verified: Verified | None = None
    ) -> None:
        self.head, self._run, self.verified = head, run or plain(head), verified
        self.waiting = WaitingStates(requests, head)
        self.draft_ids = draft_ids(head, head.config.vocab_size)
        self.graphs: DraftGraphs | None = None
        """Steps of drafts over stable buffers, after record()."""
        self.input_states: Tensor | Callable[[Tensor], Tensor] | None = None
        """[T, H], of the next step, or a function that returns them by the positions of rows; None: a test, which has
        none."""

    def __call__(
        self, ids: Tensor, positions: Tensor, rows_S: Tensor, ctx: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Return logits [S, V of drafts], and hidden states [S, H] for the next draft."""
        inputs, self.input_states = self.input_states, None
        if inputs is None:
            states_TH = self.waiting.states_NX.new_zeros(ids.shape[1], self.head.config.hidden_size)
        elif isinstance(inputs, Tensor):
            # A row that is alone comes twice (ModelRunner).
            missing = ids.shape[1] - len(inputs)
            states_TH = torch.cat([inputs, inputs[-1:].expand(missing, -1)]) if missing else inputs
        else:
            states_TH = inputs(positions[0])
        logits_SV, states_SH = self._run(ids, positions, rows_S, ctx, states_TH)
        return logits_SV, states_SH

    def record(self, runner: ModelRunner, graphs: DraftGraphs) -> None:
        """Record steps of drafts; from now on these are replayed."""
        graphs.record(partial(graphs.follow, runner), partial(graphs.begin, runner))
        self.graphs = graphs


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows of a request that the first step of a draft computes."""

    lease: Lease
    slot: int
    """Of its hidden states that wait."""
    start: int
    ids: list[int]
    """Empty where the host does not know yet which they are, and how many."""
    target_row: int = 0
    """Then, the request's row of the model's page tables."""


class Stopwatch:
    """Measures what a device does between start() and stop()."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._times = [0.0, 0.0]

    def start(self) -> None:
        """Begin with what is launched next."""
        self._note(0)

    def stop(self) -> None:
        """End behind what was launched last."""
        self._note(1)

    def _note(self, place: int) -> None:
        self._times[place] = perf_counter()
        if self._events:
            self._events[place].record()

    @property
    def seconds(self) -> float:
        """Return what it took; the device has done it."""
        if self._events:
            return self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._times[1] - self._times[0]


class DraftGraphs(Graphs):
    """The steps of drafts, of several sizes.

    Args:
        sizes: requests of a step that follows, ascending.
        device: where steps run.
        record: how a step is recorded.
        verify_sizes: requests and rows of each in a first step, largest first.
        forward: of the head.
    """

    @torch.inference_mode()
    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        record: Record,
        verify_sizes: Sequence[tuple[int, int]],
        forward: HeadForward,
    ) -> None:
        # No chain has more requests than a first step.
        largest = max(requests for requests, _ in verify_sizes)
        sizes = [size for size in sizes if size <= largest] or sizes[:1]
        super().__init__(sizes, device, record, verify_sizes)
        self._forward = forward
        self.most = min(sizes[-1], largest)
        """Requests that a chain can have."""
        self.longest = max(length for _, length in verify_sizes)
        """Rows that a request can have in a first step, if these are few requests."""
        rows = max(rows_of(sizes[-1]), largest)
        self.inputs = torch.zeros(4, rows, dtype=torch.int64, device=device)
        """Of the step that follows: rows of the page tables, positions, token ids, and the chances of these, as bits of
        float64."""
        self.drawn = torch.zeros(2, MAX_DRAFTS, 2, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        """Tokens and chances of the steps of two chains, on the host."""
        # The same without the price of operators.
        self._drawn_tokens = self.drawn[:, :, 0].numpy()
        self._drawn_chances = self.drawn[:, :, 1].view(torch.float64).numpy()
        self.stopwatches = Stopwatch(device), Stopwatch(device)
        self._last_rows = {
            (requests, length): torch.arange(length - 1, requests * length, length, device=device)
            for requests, length in verify_sizes
        }

    def num_inputs(self, size: tuple[int, int]) -> int:
        """Return the inputs of a first step: as VerifyInputs has them, slots, and rows of the model's page tables."""
        return super().num_inputs(size) + 2 * size[0]

    def target_rows_at(self, size: tuple[int, int]) -> int:
        """Return where it lies in the inputs which row of the page tables each request has in the model's."""
        return super().num_inputs(size) + size[0]

    def copy_inputs(self, size: tuple[int, int], verified: Verified | None) -> Tensor:
        """Copy the inputs of a first step to the device; what the model's step brought, the head's own does not say."""
        return super().copy_inputs(size, self._forward.verified)

    def length(self, requests: int) -> int:
        """Return the most rows of each request in a first step of so many; 0 where none has room for them."""
        return max((length for most, length in self.verify_sizes if most >= requests), default=0)

    def decode_inputs(self, size: int) -> tuple[Tensor, ...]:
        """Return rows of the page tables, positions and token ids of a step that follows."""
        return self.inputs[:3, : rows_of(size)].unbind()

    def logit_rows(self, size: tuple[int, int], inputs: VerifyInputs) -> Tensor:
        """Return the last row of each request."""
        return self._last_rows[size]

    def store_logits(self, logits_BV: Tensor, states_BX: Tensor | None = None) -> None:
        """Draw the likeliest token of each row for the step that follows, with its hidden state."""
        super().store_logits(logits_BV, states_BX)
        topk.draw_likeliest(logits_BV, self._forward.draft_ids, *self._drawn(len(logits_BV)))

    def store_drawn(self, tokens_B: Tensor, chances_B: Tensor) -> None:
        """Let the step that follows read these tokens."""
        tokens, chances = self._drawn(len(tokens_B))
        tokens.copy_(tokens_B)
        chances.copy_(chances_B)

    def _drawn(self, size: int) -> tuple[Tensor, Tensor]:
        """Return where tokens and their chances are stored."""
        return self.inputs[2, :size], self.inputs[3, :size].view(torch.float64)

    @torch.inference_mode()
    def begin(self, runner: ModelRunner, size: tuple[int, int], _: Graphs) -> None:
        """Compute the first step of a chain, from buffer to buffer; graphs record this."""
        first, has_targets = super().num_inputs(size), self._forward.verified is not None
        # Where the step finds them once it has copied them.
        there = self.settled if has_targets else self.verify_inputs.on_device[self.verify_inputs.HEADER :]
        inputs, slots_B = VerifyInputs.of(there, *size), there[first : first + size[0]]
        self._forward.input_states = partial(self._forward.waiting.at, slots_B)
        runner._verify(size, self)
        self.inputs[0, : size[0]].copy_(inputs.rows_B)
        # The next row is that of the token just drawn.
        self.inputs[1].fill_(-1)
        self.inputs[1, : size[0]].copy_(torch.where(inputs.new_B > 0, inputs.ends_B, -1))

    @torch.inference_mode()
    def follow(self, runner: ModelRunner, size: int, _: Graphs) -> None:
        """Compute a step that follows, from buffer to buffer; graphs record this."""
        assert self.states is not None
        rows = rows_of(size)
        self._forward.input_states = self.states[:rows]
        runner._decode(size, self)
        positions_B = self.inputs[1, :rows]
        positions_B += positions_B >= 0

    def replay_first(self, tables: PageTables, new: Sequence[NewRows], most: int | None = None) -> None:
        """Compute the first step of a chain.

        Args:
            tables: of the head.
            new: rows of requests.
            most: the most that any has, where the host does not know them yet.
        """
        longest = max([len(one.ids) for one in new]) if most is None else most
        size = next(
            size for size in reversed(self.verify_sizes) if size[0] >= len(new) and size[1] >= longest
        )
        (requests, length), packed, ids = size, PackedInts(), list[int]()
        padding = [0] * (requests - len(new))
        for one in new:
            ids += (one.ids[:1] or [0]) * (length - len(one.ids))
            ids += one.ids
        is_ahead = most is not None
        with tables.sending():
            rows = [tables.row(one.lease) for one in new]
            updates = tables.pack_updates(packed)
            inputs = packed.add_inputs(
                [
                    *rows, *[tables.padding_row] * len(padding),
                    *[-1 if is_ahead else one.start + len(one.ids) for one in new], *padding,
                    *[-1 if is_ahead else len(one.ids) for one in new], *padding,
                    *ids, *padding * length,
                    *[0] * (requests * length),
                    *[one.slot for one in new], *padding,
                    *[one.target_row for one in new], *padding,
                ]
            )  # fmt: skip
            tables.send_inputs(packed, inputs, self.verify_inputs, updates, is_ahead=is_ahead)
        self.replay(size)

    def replay_next(self, requests: int) -> None:
        """Compute the step that follows for so many requests."""
        self.replay(next(size for size in self.sizes if size >= requests))

    def keep(self, buffer: int, step: int, drafts_R: Tensor | None = None) -> None:
        """Let the host have what a step of a chain has drawn, and the step that verifies it, by drafts_R."""
        self.drawn[buffer, step].copy_(self.inputs[2:], non_blocking=True)
        if drafts_R is not None:
            count = min(len(drafts_R), self.inputs.shape[1])
            drafts_R[:count].copy_(self.inputs[2, :count])

    def wait(self) -> None:
        """Wait for what was drawn."""
        if self.inputs.is_cuda:
            torch.cuda.current_stream(self.inputs.device).synchronize()

    def read(self, buffer: int, steps: int, requests: int) -> list[tuple[list[int], list[float]]]:
        """Return the tokens and chances of each step of a chain, which have come."""
        both = self._drawn_tokens[buffer], self._drawn_chances[buffer]
        tokens, chances = (drawn[:steps, :requests].tolist() for drawn in both)
        return list(zip(tokens, chances, strict=True))
