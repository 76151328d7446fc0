"""cutlass_mla: the CUTLASS kernel for MLA on big Blackwell, by way of FlashInfer. A query of one token, of 128 heads.

Draft tokens are requests of their own, each as long as it sees. Fewer heads are filled up with zeros. Lengths and pages
are given to each run, on the device, so a CUDA graph may hold a decode step, whose first run is not recorded.

Shape suffixes: T tokens, N pages of a request, H query heads, D values of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibble.attention.backends.adapters.vendor import Workspace, check_latents, clamp_lens
from nibble.attention.backends.cutlass_mla import HEADS, WORKSPACE
from nibble.attention.backends.flashinfer import PACKAGE, import_flashinfer
from nibble.attention.backends.vendor import RANK, ROPE
from nibble.attention.layer import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import Phase

SCALE = 1 / math.sqrt(128 + 64)
"""DeepSeek's scale of scores, which is built into the kernel."""
TABLE_TOKENS = 128
"""The pages in a row of the page table hold a multiple of so many tokens."""


@dataclass(frozen=True, slots=True)
class _State:
    """A batch, with a request for each token."""

    page_table_TN: Tensor
    lens_T: Tensor
    padding_T11: Tensor


class CutlassMla(AttentionBackend):
    """The adapter. Its workspace and wrappers serve one step at a time."""

    def __init__(self) -> None:
        self._mla = import_flashinfer(f"{PACKAGE}.mla")
        self._workspace = Workspace(WORKSPACE)
        # By number of tokens, page size and dtype. A wrapper is planned once: lengths and pages are given to each run.
        self._wrappers: dict[tuple[int, int, torch.dtype], Any] = {}

    def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> _State:
        """Make a request of each token."""
        return _split_tokens(batch, view.page_size)

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _State
    ) -> Tensor:
        """Fill the heads up to those of the kernel, and call it."""
        latent, heads = check_latents(view, "CUTLASS's MLA kernel"), q_THD.shape[1]
        # The kernel scales scores by SCALE, so the query takes what another scale differs by.
        query = q_THD if math.isclose(params.scale, SCALE, rel_tol=1e-5) else q_THD * (params.scale / SCALE)
        if heads < HEADS:
            query = torch.nn.functional.pad(query, (0, 0, 0, HEADS - heads))
        out_THD: Tensor = self._wrapper(query, view.page_size).run(
            query=query.contiguous(),
            kv_cache=latent.planes[0][:, :, 0],
            kv_len=state.lens_T,
            page_table=state.page_table_TN,
        )
        return out_THD[:, :heads].masked_fill(state.padding_T11, 0.0)

    def _wrapper(self, query: Tensor, page_size: int) -> Any:
        count = len(query)
        key = (count, page_size, query.dtype)
        if key not in self._wrappers:
            wrapper = self._mla.BatchMLAPagedAttentionWrapper(
                self._workspace.on(query.device), backend="cutlass"
            )
            wrapper.plan(
                metadata=self._mla.MLAPlanMetadata.dense(
                    torch.arange(count + 1, dtype=torch.int32),
                    torch.zeros(count, TABLE_TOKENS // page_size, dtype=torch.int32),
                    torch.ones(count, dtype=torch.int32),
                ),
                num_heads=HEADS,
                head_dim_ckv=RANK,
                head_dim_kpe=ROPE,
                page_size=page_size,
                causal=True,
                sm_scale=SCALE,
                q_data_type=query.dtype,
                kv_data_type=query.dtype,
            )
            self._wrappers[key] = wrapper
        return self._wrappers[key]


def _split_tokens(batch: AttentionBatch, page_size: int) -> _State:
    page_table_TN, lens_T = batch.page_table_BN, batch.seq_lens_B
    if batch.phase is not Phase.DECODE:
        total, counts_B = batch.stop - batch.start, batch.cu_seqlens_q_B1.diff()
        page_table_TN = page_table_TN.repeat_interleave(counts_B, 0, output_size=total)
        # A token sees as many as its place in the step and this difference, which its request's last token has too.
        after_B = batch.seq_lens_B - batch.cu_seqlens_q_B1[1:]
        lens_T = after_B.repeat_interleave(counts_B, output_size=total)
        lens_T = lens_T + torch.arange(1, total + 1, dtype=torch.int32, device=lens_T.device)
    padding = -page_table_TN.shape[1] % (TABLE_TOKENS // page_size)
    return _State(torch.nn.functional.pad(page_table_TN, (0, padding)).contiguous(), *clamp_lens(lens_T))
