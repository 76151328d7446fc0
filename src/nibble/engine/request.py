"""One request on its way through the engine.

Owns Request and its states. The scheduler changes a request's state, lease and tokens; everybody else reads
them. Must not know of text, models or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from nibble.cache.manager import Lease
from nibble.config import SamplingParams
from nibble.errors import RequestError

if TYPE_CHECKING:
    from nibble.engine.batch import ScheduledRequest
    from nibble.engine.structured_output import Matcher

FinishReason = Literal["stop", "length", "abort"]
"""Why an answer ended: `stop` is a stop token or stop string, `length` a limit, `abort` the client."""


class State(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"  # no pages held: new, or preempted
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """A prompt and the answer to it.

    namespace: only requests of the same namespace share pages (layout fingerprint, scale version, cache
    salt). stop_ids: tokens that end the answer and are not part of it. after: wait until this request's
    prompt is stored. For the answers 2..n to one prompt, which share its pages. matcher: of its grammar. priority: a
    lower one is served before.

    tokens: prompt and answer; the same list all along, do not copy it in a step. arrival: set by the
    scheduler. ahead: the newest work that is under way, launched and not committed. cached: prompt tokens
    that came from the prefix cache, preemptions: how often it lost its pages. started: when it was first admitted, by
    time.monotonic().
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = ""
    stop_ids: frozenset[int] = frozenset()
    waits_for: Request | None = None
    matcher: Matcher | None = None
    priority: int = 0

    token_ids: list[int] = field(init=False)
    arrival: int = field(default=-1, init=False)
    state: State = field(default=State.WAITING, init=False)
    lease: Lease | None = field(default=None, init=False)
    in_flight: ScheduledRequest | None = field(default=None, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    num_prefix_hit_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    started: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        self.token_ids = list(self.prompt_token_ids)

    @property
    def scheduling_key(self) -> tuple[int, int]:
        """Its place among requests: the least is served first, and the last to lose its pages."""
        return self.priority, self.arrival

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far (a copy)."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_stored_tokens(self) -> int:
        """Leading tokens whose KV is in the cache."""
        return self.lease.num_stored_tokens if self.lease else 0

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in the cache, or will be once what is under way is done."""
        return self.in_flight.end if self.in_flight else self.num_stored_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens in all, one included that a step under way will sample: its place is known before its value."""
        return (
            self.in_flight.end + 1 if self.in_flight and self.in_flight.samples_token else len(self.token_ids)
        )

    @property
    def is_finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def can_start(self) -> bool:
        """Whether it may start: the request it comes after has its prompt stored, or has ended."""
        return self.waits_for is None or self.waits_for.is_finished or self.waits_for.num_output_tokens > 0
