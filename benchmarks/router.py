"""What routers of experts and greedy sampling take: narrow products, torch.topk and the largest logit, beside torch's.

    python benchmarks/router.py [--rows 1,8,16,64] [--models qwen3-30b,gpt-oss-20b,deepseek-v3] [--vocab 128256]
        [--tiny] [--out FOLDER] [--report]

**Measured**: CUDA graphs of one operation, over several copies of its input; copies of weights and logits are larger
together than the GPU's cache. A call starts while the one in front ends, where its kernel can. Gate: the very values of
torch.topk and torch.max, and the error of products, norm over norm. Products of more than 16 rows are the library's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from report import markdown
from torch import Tensor

import gpu
from nibble.kernels import MMA_ROWS, topk
from nibble.kernels.linear import MAX_ERROR
from nibble.kernels.linear.triton import narrow_linear
from nibble.kernels.topk import naive
from nibble.kernels.topk import triton as fast

MODELS = {"qwen3-30b": (128, 2048, 8), "gpt-oss-20b": (32, 2880, 4), "deepseek-v3": (256, 7168, 8)}
"""Experts, hidden size, experts of a token."""
TINY = {"tiny": (16, 64, 4)}
COPIES_BYTES, MOST_COPIES = 128 << 20, 256
Row = tuple[str, int, str, str, str]


def time_us(compute: Callable[[Tensor], Any], inputs: list[Tensor]) -> float:
    """The time of a call."""
    return 1e3 * gpu.time_calls(lambda: [y for x in inputs for y in _tensors(compute(x))], len(inputs)).ms


def _tensors(y: Any) -> tuple[Tensor, ...]:
    return (y,) if isinstance(y, Tensor) else tuple(y)


def copies(*shape: int, dtype: torch.dtype) -> list[Tensor]:
    """Random tensors of a shape."""
    first = torch.randn(shape, device=gpu.device()).to(dtype)
    count = min(MOST_COPIES, COPIES_BYTES // first.nbytes + 1) if first.is_cuda else 2
    return [first, *(torch.randn_like(first) for _ in range(count - 1))]


def compare(
    name: str, rows: int, what: str, library: Callable[[Tensor], Any], own: Callable[[Tensor], Any],
    inputs: list[Tensor], error: float,
) -> Row:  # fmt: skip
    """A line of the table: torch's time, and ours of the same values."""
    expected, found = (_tensors(compute(inputs[0]))[0].float() for compute in (library, own))
    if (found - expected).norm() > error * expected.norm():
        raise SystemExit(f"{name}: {what} of {rows} rows is wrong")
    row = (name, rows, what, f"{time_us(library, inputs):.1f}", f"{time_us(own, inputs):.1f}")
    print(*row, flush=True)
    return row


def measure(models: dict[str, tuple[int, int, int]], vocab: int, rows: int) -> list[Row]:
    """All lines of so many rows."""
    # Triton's interpreter knows no bfloat16.
    half = torch.bfloat16 if gpu.device() == "cuda" else torch.float32
    table = []
    for name, (experts, hidden, k) in models.items():
        x = torch.randn(rows, hidden, device=gpu.device()).to(half)
        if rows <= MMA_ROWS:
            weights = copies(experts, hidden, dtype=half)
            product = partial(narrow_linear, x, bias_N=None)
            table.append(compare(name, rows, "product", partial(F.linear, x), product, weights, MAX_ERROR))
        for dtype in dict.fromkeys((torch.float32, half)):
            what = f"topk {str(dtype).removeprefix('torch.')}"
            values = [torch.randn_like(x[:, :1].to(dtype).expand(-1, experts)) for _ in range(16)]
            choices = partial(torch.topk, k=k), partial(fast.topk, k=k)
            table.append(compare(name, rows, what, *choices, values, 0))
    for dtype in dict.fromkeys((torch.float32, half)):
        what = f"largest of {vocab} {str(dtype).removeprefix('torch.')}"
        logits = copies(rows, vocab, dtype=dtype)
        own = topk.likeliest if gpu.device() == "cuda" else fast.likeliest
        table.append(compare("sampler", rows, what, naive.likeliest, own, logits, 0))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,8,16,64")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the benchmark on a CPU")
    gpu.add_output_options(parser)
    options = parser.parse_args()
    models = TINY if options.tiny else {name: MODELS[name] for name in options.models.split(",")}
    vocab = 5000 if options.tiny else options.vocab
    rows = [row for count in options.rows.split(",") for row in measure(models, vocab, int(count))]
    table = markdown(("model", "rows", "operation", "torch us", "us"), rows)
    gpu.publish("router", options, str(__doc__), [table], gpu.versions(), rows=rows)


if __name__ == "__main__":
    main()
