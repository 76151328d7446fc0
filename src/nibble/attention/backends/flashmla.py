"""flashmla: DeepSeek's FlashMLA. Dense decoding on Hopper, and sparse attention on Hopper and big Blackwell.

Sparse kernels name tokens by slots; -1 is nobody, and the last heads of 64 or 128 are zeros where a model has fewer.
Over a 16-bit pool the cache is one flat axis of tokens (`paged`), and so are staged pages (`ragged`). In FP8 the kernel
reads records of 656 bytes where they lie, one query token to a request.

Three packages bring it: sgl-flash-mla (prebuilt; the kernels for Hopper and for these formats are its legacy half),
FlashMLA built from a source of January to September 2026, before those kernels were dropped, and what vLLM and
sglang-kernel ship. Left out: dense FP8, whose kernel wants the query in FP8 too, and is then further from the
definition than twice plain torch. --allow-staging serves those caches, and 4-bit ones, in 16 bits.

How a call is cut over the chip is worked out on the device, once for a segment, so a CUDA graph may hold a decode step.

Shape suffixes: T tokens, B requests, n tokens of the longest request, H query heads, D values of a head, K chosen
tokens, P pages, S slots of a page.
"""

from __future__ import annotations

from inspect import signature
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.attention.backends.vendor import ALL, PLAIN, RANK, TOKEN, KernelPackages, latents, row
from nibble.attention.metadata import AttentionBatch, AttentionParams
from nibble.attention.planner.support import BackendInfo, Phase
from nibble.cache.view import KVView, StreamView

HEADS = (64, 128)
"""What the sparse kernels are built for."""
CHOSEN = 128
"""They take tokens in such numbers only."""
HELD = 128 << 20
"""Partial results of a call: 128 heads of 512 floats for each of 256 requests and 132 parts of the chip."""


def _fault(kernels: ModuleType) -> str | None:
    if not hasattr(kernels, "FlashMLASchedMeta"):
        return "is older than January 2026"
    options = signature(kernels.flash_mla_with_kvcache).parameters
    if "use_legacy" in options:
        try:
            kernels.get_ops(True)
        except RuntimeError as error:
            return f"was built without its legacy half ({error})"
    elif kernels.__name__.startswith("flash_mla.") and "enable_batch_invariant" in options:
        return "is of September 2026 or later, which has no kernels for Hopper, nor for these formats"
    return None


OFFER = KernelPackages(
    modules=(
        "flash_mla.flash_mla_interface",
        "sgl_kernel.flash_mla",
        "vllm.third_party.flashmla.flash_mla_interface",
    ),
    install="pip install sgl-flash-mla",
    incompatibility=_fault,
    import_alone=frozenset({"vllm"}),
)


class FlashMLA:
    """The adapter. schedules: how calls of a segment are cut, made by the first layer that asks so."""

    def __init__(self) -> None:
        self._kernels = OFFER.load()
        legacy = "use_legacy" in signature(self._kernels.flash_mla_with_kvcache).parameters
        self._options = {"use_legacy": True} if legacy else {}
        self._schedules: WeakKeyDictionary[AttentionBatch, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
        self._places: WeakKeyDictionary[AttentionBatch, Tensor] = WeakKeyDictionary()

    def attend(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        latent = latents(view, "FlashMLA")
        if spec.topk_slots_TK is None:
            return self._dense(q_THD, latent, segment, spec.scale)
        heads, topk_slots_T1K = q_THD.shape[1], _in_steps(spec.topk_slots_TK)[:, None]
        full = next(size for size in HEADS if heads <= size)
        q_THD = torch.nn.functional.pad(q_THD, (0, 0, 0, full - heads)) if heads < full else q_THD
        attend = self._records if latent.packing.record else self._flat
        out_THD = attend(q_THD, latent, segment, topk_slots_T1K, spec.scale)
        return out_THD if heads == full else out_THD[:, :heads].contiguous()

    def _dense(self, q_THD: Tensor, latent: StreamView, segment: AttentionBatch, scale: float) -> Tensor:
        count, most = len(segment.query_lens), max(segment.query_lens)
        place_T = self._place(segment, q_THD.device)
        if place_T is None:
            q_BnHD = q_THD.reshape(count, most, *q_THD.shape[1:])
        else:
            q_BnHD = q_THD.new_zeros(count, most, *q_THD.shape[1:])
            q_BnHD.flatten(0, 1)[place_T] = q_THD
        out_BnHD, _ = self._kernels.flash_mla_with_kvcache(
            q=q_BnHD.contiguous(),
            k_cache=latent.planes[0],
            block_table=segment.page_table_BN,
            cache_seqlens=segment.seq_lens_B,
            head_dim_v=RANK,
            tile_scheduler_metadata=self._schedule(segment, *q_BnHD.shape[:3]),
            softmax_scale=scale,
            causal=True,
            is_fp8_kvcache=False,
            **self._options,
        )
        out: Tensor = out_BnHD.flatten(0, 1)
        return out if place_T is None else out[place_T]

    def _place(self, segment: AttentionBatch, device: torch.device) -> Tensor | None:
        """Where a token goes in [B * n]: at the end of its request's rows, which see the most. None if all are full."""
        most = max(segment.query_lens)
        if min(segment.query_lens) == most:
            return None
        if segment not in self._places:
            rows = [i * most + most - n + j for i, n in enumerate(segment.query_lens) for j in range(n)]
            self._places[segment] = torch.tensor(rows, device=device)
        return self._places[segment]

    def _records(
        self, q_THD: Tensor, latent: StreamView, segment: AttentionBatch, topk_slots_T1K: Tensor, scale: float
    ) -> Tensor:
        codes_PS1 = latent.planes[0]
        record = codes_PS1.stride(1)
        out_T1HD, _ = self._kernels.flash_mla_with_kvcache(
            q=q_THD[:, None],
            k_cache=codes_PS1.as_strided((*codes_PS1.shape[:3], record), codes_PS1.stride()),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=RANK,
            tile_scheduler_metadata=self._schedule(segment, *q_THD.shape[:2], topk_slots_T1K.shape[2]),
            softmax_scale=scale,
            causal=False,
            is_fp8_kvcache=True,
            indices=topk_slots_T1K,
            **self._options,
        )
        return out_T1HD[:, 0]

    def _flat(
        self, q_THD: Tensor, latent: StreamView, segment: AttentionBatch, topk_slots_T1K: Tensor, scale: float
    ) -> Tensor:
        tokens_L1D = latent.planes[0].flatten(0, 1)
        out_THD, *_ = self._kernels.flash_mla_sparse_fwd(
            q=q_THD, kv=tokens_L1D, indices=topk_slots_T1K, sm_scale=scale, d_v=RANK, **self._options
        )
        return out_THD

    def _schedule(self, segment: AttentionBatch, *shape: int) -> Any:
        known = self._schedules.setdefault(segment, {})
        if shape not in known:
            known[shape] = self._kernels.get_mla_metadata()[0]
        return known[shape]


def _in_steps(topk_slots_TK: Tensor) -> Tensor:
    lacking = -topk_slots_TK.shape[1] % CHOSEN
    return (
        torch.nn.functional.pad(topk_slots_TK, (0, lacking), value=-1)
        if lacking
        else topk_slots_TK.contiguous()
    )


README = "deepseek-ai/FlashMLA README"
HOPPER, BIG = {90}, {90, 100, 103}
UP_TO_128 = range(1, HEADS[-1] + 1)

DENSE = (
    ({Phase.DECODE}, range(1, 33), 14, "16 heads: 1.12 x the best, one request of 32K 1.57 x"),
    ({Phase.DECODE}, range(33, 129), 60, "128 heads: the fastest, fa3 1.14 x, triton 1.58 x"),
    ({Phase.VERIFY}, range(1, 129), 60, "the fastest, fa3 1.1 to 1.2 x, triton 1.5 to 2 x"),
)
"""Phases, query heads, prefer."""

BACKEND = BackendInfo(
    name="flashmla",
    summary="FlashMLA: dense MLA decoding on Hopper, sparse attention on Hopper and Blackwell",
    adapter=FlashMLA,
    packages=OFFER.packages,
    install=OFFER.install,
    versions="sgl-flash-mla 1.0.0, vLLM 0.33.0, sglang-kernel 0.4.10",
    unavailable_reason=OFFER.unavailable_reason,
    graphs=True,
    support=(
        *(
            row(
                "mla", phase=phase, format={fmt}, arch=HOPPER, page={64}, group=groups, dtype={dtype}, prefer=prefer,
                held=HELD, cites=f"{README}: dense decoding, SM90; benchmarks/backends.py on one H200: {cites}",
            )
            for phase, groups, prefer, cites in DENSE
            for fmt, dtype in PLAIN
        ),
        row(
            "dsa", phase=ALL, format={"bf16"}, arch=BIG, page={64}, group=UP_TO_128, dtype={"bfloat16"},
            addressing={"paged", "ragged"}, prefer=60,
            cites=f"{README}: sparse prefill, SM90 and SM100, flat bf16; the index cache wants pages of 64",
        ),
        row(
            "dsa", phase=TOKEN, format={"fp8_ds_mla"}, packing={"record"}, arch=BIG, page={64}, group=UP_TO_128,
            dtype={"bfloat16"}, prefer=60, held=HELD,
            cites=f"{README}: sparse decoding, FP8 in records of 656 bytes; one H200: 128 x 128 heads in 0.182 ms",
        ),
    ),
)  # fmt: skip
