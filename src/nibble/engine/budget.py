"""How a step's tokens are shared among prompts, by urgency and with a share for the first, and what limits chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nibble.engine.request import Request, ScheduledRequest

SLICES = 8
"""Slices of a budget. One is reserved for prompts, so that decodes cannot shut them out; of theirs, one is reserved for
the first of all, so that those with fewer tokens left cannot shut it out.
"""


def urgency_of(request: Request) -> tuple[int, int]:
    """Return what orders prompts: of equal priority, those with the fewest tokens left, whose answers begin soonest."""
    return request.priority, request.num_tokens - request.num_computed_tokens


def divide(demand: Sequence[int], urgency: Sequence[Any], room: int, least: int) -> list[int]:
    """Return shares of `room`: all that it wants to one after another by urgency, but `least` to the first of all.

    One prompt after another begins its answer sooner than all side by side, and in larger chunks.
    """
    shares = [0] * len(demand)
    if demand:
        shares[0] = min(demand[0], least, room)
    room -= sum(shares)
    for i in sorted(range(len(demand)), key=urgency.__getitem__):
        more = min(demand[i] - shares[i], room)
        shares[i] += more
        room -= more
    return shares


def limit_logprob_rows(split: dict[Request, int], room: int) -> None:
    """Shorten chunks, the last ones first, so that a step has no more than `room` log-probabilities of prompts.

    Args:
        split: tokens of each request in the step.
        room: rows.
    """
    scored = [one for one, count in split.items() if count and one.params.prompt_logprobs is not None]
    for request in scored:
        rows = ScheduledRequest.next_chunk(request, split[request]).logprob_rows
        if len(rows) > room:
            split[request] = rows.start + room - request.num_computed_tokens
        room -= min(len(rows), room)
