"""A hybrid model's prompts but for its recurrent layers, beside those of the same model with attention in all layers.

    python benchmarks/hybrid_elsewhere.py [--model "qwen3-next, 8 layers"] [--states int8] [--scheme nvfp4]
        [--prompt 16K] [--rows 12] [--tiny]

What a hybrid does beside its recurrent layers (experts, norms, layers that attend, scheduling, chunks that end where
snapshots are kept) should take no longer than in a model that attends in every layer. Layers that attend and recurrent
ones have products of other sizes, so whole steps cannot be compared. **Measured** for both: the time of a prompt. From
that is taken what both models do not have in common: of the hybrid the kernels of its states (by the profiler) and the
products in its recurrent layers; of the other the kernels of attention, and the products, in as many of its layers.
Products are timed alone, in the sizes of a step. What is left are the same layers: experts and norms of all, and the
layers that attend in both. Other small kernels of recurrent layers, as norms and gates, stay on the hybrid's side.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import engine_load as load
import paged
import step_kernels
import torch
import torch.nn.functional as F
from random_models import Served, served
from report import markdown
from torch import nn

import gpu
from nibble.evals.fixtures import time_calls

STATES = (
    "conv_kernel",
    "scan",
    "store_kernel",
    "weights_kernel",
    "recurrence_kernel",
    "selective_kernel",
    "copy_kernel",
)
ATTENTION = ("attention", "prefill", "flash", "fmha", "merge_kernel", "append", "dequantize", "decode")
"""What names of kernels begin with, and what is in them."""
LIMIT = 1.1
TOKENS = 8192
"""Of a step."""


@dataclass(frozen=True)
class Part:
    """What of a prompt's milliseconds belongs to layers that only one of the models has."""

    ms: float
    own_kernels: float
    products: float

    @property
    def rest(self) -> float:
        return self.ms - self.own_kernels - self.products


def products_ms(modules: Sequence[nn.Module], length: int) -> float:
    """The time of the products in some modules, over a prompt; those of one input are one."""
    total = 0.0
    for module in modules:
        outputs: defaultdict[int, int] = defaultdict(int)
        for part in module.modules():
            weight = getattr(part, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dim() == 2:
                outputs[weight.shape[1]] += weight.shape[0]
        total += sum(_product_ms(n, k, length) for k, n in outputs.items())
    return total


def _product_ms(n: int, k: int, length: int) -> float:
    device = gpu.device()
    dtype = torch.bfloat16
    weight_NK = torch.randn(n, k, dtype=dtype, device=device)
    steps = [TOKENS] * (length // TOKENS) + [length % TOKENS] * bool(length % TOKENS)
    total = 0.0
    for tokens in steps:
        x_TK = torch.randn(tokens, k, dtype=dtype, device=device)
        total += time_calls(lambda x=x_TK: [F.linear(x, weight_NK)], 1).ms
    return total


def named(name: str, *modules: Any) -> list[nn.Module]:
    return [m for model in modules for full, m in model.named_modules() if full.rpartition(".")[2] == name]


def kernels_of_prompt(made: Served, length: int, rows: int) -> dict[str, float]:
    """Milliseconds by kernel; none on a CPU."""
    if gpu.device() == "cpu":
        return {}
    prompt = load.random_prompt(length, made.llm.engine.vocab_size, 7)
    made.llm.engine.scheduler.manager.clear()
    times = step_kernels.kernel_times(
        partial(made.llm.generate, [prompt], max_tokens=1, temperature=0, progress=False)
    )
    print(step_kernels.table(times, 1, rows), flush=True)
    return {name: us / 1e3 for name, (_, us) in times.items()}


def measure(model: str, options: argparse.Namespace, hybrid_layers: int) -> tuple[Part, int]:
    """Time a model's prompts; returns what is its own, and the number of its recurrent layers."""
    length, start = paged.tokens(options.prompt), time.perf_counter()
    with served(
        model, kv_format=options.scheme, state_format=options.states, device=gpu.device(), prefix_cache=False,
        max_running=4, max_context=256 if options.tiny else length + 1024,
        token_budget=64 if options.tiny else TOKENS, kv_memory="64MiB" if options.tiny else None,
    ) as made:  # fmt: skip
        print(f"{model}: {time.perf_counter() - start:.0f} s, {made.llm.engine.startup.summary}", flush=True)
        load.gate(made.llm, made.prompt, made.expected_TV, 0.35)
        ms = length / load.prefill_rate(made.llm, length, 2 * length) * 1e3
        kernels = kernels_of_prompt(made, length, options.rows)
        recurrent = named("linear_attn", made.llm.engine.runner.model)
        attends = named("self_attn", made.llm.engine.runner.model)
        if recurrent:
            own = sum(t for name, t in kernels.items() if name.startswith(STATES))
            part, count = Part(ms, own, products_ms(recurrent, length)), len(recurrent)
        else:
            own = sum(t for name, t in kernels.items() if any(word in name.lower() for word in ATTENTION))
            share = hybrid_layers / len(attends)
            part, count = Part(ms, own * share, products_ms(attends[:hybrid_layers], length)), hybrid_layers
    torch.compiler.reset()
    return part, count


def main() -> None:
    options = arguments().parse_args()
    if options.tiny:
        options.model, options.other, options.prompt = "tiny hybrid", "tiny hybrid that attends", "128"
    print(gpu.machine(), flush=True)
    hybrid, layers = measure(options.model, options, 0)
    other, _ = measure(options.other, options, layers)
    rows = [
        (name, f"{part.ms:.2f}", f"{part.own_kernels:.2f}", f"{part.products:.2f}", f"{part.rest:.2f}")
        for name, part in ((options.model, hybrid), (options.other, other))
    ]
    head = (
        f"a prompt of {options.prompt}, ms",
        "all",
        f"own kernels, {layers} layers",
        "products there",
        "rest",
    )
    print(markdown(head, rows))
    print(
        f"the hybrid's rest takes {hybrid.rest / other.rest:.2f} times the other's; at most {LIMIT} is the goal"
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-next, 8 layers")
    parser.add_argument("--other", default="qwen3-next, 8 layers that attend")
    parser.add_argument("--states", default="int8")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--prompt", default="16K")
    parser.add_argument("--rows", type=int, default=12, help="kernels that are shown")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, to try the benchmark itself on a CPU"
    )
    return parser


if __name__ == "__main__":
    main()
