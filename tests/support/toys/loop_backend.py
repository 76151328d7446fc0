"""A toy backend in one file: one query at a time, head by head, counting how often it is called."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.attention.planner.support import NEVER, BackendInfo, Phase, Support
from nibble.cache.view import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams

calls = 0


class Loop:
    def attend(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        global calls  # noqa: PLW0603
        calls += 1
        out, row = torch.empty_like(q_THD), 0
        for i, (new, length) in enumerate(zip(segment.query_lens, segment.seq_lens, strict=True)):
            pages = segment.page_table_BN[i : i + 1, : -(-length // view.page_size)]
            k, v = (view.streams[name].gather_reference(pages)[0] for name in "kv")
            for t in range(new):
                seen = length - new + t + 1
                for head in range(q_THD.shape[1]):
                    kv_head = head * k.shape[1] // q_THD.shape[1]
                    weights = ((k[:seen, kv_head] @ q_THD[row, head]) * spec.scale).softmax(0)
                    out[row, head] = weights @ v[:seen, kv_head]
                row += 1
        return out


BACKEND = BackendInfo(
    name="toy_loop",
    summary="one query at a time",
    adapter=Loop,
    support=(
        Support(
            phase=frozenset(Phase), kind=frozenset({"mha"}), format=frozenset({"toy_int8"}), packing=frozenset({"hnd"}),
            page=frozenset({32}), window=NEVER, softcap=NEVER, sinks=NEVER, prefer=1, source="this test",
        ),
    ),
)  # fmt: skip
