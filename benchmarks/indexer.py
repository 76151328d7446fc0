"""The lightning indexer of sparse attention: scores of all stored tokens, and the best of them, against memory's speed.

    python benchmarks/indexer.py [--shapes 64x32K,1x128K,8x32K,256x8K] [--prefill 2048x32K] [--formats index_fp8,bf16]
        [--top-k 2048] [--tiny] [--out FOLDER] [--report]

64 index heads of 128 values, pages of 64 tokens in random order, one query token a request; a prefill is one request
whose last tokens are queries. What is timed is kernels/indexer/__init__.py, as a layer calls it: all its launches.
Each time is the median replay of a CUDA graph of several calls, divided by their number; the calls go round several
layers where one would fit into the L2 cache. Gate: outputs of the last replay, poisoned before; rows are judged by
float64 scores over the dequantised keys: positions ascend, and no score that was left out is above one that was
chosen, but for rounding.

Of the byte limit: the time in which the keys alone could be read at copy bandwidth, over the time taken. A prefill
counts operations instead: 2 x heads x values for each key that a query sees.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import paged
import torch
from report import Aim, aims_table, markdown
from torch import Tensor

import gpu
from nibble import formats
from nibble.kernels import indexer as op
from nibble.kernels.append.naive import dequantize_pages
from nibble.kernels.types import AttentionBatch, Paged
from nibble.model_spec import INDEX, Phase, Stream

HEADS, PAGE = 64, 64
STREAM = Stream(INDEX, 1, 128)
FORMATS = ("index_fp8", "bf16")
SHAPES, PREFILL, TOP_K = "64x32K,1x128K,8x32K,256x8K", "2048x32K", 2048
TINY_SHAPES, TINY_PREFILL, TINY_TOP_K = "3x70", "9x80", 16
TOLERANCE = 2e-6
"""Of what could cancel in a score, that rounding may cost."""
CHUNK = 1024
"""Pages that are made up at a time."""


@dataclass(frozen=True)
class Cell:
    """One measurement. bytes: what must be read; flops: what must be computed; gap: how far the worst choice is from
    right, in shares of what could cancel.
    """

    shape: str
    queries: int
    format: str
    ms: float
    bytes: int
    flops: int
    gap: float
    captured: bool

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.queries} queries" if self.queries > 1 else self.shape

    def share(self, copy: float) -> float:
        return self.bytes / self.ms / 1e9 / copy

    def text(self, copy: float) -> str:
        if self.queries > 1:
            return f"{self.ms:.3f} ms, {self.flops / self.ms / 1e9:.0f} TFLOP/s"
        return f"{self.ms:.3f} ms, {self.bytes / self.ms / 1e9:.2f} TB/s, {self.share(copy):.0%}"


def pages_of(fmt_name: str, count: int) -> Paged:
    """Random keys in `count` pages."""
    fmt = formats.get(fmt_name).bound(STREAM)
    scale = torch.tensor(1.0, device=gpu.device())
    planes: tuple[Tensor, ...] = ()
    for start in range(0, count, CHUNK):
        shape = (min(CHUNK, count - start), 1, PAGE, STREAM.dim)
        found = fmt.encode(torch.randn(shape, dtype=paged.dtype(), device=gpu.device()), scale)
        planes = planes or tuple(plane.new_empty(count, *plane.shape[1:]) for plane in found)
        for plane, part in zip(planes, found, strict=True):
            plane[start : start + len(part)] = part
    return Paged(fmt, STREAM.dim, planes, scale)


def measure(shape: str, segment: AttentionBatch, layers: Sequence[Paged], top_k: int) -> Cell:
    """Times one layer's choice and checks it."""
    fmt, rows = layers[0].format, segment.stop
    read = sum(segment.seq_lens) * fmt.bytes_per_token(STREAM)
    seen = sum(
        n * (length - n) + n * (n + 1) // 2
        for n, length in zip(segment.query_lens, segment.seq_lens, strict=True)
    )
    flops = 2 * HEADS * STREAM.dim * seen
    calls = max(gpu.calls_for(max(read, flops // 200)), len(layers))
    queries = [torch.randn(rows, HEADS, STREAM.dim, dtype=paged.dtype(), device=gpu.device()) for _ in layers]
    weights = [torch.randn(rows, HEADS, device=gpu.device()) for _ in layers]
    longest = max(segment.seq_lens)

    def step() -> list[Tensor]:
        turns = (i % len(layers) for i in range(calls))
        found = [op.select_topk(layers[i], segment, queries[i], weights[i], top_k, longest) for i in turns]
        return [topk_indices_TK.view(torch.float32) for topk_indices_TK in found]  # which can be poisoned

    took = gpu.time_calls(step, calls)
    last, topk_indices_TK = (calls - 1) % len(layers), took.outputs[-1].view(torch.int32)
    ends = segment.cu_seqlens_q_B1[1:].tolist()
    gaps = [
        gap_of(
            layers[last],
            segment,
            request,
            queries[last][row],
            weights[last][row],
            row - end,
            topk_indices_TK[row],
        )
        for request, end in {0: ends[0], len(ends) - 1: ends[-1]}.items()
        for row in {end - segment.query_lens[request], end - 1}
    ]
    if max(gaps) > TOLERANCE:
        raise SystemExit(f"{fmt.name}, {shape}: a choice is {max(gaps):.1e} from right")
    return Cell(shape, max(segment.query_lens), fmt.name, took.ms, read, flops, max(gaps), took.captured)


def gap_of(
    keys: Paged,
    segment: AttentionBatch,
    request: int,
    q_HD: Tensor,
    weights_H: Tensor,
    back: int,
    topk_indices_K: Tensor,
) -> float:
    """By how much a score that was left out is above one that was chosen, of a row `back` before the request's end;
    infinite if what was chosen is none of the row's tokens, in order.
    """
    seen = segment.seq_lens[request] + back + 1
    pages = segment.page_table_BN[request : request + 1, : -(-seen // PAGE)]
    keys_LD = dequantize_pages(keys, pages, torch.float32)[0, :seen, 0].double()
    terms_LH = (keys_LD @ q_HD.double().T).relu() * weights_H.double()
    count = min(seen, len(topk_indices_K))
    chosen, rest = topk_indices_K[:count].long(), topk_indices_K[count:]
    if bool((rest != op.PAD_INDEX).any()) or int(chosen[0]) < 0 or int(chosen[-1]) >= seen:
        return float("inf")
    if bool((chosen.diff() <= 0).any()):
        return float("inf")
    scores_L, out_L = terms_LH.sum(1), torch.ones(seen, dtype=torch.bool, device=keys_LD.device)
    out_L[chosen] = False
    if not bool(out_L.any()):
        return 0.0
    return max(0.0, float((scores_L[out_L].max() - scores_L[chosen].min()) / terms_LH.abs().sum(1).max()))


def cells(fmt: str, shape: str, top_k: int) -> Iterator[Cell]:
    """One shape: `64x32K` of one query each."""
    lens = paged.requests(shape)
    yield from over(fmt, shape, Phase.DECODE, [1] * len(lens), lens, top_k)


def prefill(fmt: str, shape: str, top_k: int) -> Iterator[Cell]:
    """`2048x32K`: so many queries over so many stored tokens, themselves included."""
    queries, length = map(paged.tokens, shape.split("x"))
    yield from over(fmt, f"1x{shape.split('x')[1]}", Phase.EXTEND, [queries], [length], top_k)


def over(
    fmt: str, shape: str, phase: Phase, query_lens: Sequence[int], seq_lens: Sequence[int], top_k: int
) -> Iterator[Cell]:
    segment = AttentionBatch.from_lens(
        phase, 0, query_lens, seq_lens, paged.scattered([-(-length // PAGE) for length in seq_lens])
    )
    read = sum(seq_lens) * formats.get(fmt).bound(STREAM).bytes_per_token(STREAM)
    many = min(max(-(-gpu.L2_TIMES * gpu.l2_bytes() // read), 1), gpu.CALLS) if max(query_lens) == 1 else 1
    layers = [pages_of(fmt, int(segment.page_table_BN.max()) + 1) for _ in range(many)]
    yield measure(shape, segment, layers, top_k)


def aims(found: Sequence[Cell], copy: float) -> list[Aim]:
    """What is asked of the indexer: at most twice the time of reading."""
    key = ("64x32K", 1, "index_fp8")
    over_limit = next((1 / c.share(copy) for c in found if (c.shape, c.queries, c.format) == key), None)
    return [Aim("I1", "index_fp8, 64x32K, time over the byte limit", 2.0, 1.5, over_limit, least=False)]


def table(found: Sequence[Cell], copy: float) -> str:
    """Shapes down, formats across."""
    columns = list(dict.fromkeys(cell.format for cell in found))
    rows = []
    for name in dict.fromkeys(cell.name for cell in found):
        line = {cell.format: cell.text(copy) for cell in found if cell.name == name}
        rows.append((name, *(line.get(column, "") for column in columns)))
    return markdown(("stored", *columns), rows)


def main() -> None:
    options = arguments().parse_args()
    copy, found = gpu.copy_tbps(), list[Cell]()
    shapes, prefills = (TINY_SHAPES, TINY_PREFILL) if options.tiny else (options.shapes, options.prefill)
    top_k = TINY_TOP_K if options.tiny else options.top_k
    for fmt in options.formats.split(","):
        runs = [cells(fmt, shape, top_k) for shape in filter(None, shapes.split(","))]
        runs += [prefill(fmt, shape, top_k) for shape in filter(None, prefills.split(","))]
        for run in runs:
            for cell in run:
                found.append(cell)
                print(f"{cell.format} {cell.name}: {cell.text(copy)}, gap {cell.gap:.1e}", flush=True)
    texts = [
        f"Copy bandwidth {copy:.2f} TB/s. Top {top_k}.",
        table(found, copy),
        aims_table(aims(found, copy)),
    ]
    figures = {"copy_tbps": copy, "cells": [*map(asdict, found)]}
    gpu.publish("indexer", options, str(__doc__), texts, gpu.versions(), **figures)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help="requests x stored tokens, as 64x8K,1x128K+31x4K")
    parser.add_argument("--prefill", default=PREFILL, help="queries x stored tokens of one request")
    parser.add_argument("--top-k", type=int, default=TOP_K)
    parser.add_argument(
        "--tiny", action="store_true", help="a few tokens, to try the benchmark itself on a CPU"
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    gpu.add_output_options(parser)
    return parser


if __name__ == "__main__":
    main()
