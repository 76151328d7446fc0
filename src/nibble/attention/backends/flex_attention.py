"""flex_attention: torch's FlexAttention over gathered pages. On a GPU compiled, on a CPU as torch interprets it.

Quantised pages are staged (attention/layer.py).
"""

from __future__ import annotations

from nibble.attention.planner.support import ALL, GPUS, MAX_STAGED_TOKENS, BackendInfo, Origin, Support

COPIES = 2
"""Of gathered pages, while what lies behind a request's tokens is cleared."""

BACKEND = BackendInfo(
    name="flex_attention",
    summary="torch's FlexAttention, compiled, over gathered pages",
    origin=Origin.PORTABLE,
    adapter="nibble.attention.backends.adapters.flex_attention:Flex",
    support=(
        Support(
            phase=ALL,
            kind={"mha"},
            format={"fp32", "bf16", "fp16"},
            packing={"nhd", "hnd"},
            arch=GPUS | {0},
            gathers=True,
            workspace=COPIES * MAX_STAGED_TOKENS,
            source="vLLM attention_backends.md: FLEX_ATTENTION, any page and head size; sinks by the log-sum-exp",
        ),
    ),
)
