"""Conversations with a hybrid model through `nibble serve`: what of their prompts is reused, and what that saves.

    python benchmarks/hybrid_replay.py [--model demo-hybrid] [--kv-format nvfp4] [--state-format int8]
        [--conversations 8] [--turns 5] [--system 800] [--answer 48] [--device cpu] [--tiny] [--out FOLDER] [--report]

Conversations share two system prompts, and take turns: the first turn of all, then the second. Each asks in a chat, and
every next prompt has all that was said before. A dense model would go on after the last page that the prefix cache
finds; a hybrid one needs the states there too, goes on from the last snapshot before it, and computes tokens between
again (`replayed`).

The same prompts are then asked of a server without a prefix cache. Gates: answers are the same, and of what a dense
model would reuse at least 90 % is reused. Times to the first token are the client's, one request at a time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from report import Aim, aims_table, markdown
from serve_parity import scrape
from serve_soak import server

import gpu
from nibble.evals.perplexity import read_text

FLOOR, AIM = 0.90, 0.97
STATS_S = 5.0
"""Seconds in which a server tells of its last step."""
MEMORY = "256MiB"
Messages = list[dict[str, str]]
Options = argparse.Namespace


@dataclass(frozen=True)
class Turn:
    """One prompt of a conversation, and what was said and counted."""

    conversation: int
    number: int
    messages: Messages
    text: str
    seconds: float
    """To the first token."""
    prompt: int
    """Tokens."""
    reused: int
    replayed: int


def topics(model: str, conversations: int, turns: int, system: int, seed: int = 0) -> list[list[str]]:
    """For each conversation the system prompt, and what is said in each turn: pieces of a text, in characters."""
    dice, text = random.Random(seed), read_text(None, model).content

    def piece(letters: int) -> str:
        start = dice.randrange(len(text) - letters)
        return text[start : start + letters].strip()

    systems = [f"You help with this code.\n{piece(3 * system)}" for _ in range(2)]
    asked = (
        "What does this do?",
        "Write a function like this.",
        "Go on with it.",
        "Is there a mistake in it?",
    )
    return [
        [systems[i % 2], *(f"{dice.choice(asked)}\n{piece(dice.randint(60, 700))}" for _ in range(turns))]
        for i in range(conversations)
    ]


def ask(url: str, messages: Messages, tokens: int) -> tuple[str, float, dict[str, Any]]:
    """The answer, the seconds to its first token, and the usage."""
    body = {
        "model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"], "messages": messages, "temperature": 0,
        "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    start, first, text, usage = time.perf_counter(), 0.0, "", {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"the server cannot answer: {chunk['error']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                first = first or time.perf_counter() - start
    return text, first, usage


def counts(url: str, after: float) -> dict[str, float]:
    """The server's counters once they say that so many tokens were looked up."""
    end = time.monotonic() + STATS_S
    while True:
        numbers = scrape(url)
        if numbers.get("prefix_cache_queries_total", 0.0) >= after:
            return numbers
        if time.monotonic() > end:
            raise SystemExit("the server does not tell of its prefix cache")
        time.sleep(0.1)


def converse(url: str, topic: Sequence[Sequence[str]], tokens: int) -> list[Turn]:
    """All conversations, turn by turn."""
    histories: list[Messages] = [[{"role": "system", "content": words[0]}] for words in topic]
    done: list[Turn] = []
    before, looked_up = scrape(url), 0.0
    for number in range(len(topic[0]) - 1):
        for i, history in enumerate(histories):
            history.append({"role": "user", "content": topic[i][number + 1]})
            text, seconds, usage = ask(url, history, tokens)
            looked_up += usage["prompt_tokens"] - 1  # the last token is always computed
            now = counts(url, looked_up)
            reused, replayed = (
                int(now.get(name, 0) - before.get(name, 0))
                for name in ("prefix_cache_hits_total", "recurrent_state_replayed_tokens_total")
            )
            before = now
            done.append(Turn(i, number, [*history], text, seconds, usage["prompt_tokens"], reused, replayed))
            history.append({"role": "assistant", "content": text})
    return done


def flags(options: Options, *more: str) -> list[str]:
    shared = ["--kv-format", options.kv_format, "--state-format", options.state_format, "--kv-memory", MEMORY]
    return [*shared, "--device", options.device, "--kv-scales", "auto", *more]


def measure(options: Options) -> tuple[list[Turn], list[tuple[str, float]]]:
    """All turns with a prefix cache; and the answers to the same prompts without one, with their times."""
    topic = topics(options.model, options.conversations, options.turns, options.system)
    with server(options.model, flags(options)) as (url, _):
        ask(url, [{"role": "user", "content": "Hello"}], 4)  # what a first request costs is in neither
        time.sleep(1)
        warm = converse(url, topic, options.answer)
    with server(options.model, flags(options, "--no-prefix-cache")) as (url, _):
        ask(url, [{"role": "user", "content": "Hello"}], 4)
        cold = [ask(url, turn.messages, options.answer)[:2] for turn in warm]
    return warm, cold


def table(warm: Sequence[Turn], cold: Sequence[tuple[str, float]]) -> str:
    """A row for each turn, over all conversations."""
    rows = []
    for number in range(max(turn.number for turn in warm) + 1):
        pairs = [
            (turn, seconds) for turn, (_, seconds) in zip(warm, cold, strict=True) if turn.number == number
        ]
        turns = [turn for turn, _ in pairs]
        prompt, reused, replayed = (
            sum(getattr(turn, name) for turn in turns) for name in ("prompt", "reused", "replayed")
        )
        rows.append(
            (
                number + 1, f"{prompt:,}", f"{(reused + replayed) / prompt:.1%}", f"{reused / prompt:.1%}",
                f"{1000 * statistics.median(turn.seconds for turn in turns):.0f} ms",
                f"{1000 * statistics.median(seconds for _, seconds in pairs):.0f} ms",
            )
        )  # fmt: skip
    head = (
        "turn",
        "prompt tokens",
        "a dense model would reuse",
        "reused",
        "first token",
        "without prefix cache",
    )
    return markdown(head, rows)


def aims(warm: Sequence[Turn], cold: Sequence[tuple[str, float]]) -> list[Aim]:
    reused, replayed = (sum(getattr(turn, name) for turn in warm) for name in ("reused", "replayed"))
    share = reused / max(reused + replayed, 1)
    same = sum(turn.text == text for turn, (text, _) in zip(warm, cold, strict=True)) / len(warm)
    return [
        Aim("reuse", "tokens reused / those that a dense model would reuse", FLOOR, AIM, share),
        Aim("answers", "share that is the same as without a prefix cache", 1.0, 1.0, same),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-hybrid")
    parser.add_argument("--kv-format", default="nvfp4")
    parser.add_argument("--state-format", default="int8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system", type=int, default=800, help="tokens of a system prompt, about")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    parser.add_argument(
        "--tiny", action="store_true", help="two short conversations, to try the benchmark itself"
    )
    gpu.add_output_options(parser)
    options = parser.parse_args()
    if options.tiny:
        options.conversations, options.turns, options.system, options.answer = 2, 2, 60, 6
    warm, cold = measure(options)
    judged = aims(warm, cold)
    prompts = [turn.prompt for turn in warm]
    texts = [
        f"`{options.model}` with `{options.kv_format}` and states in `{options.state_format}`: {options.conversations} "
        f"conversations of {options.turns} turns, prompts of {min(prompts):,} to {max(prompts):,} tokens, answers of "
        f"{options.answer}.",
        table(warm, cold), aims_table(judged),
    ]  # fmt: skip
    figures = [asdict(turn) for turn in warm]
    gpu.publish("hybrid_replay", options, str(__doc__), texts, gpu.versions(), turns=figures)
    if any(aim.verdict == "MISSED" for aim in judged):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
