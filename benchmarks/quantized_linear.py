"""Products with packed weights on one GPU, beside plain ones by the library: errors and times.

    python benchmarks/quantized_linear.py [--formats int4,fp8,nvfp4] [--rows 1,8,64,256,2048] [--shapes qkv,down]
        [--limit 85] [--peers] [--tiny] [--out FOLDER] [--report]

The four shapes are those of a layer of Llama-3.1-8B, with queries, keys and values in one, and gate and up in one. Each
time is the median replay of a CUDA graph of several calls, over several copies of the weights, so that the L2 cache is
no help. Of formats with FP8 activations (fp8a8, fp8rowa8) the product alone is measured, and the quantisation of its
inputs apart (`+ inputs`). --peers adds torch's own product of 1
x 128 by 128 x 128 blocks, over plain rows of codes. Errors are norm over norm, against the definition in float32 over
the same packed bytes. Kernels of the next format compile while one is measured; formats that do not begin within the
limit, in seconds, are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from packed_weights import KINDS, quantize
from report import markdown
from torch import Tensor

import gpu
from nibble.kernels.quantized_linear import (
    TOLERANCE,
    Preparation,
    expected_product,
    naive,
    quantize_activations,
    quantized_linear,
)
from nibble.kernels.quantized_linear import prepared as prepared_on_gpu
from nibble.kernels.quantized_linear.matrix import PackedMatrix
from nibble.kernels.weight_formats import GROUP, Activations

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TINY = {"tiny": (64, 128)}
ROWS = (1, 8, 64, 256, 2048)
PLAIN, PEER = "bf16", "torch"
COPIES_BYTES, MOST_COPIES, SPEND_MS = 256 << 20, 24, 8.0
Prepared = tuple[PackedMatrix, Tensor | None]


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    format: str
    shape: str
    rows: int
    us: float
    error: float


def weight(shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator(gpu.device()).manual_seed(0)
    return torch.randn(shape, generator=generator, device=gpu.device()).mul_(0.02).bfloat16()


def compile_format(name: str, shapes: dict[str, tuple[int, int]]) -> dict[str, PackedMatrix]:
    """Packed weights of all shapes, whose kernels are compiled."""
    kind = KINDS[name]
    matrices = {
        shape: replace(quantize(weight(size), kind.format), activations=kind.activations)
        for shape, size in shapes.items()
    }
    if torch.cuda.is_available():
        Preparation(matrices.values())  # which begins to compile
    return matrices


def prepared(matrix: PackedMatrix) -> Prepared:
    if not torch.cuda.is_available():
        return matrix, None
    return prepared_on_gpu(matrix)


def copies(size: int) -> int:
    return max(1, min(MOST_COPIES, COPIES_BYTES // size)) if torch.cuda.is_available() else 1


def copied(packed: Prepared) -> Prepared:
    matrix, locks = packed
    tensors = {name: tensor.clone() for name, tensor in matrix.tensors.items()}
    return replace(matrix, **tensors), None if locks is None else locks.clone()


def time_us(calls: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    return 1e3 * gpu.time_calls(lambda: [call(x) for call in calls], len(calls), spend_ms=SPEND_MS).ms


def plain(shapes: dict[str, tuple[int, int]], rows: Sequence[int]) -> Iterator[Cell]:
    """By the library."""
    for shape, size in shapes.items():
        first = weight(size)
        weights = [first, *(first.clone() for _ in range(copies(first.nbytes) - 1))]
        for n in rows:
            x = inputs(n, size[1])
            calls = [lambda x, w=w: F.linear(x, w) for w in weights]
            yield Cell(PLAIN, shape, n, time_us(calls, x), 0.0)


def inputs(rows: int, columns: int) -> Tensor:
    generator = torch.Generator(gpu.device()).manual_seed(rows)
    return torch.randn(rows, columns, generator=generator, device=gpu.device()).bfloat16()


def packed(name: str, matrices: dict[str, PackedMatrix], rows: Sequence[int]) -> Iterator[Cell]:
    for shape, matrix in matrices.items():
        own = prepared(matrix)
        all_copies = [own, *(copied(own) for _ in range(copies(matrix.nbytes) - 1))]
        for n in rows:
            x = inputs(n, matrix.shape[1])
            expected = expected_product(x, matrix).float()
            error = float((quantized_linear(x, *own).float() - expected).norm() / expected.norm())
            given = quantize_activations(x, matrix.activations) if matrix.activations else (x, None)
            calls = [lambda x, one=one, given=given: product(*given, *one) for one in all_copies]
            yield Cell(name, shape, n, time_us(calls, x), error)


def product(x: Tensor, x_scale: Tensor | None, matrix: PackedMatrix, locks: Tensor | None) -> Tensor:
    """The product of inputs that are quantised already, where they are."""
    tensors = matrix.codes, matrix.scale, matrix.zero, matrix.global_scale
    y: Tensor = torch.ops.nibble.quantized_linear(x, x_scale, *tensors, locks, *matrix.facts)
    return y


def quantisation(name: str, shapes: dict[str, tuple[int, int]], rows: Sequence[int]) -> Iterator[Cell]:
    """Of the inputs of products; several at a time, so that the L2 cache is no help for many rows."""
    activations = KINDS[name].activations
    for shape, (_, columns) in shapes.items():
        for n in rows:
            x = inputs(n, columns)
            calls = [lambda x: quantize_activations(x, activations)[0]] * 8
            yield Cell(f"{name} + inputs", shape, n, time_us(calls, x), 0.0)


def peer(matrices: dict[str, PackedMatrix], rows: Sequence[int]) -> Iterator[Cell]:
    """By torch, of blocks: activations 1 x 128, weights 128 x 128."""
    for shape, matrix in matrices.items():
        codes_NK = matrix.codes.view(torch.float8_e4m3fn)
        scale = matrix.scale[::GROUP].float()
        weights = [codes_NK, *(codes_NK.clone() for _ in range(copies(matrix.nbytes) - 1))]
        for n in rows:
            x = inputs(n, matrix.shape[1])
            codes, x_scale = naive.quantize_activations(x, Activations.GROUP)
            # Scales of activations lie token after token, those of weights input after input.
            scales = x_scale.T.contiguous().T, scale.T

            def multiply(
                _: Tensor, w: Tensor, codes: Tensor = codes, scales: tuple[Tensor, Tensor] = scales
            ) -> Tensor:
                return torch._scaled_mm(codes, w.T, *scales, out_dtype=torch.bfloat16)

            try:
                y = multiply(x, codes_NK).float()
            except (RuntimeError, ValueError) as error:
                print(f"torch, {shape}, {n} rows: {str(error).strip().splitlines()[0][:150]}", flush=True)
                continue
            expected = expected_product(x, matrix).float()
            calls = [lambda x, w=w: multiply(x, w) for w in weights]
            yield Cell(PEER, shape, n, time_us(calls, x), float((y - expected).norm() / expected.norm()))


def table(cells: Sequence[Cell]) -> str:
    """A line for each format and shape."""
    rows = list(dict.fromkeys(cell.rows for cell in cells))
    lines = []
    for key in dict.fromkeys((cell.shape, cell.format) for cell in cells):
        own = {cell.rows: cell for cell in cells if (cell.shape, cell.format) == key}
        error = max(cell.error for cell in own.values())
        lines.append((*key, *(f"{own[n].us:.1f}" if n in own else "" for n in rows), f"{error:.1e}"))
    return markdown(
        ("shape", "format", *(f"{n} rows, us" for n in rows), "error"), sorted(lines, key=lambda x: x[0])
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(KINDS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--limit", type=float, default=85.0)
    parser.add_argument("--peers", action="store_true", help="torch's product of FP8 blocks too")
    parser.add_argument(
        "--tiny", action="store_true", help="a small matrix, to try the benchmark itself on a CPU"
    )
    gpu.add_output_options(parser)
    return parser


def measure(options: argparse.Namespace) -> list[Cell]:
    began = time.monotonic()
    shapes = TINY if options.tiny else {name: SHAPES[name] for name in options.shapes.split(",")}
    rows = [1, 8] if options.tiny else [int(n) for n in options.rows.split(",")]
    cells: list[Cell] = []

    def say(name: str, new: Iterator[Cell]) -> None:
        for cell in new:
            cells.append(cell)
            wrong = "" if cell.error <= TOLERANCE else f"  WRONG: off by {cell.error:.2g}"
            what = f"{cell.format:15} {cell.shape:8} {cell.rows:5} rows {cell.us:8.1f} us{wrong}"
            print(f"{time.monotonic() - began:5.1f} s  {what}", flush=True)

    names = options.formats.split(",")
    with ThreadPoolExecutor(1) as pool:
        compiling: dict[str, Future[dict[str, PackedMatrix]]] = {}
        compiling[names[0]] = pool.submit(compile_format, names[0], shapes)
        say(PLAIN, plain(shapes, rows))
        for i, name in enumerate(names):
            if time.monotonic() - began > options.limit:
                print(f"left out, for want of time: {', '.join(names[i:])}")
                break
            matrices = compiling[name].result()
            if i + 1 < len(names):
                compiling[names[i + 1]] = pool.submit(compile_format, names[i + 1], shapes)
            say(name, packed(name, matrices, rows))
            if KINDS[name].activations:
                say(name, quantisation(name, shapes, rows))
            if options.peers and KINDS[name].activations is Activations.GROUP:
                say(PEER, peer(matrices, rows))
    return cells


def main() -> None:
    options = arguments().parse_args()
    cells = measure(options)
    gpu.publish(
        "quantized_linear",
        options,
        __doc__,
        [table(cells)],
        gpu.versions(),
        cells=[asdict(cell) for cell in cells],
    )
    # Not a peer's.
    if wrong := [cell for cell in cells if not cell.error <= TOLERANCE and cell.format != PEER]:
        raise SystemExit(f"wrong answers: {len(wrong)}, the first {wrong[0]}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
