"""sdpa: the attention that torch brings. On a GPU its fused kernels, for new tokens over a prefix in any format.

Elsewhere quantised pages are staged (attention/layer.py). No score capping and no sinks: torch's functions have
neither.
"""

from __future__ import annotations

from nibble.attention.planner.support import (
    ALL,
    BLACKWELL,
    HALF_DTYPES,
    HOPPER,
    NEVER,
    PROMPT,
    BackendInfo,
    Origin,
    Support,
)
from nibble.kernels import PREFILL_WORKSPACE

CUDNN_DIM = 128
"""The widest heads that cuDNN's kernel takes."""

BACKEND = BackendInfo(
    name="sdpa",
    summary="what torch brings: on GPUs its fused kernels, for prompts over any format; last bits vary with the batch",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.sdpa:SDPA",
    support=(
        Support(
            phase=PROMPT,
            kind={"mha"},
            format=None,
            packing={"nhd", "hnd"},
            arch=HOPPER | BLACKWELL,
            dim=set(range(16, CUDNN_DIM + 1, 8)),
            dtype=HALF_DTYPES,
            # A window needs a mask, and the fused kernels take none.
            window=NEVER,
            softcap=NEVER,
            sinks=NEVER,
            workspace=PREFILL_WORKSPACE,
            source="benchmarks/extend.py on one H200, 8K new on 32K stored: nvfp4 at 614 TFLOP/s, bf16 at 595",
        ),
        Support(
            phase=ALL,
            kind={"mha"},
            format={"fp32", "bf16", "fp16"},
            packing={"nhd", "hnd"},
            softcap=NEVER,
            sinks=NEVER,
            # torch's function knows no pages, so they are copied into one tensor first.
            gathers=True,
            source="tests/conformance",
        ),
    ),
)
