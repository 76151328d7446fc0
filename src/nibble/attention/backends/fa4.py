"""fa4: FlashAttention 4 (CuTe DSL) on Hopper and Blackwell, over pages of 16-bit caches. All else is staged.

A kernel is compiled at its first use. A page that holds a whole tile of keys is fetched whole, rows beyond a request's
end with it, and a NaN there gets into the sum of values, as the package says; so pages are smaller than a tile. MLA is
for big Blackwell. Decoding has no split-KV unless it is asked for, so it slows down with the context.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nibble.attention.backends.vendor import (
    PLAIN,
    RANK,
    imported,
    latents,
    outdated,
    row,
    without_cuda,
)
from nibble.attention.metadata import AttentionBatch, AttentionParams
from nibble.attention.planner.support import PROMPT, BackendInfo, Phase
from nibble.cache.view import KVView
from nibble.model_spec import LATENT

PACKAGE, DISTRIBUTION, OLDEST = "flash_attn.cute", "flash-attn-4", "4.0.0b36"
INSTALL = f"pip install '{DISTRIBUTION}[cu13]>={OLDEST}'"


def trouble() -> str | None:
    """What the package needs and this machine lacks. Its import takes seconds, and is left to the adapter."""
    return outdated(DISTRIBUTION, OLDEST) or without_cuda()


class FA4:
    """The adapter."""

    def __init__(self) -> None:
        self._package = imported(PACKAGE, INSTALL)

    def attend(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        options: dict[str, Any] = {
            "cu_seqlens_q": segment.cu_seqlens_q_B1,
            "max_seqlen_q": max(segment.query_lens),
            "max_seqlen_k": max(segment.seq_lens),
            "seqused_k": segment.seq_lens_B,
            "page_table": segment.page_table_BN,
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (None, None) if spec.window is None else (spec.window - 1, 0),
            "learnable_sink": None if spec.sinks_H is None else spec.sinks_H.bfloat16(),  # they take no other
            "softcap": spec.softcap or 0.0,
        }
        if LATENT in view.streams:
            data_PSGD = latents(view, "FA4").planes[0]
            options |= {"q": q_THD[..., RANK:], "qv": q_THD[..., :RANK]}
            options |= {"k": data_PSGD[..., RANK:], "v": data_PSGD[..., :RANK]}
        else:
            options |= {"q": q_THD, "k": view.streams["k"].planes[0], "v": view.streams["v"].planes[0]}
        out_THD, *_ = self._package.flash_attn_varlen_func(**options)
        return out_THD


HOPPER, BLACKWELL = {90}, {100, 103}
ONE = {Phase.DECODE}
MHA = ((PROMPT, BLACKWELL, 36), (PROMPT, HOPPER, 19), (ONE, BLACKWELL, 25), (ONE, HOPPER, 15))
"""Phases, GPUs, prefer: on Hopper behind everything that was measured there."""
CITES = "flash-attn-4 4.0.0b36 interface.py: one dtype for all, pages that are no whole tile; not measured here yet"

BACKEND = BackendInfo(
    name="fa4",
    summary="FlashAttention 4 on Hopper and Blackwell, 16-bit caches",
    adapter=FA4,
    packages=(PACKAGE,),
    install=INSTALL,
    versions=OLDEST,
    unavailable_reason=trouble,
    support=(
        *(
            row(
                "mha", phase=phase, format={fmt}, packing={"nhd"}, arch=arch, page={16, 32, 64}, dim={64, 96, 128},
                dtype={dtype}, prefer=prefer, cites=CITES,
            )
            for phase, arch, prefer in MHA
            for fmt, dtype in PLAIN
        ),
        *(
            row(
                "mla", phase=PROMPT, format={fmt}, arch=BLACKWELL, page={16, 32}, group={1, 2, 4, 8, 16, 32, 64, 128},
                dtype={dtype}, prefer=18, cites=CITES,
            )
            for fmt, dtype in PLAIN
        ),
    ),
)  # fmt: skip
