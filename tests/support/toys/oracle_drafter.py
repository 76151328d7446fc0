"""A drafter that was told the answers, and gets some tokens wrong: how much is accepted is then up to the test."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from nibble.engine import drafters
from nibble.engine.drafters.base import DrafterInfo, DraftTask

NAME = "oracle"


class Oracle:
    """Drafts what `answers` says, by prompt; each token is another one with probability `wrong`."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], wrong: float, vocab: int) -> None:
        self.answers, self.wrong, self.vocab = answers, wrong, vocab
        self.dice = random.Random(0)

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        return [self._propose(task) for task in tasks]

    def _propose(self, task: DraftTask) -> list[int]:
        request = task.request
        start = request.num_output_tokens
        right = self.answers.get(tuple(request.prompt_token_ids), ())[start : start + task.limit]
        return [
            self.dice.randrange(self.vocab) if self.dice.random() < self.wrong else token for token in right
        ]


@contextmanager
def oracle(
    answers: Mapping[tuple[int, ...], Sequence[int]], wrong: float = 0.3, vocab: int = 256, most: int = 15
) -> Iterator[str]:
    """Register the drafter, and return its name."""
    drafters.register(
        DrafterInfo(NAME, "knows the answers", lambda: Oracle(answers, wrong, vocab), max_tokens=most)
    )
    try:
        yield NAME
    finally:
        drafters.unregister(NAME)
