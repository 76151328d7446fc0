"""fa3: FlashAttention 3, the Hopper kernels, over pages of 16-bit caches. For MLA they score with values too.

Three packages bring it: FlashAttention's own build (hopper/ of its source; the package index has no wheel), and what
sglang-kernel and vLLM ship. Left out: FP8, which wants the query in FP8 too and rounds weights to it, and is then
further from the definition than twice plain torch. --allow-staging serves those caches, and 4-bit ones, in 16 bits.

A page that holds a whole tile of keys may be fetched whole, rows beyond a request's end with it, and a NaN that lies
there gets into the sum of values. Pages in rows are no multiple of a tile, and so are read row by row; a tile is of 64
keys for MLA and for windows over heads of 256 values, and of 80 to 192 otherwise.

Attention sinks join by the log-sum-exp that the kernel returns, which is exact: not all packages take them, nor all
numbers of heads. Lengths and pages are read on the device, so a CUDA graph may hold a decode step; rows of requests
without tokens are zeros, as the kernel leaves them.

Shape suffixes: T tokens, H query heads, D values of a head, P pages, S slots of a page, G KV heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from nibble.attention.backends.vendor import PLAIN, PROMPT, RANK, TOKEN, Offer, latents, row
from nibble.attention.capability import NEVER, BackendInfo, Phase
from nibble.attention.metadata import AttentionSpec, Segment
from nibble.cache.view import KVView
from nibble.geometry import LATENT

OWN = "flash_attn_interface"
PARTS = ("PAGEDKV", "LOCAL", "SOFTCAP", "SPLIT", "FP16")
"""What a build may leave out, and rows promise."""
VLLM_NAMES = {
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
    "page_table": "block_table",
    "qv": "q_v",
}
HELD = 128 << 20
"""Partial results of split contexts."""


def _fault(kernels: ModuleType) -> str | None:
    if not getattr(kernels, "FA3_AVAILABLE", True):  # vLLM's
        return f"has no FA3 ({kernels.FA3_UNAVAILABLE_REASON})"
    if not (hasattr(kernels, "flash_attn_with_kvcache") or hasattr(kernels, "FA3_AVAILABLE")):
        return "has no flash_attn_with_kvcache"
    if kernels.__name__ == OWN:
        return _left_out()
    return None


def _left_out() -> str | None:
    """What FlashAttention's own build says of itself, in a module beside it."""
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except Exception:  # builds of before August 2025 do not say
        return None
    missing = [part for part in PARTS if flags.get(f"FLASHATTENTION_DISABLE_{part}")]
    return f"was built without {', '.join(missing)}" if missing else None


OFFER = Offer(
    modules=(OWN, "sgl_kernel.flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"),
    install="pip install sglang-kernel, or vllm, or build hopper/ of Dao-AILab/flash-attention from source",
    fault=_fault,
    aside=frozenset({"vllm"}),
)


class FA3:
    """The adapter."""

    def __init__(self) -> None:
        self._call = _bound(OFFER.load())

    def attend(self, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec) -> Tensor:
        options: dict[str, Any] = {
            "cache_seqlens": segment.kv_lens_B,
            "page_table": segment.pages_BN,
            "cu_seqlens_q": segment.q_starts_B1,
            "max_seqlen_q": max(segment.q_lens),
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (-1, -1) if spec.window is None else (spec.window - 1, 0),
            "softcap": spec.softcap or 0.0,
            "return_softmax_lse": spec.sinks_H is not None,
        }
        if LATENT in view.streams:
            data_PSGD = latents(view, "FA3").planes[0]
            options |= {"q": q_THD[..., RANK:], "qv": q_THD[..., :RANK]}
            options |= {"k_cache": data_PSGD[..., RANK:], "v_cache": data_PSGD[..., :RANK]}
        else:
            options |= {
                "q": q_THD,
                "k_cache": view.streams["k"].planes[0],
                "v_cache": view.streams["v"].planes[0],
            }
        found = self._call(max(segment.kv_lens), options)
        if spec.sinks_H is None:
            return found
        out_THD, lse_HT, *_ = found
        # the sink takes its share of what the softmax gave away: exp(lse) of exp(lse) + exp(sink)
        kept_TH = (lse_HT - spec.sinks_H.float()[:, None]).sigmoid().t()
        return (out_THD * kept_TH[..., None]).to(out_THD.dtype)


def _bound(kernels: ModuleType) -> Callable[[int, dict[str, Any]], Any]:
    """The package's function, under the names that it has for things. The first argument is the longest context."""
    if hasattr(kernels, "flash_attn_with_kvcache"):
        return lambda longest, options: kernels.flash_attn_with_kvcache(**options)
    varlen = kernels.flash_attn_varlen_func

    def vllm(longest: int, options: dict[str, Any]) -> Any:
        named = {VLLM_NAMES.get(name, name): value for name, value in options.items()}
        return varlen(**named, max_seqlen_k=longest, fa_version=3)

    return vllm


HOPPER = {90}
RACE = "benchmarks/backends.py on one H200"
SMALL, MORE = {16, 32}, {16, 32, 64}
HEADS = (({64, 96, 128, 192}, MORE), ({256}, SMALL))
"""Widths of heads, and the pages that none of their kernels fetches whole."""
EITHER, WITH = {False, True}, {True}
HEAD_ROWS = (
    ({Phase.PREFILL}, EITHER, 39, "1x8K in 0.957 ms, sdpa 0.985; groups of 8, 1.07 x sdpa"),
    ({Phase.EXTEND}, EITHER, 42, "2K on 32K in 1.75 ms, sdpa 1.89"),
    (TOKEN, NEVER, 32, "64x8K in 0.491 ms, 4.37 TB/s"),
    (TOKEN, WITH, 15, "sinks cost a pass of their own: 1.18 x triton in decode, though 0.83 x in verify"),
)
"""Phases, sinks, prefer."""
FEW, MANY = range(1, 33), range(33, 129)
LATENT_ROWS = (
    (PROMPT, range(1, 129), 35, "2K on 32K in 3.8 ms with 16 heads, flashinfer 1.12 x, triton 1.7 x"),
    (TOKEN, FEW, 18, "16 heads: 1.07 x the best, triton 1.03 x"),
    (TOKEN, MANY, 54, "128 heads: 1.14 x flashmla, triton 1.58 x"),
)
"""Phases, query heads, prefer."""

BACKEND = BackendInfo(
    name="fa3",
    summary="FlashAttention 3 on Hopper, 16-bit caches",
    adapter=FA3,
    packages=OFFER.packages,
    install=OFFER.install,
    versions="vLLM 0.33.0, sglang-kernel 0.4.10",
    trouble=OFFER.trouble,
    graphs=True,
    rows=(
        *(
            row(
                "mha", phase=phase, format={fmt}, packing={"nhd"}, arch=HOPPER, page=pages, dim=dims, dtype={dtype},
                sinks=sinks, prefer=prefer, held=HELD, cites=f"{RACE}: {cites}",
            )
            for phase, sinks, prefer, cites in HEAD_ROWS
            for dims, pages in HEADS
            for fmt, dtype in PLAIN
        ),
        *(
            row(
                "mla", phase=phase, format={fmt}, arch=HOPPER, page=SMALL, group=groups, dtype={dtype}, prefer=prefer,
                held=HELD, cites=f"{RACE}: {cites}",
            )
            for phase, groups, prefer, cites in LATENT_ROWS
            for fmt, dtype in PLAIN
        ),
    ),
)  # fmt: skip
