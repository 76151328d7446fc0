"""cutlass_mla: the CUTLASS kernel for MLA on big Blackwell, by way of FlashInfer. A query of one token, of 128 heads.

Draft tokens are requests of their own, each as long as it sees. Fewer heads are filled up with zeros. The kernel has
DeepSeek's scale of scores built in, 1 / sqrt(192), so a query is multiplied by what another scale differs by. A wrapper
is planned for a number of requests, once; lengths and pages are given to each run, on the device, so a CUDA graph may
hold a decode step, whose first run is not recorded.

Shape suffixes: T tokens, N pages of a request, H query heads, D values of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.attention.backends.adapters.vendor import Workspace, latents, some_tokens
from nibble.attention.backends.cutlass_mla import HEADS, WORKSPACE
from nibble.attention.backends.flashinfer import PACKAGE, import_flashinfer
from nibble.attention.backends.vendor import RANK, ROPE
from nibble.attention.planner.support import Phase
from nibble.cache.view import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams

SCALE = 1 / math.sqrt(128 + 64)
WHOLE = 128
"""A table's pages hold a multiple of so many tokens."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """A batch, a token to a request."""

    page_table_TN: Tensor
    lens_T: Tensor
    padding_T11: Tensor


class CutlassMla:
    """The adapter. Its workspace and wrappers serve one step at a time."""

    def __init__(self) -> None:
        self._mla = import_flashinfer(f"{PACKAGE}.mla")
        self._workspace = Workspace(WORKSPACE)
        self._wrappers: dict[tuple[int, int, torch.dtype], Any] = {}
        self._known: WeakKeyDictionary[AttentionBatch, _Rows] = WeakKeyDictionary()

    def attend(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        latent = latents(view, "CUTLASS's MLA kernel")
        if batch not in self._known:
            self._known[batch] = _rows(batch, view.page_size)
        rows, heads = self._known[batch], q_THD.shape[1]
        query = q_THD if math.isclose(params.scale, SCALE, rel_tol=1e-5) else q_THD * (params.scale / SCALE)
        if heads < HEADS:
            query = torch.nn.functional.pad(query, (0, 0, 0, HEADS - heads))
        out_THD: Tensor = self._wrapper(query, rows, view.page_size).run(
            query=query.contiguous(),
            kv_cache=latent.planes[0][:, :, 0],
            kv_len=rows.lens_T,
            page_table=rows.page_table_TN,
        )
        return out_THD[:, :heads].masked_fill(rows.padding_T11, 0.0)

    def _wrapper(self, query: Tensor, rows: _Rows, page: int) -> Any:
        count = len(query)
        key = (count, page, query.dtype)
        if key not in self._wrappers:
            scratch = self._workspace.on(query.device)
            made = self._mla.BatchMLAPagedAttentionWrapper(scratch, backend="cutlass")
            made.plan(
                metadata=self._mla.MLAPlanMetadata.dense(
                    torch.arange(count + 1, dtype=torch.int32),
                    torch.zeros(count, WHOLE // page, dtype=torch.int32),
                    torch.ones(count, dtype=torch.int32),
                ),
                num_heads=HEADS,
                head_dim_ckv=RANK,
                head_dim_kpe=ROPE,
                page_size=page,
                causal=True,
                sm_scale=SCALE,
                q_data_type=query.dtype,
                kv_data_type=query.dtype,
            )
            self._wrappers[key] = made
        return self._wrappers[key]


def _rows(batch: AttentionBatch, page: int) -> _Rows:
    page_table_TN, lens_T = batch.page_table_BN, batch.seq_lens_B
    if batch.phase is not Phase.DECODE:
        total, counts_B = batch.stop - batch.start, batch.cu_seqlens_q_B1.diff()
        page_table_TN = page_table_TN.repeat_interleave(counts_B, 0, output_size=total)
        after_B = (
            batch.seq_lens_B - batch.cu_seqlens_q_B1[1:]
        )  # how far a token's place in the step is from its length
        lens_T = after_B.repeat_interleave(counts_B, output_size=total)
        lens_T = lens_T + torch.arange(1, total + 1, dtype=torch.int32, device=lens_T.device)
    lacking = -page_table_TN.shape[1] % (WHOLE // page)
    return _Rows(torch.nn.functional.pad(page_table_TN, (0, lacking)).contiguous(), *some_tokens(lens_T))
