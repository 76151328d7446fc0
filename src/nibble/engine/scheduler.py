"""Which tokens of which requests the next step computes: continuous batching with chunked prefill.

Owns Scheduler and the order in which requests are served: by priority, those of equal priority by arrival. It hands
out Batches and is told what was sampled. Must not know of text, sampling, models or torch. Not thread-safe: one thread
adds, aborts, schedules and commits.

A step in four moves: admit waiting requests whose pages fit; portion the token budget (decodes first, then
prompts); reserve pages in order, where the last request gives its own back if there are none (with a host tier, after
the longest answers have given up their places on the device); hand out the batch. The first request gets a portion of
every step and can take every page, so it always gets on, and so do all before whom no more important ones come.

One batch may be under way while the next is scheduled (launch): its tokens are taken as stored, and a token that it
samples as one whose value is not known yet. What then ends, is aborted or loses its pages is dropped at its commit.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from nibble.cache.manager import CacheManager, CacheStats
from nibble.cache.radix_cache import Key
from nibble.engine.batch import Batch, ScheduledRequest
from nibble.engine.request import FinishReason, Request, State
from nibble.errors import OutOfFrames, OutOfPages, PromptTooLong

SLICES = 8
"""A budget has so many slices. One is kept for prompts, so that decodes cannot shut them out; and each prompt
that takes part in a step is given one at least, as chunks of a few tokens help nobody.
"""

_order = attrgetter("scheduling_key")


@dataclass(frozen=True, slots=True)
class Metrics:
    """How things stand, and counts over the scheduler's life.

    preempted_tokens: stored tokens that preempted requests gave up; some are found again in the prefix cache.
    """

    waiting: int
    running: int
    steps: int
    decode_tokens: int
    prompt_tokens: int
    preemptions: int
    preempted_tokens: int
    finished: int
    cache: CacheStats


class Scheduler:
    """Requests in order, waiting and running. A step costs time by how many they are, not how long."""

    def __init__(
        self,
        manager: CacheManager,
        *,
        max_running: int,
        token_budget: int,
        max_context: int,
        chunk: int | None = None,
    ) -> None:
        assert min(max_running, token_budget, max_context, chunk or 1) > 0, "limits must be at least 1"
        self.manager = manager
        self.max_running = max_running
        self.token_budget = token_budget
        self.max_context = max_context
        self.chunk = chunk or token_budget
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._refused: tuple[str, int, int, int] | None = None
        self._steps = self._decode_tokens = self._prompt_tokens = 0
        self._preemptions = self._preempted_tokens = self._finished = 0

    @property
    def limit(self) -> int:
        """Most tokens, prompt and answer together, that a request may have."""
        return min(self.max_context, self.manager.num_tokens)

    @property
    def unfinished(self) -> int:
        """How many requests are waiting or running."""
        return len(self._requests)

    @property
    def metrics(self) -> Metrics:
        """A snapshot."""
        return Metrics(
            waiting=len(self.waiting),
            running=len(self.running),
            steps=self._steps,
            decode_tokens=self._decode_tokens,
            prompt_tokens=self._prompt_tokens,
            preemptions=self._preemptions,
            preempted_tokens=self._preempted_tokens,
            finished=self._finished,
            cache=self.manager.stats,
        )

    def add(self, request: Request) -> None:
        """Queues a new request; raises PromptTooLong where it can never run."""
        assert request.id not in self._requests, f"a request {request.id!r} is here already"
        assert request.state is State.WAITING and request.arrival < 0, (
            f"request {request.id!r} was added before"
        )
        self.check_length(len(request.prompt_token_ids))
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.id] = request
        insort(self.waiting, request, key=_order)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request, whatever its state; None if there is none of this name any more."""
        request = self._requests.get(request_id)
        if request:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request. On one that has ended already, only the reason changes."""
        request.finish_reason = reason
        if request.is_finished:
            return
        (self.running if request.state is State.RUNNING else self.waiting).remove(request)
        del self._requests[request.id]
        self._release(request, State.FINISHED)
        self._finished += 1

    def schedule(self) -> Batch | None:
        """The next step's batch, None if there is nothing to do. What is not committed is scheduled again."""
        self._admit()
        portions = self._portions()
        works = []
        for request in tuple(self.running):
            count = portions.get(request)
            if count and request.lease and self._reserve(request, request.num_computed_tokens + count):
                works.append(ScheduledRequest.next_chunk(request, count))
        return Batch.from_scheduled(works) if works else None

    def launch(self, batch: Batch) -> None:
        """Says that `batch` is under way: schedule() goes on from its end. It must be committed after the next one
        has been launched, at the latest.
        """
        for work in batch.scheduled:
            work.request.in_flight = work

    def commit(self, batch: Batch, tokens: Mapping[str, int]) -> list[Request]:
        """Says that `batch` is computed, and what was sampled by request id; returns the requests that end.

        A request that has ended in the meantime is passed over. One that has lost its pages keeps the token.
        """
        self._steps += 1
        ended = []
        for work in batch.scheduled:
            request = work.request
            if request.is_finished:
                continue
            self._store(work)
            self._count(work)
            if work.samples_token and self._append(request, tokens[request.id]):
                ended.append(request)
        return ended

    def check_integrity(self) -> None:
        """Asserts that queues, states and leases agree, and that the manager's books balance."""
        assert sorted(map(_order, self._requests.values())) == sorted(
            map(_order, self.waiting + self.running)
        )
        for queue, state in ((self.waiting, State.WAITING), (self.running, State.RUNNING)):
            assert queue == sorted(queue, key=_order), f"{state} requests are not in order"
            for request in queue:
                assert request.state is state, (
                    f"request {request.id!r} is {request.state}, in the queue {state}"
                )
                assert (request.lease is not None) is (state is State.RUNNING), (
                    f"lease of request {request.id!r}"
                )
        self.manager.check_integrity()

    # Admission

    def check_length(self, length: int) -> None:
        """Raises PromptTooLong where a prompt of `length` tokens can never run."""
        said = f"the prompt is too long: it has {length} tokens and needs room for at least one more, "
        if length + 1 > self.max_context:
            raise PromptTooLong(
                f"{said}but this model's maximum context length is {self.max_context} tokens; shorten the prompt or "
                "raise --max-context"
            )
        if length + 1 > self.manager.num_tokens:
            raise PromptTooLong(
                f"{said}which exceeds the available context size: the KV cache holds {self.manager.num_tokens}; shorten "
                "the prompt, raise --kv-memory, or choose a --kv-format with fewer bytes per token"
            )

    def _admit(self) -> None:
        """Starts waiting requests in order, up to the first one whose pages do not fit."""
        room = self.max_running - len(self.running)
        ready = list(islice((request for request in self.waiting if request.can_start), max(room, 0)))
        kept = sum(map(self._kept, self.running)) if self.manager.residency else 0
        if not ready or self._refused == self._standing(ready[0], kept):
            return  # nothing has come free since it did not fit, and trying takes time by its length
        spare = sum(map(self._owed, self.running))
        for request in ready:
            if not self._start(request, spare, kept):
                break
            spare += self._owed(request)
            kept += self._kept(request)

    def _owed(self, request: Request) -> int:
        """Pages that a running request will want soon: for all of its known tokens, and one to grow into."""
        assert request.lease
        return self.manager.pages_for(request.num_tokens) + 1 - len(request.lease.pages)

    def _kept(self, request: Request) -> int:
        """Frames that a running request keeps under pressure."""
        return self.manager.min_frames(request.num_tokens, _decodes(request))

    def _standing(self, request: Request, kept: int) -> tuple[str, int, int, int]:
        """What a refusal of `request` depends on."""
        residency = self.manager.residency
        return request.id, self.manager.num_releases, kept, residency.num_releases if residency else 0

    def _start(self, request: Request, spare: int, kept: int) -> bool:
        while request.lease is None:
            try:
                request.lease = self.manager.open(
                    request.token_ids, request.namespace, spare_pages=spare, reserved_frames=kept
                )
            except OutOfPages as error:
                if isinstance(error, OutOfFrames) and self._spill():
                    continue
                self._refused = self._standing(request, kept)
                return False
        request.waits_for, request.state = None, State.RUNNING
        request.started = request.started or time.monotonic()
        self._count_hit(request, request.lease.num_hit_tokens)
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        return True

    # Portions of the budget

    def _portions(self) -> dict[Request, int]:
        """How many tokens each request may compute in this step."""
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            if request.in_flight and self._is_last(request.in_flight):
                continue
            (decodes if _decodes(request) else prompts).append(request)
        if not prompts:
            return dict.fromkeys(decodes[: self.token_budget], 1)
        for request in prompts:
            self._advance(request)
        kept = max(self.token_budget // SLICES, int(prompts[0] is self.running[0]))
        wanted = {
            request: min(request.num_tokens - request.num_computed_tokens, self.chunk) for request in prompts
        }
        portions = dict.fromkeys(decodes[: self.token_budget - min(kept, sum(wanted.values()))], 1)
        room = self.token_budget - len(portions)
        chosen = self._choose(prompts, wanted, room)
        portions.update(zip(chosen, divide([wanted[request] for request in chosen], room), strict=True))
        return portions

    def _advance(self, request: Request) -> None:
        """Skips what others have stored in the prefix cache since this request was started."""
        assert request.lease
        self._count_hit(request, self.manager.advance(request.lease, request.token_ids))

    def _choose(self, prompts: Sequence[Request], wanted: Mapping[Request, int], room: int) -> list[Request]:
        """The prompts to go on with: the first, then by priority those with least left, each with a slice worth having.

        Where the next page of one is just being computed by another, it waits, and finds that page in the
        cache.
        """
        chosen: list[Request] = []
        coming = {self._next_page(request) for request in self.running if request.in_flight} - {None}
        part = max(self.token_budget // SLICES, 1)
        rest = sorted(prompts[1:], key=lambda one: (one.priority, one.num_tokens - one.num_computed_tokens))
        for request in (prompts[0], *rest):
            page = self._next_page(request)
            assert request.lease
            if (
                page in coming
                and request.num_computed_tokens == request.lease.num_shared_pages * self.manager.page_size
            ):
                continue
            room -= min(wanted[request], part)
            if chosen and room < 0:
                break
            chosen.append(request)
            if page:
                coming.add(page)
        return chosen

    def _next_page(self, request: Request) -> Key | None:
        """What the next page that a request enters into the prefix cache stands for."""
        assert request.lease
        return self.manager.next_page_key(request.lease, request.token_ids)

    # Pages

    def _reserve(self, request: Request, upto: int) -> bool:
        """Pages for `upto` tokens in all; the last requests in order give theirs up, in the end this one itself."""
        assert request.lease
        while True:
            try:
                self.manager.reserve(request.lease, upto)
                return True
            except OutOfPages as error:
                if isinstance(error, OutOfFrames) and self._spill():
                    continue
                last = self.running[-1]
                self._preempt(last)
                if last is request:
                    return False

    def _spill(self) -> bool:
        """The longest answers give up their places on the device for hot buffers; False if that makes no room."""
        longest = sorted(self.running, key=lambda request: -request.num_tokens)
        return self.manager.offload(r.lease for r in longest if r.lease and _decodes(r))

    def _preempt(self, request: Request) -> None:
        """Takes a request's pages away; its tokens stay, and it waits to compute them again."""
        assert len(self.running) > 1, (
            f"the pool cannot hold request {request.id!r} alone, which add() should refuse"
        )
        self._preemptions += 1
        request.num_preemptions += 1
        self._preempted_tokens += request.num_stored_tokens
        self.running.remove(request)
        self._release(request, State.WAITING)
        insort(self.waiting, request, key=_order)

    def _release(self, request: Request, state: State) -> None:
        if request.lease:
            self.manager.release(request.lease)
        request.lease, request.in_flight, request.state = None, None, state

    # Commit

    def _is_last(self, work: ScheduledRequest) -> bool:
        """Whether the answer ends with the token that `work` samples, whatever it is."""
        length, params = work.end + 1, work.request.params
        return work.samples_token and (
            length - len(work.request.prompt_token_ids) >= params.max_tokens or length >= self.limit
        )

    def _store(self, work: ScheduledRequest) -> None:
        """Enters into the books that what `work` computed is stored."""
        request, lease = work.request, work.request.lease
        if request.in_flight is work:
            request.in_flight = None
        if lease is None:  # it was preempted while this was under way
            return
        assert work.start == lease.num_stored_tokens, (
            f"request {request.id!r}: this batch was committed before"
        )
        self.manager.commit(lease, request.token_ids, work.end)

    def _append(self, request: Request, token: int) -> bool:
        """Adds a sampled token; True if the request ends with it."""
        if token in request.stop_ids:
            self.finish(request, "stop")
            return True
        request.token_ids.append(token)
        if request.num_output_tokens >= request.params.max_tokens or len(request.token_ids) >= self.limit:
            self.finish(request, "length")
        return request.is_finished

    def _count(self, work: ScheduledRequest) -> None:
        if work.phase.decodes:
            self._decode_tokens += 1
        else:
            self._prompt_tokens += work.num_tokens

    def _count_hit(self, request: Request, hit: int) -> None:
        """Prompt tokens found in the prefix cache; what a preempted request finds again does not count."""
        if not request.num_preemptions:
            request.num_prefix_hit_tokens += hit


def _decodes(request: Request) -> bool:
    """Whether all of its tokens but the last are stored, or will be."""
    return 0 < request.num_computed_tokens == request.num_tokens - 1


def divide(wanted: Sequence[int], room: int) -> list[int]:
    """Divides `room` evenly; what one does not want is left to others, an odd rest to those who want most."""
    portions = [0] * len(wanted)
    modest_first = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, i in enumerate(modest_first):
        portions[i] = min(wanted[i], room // (len(wanted) - place))
        room -= portions[i]
    return portions
