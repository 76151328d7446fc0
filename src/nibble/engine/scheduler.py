"""Choose which tokens of which requests the next step computes: continuous batching with chunked prefill.

Requests are served by priority, those of equal priority by arrival. Not thread-safe: one thread adds, schedules,
commits and finishes.

A step has four parts: admit waiting requests whose pages fit; split the token budget, decodes first, then prompts;
reserve pages in order, where the last request gives its own back if there are none; hand out the batch. The first
request gets a share of every step and can take every page, so it always makes progress, and so does every request
that no endless row of more important ones comes before.

One batch may be in flight while the next one is scheduled. Its tokens are taken as stored, and a token that it samples
as one whose value is not known yet. What then ends, is aborted or loses its pages is dropped at the commit.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from weakref import WeakKeyDictionary

from nibble.cache.lease import Lease, Place
from nibble.cache.manager import CacheManager, CacheStats
from nibble.cache.radix_cache import Key
from nibble.cache.rank_managers import RankManagers
from nibble.engine.budget import SLICES, divide, limit_logprob_rows, urgency_of
from nibble.engine.request import Batch, FinishReason, Logprob, Request, ScheduledRequest, State
from nibble.errors import OutOfFrames, OutOfPages, PromptTooLong

PROMPT_TAIL = 8
"""Last tokens of a prompt that its snapshot leaves out: a chat template may write another header of the answer in the
next turn. To compute one page again is little; without a snapshot before the change it would be the whole window.
"""

default_reusable: Callable[[Request], int] = attrgetter("num_reusable_tokens")
order_of = attrgetter("priority", "arrival")
"""The place among requests: the least is served first, and loses its pages last."""


@dataclass(slots=True)
class Metrics:
    """Queue lengths now, and counts over the scheduler's life."""

    cache: CacheStats
    waiting: int = 0
    running: int = 0
    steps: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    """Stored tokens that preempted requests gave up; the prefix cache may still have some of them."""
    finished: int = 0


class Scheduler:
    """Requests in order, waiting and running. A step costs time by their number, not by their lengths.

    Args:
        manager: the books of the pool.
        max_running: most requests that run at a time.
        token_budget: most tokens of a step.
        max_context: most tokens of a request, prompt and answer together.
        can_grow: `max_context` was asked for, and the model itself may have more.
        chunk: most tokens of one prompt in a step; None: the whole budget.
        max_logprob_rows: most log-probabilities of prompts in a step, whose logits are all computed at once.
    """

    def __init__(
        self,
        manager: CacheManager | RankManagers,
        *,
        max_running: int,
        token_budget: int,
        max_context: int,
        can_grow: bool = False,
        chunk: int | None = None,
        max_logprob_rows: int = 1 << 30,
    ) -> None:
        limits = (max_running, token_budget, max_context, chunk or 1, max_logprob_rows)
        assert min(limits) > 0, "limits must be at least 1"
        self.manager = manager
        self.max_running = max_running
        self.token_budget = token_budget
        self.max_context, self._can_grow = max_context, can_grow
        self.limit = min(max_context, manager.num_tokens)
        """Most tokens, prompt and answer together, that a request may have here."""
        self.chunk = chunk or token_budget
        self.max_logprob_rows = max_logprob_rows
        self.reusable = default_reusable
        """Returns how many leading tokens of a request the prefix cache may give."""
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._arrivals = itertools.count()
        self._last_refusal: tuple[str, int, int] | None = None
        """The request that did not fit, and what that depended on."""
        self._leaders: WeakKeyDictionary[Request, Lease] = WeakKeyDictionary()
        """The lease that computes what a request waits for, once it knows where they branch."""
        self._metrics = Metrics(manager.stats)

    def check_length(self, length: int, *, answer: bool = True) -> None:
        """Raise PromptTooLong where a prompt of `length` tokens can never run. answer: it needs room for one more."""
        more, total = (" and needs room for at least one more" if answer else ""), length + answer
        problem = f"the prompt is too long: it has {length} tokens{more}, "
        if total > self.max_context:
            fix = "shorten the prompt or raise --max-context" if self._can_grow else "shorten the prompt"
            raise PromptTooLong(
                f"{problem}but this model's maximum context length is {self.max_context} tokens; {fix}"
            )
        if total > self.limit:
            raise PromptTooLong(
                f"{problem}which exceeds the available context size: the KV cache holds {self.limit}; "
                "shorten the prompt, raise --kv-memory, or choose a --kv-format with fewer bytes per token"
            )

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            PromptTooLong: it can never run.
        """
        assert request.state is State.WAITING and request.arrival < 0, (
            f"request {request.id!r} was added before"
        )
        self.check_length(len(request.prompt_token_ids), answer=request.params.max_tokens > 0)
        request.arrival = next(self._arrivals)
        request.last_length = min(len(request.prompt_token_ids) + request.params.max_tokens, self.limit)
        insort(self.waiting, request, key=order_of)

    def schedule(self, drafts: Mapping[Request, tuple[int, ...]] = MappingProxyType({})) -> Batch | None:
        """Return the next step's batch, None if there is nothing to do.

        What is neither committed nor in flight is scheduled again.

        Args:
            drafts: tokens that may follow those of requests that decode; they get what budget and pages are left.
        """
        self.admit()
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            item = request.in_flight
            # The token in flight ends the answer whatever it is, so one more would be dropped.
            if item and item.samples_token and item.end + 1 >= request.last_length:
                continue
            (decodes if request.is_decoding else prompts).append(request)
        num_tokens = self._split_budget(decodes, prompts)
        counts = dict[Request, int]()
        # A copy, because a reservation may preempt requests out of the list.
        for request in tuple(self.running):
            count = num_tokens.get(request)
            # A request that was preempted for one before it waits again.
            if count and request.state is State.RUNNING and self._reserve(request, count):
                counts[request] = count
        room, scheduled = self.token_budget - sum(counts.values()), list[ScheduledRequest]()
        for request, count in counts.items():
            # Once all others have their pages: nobody gives up any for drafts.
            of_request = drafts.get(request, ()) if request.is_decoding else ()
            if of_request:
                of_request = self._reserve_drafts(request, of_request[:room])
                room -= len(of_request)
            scheduled.append(ScheduledRequest.next_chunk(request, count, of_request))
        return Batch.from_scheduled(scheduled) if scheduled else None

    @property
    def draftable(self) -> list[Request]:
        """Return the requests that decode, and whose tokens are all known."""
        return [request for request in self.running if request.in_flight is None and request.is_decoding]

    def draft_room(self, request: Request) -> int:
        """Return the most tokens that may be drafted for a request: they and one more are within its limits.

        Of one with a step in flight: if that brings a single token.
        """
        if item := request.in_flight:
            return request.last_length - item.start - 3
        return self.room_behind(request, request.lease.num_stored_tokens)

    def room_behind(self, request: Request, start: int) -> int:
        """Return the most drafts behind the token at `start`, the last that is known."""
        return max(min(request.last_length - start - 2, self.manager.draft_room(request.lease, start)), 0)

    def reserve_ahead(self, batch: Batch) -> list[Lease]:
        """Reserve pages for what may follow a step with drafts that is in flight, and return the leases.

        No step has to wait for that then. They are given back where pages are short.
        """
        items = [item for item in batch.scheduled if item.drafts and item.request.in_flight is item]
        for item in items:
            # As many drafts again, should all of these count.
            upto = min(item.end + item.num_tokens, item.request.last_length)
            self.manager.reserve_ahead(item.request.lease, upto)
        return [item.request.lease for item in items]

    def launch(self, batch: Batch) -> None:
        """Mark `batch` as in flight: schedule() goes on from its end. Commit it before two more are launched."""
        for item in batch.scheduled:
            item.request.in_flight = item

    def commit(
        self,
        batch: Batch,
        tokens: Mapping[Request, int | Sequence[int]],
        prompt_logprobs: Mapping[Request, Sequence[Logprob]] = MappingProxyType({}),
    ) -> list[Request]:
        """Record that `batch` is computed, and return the requests that end with it: add_tokens() and store().

        Args:
            batch: what was computed; the oldest in flight.
            tokens: sampled tokens by request; of a request with drafts those that were accepted, and one more.
            prompt_logprobs: those of each item's logprob_rows, by request.
        """
        ended = self.add_tokens(batch, tokens)
        self.store(batch, tokens, ended, prompt_logprobs)
        return list(ended)

    def add_tokens(
        self, batch: Batch, tokens: Mapping[Request, int | Sequence[int]]
    ) -> Mapping[Request, FinishReason]:
        """Add what `batch` has sampled to its requests' tokens; return those that end with it, and why.

        A request that has ended in the meantime is passed over. One that has lost its pages keeps its new tokens.

        Args:
            batch: the oldest in flight.
            tokens: see commit().
        """
        ended = dict[Request, FinishReason]()
        for item in batch.scheduled:
            request = item.request
            if request.state is State.FINISHED or not item.samples_token:
                continue
            new = tokens[request]
            if not isinstance(new, int):
                # Also of a request that has lost its pages: it goes on after them.
                request.token_ids += new[:-1]
                new = new[-1]
            if reason := self._append(request, new):
                ended[request] = reason
            if (behind := request.in_flight) and behind.is_unread:
                behind.settle(len(request.token_ids) - 1)
        return ended

    def store(
        self,
        batch: Batch,
        tokens: Mapping[Request, int | Sequence[int]],
        ended: Mapping[Request, FinishReason],
        prompt_logprobs: Mapping[Request, Sequence[Logprob]] = MappingProxyType({}),
    ) -> None:
        """Record that what `batch` has computed is in the cache, and finish the requests that end with it.

        Args:
            batch: whose tokens are added; the step behind it may be in flight.
            tokens: see commit().
            ended: as add_tokens() returned it.
            prompt_logprobs: see commit().
        """
        metrics = self._metrics
        metrics.steps += 1
        for item in batch.scheduled:
            request = item.request
            if request.state is State.FINISHED:
                continue
            if request.in_flight is item:
                request.in_flight = None
            if prompt_logprobs and (entries := prompt_logprobs.get(request)):
                request.prompt_logprobs += entries
            new = tokens[request] if item.samples_token else ()
            count = 1 if isinstance(new, int) else len(new)
            # It may have been preempted while this was in flight.
            if request.state is State.RUNNING:
                lease = request.lease
                assert item.start == lease.num_stored_tokens, (
                    f"request {request.id!r}: this batch was committed before"
                )
                # The last one is not computed yet.
                num_rejected = 1 + len(item.drafts) - count if item.drafts else 0
                self.manager.commit(lease, request.token_ids, item.end - num_rejected)
                # Of drafts; steps that followed this one may have left some.
                is_last = item.phase.decodes and request.in_flight is None and not lease.hot_frames
                if is_last and lease.num_reserved_tokens > lease.num_stored_tokens:
                    self.manager.take_back(lease)
            if item.phase.decodes:
                metrics.decode_tokens += count
            else:
                metrics.prompt_tokens += item.num_tokens
            if reason := ended.get(request):
                self.finish(request, reason)

    def _append(self, request: Request, token: int) -> FinishReason | None:
        """Add the last token of a step to an answer, and return why that ends, if it does."""
        if not request.params.max_tokens:
            return "length"
        if token in request.stop_ids:
            return "stop"
        request.token_ids.append(token)
        return "length" if len(request.token_ids) >= request.last_length else None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request. Of one that has ended already, only the reason changes."""
        request.finish_reason = reason
        if not request.is_finished:
            self._remove(request, State.FINISHED)
            self._metrics.finished += 1

    @property
    def metrics(self) -> Metrics:
        """Return the current counts."""
        return replace(
            self._metrics, cache=self.manager.stats, waiting=len(self.waiting), running=len(self.running)
        )

    def check_integrity(self) -> None:
        """Assert that queues, states and leases agree, and that the manager's books balance."""
        for queue, state in ((self.waiting, State.WAITING), (self.running, State.RUNNING)):
            assert queue == sorted(queue, key=order_of), f"{state} requests are not in order"
            for request in queue:
                assert request.state is state, (
                    f"request {request.id!r} is {request.state}, in the queue {state}"
                )
                is_open = request.lease in self.manager.leases
                assert is_open is (state is State.RUNNING), f"lease of request {request.id!r}"
        self.manager.check_integrity()

    # Admission

    def admit(self) -> None:
        """Start waiting requests in order, up to the first one whose pages do not fit."""
        if not self.waiting:
            return
        room = max(self.max_running - len(self.running), 0)
        # Answers that wait for another's prompt do not hold up those behind them.
        candidates = list(itertools.islice((one for one in self.waiting if one.can_start), room))
        frames = self._min_frames(self.running)
        # Trying takes time by the prompt's length, so it is not repeated before something has become free.
        if not candidates or self._last_refusal == (candidates[0].id, self.manager.num_releases, frames):
            return
        # Pages that running requests take soon are not given away, or one would be preempted for it at once.
        spare_pages = Counter[int]()
        for request in self.running:
            spare_pages[request.lease.rank] += self._num_pages_to_come(request)
        for request in candidates:
            if not self._open(request, spare_pages, frames):
                self._last_refusal = request.id, self.manager.num_releases, frames
                break
            # A reference would keep the other request's tokens alive.
            request.waits_for, request.state = None, State.RUNNING
            request.start_time = request.start_time or time.monotonic()
            self.waiting.remove(request)
            insort(self.running, request, key=order_of)
            spare_pages[request.lease.rank] += self._num_pages_to_come(request)
            frames += self._min_frames([request])

    def _open(self, request: Request, spare_pages: Mapping[int, int], frames: int) -> bool:
        """Give a waiting request its lease; return False where its pages do not fit."""
        while True:
            try:
                request.lease = self.manager.open(
                    request.token_ids,
                    request.namespace,
                    spare_pages=spare_pages,
                    reserved_frames=frames,
                    reusable=self.reusable(request),
                )
            except OutOfPages as error:
                # Decoding requests that move to hot buffers free their frames, so it is tried again.
                if not self._offload(error):
                    return False
            else:
                self._count_hit(request, request.lease.num_hit_tokens)
                self.manager.keep_snapshot(
                    request.lease, len(request.prompt_token_ids) - PROMPT_TAIL, Place.PROMPT_END
                )
                return True

    def _num_pages_to_come(self, request: Request) -> int:
        """Return the pages that a running request takes soon: for all of its tokens, and one to grow into."""
        return max(self.manager.pages_for(request.num_tokens) + 1 - len(request.lease.pages), 0)

    def _min_frames(self, requests: Iterable[Request]) -> int:
        """Return the frames that running requests need under pressure."""
        return self.manager.min_frames((one.num_tokens, one.is_decoding) for one in requests)

    def _count_hit(self, request: Request, num_tokens: int) -> None:
        """Count prompt tokens from the prefix cache, but not what a preempted request finds again."""
        if not request.num_preemptions:
            request.num_prefix_hit_tokens += num_tokens

    # The token budget

    def _split_budget(self, decodes: Sequence[Request], prompts: Sequence[Request]) -> dict[Request, int]:
        """Return how many tokens each request may compute in this step: decodes first, then prompts."""
        if not prompts:
            return dict.fromkeys(decodes[: self.token_budget], 1)
        for request in prompts:
            # Others may have stored pages in the prefix cache since this request was started.
            hit = self.manager.advance(request.lease, request.token_ids, self.reusable(request))
            self._count_hit(request, hit)
        # The first request of all gets a token at least, even where a slice is nothing.
        reserved = max(self.token_budget // SLICES, int(prompts[0] is self.running[0]))
        demand = {one: min(self._chunk_end(one) - one.num_computed_tokens, self.chunk) for one in prompts}
        # Decodes come first, up to the share that is reserved for prompts and that they can use.
        split = dict.fromkeys(decodes[: self.token_budget - min(reserved, sum(demand.values()))], 1)
        room = self.token_budget - len(split)
        selected = self._select_prompts(prompts, demand, room)
        shares = divide([demand[request] for request in selected], [*selected.values()], room, self._slice)
        split.update((one, share) for one, share in zip(selected, shares, strict=True) if share)
        limit_logprob_rows(split, self.max_logprob_rows)
        return split

    def _chunk_end(self, request: Request) -> int:
        """Return where the next chunk of a prompt ends at the latest."""
        stop = self.manager.next_stop(request.lease)
        return request.num_tokens if stop is None else min(request.num_tokens, stop)

    @property
    def _slice(self) -> int:
        """Tokens of a slice of the budget."""
        return max(self.token_budget // SLICES, 1)

    def _select_prompts(
        self, prompts: Sequence[Request], demand: Mapping[Request, int], room: int
    ) -> dict[Request, tuple[int, int]]:
        """Return the prompts to go on with, as many as the budget has slices: the first, then by urgency, with that."""
        selected: dict[Request, tuple[int, int]] = {}
        pending: dict[Key | int, Request] = {}
        for request in self.running:
            if request.in_flight:
                pending.update(dict.fromkeys(self._work_keys(request), request))
        rest = sorted(prompts[1:], key=urgency_of)
        replays = {self.manager.replay_target(one.lease): one for one in rest if one.lease.has_begun}
        for candidate in (prompts[0], *rest):
            request = candidate
            # A replay that has begun takes the turn of those who can wait for its snapshot, but the first of all
            # gets on by itself.
            if (
                candidate is not prompts[0]
                and (target := self.manager.replay_target(candidate.lease)) is not None
            ):
                request = replays.get(target, candidate)
            # With the turn goes the urgency.
            urgency = min(urgency_of(request), urgency_of(candidate))
            if request in selected:
                selected[request] = min(selected[request], urgency)
                continue
            if self._can_wait(request, pending):
                continue
            room -= min(demand[request], self._slice)
            if selected and room < 0:
                break
            selected[request] = urgency
            pending.update(dict.fromkeys(self._work_keys(request), request))
        return selected

    def _work_keys(self, request: Request) -> Iterator[Key | int]:
        """Return what a request that is being computed gives to others: its next page, and the end of its replay."""
        page_key = self.manager.next_page_key(request.lease, request.token_ids)
        target = self.manager.replay_target(request.lease)
        return (key for key in (page_key, target) if key is not None)

    def _can_wait(self, request: Request, pending: Mapping[Key | int, Request]) -> bool:
        """Return whether another request is computing the very page or snapshot that this one needs next.

        It is then better to wait, and find it in the prefix cache.
        """
        lease, manager = request.lease, self.manager
        start = lease.num_shared_pages * manager.page_size
        # One that has computed tokens after its last shared page, or of a replay, goes on by itself.
        if lease.has_begun if lease.is_replaying else request.num_computed_tokens != start:
            return False
        leader = pending.get(manager.next_page_key(lease, request.token_ids) or b"")
        if leader and start + manager.page_size <= request.num_reusable_tokens:
            self._keep_branch(request, leader)
            return True
        return manager.replay_target(lease) in pending

    def _keep_branch(self, request: Request, leader: Request) -> None:
        """Keep a snapshot where the tokens of `request` leave those of `leader`, which computes what they share."""
        if not self.manager.keeps_snapshots or self._leaders.get(request) is leader.lease:
            return
        self._leaders[request] = leader.lease
        size, end = self.manager.page_size, request.lease.num_shared_pages * self.manager.page_size
        ours, theirs = request.token_ids, leader.token_ids
        while end < request.num_reusable_tokens and ours[end : end + size] == theirs[end : end + size]:
            end += size
        self.manager.keep_snapshot(leader.lease, min(end, request.num_reusable_tokens), Place.BRANCH)

    # Pages

    def _reserve(self, request: Request, count: int) -> bool:
        """Reserve pages for `count` more tokens; return False where `request` itself gave up its pages for it."""
        start = request.num_computed_tokens
        while True:
            try:
                self.manager.reserve(request.lease, start + count, start=start)
                return True
            except OutOfPages as error:
                # To move the longest requests to hot buffers is milder than to preempt the last one.
                if self._trim() or self._offload(error):
                    continue
                # Always the last in order, so that the first one makes progress; of those whose pages are of use.
                rank = request.lease.rank
                last = next(one for one in reversed(self.running) if one.lease.rank == rank)
                self._preempt(last)
                if last is request:
                    return False

    def _reserve_drafts(self, request: Request, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Reserve pages for drafts within the limits of a request; return none of them where pages are short."""
        lease, start = request.lease, request.lease.num_stored_tokens
        # These may have changed since drafts were asked for: its lease for the sake of others, its tokens by a step.
        drafts = drafts[: self.room_behind(request, start)]
        if not drafts:
            return ()
        try:
            self.manager.reserve(lease, start + 1 + len(drafts), len(drafts), start=start)
        except OutOfPages:
            return ()
        return drafts

    def _trim(self) -> bool:
        """Give back pages that running requests have for drafts to come; return whether there were any."""
        before = self.manager.num_available_pages
        for request in self.running:
            self.manager.trim(request.lease)
        return self.manager.num_available_pages > before

    def _offload(self, error: OutOfPages) -> bool:
        """Move the longest decoding requests to hot buffers where frames are short; return whether that frees any."""
        if not isinstance(error, OutOfFrames):
            return False
        longest = sorted(self.running, key=lambda request: -request.num_tokens)
        return self.manager.offload(request.lease for request in longest if request.is_decoding)

    def _preempt(self, request: Request) -> None:
        """Take a request's pages away; its tokens stay, and it waits to compute them again."""
        assert len(self.running) > 1, (
            f"the pool cannot hold request {request.id!r} alone, which add() should refuse"
        )
        self._metrics.preemptions += 1
        self._metrics.preempted_tokens += request.num_stored_tokens
        request.num_preemptions += 1
        self._remove(request, State.WAITING)
        insort(self.waiting, request, key=order_of)

    def _remove(self, request: Request, state: State) -> None:
        """Take a request out of its queue and close its lease."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self.manager.release(request.lease, is_preempted=state is State.WAITING)
        else:
            self.waiting.remove(request)
        request.in_flight, request.state = None, state
