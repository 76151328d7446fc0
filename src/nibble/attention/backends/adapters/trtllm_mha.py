"""Call TensorRT-LLM's MHA kernels by way of FlashInfer: trtllm-gen on big Blackwell, XQA on SM90 and SM120.

Both read lengths and page tables on the device, so a CUDA graph may hold a decode step. K's global scale goes into what
scores are multiplied with, V's into what results are.

Shape suffixes: T tokens, B requests, N pages of a request, H query heads, D values of a head, W 16-bit words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.attention.backends.adapters.vendor import Scales, Workspace, capability, some_tokens
from nibble.attention.backends.flashinfer import (
    PACKAGE,
    WORKSPACE,
    import_flashinfer,
)
from nibble.attention.backends.trtllm_mha import DATACENTRE
from nibble.attention.planner.support import Phase
from nibble.cache.view import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams

WORD = 16


@dataclass(frozen=True, slots=True)
class _Lens:
    """What the kernels read of a batch, the same for all its layers. lens_B: of padding 1, since nobody says what a
    kernel does for 0. padding_B11: whose result is to be zeros; None where there is no padding. mask_TW: bits of the
    draft tokens that each draft token sees.
    """

    page_table_BN: Tensor
    lens_B: Tensor
    padding_B11: Tensor | None = None
    mask_TW: Tensor | None = None
    cu_seqlens_k_B1: Tensor | None = None


class TrtllmMha:
    """The adapter. Its workspace serves one step at a time, and nobody else: kernels keep counters in it."""

    def __init__(self) -> None:
        self._decode = import_flashinfer(f"{PACKAGE}.decode")
        self._prefill = import_flashinfer(f"{PACKAGE}.prefill")
        self._workspace = Workspace(WORKSPACE)
        self._known: WeakKeyDictionary[AttentionBatch, _Lens] = WeakKeyDictionary()
        self._scales = Scales(PACKAGE)

    def attend(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        k, v = view.streams["k"], view.streams["v"]
        gen = capability(q_THD) in DATACENTRE
        if batch not in self._known:
            self._known[batch] = _lens(batch, q_THD.device, masked=not gen)
        lens = self._known[batch]
        options: dict[str, Any] = {
            "query": q_THD.contiguous(),
            "kv_cache": (k.planes[0], v.planes[0]),
            "workspace_buffer": self._workspace.on(q_THD.device),
            "block_tables": lens.page_table_BN,
            "seq_lens": lens.lens_B,
            "bmm1_scale": params.scale * self._scales.of(k),
            "bmm2_scale": self._scales.of(v),
            "window_left": -1
            if params.window is None
            else params.window - 1,  # theirs does not count the present token
            "sinks": None if params.sinks_H is None else params.sinks_H.float(),
            "kv_layout": k.packing.name.upper(),
        }
        if len(k.planes) > 1:
            options["kv_cache_sf"] = (k.planes[1], v.planes[1])
        if batch.phase.decodes:
            out_THD = self._token(batch, lens, gen, options)
        else:
            out_THD = self._prompt(batch, lens, options)
        return out_THD if lens.padding_B11 is None else out_THD.masked_fill_(lens.padding_B11, 0.0)

    def _token(self, batch: AttentionBatch, lens: _Lens, gen: bool, options: dict[str, Any]) -> Tensor:
        """One new token, or a few: of one number each, or packed."""
        options["max_seq_len"] = max(batch.seq_lens)
        most = max(batch.query_lens)
        ragged = min(batch.query_lens) < most
        if gen:
            if ragged:
                options |= {
                    "q_len_per_req": None,
                    "max_q_len": most,
                    "cum_seq_lens_q": batch.cu_seqlens_q_B1,
                }
            else:
                options["q_len_per_req"] = most
            return self._decode.trtllm_batch_decode_with_kv_cache(**options, backend="trtllm-gen")
        options |= {"q_len_per_req": most, "mask": lens.mask_TW}
        if ragged:
            options["q_cu_seq_lens"] = batch.cu_seqlens_q_B1
        elif most > 1 and lens.mask_TW is not None:
            options["mask"] = lens.mask_TW.view(-1, most, lens.mask_TW.shape[1])
        out: Tensor = self._decode.xqa_batch_decode_with_kv_cache(**options)
        return out.view_as(options["query"])  # of draft tokens it is [B, n, H, D]

    def _prompt(self, batch: AttentionBatch, lens: _Lens, options: dict[str, Any]) -> Tensor:
        return self._prefill.trtllm_batch_context_with_kv_cache(
            **options,
            max_q_len=max(batch.query_lens),
            max_kv_len=max(batch.seq_lens),
            batch_size=len(batch.query_lens),
            cum_seq_lens_q=batch.cu_seqlens_q_B1,
            cum_seq_lens_kv=lens.cu_seqlens_k_B1,
        )


def _lens(batch: AttentionBatch, device: torch.device, *, masked: bool) -> _Lens:
    page_table_BN, lens_B = batch.page_table_BN.contiguous(), batch.seq_lens_B
    if (
        batch.phase is Phase.DECODE
    ):  # which may be recorded in a CUDA graph: lengths are known to the device alone
        return _Lens(page_table_BN, *some_tokens(lens_B))
    if batch.phase is Phase.VERIFY:
        return _Lens(page_table_BN, lens_B, mask_TW=_causal(batch.query_lens).to(device) if masked else None)
    starts_B1 = torch.nn.functional.pad(lens_B.cumsum(0, dtype=torch.int32), (1, 0))
    return _Lens(page_table_BN, lens_B, cu_seqlens_k_B1=starts_B1)


def _causal(query_lens: tuple[int, ...]) -> Tensor:
    """uint16 [T, W]: for each draft token a bit for those of its request up to itself, in whole words of 32 bits."""
    width = -(-max(query_lens) // 32) * 32
    own_T = torch.cat([torch.arange(count) for count in query_lens])
    seen_TB = (torch.arange(width) <= own_T[:, None]).view(len(own_T), -1, WORD)
    return (seen_TB.int() << torch.arange(WORD)).sum(-1).to(torch.uint16)
