"""What a prompt's recurrence takes in one layer on one GPU, beside flash-linear-attention's.

    python benchmarks/recurrence_prompt.py [--formats fp32,int8] [--steps 1x2K,1x16K] [--no-peer]

The gated delta rule, 16 heads of keys and 32 of values of 128 x 128, BF16. A step is so many requests of so many
tokens. Times are medians of calls between events, workspaces and all launches counted; `kernels` are those of the two
launches alone. Gate: outputs against naive.py over the first request's first tokens. The peer, where `fla` can be
imported, is chunk_gated_delta_rule from float32 states that it does not round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from report import markdown
from torch import Tensor
from torch.nn.functional import normalize, softplus

import gpu
from nibble.kernels.recurrence import StateBatch, layer_state, naive
from nibble.kernels.recurrence import prompt as kernels
from nibble.kernels.recurrence.types import LayerState, StateMetadata
from nibble.kernels.state_formats import FORMATS
from nibble.model_spec import RecurrentGroup

HEADS, KEY_HEADS, ROWS, COLUMNS = 32, 16, 128, 128
STEPS = ("1x2K", "1x16K", "8x2K")
CHECKED = 256
"""Tokens that are compared with the definition."""
WORST = {"fp32": 0.005, "bf16": 0.006, "int8": 0.012, "fp8": 0.03}
CALLS, WARM = 12, 3
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs_of(tokens: int) -> Inputs:
    """Return random queries, keys, values, decays and rates."""
    q, k = (
        normalize(torch.randn(tokens, KEY_HEADS, COLUMNS, device="cuda"), dim=-1).bfloat16() for _ in range(2)
    )
    v = torch.randn(tokens, HEADS, ROWS, device="cuda").bfloat16()
    pace, rate = (torch.randn(tokens, HEADS, device="cuda") for _ in range(2))
    return q * COLUMNS**-0.5, k, v, -softplus(pace) / 20, torch.sigmoid(rate).bfloat16()


def slots_of(format: str, requests: int) -> LayerState:
    group = RecurrentGroup("delta", "delta", (0,), HEADS, ROWS, COLUMNS, KEY_HEADS)
    return layer_state(group, requests, format, torch.bfloat16, 0, "cuda")


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call, one behind the other so that the host is ahead."""
    for _ in range(WARM):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def kernel_times(call: Callable[[], object]) -> str:
    """Return the microseconds of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    times = [(event.key, event.device_time_total) for event in profiler.key_averages()]
    return " + ".join(f"{name} {us:.0f}" for name, us in times if name.startswith("scan"))


def metadata_of(requests: int, tokens: int) -> StateMetadata:
    ids = torch.arange(requests, dtype=torch.int32, device="cuda")
    bounds = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * tokens
    return StateMetadata(ids, torch.zeros_like(ids), bounds, tokens)


def error_of(format: str, inputs: Inputs, o_THV: Tensor) -> float:
    """Return the error of the first tokens' outputs."""
    q, k, v, decay, beta = (x[:CHECKED] for x in inputs)
    batch = StateBatch((0,), (0,), (len(q),), (0,), (len(q),))
    expected = naive.recurrence(q.float(), k, v.float(), decay, beta, slots_of(format, 1), batch, delta=True)
    return float((o_THV[: len(q)].float() - expected).norm() / expected.norm())


def peer_of(inputs: Inputs, requests: int) -> Callable[[], object] | None:
    """Return a call of flash-linear-attention; None where it cannot be imported."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # of many kinds: it looks at the GPU and at Triton
        print(f"flash-linear-attention is left out: {type(error).__name__}: {error}")
        return None
    q, k, v, decay, beta = (x.unflatten(0, (requests, -1)) for x in inputs)
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, dim=2) for x in (q, k))
    states = torch.zeros(requests, HEADS, COLUMNS, ROWS, device="cuda")
    options: dict[str, Any] = {"scale": 1.0, "initial_state": states, "output_final_state": True}
    return lambda: chunk_gated_delta_rule(q, k, v, decay, beta, **options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    gpu.add_output_options(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for step in options.steps.split(","):
            requests, _, length = step.partition("x")
            count, tokens = (
                int(requests),
                int(length.removesuffix("K")) * (1024 if length.endswith("K") else 1),
            )
            inputs, metadata = inputs_of(count * tokens), metadata_of(count, tokens)
            peer = peer_of(inputs, count) if options.peer else None
            theirs = milliseconds(peer) if peer else None
            for format in options.formats.split(","):
                state = slots_of(format, count)
                if not kernels.serves(*inputs, state, metadata):
                    raise SystemExit(f"{step} {format} is not served")

                call = partial(kernels.recurrence, *inputs, state, metadata, delta=True)
                error = error_of(format, inputs, call())
                ms = milliseconds(call)
                rate = f"{theirs / ms:.2f}" if theirs else "-"
                rows.append((step, format, f"{ms:.3f}", f"{theirs:.3f}" if theirs else "-", rate, kernel_times(call),
                             f"{error:.1e}"))  # fmt: skip
                print(*rows[-1], flush=True)
                if not error <= WORST[format]:
                    raise SystemExit(f"{step} {format}: off by {error:.2g}, {WORST[format]:g} is allowed")
    head = ("step", "states", "Nibble, ms", "fla, ms", "times fla's rate", "kernels, us", "error")
    gpu.publish("recurrence-prompt", options, str(__doc__), [markdown(head, rows)], gpu.versions())


if __name__ == "__main__":
    main()
