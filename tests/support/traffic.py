"""Requests for a scheduler without a model: what the fake model says, what an answer must be, and random traffic."""

from __future__ import annotations

import random
from typing import Any

from nibble.engine.request import Request

VOCAB = 50


def prompt(length: int, seed: float = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def next_token(tokens: list[int]) -> int:
    """What the fake model says after `tokens`."""
    return (7 * sum(tokens[-3:]) + len(tokens)) % VOCAB


def expected(request: Request, limit: int) -> list[int]:
    """The answer that any schedule must give."""
    tokens = list(request.prompt_token_ids)
    while len(tokens) < min(limit, len(request.prompt_token_ids) + request.params.max_tokens):
        token = next_token(tokens)
        if token in request.stop_ids:
            break
        tokens.append(token)
    return tokens[len(request.prompt_token_ids) :]


def limits(dice: random.Random) -> dict[str, Any]:
    """A pool that is short of pages, mostly, and what a step may have."""
    return {
        "pages": dice.choice([8, 12, 40]),
        "prefix_cache": dice.random() < 0.8,
        "max_running": dice.choice([1, 3, 8]),
        "token_budget": dice.choice([1, 5, 16, 100]),
        "max_context": 32,
    }


def arrivals(engine: Any, dice: random.Random, priorities: tuple[int, ...] = (0,)) -> list[Request]:
    """Adds a request, and siblings now and then, whose prompt begins like others' now and then."""
    tokens = [
        *prompt(dice.choice([0, 6, 12]), dice.randrange(2)),
        *prompt(dice.randrange(1, 12), dice.random()),
    ]
    kind: dict[str, Any] = {
        "namespace": dice.choice("ab"),
        "stop_ids": frozenset(dice.choices(range(VOCAB), k=2)),
    }
    kind["priority"] = dice.choice(priorities)
    leader = engine.add(tokens, dice.randrange(1, 12), **kind)
    return [leader, *(engine.add(tokens, 5, waits_for=leader, **kind) for _ in range(dice.choice([0, 0, 2])))]
