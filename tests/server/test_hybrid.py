"""Conversations with a hybrid model through a server: what is reused of their prompts, and that answers stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import running  # type: ignore[attr-defined]
from nibble import LLM
from tiny import QWEN3_NEXT, save_model, save_tokenizer

pytestmark = pytest.mark.slow

SYMBOLS, PAGE, ANSWER = 94, 16, 20
"""Letters that are a token each, so that an answer's text has the tokens it was made of."""
OPTIONS: dict[str, Any] = {
    "kv_format": "nvfp4", "state_format": "int8", "kv_memory": "16MiB", "device": "cpu", "page_size": PAGE,
    "compile": False,
}  # fmt: skip
SYSTEM = "Conversations-that-share-this-beginning/" * 5


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_model(folder, "qwen3_next", vocab_size=SYMBOLS, **QWEN3_NEXT)
    return save_tokenizer(folder, SYMBOLS)


def flags() -> list[str]:
    words = {name: value for name, value in OPTIONS.items() if name != "compile"}
    return [
        "--served-model-name=hybrid",
        *(f"--{name.replace('_', '-')}={value}" for name, value in words.items()),
        "--no-compile",
    ]


def test_turns_reuse_what_a_dense_model_would(hybrid: Path) -> None:
    """And answers are those of prompts that are computed whole, to the last letter."""
    said: list[tuple[str, str]] = []
    reused = dense = 0
    with running(*flags(), model=str(hybrid)) as url:
        for conversation in range(3):
            prompt = SYSTEM
            for turn in range(4):
                stored = len(prompt) - bool(turn)  # the last token of an answer is not computed
                prompt += f"<{conversation}:{turn}>" + "what-is-next?" * (1 + (conversation + turn) % 4)
                prompt += f"{31 * turn + conversation}="
                text, cached = complete(url, prompt)
                # The second conversation shows that others branch after the system prompt.
                if turn or conversation > 1:
                    dense += stored // PAGE * PAGE
                    reused += cached
                said.append((prompt, text))
                prompt += text
    assert 0.9 * dense <= reused <= dense
    with LLM(str(hybrid), prefix_cache=False, **OPTIONS) as llm:
        cold = [llm.generate(prompt, max_tokens=ANSWER, ignore_eos=True).text for prompt, _ in said]
    assert [text for _, text in said] == cold
    assert len(set(cold)) > len(cold) / 2, "answers depend on what was said before"


def complete(url: str, prompt: str) -> tuple[str, int]:
    """An answer, and the prompt's cached tokens."""
    asked = {"model": "hybrid", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    body = httpx.post(f"{url}/v1/completions", json=asked, timeout=300).json()
    text, usage = body["choices"][0]["text"], body["usage"]
    assert (usage["prompt_tokens"], len(text)) == (len(prompt), ANSWER)
    return text, usage["prompt_tokens_details"]["cached_tokens"]
