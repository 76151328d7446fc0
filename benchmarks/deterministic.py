"""What --deterministic costs: prompts and decode steps of an 8B model with random weights, with it and without.

    python benchmarks/deterministic.py [--model llama-3.1-8b] [--scheme nvfp4] [--prompts 1024,8192]
        [--decodes 1x1024,8x1024,64x8192] [--tiny]

Both engines run one after the other on the same GPU, each with its own compiled model and graphs. Gate: logits of a
prompt against the unmodified model, as benchmarks/engine_gpu.py has it. The price is the last column; the aim is 1.35
for decode steps and 1.5 for prompts.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass

import engine_load as load
import torch
from random_models import served

import gpu

QUANTISED = 0.35
"""Bound on the relative error of logits over a quantised cache."""
PREFILL_TOKENS = 32768
"""Prompt tokens that the rate of each prompt length is measured with."""
DECODE_AIM, PROMPT_AIM = 1.35, 1.5


@dataclass(frozen=True)
class Times:
    """Milliseconds of a prompt by its length, and of a decode step by requests and context."""

    prompts: dict[int, float]
    decodes: dict[tuple[int, int], float]


def measure(options: argparse.Namespace, deterministic: bool) -> Times:
    """One engine."""
    shapes = [tuple(map(int, text.split("x"))) for text in options.decodes.split(",")]
    lengths = [int(text) for text in options.prompts.split(",")]
    longest = max(*lengths, *(context for _, context in shapes)) + 64
    engine = {"max_running": max(count for count, _ in shapes), "max_context": longest}
    with served(options.model, kv_format=options.scheme, deterministic=deterministic, **engine) as made:
        llm = made.llm
        mode = "deterministic" if deterministic else "normal"
        print(
            f"{mode}: {llm.engine.startup.summary}; {', '.join({r.backend for r in llm.plan.routes})}",
            flush=True,
        )
        error, _ = load.gate(llm, made.prompt, made.expected_TV, QUANTISED)
        print(f"  logits off {error:.1e}", flush=True)
        total = 256 if options.tiny else PREFILL_TOKENS
        prompts = {n: 1000 * n / load.prefill_rate(llm, n, max(n, total)) for n in lengths}
        load.fill_pool(llm)
        decodes = {(n, context): load.decode_step(llm, n, context).ms for n, context in shapes}
        return Times(prompts, decodes)


def table(normal: Times, deterministic: Times) -> str:
    """Markdown: both, and the price."""
    rows = [
        (f"prompt of {n}", ms, deterministic.prompts[n], PROMPT_AIM) for n, ms in normal.prompts.items()
    ] + [
        (f"decode {n} x {context}", ms, deterministic.decodes[n, context], DECODE_AIM)
        for (n, context), ms in normal.decodes.items()
    ]
    lines = ["| step | normal ms | deterministic ms | price | aim |", "|---|---|---|---|---|"]
    lines += [
        f"| {what} | {before:.2f} | {after:.2f} | {after / before:.2f} | {aim} |"
        for what, before, after, aim in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--prompts", default="1024,8192")
    parser.add_argument("--decodes", default="1x1024,8x1024,64x8192")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script itself")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.prompts, options.decodes = "tiny", "64,128", "1x64,4x128"
    times = []
    for deterministic in (False, True):
        times.append(measure(options, deterministic))
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
    print(table(*times))
    print(gpu.machine())


if __name__ == "__main__":
    main()
