"""fa3: FlashAttention 3, the Hopper kernels. FP8 is E4M3 only, and a quantised query goes with it; no FP4."""

from __future__ import annotations

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row

HOPPER = frozenset({90})
PAGES = frozenset({16, 32, 64, 128, 256})
PROMPT, TOKEN = frozenset({Phase.PREFILL, Phase.EXTEND}), frozenset({Phase.DECODE, Phase.VERIFY})


def _mha(phase: frozenset[Phase], formats: frozenset[str], dims: frozenset[int], prefer: int) -> Row:
    return Row(
        phase=phase,
        kind=frozenset({"mha"}),
        format=formats,
        packing=frozenset({"nhd"}),
        arch=HOPPER,
        page=PAGES,
        dim=dims,
        dtype=frozenset({"bfloat16", "float16"}),
        prefer=prefer,
        cites="vLLM attention_backends.md: FLASH_ATTN FA3, SM 9.x, pages of a multiple of 16, sinks",
    )


WIDE, FP8_DIMS = frozenset({64, 96, 128, 192, 256}), frozenset({64, 128, 256})

BACKEND = BackendInfo(
    name="fa3",
    summary="FlashAttention 3 on Hopper",
    packages=("flash_attn_interface",),
    install="pip install flash-attn-3",
    rows=(
        _mha(PROMPT, frozenset({"bf16", "fp16"}), WIDE, 60),
        _mha(TOKEN, frozenset({"bf16", "fp16"}), WIDE, 45),
        _mha(PROMPT, frozenset({"fp8_e4m3"}), FP8_DIMS, 50),
        _mha(TOKEN, frozenset({"fp8_e4m3"}), FP8_DIMS, 35),
        Row(
            phase=frozenset(Phase),
            kind=frozenset({"mla"}),
            format=frozenset({"bf16", "fp16"}),
            packing=frozenset({"nhd"}),
            arch=HOPPER,
            page=PAGES,
            dim=frozenset({576}),
            dtype=frozenset({"bfloat16", "float16"}),
            window=NEVER,
            softcap=NEVER,
            sinks=NEVER,
            prefer=40,
            cites="vLLM attention_backends.md: FLASH_ATTN_MLA, SM 9.x, no FP8; SGLang: no FP8, no FP4",
        ),
    ),
)
