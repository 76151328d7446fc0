"""Append: quantising new K and V into pages, against storing them in bf16, of Nibble and of FlashInfer.

    python benchmarks/append.py [--formats nvfp4,bf16] [--no-peers] [--tiny] [--out FOLDER] [--report]

64 tokens are a decode step of 64 requests, one token each; 8192 are a chunk of one prompt. Nibble's side is
PagedPool.write, page 64, transforms and scales included; FlashInfer's is append_paged_kv_cache for bf16, and for nvfp4
its own quantising append, into the same pools (pages of 64 and of 16, the better one counts). K and V have 8 heads of
128 values. Each time is the median replay of a CUDA graph of 32 calls, one for each layer of a cache, divided by 32:
every layer has tokens and pages of its own. Gate: what is read back from the pool is what the format's definition says.

`nvfp4` sweeps block scales; `nvfp4_amax` does not, and nor does FlashInfer's append, which is compared with it.

TB/s counts bytes of K and V read in bf16 and bytes stored.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import paged
import peers
import torch
from paged import Cache, Heads
from report import Aim, aims_table, markdown, ratio
from torch import Tensor

import gpu

FORMATS = (
    "bf16", "nvfp4_amax", "nvfp4", "nvfp4_4over6", "mxfp4_amax", "mxfp4", "fp4_mx16_amax", "fp4_mx16", "fp8_e4m3",
    "k8v4", "nvfp4_amax+rot", "nvfp4+rot",
)  # fmt: skip
"""A name alone has the default encoder, which sweeps block scales."""
HEADS, TINY_HEADS = Heads(), Heads(4, 2, 32)
NIBBLE = "Nibble"
STEPS = (((40,) * 64, 1), ((8192,), 8192))
"""Stored tokens of each request after a step, and how many of them are new."""
TINY = (((30,) * 3, 1), ((90,), 90))
LAYERS, STEP_US = 32, 250_000.0
"""Layers of Llama-3.1-8B, and the time of a step of 8,192 tokens of a prompt: 32,000 tokens/s on one H200."""
GATE = 1e-3
"""Share of values read back that may differ from the definition: those on the edge of a rounding."""

Append = Callable[[Tensor, Tensor, int], object]
"""(k_THD, v_THD, layer): stores a step's tokens in a layer."""


@dataclass(frozen=True)
class Cell:
    """One measurement. differ: share of values read back that differ from the format's definition."""

    tokens: int
    kernel: str
    format: str
    page: int
    us: float
    bytes: int
    differ: float

    def text(self, copy: float) -> str:
        tbps = self.bytes / self.us / 1e6
        return f"{self.us:.2f} us, {tbps:.2f} TB/s, {tbps / copy:.0%}"


def new_slots(cached: Cache, new: int) -> Tensor:
    """int64 [T]: where the last `new` tokens of every request are stored."""
    size, found = cached.page_size, []
    for row, length in zip(cached.page_table_BN, cached.lens, strict=True):
        positions = torch.arange(length - new, length, device=row.device)
        found.append(row[positions // size].long() * size + positions % size)
    return torch.cat(found)


def measure(name: str, cached: Cache, slot_mapping_T: Tensor, append: Append, *, graph: bool = True) -> Cell:
    """Times one way to store a step's tokens in every layer, and reads them back."""
    streams = [paged.random_streams(len(slot_mapping_T), cached.heads) for _ in range(cached.layers)]

    def step() -> list[Tensor]:
        for layer, new in enumerate(streams):
            append(new["k"], new["v"], layer)
        return []

    took = gpu.time_calls(step, cached.layers, graph=graph)
    differ = max(share(cached, layer, slot_mapping_T, streams[layer]) for layer in (0, cached.layers - 1))
    if not differ <= GATE:
        raise SystemExit(f"{name}, {cached.scheme}: {differ:.1e} of the values are not what the format says")
    stored = cached.heads.bytes_per_token("bf16") + cached.heads.bytes_per_token(cached.scheme)
    size = len(slot_mapping_T) * stored
    return Cell(len(slot_mapping_T), name, cached.scheme, cached.page_size, took.ms * 1e3, size, differ)


def share(cached: Cache, layer: int, slot_mapping_T: Tensor, streams: dict[str, Tensor]) -> float:
    """The share of values in the slots that differ from the format's definition; the larger of K and V."""
    view, size = cached.view(layer), cached.page_size
    pages, inverse = (slot_mapping_T // size).unique(return_inverse=True)
    found = []
    for name, new_THD in streams.items():
        entry, x_THD = view.streams[name], new_THD
        for transform in view.transforms if name == "k" else ():
            x_THD = transform.key(x_THD, view.k_mean_HD)
        meant = entry.format.decode(entry.format.encode(x_THD, entry.scale), entry.scale)
        stored = entry.gather_reference(pages[None])[0].unflatten(0, (-1, size))[
            inverse, slot_mapping_T % size
        ]
        found.append(float((stored != meant).float().mean()))
    return max(found)


def own(cached: Cache, slot_mapping_T: Tensor) -> Append:
    """The pool's write, as the engine calls it."""
    return lambda k_THD, v_THD, layer: cached.pool.write(layer, {"k": k_THD, "v": v_THD}, slot_mapping_T)


def cells(heads: Heads, lens: Sequence[int], new: int, scheme: str, with_peers: bool) -> Iterator[Cell]:
    """Nibble's append and, where it has one, FlashInfer's."""
    layers = gpu.CALLS if torch.cuda.is_available() else 2
    rival = with_peers and scheme in peers.APPENDS
    for page, packing in peers.PLACES if rival else peers.PLACES[:1]:
        cached = paged.make_cache(heads, lens, scheme, packing, page, layers)
        slot_mapping_T = new_slots(cached, new)
        if (page, packing) == peers.PLACES[0]:
            yield measure(
                NIBBLE, cached, slot_mapping_T, own(cached, slot_mapping_T), graph=cached.pool.is_capturable
            )
        if rival:
            yield measure(peers.TENSOR_CORES, cached, slot_mapping_T, peers.append(cached, new))


def fastest(found: Sequence[Cell], tokens: int, fmt: str, *kernels: str) -> Cell | None:
    same = [cell for cell in found if (cell.tokens, cell.format) == (tokens, fmt)]
    return min((cell for cell in same if cell.kernel in kernels), key=lambda cell: cell.us, default=None)


def aims(found: Sequence[Cell]) -> list[Aim]:
    """K9, against Nibble's own bf16 append and against the fastest; K10 and K11, what a sweep costs."""
    lines = []
    for rival, kernels in (("its own bf16", (NIBBLE,)), ("the fastest bf16", (NIBBLE, peers.TENSOR_CORES))):
        for tokens in (64, 8192):
            ours, theirs = (
                fastest(found, tokens, "nvfp4_amax", NIBBLE),
                fastest(found, tokens, "bf16", *kernels),
            )
            value = ratio(ours.us, theirs.us) if ours and theirs else None
            what = f"time of Nibble's nvfp4_amax append / {rival} append, {tokens} tokens"
            lines.append(Aim("K9", what, 1.3, 1.0, value, least=False))
    few, plain = (fastest(found, 64, fmt, NIBBLE) for fmt in ("nvfp4", "nvfp4_amax"))
    value = ratio(few.us, plain.us) if few and plain else None
    lines.append(
        Aim(
            "K10", "time of the nvfp4 append with a sweep / without, 64 tokens", 1.25, 1.1, value, least=False
        )
    )
    many = fastest(found, 8192, "nvfp4", NIBBLE)
    value = many.us * LAYERS / STEP_US if many else None
    what = f"{LAYERS} appends of nvfp4 of 8192 tokens / a prompt's step of {STEP_US / 1000:.0f} ms"
    lines.append(Aim("K11", what, 0.015, 0.01, value, least=False))
    return lines


def table(found: Sequence[Cell], copy: float) -> str:
    """Kernels down, steps across."""
    steps = list(dict.fromkeys(cell.tokens for cell in found))
    rows = []
    for fmt, kernel in dict.fromkeys((cell.format, cell.kernel) for cell in found):
        best = [fastest(found, tokens, fmt, kernel) for tokens in steps]
        rows.append((kernel, fmt, *(cell.text(copy) if cell else "" for cell in best)))
    return markdown(("append", "cache", *(f"{tokens} tokens" for tokens in steps)), rows)


def main() -> None:
    options = arguments().parse_args()
    missing = peers.flashinfer()
    with_peers = options.peers and not isinstance(missing, str)
    copy, found = gpu.copy_tbps(), list[Cell]()
    for lens, new in TINY if options.tiny else STEPS:
        for fmt in options.formats.split(","):
            for cell in cells(TINY_HEADS if options.tiny else HEADS, lens, new, fmt, with_peers):
                found.append(cell)
                print(
                    f"{cell.tokens} tokens, {fmt}, {cell.kernel}, page {cell.page}: {cell.text(copy)}",
                    flush=True,
                )
    texts = [f"Copy bandwidth {copy:.2f} TB/s.", missing if isinstance(missing, str) else ""]
    texts += [table(found, copy), aims_table(aims(found))]
    figures = {"copy_tbps": copy, "cells": [*map(asdict, found)]}
    gpu.publish("append", options, str(__doc__), texts, peers.versions(), **figures)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu.add_common_options(parser, FORMATS)
    return parser


if __name__ == "__main__":
    main()
