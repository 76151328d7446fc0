"""How far recurrent states in 16 and 8 bits drift from exact ones, over tens of thousands of steps of a trained model.

    python benchmarks/state_drift.py [--model demo-hybrid] [--steps 32768] [--formats bf16,fp8,int8]
        [--plot docs/state_drift.svg] [--tiny] [--out FOLDER] [--report]

The model reads a text that it has not seen, in windows of its context, with exact states. What its layers hand to
their states (queries, keys, values, decays and weights of updates) is recorded, and put through the same rule again as
one stream of all windows, with states in each format: so states have the inputs of a real text, and go on for as many
steps as there are tokens. At every power of two of steps, for each layer and head:

    state     ||S - S_fp32|| / ||S_fp32||: the matrix, as it is stored
    answer    the same of what queries read, over all tokens since the last power of two

`mean` is over layers and heads, `worst` the largest of them. States are rounded every 16 tokens, as served.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from report import markdown
from torch import Tensor

import gpu
from nibble import LLM
from nibble.cache.scales import NONE
from nibble.cache.state_pool import StatePool
from nibble.evals import perplexity
from nibble.evals.perplexity import prompt_context, read_text
from nibble.kernels.recurrence import LayerState, StateBatch, naive, recurrence
from nibble.kernels.recurrence.formats import decode
from nibble.kernels.state_formats import BLOCK, FORMATS
from nibble.models import hook
from nibble.models.recurrent import RecurrentCall

EXACT = "fp32"
PIECE = 1024
"""Tokens of a call at most."""

Inputs = dict[str, Tensor]
"""q [T, G, K], k, x [T, H, V], log_decay and beta, of one layer."""


@dataclass(frozen=True)
class Drift:
    """Errors of a format after so many steps."""

    format: str
    steps: int
    state_mean: float
    state_worst: float
    answer_mean: float
    answer_worst: float


class Recorder(hook.Observer):
    """Serves a prompt as it is, and keeps what layers give to their states."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.context = context
        self.inputs: dict[int, Inputs] = {}
        self.rules: dict[int, str] = {}

    def observe(self, call: hook.Call) -> Tensor:
        return hook.attend(self.context, call)[None]

    def observe_recurrent(self, call: RecurrentCall) -> Tensor:
        if call.rule not in ("conv", "selective"):
            inputs = dict(call.arguments)
            if inputs.pop("unit", False):
                inputs["q"], inputs["k"] = naive.unit_rows(inputs["q"], inputs["k"])
            self.inputs[call.layer] = {name: value.clone() for name, value in inputs.items()}
            self.rules[call.layer] = call.rule
        return hook.keep_state(self.context, call)


def record(llm: LLM, ids: Sequence[int], window: int) -> tuple[dict[int, Inputs], dict[int, str]]:
    """What each layer gets over all windows, one after the other; and the layers' rules."""
    device = torch.device("cpu")
    parts: dict[int, list[Inputs]] = defaultdict(list)
    rules: dict[int, str] = {}
    for start in range(0, len(ids), window):
        some = ids[start : start + window]
        recorder = Recorder(prompt_context(llm.plan, NONE, len(some), device))
        last = torch.tensor([len(some) - 1], device=device)
        perplexity.observed_logits(llm.engine.runner.model, some, recorder, keep=last)
        rules |= recorder.rules
        for layer, inputs in recorder.inputs.items():
            parts[layer].append(inputs)
    joined = {
        layer: {name: torch.cat([one[name] for one in windows]) for name in windows[0]}
        for layer, windows in parts.items()
    }
    return joined, rules


def powers(steps: int) -> Iterator[int]:
    """Powers of two from a block's tokens to all steps."""
    at = BLOCK
    while at <= steps:
        yield at
        at *= 2


def bounds(steps: int) -> Iterator[tuple[int, int]]:
    """Where calls begin and end: at powers of two, and every PIECE tokens between."""
    start = 0
    for end in powers(steps):
        while start < end:
            stop = min(end, start + PIECE)
            yield start, stop
            start = stop


def run(inputs: Inputs, state: LayerState, delta: bool, start: int, end: int) -> Tensor:
    """One call over tokens [start, end) of a slot -> answers [T, H, V]."""
    q, k, x, decay, beta = (inputs[name][start:end] for name in ("q", "k", "x", "log_decay", "beta"))
    batch = StateBatch((0,), (start,), (end - start,), (start,), (end - start,))
    return recurrence(q, k, x, decay, beta, state, batch, delta=delta)


def errors(value: Tensor, exact: Tensor, dims: tuple[int, ...]) -> Tensor:
    """||value - exact|| / ||exact|| of each head."""
    value, exact = value.double(), exact.double()
    return (value - exact).norm(dim=dims) / exact.norm(dim=dims)


def drift_of_layer(
    inputs: Inputs, states: Mapping[str, LayerState], delta: bool, steps: int
) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Errors of each format at each power of two: of the heads' states, and of their answers since the last one."""
    answers: dict[str, list[Tensor]] = defaultdict(list)
    at = set(powers(steps))
    for start, end in bounds(steps):
        for name, state in states.items():
            answers[name].append(run(inputs, state, delta, start, end))
        if end not in at:
            continue
        matrices = {
            name: decode(name, [plane[0] for plane in state.planes]) for name, state in states.items()
        }
        exact = torch.cat(answers[EXACT])
        for name in states:
            of_state = errors(matrices[name], matrices[EXACT], (1, 2))
            yield name, end, of_state, errors(torch.cat(answers[name]), exact, (0, 2))
        answers.clear()


def summarise(
    inputs: Mapping[int, Inputs], rules: Mapping[int, str], llm: LLM, formats: Sequence[str], steps: int
) -> list[Drift]:
    """Errors over all layers and heads, a format after the other."""
    parts: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    pools = {name: StatePool(llm.plan.states, 1, name, llm.plan.dtype, "cpu") for name in (EXACT, *formats)}
    for layer in inputs:
        states = {name: pool.layers[layer] for name, pool in pools.items()}
        is_delta = rules[layer] == "delta"
        for name, at, *both in drift_of_layer(inputs[layer], states, is_delta, steps):
            parts[name, at].append((both[0], both[1]))
        print(f"layer {layer}", flush=True)
    drifts = []
    for name in formats:
        for at in powers(steps):
            state, answer = (torch.cat(errors) for errors in zip(*parts[name, at], strict=True))
            values = (state.mean(), state.max(), answer.mean(), answer.max())
            drifts.append(Drift(name, at, *(float(value) for value in values)))
    return drifts


@torch.inference_mode()
def measure(model: str, formats: Sequence[str], steps: int, window: int) -> list[Drift]:
    """Errors of states in some formats, over a text that the model brings."""
    with LLM(model, kv_format="bf16", kv_memory="64MiB", device="cpu", compile=False) as llm:
        text = read_text(None, model).content
        ids = llm.tokenizer.encode(text)[:steps]
        if len(ids) < steps:
            raise SystemExit(f"the text has {len(ids):,} tokens, and {steps:,} steps are asked for")
        return summarise(*record(llm, ids, window), llm, formats, steps)


def table(drifts: Sequence[Drift]) -> str:
    """A row for each number of steps, a pair of columns for each format."""
    formats = list(dict.fromkeys(drift.format for drift in drifts))
    rows = {at: [f"{at:,}"] for at in sorted({drift.steps for drift in drifts})}
    for drift in drifts:
        rows[drift.steps].append(f"{drift.state_mean:.2%} (worst {drift.state_worst:.2%})")
    for drift in drifts:
        rows[drift.steps].append(f"{drift.answer_mean:.2%}")
    head = ("steps", *(f"{name}: state" for name in formats), *(f"{name}: answers" for name in formats))
    return markdown(head, rows.values())


def plot(drifts: Sequence[Drift], path: Path, model: str) -> None:
    """Draws the errors of states over steps."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(dict.fromkeys(drift.format for drift in drifts)):
        own = [drift for drift in drifts if drift.format == name]
        steps = [drift.steps for drift in own]
        axes.plot(
            steps, [100 * drift.state_mean for drift in own], "o-", color=f"C{index}", label=f"{name}, mean"
        )
        worst = [100 * drift.state_worst for drift in own]
        axes.plot(steps, worst, ":", color=f"C{index}", label=f"{name}, worst head")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("steps")
    axes.set_ylabel("error of the state, %")
    axes.set_title(f"States of {model} against FP32", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": model}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-hybrid")
    parser.add_argument("--steps", type=int, default=32768, help="a power of two")
    parser.add_argument("--window", type=int, default=8192, help="tokens that the model reads at a time")
    parser.add_argument("--formats", default=",".join(name for name in FORMATS if name != EXACT))
    parser.add_argument("--plot", type=Path, help="a picture (svg, png or pdf)")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to try the benchmark itself")
    gpu.add_output_options(parser)
    options = parser.parse_args()
    steps, window = (256, 96) if options.tiny else (options.steps, options.window)
    drifts = measure(options.model, options.formats.split(","), steps, window)
    if options.plot:
        plot(drifts, options.plot, options.model)
    texts = [f"Model `{options.model}`, {steps:,} tokens of text in windows of {window:,}.", table(drifts)]
    figures = [asdict(drift) for drift in drifts]
    gpu.publish("state_drift", options, str(__doc__), texts, gpu.versions(), results=figures)


if __name__ == "__main__":
    main()
