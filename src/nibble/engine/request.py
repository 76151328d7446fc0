"""A request on its way through the engine: what it asks for, what one step computes of it, and what is answered.

Only the scheduler changes a request's state, lease and tokens; everybody else reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from nibble.cache.lease import Lease
from nibble.config import SamplingParams
from nibble.errors import RequestError
from nibble.model_spec import Phase

if TYPE_CHECKING:
    from nibble.engine.structured_output import Matcher
    from nibble.engine.tokenizer import Detokenizer, StopStrings

FinishReason = Literal["stop", "length", "abort"]
"""Why an answer ended: `stop` is a stop token or stop string, `length` a limit, `abort` the client."""

PHASE_ORDER = (Phase.DECODE, Phase.VERIFY, Phase.EXTEND, Phase.PREFILL)
"""The order of phases in a batch."""
NO_ROWS = range(0)


class State(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    """It holds no pages: it is new, or was preempted."""
    RUNNING = "running"
    FINISHED = "finished"


def truncated(prompt: Sequence[int], keep: int | None, room: int) -> Sequence[int]:
    """Return what is kept of a prompt.

    Args:
        prompt: token ids.
        keep: how many, the last ones; None: all; -1: as many as there is room for.
        room: tokens of a prompt that leave room for an answer.
    """
    return prompt if keep is None else prompt[-(keep if keep > 0 else max(room, 1)) :]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """A prompt and the answer to it.

    Three lengths: num_stored_tokens <= num_computed_tokens <= num_tokens. The first counts tokens whose KV is stored.
    The second adds what a step in flight stores, so that the next step goes on from there. The third counts all tokens
    of prompt and answer, with one that the step in flight samples and whose value the host does not know yet.
    """

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
    bad_words: Sequence[Sequence[int]] = ()
    """Tokens of words that the answer must not have."""
    priority: int = 0
    """A lower one is served first."""

    token_ids: list[int] = field(init=False)
    """Prompt and answer. It is one list all along: do not copy it in a step."""
    arrival: int = field(default=-1, init=False)
    """Place in the order of arrivals; the scheduler sets it, and:"""
    last_length: int = field(default=0, init=False)
    """Tokens, prompt included, with which the answer ends, whatever they are."""
    state: State = field(default=State.WAITING, init=False)
    lease: Lease = field(default_factory=Lease, init=False)
    """Open while the request runs, and empty otherwise."""
    in_flight: ScheduledRequest | None = field(default=None, init=False)
    """The newest work launched and not yet committed."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    prompt_logprobs: list[Logprob] = field(default_factory=list, init=False)
    """Those that are read already, from the first position that was asked for; a preemption loses none."""
    num_prefix_hit_tokens: int = field(default=0, init=False)
    """Prompt tokens from the prefix cache; hits after a preemption do not count."""
    num_preemptions: int = field(default=0, init=False)
    num_accepted_drafts: int = field(default=0, init=False)
    num_rejected_drafts: int = field(default=0, init=False)
    drafting: Any = field(default=None, init=False)
    """What the engine's drafter is known to be worth for it (speculative.DraftLength)."""
    start_time: float | None = field(default=None, init=False)
    """When it was first admitted, by time.monotonic()."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        self.token_ids = list(self.prompt_token_ids)

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
        return self.lease.num_stored_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Return the number of leading tokens whose KV is in the cache once the steps in flight are done, at most."""
        return self.in_flight.end if self.in_flight else self.lease.num_stored_tokens

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, with one that a step in flight samples."""
        # The place of a sampled token is known before its value.
        if self.in_flight and self.in_flight.samples_token:
            return self.in_flight.end + 1
        return len(self.token_ids)

    @property
    def next_logprob_row(self) -> int:
        """Return the first token whose logits give a log-probability of the prompt that is not read yet.

        The last token of the prompt if there is none: its logits are those of the answer.
        """
        end = len(self.prompt_token_ids) - 1
        if self.params.prompt_logprobs is None:
            return end
        # The logits of a token are about the next one, and nothing predicts the first.
        return min(max(self.params.logprob_start_len, 1) - 1 + len(self.prompt_logprobs), end)

    @property
    def num_reusable_tokens(self) -> int:
        """Return how many leading tokens the prefix cache may give: it keeps no logits, so the rest is computed."""
        row = self.next_logprob_row
        return row if row < len(self.prompt_token_ids) - 1 else len(self.token_ids) - 1

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
        # Every step asks this of every request, some times over.
        if item := self.in_flight:
            return item.samples_token or item.end == len(self.token_ids) - 1
        # Not at 0: a prompt of one token is a prefill.
        return 0 < self.lease.num_stored_tokens == len(self.token_ids) - 1


@dataclass(slots=True)  # not frozen: that would take twice the time, for every request of every step
class ScheduledRequest:
    """Tokens of one request that a step computes; all tokens before them are stored in its lease's pages.

    In a replay, its pages hold tokens from `start` on already, and some of them may be all that is computed.

    The host may not know the last of them yet: the step before samples it, and it waits on the device.
    """

    request: Request
    start: int
    """Position of the first token."""
    num_tokens: int
    phase: Phase
    samples_token: bool
    """Whether the request's last token is among them, so that the step samples the next one."""
    logprob_rows: range = NO_ROWS
    """Positions whose logits give log-probabilities of the prompt, each that of the token after it."""
    write_from: int = 0
    """The first position whose KV is written to pages. Those before it are replayed for their exact copies."""
    drafts: tuple[int, ...] = ()
    """The last ones of the tokens, which may be taken back."""
    is_unread: bool = False
    """Whether it is launched before the step in front of it is read: `start` is the most that it may be (settle())."""

    @classmethod
    def next_chunk(cls, request: Request, count: int, drafts: tuple[int, ...] = ()) -> ScheduledRequest:
        """Return the next `count` tokens of `request` that are neither stored nor in flight.

        Args:
            request: whose tokens these are.
            count: how many.
            drafts: tokens that may follow them; `count` is 1 then, of a request that decodes.
        """
        if drafts:
            assert count == 1 and not request.in_flight, "drafts follow a known token"
            return cls.next_known(request, drafts)
        start = request.num_computed_tokens
        num_left = request.num_tokens - start - count
        assert count > 0 and num_left >= 0, f"{count} tokens from {start} on, of {request.num_tokens}"
        is_last = num_left == 0
        phase = Phase.PREFILL if start == 0 else Phase.DECODE if is_last and count == 1 else Phase.EXTEND
        rows = NO_ROWS
        if request.params.prompt_logprobs is not None:
            end = min(start + count, len(request.prompt_token_ids) - 1)
            rows = range(max(start, request.next_logprob_row), end)
        return cls(request, start, count, phase, is_last, rows, max(start, request.lease.replay_until))

    @classmethod
    def next_known(cls, request: Request, drafts: tuple[int, ...]) -> ScheduledRequest:
        """Return the last token of a request that decodes, which is known, with drafts that may follow it."""
        return cls._last_token(request, len(request.token_ids) - 1, drafts)

    @classmethod
    def next_unread(cls, request: Request, drafts: tuple[int, ...]) -> ScheduledRequest:
        """Return the last token that the step in flight brings a request, with drafts that may follow it.

        Until it is known how many drafts of that step count (settle()), it starts where it does if all of them do.
        """
        before = request.in_flight
        assert before is not None and before.phase.decodes
        return cls._last_token(request, before.end, drafts, is_unread=True)

    @classmethod
    def _last_token(
        cls, request: Request, start: int, drafts: tuple[int, ...], *, is_unread: bool = False
    ) -> ScheduledRequest:
        phase = Phase.VERIFY if drafts else Phase.DECODE
        return cls(request, start, 1 + len(drafts), phase, True, NO_ROWS, start, drafts, is_unread)

    def settle(self, start: int) -> None:
        """Note where it starts."""
        self.start = self.write_from = start
        self.is_unread = False

    @property
    def end(self) -> int:
        """Return the number of tokens that are stored once this is done."""
        return self.start + self.num_tokens


def is_ahead(scheduled: Iterable[ScheduledRequest]) -> bool:
    """Return whether a step is launched before it is known where its requests begin."""
    return any(item.is_unread for item in scheduled)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes, in the order of PHASE_ORDER."""

    scheduled: tuple[ScheduledRequest, ...]

    @classmethod
    def from_scheduled(cls, scheduled: Iterable[ScheduledRequest]) -> Batch:
        """Return the batch of `scheduled`, which keep their order within a phase."""
        items = tuple(scheduled)
        if any(item.phase is not items[0].phase for item in items):
            # The sort is stable, so priority stays the order within a phase.
            items = tuple(sorted(items, key=lambda item: PHASE_ORDER.index(item.phase)))
        return cls(items)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token of an answer or prompt. Log-probabilities are the model's own: before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log-probabilities, best first."""
    rank: int = 0
    """Place among all tokens by likelihood, from 1; of equal ones the lower id comes first. 0: not asked for."""


PromptLogprobs = tuple[Logprob | None, ...]
"""One for each token of a prompt: None for the first, which nothing predicts, and before logprob_start_len."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[Logprob, ...] | None = None
    error: str | None = None
    """Why it ended early by no fault of the request, else None."""
    accepted_drafts: int = 0
    """Draft tokens that became part of it."""
    rejected_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """All answers to one prompt."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    cached_tokens: int = 0
    """Prompt tokens of the first answer that came from the prefix cache."""
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        """Return the text of the first answer."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to answer `index`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Comes with the last piece of an answer."""
    logprobs: tuple[Logprob, ...] = ()
    error: str | None = None
    """Why the answer ended before its time."""
    status: int = 500
    """The HTTP status of `error`: 400 where the request is to blame."""
    prompt_logprobs: PromptLogprobs | None = None
    """Come with the first piece of the first answer."""
    stop_string: str | None = None
    """The one that ended the answer."""
    accepted_drafts: int = 0
    """Come with the last piece: draft tokens of the answer that counted, and those that did not."""
    rejected_drafts: int = 0


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Return what consecutive steps added to one answer as one addition."""
    first, *others = deltas
    if not others:
        return first
    return replace(
        others[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt_logprobs=first.prompt_logprobs,
    )


OnOutput = Callable[[Delta], None]
"""Takes the pieces of an answer, in order, from the thread that runs the engine."""


@dataclass(slots=True)
class OutputStream:
    """An answer that is being generated: from sampled tokens to the pieces that a caller gets."""

    request: Request
    index: int
    on_output: OnOutput
    detokenizer: Detokenizer | None
    stop_strings: StopStrings
    final_only: bool
    """Hand out the answer as one piece at its end. Detokenizing token by token takes the host longer than all the
    rest of a step."""
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[Logprob] = field(default_factory=list)
    _is_begun: bool = False
    num_tokens: int = 0
    """Tokens of the answer so far; the request has more where a step adds several."""

    def append(self, token: Logprob, is_last: bool) -> Delta | None:
        """Return what a token adds to the answer, None where there is nothing to hand out yet.

        A stop token adds nothing, unless it is to be left in, nor does any token to an answer of none. A stop string
        in the text sets the finish reason.

        Args:
            token: the sampled token.
            is_last: whether the request has ended with it.
        """
        params = self.request.params
        is_stop = is_last and self.request.finish_reason == "stop"
        self.num_tokens += not is_stop and params.max_tokens > 0
        if params.max_tokens and (not is_stop or params.include_stop_str_in_output):
            self._ids.append(token.token)
            if params.logprobs is not None:
                self._logprobs.append(token)
        if self.final_only and not is_last:
            return None
        return self.flush(self.request.finish_reason if is_last else None)

    def flush(self, reason: FinishReason | None, error: str | None = None, status: int = 500) -> Delta:
        """Return what was not handed out yet.

        Args:
            reason: why the answer ends, None where it goes on.
            error: the message, where it failed.
            status: the HTTP status of the error.
        """
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        self._ids.clear()
        self._logprobs.clear()
        text, is_last = "", reason in {"stop", "length"}
        if self.detokenizer:
            text = self.detokenizer.add(ids)
            # Bytes of an unfinished character are held back until the answer ends.
            if is_last or self.final_only:
                text += self.detokenizer.finish()
        # Until an answer has its fewest tokens, a stop string is text like any other.
        may_stop = self.num_tokens > self.request.params.min_tokens
        text, is_stopped = self.stop_strings.add(text, may_stop=may_stop)
        if is_stopped:
            reason = "stop"
        elif is_last:
            # Text that could have begun a stop string was held back, and is part of the answer after all.
            text += self.stop_strings.finish()
        request = self.request
        return Delta(
            self.index,
            text,
            ids,
            reason,
            logprobs,
            error,
            status,
            self._take_prompt_logprobs(reason),
            self.stop_strings.reached,
            request.num_accepted_drafts if reason else 0,
            request.num_rejected_drafts if reason else 0,
        )

    def _take_prompt_logprobs(self, reason: FinishReason | None) -> PromptLogprobs | None:
        """Return those of the prompt the first time; None where none were asked for, or the answer was given up."""
        is_first, self._is_begun = not self._is_begun, True
        if not is_first or reason == "abort" or self.request.params.prompt_logprobs is None:
            return None
        entries = self.request.prompt_logprobs
        return (*[None] * (len(self.request.prompt_token_ids) - len(entries)), *entries)
