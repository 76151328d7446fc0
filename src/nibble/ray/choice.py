"""Which engine of a cluster gets a request: the router on true prefix trees, fed by the KV events of engines elsewhere.

No Ray: an engine is a name and what it says of itself (Source). A request is chosen for, perhaps several times, before
one engine takes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nibble.cache.events import AllBlocksCleared, KVEvent
from nibble.errors import ConfigError
from nibble.routing.router import Policy, Route, Router, choose
from nibble.routing.subscriber import Subscriber
from nibble.server.worker import GenerationRequest

POLL_MS = 200
"""Longest wait for an event, before a follower looks whether it is to end."""
SOURCE_KEY = "nibble_kv_events"
"""Of a replica's metadata."""


@dataclass(frozen=True, slots=True)
class Source:
    """What an engine says of its prefix cache."""

    namespace: str
    page_size: int
    events: str
    """Where its KV events are published, as seen from other hosts."""
    replay: str | None = None

    @classmethod
    def parse(cls, metadata: Mapping[str, Any]) -> Source | None:
        """Return the source that a replica's metadata name; None where it publishes nothing."""
        facts = metadata.get(SOURCE_KEY)
        return cls(**facts) if facts else None


def policy_of(options: Mapping[str, Any]) -> Policy:
    """Return the policy of `router_options`; raise ConfigError where they are malformed."""
    names = Policy.__slots__
    for name, value in options.items():
        if name not in names:
            raise ConfigError(f"router_options {name!r} is not known; there are {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise ConfigError(f"router_options {name} must be a number of 0 or more, not {value!r}")
    policy = Policy(**options)
    if policy.horizon < 1:
        raise ConfigError(f"router_options horizon must be at least 1, not {policy.horizon}")
    return policy


class Chooser:
    """Chooses for requests by name, and keeps the router's books of those that are open.

    Args:
        policy: what costs how much.
        follow: begins to follow a source's events; returns what ends it. Tests have another.
    """

    def __init__(self, policy: Policy, follow: Callable[[str, Source], Callable[[], None]]) -> None:
        self.router: Router[str] = Router(policy)
        self._follow = follow
        self._sources: dict[str, tuple[Source, Callable[[], None]]] = {}
        self._open: dict[Hashable, tuple[GenerationRequest, Route[str]]] = {}
        self._names: dict[int, Hashable] = {}
        """Of open requests, by the id() of the object: the front that reads an answer knows no more."""

    def set_replicas(self, replicas: Mapping[str, Source | None]) -> None:
        """Say which engines there are; those without a source cannot be chosen."""
        for key in [key for key, (source, _) in self._sources.items() if replicas.get(key) != source]:
            self._sources.pop(key)[1]()
            self.router.remove(key)
        for key, source in replicas.items():
            if source and key not in self._sources:
                self.router.add(key, source.namespace, source.page_size)
                self._sources[key] = source, self._follow(key, source)

    def remove(self, key: str) -> None:
        """Forget an engine that died."""
        if entry := self._sources.pop(key, None):
            entry[1]()
            self.router.remove(key)

    def choose(
        self, name: Hashable, request: GenerationRequest, among: Collection[str], busy: Mapping[str, int]
    ) -> str | None:
        """Return the engine for a request; None where nothing is known of any.

        Args:
            name: of the request.
            request: the prompt, its salt and its number of answers.
            among: engines that may serve it.
            busy: requests of engines, as they said themselves: other fronts send them some too.
        """
        self.end(name)
        facts = {
            key: replace(fact, running=max(fact.running, busy.get(key, 0)))
            for key, fact in self.router.facts(request.prompt, request.salt).items()
            if key in among
        }
        if not facts:
            return None
        keys = list(facts)
        key = keys[choose([facts[key] for key in keys], len(request.prompt), self.router.policy)]
        self._take(name, request, key)
        return key

    def routed(self, name: Hashable, request: GenerationRequest, key: str) -> None:
        """Note that an engine took a request, perhaps another one than was chosen."""
        entry = self._open.get(name)
        if entry and entry[1].replica == key:
            return
        self.end(name)
        if key in self.router.replicas:
            self._take(name, request, key)

    def _take(self, name: Hashable, request: GenerationRequest, key: str) -> None:
        route = self.router.route(request.prompt, request.salt, request.params.n, among=(key,))
        self._open[name], self._names[id(request)] = (request, route), name

    def start(self, request: GenerationRequest) -> None:
        """Note that the first token of a request is there."""
        if entry := self._open.get(self._names.get(id(request))):
            self.router.start(entry[1])

    def finish(self, request: GenerationRequest, answer_tokens: int) -> None:
        """Note that a request was answered."""
        self.end(self._names.get(id(request)), answer_tokens)

    def end(self, name: Hashable, answer_tokens: int | None = None, key: str | None = None) -> None:
        """Note that a request has ended, was given up, or is chosen for again.

        Args:
            name: of the request.
            answer_tokens: of its answers, where they are complete.
            key: of the engine that had it: one that refused it may say so when another one has it.
        """
        entry = self._open.get(name)
        if entry is None or key not in (None, entry[1].replica):
            return
        del self._open[name]
        if self._names.get(id(entry[0])) == name:
            del self._names[id(entry[0])]
        self.router.end(entry[1], answer_tokens)

    @property
    def num_open(self) -> int:
        """Requests that were chosen for and have not ended."""
        return len(self._open)

    def close(self) -> None:
        """End what follows."""
        self.set_replicas({})


CallSoon = Callable[..., Any]
"""Calls a function with arguments in the event loop of a router, from any thread."""
_choosers: list[tuple[Chooser, CallSoon]] = []
"""Of this process. They are here and not beside the router's class, for Serve copies that one's module by value."""


def register(chooser: Chooser, call_soon: CallSoon) -> None:
    """Let a chooser hear of answers that begin and end in this process."""
    _choosers.append((chooser, call_soon))


def note_start(request: GenerationRequest) -> None:
    """Tell choosers that the first token of a request is there; from any thread."""
    for chooser, call_soon in _choosers:
        call_soon(chooser.start, request)


def note_finish(request: GenerationRequest, answer_tokens: int) -> None:
    """Tell choosers that a request was answered; from any thread."""
    for chooser, call_soon in _choosers:
        call_soon(chooser.finish, request, answer_tokens)


class Follower:
    """A thread that follows one engine's events.

    Args:
        source: of the events.
        deliver: takes events, from this thread.
    """

    def __init__(self, source: Source, deliver: Callable[[Sequence[KVEvent]], None]) -> None:
        self._source, self._deliver = source, deliver
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nibble-kv-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end soon; it is not waited for."""
        self._ending.set()

    def _run(self) -> None:
        subscriber = Subscriber(self._source.events, self._source.replay)
        try:
            while not self._ending.is_set():
                if events := subscriber.poll(POLL_MS):
                    self._deliver(events)
        except Exception:
            # What it held is not known any more.
            with suppress(RuntimeError):
                self._deliver([AllBlocksCleared()])
            raise
        finally:
            subscriber.close()
