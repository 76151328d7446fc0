"""Recall through the engine: greedy answers to questions on long contexts, judged exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from nibble.engine.llm import LLM
from nibble.engine.outputs import Delta
from nibble.evals.recall import RecallCase


def grade(llm: LLM, cases: Sequence[RecallCase]) -> Iterator[bool]:
    """Of each question whether its greedy answer is exact."""
    # All are submitted before the first one is read, so that the engine batches them.
    answers = [llm.stream(case.prompt, max_tokens=_tokens(llm, case)) for case in cases]
    for pieces, case in zip(answers, cases, strict=True):
        yield _exact(pieces, case.answer)


def _tokens(llm: LLM, case: RecallCase) -> int:
    """Tokens that the answer takes, however it joins on to the prompt."""
    count = len(llm.tokenizer.encode(case.prompt + case.answer)) - len(llm.tokenizer.encode(case.prompt))
    # A tokenizer may join the answer's first characters to the last token of the prompt.
    return max(count, len(llm.tokenizer.encode(case.answer)), 1)


def _exact(pieces: Iterator[Delta], answer: str) -> bool:
    """Whether the pieces begin with `answer`; a wrong answer is given up at its first wrong character."""
    text = ""
    # Closing aborts the request, so a wrong answer gives up its pages at once.
    with closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            text += piece.text
            if not (answer.startswith(text) or text.startswith(answer)):
                return False
    return text.startswith(answer)
