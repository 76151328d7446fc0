"""What mypy --strict sees in a user's script: real types of answers, and errors where an option does not exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nibble

ROOT = Path(nibble.__file__).parent
SCRIPT = """
import asyncio

from nibble import LLM, AsyncLLM, Output, SamplingParams

with LLM("demo", kv_format="nvfp4", kv_memory=1 << 26, calibrate=["text"]) as llm:
    reveal_type(llm.generate("hello", max_tokens=4))  # Output
    reveal_type(llm.generate(["a", "b"], [SamplingParams(), SamplingParams(seed=1)]))  # list[Output]
    reveal_type(llm.generate([1, 2, 3]))  # Output
    reveal_type(llm.generate({"prompt_token_ids": [1]}, sampling_params=SamplingParams()))  # Output
    reveal_type(llm.generate([{"prompt": "a"}, "b"], stop="x", priority=[1, 2]))  # list[Output]
    reveal_type(llm.chat([{"role": "user", "content": "hello"}]))  # Output
    reveal_type(llm.chat([[{"role": "user", "content": "hello"}]]))  # list[Output]
    reveal_type(llm.generate("hello").completions[0].token_ids)  # tuple[int, ...]
    for piece in llm.stream("hello", top_k=3):
        reveal_type(piece.text)  # str
    reveal_type(llm.plan.page_size)  # int
    reveal_type(llm.score("a", "b").logprob)  # float
    reveal_type(llm.score(["a", [1, 2]]))  # list[Score]
    llm.generate("hello", max_tokens="4")  # error: call-overload
    llm.generate("hello", temprature=1)  # error: did you mean "temperature"
    llm.generate(5)  # error: call-overload
    llm.stream("hello", n="2")  # error: arg-type
    LLM("demo", kv_fromat="nvfp4")  # error: did you mean "kv_format"
    nibble_has.nothing  # error: name-defined


async def main() -> list[Output]:
    async with AsyncLLM("demo", device="cpu") as served:
        async for piece in served.generate("hello", max_tokens=4):
            reveal_type(piece)  # Delta
        reveal_type(await served.generate("hello"))  # Output
        return list(await asyncio.gather(served.generate("a"), served.chat([{"role": "user"}], n=2)))
"""


@pytest.mark.slow
def test_mypy_of_a_users_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["mypy", "--strict", "--follow-imports=silent", "--hide-error-context", "--no-error-summary"]
    result = subprocess.run(
        [sys.executable, "-m", *command, "--cache-dir", str(tmp_path / "cache"), "script.py"],
        cwd=tmp_path, env={"MYPYPATH": str(ROOT.parent), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said: dict[int, str] = {}
    for line in result.stdout.splitlines():
        if match := re.match(r"script\.py:(\d+): (.*)", line):
            said[int(match[1])] = said.get(int(match[1]), "") + re.sub(r"nibble\.engine\.\w+\.", "", match[2])
    expected = {
        n: text.partition("  # ")[2] for n, text in enumerate(SCRIPT.splitlines(), 1) if "  # " in text
    }
    assert set(said) == set(expected), result.stdout + result.stderr
    for number, note in expected.items():
        wanted = note.removeprefix("error: ") if note.startswith("error") else f'Revealed type is "{note}"'
        assert wanted in said[number], f"line {number}: {said[number]}"


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "py.typed").exists()


def test_tab_completion_shows_the_public_names() -> None:
    assert dir(nibble) == sorted([*nibble.__all__, "__version__"])
    with pytest.raises(AttributeError, match="module 'nibble' has no attribute 'LLMM'"):
        nibble.LLMM  # type: ignore[attr-defined]  # noqa: B018
