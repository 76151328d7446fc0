"""What one step computes: plain numbers that the runner turns into tensors.

Owns Work and Batch, both frozen. Must not know how the choice was made (scheduler.py), nor of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nibble.attention.capability import Phase
from nibble.engine.request import Request

ORDER = (Phase.DECODE, Phase.EXTEND, Phase.PREFILL)


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens[start : start + count] of `request`; all before `start` is stored in its lease's pages.

    The value of the last one may be unknown to the host still: the step before samples it, and it waits on the device.
    samples: the last token is among them, so the step must sample the next one.
    """

    request: Request
    start: int
    count: int
    phase: Phase
    samples: bool

    @classmethod
    def next(cls, request: Request, count: int) -> Work:
        """The next `count` tokens of `request` that are neither stored nor under way."""
        start = request.computed
        left = request.length - start - count
        assert count > 0 and left >= 0, f"{count} tokens from {start} on, of {request.length}"
        last = left == 0
        if start == 0:
            return cls(request, start, count, Phase.PREFILL, last)
        return cls(request, start, count, Phase.DECODE if last and count == 1 else Phase.EXTEND, last)

    @property
    def end(self) -> int:
        """How many tokens are stored once this is done."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """The works of one step, those of one phase side by side: first DECODE, then EXTEND, then PREFILL."""

    works: tuple[Work, ...]

    @classmethod
    def of(cls, works: Iterable[Work]) -> Batch:
        """The batch of `works`, which keep their order within a phase."""
        parts: dict[Phase, list[Work]] = {phase: [] for phase in ORDER}
        for work in works:
            parts[work.phase].append(work)
        return cls(tuple(work for phase in ORDER for work in parts[phase]))

    def part(self, phase: Phase) -> tuple[Work, ...]:
        """The works of one phase."""
        return tuple(work for work in self.works if work.phase is phase)

    @property
    def tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(work.count for work in self.works)
