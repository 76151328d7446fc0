"""The largest models that fit on one GPU: does one start, hold the tokens that the plan says, and serve many requests?

    python benchmarks/largest.py [--model gpt-oss-120b] [--weights mxfp4] [--scheme nvfp4] [--requests 32]
        [--prompt 8192] [--answer 32] [--tiny]

Weights are random, packed, and made on the GPU. **Gates**: logits and decode steps against the unmodified model
(engine_load.gate); what `nibble plan` says of the empty GPU is what the engine has, in tokens and in bytes of weights;
of the memory that the plan leaves free enough is left in the end; all requests run at the same time, with their prompts
stored, and none is preempted. **Measured**: the start, by part; the rate of prompts; a decode step of all requests.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import engine_load as load
import torch
from engine_gpu import QUANTISED, say
from packed_weights import KINDS
from random_models import OWN_CONFIGS, PLAIN, SHAPES, Served, served, shape_config
from torch import nn

import gpu
from nibble import LLM
from nibble.attention.planner.memory import MIN_RESERVE_LEFT
from nibble.config import configured
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.hardware import format_bytes

ROOM = 128
"""Tokens of a request beside its prompt and answer."""
CLOSE = 1e-3
"""How far weights may be off the plan: what few tensors of a family take that no checkpoint has."""


def planned(model: str, weights: str, options: dict[str, Any]) -> EnginePlan:
    """What `nibble plan` says, before anything is on the GPU."""
    entry = OWN_CONFIGS.get((SHAPES[model][0], weights)) or (KINDS[weights].config if weights else {})
    changes = {"quantization_config": entry} if weights else {}
    with tempfile.TemporaryDirectory() as folder:
        shape_config(model, **changes).save_pretrained(folder)
        return plan_engine(configured(model=folder, kv_scales="one", **PLAIN, **options))


def weight_bytes(made: Served) -> int:
    """Bytes of all weights, packed ones as they lie in memory."""
    model = made.llm.engine.runner.model
    assert isinstance(model, nn.Module)
    table = model.get_input_embeddings()  # type: ignore[operator]
    return made.streamed_bytes() + int(table.weight.nbytes)


def check(what: str, holds: bool) -> None:
    """Stop where a gate does not hold."""
    say(f"{'ok    ' if holds else 'WRONG '} {what}")
    if not holds:
        raise SystemExit(1)


def serve(llm: LLM, requests: int, prompt: int, answer: int) -> None:
    """Serve prompts that share nothing, all at the same time, and measure both phases."""
    scheduler = llm.engine.scheduler
    scheduler.manager.clear()
    before, most = scheduler.metrics, 0
    prompts = [load.random_prompt(prompt, llm.engine.vocab_size, seed) for seed in range(requests)]
    started = time.perf_counter()
    params = llm.get_default_sampling_params()
    params = type(params)(max_tokens=answer, ignore_eos=True, temperature=0)
    deltas = [0] * requests

    def count(place: int) -> Any:
        def add(delta: Any) -> None:
            deltas[place] += len(delta.token_ids)

        return add

    for place, ids in enumerate(prompts):
        llm.engine.submit(ids, params, count(place))
    first = 0.0
    steps = list[float]()
    while llm.engine.busy:
        begin = time.perf_counter()
        llm.engine.step()
        most = max(most, scheduler.metrics.running)
        if all(deltas):
            first = first or time.perf_counter() - started
            steps.append(time.perf_counter() - begin)
    after = scheduler.metrics
    check(f"{requests} requests of {prompt:,} + {answer} tokens are answered", deltas == [answer] * requests)
    check(f"{most} of them run at the same time", most == requests)
    check(
        f"none is preempted ({after.preemptions - before.preemptions})",
        after.preemptions == before.preemptions,
    )
    say(f"prompts: {requests * prompt / first:,.0f} tokens/s; all have a token after {first:.1f} s")
    if len(steps) > 4:
        middle = sorted(steps[2:-1])[len(steps[2:-1]) // 2]
        say(f"a step of {requests} requests at {prompt:,} tokens: {1e3 * middle:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--weights", default="mxfp4", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument(
        "--tiny", action="store_true", help="a check of the benchmark: a tiny model, on any machine"
    )
    choice = parser.parse_args()
    if choice.tiny:
        choice.model, choice.requests, choice.prompt, choice.answer = "tiny gpt-oss", 4, 96, 12
    options: dict[str, Any] = {
        "kv_format": choice.scheme,
        "device": gpu.device(),
        "max_running": choice.requests,
        "max_context": choice.prompt + choice.answer + ROOM,
        **({"kv_memory": "16MiB"} if choice.tiny else {}),
    }
    plan = planned(choice.model, choice.weights, options)
    say(
        f"plan of {choice.model} in {choice.weights or 'bf16'} on {plan.hardware}: weights "
        f"{format_bytes(plan.budget.weights)}, {plan.budget.tokens:,} tokens of {plan.plan.meaning or choice.scheme}"
    )
    began = time.perf_counter()
    with served(choice.model, weights=choice.weights, **options) as made:
        llm = made.llm
        say(f"start: {time.perf_counter() - began:.1f} s ({llm.engine.startup.summary})")
        error, below = load.gate(llm, made.prompt, made.expected_TV, QUANTISED)
        say(f"ok     logits off {error:.1e}, answers at most {below:.2f} deviations below the best")
        pool = llm.engine.runner.pool
        tokens = pool.pages * llm.plan.page_size
        check(
            f"{tokens:,} tokens resident, {plan.budget.tokens:,} planned",
            tokens == plan.budget.tokens == llm.budget.tokens,
        )
        size = weight_bytes(made)
        what = f"weights of {size:,} bytes, {plan.budget.weights:,} planned"
        check(what, choice.tiny or abs(size - plan.budget.weights) <= CLOSE * plan.budget.weights)
        serve(llm, choice.requests, choice.prompt, choice.answer)
        if torch.cuda.is_available():
            free, reserve = torch.cuda.mem_get_info()[0], llm.budget.reserve
            check(
                f"{format_bytes(free)} free, of {format_bytes(reserve)}", free >= MIN_RESERVE_LEFT * reserve
            )


if __name__ == "__main__":
    main()
