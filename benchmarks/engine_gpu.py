"""The engine on one GPU, 8B models with random weights: what a 4-bit cache is worth in tokens a second.

    python benchmarks/engine_gpu.py [--models llama-3.1-8b,qwen3-8b] [--schemes bf16,fp8_e4m3,nvfp4] [--tiny]
        [--workloads 16K/1K,2K/2K,1K/8K] [--concurrency 1,8,32,128] [--full 16K/1K@128] [--weights int4]
        [--out FOLDER] [--report]

**Measured**, through nibble.LLM, one engine per scheme in the same GPU memory: the rate at which prompts are computed,
and the time of a decode step (schedule, model, attention, greedy sampling, answers handed out; no tokenizer) at each
concurrency, for the shortest context and for the longest that fits, over planted contexts of random K and V.
**Computed** from those by the engine's own scheduler: whole workloads, all requests arriving at once. `misfit` is how
far the formula for a step is off the measured steps. `--full` runs a workload for real and prints both. Gate: logits of
a prompt against the unmodified model, and greedy answers of decode steps against logits of whole prompts.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import engine_load as load
import torch
from engine_load import Costs, Outcome, Workload
from packed_weights import KINDS
from random_models import served
from report import Aim, aims_table, markdown, ratio, worst, write_figures

import gpu
from nibble import LLM

SCHEMES = ("bf16", "fp8_e4m3", "nvfp4")
WORKLOADS = ("16K/1K", "2K/2K", "1K/8K")
CONCURRENCY = (1, 8, 32, 128)
PREFILL_TOKENS = 131072
"""Prompt tokens that the rate of each prompt length is measured with."""
EXACT, QUANTISED = 0.05, 0.35
"""Bounds on the relative error of logits, over an unquantised cache and over others. Logits that have nothing to do
with the model's are off by 1.4."""


@dataclass(frozen=True)
class Result:
    """One engine: a model with a scheme. error, below: load.gate."""

    model: str
    scheme: str
    tokens: int
    floor_ms: float
    start_s: float
    error: float
    below: float
    costs: Costs
    outcomes: tuple[Outcome, ...]
    real: tuple[Outcome, ...]

    def step(self, requests: int, context: int) -> float | None:
        found = [s.ms for s in self.costs.decodes if (s.requests, s.context) == (requests, context)]
        return found[0] if found else None

    def tokens_s(self, workload: str, concurrency: int) -> float | None:
        """Output tokens a second, measured where the workload was run."""
        for outcome in (*self.real, *self.outcomes):
            if (str(outcome.workload), outcome.concurrency) == (workload, concurrency):
                return outcome.tokens_s
        return None


@dataclass(frozen=True)
class Plan:
    """What to measure, by the options."""

    workloads: tuple[Workload, ...]
    concurrency: tuple[int, ...]
    full: tuple[tuple[Workload, int], ...]
    prefill_tokens: int
    engine: dict[str, Any]
    weights: str = ""
    """A name of packed_weights.KINDS."""


def plan(options: argparse.Namespace) -> Plan:
    workloads = tuple(map(Workload.parse, options.workloads.split(",")))
    concurrency = tuple(map(int, options.concurrency.split(",")))
    if options.tiny:
        workloads, concurrency = (Workload(64, 32), Workload(32, 64)), (1, 3)
    full = [text.partition("@") for text in options.full.split(",") if text]
    runs = tuple((Workload.parse(work), int(count)) for work, _, count in full)
    engine = {
        "max_running": max((*concurrency, *(count for _, count in runs))),
        "max_context": max(work.prompt + work.answer for work in (*workloads, *(work for work, _ in runs)))
        + 128,
        "token_budget": 64 if options.tiny else options.token_budget,
        "device": gpu.device(),
    }
    tokens = 128 if options.tiny else PREFILL_TOKENS
    return Plan(workloads, concurrency, runs, tokens, engine, options.weights)


def measure(model: str, scheme: str, todo: Plan, copy: float) -> Result:
    """Everything about one engine."""
    began = time.perf_counter()
    with served(model, kv_format=scheme, weights=todo.weights, **todo.engine) as made:
        llm, start = made.llm, time.perf_counter() - began
        say(
            f"{model} {scheme}: {start:.0f} s ({llm.engine.startup.summary}), {llm.budget.tokens} tokens resident"
        )
        # In FP8 a last bit of an activation may become a step.
        is_exact = scheme == "bf16" and not (todo.weights and KINDS[todo.weights].activations)
        error, below = load.gate(llm, made.prompt, made.expected_TV, EXACT if is_exact else QUANTISED)
        say(f"  logits off {error:.1e}, answers at most {below:.2f} deviations below the best")
        costs = Costs(prefills(llm, todo), decodes(llm, todo))
        outcomes = tuple(load.compute(llm, costs, w, n) for w in todo.workloads for n in todo.concurrency)
        real = tuple(run(llm, work, count) for work, count in todo.full)
        floor = made.streamed_bytes() / copy / 1e9
        return Result(model, scheme, llm.budget.tokens, floor, start, error, below, costs, outcomes, real)


def prefills(llm: LLM, todo: Plan) -> dict[int, float]:
    """Tokens a second for every prompt length."""
    found = {}
    for length in dict.fromkeys(work.prompt for work in todo.workloads):
        found[length] = load.prefill_rate(llm, length, todo.prefill_tokens)
        say(f"  prompts of {length}: {found[length]:.0f} tokens/s")
    return found


def decodes(llm: LLM, todo: Plan) -> list[load.Decode]:
    """Decode steps at each concurrency, for the shortest context and the longest that fits."""
    load.fill_pool(llm)
    page = llm.plan.page_size
    lengths = {n // page * page for work in todo.workloads for n in (work.prompt, work.prompt + work.answer)}
    found = []
    for count in todo.concurrency:
        fitting = [context for context in sorted(lengths) if load.fits(llm, count, context)]
        for context in dict.fromkeys((*fitting[:1], *fitting[-1:])):
            found.append(load.decode_step(llm, count, context))
            say(f"  {count} x {context}: {found[-1].ms:.2f} ms a step")
    return found


def run(llm: LLM, work: Workload, count: int) -> Outcome:
    """A whole workload, for real."""
    llm.engine.scheduler.manager.clear()
    before = llm.engine.scheduler.metrics.preemptions
    prompts = [load.random_prompt(work.prompt, llm.engine.vocab_size, seed) for seed in range(count)]
    start = time.perf_counter()
    llm.generate(prompts, max_tokens=work.answer, ignore_eos=True, temperature=0, progress=False)
    seconds = time.perf_counter() - start
    preemptions = llm.engine.scheduler.metrics.preemptions - before
    nothing = float("nan")  # generate() hands out whole answers
    return Outcome(work, count, seconds, count * work.answer / seconds, nothing, nothing, preemptions)


def say(text: str) -> None:
    print(text, flush=True)


def aims(found: Sequence[Result]) -> list[Aim]:
    """E0 to E3, over all models that were measured."""
    by = {(result.model, result.scheme): result for result in found}
    lines = []
    for model in dict.fromkeys(result.model for result in found):
        plain, small = by.get((model, "bf16")), by.get((model, "nvfp4"))
        if plain:
            value = ratio(plain.step(8, 1024), plain.floor_ms)
            what = f"{model}: bf16 decode step at batch 8, 1K context / reading the weights once"
            lines.append(Aim("E0", what, 1.5, 1.25, value, least=False))
        if plain and small:
            lines += compared(model, plain, small)
    return lines


def compared(model: str, plain: Result, small: Result) -> list[Aim]:
    """What nvfp4 is worth beside bf16."""

    def speedup(workload: str) -> float | None:
        return ratio(small.tokens_s(workload, 128), plain.tokens_s(workload, 128))

    low = worst(ratio(plain.step(n, 1024), small.step(n, 1024)) for n in (1, 8))
    return [
        Aim("E1", f"{model}: tokens resident, nvfp4 / bf16", 3.4, 3.5, small.tokens / plain.tokens),
        Aim("E2", f"{model}: output tokens/s, nvfp4 / bf16, 16K/1K at 128", 1.25, 1.5, speedup("16K/1K")),
        Aim("E2", f"{model}: output tokens/s, nvfp4 / bf16, 1K/8K at 128", 1.7, 2.4, speedup("1K/8K")),
        Aim("E3", f"{model}: decode tokens/s, nvfp4 / bf16, 1K context at 1 and 8", 0.97, 1.0, low),
    ]


def measured_table(found: Sequence[Result]) -> str:
    """What was measured: prompts' rates, then decode steps."""
    lengths = list(dict.fromkeys(length for result in found for length in result.costs.prefill))
    steps = list(dict.fromkeys((s.requests, s.context) for r in found for s in r.costs.decodes))
    rows = []
    for r in found:
        rates = [f"{r.costs.prefill[length]:.0f}" if length in r.costs.prefill else "" for length in lengths]
        times = [f"{ms:.2f}" if (ms := r.step(*step)) else "does not fit" for step in steps]
        rows.append(
            (r.model, r.scheme, f"{r.tokens:,}", *rates, *times, f"{r.costs.misfit:.0%}", f"{r.error:.1e}")
        )
    head = ("model", "cache", "tokens resident", *(f"prompts of {n}: tokens/s" for n in lengths))
    return markdown((*head, *(f"{n} x {c}: ms a step" for n, c in steps), "misfit", "logits off"), rows)


def computed_table(found: Sequence[Result]) -> str:
    """Whole workloads."""
    rows = []
    for r in found:
        for kind, outcomes in (("computed", r.outcomes), ("**measured**", r.real)):
            for o in outcomes:
                times = (f"{o.first_s:.2f}", f"{o.token_ms:.1f}") if kind == "computed" else ("", "")
                speed = f"{o.tokens_s:.0f}"
                rows.append(
                    (r.model, o.workload, o.concurrency, r.scheme, kind, speed, *times, o.preemptions)
                )
    head = (
        "model",
        "workload",
        "concurrency",
        "cache",
        "how",
        "output tokens/s",
        "first token s",
        "ms a token",
    )
    return markdown((*head, "preemptions"), sorted(rows, key=lambda row: (row[0], str(row[1]), row[2])))


def main() -> None:
    options = arguments().parse_args()
    todo, copy = plan(options), gpu.copy_tbps()
    found: list[Result] = []
    for model in ["tiny"] if options.tiny else options.models.split(","):
        for scheme in options.schemes.split(","):
            found.append(measure(model, scheme, todo, copy))
            if options.out:  # what is known so far, should time run out
                write_figures("engine", options.out, copy_tbps=copy, results=[*map(figures, found)])
            forget()
    floors = ", ".join(f"{r.model} {r.floor_ms:.2f} ms" for r in {r.model: r for r in found}.values())
    texts = [f"Copy bandwidth {copy:.2f} TB/s; at that rate the weights of a step are read in: {floors}."]
    texts += [
        "Measured:",
        measured_table(found),
        "Workloads:",
        computed_table(found),
        aims_table(aims(found)),
    ]
    import transformers

    facts = gpu.versions(f"Transformers {transformers.__version__}")
    gpu.publish("engine", options, str(__doc__), texts, facts, copy_tbps=copy, results=[*map(figures, found)])


def forget() -> None:
    """Gives the memory of an engine back, compiled code included, which holds on to its model."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def figures(result: Result) -> dict[str, Any]:
    """A result as JSON has it."""
    found = asdict(result)
    for outcome in (*found["outcomes"], *found["real"]):
        outcome["workload"] = f"{outcome['workload']['prompt']}/{outcome['workload']['answer']}"
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="llama-3.1-8b,qwen3-8b")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--weights", default="", help=f"quantise linear layers: {', '.join(KINDS)}")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="prompt/answer tokens")
    parser.add_argument("--concurrency", default=",".join(map(str, CONCURRENCY)))
    parser.add_argument("--token-budget", type=int, default=8192, help="most tokens computed in one step")
    parser.add_argument("--full", default="", help="workloads to run for real, as 16K/1K@128,1K/8K@128")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, to try the benchmark itself on a CPU"
    )
    gpu.add_output_options(parser)
    return parser


if __name__ == "__main__":
    main()
