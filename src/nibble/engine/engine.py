"""The engine's loop: schedule, run, sample, commit, and hand out what each answer gained.

Owns Engine and the state of answers (text, stop strings, log-probabilities). What a step computes is decided in
scheduler.py, how in runner.py. Must not know how it was put together (build.py), nor of HTTP.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from nibble.config import SamplingParams
from nibble.engine.batch import Batch
from nibble.engine.outputs import Delta, Logprob
from nibble.engine.request import FinishReason, Request
from nibble.engine.runner import Runner
from nibble.engine.sampler import Sampler
from nibble.engine.scheduler import Scheduler
from nibble.engine.tokenizer import Detokenizer, StopStrings, Tokenizer
from nibble.errors import RequestError

Sink = Callable[[Delta], None]
"""Takes the pieces of an answer, in order, from the thread that runs the engine."""

NOT_A_NUMBER = "the model's logits are not finite: its weights, or the values in its KV cache, overflow"


@dataclass(slots=True)
class _Answer:
    """An answer that is being written."""

    request: Request
    index: int
    sink: Sink
    detokenizer: Detokenizer | None
    stops: StopStrings


@dataclass(slots=True)
class Ticket:
    """What submit() returns: the requests of one prompt, one for each of its n answers."""

    requests: tuple[Request, ...]


@dataclass
class Engine:
    """Serves requests, step by step. Thread-safe: calls wait for the step that is under way.

    namespace: the layout and scale version that all pages carry; eos_ids: tokens that end an answer.
    """

    scheduler: Scheduler
    runner: Runner
    sampler: Sampler
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    namespace: str
    vocab_size: int
    _answers: dict[Request, _Answer] = field(default_factory=dict, init=False)
    _ids: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def submit(self, prompt: Sequence[int], params: SamplingParams, sink: Sink, *, salt: str = "") -> Ticket:
        """Queues a prompt; raises RequestError or PromptTooLong at once where it cannot be served."""
        self.check(prompt, params)
        with self._lock:
            name = next(self._ids)
            requests: list[Request] = []
            for index in range(params.n):
                requests.append(
                    self._request(f"{name}-{index}", prompt, _own(params, index), salt, requests[:1])
                )
            for index, request in enumerate(requests):
                self.scheduler.add(request)
                detokenizer = Detokenizer(self.tokenizer, prompt) if self.tokenizer else None
                self._answers[request] = _Answer(request, index, sink, detokenizer, StopStrings(params.stop))
        return Ticket(tuple(requests))

    def _request(
        self, name: str, prompt: Sequence[int], params: SamplingParams, salt: str, leader: Sequence[Request]
    ) -> Request:
        ends = frozenset() if params.ignore_eos else self.eos_ids
        return Request(
            id=name,
            prompt=prompt,
            params=params,
            namespace=f"{self.namespace}/{salt}",
            stop_ids=frozenset(params.stop_token_ids) | ends,
            after=leader[0] if leader else None,
        )

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The whole cache for the caller: waits for the step under way; RequestError while requests are unfinished."""
        with self._lock:
            if self.busy:
                raise RequestError(
                    "this uses the whole cache: finish or abort the requests that are open first"
                )
            self.scheduler.manager.clear()
            yield

    def abort(self, ticket: Ticket) -> None:
        """Ends a ticket's requests, whatever their state; their pages are free at once."""
        with self._lock:
            for request in ticket.requests:
                if request in self._answers:
                    self._end(request, "abort")

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._answers)

    def step(self) -> None:
        """Computes one batch, if there is anything to compute."""
        with self._lock:
            batch = self.scheduler.schedule()
            if batch is None:
                return
            requests = [work.request for work in batch.works if work.samples]
            try:
                logits = self.runner.forward(batch)
                picks = self.sampler.sample(logits, requests) if requests else []
            except Exception as error:  # whatever it is, only this batch's requests may suffer
                self._fail(batch, f"{type(error).__name__}: {error}")
                return
            self._commit(batch, dict(zip(requests, picks, strict=True)))

    def check(self, prompt: Sequence[int], params: SamplingParams, *, answer: bool = True) -> None:
        """Raises RequestError or PromptTooLong where a prompt (with a token of answer) cannot be served."""
        beyond = [token for token in (*prompt, *params.logit_bias) if not 0 <= token < self.vocab_size]
        if beyond:
            raise RequestError(
                f"token {beyond[0]} is out of range: the vocabulary has {self.vocab_size} tokens"
            )
        if not prompt:
            raise RequestError("the prompt is empty; it must have at least one token")
        self.scheduler.check_length(len(prompt) - (not answer))
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids"
            )

    def _commit(self, batch: Batch, picks: Mapping[Request, Logprob | None]) -> None:
        for request, pick in picks.items():
            if pick is None:
                self._end(request, "abort", NOT_A_NUMBER)
        tokens = {request.id: pick.token for request, pick in picks.items() if pick is not None}
        ended = set(self.scheduler.commit(batch, tokens))
        for request, pick in picks.items():
            if pick is not None and request in self._answers:
                self._tell(self._answers[request], pick, request in ended)

    def _tell(self, answer: _Answer, pick: Logprob, ended: bool) -> None:
        """Sends what a token adds to its answer; a stop token adds nothing."""
        request = answer.request
        stopped_by_token = ended and request.finish_reason == "stop"
        ids = () if stopped_by_token else (pick.token,)
        text = answer.detokenizer.add(ids) if answer.detokenizer else ""
        if ended and answer.detokenizer:
            text += answer.detokenizer.finish()
        text, stopped = answer.stops.add(text)
        reason: FinishReason | None = request.finish_reason if ended else None
        if stopped:
            reason = "stop"
            self.scheduler.finish(request, reason)
        elif ended:
            text += answer.stops.finish()
        if reason:
            del self._answers[request]
        logprobs = (pick,) if ids and request.params.logprobs is not None else ()
        answer.sink(Delta(answer.index, text, ids, reason, logprobs))

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.finish(request, reason)
        answer = self._answers.pop(request)
        answer.sink(Delta(answer.index, "", (), reason, error=error))

    def _fail(self, batch: Batch, error: str) -> None:
        """A step failed: its requests end with the error, all others go on."""
        for work in batch.works:
            self._end(work.request, "abort", error)


def _own(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer `index`: one answer, and a seed of its own."""
    if params.n == 1:
        return params
    seed = params.seed if params.seed is None or not index else hash((params.seed, index)) % (1 << 64)
    return replace(params, n=1, seed=seed)
