"""What one step computes: plain numbers that the runner turns into tensors.

Owns Work and Batch, both frozen. Must not know how the choice was made (scheduler.py), nor of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nibble.attention.planner.support import Phase
from nibble.engine.request import Request

ORDER = (Phase.DECODE, Phase.EXTEND, Phase.PREFILL)


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Compute tokens[start : start + count] of `request`; all before `start` is stored in its lease's pages.

    The value of the last one may be unknown to the host still: the step before samples it, and it waits on the device.
    samples: the last token is among them, so the step must sample the next one.
    """

    request: Request
    start: int
    num_tokens: int
    phase: Phase
    samples_token: bool

    @classmethod
    def next_chunk(cls, request: Request, count: int) -> ScheduledRequest:
        """The next `count` tokens of `request` that are neither stored nor under way."""
        start = request.num_computed_tokens
        left = request.num_tokens - start - count
        assert count > 0 and left >= 0, f"{count} tokens from {start} on, of {request.num_tokens}"
        last = left == 0
        if start == 0:
            return cls(request, start, count, Phase.PREFILL, last)
        return cls(request, start, count, Phase.DECODE if last and count == 1 else Phase.EXTEND, last)

    @property
    def end(self) -> int:
        """How many tokens are stored once this is done."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The works of one step, those of one phase side by side: first DECODE, then EXTEND, then PREFILL."""

    scheduled: tuple[ScheduledRequest, ...]

    @classmethod
    def from_scheduled(cls, works: Iterable[ScheduledRequest]) -> Batch:
        """The batch of `works`, which keep their order within a phase."""
        parts: dict[Phase, list[ScheduledRequest]] = {phase: [] for phase in ORDER}
        for work in works:
            parts[work.phase].append(work)
        return cls(tuple(work for phase in ORDER for work in parts[phase]))

    def in_phase(self, phase: Phase) -> tuple[ScheduledRequest, ...]:
        """The works of one phase."""
        return tuple(work for work in self.scheduled if work.phase is phase)

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(work.num_tokens for work in self.scheduled)
