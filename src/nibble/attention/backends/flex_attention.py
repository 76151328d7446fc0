"""flex_attention: torch's FlexAttention, compiled. Windows and caps are expressions; reads plain formats."""

from __future__ import annotations

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row

BACKEND = BackendInfo(
    name="flex_attention",
    summary="torch's FlexAttention, compiled, over gathered pages",
    rows=(
        Row(
            phase=frozenset({Phase.PREFILL, Phase.EXTEND, Phase.DECODE}),
            kind=frozenset({"mha"}),
            format=frozenset({"fp32", "bf16", "fp16"}),
            packing=frozenset({"nhd", "hnd"}),
            arch=frozenset({80, 86, 89, 90, 100, 103, 120, 121}),
            sinks=NEVER,
            prefer=-5,
            cites="vLLM attention_backends.md: FLEX_ATTENTION, any page and head size, no sinks; "
            "SGLang: no draft tokens, no CUDA graph",
        ),
    ),
)
