"""The engine's loop: schedule, launch, read, commit, and hand out what each answer gained.

On a GPU a step is launched before the one before it is read, so that the device never waits for the host: what was
sampled stays there for the next step to take, and what the host makes of it (an end, a stop string, an abort) comes one
step late. Owns Engine. What a step computes is decided in scheduler.py, how in runner.py. Must not know how it was put
together (build.py), nor of HTTP.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from nibble.config import SamplingParams
from nibble.engine.batch import Batch
from nibble.engine.model_runner import ModelRunner
from nibble.engine.output_stream import OnOutput, OutputStream
from nibble.engine.outputs import Logprob
from nibble.engine.request import FinishReason, Request
from nibble.engine.sampled_tokens import SampledTokens
from nibble.engine.sampler import Sampler, needs_output_tokens
from nibble.engine.scheduler import Scheduler
from nibble.engine.structured_output import Grammars, Matcher
from nibble.engine.tokenizer import Detokenizer, StopStrings, Tokenizer
from nibble.engine.warmup import StartupReport
from nibble.errors import RequestError

NOT_A_NUMBER = "the model's logits are not finite: its weights, or the values in its KV cache, overflow"


@dataclass(slots=True)
class RequestHandle:
    """What submit() returns: the requests of one prompt, one for each of its n answers."""

    requests: tuple[Request, ...]


def check_request(
    prompt: Sequence[int], params: SamplingParams, vocabulary: int, tokenizer: Tokenizer | None
) -> None:
    """Raises RequestError where no engine of a model could serve a prompt, whatever its cache holds."""
    beyond = [token for token in (*prompt, *params.logit_bias) if not 0 <= token < vocabulary]
    if beyond:
        raise RequestError(f"token {beyond[0]} is out of range: the vocabulary has {vocabulary} tokens")
    if not prompt:
        raise RequestError("the prompt is empty; it must have at least one token")
    if params.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids")


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched and is not read. requests: those that it samples for, in the order of picks."""

    batch: Batch
    requests: tuple[Request, ...]
    picks: SampledTokens | None

    @property
    def is_needed(self) -> bool:
        """Whether the next step cannot be chosen or sampled before this one is read."""
        return any(needs_output_tokens(request.params) for request in self.requests)


@dataclass
class Engine:
    """Serves requests, step by step. Thread-safe: calls wait for the step that is under way.

    namespace: the layout and scale version that all pages carry; eos_ids: tokens that end an answer. overlap: launch a
    step before the one before it is read. startup: how long its start took. grammars: of structured answers.
    """

    scheduler: Scheduler
    runner: ModelRunner
    sampler: Sampler
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    namespace: str
    vocab_size: int
    overlap: bool = False
    startup: StartupReport = field(default_factory=StartupReport)
    grammars: Grammars | None = None
    _streams: dict[Request, OutputStream] = field(default_factory=dict, init=False)
    _in_flight: deque[InFlightStep] = field(default_factory=deque, init=False)
    _ids: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: OnOutput,
        *,
        salt: str = "",
        priority: int = 0,
        whole: bool = False,
        matcher: Matcher | None = None,
    ) -> RequestHandle:
        """Queues a prompt; raises RequestError or PromptTooLong at once where it cannot be served.

        priority: a lower one is served before. whole: each answer may come as one piece at its end. matcher: of its
        grammar, where that was made before.
        """
        self.check(prompt, params)
        matcher = matcher or self.matcher(params)
        with self._lock:
            name = next(self._ids)
            requests: list[Request] = []
            for index in range(params.n):
                own = self._request(
                    f"{name}-{index}", prompt, _child_params(params, index), salt, requests[:1]
                )
                own.matcher, own.priority = matcher.fork() if matcher else None, priority
                requests.append(own)
            for index, request in enumerate(requests):
                self.scheduler.add(request)
                detokenizer = self._detokenizer(prompt, params)
                stops, late = StopStrings(params.stop), whole and not params.stop
                self._streams[request] = OutputStream(request, index, sink, detokenizer, stops, late)
        return RequestHandle(tuple(requests))

    def _request(
        self, name: str, prompt: Sequence[int], params: SamplingParams, salt: str, leader: Sequence[Request]
    ) -> Request:
        ends = frozenset() if params.ignore_eos and not params.grammar else self.eos_ids
        return Request(
            id=name,
            prompt_token_ids=prompt,
            params=params,
            namespace=f"{self.namespace}/{salt}",
            stop_ids=frozenset(params.stop_token_ids) | ends,
            waits_for=leader[0] if leader else None,
        )

    def _detokenizer(self, prompt: Sequence[int], params: SamplingParams) -> Detokenizer | None:
        shown = frozenset(params.shown_tokens) if params.skip_special_tokens else None
        return Detokenizer(self.tokenizer, prompt, shown) if self.tokenizer else None

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """Of the grammar that an answer must follow; raises RequestError. May be asked in any thread."""
        if params.grammar is None:
            return None
        if self.grammars is None:
            raise RequestError("structured answers need a tokenizer, and this checkpoint has none")
        return self.grammars.matcher(params.grammar)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The whole cache for the caller: waits for the step under way; RequestError while requests are unfinished."""
        with self._lock:
            self._collect()
            if self.busy:
                raise RequestError(
                    "this uses the whole cache: finish or abort the requests that are open first"
                )
            self.scheduler.manager.clear()
            yield

    def abort(self, ticket: RequestHandle) -> None:
        """Ends a ticket's requests, whatever their state; their pages are free at once."""
        with self._lock:
            for request in ticket.requests:
                self._end(request, "abort")

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._streams)

    def step(self) -> None:
        """Launches one batch, if there is anything to compute, and hands out what the one before it sampled."""
        with self._lock:
            self._collect(0 if any(flight.is_needed for flight in self._in_flight) else 1)
            batch = self.scheduler.schedule()
            launched = batch is not None and self._launch(batch)
            self._collect(int(launched))
            if not (self.overlap and self._streams):
                self._collect()

    def check(self, prompt: Sequence[int], params: SamplingParams, *, answer: bool = True) -> None:
        """Raises RequestError or PromptTooLong where a prompt (with a token of answer) cannot be served."""
        check_request(prompt, params, self.vocab_size, self.tokenizer)
        self.scheduler.check_length(len(prompt) - (not answer))

    def _launch(self, batch: Batch) -> bool:
        """Sets a batch to work; False where that failed."""
        works = [work for work in batch.scheduled if work.samples_token]
        requests = tuple(work.request for work in works)
        try:
            logits = self.runner.forward(batch)
            made = [work.end - len(work.request.prompt_token_ids) for work in works]
            picks = self.sampler.pick(logits, requests, made) if works else None
            if picks and self.overlap:
                self.runner.store_sampled(picks.tokens_S)
        except Exception as error:  # whatever it is, only this batch's requests may suffer
            self._fail(batch, error)
            return False
        self.scheduler.launch(batch)
        self._in_flight.append(InFlightStep(batch, requests, picks))
        return True

    def _collect(self, left: int = 0) -> None:
        """Waits for steps under way, oldest first, until `left` are left, and hands out what they sampled.

        A step is forgotten only when it has been read: after an interrupt it is read again.
        """
        while len(self._in_flight) > left:
            flight = self._in_flight[0]
            try:
                picks = flight.picks.read() if flight.picks else []
            except Exception as error:  # an error of the device shows where it is waited for
                self._in_flight.popleft()
                self._fail(flight.batch, error)
            else:
                self._in_flight.popleft()
                self._commit(flight.batch, dict(zip(flight.requests, picks, strict=True)))

    def _commit(self, batch: Batch, picks: Mapping[Request, Logprob | None]) -> None:
        for request, pick in picks.items():
            if pick is None:
                self._end(request, "abort", NOT_A_NUMBER)
            elif request.matcher and request.matcher.error:
                self._end(
                    request, "abort", f"the grammar cannot be followed on: {request.matcher.error}", 400
                )
        tokens = {request.id: pick.token for request, pick in picks.items() if pick is not None}
        ended = set(self.scheduler.commit(batch, tokens))
        failed: list[Exception] = []
        for request, pick in picks.items():
            if pick is not None and request in self._streams:
                try:
                    self._emit(self._streams[request], pick, request in ended)
                except Exception as error:  # of whoever takes the answer: the others go on
                    self._discard(request)
                    failed.append(error)
        if failed:
            raise failed[0]

    def _emit(self, answer: OutputStream, pick: Logprob, ended: bool) -> None:
        """Hands out what a token adds to its answer."""
        piece = answer.append(pick, ended)
        if piece is None:
            return
        if piece.finish_reason:
            self.scheduler.finish(answer.request, piece.finish_reason)
            del self._streams[answer.request]
        answer.on_output(piece)

    def _end(
        self, request: Request, reason: FinishReason, error: str | None = None, status: int = 500
    ) -> None:
        """Ends a request before its time, unless it has ended while a step of it was under way."""
        if request in self._streams:
            self.scheduler.finish(request, reason)
            answer = self._streams.pop(request)
            answer.on_output(answer.end(reason, error, status))

    def _discard(self, request: Request) -> None:
        """Ends a request whose answer nobody takes any more."""
        if self._streams.pop(request, None):
            self.scheduler.finish(request, "abort")

    def _fail(self, batch: Batch, error: Exception) -> None:
        """A step failed: its requests end with the error, all others go on."""
        for work in batch.scheduled:
            self._end(work.request, "abort", f"{type(error).__name__}: {error}")


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer `index`: one answer, and a seed of its own."""
    if params.n == 1:
        return params
    seed = params.seed if params.seed is None or not index else hash((params.seed, index)) % (1 << 64)
    return replace(params, n=1, seed=seed)
