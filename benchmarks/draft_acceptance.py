"""How many drafts of a head are accepted, over a quantised cache and over one in 16 bits, by the length of the context.

    python benchmarks/draft_acceptance.py --model demo --speculative eagle3 --contexts 1024 4096 8192

Prompts are pieces of the held-out text of the bundled model, or of --text; answers are greedy. Each scheme is that of
the model's cache and of the head's. A line gives accepted of all drafts, where each draft has --tokens tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nibble import LLM, SamplingParams
from nibble.models.hub import locate


def accepted(arguments: argparse.Namespace, kv_format: str, prompts: list[list[int]]) -> tuple[int, int]:
    """Return accepted drafts and all."""
    llm = LLM(
        arguments.model, kv_format=kv_format, speculative=f"{arguments.speculative},kv_format={kv_format}",
        speculative_tokens=str(arguments.tokens), max_running=2, kv_memory=arguments.kv_memory,
    )  # fmt: skip
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=arguments.answer, temperature=0.0, ignore_eos=True)
    )
    ones = [output.completions[0] for output in outputs]
    llm.close()
    hits = sum(one.accepted_drafts for one in ones)
    return hits, hits + sum(one.rejected_drafts for one in ones)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="demo")
    parser.add_argument("--speculative", default="eagle3", help="without kv_format")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument(
        "--formats", nargs=2, default=["bf16", "nvfp4"], help="the second is compared with the first"
    )
    parser.add_argument("--prompts", type=int, default=8, help="of each length")
    parser.add_argument("--answer", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--tokens", type=int, default=3, help="of a draft")
    parser.add_argument("--kv-memory", default="96MiB")
    parser.add_argument("--text", type=Path, help="a file")
    arguments = parser.parse_args()
    text = (arguments.text or Path(locate(arguments.model)) / "heldout.txt").read_text(encoding="utf-8")
    tokenizer = LLM(arguments.model, kv_memory=arguments.kv_memory).engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    print(f"{'context':>8} {arguments.formats[0]:>16} {arguments.formats[1]:>16} {'ratio':>6}", flush=True)
    for context in arguments.contexts:
        length = context - arguments.answer
        step = max((len(ids) - length) // arguments.prompts, 1)
        prompts = [ids[start : start + length] for start in range(0, step * arguments.prompts, step)]
        counts = [accepted(arguments, kv_format, prompts) for kv_format in arguments.formats]
        shares = [hits / max(drafted, 1) for hits, drafted in counts]
        cells = [f"{share:.3f} of {drafted}" for share, (_, drafted) in zip(shares, counts, strict=True)]
        print(
            f"{context:>8} {cells[0]:>16} {cells[1]:>16} {shares[1] / max(shares[0], 1e-9):>6.3f}", flush=True
        )


if __name__ == "__main__":
    main()
