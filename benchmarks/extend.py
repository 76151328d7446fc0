"""Extend: attention of new tokens over a cached prefix, nvfp4 against bf16, of Nibble's backends and of FlashInfer.

    python benchmarks/extend.py [--shapes 8K+32K] [--formats nvfp4,bf16] [--backends cuda,triton,sdpa] [--no-peers]
                                [--tiny] [--out FOLDER] [--report]

A shape is new tokens + cached tokens of one request; 2K+0 is a prompt without a prefix. Nibble's side is what an engine
calls: a backend over the pool, page 64, or over pages that were dequantised first (`staged`, its time included).
FlashInfer (optional) is its paged prefill over the bf16 pool, fa2 and fa3, pages of 64 and of 16, the better one
counts; its host planning is not timed. 32 query heads, 8 KV heads of 128 values. Times are medians of runs one after
the other (staging talks to the host, so there is no CUDA graph here). Gate: rows of the output from the beginning, the
middle and the end, against float64 over the dequantised cache, at most twice the error of torch in bfloat16.

TFLOP/s counts the two products of causal attention, and no work for dequantising.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass

import paged
import peers
import torch
from paged import Attention, Cache, Heads
from report import Aim, aims_table, markdown, ratio
from torch import Tensor

import gpu
from nibble.model_spec import Phase

SHAPES = ("8K+32K", "2K+0", "512+8K")
AIMED = SHAPES[0]
TINY = ("24+40", "20+0")
FORMATS = ("nvfp4", "bf16", "fp8_e4m3")
HEADS, TINY_HEADS = Heads(), Heads(4, 2, 32)
ROWS = 8
"""Rows that are checked at each place."""


@dataclass(frozen=True)
class Cell:
    """One measurement. error, plain: paged.Error."""

    shape: str
    kernel: str
    format: str
    page: int
    ms: float
    flops: float
    error: float
    plain: float

    @property
    def peer(self) -> bool:
        return self.kernel.startswith("FlashInfer")

    @property
    def text(self) -> str:
        return f"{self.ms:.3f} ms, {self.flops / self.ms / 1e9:.0f} TFLOP/s"


def lengths(shape: str) -> tuple[int, int]:
    """`8K+32K` -> new tokens, cached tokens."""
    new, _, cached = shape.partition("+")
    return paged.tokens(new), paged.tokens(cached or "0")


def phase_of(cached: int) -> Phase:
    return Phase.EXTEND if cached else Phase.PREFILL


def measure(name: str, shape: str, cache: Cache, attention: Attention) -> Cell:
    """Times one kernel over the layers of a cache, and checks what it wrote."""
    new, before = lengths(shape)
    queries = cache.queries(new)
    took = gpu.time_calls(
        lambda: [attention(q_THD, layer) for layer, q_THD in enumerate(queries)], cache.layers, graph=False
    )
    errors = list(errors_of(cache, queries[0], took.outputs[0], before))
    for found in errors:
        found.gate(f"{name}, {cache.scheme}, {shape}")
    error = paged.biggest(errors)
    flops = 4.0 * cache.heads.q * cache.heads.dim * new * (before + (new + 1) / 2)
    return Cell(shape, name, cache.scheme, cache.page_size, took.ms, flops, error.relative, error.plain)


def errors_of(cache: Cache, q_THD: Tensor, out_THD: Tensor, before: int) -> Iterator[paged.Error]:
    """The errors of a few rows at the beginning, in the middle and at the end of the new tokens."""
    for start in (0, len(q_THD) // 2, len(q_THD) - ROWS):
        rows = slice(start, start + ROWS)
        yield paged.error(q_THD[rows], out_THD[rows], cache, 0, 0, before + start + ROWS)


def own_attention(cache: Cache, way: paged.Way, new: int) -> Attention:
    adapter = way.adapter()
    segment = cache.segment(phase_of(cache.lens[0] - new), [new])
    prepared = paged.begin_step(way, adapter, segment, cache.page_size)
    return lambda q_THD, layer: paged.attend(prepared, q_THD, cache.view(layer), cache.spec)


def cells(heads: Heads, shape: str, scheme: str, names: Sequence[str], with_peers: bool) -> Iterator[Cell]:
    """Every kernel that serves a scheme."""
    new, before = lengths(shape)
    ways = paged.ways(names, phase_of(before), heads, scheme, peers.PLACES[0][0])
    theirs = with_peers and scheme == "bf16"
    for size, packing in dict.fromkeys(
        [(peers.PLACES[0][0], way.packing) for way in ways] + (list(peers.PLACES) if theirs else [])
    ):
        cache = paged.make_cache(heads, (new + before,), scheme, packing, size)
        for way in ways if size == peers.PLACES[0][0] else ():
            if way.packing == packing:
                yield measure(way.name, shape, cache, own_attention(cache, way, new))
        if theirs and (size, packing) in peers.PLACES:
            yield from peer_cells(shape, cache, new)
        del cache
        gc.collect()
        torch.cuda.empty_cache()


def peer_cells(shape: str, cache: Cache, new: int) -> Iterator[Cell]:
    """FlashInfer's ways to prefill over a cache; what it cannot do is said, and left out."""
    for name, attention in peers.ready(peers.prefill(cache, new), cache.queries(new)[0], f"{shape}, bf16"):
        yield measure(name, shape, cache, attention)


def best(found: Sequence[Cell], shape: str, fmt: str, kernels: Collection[str]) -> Cell | None:
    same = [c for c in found if (c.shape, c.format) == (shape, fmt) and c.kernel in kernels]
    return min(same, key=lambda cell: cell.ms, default=None)


def aims(found: Sequence[Cell], shapes: Sequence[str]) -> list[Aim]:
    """K10: the cost of a 4-bit prefix, per backend (staged or not), and between the fastest of each."""
    backends: dict[str, set[str]] = {}
    for cell in found:
        if not cell.peer:
            backends.setdefault(cell.kernel.removesuffix(paged.STAGED), set()).add(cell.kernel)
    if len(backends) > 1:
        backends["the fastest of Nibble"] = set().union(*backends.values())
    lines = []
    for shape in set(shapes) & {AIMED}:
        for name, kernels in backends.items():
            ours, plain = (best(found, shape, fmt, kernels) for fmt in ("nvfp4", "bf16"))
            value = ratio(ours.ms, plain.ms) if ours and plain else None
            lines.append(Aim("K10", f"time of nvfp4 / bf16, {name}, {shape}", 1.25, 1.05, value, least=False))
    return lines


def table(found: Sequence[Cell]) -> str:
    """Kernels down, shapes across; the better page of each."""
    shapes = list(dict.fromkeys(cell.shape for cell in found))
    rows = []
    for fmt, kernel in dict.fromkeys((cell.format, cell.kernel) for cell in found):
        picked = [best(found, shape, fmt, {kernel}) for shape in shapes]
        rows.append((kernel, fmt, *(cell.text if cell else "" for cell in picked)))
    return markdown(("kernel", "cache", *shapes), rows)


def main() -> None:
    options = arguments().parse_args()
    missing = peers.flashinfer()
    with_peers = options.peers and not isinstance(missing, str)
    shapes = TINY if options.tiny else options.shapes.split(",")
    found: list[Cell] = []
    for shape in shapes:
        for fmt in options.formats.split(","):
            heads = TINY_HEADS if options.tiny else HEADS
            for cell in cells(heads, shape, fmt, options.backends.split(","), with_peers):
                found.append(cell)
                print(f"{shape} {fmt} {cell.kernel}, page {cell.page}: {cell.text}, error {cell.error:.1e} "
                      f"(torch {cell.plain:.1e})", flush=True)  # fmt: skip
    texts = [missing if isinstance(missing, str) else "", table(found), aims_table(aims(found, shapes))]
    gpu.publish("extend", options, str(__doc__), texts, peers.versions(), cells=[*map(asdict, found)])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="new tokens + cached tokens, as 8K+32K,2K+0"
    )
    gpu.add_backends_option(parser, "cuda,triton,sdpa")
    gpu.add_common_options(parser, FORMATS)
    return parser


if __name__ == "__main__":
    main()
