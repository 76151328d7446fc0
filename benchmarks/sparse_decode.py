"""Sparse MLA decode over chosen tokens, with absorbed projections: Nibble's kernel over the pages of a pool.

    python benchmarks/sparse_decode.py [--heads 16,64,128] [--batches 8,64,128] [--formats bf16,fp8_ds_mla]
        [--top-k 2048] [--packings nhd,record] [--pool 4096K] [--backends flashmla] [--tiny] [--out FOLDER] [--report]

Latents of 512 values and 64 rotary ones, pages of 64 tokens. One query token a request, each with top-k slots of its
own, random ones of the whole pool. Nibble's side is kernels/mla/__init__.py, as a backend calls it, and the
adapters of --backends. Each time is the median replay of a CUDA graph of several calls, divided by their number; the
calls go round several lists, which do not all fit into the L2 cache. Gate: outputs of the last replay, poisoned
before, against float64 over the dequantised latents, at most twice the error of torch in bfloat16.

TFLOP/s counts 2 x heads x (576 + 512) operations a chosen token; TB/s its bytes, once, however many heads there are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import latents
import paged
import torch
from report import Aim, aims_table, markdown
from torch import Tensor

import gpu
from nibble import formats
from nibble.attention.step import AttentionBackend, PreparedBatch
from nibble.formats.base import raw
from nibble.kernels.append.naive import dequantize_tokens
from nibble.kernels.mla import naive, sparse_mla_attention
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import LATENT, Phase, Stream

RANK, ROPE, PAGE = 512, 64, 64
STREAM = Stream(LATENT, 1, RANK + ROPE, ROPE)
SCALE = (RANK + ROPE) ** -0.5
FORMATS = ("bf16", "fp8_ds_mla", "nvfp4_ds_mla")
HEADS, BATCHES, TOP_K, PACKINGS, POOL = "16,64,128", "8,64,128", "2048", "nhd,record", "4096K"
TINY_HEADS, TINY_BATCHES, TINY_TOP_K, TINY_POOL = "16", "2", "40", "1K"
GLOBAL_SCALE = 0.02
CHUNK = 1024
"""Pages that are made up at a time."""
OWN = "Nibble"
MOST_BYTES = 48 << 30
"""Of a pool; a format in which it is larger gets fewer pages."""


@dataclass(frozen=True)
class Cell:
    """One measurement. kernel: OWN, or a backend's name. bytes: what must be read, but for what several requests chose;
    error, plain: paged.Error."""

    kernel: str
    format: str
    packing: str
    batch: int
    heads: int
    top_k: int
    ms: float
    bytes: int
    error: float
    plain: float
    captured: bool

    @property
    def tflops(self) -> float:
        return 2 * self.batch * self.heads * self.top_k * (2 * RANK + ROPE) / self.ms / 1e9

    @property
    def tbps(self) -> float:
        return self.bytes / self.ms / 1e9

    def text(self, copy: float) -> str:
        return f"{self.ms:.3f} ms, {self.tflops:.0f} TFLOP/s, {self.tbps:.2f} TB/s, {self.tbps / copy:.0%}"


def pool_of(fmt_name: str, packing: str, count: int) -> Paged:
    """Random latents in `count` pages, or as many as there may be."""
    fmt = formats.get(fmt_name).bound(STREAM)
    scale = torch.tensor(GLOBAL_SCALE if fmt.needs_scale else 1.0, device=gpu.device())
    count = min(count, MOST_BYTES // (PAGE * fmt.bytes_per_token(STREAM)))
    planes: tuple[Tensor, ...] = ()
    for start in range(0, count, CHUNK):
        shape = (min(CHUNK, count - start), 1, PAGE, STREAM.dim)
        found = fmt.encode(torch.randn(shape, dtype=paged.dtype(), device=gpu.device()), scale)
        planes = planes or empty(found, packing, count)
        for plane, part in zip(planes, found, strict=True):
            raw(plane)[start : start + len(part)] = raw(part)
    return Paged(fmt, STREAM.dim, planes, scale)


def empty(like: Sequence[Tensor], packing: str, count: int) -> tuple[Tensor, ...]:
    """Planes for `count` pages; in `record` columns of one array of bytes."""
    if packing != "record":
        return tuple(plane.new_empty(count, *plane.shape[1:]) for plane in like)
    sizes = [plane.shape[3] * plane.itemsize for plane in like]
    whole = torch.empty(count, 1, PAGE, sum(sizes), dtype=torch.uint8, device=gpu.device())
    columns = whole.split(sizes, -1)
    return tuple(column.view(plane.dtype) for column, plane in zip(columns, like, strict=True))


def chosen(pool: Paged, batch: int, top_k: int) -> Tensor:
    """Slots of each request: random, ascending as an indexer's; a few may be there twice."""
    slots = len(pool.planes_PHS[0]) * PAGE
    found = torch.randint(0, slots, (batch, top_k), dtype=torch.int32, device=gpu.device())
    return found.sort(1).values


Attention = Callable[[Tensor, Tensor], Tensor]


def own(pool: Paged) -> Attention:
    return lambda q_THD, topk_slots_TK: sparse_mla_attention(q_THD, pool, ROPE, topk_slots_TK, SCALE)


def through(adapter: AttentionBackend, pool: Paged, packing: str, batch: int) -> Attention:
    """An adapter over the pool. Slots say where tokens lie, so that requests have no pages here."""
    view = latents.view(pool, STREAM, packing)
    page_table_BN = torch.zeros(batch, 1, dtype=torch.int32, device=gpu.device())
    segment = AttentionBatch.from_lens(Phase.DECODE, 0, [1] * batch, [1] * batch, page_table_BN)
    prepared = PreparedBatch(adapter, None, segment, PAGE, None)
    return lambda q_THD, topk_slots_TK: prepared.attend(
        q_THD, view, AttentionParams(SCALE, topk_slots_TK=topk_slots_TK)
    )


def measure(
    name: str, attention: Attention, pool: Paged, packing: str, batch: int, heads: int, top_k: int
) -> Cell:
    """Times a kernel and checks what it wrote."""
    read = batch * top_k * pool.format.bytes_per_token(STREAM)
    many = min(max(-(-gpu.L2_TIMES * gpu.l2_bytes() // read), 2), gpu.CALLS)
    calls = max(gpu.calls_for(read), many)
    lists = [chosen(pool, batch, top_k) for _ in range(many)]
    shape_THD = (batch, heads, STREAM.dim)
    queries = [torch.randn(shape_THD, dtype=paged.dtype(), device=gpu.device()) for _ in lists]

    def step() -> list[Tensor]:
        return [attention(queries[i % many], lists[i % many]) for i in range(calls)]

    took = gpu.time_calls(step, calls)
    last = (calls - 1) % many
    rows = sorted({0, batch - 1})
    errors = [error_of(queries[last], took.outputs[-1], pool, lists[last], row) for row in rows]
    for found in errors:
        found.gate(f"{name}, {pool.format.name}, {packing}, {batch} x {heads} heads")
    error = paged.biggest(errors)
    return Cell(
        name,
        pool.format.name,
        packing,
        batch,
        heads,
        top_k,
        took.ms,
        read,
        error.relative,
        error.plain,
        took.captured,
    )


def error_of(q_THD: Tensor, out_THD: Tensor, pool: Paged, topk_slots_TK: Tensor, row: int) -> paged.Error:
    one = slice(row, row + 1)
    latents_nKD, hidden_nK = (
        dequantize_tokens(pool, topk_slots_TK[one].long()).squeeze(-2),
        topk_slots_TK[one] < 0,
    )
    exact = naive.dense_topk(q_THD[one].double(), latents_nKD.double(), hidden_nK, RANK, SCALE).values_THD
    same = naive.dense_topk(q_THD[one], latents_nKD.to(q_THD.dtype), hidden_nK, RANK, SCALE).values_THD

    def relative(x: Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm())

    return paged.Error(relative(out_THD[one]), relative(same))


def cells(fmt: str, packing: str, options: argparse.Namespace) -> Iterator[Cell]:
    """Every shape over one pool."""
    pool = pool_of(fmt, packing, paged.tokens(options.pool) // PAGE)
    for batch in map(int, options.batches.split(",")):
        for heads in map(int, options.heads.split(",")):
            yield measure(OWN, own(pool), pool, packing, batch, heads, options.top_k)
            for name, adapter in latents.adapters(options.backends.split(","), "dsa", pool, packing, heads):
                attention = through(adapter, pool, packing, batch)
                yield measure(name, attention, pool, packing, batch, heads, options.top_k)


def find(found: Sequence[Cell], fmt: str, batch: int, heads: int) -> float | None:
    """The slowest packing's TFLOP/s."""
    same = [c for c in found if (c.kernel, c.format, c.batch, c.heads) == (OWN, fmt, batch, heads)]
    cases = [c.tflops for c in same if c.captured]
    return min(cases, default=None)


def aims(found: Sequence[Cell]) -> list[Aim]:
    """What is asked of sparse MLA decode: of what FlashMLA is said to reach, half and all."""
    return [
        Aim("S1", f"{fmt}, 128 x 128 heads, TFLOP/s", 201, 402, find(found, fmt, 128, 128))
        for fmt in ("fp8_ds_mla", "nvfp4_ds_mla")
    ]


def table(found: Sequence[Cell], copy: float) -> str:
    """Formats down, shapes across."""
    columns = list(dict.fromkeys((cell.batch, cell.heads) for cell in found))
    rows = []
    for kernel, fmt, packing in dict.fromkeys((cell.kernel, cell.format, cell.packing) for cell in found):
        same = [c for c in found if (c.kernel, c.format, c.packing) == (kernel, fmt, packing)]
        line = {(c.batch, c.heads): c for c in same}
        rows.append((kernel, fmt, packing, *(line[key].text(copy) if key in line else "" for key in columns)))
    return markdown(
        ("kernel", "latents", "packing", *(f"{batch} x {heads} heads" for batch, heads in columns)), rows
    )


def main() -> None:
    options = arguments().parse_args()
    if options.tiny:
        options.heads, options.batches, options.pool = TINY_HEADS, TINY_BATCHES, TINY_POOL
        options.top_k = int(TINY_TOP_K)
    copy, found = gpu.copy_tbps(), list[Cell]()
    for fmt in options.formats.split(","):
        for packing in options.packings.split(","):
            for cell in cells(fmt, packing, options):
                found.append(cell)
                print(f"{cell.kernel} {fmt} {packing} {cell.batch} x {cell.heads} heads: {cell.text(copy)}, "
                      f"error {cell.error:.1e} (torch {cell.plain:.1e})", flush=True)  # fmt: skip
    texts = [f"Copy bandwidth {copy:.2f} TB/s.", table(found, copy), aims_table(aims(found))]
    figures = {"copy_tbps": copy, "cells": [*map(asdict, found)]}
    gpu.publish("sparse_decode", options, str(__doc__), texts, gpu.versions(), **figures)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--batches", default=BATCHES, help="requests, one query token each")
    parser.add_argument("--top-k", type=int, default=int(TOP_K), help="slots of a list")
    parser.add_argument("--packings", default=PACKINGS)
    parser.add_argument("--pool", default=POOL, help="tokens of the pool, as 4096K")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument(
        "--tiny", action="store_true", help="a few tokens, to try the benchmark itself on a CPU"
    )
    gpu.add_backends_option(parser, "")
    gpu.add_output_options(parser)
    return parser


if __name__ == "__main__":
    main()
