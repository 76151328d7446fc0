"""How many drafts of a head are accepted, over a quantised cache and over one in 16 bits, by the length of the context.

    python benchmarks/draft_acceptance.py --model demo --speculative eagle3 --contexts 1024 4096 8192

Pairs: both caches read the same tokens. A prompt is a piece of the held-out text of the bundled model, or of --text,
and its answer is what the text goes on with, token by token, whatever the model would say. At each of these positions
the head drafts --tokens tokens, and the model says what it would have said after the text and the drafts (greedy). A
draft counts as in an answer: where it and all before it are the model's own choice. Each scheme is that of the model's
cache and of the head's.

A line gives the share of drafts that count, its ratio to that of the first scheme with a standard error (positions of
a prompt are not independent, so the error is that of a ratio of sums over prompts), and the share of positions where
both caches accept as many drafts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from nibble import LLM, SamplingParams
from nibble.engine import in_flight
from nibble.models.hub import locate


@contextmanager
def forced(answer: Sequence[int], hits: list[int]) -> Iterator[None]:
    """Let the one request that runs say `answer`, and note for each position how many drafts would have counted."""
    place = 0

    def run(drafts: Sequence[int], sampled: list[int]) -> list[int]:
        nonlocal place
        count = 0
        while count < len(drafts) and drafts[count] == sampled[count]:
            count += 1
        hits.append(count)
        place += 1
        return [answer[place - 1]]

    with mock.patch.object(in_flight, "accepted_run", run):
        yield


def accepted(arguments: argparse.Namespace, kv_format: str, pieces: Sequence[list[int]]) -> list[list[int]]:
    """Return for each piece of text the drafts that count at each position of its end."""
    # Its acceptance is not asked for, so no draft is cut short: a number, and not `auto`.
    llm = LLM(
        arguments.model, kv_format=kv_format, speculative=f"{arguments.speculative},kv_format={kv_format}",
        speculative_tokens=str(arguments.tokens), max_running=1, kv_memory=arguments.kv_memory,
        threads=arguments.threads,
    )  # fmt: skip
    result = []
    for piece in pieces:
        prompt, answer = piece[: -arguments.answer], piece[-arguments.answer :]
        hits = list[int]()
        params = SamplingParams(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
        with forced(answer, hits):
            llm.generate([prompt], params)
        # Nobody drafts for the first token, and for the last there is no room.
        result.append(hits[1:-1])
    llm.close()
    return result


def ratio(own: Sequence[Sequence[int]], base: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the ratio of two sums over prompts, and its standard error (delta method)."""
    a, b = [sum(hits) for hits in own], [sum(hits) for hits in base]
    share = sum(a) / max(sum(b), 1)
    spread = sum((x - share * y) ** 2 for x, y in zip(a, b, strict=True))
    return share, math.sqrt(spread * len(a) / max(len(a) - 1, 1)) / max(sum(b), 1)


def line(context: int, tokens: int, base: Sequence[Sequence[int]], own: Sequence[Sequence[int]]) -> str:
    """Return a line of the table."""
    # The last positions have room for fewer drafts, in both caches.
    pairs = [(x, y) for a, b in zip(base, own, strict=True) for x, y in zip(a, b, strict=True)]
    shares = [sum(hits) / (tokens * len(pairs)) for hits in zip(*pairs, strict=True)]
    first = [sum(hits > 0 for hits in column) / len(pairs) for column in zip(*pairs, strict=True)]
    value, error = ratio(own, base)
    same = sum(x == y for x, y in pairs) / len(pairs)
    cells = [f"{share:.3f} ({one:.3f})" for share, one in zip(shares, first, strict=True)]
    return f"{context:>8} {len(pairs):>9} {cells[0]:>16} {cells[1]:>16} {value:>7.3f} +- {error:.3f} {same:>6.3f}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--speculative", default="eagle3", help="without kv_format")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument(
        "--formats", nargs=2, default=["bf16", "nvfp4"], help="the second is compared with the first"
    )
    parser.add_argument("--prompts", type=int, default=12, help="of each length")
    parser.add_argument("--answer", type=int, default=96, help="positions of each prompt")
    parser.add_argument("--tokens", type=int, default=3, help="of a draft")
    parser.add_argument("--kv-memory", default="96MiB")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--text", type=Path, help="a file")
    arguments = parser.parse_args()
    text = (arguments.text or Path(locate(arguments.model)) / "heldout.txt").read_text(encoding="utf-8")
    tokenizer = LLM(arguments.model, kv_memory=arguments.kv_memory).engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    base, own = arguments.formats
    head = f"{'context':>8} {'positions':>9} {base + ' (first)':>16} {own + ' (first)':>16} {'ratio':>16} {'same':>6}"
    print(head, flush=True)
    for context in arguments.contexts:
        # Room for the drafts behind the last token.
        length = context - arguments.tokens
        step = max((len(ids) - length) // arguments.prompts, 1)
        pieces = [ids[start : start + length] for start in range(0, step * arguments.prompts, step)]
        hits = [accepted(arguments, kv_format, pieces) for kv_format in arguments.formats]
        print(line(context, arguments.tokens, *hits), flush=True)


if __name__ == "__main__":
    main()
