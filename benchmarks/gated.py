"""Gated products: silu(x Wg^T) * (x Wu^T) in one kernel on SM90, beside a library's product and a kernel behind it.

    python benchmarks/gated.py [--tokens 512,1024,2048,4096,8192,16384] [--shapes llama-8b,qwen3-8b,...] [--out FOLDER]
        [--report]

Shapes are first products of dense models, and halves of two of them, as ranks of tensor parallelism have. **Measured**:
loops of 0.15 s at least, so that the GPU is at its power limit, of one after the other in turn; the median of three.
`product` is the library's alone, `both` with what inductor makes of the gate behind it. Others are this kernel, by rows
of tiles of a band, and stages that half of a block is ahead. Gate: errors against the product in float32, for several
numbers of tokens, odd ones among them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from report import markdown
from torch import Tensor

import gpu
from nibble.kernels.gated import cuda, naive

SHAPES = {
    "llama-8b": (14336, 4096),
    "llama-8b/2": (7168, 4096),
    "qwen3-8b": (12288, 4096),
    "qwen3-32b": (25600, 5120),
    "llama-70b": (28672, 8192),
    "llama-70b/2": (14336, 8192),
}
"""N, K."""
TOKENS = "512,1024,2048,4096,8192,16384"
CHECKED = (1, 129, 300, 1000, 8191)
BANDS = 8, 4, 16
"""Rows of tiles of a band."""
ROUNDS, LOOP_MS, FEWEST = 3, 150.0, 5
MAX_ERROR, MAX_SINGLE = 1e-2, 0.1
"""Norm over norm; and of one value, over its size and that of a usual one."""

compiled = torch.compile(naive.gate)


def check(weight: Tensor, rows: int, band: int) -> float:
    """The error of the kernel, norm over norm."""
    x = torch.randn(rows, weight.shape[1], device="cuda").bfloat16()
    out = cuda.gated_linear(x, weight, band=band).float()
    expected = naive.gate((x.float() @ weight.float().T).bfloat16()).float()
    differences, usual = (out - expected).abs(), expected.square().mean().sqrt()
    error = float(differences.norm() / expected.norm())
    single = float((differences / (expected.abs() + usual)).max())
    if not (error <= MAX_ERROR and single <= MAX_SINGLE):
        raise SystemExit(
            f"{tuple(weight.shape)}, {rows} rows, band {band}: off by {error:.1e}, one value by {single:.1e}"
        )
    return error


def loop_ms(call: Callable[[], object], calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls


def times_ms(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The time of each, taken in turn."""
    counts = {}
    for name, call in calls.items():
        loop_ms(call, 2)  # compiles
        counts[name] = max(int(LOOP_MS / loop_ms(call, FEWEST)) + 1, FEWEST)
    found = [{name: loop_ms(call, counts[name]) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(times[name] for times in found) for name in calls}


def own(x: Tensor, weight: Tensor, band: int) -> Callable[[], Tensor]:
    return lambda: cuda.gated_linear(x, weight, band=band)


def measure(weight: Tensor, tokens: int) -> dict[str, float]:
    x = torch.randn(tokens, weight.shape[1], device="cuda").bfloat16()
    y = F.linear(x, weight)
    torch._dynamo.mark_dynamic(y, 0)  # as in a model, whose sizes are known but for rows
    compiled(y)
    calls: dict[str, Callable[[], object]] = {
        "product": lambda: F.linear(x, weight),
        "both": lambda: compiled(F.linear(x, weight)),
    }
    for band in BANDS:
        calls[f"band {band}"] = own(x, weight, band)
    return times_ms(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    gpu.add_output_options(parser)
    options = parser.parse_args()
    cells, rows = [], []
    for name in options.shapes.split(","):
        outputs, inputs = SHAPES[name]
        torch._dynamo.reset()  # or the second shape makes sizes of rows vary
        weight = torch.randn(2 * outputs, inputs, device="cuda").mul_(0.02).bfloat16()
        error = max(check(weight, count, band) for band in BANDS for count in CHECKED)
        print(f"{name}: error {error:.1e}", flush=True)
        for tokens in map(int, options.tokens.split(",")):
            found = measure(weight, tokens)
            tflop = 4e-12 * tokens * outputs * inputs
            for what, ms in found.items():
                cells.append({"shape": name, "tokens": tokens, "kernel": what, "ms": ms})
                rate, gain = 1e3 * tflop / ms, found["both"] / ms
                print(
                    f"{name} {tokens} {what}: {1e3 * ms:.1f} us, {rate:.0f} TFLOP/s, {gain:.3f}", flush=True
                )
            best = min(list(found)[2:], key=lambda what: found[what])
            us = (f"{1e3 * found[what]:.1f} ({1e3 * tflop / found[what]:.0f})" for what in found)
            gains = (f"{found[what] / found[best]:.3f}" for what in ("both", "product"))
            rows.append((name, tokens, *us, best, *gains))
    head = (
        "shape",
        "tokens",
        *(f"{what}, us (TFLOP/s)" for what in found),
        "best",
        "both / best",
        "product / best",
    )
    gpu.publish("gated", options, str(__doc__), [markdown(head, rows)], gpu.versions(), cells=cells)


if __name__ == "__main__":
    main()
