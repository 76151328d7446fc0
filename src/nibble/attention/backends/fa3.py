"""fa3: FlashAttention 3, the Hopper kernels, over pages of 16-bit caches. For MLA they score with values too.

Three packages bring it: FlashAttention's own build (hopper/ of its source; the package index has no wheel), and what
sglang-kernel and vLLM ship. Left out: FP8, which wants the query in FP8 too and rounds weights to it, and is then
further from the definition than twice plain torch. --allow-staging serves those caches, and 4-bit ones, in 16 bits.

A page that holds a whole tile of keys may be fetched whole, rows beyond a request's end with it, and a NaN that lies
there gets into the sum of values. So the kernels are told of pages that are no multiple of a tile, which are read row
by row: a larger page is several of those, one behind the other. A tile is of 64 keys for MLA and for windows over heads
of 256 values, and of 80 to 192 otherwise.

Attention sinks join by the log-sum-exp that the kernel returns, which is exact: not all packages take them, nor all
numbers of heads. Lengths and pages are read on the device, so a CUDA graph may hold a decode step; rows of requests
without tokens are zeros, as the kernel leaves them.

Shape suffixes: T tokens, H query heads, D values of a head, P pages, S slots of a page, G KV heads, B requests, N pages
of a request.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.attention.backends.vendor import PLAIN, RANK, TOKEN, KernelPackages, latents, row
from nibble.attention.metadata import AttentionBatch, AttentionParams
from nibble.attention.planner.support import NEVER, PROMPT, WITH, BackendInfo, Phase
from nibble.cache.view import KVView
from nibble.model_spec import LATENT

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
LARGEST, NARROW = 64, 192
"""Slots of the largest page that no kernel for heads of up to NARROW values fetches whole; half as many for wider ones,
and for latents."""
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


OFFER = KernelPackages(
    modules=(OWN, "sgl_kernel.flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"),
    install="pip install sglang-kernel, or vllm, or build hopper/ of Dao-AILab/flash-attention from source",
    incompatibility=_fault,
    import_alone=frozenset({"vllm"}),
)


class FA3:
    """The adapter."""

    def __init__(self) -> None:
        self._call = _bound(OFFER.load())
        self._tables: WeakKeyDictionary[AttentionBatch, dict[int, Tensor]] = WeakKeyDictionary()

    def attend(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        planes = [entry.planes[0] for entry in view.streams.values()]
        parts = _parts(view.page_size, max(plane.shape[-1] for plane in planes))
        planes = [x.view(-1, view.page_size // parts, *x.shape[2:]) for x in planes]
        options: dict[str, Any] = {
            "cache_seqlens": segment.seq_lens_B,
            "page_table": self._table(segment, parts),
            "cu_seqlens_q": segment.cu_seqlens_q_B1,
            "max_seqlen_q": max(segment.query_lens),
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (-1, -1) if spec.window is None else (spec.window - 1, 0),
            "softcap": spec.softcap or 0.0,
            "return_softmax_lse": spec.sinks_H is not None,
        }
        if LATENT in view.streams:
            latents(view, "FA3")
            (data_PSGD,) = planes
            options |= {"q": q_THD[..., RANK:], "qv": q_THD[..., :RANK]}
            options |= {"k_cache": data_PSGD[..., RANK:], "v_cache": data_PSGD[..., :RANK]}
        else:
            options |= {"q": q_THD, "k_cache": planes[0], "v_cache": planes[1]}
        found = self._call(max(segment.seq_lens), options)
        if spec.sinks_H is None:
            return found
        out_THD, lse_HT, *_ = found
        # the sink takes its share of what the softmax gave away: exp(lse) of exp(lse) + exp(sink)
        kept_TH = (lse_HT - spec.sinks_H.float()[:, None]).sigmoid().t()
        return (out_THD * kept_TH[..., None]).to(out_THD.dtype)

    def _table(self, segment: AttentionBatch, parts: int) -> Tensor:
        """The pages of each request where each is cut into `parts`: made once for all layers of a step."""
        if parts == 1:
            return segment.page_table_BN
        known = self._tables.setdefault(segment, {})
        if parts not in known:
            order = torch.arange(parts, dtype=torch.int32, device=segment.page_table_BN.device)
            known[parts] = (segment.page_table_BN[..., None] * parts + order).flatten(1)
        return known[parts]


def _parts(page: int, dim: int) -> int:
    """How many pages the kernels are told of for one: none of them a multiple of a tile."""
    return max(page // (LARGEST if dim <= NARROW else LARGEST // 2), 1)


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
DIMS, PAGES = {64, 96, 128, 192, 256}, {16, 32, 64, 128}
FEW = range(1, 5)
STAGED = 30
"""Prompts over caches of fewer bits, which are dequantised for it: still 1.1 to 4 times as fast as kernels that read
them as they are, but for torch's fused ones, which know neither caps, sinks nor latents."""
HEAD_ROWS: tuple[tuple[Iterable[Phase], dict[str, Any], int, int | None, str], ...] = (
    (
        {Phase.PREFILL},
        {"window": NEVER},
        39,
        STAGED,
        "1x8K in 0.957 ms, sdpa 0.985; groups of 8, 1.07 x sdpa",
    ),
    (
        {Phase.PREFILL},
        {"window": NEVER, "sinks": NEVER, "kv_heads": FEW},
        42,
        42,
        "1 KV head: sdpa 1.3 x; staging is taken to add 0.02 ms, as to triton",
    ),
    ({Phase.EXTEND}, {"window": NEVER}, 42, STAGED, "2K on 32K in 1.75 ms, sdpa 1.89"),
    (
        {Phase.EXTEND},
        {"window": NEVER, "sinks": NEVER, "kv_heads": FEW},
        42,
        42,
        "1 KV head: sdpa 1.1 x; staging is taken to add 0.02 ms, as to triton",
    ),
    (PROMPT, {"window": WITH, "sinks": NEVER}, 39, None, "taken to be as without windows, which were raced"),
    (
        PROMPT,
        {"window": WITH, "sinks": NEVER, "softcap": WITH},
        39,
        STAGED,
        "taken to be as without windows, which were raced",
    ),
    (PROMPT, {"window": WITH, "sinks": WITH}, 15, None, "a window of 128: 1.5 to 2 x triton, staged 4 x"),
    (TOKEN, {"sinks": NEVER}, 32, None, "64x8K in 0.491 ms, 4.37 TB/s"),
    (
        TOKEN,
        {"sinks": WITH},
        15,
        None,
        "sinks cost a pass of their own: 1.18 x triton, 2.2 x with a window",
    ),
)
"""Phases, conditions, prefer, the same over staged pages."""
MANY = range(33, 129)
LATENT_ROWS = (
    (PROMPT, range(1, 129), 35, STAGED, "2K on 32K in 3.5 ms with 16 heads, flashinfer 1.3 x, triton 2.1 x"),
    (TOKEN, range(1, 33), 18, None, "16 heads: 1.08 x the best, triton 1.03 x on pages of 64"),
    (TOKEN, MANY, 54, None, "128 heads: 1.14 x flashmla, triton 1.58 x"),
)
"""Phases, query heads, prefer, the same over staged pages."""

BACKEND = BackendInfo(
    name="fa3",
    summary="FlashAttention 3 on Hopper, 16-bit caches",
    adapter=FA3,
    packages=OFFER.packages,
    install=OFFER.install,
    versions="vLLM 0.33.0, sglang-kernel 0.4.10",
    unavailable_reason=OFFER.unavailable_reason,
    graphs=True,
    support=(
        *(
            row(
                "mha", phase=phase, format={fmt}, packing={"nhd"}, arch=HOPPER, page=PAGES, dim=DIMS, dtype={dtype},
                prefer=prefer, staged=staged, held=HELD, cites=f"{RACE}: {cites}", **facts,
            )
            for phase, facts, prefer, staged, cites in HEAD_ROWS
            for fmt, dtype in PLAIN
        ),
        *(
            row(
                "mla", phase=phase, format={fmt}, arch=HOPPER, page=PAGES, group=groups, dtype={dtype}, prefer=prefer,
                staged=staged, held=HELD, cites=f"{RACE}: {cites}",
            )
            for phase, groups, prefer, staged, cites in LATENT_ROWS
            for fmt, dtype in PLAIN
        ),
    ),
)  # fmt: skip
