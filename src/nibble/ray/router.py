"""The request router of Ray Serve that knows what each engine has cached. It lives in each front, beside the handle.

Serve copies this module by value to where the class is used, so that it has no state of its own.

Requests that hold no prompt, and all of them while no engine has said what it caches, go to the less busy of two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nibble.cache.events import KVEvent
from nibble.ray.choice import Chooser, Follower, Source, policy_of, register
from nibble.ray.client import sample_two
from nibble.server.worker import GenerationRequest


class KVRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the engine with the longest cached prefix, unless others have much less to do."""

    chooser: Chooser

    def initialize_state(self, **options: Any) -> None:
        """Begin with no replicas; Serve calls this. options: fields of nibble.routing.router.Policy."""
        self.chooser = Chooser(policy_of(options), self._follow)
        register(self.chooser, self.call_soon)

    def call_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in the router's own loop, from any thread."""
        if self._lazily_fetched_loop and not self._lazily_fetched_loop.is_closed():
            self._lazily_fetched_loop.call_soon_threadsafe(function, *arguments)

    def _follow(self, key: str, source: Source) -> Callable[[], None]:
        def deliver(events: Sequence[KVEvent]) -> None:
            self.call_soon(self.chooser.router.update, key, events)

        return Follower(source, deliver).stop

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are, and follow their events."""
        super().update_replicas(replicas)
        self.chooser.set_replicas(
            {_key(replica.replica_id): Source.parse(replica.replica_metadata) for replica in replicas}
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica, and what it had cached."""
        super().on_replica_actor_died(replica_id)
        self.chooser.remove(_key(replica_id))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica for a request, and then the others, for the case that it takes no more."""
        if pending_request:
            # Serve does not sleep between two tries otherwise.
            pending_request.routing_context.should_backoff = True
        request = _request_of(pending_request)
        if pending_request is None or request is None:
            return [sample_two(candidate_replicas)]
        by_key = {_key(replica.replica_id): replica for replica in candidate_replicas}
        busy = {key: self.replica_queue_len_cache.get(one.replica_id) or 0 for key, one in by_key.items()}
        name = pending_request.metadata.internal_request_id
        best = self.chooser.choose(name, request, by_key, busy)
        if best is None:
            return [sample_two(candidate_replicas)]
        pending_request.future.add_done_callback(partial(self._given_up, name))
        return [[by_key[best]], [replica for key, replica in by_key.items() if key != best]]

    def _given_up(self, name: str, future: asyncio.Future[Any]) -> None:
        # A request that is sent ends by on_request_completed().
        if future.cancelled():
            self.chooser.end(name)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note who took a request."""
        if request := _request_of(pending_request):
            self.chooser.routed(pending_request.metadata.internal_request_id, request, _key(replica_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended, or that a replica took it not."""
        self.chooser.end(internal_request_id, key=_key(replica_id))


def _key(replica_id: ReplicaID) -> str:
    return str(replica_id.to_full_id_str())


def _request_of(pending: PendingRequest | None) -> GenerationRequest | None:
    """Return the prompt of a call; None where it has none."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, GenerationRequest) and not isinstance(first.prompt, str) else None
