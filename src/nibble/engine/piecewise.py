"""Steps of few tokens, recorded as CUDA graphs between their attention operators, which are called each time.

A step that computes tokens of prompts attends in ways that depend on the lengths of its requests, so that no graph can
hold all of it; launched kernel by kernel it keeps the device waiting for the host, until it has a thousand tokens. All
between two operators of attention, or of recurrent states (attention/operators.py), depends on the number of tokens
alone: those are the pieces. Steps are padded to the next size that was recorded.

While a size is recorded, the operators compute nothing: what they are given and what they return has a place in the
graphs' memory, which later graphs use again for other values. Nothing else may be kept of it.

Shape suffixes: T tokens of a recorded size, S rows whose logits are computed, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nibble.attention.operators import Seam
from nibble.attention.step import StepContext
from nibble.engine.graphs import Graphs, parts_of
from nibble.garbage import pause_gc
from nibble.models.forward import Forward

Replay = Callable[[], None]


class Recorder(Protocol):
    """What records pieces."""

    def recording(self) -> AbstractContextManager[None]:
        """Let pieces be recorded in the body."""
        ...

    def begin(self) -> Callable[[], Replay]:
        """Begin a piece; what is returned ends it, and returns what repeats it."""
        ...

    def alias(self, x: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not keep it."""
        ...


@dataclass(slots=True)
class _Dry:
    """Computes a step without attention: what happens the first time only must not be recorded."""

    seams: int = 0

    def __call__(self, seam: Seam) -> Tensor:
        self.seams += 1
        return seam.empty().zero_()


@dataclass(slots=True)
class _Cutter:
    """Ends a piece at each operator, and begins the next behind it."""

    recorder: Recorder
    pieces: list[Replay] = field(default_factory=list)
    seams: list[tuple[Seam, Tensor]] = field(default_factory=list)
    """With where its output goes."""
    _end: Callable[[], Replay] | None = None

    def start(self) -> None:
        self._end = self.recorder.begin()

    def stop(self) -> None:
        """End the last piece."""
        if self._end:
            end, self._end = self._end, None
            self.pieces.append(end())

    def __call__(self, seam: Seam) -> Tensor:
        self.stop()
        self.start()
        # Behind begin(), so that it lies in the graphs' memory too.
        out = seam.empty()
        arguments = tree_map_only(Tensor, self._alias, seam.arguments)
        self.seams.append((seam.of(arguments), self.recorder.alias(out)))
        return out

    def _alias(self, x: Tensor) -> Tensor:
        return self.recorder.alias(x) if x.device.type == "cuda" else x


class _Size:
    """A recorded number of tokens, with its inputs."""

    def __init__(self, tokens: int, rows: int, device: torch.device) -> None:
        self.ids_T, self.positions_T = (
            torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(2)
        )
        self.rows_S = torch.zeros(rows, dtype=torch.int64, device=device)
        self.pieces: Sequence[Replay] = ()
        self.seams: Sequence[tuple[Seam, Tensor]] = ()

    def fill(self, token_ids_T: Tensor, positions_T: Tensor, logit_rows_S: Tensor) -> None:
        """Take the inputs of a step; behind them are tokens 0, and positions of an earlier one, which nothing reads."""
        for target, source in (
            (self.ids_T, token_ids_T), (self.positions_T, positions_T), (self.rows_S, logit_rows_S)
        ):  # fmt: skip
            target[: len(source)].copy_(source)
        self.ids_T[len(token_ids_T) :].zero_()

    def replay(self, ctx: StepContext) -> None:
        """Compute the step from its inputs to its logits."""
        for piece, (seam, out) in zip(self.pieces, self.seams, strict=False):
            piece()
            seam.call(ctx, out)
        self.pieces[-1]()


class PiecewiseSteps:
    """Steps of several numbers of tokens.

    Args:
        graphs: where logits go.
        run: the model's forward function, which calls operators.
    """

    def __init__(self, graphs: Graphs, run: Forward) -> None:
        self._run, self._graphs = run, graphs
        self._recorded = list[_Size]()
        self.states: Tensor | None = None
        """Hidden states [T, X] of the newest step, where a head drafts for the model."""

    @torch.inference_mode()
    def record(self, sizes: Sequence[int], recorder: Recorder, ctx: StepContext) -> None:
        """Record steps of so many tokens.

        Args:
            sizes: tokens, ascending.
            recorder: records pieces.
            ctx: of a step; its requests do not matter.

        Raises:
            Exception: of any kind, whatever a graph cannot hold.
        """
        with recorder.recording(), pause_gc():
            # The largest first: the others then fit into its memory.
            for tokens in reversed(sizes):
                size = _Size(tokens, min(tokens, len(self._graphs.rows)), self._graphs.rows.device)
                dry, cutter = _Dry(), _Cutter(recorder)
                self._compute(size, replace(ctx, cut=dry))
                assert dry.seams, "a model whose attention is called without operators cannot be recorded so"
                cutter.start()
                try:
                    self._compute(size, replace(ctx, cut=cutter))
                except BaseException:
                    with suppress(Exception):
                        cutter.stop()
                    raise
                cutter.stop()
                size.pieces, size.seams = cutter.pieces, cutter.seams
                self._recorded.insert(0, size)

    def _compute(self, size: _Size, ctx: StepContext) -> None:
        with warnings.catch_warnings():
            # Two operators may follow each other.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            output = self._run(size.ids_T[None], size.positions_T[None], size.rows_S, ctx)
        logits_SV, states_TX = parts_of(output)
        self._graphs.store_logits(logits_SV)
        if states_TX is not None:
            if self.states is None:
                self.states = torch.empty_like(states_TX)
            self.states[: len(states_TX)].copy_(states_TX)

    def compute(
        self, run: Forward, token_ids_T: Tensor, positions_T: Tensor, logit_rows_S: Tensor, ctx: StepContext
    ) -> Tensor | None:
        """Return the logits [S, V] of a step, and of rows behind them; None where no recorded size serves it.

        Args:
            run: the forward function that would compute it.
            token_ids_T: its tokens, fewer than those of a size.
            positions_T: of these.
            logit_rows_S: rows whose logits are computed.
            ctx: of the step.
        """
        size = next((size for size in self._recorded if len(size.ids_T) >= len(token_ids_T)), None)
        if size is None or run is not self._run or len(logit_rows_S) > len(size.rows_S):
            return None
        size.fill(token_ids_T, positions_T, logit_rows_S)
        size.replay(ctx)
        return self._graphs.logits
