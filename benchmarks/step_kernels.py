"""Where the time of a step goes: its kernels by the profiler, beside the time of the step, on one GPU.

    python benchmarks/step_kernels.py [--model llama-3.1-8b] [--weights int4] [--scheme nvfp4]
        [--decodes 8,32] [--context 1K] [--beside 0,256] [--prompts 16K] [--rows 30]

`--beside 256`: each decode step computes a prompt of so many tokens, too. `host`: the time of a step in which the host
does not wait for the device. Random weights; the gate is engine_gpu.py's. Kernels of replayed graphs are counted one by
one. Those that begin before the one in front has ended (early launches) overlap, so that their times may add up to more
than the step's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest import mock

import engine_load as load
import paged
import torch
from packed_weights import KINDS
from random_models import served
from report import markdown
from torch.profiler import ProfilerActivity, profile

import gpu
from nibble import LLM
from nibble.engine.sampler import SampledTokens

EXACT, QUANTISED = 0.05, 0.35
"""As in engine_gpu.py."""
NAME = 90
"""Characters of a kernel's name that are shown."""


def kernel_times(run: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Return by kernel how often it ran, and its microseconds in all."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return {
        event.key: (event.count, event.self_device_time_total)
        for event in found.key_averages()
        if event.self_device_time_total
    }


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each wait for what a step has sampled."""
    seconds, read = list[float](), SampledTokens.read_ids

    def timed(sampled: SampledTokens) -> list[int]:
        start = time.perf_counter()
        try:
            return read(sampled)
        finally:
            seconds.append(time.perf_counter() - start)

    with mock.patch.object(SampledTokens, "read_ids", timed):
        yield seconds


def table(times: dict[str, tuple[int, float]], steps: int, rows: int) -> str:
    """Return the longest kernels of a step, of which `steps` were profiled."""
    total = sum(time for _, time in times.values())
    lines = [
        (f"`{' '.join(name.split())[:NAME]}`", f"{count / steps:.1f}", f"{time / count:.2f}", f"{time / steps:.0f}",
         f"{time / total:.1%}")
        for name, (count, time) in sorted(times.items(), key=lambda item: -item[1][1])[:rows]
    ]  # fmt: skip
    lines.append(("all", f"{sum(n for n, _ in times.values()) / steps:.0f}", "", f"{total / steps:.0f}", ""))
    return markdown(("kernel", "a step", "us each", "us a step", "share"), lines)


def measure(llm: LLM, options: argparse.Namespace) -> None:
    """Print the times of decode steps and prompts, and their kernels."""
    load.fill_pool(llm)
    context = paged.tokens(options.context)
    steps = product(options.decodes.split(","), map(paged.tokens, options.beside.split(",")))
    for requests, beside in [(int(n), beside) for n, beside in steps if n]:
        run = partial(load.decode_step, llm, requests, context, beside)
        run()  # as the first run of a shape may compile
        with waiting() as waited:
            ms = run().ms
        host = ms - sorted(waited)[len(waited) // 2] * 1e3
        times = kernel_times(run)
        what = f"{requests} requests of {context}" + (f" beside a prompt of {beside}" if beside else "")
        print(f"\n**{what}: {ms:.3f} ms a step, host {host:.3f} ms**\n")
        print(table(times, load.STEPS + load.WARMUP, options.rows), flush=True)
    for length in [paged.tokens(text) for text in options.prompts.split(",") if text]:
        rate = load.prefill_rate(llm, length, 2 * length)
        prompt = load.random_prompt(length, llm.engine.vocab_size, 7)
        times = kernel_times(lambda p=prompt: llm.generate([p], max_tokens=1, temperature=0, progress=False))
        print(f"\n**a prompt of {length}: {rate:.0f} tokens/s, {length / rate * 1e3:.1f} ms**\n")
        print(table(times, 1, options.rows), flush=True)


def longest(options: argparse.Namespace) -> int:
    """Return the longest context that is measured."""
    texts = (options.context, *(text for text in options.prompts.split(",") if text))
    return max(load.STEPS + load.WARMUP + 256, max(map(paged.tokens, texts)) + 128)


def main() -> None:
    options = arguments().parse_args()
    with served(
        options.model, kv_format=options.scheme, weights=options.weights, device=gpu.device(),
        max_running=options.running, max_context=longest(options), token_budget=options.token_budget,
    ) as made:  # fmt: skip
        startup = made.llm.engine.startup
        print(
            f"{gpu.machine()}: {options.weights or 'bf16'} weights, {options.scheme} cache; {startup.summary}"
        )
        is_exact = options.scheme == "bf16" and not (options.weights and KINDS[options.weights].activations)
        error, below = load.gate(made.llm, made.prompt, made.expected_TV, EXACT if is_exact else QUANTISED)
        print(f"logits off {error:.1e}, answers at most {below:.2f} deviations below the best", flush=True)
        measure(made.llm, options)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--weights", default="", help=f"quantise linear layers: {', '.join(KINDS)}")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--decodes", default="8,32")
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--context", default="1K")
    parser.add_argument("--beside", default="0", help="tokens of a prompt in each decode step")
    parser.add_argument("--prompts", default="16K")
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=30, help="kernels that are shown")
    return parser


if __name__ == "__main__":
    main()
