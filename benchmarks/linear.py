"""Products of few rows with large weights: the kernel by tile, beside the library, as a decode step runs them.

    python benchmarks/linear.py [--rows 8] [--shapes qkv,o,gate_up,down,head] [--tiles 64x128x4,32x256x6] [--tiny]
        [--out FOLDER] [--report]

Shapes are those of Llama-3.1-8B, and of recurrent layers of Qwen3-Next and Qwen3.5-27B. **Measured**: a CUDA graph of
pairs, a small kernel and the product behind it, over several copies of the weight, so that no cache is of use; a kernel
that can start before the one in front ends gains by it. Times are those of a pair. Tiles are outputs of a program x
inputs of a step x steps ahead, and x warps where these are not 4. Gate: the error of each tile against the product in
float32, norm over norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from report import markdown, ratio
from torch import Tensor

import gpu
from nibble.kernels.linear import FEW_INPUTS, MAX_ERROR
from nibble.kernels.linear.triton import Tile, linear

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "next_in": (12352, 2048),
    "next_out": (2048, 4096),
    "qwen3.5_in": (16480, 5120),
}
TINY = {"tiny": (128, 512)}
TILES = "64x128x4,64x128x6,32x256x4,32x256x6,64x64x8,32x128x8"
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


def measure(shape: tuple[int, int], rows: int, tiles: list[Tile | None]) -> list[tuple[str, float]]:
    """Names and times, the library's first; None is the tile that is chosen."""
    outputs, inputs = shape
    copies = min(MOST_COPIES, COPIES_BYTES // (2 * outputs * inputs) + 1)
    # Triton's interpreter knows no bfloat16.
    known = {"device": gpu.device(), "dtype": torch.bfloat16 if gpu.device() == "cuda" else torch.float32}
    weights = [torch.randn(shape, **known).mul_(0.02) for _ in range(max(copies, 2))]
    x = torch.randn(rows, inputs, **known)
    expected = F.linear(x.float(), weights[0].float())
    found = [("library", time_us(lambda weight: F.linear(x, weight), weights, x))]
    for tile in tiles:
        if tile and outputs % tile.outputs:
            continue
        error = (linear(x, weights[0], None, tile=tile).float() - expected).norm() / expected.norm()
        if error > MAX_ERROR:
            raise SystemExit(f"{tile} is off by {error:.1e}")
        us = time_us(lambda weight, tile=tile: linear(x, weight, None, tile=tile), weights, x)
        found.append((name_of(tile) if tile else "chosen", us))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="8")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tiles", default=TILES)
    parser.add_argument("--tiny", action="store_true", help="a small weight, to try the benchmark on a CPU")
    gpu.add_output_options(parser)
    options = parser.parse_args()
    tiles = [Tile(*map(int, text.split("x"))) for text in options.tiles.split(",")]
    shapes = TINY if options.tiny else {name: SHAPES[name] for name in options.shapes.split(",")}
    copy, rows = gpu.copy_tbps(), []
    for count in map(int, options.rows.split(",")):
        for name, shape in shapes.items():
            floor = 2 * shape[0] * shape[1] / copy / 1e6
            for tile, us in measure(shape, count, [None, *tiles]):
                rows.append((name, count, tile, f"{us:.1f}", f"{ratio(us, floor):.2f}"))
                print(*rows[-1], flush=True)
    table = markdown(("weight", "rows", "tile", "us", "times its bytes"), rows)
    gpu.publish("linear", options, str(__doc__), [table], gpu.versions(), copy_tbps=copy, rows=rows)


if __name__ == "__main__":
    main()
