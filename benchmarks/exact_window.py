"""What an exact window costs on one GPU: decode steps, prompts and whole workloads with it and without, same run.

    python benchmarks/exact_window.py [--model llama-3.1-8b] [--scheme nvfp4] [--windows 0,64] [--decodes 64x8K,8x1K]
        [--prompts 16K] [--full 1K/1K@128] [--kernels] [--tiny] [--out FOLDER] [--report]

One engine for each window, one after the other on the same GPU, with random weights, compiled and recorded as ever.
`--kernels` lists what prompts and decode steps spend in which kernel. Gate: logits of a prompt against the unmodified
model, and greedy answers of decode steps against logits of whole prompts (engine_load.gate).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import engine_load as load
import paged
import torch
from engine_load import Workload
from random_models import served
from report import Aim, aims_table, markdown, ratio

import gpu
from nibble import LLM, SamplingParams

QUANTISED = 0.35
"""Bound on the relative error of logits over a quantised cache."""
PREFILL_TOKENS = 65536
AIMS = {"64x8K": 0.96, "64x32K": 0.96, "8x1K": 0.90}
"""Least share of the speed of a decode step without a window."""
PROMPT_AIM, WORKLOAD_AIM = 0.97, 0.96


@dataclass
class Times:
    """What was measured with one window."""

    window: int
    decodes: dict[str, float] = field(default_factory=dict)
    """Milliseconds of a step."""
    prompts: dict[str, float] = field(default_factory=dict)
    """Tokens a second."""
    workloads: dict[str, float] = field(default_factory=dict)
    """Output tokens a second."""


def measure(options: argparse.Namespace, window: int) -> Times:
    """One engine."""
    times, began = Times(window), time.perf_counter()
    shapes = [text for text in options.decodes.split(",") if text]
    full = [text.partition("@") for text in options.full.split(",") if text]
    lengths = [n for text in shapes for n in paged.requests(text)]
    lengths += [paged.tokens(text) for text in options.prompts.split(",") if text]
    lengths += [sum((work.prompt, work.answer)) for work in (Workload.parse(text) for text, _, _ in full)]
    counts = [len(paged.requests(text)) for text in shapes] + [int(count) for _, _, count in full]
    engine = {
        "max_running": max(counts), "max_context": max(lengths) + 128, "token_budget": 64 if options.tiny else 8192,
        "device": gpu.device(), **({"kv_memory": "64MiB"} if options.tiny else {}),
    }  # fmt: skip
    with served(options.model, kv_format=options.scheme, kv_window=window, **engine) as made:
        llm = made.llm
        say(f"window {window}: {time.perf_counter() - began:.0f} s ({llm.engine.startup.summary})")
        error, below = load.gate(llm, made.prompt, made.expected_TV, QUANTISED)
        say(f"  logits off {error:.1e}, answers at most {below:.2f} deviations below the best")
        for text in options.prompts.split(","):
            length = paged.tokens(text)
            times.prompts[text] = load.prefill_rate(llm, length, length if options.tiny else PREFILL_TOKENS)
            say(f"  prompts of {text}: {times.prompts[text]:.0f} tokens/s")
            if options.kernels:
                say(prompt_kernels(llm, length))
        for text, _, count in full:
            times.workloads[f"{text}@{count}"] = run(llm, Workload.parse(text), int(count))
            say(f"  {text}@{count}: {times.workloads[f'{text}@{count}']:.0f} output tokens/s")
        load.fill_pool(llm)
        for text in shapes:
            requests = paged.requests(text)
            times.decodes[text] = load.decode_step(llm, len(requests), requests[0]).ms
            say(f"  {text}: {times.decodes[text]:.3f} ms a step")
            if options.kernels:
                say(kernels(llm, len(requests), requests[0]))
    return times


def run(llm: LLM, work: Workload, count: int) -> float:
    """Output tokens a second of a workload whose requests all arrive at once."""
    llm.engine.scheduler.manager.clear()
    prompts = [load.random_prompt(work.prompt, llm.engine.vocab_size, seed) for seed in range(count)]
    start = time.perf_counter()
    llm.generate(prompts, max_tokens=work.answer, ignore_eos=True, temperature=0, progress=False)
    return count * work.answer / (time.perf_counter() - start)


def kernels(llm: LLM, requests: int, context: int) -> str:
    """Milliseconds of a decode step by kernel."""
    engine, steps = llm.engine, 8
    engine.scheduler.manager.clear()
    prompts = [load.random_prompt(context + 1, engine.vocab_size, seed) for seed in range(requests)]
    load.plant(llm, prompts)
    params = SamplingParams(max_tokens=4 * steps, ignore_eos=True, temperature=0)
    for prompt in prompts:
        engine.submit(prompt, params, lambda piece: None)
    for _ in range(steps):
        engine.step()

    def run() -> None:
        for _ in range(steps):
            engine.step()

    found = profile(run, steps)
    while engine.busy:
        engine.step()
    engine.scheduler.manager.clear()
    return found


def prompt_kernels(llm: LLM, length: int) -> str:
    """Milliseconds of a prompt by kernel."""
    llm.engine.scheduler.manager.clear()
    prompts = [load.random_prompt(length, llm.engine.vocab_size, 99)]
    return profile(
        lambda: llm.generate(prompts, max_tokens=1, ignore_eos=True, temperature=0, progress=False), 1
    )


def profile(run: Callable[[], object], steps: int) -> str:
    """What `run` spends in which kernel, by step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    rows = [
        (event.key[:70], f"{event.count / steps:.0f}", f"{event.device_time_total / steps / 1e3:.3f}",
         f"{event.device_time_total / event.count:.2f}")
        for event in found[:24]
    ]  # fmt: skip
    return markdown(("kernel", "launches", "ms", "us each"), rows)


def say(text: str) -> None:
    print(text, flush=True)


def aims(found: Sequence[Times]) -> list[Aim]:
    """W1 decode steps, W2 prompts, W3 workloads: each window against none."""
    lines = []
    plain = next((times for times in found if not times.window), None)
    for times in found if plain else ():
        if not times.window or plain is None:
            continue
        of = f"window {times.window} / without"
        for text, ms in times.decodes.items():
            floor = AIMS.get(text, 0.96)
            lines.append(Aim("W1", f"decode speed, {text}, {of}", floor, 1.0, ratio(plain.decodes[text], ms)))
        for text, rate in times.prompts.items():
            value = ratio(rate, plain.prompts[text])
            lines.append(Aim("W2", f"prompts of {text}, {of}", PROMPT_AIM, 1.0, value))
        for text, rate in times.workloads.items():
            value = ratio(rate, plain.workloads[text])
            lines.append(Aim("W3", f"output tokens/s, {text}, {of}", WORKLOAD_AIM, 1.0, value))
    return lines


def table(found: Sequence[Times]) -> str:
    first = found[0]
    head = ("window", *(f"prompts of {n}: tokens/s" for n in first.prompts))
    head += (
        *(f"{shape}: ms a step" for shape in first.decodes),
        *(f"{w}: output tokens/s" for w in first.workloads),
    )
    rows = [
        (t.window, *(f"{x:.0f}" for x in t.prompts.values()), *(f"{x:.3f}" for x in t.decodes.values()),
         *(f"{x:.0f}" for x in t.workloads.values()))
        for t in found
    ]  # fmt: skip
    return markdown(head, rows)


def main() -> None:
    options = arguments().parse_args()
    if options.tiny:
        options.model, options.decodes, options.prompts, options.full = "tiny", "3x128", "200", "64/16@3"
    copy, found = gpu.copy_tbps(), list[Times]()
    for window in map(int, options.windows.split(",")):
        found.append(measure(options, window))
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    texts = [
        f"{options.model}, {options.scheme}. Copy bandwidth {copy:.2f} TB/s.",
        table(found),
        aims_table(aims(found)),
    ]
    figures = {"copy_tbps": copy, "times": [vars(times) for times in found]}
    gpu.publish("exact_window", options, str(__doc__), texts, gpu.versions(), **figures)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--windows", default="0,64", help="tokens; 0 is compared with")
    parser.add_argument("--decodes", default="8x1K,64x8K,64x32K")
    parser.add_argument("--prompts", default="16K")
    parser.add_argument("--full", default="1K/1K@128,8K/512@64", help="workloads to run for real")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of prompts and decode steps")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark on a CPU")
    gpu.add_output_options(parser)
    return parser


if __name__ == "__main__":
    main()
