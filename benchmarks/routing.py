"""What routing makes of prefix caches: replicas in simulated time, their books and events real. Without torch.

    python benchmarks/routing.py                          all traces, 2 to 64 replicas; a few minutes on one core
    python benchmarks/routing.py --traces chats --replicas 8
    python benchmarks/routing.py --out benchmarks/reports/routing.md

A replica is a CacheManager of the engine, filled and evicted as requests come; its events go through the router's own
code. Prompts are computed one after the other at a fixed rate, answers at a fixed rate beside them. Compared are

- nibble: routing/router.py;
- ray-10, ray-inf: the policy of Ray Serve LLM's PrefixCacheAffinityRouter, written anew from its documentation
  (docs.ray.io, "Prefix-aware routing"): while queue lengths differ by less than `imbalanced_threshold` (10, or never
  looked at), a prompt goes to the replica whose past prompts share the longest prefix with it, if that is 10 % of the
  prompt or more; else to the one with the smallest record of past prompts; by the better of two drawn at random where
  queues differ by more, or nothing is known. Nothing is forgotten (its default). Theirs compares text, this pages;
- round-robin, least-loaded (the fewest open requests).

`reuse` is prompt tokens found in a cache, over those that one engine with all the pages of the fleet finds in the same
trace; `load` the work of the busiest replica over the mean, work being prompt tokens computed plus four for each token
of an answer; `evicted` how often a cache's pages were given up for others.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nibble.cache.events import CacheEvents, page_hashes, root_hash
from nibble.cache.lease import Lease
from nibble.cache.manager import CacheManager
from nibble.errors import OutOfPages
from nibble.routing.router import DEFAULT, Policy, Route, Router

PAGE, NAMESPACE = 32, "simulated"
PROMPT_RATE, ANSWER_RATE = 20_000.0, 50.0
"""Tokens a second: of a replica that computes prompts, and of each answer."""
ANSWER_WORK = 4.0
"""Work of a token of an answer, in prompt tokens."""
VOCABULARY = 50_000
FLOOR_REUSE, CEILING_LOAD = 0.95, 1.10


# --- traces


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session: what is appended to its context, how long the answer is, and the pause before it."""

    tokens: list[int]
    answer: int
    pause: float


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow each other, each with all that came before as its beginning."""

    start: float
    turns: tuple[Turn, ...]
    number: int


def words(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


def zipf(rng: random.Random, pool: Sequence[list[int]], exponent: float) -> list[int]:
    return rng.choices(pool, [1 / (i + 1) ** exponent for i in range(len(pool))])[0]


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return int(low * (high / low) ** rng.random())


def chats(rng: random.Random, replicas: int, scale: float) -> Iterator[tuple[Turn, ...]]:
    """Conversations of 1 to 12 turns under one of 24 system prompts, some of which are far more popular."""
    prompts = [words(rng, log_uniform(rng, 200, 3000)) for _ in range(24)]
    for _ in range(int(60 * replicas * scale)):
        turns = [
            Turn(words(rng, log_uniform(rng, 20, 600)), log_uniform(rng, 40, 500), rng.expovariate(1 / 8))
            for _ in range(rng.randint(1, 12))
        ]
        first = turns[0]
        yield (Turn(zipf(rng, prompts, 1.0) + first.tokens, first.answer, 0.0), *turns[1:])


def agents(rng: random.Random, replicas: int, scale: float) -> Iterator[tuple[Turn, ...]]:
    """Agents of 6 kinds, each with long instructions and tools; 5 to 30 steps of short calls and long results."""
    prompts = [words(rng, log_uniform(rng, 2500, 7000)) for _ in range(6)]
    for _ in range(int(20 * replicas * scale)):
        steps = [
            Turn(words(rng, log_uniform(rng, 100, 2500)), log_uniform(rng, 30, 250), rng.uniform(0.2, 3))
            for _ in range(rng.randint(5, 30))
        ]
        first = steps[0]
        yield (Turn(zipf(rng, prompts, 0.8) + first.tokens, first.answer, 0.0), *steps[1:])


def documents(rng: random.Random, replicas: int, scale: float) -> Iterator[tuple[Turn, ...]]:
    """Single questions about one of many long documents, after one prompt that all share."""
    prompt = words(rng, 400)
    pool = [prompt + words(rng, log_uniform(rng, 1000, 8000)) for _ in range(30 * replicas)]
    for _ in range(int(200 * replicas * scale)):
        yield (Turn(zipf(rng, pool, 0.9) + words(rng, rng.randint(15, 60)), log_uniform(rng, 20, 300), 0.0),)


def mixed(rng: random.Random, replicas: int, scale: float) -> Iterator[tuple[Turn, ...]]:
    """A third of each of the others, shuffled."""
    sessions = [
        *chats(rng, replicas, scale / 3),
        *agents(rng, replicas, scale / 3),
        *documents(rng, replicas, scale / 3),
    ]
    rng.shuffle(sessions)
    yield from sessions


TRACES: dict[str, Callable[[random.Random, int, float], Iterator[tuple[Turn, ...]]]] = {
    "chats": chats, "agents": agents, "documents": documents, "mixed": mixed,
}  # fmt: skip


def sessions_of(
    name: str, replicas: int, scale: float, seed: int, pages: int, busy: float = 0.6
) -> list[Session]:
    """Return the sessions of a trace, which come at random.

    Args:
        name: of the trace.
        replicas: that serve it.
        scale: of the number of sessions.
        seed: of what is drawn.
        pages: of a replica's cache.
        busy: share of the fleet's time that prompts take if each finds all but what its session adds, or of its caches
            that sessions in progress take, whichever needs the longer time. Past sessions fill the rest.
    """
    rng = random.Random(f"{name} {replicas} {seed}")
    turns = list(TRACES[name](rng, replicas, scale))
    computing = sum(len(turn.tokens) for session in turns for turn in session) / PROMPT_RATE
    holding = sum(map(token_seconds, turns)) / (pages * PAGE)
    seconds = max(computing, holding) / (busy * replicas)
    starts = sorted(rng.uniform(0, seconds) for _ in turns)
    return [Session(start, one, i) for i, (start, one) in enumerate(zip(starts, turns, strict=True))]


def token_seconds(turns: Sequence[Turn]) -> float:
    """Return how many tokens a session has in its context, times how long."""
    context, total = 0, 0.0
    for turn in turns:
        total += context * turn.pause
        context += len(turn.tokens) + turn.answer
        total += context * turn.answer / ANSWER_RATE
    return total


# --- policies


class Chooser:
    """Gives requests to replicas. A policy overrides choose(), and what it wants to know."""

    def __init__(self, replicas: Sequence[Replica], rng: random.Random) -> None:
        self.replicas, self.rng = replicas, rng

    def choose(self, request: Request) -> int:
        raise NotImplementedError

    def start(self, request: Request) -> None:
        """The first token of a request is there."""

    def end(self, request: Request) -> None:
        """A request has ended."""


class RoundRobin(Chooser):
    turn = -1

    def choose(self, request: Request) -> int:
        self.turn += 1
        return self.turn % len(self.replicas)


class LeastLoaded(Chooser):
    def choose(self, request: Request) -> int:
        least = min(replica.num_open for replica in self.replicas)
        return self.rng.choice([i for i, one in enumerate(self.replicas) if one.num_open == least])


class RayPrefixAware(Chooser):
    """Ray's, as documented."""

    imbalanced_threshold: float = 10
    match_rate_threshold = 0.1

    def __init__(self, replicas: Sequence[Replica], rng: random.Random) -> None:
        super().__init__(replicas, rng)
        self.past: list[set[int]] = [set() for _ in replicas]
        self.root = root_hash(NAMESPACE)

    def choose(self, request: Request) -> int:
        pages = list(page_hashes(self.root, request.tokens, PAGE))
        i = self._pick(pages)
        self.past[i].update(pages)
        return i

    def _pick(self, pages: Sequence[int]) -> int:
        queues = [replica.num_open for replica in self.replicas]
        if max(queues) - min(queues) >= self.imbalanced_threshold or not any(self.past):
            return self._better_of_two(range(len(queues)))
        matches = [sum(1 for _ in itertools.takewhile(past.__contains__, pages)) for past in self.past]
        best = max(matches)
        if pages and best / len(pages) >= self.match_rate_threshold:
            return self._better_of_two([i for i, match in enumerate(matches) if match == best])
        smallest = min(map(len, self.past))
        return self._better_of_two([i for i, past in enumerate(self.past) if len(past) == smallest])

    def _better_of_two(self, candidates: Sequence[int]) -> int:
        pair = self.rng.sample(candidates, min(2, len(candidates)))
        return min(pair, key=lambda i: self.replicas[i].num_open)


class RayWithoutThreshold(RayPrefixAware):
    imbalanced_threshold = float("inf")


class Nibble(Chooser):
    policy: Policy = DEFAULT

    def __init__(self, replicas: Sequence[Replica], rng: random.Random) -> None:
        super().__init__(replicas, rng)
        self.router = Router[int](self.policy)
        self.routes: dict[int, Route[int]] = {}
        for replica in replicas:
            self.router.add(replica.number, NAMESPACE, PAGE)
            replica.events.sinks.append(lambda events, i=replica.number: self.router.update(i, events))

    def choose(self, request: Request) -> int:
        route = self.routes[id(request)] = self.router.route(request.tokens)
        return route.replica

    def start(self, request: Request) -> None:
        self.router.start(self.routes[id(request)])

    def end(self, request: Request) -> None:
        self.router.end(self.routes.pop(id(request)), request.turn.answer)


POLICIES: dict[str, type[Chooser]] = {
    "nibble": Nibble, "ray-10": RayPrefixAware, "ray-inf": RayWithoutThreshold, "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}  # fmt: skip


# --- replicas in simulated time


@dataclass(eq=False, slots=True)
class Request:
    """A turn with its whole prompt."""

    session: Session
    place: int
    tokens: list[int]
    answer: list[int]
    came: float
    lease: Lease | None = None

    @property
    def turn(self) -> Turn:
        return self.session.turns[self.place]


@dataclass(eq=False)
class Replica:
    """An engine: the books of its cache, and a queue of prompts, which are computed one after the other."""

    number: int
    manager: CacheManager
    events: CacheEvents
    queue: deque[Request] = field(default_factory=deque)
    is_computing: bool = False
    num_open: int = 0
    lookup: int = 0
    hits: int = 0
    work: float = 0.0

    @classmethod
    def of_pages(cls, number: int, pages: int) -> Replica:
        manager, events = CacheManager(pages, PAGE), CacheEvents(NAMESPACE, PAGE)
        manager.observe(events)
        return cls(number, manager, events)


@dataclass
class Result:
    """What one policy made of one trace."""

    reuse: float
    """Share of prompt tokens that were cached."""
    load: float
    evicted: float
    """Pages that were evicted, over all pages."""
    waits: list[float]
    """From a request's arrival to its first token, in seconds, in order."""

    def wait(self, share: float) -> float:
        return self.waits[int(share * (len(self.waits) - 1))]


def simulate(
    sessions: Sequence[Session], replicas: int, pages: int, policy: type[Chooser], seed: int = 0
) -> Result:
    """Return what a policy makes of a trace.

    Args:
        sessions: the trace.
        replicas: engines.
        pages: of each engine's cache.
        policy: who chooses.
        seed: of what a policy draws.
    """
    fleet = [Replica.of_pages(i, pages) for i in range(replicas)]
    return Simulation(sessions, fleet, policy(fleet, random.Random(seed))).run()


class Simulation:
    """A trace on a fleet. rate: prompt tokens a second of a replica."""

    def __init__(
        self,
        sessions: Sequence[Session],
        fleet: Sequence[Replica],
        chooser: Chooser,
        rate: float = PROMPT_RATE,
    ) -> None:
        self.fleet, self.chooser, self.rate = fleet, chooser, rate
        self.now, self.order = 0.0, itertools.count()
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.waits: list[float] = []
        for session in sessions:
            self.at(session.start, lambda session=session: self.arrive(session, 0, []))

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), what))

    def run(self) -> Result:
        while self.agenda:
            self.now, _, what = heapq.heappop(self.agenda)
            what()
        work = [replica.work for replica in self.fleet]
        hits, lookup = sum(one.hits for one in self.fleet), sum(one.lookup for one in self.fleet)
        assert not any(replica.queue for replica in self.fleet), "requests were left behind"
        stats = [replica.manager.stats for replica in self.fleet]
        evicted = sum(one.evicted for one in stats) / sum(one.total for one in stats)
        return Result(hits / lookup, max(work) * len(work) / sum(work), evicted, sorted(self.waits))

    def arrive(self, session: Session, place: int, context: list[int]) -> None:
        turn = session.turns[place]
        # The same answer whoever gives it: all policies see one trace.
        rng = random.Random(session.number * 1000 + place)
        request = Request(session, place, context + turn.tokens, words(rng, turn.answer), self.now)
        replica = self.fleet[self.chooser.choose(request)]
        replica.num_open += 1
        replica.queue.append(request)
        self.compute(replica)

    def compute(self, replica: Replica) -> None:
        """Compute the next prompt, if there is one and room for it."""
        if replica.is_computing or not replica.queue:
            return
        request, manager = replica.queue[0], replica.manager
        lease = manager.open(request.tokens, f"{NAMESPACE}/")
        try:
            manager.reserve(lease, len(request.tokens) + len(request.answer))
        except OutOfPages:
            manager.release(lease)  # until an answer ends
            assert manager.leases, "a request is longer than the cache"
            return
        replica.queue.popleft()
        request.lease, replica.is_computing = lease, True
        computed = len(request.tokens) - lease.num_hit_tokens
        replica.lookup += len(request.tokens)
        replica.hits += lease.num_hit_tokens
        replica.work += computed + ANSWER_WORK * len(request.answer)
        replica.events.flush()
        self.at(self.now + computed / self.rate, lambda: self.answer(replica, request))

    def answer(self, replica: Replica, request: Request) -> None:
        assert request.lease
        replica.is_computing = False
        self.waits.append(self.now - request.came)
        replica.manager.commit(request.lease, request.tokens, len(request.tokens))
        replica.events.flush()
        self.chooser.start(request)
        self.at(self.now + len(request.answer) / ANSWER_RATE, lambda: self.end(replica, request))
        self.compute(replica)

    def end(self, replica: Replica, request: Request) -> None:
        assert request.lease
        context = request.tokens + request.answer
        # The last token is never computed.
        replica.manager.commit(request.lease, context, len(context) - 1)
        replica.manager.release(request.lease)
        replica.events.flush()
        replica.num_open -= 1
        self.chooser.end(request)
        session, place = request.session, request.place + 1
        if place < len(session.turns):
            self.at(self.now + session.turns[place].pause, lambda: self.arrive(session, place, context))
        self.compute(replica)


class Only(Chooser):
    def choose(self, request: Request) -> int:
        return 0


def shared_reuse(sessions: Sequence[Session], replicas: int, pages: int) -> float:
    """Return the reuse of one engine with all pages of a fleet, which computes prompts as fast as all of it."""
    fleet = [Replica.of_pages(0, pages * replicas)]
    return Simulation(sessions, fleet, Only(fleet, random.Random(0)), PROMPT_RATE * replicas).run().reuse


# --- tables


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report."""

    trace: str
    replicas: int
    policy: str
    share: float
    """Reuse, over that of one shared tree."""
    result: Result

    @property
    def holds(self) -> bool:
        return self.share >= FLOOR_REUSE and self.result.load <= CEILING_LOAD


def compare(
    trace: str, replicas: int, policies: Sequence[str], scale: float, seed: int, pages: int
) -> list[Row]:
    sessions = sessions_of(trace, replicas, scale, seed, pages)
    shared = shared_reuse(sessions, replicas, pages)
    rows = []
    for policy in policies:
        result = simulate(sessions, replicas, pages, POLICIES[policy], seed)
        rows.append(Row(trace, replicas, policy, result.reuse / shared, result))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| trace | replicas | policy | reuse | load | hit rate | evicted | first token, median s | 99 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row.trace, str(row.replicas), row.policy, f"{row.share:.3f}", f"{row.result.load:.3f}",
            f"{row.result.reuse:.3f}", f"{row.result.evicted:.2f}", f"{row.result.wait(0.5):.3f}",
            f"{row.result.wait(0.99):.2f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of sessions")
    parser.add_argument("--pages", type=int, default=2400, help=f"of {PAGE} tokens, of each replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    args = parser.parse_args()
    rows: list[Row] = []
    for trace, replicas in itertools.product(args.traces, args.replicas):
        start = time.perf_counter()
        rows += compare(trace, replicas, args.policies, args.scale, args.seed, args.pages)
        print(f"{trace}, {replicas} replicas: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        print(table(rows[-len(args.policies) :]), flush=True)
    if args.out:
        args.out.write_text(table(rows) + "\n")
    ours = [row for row in rows if row.policy == "nibble"]
    if missed := [f"{row.trace} x {row.replicas}" for row in ours if not row.holds]:
        sys.exit(f"reuse below {FLOOR_REUSE} or load above {CEILING_LOAD}: {', '.join(missed)}")


if __name__ == "__main__":
    main()
