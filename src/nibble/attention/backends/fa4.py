"""fa4: FlashAttention 4 (CuTe DSL) on Hopper and Blackwell. It reads 16-bit caches only; all else is staged.

MHA wants pages of 128. MLA addresses single tokens, which one head per token makes possible over any page
size. Decoding on Hopper has no split-KV, so it slows down with the context.
"""

from __future__ import annotations

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row

HOPPER, BLACKWELL = frozenset({90}), frozenset({100, 103})
PROMPT, TOKEN = frozenset({Phase.PREFILL, Phase.EXTEND}), frozenset({Phase.DECODE})
CITES = "SGLang attention_backend.mdx: FA4 on SM90 and SM100; MHA page 128, MLA page 1; vLLM: no sinks"


def _mha(phase: frozenset[Phase], arch: frozenset[int], prefer: int) -> Row:
    return Row(
        phase=phase,
        kind=frozenset({"mha"}),
        format=frozenset({"bf16", "fp16"}),
        packing=frozenset({"nhd"}),
        arch=arch,
        page=frozenset({128}),
        dim=frozenset({64, 96, 128}),
        dtype=frozenset({"bfloat16", "float16"}),
        sinks=NEVER,
        prefer=prefer,
        cites=CITES,
    )


BACKEND = BackendInfo(
    name="fa4",
    summary="FlashAttention 4 on Hopper and Blackwell, 16-bit caches",
    packages=("flash_attn.cute",),
    install="pip install flash-attn-4",
    rows=(
        _mha(PROMPT, BLACKWELL, 60),
        _mha(PROMPT, HOPPER, 45),
        _mha(TOKEN, BLACKWELL, 35),
        _mha(TOKEN, HOPPER, 15),
        Row(
            phase=PROMPT,
            kind=frozenset({"mla"}),
            format=frozenset({"bf16", "fp16"}),
            packing=frozenset({"nhd"}),
            arch=BLACKWELL,
            dim=frozenset({576}),
            dtype=frozenset({"bfloat16", "float16"}),
            window=NEVER,
            softcap=NEVER,
            sinks=NEVER,
            prefer=50,
            cites=CITES,
        ),
    ),
)
