"""One request on its way through the engine, and what one step computes of which requests.

Only the scheduler changes a request's state, lease and tokens; everybody else reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from nibble.attention.planner.support import Phase
from nibble.cache.manager import Lease
from nibble.config import SamplingParams
from nibble.errors import RequestError

if TYPE_CHECKING:
    from nibble.engine.structured_output import Matcher

FinishReason = Literal["stop", "length", "abort"]
"""Why an answer ended: `stop` is a stop token or stop string, `length` a limit, `abort` the client."""

PHASE_ORDER = (Phase.DECODE, Phase.EXTEND, Phase.PREFILL)
"""The order of phases in a batch."""


class State(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    """It holds no pages: it is new, or was preempted."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """A prompt and the answer to it."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = ""
    """Only requests of the same namespace share pages: layout fingerprint, scale version, cache salt."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer and are not part of it."""
    waits_for: Request | None = None
    """Do not start before this request's prompt is stored. Answers 2..n to one prompt share its pages."""
    matcher: Matcher | None = None
    """Follows the answer through its grammar."""
    priority: int = 0
    """A lower one is served first."""

    token_ids: list[int] = field(init=False)
    """Prompt and answer. It is one list all along: do not copy it in a step."""
    arrival: int = field(default=-1, init=False)
    """Place in the order of arrivals; the scheduler sets it."""
    state: State = field(default=State.WAITING, init=False)
    lease: Lease | None = field(default=None, init=False)
    in_flight: ScheduledRequest | None = field(default=None, init=False)
    """The newest work launched and not yet committed."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    num_prefix_hit_tokens: int = field(default=0, init=False)
    """Prompt tokens from the prefix cache; hits after a preemption do not count."""
    num_preemptions: int = field(default=0, init=False)
    start_time: float | None = field(default=None, init=False)
    """When it was first admitted, by time.monotonic()."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        self.token_ids = list(self.prompt_token_ids)

    @property
    def scheduling_key(self) -> tuple[int, int]:
        """Return the place among requests: the least is served first, and loses its pages last."""
        return self.priority, self.arrival

    @property
    def output_token_ids(self) -> list[int]:
        """Return a copy of the tokens generated so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_stored_tokens(self) -> int:
        """Return the number of leading tokens whose KV is in the cache."""
        return self.lease.num_stored_tokens if self.lease else 0

    @property
    def num_computed_tokens(self) -> int:
        """Return the number of leading tokens whose KV is in the cache once the steps in flight are done."""
        return self.in_flight.end if self.in_flight else self.num_stored_tokens

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, with one that a step in flight samples."""
        # The place of a sampled token is known before its value.
        if self.in_flight and self.in_flight.samples_token:
            return self.in_flight.end + 1
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Return whether the answer has ended."""
        return self.state is State.FINISHED

    @property
    def can_start(self) -> bool:
        """Return whether the request that this one waits for has stored its prompt, or has ended."""
        # A first output token means that the whole prompt is stored.
        return self.waits_for is None or self.waits_for.is_finished or self.waits_for.num_output_tokens > 0

    @property
    def is_decoding(self) -> bool:
        """Return whether all tokens but the last are stored, or will be."""
        # Not at 0: a prompt of one token is a prefill.
        return 0 < self.num_computed_tokens == self.num_tokens - 1


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Tokens of one request that a step computes; all tokens before them are stored in its lease's pages.

    The host may not know the last of them yet: the step before samples it, and it waits on the device.
    """

    request: Request
    start: int
    """Position of the first token."""
    num_tokens: int
    phase: Phase
    samples_token: bool
    """Whether the request's last token is among them, so that the step samples the next one."""

    @classmethod
    def next_chunk(cls, request: Request, count: int) -> ScheduledRequest:
        """Return the next `count` tokens of `request` that are neither stored nor in flight."""
        start = request.num_computed_tokens
        num_left = request.num_tokens - start - count
        assert count > 0 and num_left >= 0, f"{count} tokens from {start} on, of {request.num_tokens}"
        is_last = num_left == 0
        if start == 0:
            return cls(request, start, count, Phase.PREFILL, is_last)
        return cls(request, start, count, Phase.DECODE if is_last and count == 1 else Phase.EXTEND, is_last)

    @property
    def end(self) -> int:
        """Return the number of tokens that are stored once this is done."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes, in the order of PHASE_ORDER."""

    scheduled: tuple[ScheduledRequest, ...]

    @classmethod
    def from_scheduled(cls, scheduled: Iterable[ScheduledRequest]) -> Batch:
        """Return the batch of `scheduled`, which keep their order within a phase."""
        # The sort is stable, so priority stays the order within a phase.
        return cls(tuple(sorted(scheduled, key=lambda item: PHASE_ORDER.index(item.phase))))

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the step computes."""
        return sum(item.num_tokens for item in self.scheduled)
