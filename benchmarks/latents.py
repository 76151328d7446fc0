"""Backends over made-up latents: who can read them here, and the pages as an adapter wants them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from nibble.attention import backends
from nibble.attention.planner.support import Need
from nibble.attention.step import AttentionBackend
from nibble.cache import layout as packings
from nibble.cache.pool import KVView, StreamView
from nibble.hardware import probe
from nibble.kernels.types import Paged
from nibble.model_spec import LATENT, Phase, Stream


def adapters(
    names: Iterable[str], kind: str, latents: Paged, packing: str, heads: int
) -> Iterator[tuple[str, AttentionBackend]]:
    """The backends `names` that decode such latents on this machine."""
    known = backends.available_backends()
    for name in filter(None, names):
        asked = Need(
            Phase.DECODE, kind, latents.format.name, packing, probe().arch, latents.page_size, latents.dim, heads,
            str(torch.bfloat16).removeprefix("torch."),
        )  # fmt: skip
        info = known.get(name)
        if info is None or info.adapter is None or not info.serves(asked):
            lacking = "no such backend" if info is None else info.missing or "; ".join(info.nearest(asked))
            print(f"{name} is left out: {lacking}", flush=True)
            continue
        yield name, backends.create(info)


def view(latents: Paged, stream: Stream, packing: str) -> KVView:
    """The pages as a pool of `packing` shows them. Latents have one head, so only the order of axes differs."""
    planes = tuple(plane.transpose(1, 2) for plane in latents.planes_PHS)
    entry = StreamView(stream, latents.format, packings.get(packing), planes, latents.scale)
    return KVView({LATENT: entry}, latents.page_size)
