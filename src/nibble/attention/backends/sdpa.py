"""sdpa: torch's scaled_dot_product_attention, request by request, over pages in a plain dtype.

Quantised pages reach it staged (attention/staging.py). No score capping and no sinks: torch's function has neither.

Shape suffixes: T tokens, n new tokens of a request, L stored tokens, H query heads, G KV heads, D values of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row
from nibble.attention.metadata import AttentionSpec, Segment
from nibble.cache.view import KVView


class SDPA:
    """The adapter of torch.nn.functional.scaled_dot_product_attention."""

    def attend(self, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec) -> Tensor:
        pieces = []
        for i, q_nHD in enumerate(q_THD.split(segment.q_lens)):
            length = segment.kv_lens[i]
            pages = segment.pages_BN[i : i + 1, : -(-length // view.page_size)]
            k_GLD, v_GLD = (
                view.streams[name].gather(pages)[0, :length].to(q_THD.dtype).transpose(0, 1) for name in "kv"
            )
            out_HnD = F.scaled_dot_product_attention(
                q_nHD.transpose(0, 1)[None],
                k_GLD[None],
                v_GLD[None],
                attn_mask=_mask(len(q_nHD), length, spec.window, q_THD.device),
                scale=spec.scale,
                enable_gqa=True,
            )[0]
            pieces.append(out_HnD.transpose(0, 1))
        return torch.cat(pieces)


def _mask(n: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [n, L]: which stored tokens each new token sees."""
    query = torch.arange(length - n, length, device=device)[:, None]
    key = torch.arange(length, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


BACKEND = BackendInfo(
    name="sdpa",
    summary="torch's scaled_dot_product_attention; quantised pages are staged for it; last bits vary with the batch",
    adapter=SDPA,
    rows=(
        Row(
            phase=frozenset(Phase),
            kind=frozenset({"mha"}),
            format=frozenset({"fp32", "bf16", "fp16"}),
            packing=frozenset({"nhd", "hnd"}),
            softcap=NEVER,
            sinks=NEVER,
            prefer=-12,
            cites="tests/conformance",
        ),
    ),
)
