"""MLA decode with absorbed projections: Nibble's kernel against FlashInfer's fa3, over the same pages of latents.

    python benchmarks/mla_decode.py [--heads 16,64,128] [--shapes 64x8K] [--formats bf16,nvfp4_ds_mla]
        [--backends flashmla] [--no-peers] [--tiny] [--out FOLDER] [--report]

Latents of 512 values and 64 rotary ones, pages of 64 tokens in random order. Nibble's side is
kernels/mla/__init__.py, as a backend calls it, and the adapters of --backends; FlashInfer (optional) reads the bf16
pages in place, and its host planning is not timed. Each time is the median replay of a CUDA graph of several calls,
divided by their number; the calls go round several layers where one would fit into the L2 cache. Gate: outputs of the
last replay, poisoned before, against float64 over the dequantised latents, at most twice the error of torch in
bfloat16.

TB/s counts the bytes that must be read: tokens x bytes of a latent, once, however many heads there are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import latents as made_up
import paged
import peers
import torch
from report import Aim, aims_table, markdown, ratio
from torch import Tensor

import gpu
from nibble import formats
from nibble.attention.step import AttentionBackend, PreparedBatch
from nibble.kernels.append.naive import dequantize_pages
from nibble.kernels.mla import mla_attention, naive
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import LATENT, Phase, Stream

RANK, ROPE, PAGE = 512, 64, 64
STREAM = Stream(LATENT, 1, RANK + ROPE, ROPE)
SCALE = (RANK + ROPE) ** -0.5
FORMATS = ("bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla")
HEADS, SHAPES = "16,64,128", "64x8K"
TINY_HEADS, TINY_SHAPES = "16", "3x70"
GLOBAL_SCALE = 0.02
FA3, OWN = "FlashInfer fa3", "Nibble"
CHUNK = 1024
"""Pages that are made up at a time."""


@dataclass(frozen=True)
class Cell:
    """One measurement. bytes: what must be read; error, plain: paged.Error."""

    heads: int
    shape: str
    kernel: str
    format: str
    ms: float
    bytes: int
    error: float
    plain: float
    captured: bool

    @property
    def tbps(self) -> float:
        return self.bytes / self.ms / 1e9

    def text(self, copy: float) -> str:
        return f"{self.ms:.3f} ms, {self.tbps:.2f} TB/s, {self.tbps / copy:.0%}"


Attention = Callable[[Tensor, Paged], Tensor]


def pages_of(fmt_name: str, count: int) -> Paged:
    """Random latents in `count` pages."""
    fmt = formats.get(fmt_name).bound(STREAM)
    scale = torch.tensor(GLOBAL_SCALE if fmt.needs_scale else 1.0, device=gpu.device())
    planes: tuple[Tensor, ...] = ()
    for start in range(0, count, CHUNK):
        shape = (min(CHUNK, count - start), 1, PAGE, STREAM.dim)
        found = fmt.encode(torch.randn(shape, dtype=paged.dtype(), device=gpu.device()), scale)
        planes = planes or tuple(plane.new_empty(count, *plane.shape[1:]) for plane in found)
        for plane, part in zip(planes, found, strict=True):
            plane[start : start + len(part)] = part
    return Paged(fmt, STREAM.dim, planes, scale)


def segment_of(lens: Sequence[int]) -> AttentionBatch:
    page_table_BN = paged.scattered([-(-length // PAGE) for length in lens])
    return AttentionBatch.from_lens(Phase.DECODE, 0, [1] * len(lens), lens, page_table_BN)


def own(segment: AttentionBatch) -> Attention:
    return lambda q_THD, latents: mla_attention(q_THD, latents, ROPE, segment, SCALE)


def through(adapter: AttentionBackend, segment: AttentionBatch) -> Attention:
    spec, prepared = AttentionParams(SCALE), PreparedBatch(adapter, None, segment, PAGE, None)
    return lambda q_THD, latents: prepared.attend(q_THD, made_up.view(latents, STREAM, "nhd"), spec)


def flashinfer(segment: AttentionBatch, heads: int) -> Attention:
    """FlashInfer's planned wrapper over the same pages, its two halves views of them."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    device = segment.page_table_BN.device
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.zeros(peers.WORKSPACE, dtype=torch.uint8, device=device), backend="fa3"
    )
    counts = [-(-length // PAGE) for length in segment.seq_lens]
    indices = torch.cat([row[:count] for row, count in zip(segment.page_table_BN, counts, strict=True)])
    indptr = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    wrapper.plan(
        metadata=MLAPlanMetadata.csr(segment.cu_seqlens_q_B1, indptr, indices, segment.seq_lens_B),
        num_heads=heads, head_dim_ckv=RANK, head_dim_kpe=ROPE, page_size=PAGE, causal=True, sm_scale=SCALE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, query_layout="split", kv_cache_layout="split",
    )  # fmt: skip

    def run(q_THD: Tensor, latents: Paged) -> Tensor:
        data = latents.planes_PHS[0][:, 0]
        query, cache = (q_THD[..., :RANK], q_THD[..., RANK:]), (data[..., :RANK], data[..., RANK:])
        return wrapper.run(query=query, kv_cache=cache)

    return run


def measure(
    name: str, shape: str, segment: AttentionBatch, layers: Sequence[Paged], heads: int, attention: Attention
) -> Cell:
    """Times one kernel and checks what it wrote."""
    fmt = layers[0].format
    read = sum(segment.seq_lens) * fmt.bytes_per_token(STREAM)
    calls = max(gpu.calls_for(read), len(layers))
    shape_THD = (len(segment.seq_lens), heads, STREAM.dim)
    queries = [torch.randn(shape_THD, dtype=paged.dtype(), device=gpu.device()) for _ in layers]

    def step() -> list[Tensor]:
        return [attention(queries[i % len(layers)], layers[i % len(layers)]) for i in range(calls)]

    took = gpu.time_calls(step, calls)
    last = (calls - 1) % len(layers)
    rows = sorted({0, len(segment.seq_lens) - 1})
    errors = [error_of(queries[last], took.outputs[-1], layers[last], segment, row) for row in rows]
    for found in errors:
        found.gate(f"{name}, {fmt.name}, {heads} heads, {shape}")
    error = paged.biggest(errors)
    return Cell(heads, shape, name, fmt.name, took.ms, read, error.relative, error.plain, took.captured)


def error_of(
    q_THD: Tensor, out_THD: Tensor, latents: Paged, segment: AttentionBatch, request: int
) -> paged.Error:
    length, row = segment.seq_lens[request], slice(request, request + 1)
    pages = segment.page_table_BN[row, : -(-length // PAGE)]
    latents_LD = dequantize_pages(latents, pages, torch.float32)[0, :length, 0]
    exact = naive.dense(q_THD[row].double(), latents_LD.double(), ROPE, SCALE).values_THD
    same = naive.dense(q_THD[row], latents_LD.to(q_THD.dtype), ROPE, SCALE).values_THD

    def relative(x: Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm())

    return paged.Error(relative(out_THD[row]), relative(same))


def cells(
    fmt: str, shape: str, heads: Sequence[int], names: Sequence[str], with_peers: bool
) -> Iterator[Cell]:
    """Every kernel over one format's latents."""
    segment = segment_of(paged.requests(shape))
    count = int(segment.page_table_BN.max()) + 1
    read = sum(segment.seq_lens) * formats.get(fmt).bound(STREAM).bytes_per_token(STREAM)
    many = min(max(-(-gpu.L2_TIMES * gpu.l2_bytes() // read), 1), gpu.CALLS)
    layers = [pages_of(fmt, count) for _ in range(many)]
    for each in heads:
        yield measure(OWN, shape, segment, layers, each, own(segment))
        for name, adapter in made_up.adapters(names, "mla", layers[0], "nhd", each):
            yield measure(name, shape, segment, layers, each, through(adapter, segment))
        if with_peers and fmt == "bf16":
            yield measure(FA3, shape, segment, layers, each, flashinfer(segment, each))


def find(found: Sequence[Cell], heads: int, fmt: str, kernel: str = OWN) -> float | None:
    cases = (c.ms for c in found if (c.heads, c.format, c.kernel) == (heads, fmt, kernel))
    return next(cases, None)


def aims(found: Sequence[Cell]) -> list[Aim]:
    """What is asked of MLA decode."""
    base = find(found, 16, "bf16")
    return [
        *(Aim("M1", f"bf16 against {FA3}, {heads} heads", floor, 1.0,
              ratio(find(found, heads, "bf16", FA3), find(found, heads, "bf16")))
          for heads, floor in ((16, 0.9), (128, 0.6))),
        Aim("M2", "nvfp4_ds_mla against bf16, 16 heads", 1.6, 2.4, ratio(base, find(found, 16, "nvfp4_ds_mla"))),
    ]  # fmt: skip


def table(found: Sequence[Cell], copy: float) -> str:
    """Kernels down, heads across."""
    columns = list(dict.fromkeys((cell.shape, cell.heads) for cell in found))
    rows = []
    for kernel, fmt in dict.fromkeys((cell.kernel, cell.format) for cell in found):
        line = {(c.shape, c.heads): c for c in found if (c.kernel, c.format) == (kernel, fmt)}
        texts = (line[key].text(copy) if key in line else "" for key in columns)
        rows.append((f"**{kernel}**" if kernel == OWN else kernel, fmt, *texts))
    return markdown(("kernel", "latents", *(f"{shape}, {heads} heads" for shape, heads in columns)), rows)


def main() -> None:
    options = arguments().parse_args()
    missing, copy, found = peers.flashinfer(), gpu.copy_tbps(), list[Cell]()
    with_peers = options.peers and not isinstance(missing, str) and peers.hopper()
    heads = [int(each) for each in (TINY_HEADS if options.tiny else options.heads).split(",")]
    for shape in (TINY_SHAPES if options.tiny else options.shapes).split(","):
        for fmt in options.formats.split(","):
            for cell in cells(fmt, shape, heads, options.backends.split(","), with_peers):
                found.append(cell)
                print(f"{cell.kernel} {cell.format} {cell.heads} heads {shape}: {cell.text(copy)}, "
                      f"error {cell.error:.1e} (torch {cell.plain:.1e})", flush=True)  # fmt: skip
    notes = missing if isinstance(missing, str) else ""
    texts = [f"Copy bandwidth {copy:.2f} TB/s.", notes, table(found, copy), aims_table(aims(found))]
    figures = {"copy_tbps": copy, "cells": [*map(asdict, found)]}
    gpu.publish("mla_decode", options, str(__doc__), texts, peers.versions(), **figures)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--shapes", default=SHAPES, help="requests x stored tokens, as 64x8K,1x128K+31x4K")
    gpu.add_backends_option(parser, "")
    gpu.add_common_options(parser, FORMATS)
    return parser


if __name__ == "__main__":
    main()
