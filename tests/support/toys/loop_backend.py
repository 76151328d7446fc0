"""A toy backend in one file: one query at a time, head by head, counting how often it is called."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.attention.planner.support import ALL, NEVER, BackendInfo, Support
from nibble.attention.step import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams

calls = 0


class Loop(AttentionBackend):
    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: None
    ) -> Tensor:
        global calls  # noqa: PLW0603
        calls += 1
        out, row = torch.empty_like(q_THD), 0
        for i, (new, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            pages = batch.page_table_BN[i : i + 1, : -(-length // view.page_size)]
            k, v = (view.streams[name].gather_reference(pages)[0] for name in "kv")
            for t in range(new):
                seen = length - new + t + 1
                for head in range(q_THD.shape[1]):
                    kv_head = head * k.shape[1] // q_THD.shape[1]
                    weights = ((k[:seen, kv_head] @ q_THD[row, head]) * params.scale).softmax(0)
                    out[row, head] = weights @ v[:seen, kv_head]
                row += 1
        return out


BACKEND = BackendInfo(
    name="toy_loop",
    summary="one query at a time",
    adapter=Loop,
    support=(
        Support(
            phase=ALL, kind={"mha"}, format={"toy_int8"}, packing={"hnd"},
            page={32}, window=NEVER, softcap=NEVER, sinks=NEVER, source="this test",
        ),
    ),
)  # fmt: skip
