"""Decode attention: Nibble's backends against FlashInfer, over the same paged caches of random tokens.

    python benchmarks/decode_attention.py [--quick] [--shapes 64x8K,1x128K+31x4K] [--heads 64/4,32/8/64]
        [--formats nvfp4,bf16] [--backends cuda,triton] [--no-peers] [--queries 4] [--tiny] [--out FOLDER] [--report]

Nibble's side is what an engine calls: PagedPool.write, then `attend` of a backend's adapter over the pool's view, page
64. FlashInfer (optional) reads the same bytes, in pages of 64 and of 16, and the better of the two counts; its host
planning is not timed. Each time is the median replay of a CUDA graph of 32 calls, as of a model's layers, divided by
32 (of 8 calls where each takes a millisecond or more); the calls go round several layers, so that the L2 cache is no
help. Gate: outputs of the last replay, poisoned before, against float64 over the dequantised cache, at most twice the
error of torch in bfloat16.

--queries: new tokens of each request, as in a step that verifies drafts; without peers, where there are several.

TB/s counts the bytes that must be read: tokens x bytes of K and V. The share is of what a large copy on the device
reaches in the same process, bytes read and written counted; reading alone can be faster than that.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import paged
import peers
import torch
from paged import Attention, Cache, Heads
from report import Aim, aims_table, markdown, ratio, write_figures
from torch import Tensor

import gpu
from gpu import CALLS, time_calls
from nibble.model_spec import Phase

SHAPES = ("64x8K", "64x32K", "16x8K", "1x128K", "1x32K", "128x1K", "1x128K+31x4K")
QUICK = ("64x8K", "1x32K")
TINY = ("3x40", "1x70+2x9")
TINY_HEADS = Heads(4, 2, 32)
FORMATS = ("nvfp4", "mxfp4", "fp4_mx16", "fp8_e4m3", "k8v4", "bf16")
HEADS = Heads()
OTHER_HEADS = (Heads(64, 4), Heads(8, 1), Heads(32, 8, 64))
PEER_GATE = 0.1
"""A peer need only compute the same function: XQA rounds queries and weights to FP8, say."""


@dataclass(frozen=True)
class Cell:
    """One measurement. kernel: who; bytes: what must be read; error, plain: paged.Error."""

    heads: str
    shape: str
    kernel: str
    format: str
    page: int
    packing: str
    ms: float
    bytes: int
    error: float
    plain: float
    captured: bool

    @property
    def tbps(self) -> float:
        return self.bytes / self.ms / 1e9

    @property
    def peer(self) -> bool:
        return self.kernel.startswith("FlashInfer")

    def text(self, copy: float) -> str:
        notes = ([] if self.page == peers.PLACES[0][0] else [f"page {self.page}"]) + ["eager"] * (
            not self.captured
        )
        return ", ".join((f"{self.ms:.3f} ms", f"{self.tbps:.2f} TB/s", f"{self.tbps / copy:.0%}", *notes))

    def line(self, copy: float) -> str:
        what = f"{self.heads} {self.shape} {self.format} {self.kernel}"
        return f"{what}: {self.text(copy)}, error {self.error:.1e} (torch {self.plain:.1e})"


def measure(
    name: str,
    shape: str,
    cached: Cache,
    begin: Callable[[], Attention],
    gate: float | None = None,
    count: int = 1,
) -> Cell:
    """Times one kernel and checks what it wrote.

    begin: starts a step. gate: a looser bound on the error. count: queries of each request.
    """
    queries = cached.queries(count * len(cached.lens))

    def step() -> list[Tensor]:
        attention = begin()
        return [attention(queries[i % cached.layers], i % cached.layers) for i in range(calls(cached))]

    took = time_calls(step, calls(cached))
    errors = list(errors_of(cached, queries, took.outputs, count))
    for found in errors:
        found.gate(f"{name}, {cached.scheme}, {shape}", *(() if gate is None else (gate / found.plain,)))
    error = paged.biggest(errors)
    return Cell(
        str(cached.heads), shape, name, cached.scheme, cached.page_size, cached.packing, took.ms,
        cached.read_bytes, error.relative, error.plain, took.captured,
    )  # fmt: skip


def calls(cached: Cache) -> int:
    """Calls of a step: as many as a model has layers, and every layer of the cache."""
    return max(gpu.calls_for(cached.read_bytes), cached.layers)


def errors_of(
    cached: Cache, queries: Sequence[Tensor], outputs: Sequence[Tensor], count: int
) -> Iterator[paged.Error]:
    """The errors of the first and the last layer's last calls, for the first and the last request."""
    last = len(outputs) - 1
    for layer in sorted({0, cached.layers - 1}):
        call = last - (last - layer) % cached.layers
        for request in sorted({0, len(cached.lens) - 1}):
            row = slice(count * request, count * (request + 1))
            stop = cached.lens[request]
            yield paged.error(queries[layer][row], outputs[call][row], cached, layer, request, stop)


def own_steps(cached: Cache, way: paged.Way, count: int = 1) -> Callable[[], Attention]:
    """Begins steps of one of Nibble's backends, as the engine does: what a backend works out per step is timed too."""
    adapter = way.adapter()
    segment = cached.segment(phase_of(count), [count] * len(cached.lens))

    def begin() -> Attention:
        prepared = paged.begin_step(way, adapter, segment, cached.page_size)
        return lambda q_THD, layer: paged.attend(prepared, q_THD, cached.view(layer), cached.spec)

    return begin


def phase_of(count: int) -> Phase:
    """The phase of a step in which each request has so many new tokens."""
    return Phase.DECODE if count == 1 else Phase.VERIFY


def always(attention: Attention) -> Callable[[], Attention]:
    """Steps that all are the same."""
    return lambda: attention


def theirs(shape: str, cached: Cache) -> Iterator[Cell]:
    """All of FlashInfer's ways over a cache."""
    where = f"{cached.scheme}, {shape}, page {cached.page_size}"
    q_THD = cached.queries(len(cached.lens))[0]
    for name, attention in peers.ready(peers.decode(cached), q_THD, where):
        yield measure(name, shape, cached, always(attention), PEER_GATE)


def cells(
    heads: Heads, shape: str, scheme: str, names: Sequence[str], with_peers: bool, count: int
) -> Iterator[Cell]:
    """Every kernel that serves a scheme, over as few caches as that takes."""
    lens, page = paged.requests(shape), peers.PLACES[0][0]
    found = paged.ways(names, phase_of(count), heads, scheme, page)
    places: dict[tuple[int, str], list[paged.Way]] = {}
    for way in found:
        places.setdefault((page, way.packing), []).append(way)
    if with_peers and scheme in peers.STORED:
        places |= {place: places.get(place, []) for place in peers.PLACES}
    for (size, packing), ways in places.items():
        cached = paged.make_cache(heads, lens, scheme, packing, size)
        for way in ways:
            yield measure(way.name, shape, cached, own_steps(cached, way, count), count=count)
        if with_peers and (size, packing) in peers.PLACES:
            yield from theirs(shape, cached)
        del cached
        gc.collect()
        torch.cuda.empty_cache()


def best(found: Sequence[Cell], shape: str, which: Callable[[Cell], bool]) -> Cell | None:
    """The fastest of the cells of `shape` that `which` takes, among Nibble's heads."""
    rivals = [cell for cell in found if cell.shape == shape and cell.heads == str(HEADS) and which(cell)]
    return min(rivals, key=lambda cell: cell.ms, default=None)


def ms(cell: Cell | None) -> float | None:
    return cell.ms if cell else None


def speedup(found: Sequence[Cell], shape: str, fmt: str, rival: Callable[[Cell], bool]) -> float | None:
    """How much faster Nibble is in `fmt` than the fastest rival."""
    own = best(found, shape, lambda cell: cell.format == fmt and not cell.peer)
    return ratio(ms(best(found, shape, rival)), ms(own))


def peer_of(fmt: str, *names: str) -> Callable[[Cell], bool]:
    """Takes cells of FlashInfer in a format; of the kernels named, or of any."""
    return lambda cell: cell.peer and cell.format == fmt and (not names or cell.kernel in names)


def aims(found: Sequence[Cell], copy: float) -> list[Aim]:
    """What is asked of decode attention, from the cells at hand."""
    nvfp4 = {s: best(found, s, lambda c: c.format == "nvfp4" and not c.peer) for s in SHAPES}
    long, mixed, base = nvfp4["64x32K"], nvfp4["1x128K+31x4K"], nvfp4["64x8K"]
    ideal = mixed.bytes / base.tbps / 1e9 if mixed and base else None
    lines = [
        Aim("K1", f"nvfp4 against the best bf16 peer, {shape}", 2.7, 3.3,
            speedup(found, shape, "nvfp4", peer_of("bf16"))) for shape in ("64x8K", "64x32K")
    ]  # fmt: skip
    lines += [
        Aim("K2", "nvfp4 against the best fp8 peer, 64x32K", 1.75, 2.1,
            speedup(found, "64x32K", "nvfp4", peer_of("fp8_e4m3"))),
        Aim("K3", "nvfp4 bandwidth / copy bandwidth, 64x32K", 0.82, 0.95, long.tbps / copy if long else None),
        *(Aim("K4", f"nvfp4 against FlashInfer's nvfp4, {shape}", 3.8, 4.6,
              speedup(found, shape, "nvfp4", peer_of("nvfp4"))) for shape in ("64x8K", "64x32K")),
        Aim("K5", "1x128K+31x4K: time / (bytes / bandwidth at 64x8K)", 1.25, 1.08, ratio(ms(mixed), ideal), False),
    ]  # fmt: skip
    lines += [
        Aim("K6", f"nvfp4 against the best bf16 peer, {shape}", floor, aim,
            speedup(found, shape, "nvfp4", peer_of("bf16")))
        for shape, floor, aim in (("1x128K", 2.2, 3.0), ("16x8K", 2.2, 2.8), ("128x1K", 1.8, 2.5))
    ]  # fmt: skip
    lines += [
        Aim("K7", f"fp8 against FlashInfer XQA fp8, {shape}", 1.0, 1.3,
            speedup(found, shape, "fp8_e4m3", peer_of("fp8_e4m3", peers.XQA))) for shape in ("64x8K", "64x32K")
    ]  # fmt: skip
    return lines


def table(found: Sequence[Cell], copy: float) -> str:
    """Kernels down, shapes across; the better page of each."""
    shapes = dict.fromkeys(cell.shape for cell in found)
    formats = list(dict.fromkeys(cell.format for cell in found))
    lines = {(formats.index(cell.format), cell.peer, cell.kernel): cell for cell in found}
    rows = []
    for _, line in sorted(lines.items()):
        same = [cell for cell in found if (cell.kernel, cell.format) == (line.kernel, line.format)]
        fastest = [min((c for c in same if c.shape == s), key=lambda c: c.ms, default=None) for s in shapes]
        name = line.kernel if line.peer else f"**{line.kernel}**"
        rows.append((name, line.format, *(cell.text(copy) if cell else "" for cell in fastest)))
    return markdown(("kernel", "cache", *shapes), rows)


def clocked(heads: Heads, shape: str, names: Sequence[str]) -> str:
    """The SM clock while the first of Nibble's backends decodes nvfp4, in words."""
    page = peers.PLACES[0][0]
    found = paged.ways(names, Phase.DECODE, heads, "nvfp4", page)
    if not found:
        return "SM clock not seen"
    cached = paged.make_cache(heads, paged.requests(shape), "nvfp4", found[0].packing, page)
    attention, queries = own_steps(cached, found[0])(), cached.queries(len(cached.lens))
    mhz = gpu.sm_clock(lambda: [attention(queries[0], 0) for _ in range(CALLS)])
    return f"SM clock {mhz or 'unknown'} MHz under {found[0].name} nvfp4 at {shape}"


def main() -> None:
    options = arguments().parse_args()
    names, missing = options.backends.split(","), peers.flashinfer()
    with_peers = options.peers and not isinstance(missing, str) and options.queries == 1
    copy, found, asked, began = gpu.copy_tbps(), list[Cell](), jobs(options), time.perf_counter()
    for heads, shape in asked:
        for fmt in options.formats.split(","):
            for cell in cells(heads, shape, fmt, names, with_peers, options.queries):
                found.append(cell)
                print(f"{time.perf_counter() - began:5.1f} s  {cell.line(copy)}", flush=True)
        if options.out:  # what is known so far, should time run out
            write_figures("decode_attention", options.out, copy_tbps=copy, cells=[*map(asdict, found)])
    clock = clocked(*asked[0], names)
    texts = [f"Copy bandwidth {copy:.2f} TB/s; {clock}.", missing if isinstance(missing, str) else ""]
    for each in dict.fromkeys(heads for heads, _ in asked):
        texts += [f"Heads {each}:", table([cell for cell in found if cell.heads == str(each)], copy)]
    texts += [aims_table(aims(found, copy))]
    figures = {"copy_tbps": copy, "clock": clock, "cells": [*map(asdict, found)]}
    gpu.publish("decode_attention", options, str(__doc__), texts, peers.versions(), **figures)


def jobs(options: argparse.Namespace) -> list[tuple[Heads, str]]:
    """What to measure: shapes of the usual heads, and one shape of others."""
    if options.tiny:
        return [(TINY_HEADS, shape) for shape in TINY]
    shapes = options.shapes.split(",") if options.shapes else QUICK if options.quick else SHAPES
    if options.heads:
        return [(paged.heads(text), shape) for text in options.heads.split(",") for shape in shapes]
    found = [(HEADS, shape) for shape in shapes]
    return found if options.quick or options.shapes else found + [(other, SHAPES[0]) for other in OTHER_HEADS]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--shapes", help="requests x stored tokens, as 64x8K,1x128K+31x4K")
    parser.add_argument("--heads", help="query heads / KV heads / head_dim (128), as 64/4,32/8/64")
    parser.add_argument("--queries", type=int, default=1, help="new tokens of each request")
    gpu.add_backends_option(parser, "cuda,triton")
    gpu.add_common_options(parser, FORMATS)
    return parser


if __name__ == "__main__":
    main()
