"""Products of few rows with large weights: the kernel by tile, beside the library, as a decode step runs them.

    python benchmarks/linear.py [--rows 8,32,64] [--shapes qkv,o,gate_up,down,head] [--tiles 64x128x4,32x256x6]
        [--sm90 2x4x3,2x2x6] [--tiny] [--out FOLDER] [--report]

Shapes are those of Llama-3.1-8B, halves of them as ranks of tensor parallelism have, of Qwen3-32B, and of recurrent
layers of Qwen3-Next and Qwen3.5-27B. **Measured**: a CUDA graph of pairs, a small kernel and the product behind it,
over several copies of the weight, so that no cache is of use; a kernel that can start before the one in front ends
gains by it. Times are those of a pair. Tiles are Triton's, outputs of a program x inputs of a step x steps ahead, and x
warps where these are not 4; and those of linear_sm90.cu, warpgroups x parts of K x stages. What does not fit is left
out. Products named `gated` are those of the first half of an MLP with its gate, which behind the library's is a kernel
of its own. Gate: the error of each tile against the product in float32, norm over norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from report import markdown, ratio
from torch import Tensor

import gpu
from nibble.errors import BackendError
from nibble.kernels import gpu_of
from nibble.kernels.gated import naive
from nibble.kernels.linear import FEW_INPUTS, MAX_ERROR, sm90
from nibble.kernels.linear.triton import Tile, linear

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "gated": (28672, 4096),
    "head": (128256, 4096),
    "qkv/2": (3072, 4096),
    "o/2": (4096, 2048),
    "gated/2": (14336, 4096),
    "down/2": (4096, 7168),
    "32b_qkv": (10240, 5120),
    "32b_o": (5120, 8192),
    "32b_gated": (51200, 5120),
    "32b_down": (5120, 25600),
    "next_in": (12352, 2048),
    "next_out": (2048, 4096),
    "qwen3.5_in": (16480, 5120),
}
TINY = {"tiny": (128, 512)}
TILES = "64x128x4,64x128x6,32x256x4,32x256x6,64x64x8,32x128x8"
SM90_TILES = "1x2x6,1x4x6,2x1x5,2x2x3,2x2x5,2x4x3,2x4x5,4x1x4,4x2x4,4x4x4,4x8x4"
COPIES_BYTES, MOST_COPIES = 600 << 20, 8


def time_us(multiply: Callable[[Tensor], Tensor], weights: list[Tensor], x: Tensor) -> float:
    """The time of a small product and the large one behind it."""
    few = weights[0].new_zeros(FEW_INPUTS, FEW_INPUTS)

    def pairs() -> list[Tensor]:
        outputs = []
        for weight in weights:
            linear(x[:, :FEW_INPUTS], few, None)
            outputs.append(multiply(weight))
        return outputs

    return 1e3 * gpu.time_calls(pairs, len(weights)).ms


def name_of(tile: Tile) -> str:
    """How --tiles names it."""
    usual = Tile(tile.outputs, tile.inputs, tile.stages)
    name = f"{tile.outputs}x{tile.inputs}x{tile.stages}"
    return name if tile == usual else f"{name}x{tile.warps}"


def library(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
    y = F.linear(x, weight)
    if not gated:
        return y
    if not y.is_cuda:
        return naive.gate(y)
    from nibble.kernels.gated.triton import gate

    return gate(y)


def calls_of(
    x: Tensor, shape: tuple[int, int], tiles: list[Tile], sm90_tiles: list[sm90.Tile], *, gated: bool
) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is measured, by name."""
    (outputs, inputs), rows = shape, len(x)
    calls: dict[str, Callable[[Tensor], Tensor]] = {"library": partial(library, x, gated=gated)}
    for tile in (None, *tiles):
        if not tile or outputs % (tile.outputs * (2 if gated else 1)) == inputs % tile.inputs == 0:
            call = partial(triton_linear, x, tile=tile, gated=gated)
            calls[f"triton {name_of(tile)}" if tile else "triton's choice"] = call
    device = x.device
    if not sm90.serves((outputs // 2 if gated else outputs, inputs), x.dtype, gpu_of(device).arch):
        return calls
    if rows > sm90.MOST_ROWS:
        return calls
    choice = sm90.tile_of(outputs, inputs, rows, gpu_of(device).processors)
    for wish in dict.fromkeys((choice, *sm90_tiles)):
        if wish.fits(inputs, rows):
            name = f"sm90 {wish.groups}x{wish.splits}x{wish.stages}"
            call = partial(sm90_linear, x, tile=wish, gated=gated)
            calls[f"{name}, its choice" if wish == choice else name] = call
    return calls


def triton_linear(x: Tensor, weight: Tensor, *, tile: Tile | None, gated: bool) -> Tensor:
    return linear(x, weight, None, tile=tile, gated=gated)


def sm90_linear(x: Tensor, weight: Tensor, *, tile: sm90.Tile, gated: bool) -> Tensor:
    return sm90.linear(x, weight, None, tile=tile, gated=gated)


def measure(
    shape: tuple[int, int], rows: int, tiles: list[Tile], sm90_tiles: list[sm90.Tile], *, gated: bool
) -> Iterator[tuple[str, float]]:
    """Names and times, the library's first."""
    outputs, inputs = shape
    copies = min(MOST_COPIES, COPIES_BYTES // (2 * outputs * inputs) + 1)
    # Triton's interpreter knows no bfloat16.
    known = {"device": gpu.device(), "dtype": torch.bfloat16 if gpu.device() == "cuda" else torch.float32}
    weights = [torch.randn(shape, **known).mul_(0.02) for _ in range(max(copies, 2))]
    x = torch.randn(rows, inputs, **known)
    expected = F.linear(x.float(), weights[0].float())
    if gated:
        expected = naive.gate(expected.to(x.dtype)).float()
    for name, call in calls_of(x, shape, tiles, sm90_tiles, gated=gated).items():
        try:
            error = (call(weights[0]).float() - expected).norm() / expected.norm()
        except errors_of_sizes() as problem:
            print(f"{name} is left out: {problem}", flush=True)
            continue
        if not error <= MAX_ERROR:
            raise SystemExit(f"{name} is off by {error:.1e}")
        yield name, time_us(call, weights, x)


def errors_of_sizes() -> tuple[type[BaseException], ...]:
    """What is raised where a tile does not fit."""
    from triton.runtime.errors import OutOfResources

    return (BackendError, OutOfResources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="8")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tiles", default=TILES, help="of Triton; none if empty")
    parser.add_argument(
        "--sm90", default=SM90_TILES, help="tiles of linear_sm90.cu; its choice alone if empty"
    )
    parser.add_argument("--tiny", action="store_true", help="a small weight, to try the benchmark on a CPU")
    gpu.add_output_options(parser)
    options = parser.parse_args()
    tiles = [Tile(*map(int, text.split("x"))) for text in filter(None, options.tiles.split(","))]
    sm90_tiles = [sm90.Tile(*map(int, text.split("x"))) for text in filter(None, options.sm90.split(","))]
    shapes = TINY if options.tiny else {name: SHAPES[name] for name in options.shapes.split(",")}
    copy, rows = gpu.copy_tbps(), []
    for count in map(int, options.rows.split(",")):
        for name, shape in shapes.items():
            floor = 2 * shape[0] * shape[1] / copy / 1e6
            for tile, us in measure(shape, count, tiles, sm90_tiles, gated="gated" in name):
                rows.append((name, count, tile, f"{us:.1f}", f"{ratio(us, floor):.2f}"))
                print(*rows[-1], flush=True)
    table = markdown(("weight", "rows", "tile", "us", "times its bytes"), rows)
    gpu.publish("linear", options, str(__doc__), [table], gpu.versions(), copy_tbps=copy, rows=rows)


if __name__ == "__main__":
    main()
