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
from collections.abc import Collection, Hashable, Iterable, Sequence
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
    """What a replica costs a request, in prompt tokens that it must compute."""

    queue: float = 1.0
    """Of each prompt token that waits there to be computed."""
    running: float = 64.0
    """Of each answer that is being computed there."""
    imbalance: float = 0.3
    """Of each token of work that it had lately, above `grace` and the replica that had the least."""
    overload: float = 4.0
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

    def holds(self, page: int) -> bool:
        return page in self.held or page in self.expected


@dataclass(eq=False, slots=True)
class Route(Generic[Key]):
    """A request that was given to a replica."""

    replica: Key
    cached_tokens: int
    """Tokens of the prompt that were expected in its prefix cache."""
    computed_tokens: int
    """The others."""
    work: float
    """What was added to the replica's recent work."""
    answers: int
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
        """Return how many pages of a replica are state."""
        return len(self._replicas[replica].held)

    def facts(self, tokens: Sequence[int], salt: str = "") -> dict[Key, ReplicaFacts]:
        """Return the facts of all replicas for a prompt.

        Args:
            tokens: the prompt.
            salt: only requests of the same salt share pages.
        """
        cached = self._cached(self._chains(tokens, salt))
        return {
            key: ReplicaFacts(cached[key], state.queued_tokens, state.running, state.recent_work)
            for key, state in self._replicas.items()
        }

    def route(
        self, tokens: Sequence[int], salt: str = "", answers: int = 1, among: Collection[Key] | None = None
    ) -> Route[Key]:
        """Give a request to a replica.

        Args:
            tokens: the prompt.
            salt: only requests of the same salt share pages.
            answers: to the prompt.
            among: replicas that may serve it; None: all. At least one of them must be state.
        """
        names = self._chains(tokens, salt)
        cached = self._cached(names)
        keys = [key for key in self._replicas if among is None or key in among]
        candidates = [self._replicas[key] for key in keys]
        facts = [
            ReplicaFacts(cached[key], state.queued_tokens, state.running, state.recent_work)
            for key, state in zip(keys, candidates, strict=True)
        ]
        i = choose(facts, len(tokens), self.policy)
        computed = len(tokens) - facts[i].cached_tokens
        work = computed + self.policy.answer * self._answer_tokens * answers
        key, state = keys[i], candidates[i]
        pages = names[state.namespace, state.page_size].all()
        self._forget_a_little()
        state.recent_work += work
        state.queued_tokens += computed
        state.running += answers
        state.expected.update(pages)
        return Route(key, facts[i].cached_tokens, computed, work, answers, pages, state)

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
        if answer_tokens is not None:
            mean = answer_tokens / route.answers
            self._answer_tokens += MEMORY * (mean - self._answer_tokens)
        route.state.running -= route.answers

    def _chains(self, tokens: Sequence[int], salt: str) -> dict[tuple[str, int], _Names]:
        """Return the names of the prompt's pages, by the namespace and page size of replicas: most often one."""
        kinds = {(state.namespace, state.page_size) for state in self._replicas.values()}
        return {
            (namespace, page_size): _Names(f"{namespace}/{salt}", tokens, page_size)
            for namespace, page_size in kinds
        }

    def _cached(self, chains: dict[tuple[str, int], _Names]) -> dict[Key, int]:
        """Return the tokens of a prompt that each replica holds."""
        return {
            key: chains[state.namespace, state.page_size].count(state) * state.page_size
            for key, state in self._replicas.items()
        }

    def _forget_a_little(self) -> None:
        share = 1 - 1 / (self.policy.horizon * len(self._replicas))
        for state in self._replicas.values():
            state.recent_work *= share


class _Names:
    """The names of a prompt's pages, computed as far as they are needed."""

    def __init__(self, namespace: str, tokens: Sequence[int], page_size: int) -> None:
        self._names = page_hashes(root_hash(namespace), tokens, page_size)
        self._list: list[int] = []

    def count(self, replica: _Replica) -> int:
        """Return how many of the first pages a replica holds."""
        number = 0
        while (name := self._at(number)) is not None and replica.holds(name):
            number += 1
        return number

    def all(self) -> list[int]:
        self._list += self._names
        return self._list

    def _at(self, number: int) -> int | None:
        if number == len(self._list):
            if (name := next(self._names, None)) is None:
                return None
            self._list.append(name)
        return self._list[number]
