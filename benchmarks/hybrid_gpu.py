"""Steps of a hybrid model on one GPU beside the bytes that they must move: weights, recurrent states, KV.

    python benchmarks/hybrid_gpu.py [--model "qwen3-next, 8 layers"] [--states int8] [--scheme nvfp4]
        [--requests 1,8,64] [--context 2K] [--prompts 16K] [--kernels] [--tiny]

Qwen3-Next-80B-A3B cut to 8 layers, or "qwen3.5-27b, 16 layers" (dense) or "qwen3.5-35b-a3b, 8 layers"; random weights.
**Measured**: the time of a decode step (schedule, model, sampling, answers handed out), of requests whose prompts were
computed before, and the rate of prompts. **Bytes** at copy bandwidth: weights without the input embeddings, of experts
those that so many tokens choose on average; of each request its matrices and the inputs of half a block, read once, and
matrices written once in 16 steps; keys and values of its context. Gate: engine_gpu.py's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import engine_load as load
import paged
import step_kernels
import torch
from random_models import SHAPES, Served, served
from report import markdown
from torch.profiler import ProfilerActivity, profile

import gpu
from nibble import LLM, SamplingParams
from nibble.engine.request import Delta
from nibble.kernels.state_formats import BLOCK, bytes_per_layer, state_bytes
from nibble.models.experts import expert_matrices

EXACT, QUANTISED = 0.05, 0.35
"""As in engine_gpu.py."""
PROFILED, ROWS = 8, 40
"""Decode steps that are profiled, and kernels that are shown."""
FLOOR = 1.5
"""Most times the time of the bytes."""
TINY = {
    "qwen3_next": "tiny hybrid",
    "qwen3_5_text": "tiny qwen3.5",
    "qwen3_5_moe_text": "tiny qwen3.5 of experts",
}
"""By family: a model for --tiny."""


def decode_ms(llm: LLM, requests: int, context: int, profiler: profile | None = None) -> float:
    """Return the median time of a decode step of requests whose prompts were just computed.

    profiler: Looks at PROFILED of these steps.
    """
    engine = llm.engine
    pieces: list[Delta] = []
    # The first of them decode while the last prompts are computed.
    before = 16 + 2 * requests * context // engine.scheduler.token_budget
    params = SamplingParams(max_tokens=before + load.STEPS + load.WARMUP, ignore_eos=True, temperature=0)
    for seed in range(requests):
        engine.submit(load.random_prompt(context, engine.vocab_size, seed), params, pieces.append)
    ends, seen, num_full, is_on = list[float | None](), 0, 0, False
    while engine.busy:
        if profiler and not is_on and num_full == load.WARMUP:
            profiler.start()
            is_on = True
        engine.step()
        full, seen = len(pieces) - seen == requests, len(pieces)
        num_full += full
        if profiler and num_full == load.WARMUP + PROFILED:
            torch.cuda.synchronize()
            profiler.stop()
            profiler = None
        ends.append(time.perf_counter() if full else None)
    if any(piece.error for piece in pieces):
        raise SystemExit(f"a decode step failed: {next(piece.error for piece in pieces if piece.error)}")
    spans = [(b - a) * 1e3 for a, b in pairwise(ends) if a is not None and b is not None]
    return statistics.median(spans[load.WARMUP :])


def decode_kernels(llm: LLM, requests: int, context: int) -> str:
    """Return the kernels of decode steps alone, the longest first."""
    profiler = profile(activities=[ProfilerActivity.CUDA])
    decode_ms(llm, requests, context, profiler)
    times = {
        event.key: (event.count, event.self_device_time_total)
        for event in profiler.key_averages()
        if event.self_device_time_total
    }
    return step_kernels.table(times, PROFILED, ROWS)


def weight_bytes(made: Served, tokens: int) -> float:
    """Return the bytes of weights that a step of so many tokens reads on average."""
    model = made.llm.engine.runner.model
    assert isinstance(model, torch.nn.Module)
    total = float(made.streamed_bytes())
    for module in model.modules():
        for matrix in expert_matrices(module).values():
            # Each token chooses other experts, all as likely; a shared one that lies with them is always read.
            chosen, count = module.config.num_experts_per_tok, module.config.num_experts
            total -= matrix[:count].nbytes * (1 - chosen / count) ** tokens
    return total


def request_bytes(llm: LLM, context: int) -> float:
    """Return the bytes that a decode step moves for one request."""
    plan = llm.plan
    total = float(context * plan.layout.bytes_per_token)
    for group in plan.states:
        matrices = (
            bytes_per_layer(plan.state_format, group.heads, group.rows, group.columns) if group.heads else 0
        )
        inputs = state_bytes(group, plan.state_format, plan.dtype, 0) - matrices
        total += len(group.layers) * (matrices * (1 + 1 / BLOCK) + inputs / 2)
    return total


_BEGAN = time.perf_counter()


def say(text: str) -> None:
    """Print at once, with the seconds since the start: a run that is cut off has said what it knew."""
    print(f"[{time.perf_counter() - _BEGAN:.0f} s] {text}", flush=True)


def measure(made: Served, options: argparse.Namespace, copy: float, states: str) -> list[Sequence[object]]:
    """Return a row for each number of requests, and say the rate of prompts."""
    context, found = paged.tokens(options.context), []
    for requests in map(int, options.requests.split(",")):
        decode_ms(made.llm, requests, context)  # what happens the first time only
        ms = decode_ms(made.llm, requests, context)
        size = weight_bytes(made, requests) + requests * request_bytes(made.llm, context)
        least = size / copy / 1e9
        found.append(
            (states, requests, f"{size / 1e9:.2f}", f"{least:.3f}", f"{ms:.3f}", f"{ms / least:.2f}", FLOOR)
        )
        say(f"{requests} requests: {ms:.3f} ms a step, {ms / least:.2f} times the {size / 1e9:.2f} GB")
        if options.kernels:
            print(decode_kernels(made.llm, requests, context), flush=True)
    for length in [paged.tokens(text) for text in options.prompts.split(",") if text]:
        rate = load.prefill_rate(made.llm, length, 2 * length)
        say(f"{states} states, prompts of {length}: {rate:.0f} tokens/s")
        if options.kernels:
            prompt = load.random_prompt(length, made.llm.engine.vocab_size, 7)
            run = partial(made.llm.generate, [prompt], max_tokens=1, temperature=0, progress=False)
            print(step_kernels.table(step_kernels.kernel_times(run), 1, ROWS), flush=True)
    return found


def main() -> None:
    options = arguments().parse_args()
    if options.tiny:
        options.context, options.prompts, options.requests = "64", "128", "1,3"
        options.model = TINY[SHAPES[options.model][0]]
    copy, rows = gpu.copy_tbps(), list[Sequence[object]]()
    say(f"{gpu.machine()}, copy bandwidth {copy:.2f} TB/s")
    for states in options.states.split(","):
        with served(
            options.model, kv_format=options.scheme, state_format=states, device=gpu.device(), prefix_cache=False,
            max_running=max(map(int, options.requests.split(","))), max_context=320 if options.tiny else 20480,
            token_budget=64 if options.tiny else 8192, kv_memory="64MiB" if options.tiny else None,
        ) as made:  # fmt: skip
            say(f"{states} states: {made.llm.engine.startup.summary}")
            bound = EXACT if options.scheme == "bf16" and states == "fp32" else QUANTISED
            off, below = load.gate(made.llm, made.prompt, made.expected_TV, bound)
            say(f"off by {off:.1e}, at most {below:.2f} below")
            rows += measure(made, options, copy, states)
        torch.compiler.reset()
    head = ("states", "requests", "GB", "at copy bandwidth, ms", "a step, ms", "times the bytes", "floor")
    print(markdown(head, rows))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = [name for name, (family, _) in SHAPES.items() if family in TINY]
    parser.add_argument("--model", default=models[0], choices=models)
    parser.add_argument("--states", default="int8")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--requests", default="1,8,64")
    parser.add_argument("--context", default="2K")
    parser.add_argument("--prompts", default="16K")
    parser.add_argument("--kernels", action="store_true", help="the kernels of each step, too")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, to try the benchmark itself on a CPU"
    )
    return parser


if __name__ == "__main__":
    main()
