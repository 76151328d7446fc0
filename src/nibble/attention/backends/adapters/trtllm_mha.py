"""Call TensorRT-LLM's MHA kernels by way of FlashInfer: trtllm-gen on big Blackwell, XQA on SM90 and SM120.

Both read lengths and page tables on the device, so a CUDA graph may hold a decode step.

Shape suffixes: T tokens, B requests, N pages of a request, H query heads, D values of a head, W 16-bit words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibble.attention.backends.adapters.vendor import Scales, Workspace, capability, clamp_lens
from nibble.attention.backends.flashinfer import (
    PACKAGE,
    WORKSPACE,
    import_flashinfer,
)
from nibble.attention.layer import AttentionBackend
from nibble.attention.planner.support import BLACKWELL
from nibble.cache.pool import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import Phase

WORD = 16


@dataclass(frozen=True, slots=True)
class _State:
    """What the kernels read of a batch, the same for all its layers."""

    page_table_BN: Tensor
    lens_B: Tensor
    """Stored tokens; of padding 1, since nobody says what a kernel does for 0."""
    padding_B11: Tensor | None = None
    """Whose result is to be zeros; None where there is no padding."""
    mask_TW: Tensor | None = None
    """Bits of the draft tokens that each draft token sees."""
    cu_seqlens_k_B1: Tensor | None = None
    """Where each request's stored tokens begin if they were one behind the other."""


class TrtllmMha(AttentionBackend):
    """The adapter. Its workspace serves one step at a time, and nobody else: kernels keep counters in it."""

    def __init__(self) -> None:
        self._decode = import_flashinfer(f"{PACKAGE}.decode")
        self._prefill = import_flashinfer(f"{PACKAGE}.prefill")
        self._workspace = Workspace(WORKSPACE)
        self._scales = Scales(PACKAGE)

    def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> _State:
        """Return tables and lengths as the kernels of the batch's phase take them."""
        page_table_BN, lens_B = batch.page_table_BN.contiguous(), batch.seq_lens_B
        if batch.phase is Phase.DECODE:
            # It may be recorded in a CUDA graph, where lengths are known to the device alone.
            return _State(page_table_BN, *clamp_lens(lens_B))
        if batch.phase is Phase.VERIFY:
            # XQA is given the mask of draft tokens; trtllm-gen takes none.
            mask_TW = None if _is_gen(q_THD) else _causal_mask(batch.query_lens).to(q_THD.device)
            return _State(page_table_BN, lens_B, mask_TW=mask_TW)
        starts_B1 = torch.nn.functional.pad(lens_B.cumsum(0, dtype=torch.int32), (1, 0))
        return _State(page_table_BN, lens_B, cu_seqlens_k_B1=starts_B1)

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _State
    ) -> Tensor:
        """Call the kernel of the batch's phase, and clear the rows of padding."""
        k, v = view.streams["k"], view.streams["v"]
        options: dict[str, Any] = {
            "query": q_THD.contiguous(),
            "kv_cache": (k.planes[0], v.planes[0]),
            "workspace_buffer": self._workspace.on(q_THD.device),
            "block_tables": state.page_table_BN,
            "seq_lens": state.lens_B,
            # The global scale of K is a factor of the scores, that of V one of the results.
            "bmm1_scale": params.scale * self._scales.of(k),
            "bmm2_scale": self._scales.of(v),
            # Theirs does not count the present token.
            "window_left": -1 if params.window is None else params.window - 1,
            "sinks": None if params.sinks_H is None else params.sinks_H.float(),
            "kv_layout": k.packing.name.upper(),
        }
        if len(k.planes) > 1:
            options["kv_cache_sf"] = (k.planes[1], v.planes[1])
        run = self._decode_tokens if batch.phase.decodes else self._prompt
        out_THD = run(batch, state, options)
        return out_THD if state.padding_B11 is None else out_THD.masked_fill_(state.padding_B11, 0.0)

    def _decode_tokens(self, batch: AttentionBatch, state: _State, options: dict[str, Any]) -> Tensor:
        """Attend from one new token, or from a few: of one number each, or packed."""
        options["max_seq_len"] = max(batch.seq_lens)
        longest = max(batch.query_lens)
        ragged = min(batch.query_lens) < longest
        if _is_gen(options["query"]):
            if ragged:
                options |= {
                    "q_len_per_req": None,
                    "max_q_len": longest,
                    "cum_seq_lens_q": batch.cu_seqlens_q_B1,
                }
            else:
                options["q_len_per_req"] = longest
            return self._decode.trtllm_batch_decode_with_kv_cache(**options, backend="trtllm-gen")
        options |= {"q_len_per_req": longest, "mask": state.mask_TW}
        if ragged:
            options["q_cu_seq_lens"] = batch.cu_seqlens_q_B1
        elif longest > 1 and state.mask_TW is not None:
            options["mask"] = state.mask_TW.view(-1, longest, state.mask_TW.shape[1])
        out: Tensor = self._decode.xqa_batch_decode_with_kv_cache(**options)
        return out.view_as(options["query"])  # of draft tokens it is [B, n, H, D]

    def _prompt(self, batch: AttentionBatch, state: _State, options: dict[str, Any]) -> Tensor:
        return self._prefill.trtllm_batch_context_with_kv_cache(
            **options,
            max_q_len=max(batch.query_lens),
            max_kv_len=max(batch.seq_lens),
            batch_size=len(batch.query_lens),
            cum_seq_lens_q=batch.cu_seqlens_q_B1,
            cum_seq_lens_kv=state.cu_seqlens_k_B1,
        )


def _is_gen(x: Tensor) -> bool:
    """Return whether trtllm-gen serves here; XQA does elsewhere."""
    return capability(x) in BLACKWELL


def _causal_mask(query_lens: tuple[int, ...]) -> Tensor:
    """Return uint16 [T, W]: for each draft token a bit for those of its request up to itself.

    Rows are whole words of 32 bits.
    """
    width = -(-max(query_lens) // 32) * 32
    place_T = torch.cat([torch.arange(count) for count in query_lens])
    visible_TWb = (torch.arange(width) <= place_T[:, None]).view(len(place_T), -1, WORD)
    return (visible_TWb.int() << torch.arange(WORD)).sum(-1).to(torch.uint16)
