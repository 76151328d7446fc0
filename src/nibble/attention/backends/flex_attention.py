"""flex_attention: torch's FlexAttention over gathered pages. On a GPU compiled, on a CPU as torch interprets it.

Quantised pages are staged (attention/dequantize.py).
"""

from __future__ import annotations

from nibble.attention.planner.support import MAX_STAGED_TOKENS, BackendInfo, Phase, Support

COPIES = 2
"""Of gathered pages, while what lies behind a request's tokens is cleared."""


def _row(arch: set[int], prefer: int, cites: str) -> Support:
    return Support(
        phase=frozenset(Phase),
        kind=frozenset({"mha"}),
        format=frozenset({"fp32", "bf16", "fp16"}),
        packing=frozenset({"nhd", "hnd"}),
        arch=frozenset(arch),
        prefer=prefer,
        workspace=COPIES * MAX_STAGED_TOKENS,
        source=cites,
    )


BACKEND = BackendInfo(
    name="flex_attention",
    summary="torch's FlexAttention, compiled, over gathered pages",
    adapter="nibble.attention.backends.adapters.flex_attention:Flex",
    support=(
        _row(
            {80, 86, 89, 90, 100, 103, 120, 121},
            -13,
            "vLLM attention_backends.md: FLEX_ATTENTION, any page and head size; sinks by the log-sum-exp",
        ),
        _row({0}, -20, "tests/conformance"),
    ),
)
