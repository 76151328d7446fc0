"""Chooses the replica that serves a request, by what its prefix cache holds of the prompt, and by how busy it is.

`choose` is the decision alone: facts in, an index out. `Router` keeps the facts:

- the prefix tree of each replica, from its KV events (cache/events.py), so that it knows what was evicted;
- the prompts that are on their way, so that requests which begin alike and come together go together;
- the work that each replica has, and had lately.

    router = Router[str]()
    router.add("a", namespace, page_size)        # as the engine's Ready has them; again when it was started again
    router.update("a", events)                   # as they come
    route = router.route(tokens, salt="")        # route.replica serves it
    router.start(route)                          # its first token is there
    router.end(route, answer_tokens=120)         # or it was aborted; always
    router.remove("a")                           # it is gone; its routes may still be ended

Nothing waits or locks: a router belongs to one thread, as an event loop's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nibble.cache.events import BlockRemoved, BlockStored, KVEvent, page_hashes, root_hash

Key = TypeVar("Key", bound=Hashable)
"""What names a replica."""
MAX_PAGES = 1 << 22
"""Most pages that are kept of one replica, whatever it says."""
FIRST_GUESS = 128.0
"""Tokens of an answer before any has ended."""
MEMORY = 0.05
"""Weight of an answer's length in the mean of all."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a replica costs a request, in prompt tokens that it must compute.

    The defaults were tuned by benchmarks/routing.py: a queue counts less than its length, because a copy of a prefix
    takes the place of other pages for long after the queue is gone.
    """

    queue: float = 0.3
    """Of each prompt token that waits there to be computed."""
    running: float = 24.0
    """Of each answer that is being computed there."""
    imbalance: float = 0.2
    """Of each token of work that it had lately, above `grace` and the replica that had the least."""
    overload: float = 2.0
    """The same, beside it, of each token above `grace` and `slack` times the mean."""
    slack: float = 1.03
    grace: float = 2048.0
    """Tokens of work that are no reason to leave a prompt's pages."""
    answer: float = 4.0
    """Work of a token of an answer, in prompt tokens."""
    horizon: int = 256
    """Requests of a replica after which work counts as past."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One replica, for one request."""

    cached_tokens: int = 0
    """Tokens of the prompt that it need not compute."""
    queued_tokens: int = 0
    """Prompt tokens of other requests that it has still to compute."""
    running: int = 0
    """Answers that are being computed, or wait for it."""
    recent_work: float = 0.0
    """Work that it was given lately, in prompt tokens."""


DEFAULT = Policy()


def choose(facts: Sequence[ReplicaFacts], prompt_tokens: int, policy: Policy = DEFAULT) -> int:
    """Return the index of the replica that serves a prompt at the least cost.

    Args:
        facts: of each replica that may serve it, at least one.
        prompt_tokens: of the prompt.
        policy: what costs how much.
    """
    least = min(fact.recent_work for fact in facts)
    mean = sum(fact.recent_work for fact in facts) / len(facts)
    limit = policy.slack * mean + policy.grace

    def cost(fact: ReplicaFacts) -> float:
        return (
            prompt_tokens
            - fact.cached_tokens
            + policy.queue * fact.queued_tokens
            + policy.running * fact.running
            + policy.imbalance * max(0.0, fact.recent_work - least - policy.grace)
            + policy.overload * max(0.0, fact.recent_work - limit)
        )

    # Among equals the one that had the least to do.
    return min(range(len(facts)), key=lambda i: (cost(facts[i]), facts[i].recent_work, i))


@dataclass(slots=True)
class _Replica:
    """What a router knows of a replica."""

    namespace: str
    page_size: int
    held: set[int] = field(default_factory=set)
    """Pages of its prefix tree. With a page, all pages above it are there."""
    expected: Counter[int] = field(default_factory=Counter)
    """Pages of prompts that it was given and has not computed yet."""
    queued_tokens: int = 0
    running: int = 0
    recent_work: float = 0.0

    def count(self, pages: Sequence[int]) -> int:
        """Return how many of a prompt's pages, from the first one, it holds or will."""
        held, expected, low, high = self.held, self.expected, 0, len(pages)
        # What holds a page holds all above it.
        while low < high:
            middle = (low + high) // 2
            if pages[middle] in held or pages[middle] in expected:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(eq=False, slots=True)
class Route(Generic[Key]):
    """A request that was given to a replica."""

    replica: Key
    cached_tokens: int
    """Tokens of the prompt that were expected in its prefix cache."""
    computed_tokens: int
    """The others."""
    answers: int
    answer_tokens: float
    """Of all answers, as they were expected."""
    pages: list[int]
    """Names of the prompt's pages."""
    state: _Replica
    """Of the replica as it was then: another one after a restart has no part in this."""
    is_started: bool = False
    is_ended: bool = False


class Router(Generic[Key]):
    """Knows the prefix trees and the load of all replicas.

    Args:
        policy: what costs how much.
    """

    def __init__(self, policy: Policy = DEFAULT) -> None:
        self.policy = policy
        self._replicas: dict[Key, _Replica] = {}
        self._answer_tokens = FIRST_GUESS

    @property
    def replicas(self) -> Collection[Key]:
        """Return the replicas that are there."""
        return self._replicas.keys()

    def add(self, replica: Key, namespace: str, page_size: int) -> None:
        """Add a replica whose cache is empty; one that was there is forgotten first, with its requests.

        Args:
            replica: its name.
            namespace: of its pages: the layout, the scheme, and the version of their scales.
            page_size: tokens of a page.
        """
        newcomer = _Replica(namespace, page_size)
        self._replicas.pop(replica, None)
        if self._replicas:
            # It did nothing yet: it is no reason to give it everything.
            total = sum(other.recent_work for other in self._replicas.values())
            newcomer.recent_work = total / len(self._replicas)
        self._replicas[replica] = newcomer

    def remove(self, replica: Key) -> None:
        """Forget a replica."""
        self._replicas.pop(replica, None)

    def update(self, replica: Key, events: Iterable[KVEvent]) -> None:
        """Take in what happened to a replica's prefix cache; of an unknown replica nothing is kept."""
        if (state := self._replicas.get(replica)) is None:
            return
        for event in events:
            if isinstance(event, BlockStored):
                if len(state.held) + len(event.block_hashes) > MAX_PAGES:
                    state.held.clear()
                state.held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                state.held.difference_update(event.block_hashes)
            else:
                state.held.clear()

    def num_pages(self, replica: Key) -> int:
        """Return how many pages of a replica are in its tree."""
        return len(self._replicas[replica].held)

    def facts(self, tokens: Sequence[int], salt: str = "") -> dict[Key, ReplicaFacts]:
        """Return the facts of all replicas for a prompt.

        Args:
            tokens: the prompt.
            salt: only requests of the same salt share pages.
        """
        pages = self._pages(tokens, salt)
        return {key: self._facts(state, pages) for key, state in self._replicas.items()}

    def route(
        self, tokens: Sequence[int], salt: str = "", answers: int = 1, among: Collection[Key] | None = None
    ) -> Route[Key]:
        """Give a request to a replica.

        Args:
            tokens: the prompt.
            salt: only requests of the same salt share pages.
            answers: to the prompt.
            among: replicas that may serve it; None: all. At least one of them must be there.
        """
        pages = self._pages(tokens, salt)
        keys = [key for key in self._replicas if among is None or key in among]
        facts = [self._facts(self._replicas[key], pages) for key in keys]
        i = choose(facts, len(tokens), self.policy)
        state, computed = self._replicas[keys[i]], len(tokens) - facts[i].cached_tokens
        answer_tokens = self._answer_tokens * answers
        names = pages[state.namespace, state.page_size]
        self._forget_a_little()
        state.recent_work += computed + self.policy.answer * answer_tokens
        state.queued_tokens += computed
        state.running += answers
        state.expected.update(names)
        return Route(keys[i], facts[i].cached_tokens, computed, answers, answer_tokens, names, state)

    def start(self, route: Route[Key]) -> None:
        """Note that a request's prompt is computed: what is kept of it, events say. Only the first call counts."""
        if route.is_started:
            return
        route.is_started, state = True, route.state
        state.queued_tokens -= route.computed_tokens
        for page in route.pages:
            state.expected[page] -= 1
            if not state.expected[page]:
                del state.expected[page]
        route.pages = []

    def end(self, route: Route[Key], answer_tokens: int | None = None) -> None:
        """Note that a request has ended. Only the first call counts.

        Args:
            route: of the request.
            answer_tokens: of all its answers; None where it was given up.
        """
        if route.is_ended:
            return
        self.start(route)
        route.is_ended = True
        route.state.running -= route.answers
        if answer_tokens is not None:
            self._answer_tokens += MEMORY * (answer_tokens / route.answers - self._answer_tokens)
            surplus = self.policy.answer * (answer_tokens - route.answer_tokens)
            route.state.recent_work = max(0.0, route.state.recent_work + surplus)

    def _pages(self, tokens: Sequence[int], salt: str) -> dict[tuple[str, int], list[int]]:
        """Return the names of the prompt's pages, by the namespace and page size of replicas: most often one."""
        kinds = {(state.namespace, state.page_size) for state in self._replicas.values()}
        return {
            (namespace, size): list(page_hashes(root_hash(f"{namespace}/{salt}"), tokens, size))
            for namespace, size in kinds
        }

    def _facts(self, state: _Replica, pages: Mapping[tuple[str, int], Sequence[int]]) -> ReplicaFacts:
        cached = state.count(pages[state.namespace, state.page_size]) * state.page_size
        return ReplicaFacts(cached, state.queued_tokens, state.running, state.recent_work)

    def _forget_a_little(self) -> None:
        share = 1 - 1 / (self.policy.horizon * len(self._replicas))
        for state in self._replicas.values():
            state.recent_work *= share
