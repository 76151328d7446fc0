"""Steps that follow one of the same requests, without all that a schedule has to look at.

Behind a step with drafts the device waits for the host, so what comes between them is as little as can be. Where drafts
are read first, the next step is made of the tokens that are added, and what was computed is stored once it is launched.
Where a head drafts, it may be launched before anything is read: the device knows which drafts count and how far each
request has come, and the host takes the most that it may be, until it has read the step before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nibble.engine.model_runner import ModelRunner
from nibble.engine.request import Batch, Request, ScheduledRequest
from nibble.engine.sampler import needs_output_tokens
from nibble.engine.scheduler import Scheduler
from nibble.errors import OutOfPages


def can_follow(scheduler: Scheduler, batch: Batch) -> bool:
    """Return whether the next step may have the same requests as `batch`, but for those that end, whatever it samples.

    Waiting requests that can run are admitted, and then it cannot.
    """
    # Pages that are reserved for drafts which did not count stay until store(); a host tier cannot have them.
    if scheduler.manager.residency or not all(item.phase.decodes for item in batch.scheduled):
        return False
    scheduler.admit()
    live = unfinished(batch)
    return 0 < len(live) == len(scheduler.running) and all(item.request.in_flight is item for item in live)


def unfinished(batch: Batch) -> list[ScheduledRequest]:
    """Return what is in flight of requests that have not ended since it was launched."""
    return [item for item in batch.scheduled if not item.request.is_finished]


def follow(
    scheduler: Scheduler, drafts: Mapping[Request, tuple[int, ...]], ended: Collection[Request] = ()
) -> Batch | None:
    """Return the next step of the same requests, behind one whose tokens are added and which is not stored.

    Args:
        scheduler: of the requests; of the step in flight can_follow() is true.
        drafts: tokens that may follow those of requests.
        ended: requests that end with it.

    Returns:
        None where pages are short, others wait for a place, or all requests end: store() comes first then, and
        schedule() as ever.
    """
    going = [request for request in scheduler.running if request not in ended]
    if scheduler.waiting and len(going) < len(scheduler.running):
        return None
    room, scheduled = scheduler.token_budget - len(going), list[ScheduledRequest]()
    for request in going:
        start = len(request.token_ids) - 1
        if of_request := drafts.get(request, ()):
            of_request = of_request[: min(room, scheduler.room_behind(request, start))]
            room -= len(of_request)
        upto = start + 1 + len(of_request)
        try:
            scheduler.manager.reserve(request.lease, upto, len(of_request), start=start)
        except OutOfPages:
            return None
        scheduled.append(ScheduledRequest.next_known(request, of_request))
    return Batch.from_scheduled(scheduled) if scheduled else None


NEAR_ENDS = 8
"""Part of a step's requests that may be so near their ends that it costs drafts not to read the step first. It is about
what the device loses where it waits for the host, 5 % of a step, beside half of the tokens that such a request gains.
"""


def can_run_ahead(scheduler: Scheduler, runner: ModelRunner, batch: Batch) -> bool:
    """Return whether the next step may be launched before `batch`, the only one in flight, is read.

    It must be a recorded one, with drafts of a head.
    """
    # Recurrent states, a host tier and other ranks are told by the host where a step begins, and so is a monitor.
    monitor = runner.error_monitor
    if runner.states or runner.tier or runner.followers or (monitor and monitor.is_sampling):
        return False
    if not runner.verified_size:
        return False
    requests = [item.request for item in unfinished(batch)]
    if any(_needs_tokens(request) for request in requests):
        return False
    most = max(len(item.drafts) for item in batch.scheduled)
    num_short = sum(room_ahead(scheduler, one) < min(most, scheduler.draft_room(one)) for one in requests)
    return NEAR_ENDS * num_short <= len(requests)


def _needs_tokens(request: Request) -> bool:
    """Return whether the next token cannot be drawn before the host knows those before it, or how many these are."""
    params = request.params
    return needs_output_tokens(params) or request.num_output_tokens < params.min_tokens


def room_ahead(scheduler: Scheduler, request: Request) -> int:
    """Return the most tokens that may be drafted behind a request's step in flight, whatever that brings."""
    item = request.in_flight
    assert item
    return scheduler.room_behind(request, item.end)


def reserve_unread(scheduler: Scheduler, batch: Batch, lengths: Mapping[Request, int]) -> bool:
    """Reserve pages for the next step of the same requests, before `batch` is read.

    Args:
        scheduler: of the requests.
        batch: the only one in flight, of which can_follow() is true.
        lengths: drafts that may follow tokens of requests.

    Returns:
        Whether there are enough, and nobody waits for a place that becomes free.
    """
    going = _going_on(batch)
    if scheduler.waiting and len(going) < len(scheduler.running):
        return False
    if len(going) + sum(lengths.values()) > scheduler.token_budget:
        return False
    try:
        for item in going:
            count = lengths.get(item.request, 0)
            # Whatever part of both steps' drafts does not count.
            scheduler.manager.reserve(
                item.request.lease, item.end + 1 + count, len(item.drafts) + count, start=item.start + 1
            )
    except OutOfPages:
        return False
    return True


def follow_unread(scheduler: Scheduler, batch: Batch, drafts: Mapping[Request, tuple[int, ...]]) -> Batch:
    """Return the next step of the same requests, to be launched before `batch` is read; see reserve_unread()."""
    going = {item.request for item in _going_on(batch)}
    return Batch.from_scheduled(
        ScheduledRequest.next_unread(request, drafts.get(request, ()))
        for request in scheduler.running
        if request in going
    )


def _going_on(batch: Batch) -> list[ScheduledRequest]:
    """Return what is in flight of requests that do not end with it whatever it brings: a token at least."""
    return [item for item in unfinished(batch) if item.start + 2 < item.request.last_length]
