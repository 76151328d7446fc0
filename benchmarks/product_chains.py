"""Tiles of linear_sm90.cu in chains of layers, where a product's blocks start before the kernel in front has ended.

    python benchmarks/product_chains.py [--rows 32,64,128] [--layers 8] [--out FOLDER] [--report]

A chain is what a decode step of Llama-3.1-8B multiplies, norms in front, in a CUDA graph; a small kernel stands for
attention. **Measured**: microseconds a layer, with the tiles that sm90.py chooses (for up to 16 rows Triton's kernel),
whatever trials at load say, and with each way to compute one of the four weights, others as they are: tiles
(warpgroups x parts of K x stages), the library's, Triton's of few rows. What is fastest alone need not be so here
(benchmarks/linear.py). Gains are those of single changes, which need not add up; `together` has all that gain. Gate:
each way against the library.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import suppress

import torch
from linear import SHAPES, library
from report import markdown
from torch import Tensor

import gpu
from nibble.errors import BackendError
from nibble.kernels import MMA_ROWS, ahead, gpu_of
from nibble.kernels.linear import MAX_ERROR, TRITON_ROWS, sm90
from nibble.kernels.linear import triton as by_triton
from nibble.kernels.linear.sm90 import Tile
from nibble.kernels.norm import triton as norm

WEIGHTS = {name: SHAPES[name] for name in ("qkv", "o", "gated", "down")}
"""N and K, in the order in which a layer multiplies."""
LIBRARY, TRITON = "library", "triton"
HIDDEN, EPS = 4096, 1e-5
STAGES = range(3, 13)
FEWEST_BLOCKS = 48
ROUNDS, REPLAYS, SHOWN = 5, 4, 5
GAIN_US = 0.3
"""From which on a way is one of those together."""
Way = Tile | str


def tiles(outputs: int, inputs: int, rows: int, processors: int) -> list[Tile]:
    """Tiles whose blocks run all at once, and are not too few."""
    found = []
    for groups in sm90.GROUPS:
        for splits in sm90.SPLITS:
            for tile in (Tile(groups, splits, stages) for stages in STAGES):
                steps = inputs // sm90.INPUTS // splits
                if not tile.fits(inputs, rows) or steps < tile.stages:
                    continue
                blocks = outputs // (sm90.GROUP * groups) * splits
                if FEWEST_BLOCKS <= blocks <= processors * tile.per_processor(rows):
                    found.append(tile)
    return found


def name_of(way: Way) -> str:
    return way if isinstance(way, str) else f"{way.groups}x{way.splits}x{way.stages}"


def multiply(x: Tensor, weight: Tensor, way: Way, *, gated: bool) -> Tensor:
    if way == LIBRARY:
        return library(x, weight, gated=gated)
    if isinstance(way, str):
        return by_triton.linear(x, weight, None, gated=gated)
    return sm90.linear(x, weight, gated=gated, tile=way)


class Chains:
    """Layers with random weights, for so many rows."""

    def __init__(self, rows: int, layers: int) -> None:
        self.rows = rows
        self.processors = gpu_of(torch.device("cuda")).processors
        self.layers = [
            {
                name: torch.randn(*shape, device="cuda").mul_(0.02).bfloat16()
                for name, shape in WEIGHTS.items()
            }
            for _ in range(layers)
        ]
        self.factors = torch.ones(HIDDEN, device="cuda").bfloat16()

    def now(self) -> dict[str, Way]:
        """What others are compared with."""
        if self.rows <= MMA_ROWS:
            return dict.fromkeys(WEIGHTS, TRITON)
        return {name: sm90.tile_of(*shape, self.rows, self.processors) for name, shape in WEIGHTS.items()}

    def ways(self, name: str) -> list[Way]:
        others = [LIBRARY, TRITON] if self.rows <= TRITON_ROWS else [LIBRARY]
        return [*tiles(*WEIGHTS[name], self.rows, self.processors), *others]

    def inputs(self, name: str) -> Tensor:
        return torch.randn(self.rows, WEIGHTS[name][1], device="cuda").bfloat16()

    def check(self, name: str, way: Way) -> None:
        """Stop where a way computes something else than the library."""
        x, weight = self.inputs(name), self.layers[0][name]
        y, expected = (multiply(x, weight, one, gated=name == "gated").float() for one in (way, LIBRARY))
        if not (y - expected).norm() <= MAX_ERROR * expected.norm():
            raise SystemExit(f"{name}, {self.rows} rows, {name_of(way)}: wrong")

    def graph(self, ways: dict[str, Way]) -> torch.cuda.CUDAGraph:
        x, residual = (torch.randn(self.rows, HIDDEN, device="cuda").bfloat16() for _ in range(2))

        def product(x: Tensor, layer: dict[str, Tensor], name: str) -> Tensor:
            return multiply(x, layer[name], ways[name], gated=name == "gated")

        def step() -> Tensor:
            y, total = x, residual
            for layer in self.layers:
                total, normed = norm.add_norm(y, total, self.factors, EPS)
                y = product(product(normed, layer, "qkv")[:, :HIDDEN].mul(1.0), layer, "o")
                total, normed = norm.add_norm(y, total, self.factors, EPS)
                y = product(product(normed, layer, "gated"), layer, "down")
            return y

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph

    def times_us(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        """Microseconds a layer of each, taken in turn."""
        rounds = [[self._time_us(graph) for graph in graphs] for _ in range(ROUNDS + 1)][1:]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def _time_us(self, graph: torch.cuda.CUDAGraph) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop) / REPLAYS / len(self.layers)


def compile_ahead(chains: Chains) -> None:
    """Compile all tiles at the same time."""
    with ahead.rehearsal():
        for name in WEIGHTS:
            for way in chains.ways(name):
                with suppress(BackendError):
                    multiply(chains.inputs(name), chains.layers[0][name], way, gated=name == "gated")


def measure(chains: Chains) -> list[tuple[object, ...]]:
    compile_ahead(chains)
    now = chains.now()
    changes = [(name, way) for name in WEIGHTS for way in chains.ways(name) if way != now[name]]
    for name, way in changes:
        chains.check(name, way)
    graphs = [chains.graph(now), *(chains.graph({**now, name: way}) for name, way in changes)]
    base, *times = chains.times_us(graphs)
    together, rows = dict(now), list[tuple[object, ...]]()
    for name in WEIGHTS:
        found = sorted(
            (us, name_of(way), way) for (of, way), us in zip(changes, times, strict=True) if of == name
        )
        if found[0][0] < base - GAIN_US:
            together[name] = found[0][2]
        best = "; ".join(f"{label} {base - us:+.1f}" for us, label, _ in found[:SHOWN])
        print(f"{chains.rows} rows, {base:.1f} us; {name}, {name_of(now[name])} now: {best}", flush=True)
        rows.append((chains.rows, f"{base:.1f}", name, name_of(now[name]), best))
    before, after = chains.times_us([chains.graph(now), chains.graph(together)])
    ways = ", ".join(map(name_of, together.values()))
    print(f"{chains.rows} rows together ({ways}): {after:.1f} in place of {before:.1f} us", flush=True)
    return [*rows, (chains.rows, f"{after:.1f}", "together", ways, f"{before - after:+.1f}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="32,64,128")
    parser.add_argument("--layers", type=int, default=8)
    gpu.add_output_options(parser)
    options = parser.parse_args()
    table = [
        row for rows in map(int, options.rows.split(",")) for row in measure(Chains(rows, options.layers))
    ]
    head = ("rows", "us a layer", "weight", "now", "us that others gain")
    gpu.publish("product_chains", options, str(__doc__), [markdown(head, table)], gpu.versions(), cells=table)


if __name__ == "__main__":
    main()
