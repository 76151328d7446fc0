"""The engine's loop: schedule, launch, collect, and emit what each answer gained.

On a GPU a step is launched before the one before it is read, so that the device never waits for the host. Sampled
tokens stay on the device for the next step to take. What the host concludes from them (an end, a stop string, an abort)
takes effect one step late.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from nibble.cache.events import CacheEvents, Sink
from nibble.config import SamplingParams
from nibble.engine.drafters.base import DraftTask
from nibble.engine.following import (
    can_follow,
    can_run_ahead,
    follow,
    follow_unread,
    reserve_unread,
    room_ahead,
)
from nibble.engine.in_flight import Gains, InFlightStep, StepClock, by_request, sample, score_prompts, scored
from nibble.engine.model_runner import ModelRunner
from nibble.engine.ranks import Ranks
from nibble.engine.request import (
    Batch,
    Logprob,
    OnOutput,
    OutputStream,
    Request,
    truncated,
)
from nibble.engine.sampler import Sampler, needs_output_tokens
from nibble.engine.scheduler import Scheduler, default_reusable
from nibble.engine.speculative import Speculation
from nibble.engine.startup_report import StartupReport
from nibble.engine.structured_output import Grammars, Matcher
from nibble.engine.tokenizer import Detokenizer, StopStrings, Tokenizer
from nibble.errors import RankError, RequestError
from nibble.kernels.topk import NO_TOKEN
from nibble.models.generation_config import SamplingDefaults

CLOSED = "the LLM was closed before this answer ended"
NOT_A_NUMBER = "the model's logits are not finite: its weights, or the values in its KV cache, overflow"


def check_request(
    prompt: Sequence[int], params: SamplingParams, vocab_size: int, tokenizer: Tokenizer | None
) -> None:
    """Check what needs no cache: token ids and parameters.

    Args:
        prompt: token ids.
        params: of the request.
        vocab_size: tokens of the model.
        tokenizer: the model's, if it has one.

    Raises:
        RequestError: no engine of this model could serve the prompt.
    """
    outside = [token for token in (*prompt, *params.logit_bias) if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(f"token {outside[0]} is out of range: the vocabulary has {vocab_size} tokens")
    if not prompt:
        raise RequestError("the prompt is empty; it must have at least one token")
    if params.logprob_start_len >= len(prompt):
        raise RequestError(
            f"logprob_start_len is {params.logprob_start_len}, and the prompt has {len(prompt)} tokens: it must be less"
        )
    if params.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids")
    if params.bad_words and tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and this checkpoint has none; use logit_bias")


@dataclass
class Engine:
    """Serves requests, step by step. Thread-safe: calls wait for the step that is in progress."""

    scheduler: Scheduler
    runner: ModelRunner
    sampler: Sampler
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    """Tokens that end an answer."""
    namespace: str
    """The layout and scale version of all pages."""
    vocab_size: int
    overlap: bool = False
    """Launch a step before the one before it is read."""
    startup: StartupReport = field(default_factory=StartupReport)
    grammars: Grammars | None = None
    """Makes matchers of structured answers."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """What callers take for what a request leaves out."""
    speculation: Speculation | None = None
    """Who drafts tokens, if anybody does."""
    ranks: Ranks | None = None
    """The other processes, where the model is divided among GPUs."""
    cache_events: CacheEvents | None = field(default=None, init=False)
    """Records what happens to the prefix cache, where somebody observes it."""
    _streams: dict[Request, OutputStream] = field(default_factory=dict, init=False)
    _in_flight: deque[InFlightStep] = field(default_factory=deque, init=False)
    _unstored: deque[Gains] = field(default_factory=deque, init=False)
    """What steps brought that the scheduler has not stored: that takes time, in which the next one may be computed."""
    _gains: deque[Gains] = field(default_factory=deque, init=False)
    """What steps brought that is to be counted and told."""
    _pending: deque[tuple[Request, Sequence[Logprob], bool]] = field(default_factory=deque, init=False)
    """Of a step that is being told: what requests gained, and whether they have ended with it."""
    _clock: StepClock = field(default_factory=StepClock, init=False)
    _noted_at: float = field(default=0.0, init=False)
    """When the newest step was launched, as the policy of drafts has it."""
    _ids: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_output: OnOutput,
        *,
        salt: str = "",
        priority: int = 0,
        final_only: bool = False,
        matcher: Matcher | None = None,
    ) -> tuple[Request, ...]:
        """Queue a prompt and return its requests, one for each of its n answers.

        Args:
            prompt: token ids.
            params: of the request.
            on_output: takes the pieces of all answers.
            salt: only requests of the same salt share pages.
            priority: a lower one is served first.
            final_only: each answer may come as one piece at its end.
            matcher: of the grammar, where it was made before.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
            PromptTooLong: the prompt has too many tokens for the cache or the model.
        """
        prompt = truncated(prompt, params.truncate_prompt_tokens, self.scheduler.limit - params.max_tokens)
        self.check(prompt, params, answer=params.max_tokens > 0)
        bad_words = self.tokenizer.token_sequences(params.bad_words) if self.tokenizer else ()
        matcher = matcher or self.matcher(params)
        # A grammar that is complete allows the end token alone, so that one cannot be ignored.
        ends = frozenset() if params.ignore_eos and not params.grammar else self.eos_ids
        requests: list[Request] = []
        with self._lock:
            number = next(self._ids)
            for index in range(params.n):
                request = Request(
                    id=f"{number}-{index}",
                    prompt_token_ids=prompt,
                    params=_child_params(params, index),
                    namespace=f"{self.namespace}/{salt}",
                    stop_ids=frozenset(params.stop_token_ids) | ends,
                    # All answers but the first wait for its prompt, whose pages they share.
                    waits_for=requests[0] if requests else None,
                    # A matcher keeps one answer's place in the grammar, so each answer has its own.
                    matcher=matcher.fork() if matcher else None,
                    bad_words=bad_words,
                    priority=priority,
                )
                requests.append(request)
            # Once all are made: an error above leaves none of them behind.
            for index, request in enumerate(requests):
                self.scheduler.add(request)
                # A stop string ends the answer, so its text must be looked at token by token.
                final = final_only and not params.stop
                stop_strings = StopStrings(params.stop, params.include_stop_str_in_output)
                text = _detokenizer(self.tokenizer, prompt, params)
                self._streams[request] = OutputStream(request, index, on_output, text, stop_strings, final)
        return tuple(requests)

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """Return the matcher of the grammar that an answer must follow, if any. May be called from any thread.

        Raises:
            RequestError: the grammar cannot be followed.
        """
        if params.grammar is None:
            return None
        if self.grammars is None:
            raise RequestError("structured answers need a tokenizer, and this checkpoint has none")
        return self.grammars.matcher(params.grammar)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lend the whole cache to the caller, once the steps in flight are read.

        Raises:
            RequestError: requests are unfinished.
        """
        with self._lock:
            self._collect(max_in_flight=0)
            if self.busy:
                raise RequestError(
                    "this uses the whole cache: finish or abort the requests that are open first"
                )
            # The prefix cache's pages count too: the caller may need all of them.
            self.scheduler.manager.clear()
            self._flush_events()
            yield
            self._flush_events()

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Requests that run keep their pages, which are free once they end."""
        with self._lock:
            self.scheduler.manager.clear()
            self._flush_events()

    def observe_cache(self, sink: Sink) -> None:
        """Hand what happens to the prefix cache to `sink` after each step; the cache is emptied first."""
        with self._lock:
            if self.cache_events is None:
                manager = self.scheduler.manager
                self.cache_events = CacheEvents(self.namespace, manager.page_size)
                manager.observe(self.cache_events)
            else:
                self.scheduler.manager.clear()
                self._flush_events()
            self.cache_events.sinks.append(sink)

    def _flush_events(self) -> None:
        if self.cache_events:
            self.cache_events.flush()

    def abort(self, requests: Iterable[Request]) -> None:
        """End `requests`, whatever their state; their pages are free at once."""
        with self._lock:
            self._store_read()  # what an interrupt has left
            for request in requests:
                self._abort(request)

    def close(self) -> None:
        """End all requests with an error, and let go of the model, the pool and the graphs.

        Whoever still has the engine, as a notebook has by the traceback of its last error, then keeps no memory.
        """
        with self._lock:
            try:
                # What the device still does may read from the memory that is about to be free.
                self._collect(max_in_flight=0)
                self.fail(CLOSED)
            finally:
                vars(self.runner).clear()
                # A head has pages and weights of its own, and shares the model's.
                self.speculation, self.scheduler.reusable = None, default_reusable
                if self.ranks:
                    self.ranks.close()

    def fail(self, error: str) -> None:
        """End all requests with an error, after what they gained before."""
        with self._lock:
            with suppress(Exception):  # of those who take answers: all are told an error anyway
                self._store_read()
            with suppress(Exception):
                self._emit_pending()
            self._unstored.clear()
            self._gains.clear()
            for request in list(self._streams):
                self._abort(request, error)

    @property
    def busy(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self._streams)

    def step(self) -> None:
        """Launch one batch and emit what the previous one sampled: schedule -> launch -> collect."""
        with self._lock:
            waits = self._waits()
            batch = self._follow() if waits and self.overlap else self._next(waits)
            waited = waits and not self._in_flight
            # Before the launch: the device may be done with the step before the host is done with that.
            launched_at = perf_counter()
            is_launched = batch is not None and self._launch(batch)
            self._store_read()
            self._emit_pending()
            self._note_launch(batch if is_launched else None, waited, launched_at)
            # The step before is read only now, while the device computes the new one.
            self._collect(max_in_flight=1 if is_launched else 0)
            # Nobody calls step() again once no request is open, so the last step is read here.
            if not self.overlap or not self._streams:
                self._collect(max_in_flight=0)
            if self.speculation and not self._streams:
                self.speculation.policy.interrupted()
                self._clock = StepClock()  # over a pause the clocks of host and device drift apart
            self._flush_events()

    def _waits(self) -> bool:
        """Return whether the next step needs what the steps in flight sample: on the host, but see _follow()."""
        items = [item for step in self._in_flight for item in step.sampling]
        if any(
            item.drafts or needs_output_tokens(item.request.params) for item in items
        ):  # penalties, grammars
            return True
        requests = [item.request for item in items if not item.request.is_finished]
        return self.speculation is not None and bool(requests) and self.speculation.waits(requests)

    def _next(self, waits: bool) -> Batch | None:
        """Return the next step's batch."""
        # What was sampled is told only once the next step is launched, but where nothing runs meanwhile.
        self._collect(max_in_flight=0 if waits else 1, later=self.overlap)
        return self.scheduler.schedule(self._drafts())

    def _follow(self) -> Batch | None:
        """Return the batch of the step behind one whose tokens it needs: mostly of the same requests.

        Where the device knows how it goes on, that one is not read yet. Else the device waits for the host. So what
        does not depend on the tokens is done before these are known, and what was computed is stored once it is
        launched.
        """
        step = self._in_flight[0]
        if self._unstored or not can_follow(self.scheduler, step.batch):
            return self._next(waits=True)
        speculation, tasks = self.speculation, list[DraftTask]()
        if speculation:
            is_ahead = speculation.leaves_unread and can_run_ahead(self.scheduler, self.runner, step.batch)
            room = partial(room_ahead, self.scheduler) if is_ahead else self.scheduler.draft_room
            tasks = speculation.tasks(self.scheduler.running, room)
            if is_ahead and (batch := self._follow_unread(step.batch, tasks)):
                return batch
            if not step.has_drafts:
                speculation.prepare(tasks)
        gains = self._read_oldest()
        if gains is None:
            return self._next(waits=True)
        ended = gains.ended
        tasks = [one for one in tasks if not (one.request.is_finished or one.request in ended)]
        drafts = speculation.draft(tasks) if speculation else {}
        next_batch = follow(self.scheduler, drafts, ended)
        if next_batch is None:
            self._collect(max_in_flight=0, later=True)
            next_batch = self.scheduler.schedule(drafts)
        return next_batch

    def _follow_unread(self, before: Batch, tasks: Sequence[DraftTask]) -> Batch | None:
        """Return the batch of a step that is launched before the one in flight is read; None where it cannot be."""
        lengths, graphs = {task.request: task.limit for task in tasks}, self.runner.graphs
        if not (self.speculation and lengths and graphs):
            return None
        if graphs.verify_size(len(self.scheduler.running), 1 + max(lengths.values())) is None:
            return None
        if not reserve_unread(self.scheduler, before, lengths):
            return None
        drafts = self.speculation.draft_ahead(tasks, before)
        return follow_unread(self.scheduler, before, drafts) if drafts else None

    def _drafts(self) -> Mapping[Request, tuple[int, ...]]:
        if self.speculation is None:
            return {}
        draftable, others = self.scheduler.draftable, sum(len(step.sampling) for step in self._in_flight)
        return self.speculation.propose(draftable, self.scheduler.draft_room, others)

    def _note_launch(self, batch: Batch | None, waited: bool, launched_at: float) -> None:
        """Note when a step was launched, so that it is known what steps with drafts take."""
        if self.speculation is None:
            return
        # The device goes on with a step when the one before it ends. When the host launched it depends on what else it
        # had to do, and of a few steps that is most of a difference.
        runs_on = batch is not None and len(self._in_flight) > 1
        self._noted_at = now = (
            max(self._clock.end, self._noted_at) if runs_on else self._clock.at(launched_at)
        )
        if batch is None or not all(item.phase.decodes for item in batch.scheduled):
            self.speculation.policy.interrupted(now if batch else None, waited=waited)
            return
        drafts = max(len(item.drafts) for item in batch.scheduled)
        self.speculation.note_launch(len(batch.scheduled), drafts, now, waited=waited)

    def check(self, prompt: Sequence[int], params: SamplingParams, *, answer: bool = True) -> None:
        """Check that a prompt can be served.

        Args:
            prompt: token ids.
            params: of the request.
            answer: whether there must be room for a token of an answer.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
            PromptTooLong: the prompt has too many tokens for the cache or the model.
            RankError: a process of a divided model has failed.
        """
        if self.ranks:
            self.ranks.check()
        check_request(prompt, params, self.vocab_size, self.tokenizer)
        self.scheduler.check_length(len(prompt), answer=answer)

    def _launch(self, batch: Batch) -> bool:
        """Run and sample a batch without waiting for it; return False where that failed."""
        sampling = tuple(item for item in batch.scheduled if item.samples_token)
        # A row for each token that is sampled: one after each draft, and one before.
        rows = sum(1 + len(item.drafts) for item in sampling)
        # After an interrupt a step is computed again, unless it may have changed what it began with.
        can_repeat = not self.runner.states
        try:
            logits = self.runner.forward(batch)
            sampled = sample(self.sampler, logits[:rows], sampling, self.runner.tables) if sampling else None
            prompt_logits = logits[rows:]
            fixed = self.sampler.fixed_shapes
            prompt_logprobs = score_prompts(batch, prompt_logits, fixed_shapes=fixed)
            # After sampling, so that the host has the tokens while a head computes with hidden states; and before what
            # was sampled is stored, which moves where the device takes this step to begin (PageTables.stored).
            if self.speculation:
                self.speculation.observe(batch, self.runner.hidden_states)
            can_repeat = False
            # Without overlap the host knows the tokens before the next step, and sends them itself.
            if sampled and self.overlap:
                self.runner.store_sampled(sampled.tokens_S)
            # Only a step that was launched counts as in flight; one that failed is scheduled no further.
            self.scheduler.launch(batch)
            self._in_flight.append(InFlightStep(batch, sampling, sampled, prompt_logprobs))
        except Exception as error:  # whatever it is, only this batch's requests may suffer
            self._fail_batch(batch, self._explained(error))
            return False
        except BaseException as error:
            if not can_repeat:
                self._fail_batch(batch, error)
            raise
        return True

    def _explained(self, error: Exception) -> Exception:
        """Return what an error of a step comes from; all requests end where a rank has failed."""
        if self.ranks:
            error = self.ranks.explained(error)
            if isinstance(error, RankError):
                self.fail(f"{type(error).__name__}: {error}")
        return error

    def _collect(self, max_in_flight: int, *, later: bool = False) -> None:
        """Read steps in flight, oldest first, until `max_in_flight` are left, and emit what they sampled.

        Args:
            max_in_flight: steps that are not waited for.
            later: leave it to _emit_pending() to emit it.
        """
        self._store_read()
        while len(self._in_flight) > max_in_flight:
            self._read_oldest()
            self._store_read()
            if not later:
                self._emit_pending()

    def _read_oldest(self) -> Gains | None:
        """Read the oldest step in flight, and add what it sampled to its requests; None where it failed."""
        # The step stays in the queue while it is read: after an interrupt it is read again.
        step = self._in_flight[0]
        try:
            if self.overlap and step.has_drafts:
                # While the device computes: the next step can begin once drafts for it are known.
                self.runner.send_pages(self.scheduler.reserve_ahead(step.batch))
            drafts_of = self.speculation.drafts_of if self.speculation else None
            (runs, num_drafts), logprobs = step.read(drafts_of), step.read_logprobs()
            prompt_logprobs = step.prompt_logprobs.read() if step.prompt_logprobs else []
            if self.ranks:
                self.ranks.check()  # sums with a rank that is gone end, with values that mean nothing
        except Exception as error:  # an error of the device shows where it is waited for
            self._in_flight.popleft()
            self._fail_batch(step.batch, self._explained(error))
            return None
        self._clock.read(step)
        self._in_flight.popleft()
        scores = by_request(step.batch, prompt_logprobs) if prompt_logprobs else {}
        with self._whole(step.batch):
            self._abort_failed(runs, scores)
            # After these ends, because add_tokens() passes over finished requests.
            ended = self.scheduler.add_tokens(step.batch, runs)
            self._unstored.append(Gains(step.batch, runs, num_drafts, logprobs, scores, ended))
        return self._unstored[-1]

    @contextmanager
    def _whole(self, batch: Batch) -> Iterator[None]:
        """End the requests of a batch where the body, which changes their books, is interrupted midway."""
        try:
            yield
        except BaseException as error:
            self._fail_batch(batch, error)
            raise

    def _abort_failed(
        self, runs: Mapping[Request, list[int]], prompt_logprobs: Mapping[Request, Sequence[Logprob]]
    ) -> None:
        """End requests whose logits are not numbers, or whose grammar cannot be followed on."""
        for request, entries in prompt_logprobs.items():
            if any(math.isnan(entry.logprob) for entry in entries):
                self._abort(request, NOT_A_NUMBER)
        for request, run in runs.items():
            if NO_TOKEN in run:
                self._abort(request, NOT_A_NUMBER)
                del run[run.index(NO_TOKEN) :]
            elif request.matcher and request.matcher.error:
                self._abort(request, f"the grammar cannot be followed on: {request.matcher.error}", 400)

    def _store_read(self) -> None:
        """Let the scheduler store what steps have computed that were read."""
        while self._unstored:
            gains = self._unstored.popleft()
            self._gains.append(gains)
            with self._whole(gains.batch):
                self.scheduler.store(gains.batch, gains.runs, gains.ended, gains.prompt_logprobs)

    def _emit_pending(self) -> None:
        """Emit what steps have sampled and nobody was told yet."""
        while self._gains:
            gains = self._gains[0]
            pending = [
                (request, scored(run, gains.logprobs.get(request)), request in gains.ended)
                for request, run in gains.runs.items()
            ]
            # Together: an interrupt loses nothing.
            self._gains.popleft()
            self._pending += pending
            self._count_drafts(gains)
        errors: list[Exception] = []
        while self._pending:
            request, run, has_ended = self._pending.popleft()
            try:
                self._emit(request, run, has_ended)
            except Exception as error:  # of whoever takes the answer: the other requests go on
                # Nobody takes this answer any more.
                if self._streams.pop(request, None):
                    self.scheduler.finish(request, "abort")
                errors.append(error)
        # Raised last, so that all other requests have their tokens.
        if errors:
            raise errors[0]

    def _count_drafts(self, gains: Gains) -> None:
        """Note how many drafts were accepted."""
        for item in gains.batch.scheduled:
            if item.drafts and (run := gains.runs[item.request]):
                request, num_accepted, num_drafts = item.request, len(run) - 1, gains.num_drafts[item.request]
                request.num_accepted_drafts += num_accepted
                request.num_rejected_drafts += num_drafts - num_accepted
                if self.speculation:
                    self.speculation.note(item, num_accepted, num_drafts)

    def _emit(self, request: Request, run: Sequence[Logprob], has_ended: bool) -> None:
        """Hand out what the tokens of a step add to an answer, one after the other: a stop string may end it midway."""
        for number, token in enumerate(run, 1):
            stream = self._streams.get(request)
            if stream is None:
                return
            piece = stream.append(token, has_ended and number == len(run))
            if piece is None:
                continue
            if piece.finish_reason:
                # What was accepted after a stop string is no part of the answer.
                if number < len(run):
                    del request.token_ids[len(request.prompt_token_ids) + stream.num_tokens :]
                # The scheduler knows stop tokens and lengths; it does not know of stop strings.
                self.scheduler.finish(request, piece.finish_reason)
                del self._streams[request]
            stream.on_output(piece)

    def _abort(self, request: Request, error: str | None = None, status: int = 500) -> None:
        """End a request before its time, unless it has ended while a step of it was in flight."""
        if request in self._streams:
            self.scheduler.finish(request, "abort")
            stream = self._streams.pop(request)
            stream.on_output(stream.flush("abort", error, status))

    def _fail_batch(self, batch: Batch, error: BaseException) -> None:
        """End the requests of a step that failed with its error; all other requests go on."""
        try:
            self._store_read()
            self._emit_pending()  # what they gained before
        finally:
            for item in batch.scheduled:
                self._abort(item.request, f"{type(error).__name__}: {error}".removesuffix(": "))


def _detokenizer(
    tokenizer: Tokenizer | None, prompt: Sequence[int], params: SamplingParams
) -> Detokenizer | None:
    visible = frozenset(params.shown_tokens) if params.skip_special_tokens else None
    return Detokenizer(tokenizer, prompt, visible, marked=params.mark_tokens) if tokenizer else None


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of answer `index`: one answer, and a seed of its own."""
    if params.n == 1:
        return params
    # The first answer keeps the seed, so that it is the same as with n = 1.
    seed = params.seed if params.seed is None or not index else hash((params.seed, index)) % (1 << 64)
    # The prompt is scored once, by the first answer.
    prompt_logprobs = None if index else params.prompt_logprobs
    return replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)
