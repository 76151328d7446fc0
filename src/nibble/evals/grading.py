"""Recall through the engine: greedy answers to questions on long contexts, judged exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from nibble.engine.llm import LLM
from nibble.engine.outputs import Delta
from nibble.evals.recall import RecallCase


def grade(llm: LLM, cases: Sequence[RecallCase]) -> Iterator[bool]:
    """Of each question whether its greedy answer is exact. All are in flight together, in one batch."""
    answers = [llm.stream(case.prompt, max_tokens=_tokens(llm, case)) for case in cases]
    for pieces, case in zip(answers, cases, strict=True):
        yield _exact(pieces, case.answer)


def _tokens(llm: LLM, case: RecallCase) -> int:
    """Tokens that the answer takes, however it joins on to the prompt."""
    count = len(llm.tokenizer.encode(case.prompt + case.answer)) - len(llm.tokenizer.encode(case.prompt))
    return max(count, len(llm.tokenizer.encode(case.answer)), 1)


def _exact(pieces: Iterator[Delta], answer: str) -> bool:
    """Whether the pieces begin with `answer`; a wrong answer is given up at its first wrong character."""
    text = ""
    with closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            text += piece.text
            if not (answer.startswith(text) or text.startswith(answer)):
                return False
    return text.startswith(answer)
