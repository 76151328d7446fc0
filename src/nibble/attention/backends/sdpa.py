"""sdpa: the attention that torch brings. On a GPU its fused kernels, for new tokens over a prefix in any format.

Elsewhere, and where a window asks for a mask, torch.nn.functional.scaled_dot_product_attention request by request; for
that quantised pages are staged (attention/dequantize.py). No score capping and no sinks: torch's functions have neither.

Shape suffixes: T tokens, n new tokens of a request, L stored tokens, H query heads, G KV heads, D values of a head.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.attention.metadata import AttentionBatch, AttentionParams
from nibble.attention.planner.support import NEVER, PROMPT, BackendInfo, Phase, Support
from nibble.cache.view import KVView
from nibble.kernels.attention import prefill

HALVES = (torch.bfloat16, torch.float16)
CUDNN_DIM = 128
"""The widest heads that cuDNN's kernel takes."""


class SDPA:
    """The adapter. How a step's requests are cut is worked out once for all layers, and forgotten with its segments."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[AttentionBatch, dict[bool, tuple[prefill.QueryBlock, ...]]] = (
            WeakKeyDictionary()
        )

    def attend(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        k, v = view.streams["k"].paged, view.streams["v"].paged
        fused = q_THD.is_cuda and q_THD.dtype in HALVES and prefill.serves(k, v)
        if not fused or spec.window is not None or segment.phase.decodes:
            return _masked(q_THD, view, segment, spec)
        known, cudnn = self._known.setdefault(segment, {}), _has_cudnn(q_THD)
        if cudnn not in known:
            known[cudnn] = prefill.plan_blocks(
                segment.query_lens, segment.seq_lens, segment.page_table_BN, view.page_size, cudnn=cudnn
            )
        return prefill.prefill_attention(q_THD, k, v, known[cudnn], spec)


def _has_cudnn(q_THD: Tensor) -> bool:
    """Whether cuDNN's kernel is the faster one here: on data centre GPUs since Hopper."""
    major, _ = torch.cuda.get_device_capability(q_THD.device)
    return major in {9, 10} and q_THD.shape[2] <= CUDNN_DIM and torch.backends.cudnn.is_available()


def _masked(q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
    """Request by request, with a mask."""
    pieces = []
    for i, q_nHD in enumerate(q_THD.split(segment.query_lens)):
        length = segment.seq_lens[i]
        pages = segment.page_table_BN[i : i + 1, : -(-length // view.page_size)]
        k_GLD, v_GLD = (
            view.streams[name].dequantize(pages, q_THD.dtype)[0, :length].transpose(0, 1) for name in "kv"
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
    summary="what torch brings: on GPUs its fused kernels, for prompts over any format; last bits vary with the batch",
    adapter=SDPA,
    support=(
        Support(
            phase=PROMPT,
            kind=frozenset({"mha"}),
            format=None,
            packing=frozenset({"nhd", "hnd"}),
            arch=frozenset({90, 100, 103}),
            dim=frozenset(range(16, CUDNN_DIM + 1, 8)),
            dtype=frozenset({"bfloat16", "float16"}),
            window=NEVER,
            softcap=NEVER,
            sinks=NEVER,
            prefer=40,
            workspace=prefill.WORKSPACE,
            source="benchmarks/extend.py on one H200, 8K new on 32K stored: nvfp4 at 614 TFLOP/s, bf16 at 595",
        ),
        Support(
            phase=frozenset(Phase),
            kind=frozenset({"mha"}),
            format=frozenset({"fp32", "bf16", "fp16"}),
            packing=frozenset({"nhd", "hnd"}),
            softcap=NEVER,
            sinks=NEVER,
            prefer=-12,
            source="tests/conformance",
        ),
    ),
)
