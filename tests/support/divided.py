"""Engines of models that are divided among ranks, which are threads (thread_ranks.py), and what they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from families import VOCAB
from nibble import LLM
from thread_ranks import threads_as_ranks

OPTIONS: dict[str, Any] = {"max_context": 128, "max_running": 4, "token_budget": 7}


def tokens(count: int, seed: int, vocabulary: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (count,), generator=generator).tolist()


PROMPT = tokens(40, seed=1)
PROMPTS = [PROMPT, PROMPT[:30] + tokens(9, 2), tokens(21, 3), PROMPT[:33] + tokens(20, 4), tokens(35, 5)]
"""Some begin alike."""


@contextmanager
def served(path: Path, tp: int, **options: Any) -> Iterator[LLM]:
    options = {**OPTIONS, **options}
    with threads_as_ranks(), LLM(str(path), tp=tp, **options) as llm:
        yield llm


def answers(llm: LLM, max_tokens: int = 10) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, max_tokens=max_tokens, temperature=0, ignore_eos=True, progress=False)
    return [output.completions[0].token_ids for output in outputs]
