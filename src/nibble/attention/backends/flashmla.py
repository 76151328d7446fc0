"""flashmla: DeepSeek's FlashMLA. Dense decoding on Hopper, and sparse attention over a 16-bit cache.

The sparse kernel sees the cache as one flat axis of tokens. In a 16-bit pool the slot numbers of the paged
cache are positions on that axis (`paged`); offsets into a gathered buffer (`ragged`) are too. In FP8 it reads records
of 656 bytes, where they lie.
"""

from __future__ import annotations

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row

README = "deepseek-ai/FlashMLA README"


def _dense(formats: frozenset[str], dtype: frozenset[str], prefer: int, cites: str) -> Row:
    return Row(
        phase=frozenset({Phase.DECODE, Phase.VERIFY}),
        kind=frozenset({"mla"}),
        format=formats,
        packing=frozenset({"nhd"}),
        arch=frozenset({90}),
        page=frozenset({64}),
        dim=frozenset({576}),
        dtype=dtype,
        window=NEVER,
        softcap=NEVER,
        sinks=NEVER,
        prefer=prefer,
        cites=cites,
    )


def _sparse(
    phase: frozenset[Phase], kv_format: str, packing: str, addressing: frozenset[str], cites: str
) -> Row:
    """A row of the sparse kernels."""
    return Row(
        phase=phase,
        kind=frozenset({"dsa"}),
        format=frozenset({kv_format}),
        packing=frozenset({packing}),
        arch=frozenset({90, 100}),
        page=frozenset({64}),
        dim=frozenset({576}),
        dtype=frozenset({"bfloat16"}),
        window=NEVER,
        softcap=NEVER,
        sinks=NEVER,
        addressing=addressing,
        prefer=60,
        cites=cites,
    )


BACKEND = BackendInfo(
    name="flashmla",
    summary="FlashMLA: dense MLA decoding on Hopper, sparse attention on Hopper and Blackwell",
    packages=("flash_mla",),
    install="build deepseek-ai/FlashMLA from source",
    rows=(
        _dense(
            frozenset({"bf16", "fp16"}),
            frozenset({"bfloat16", "float16"}),
            60,
            f"{README}: dense decoding, SM90; one H200: 64 x 8K, 128 heads in 0.253 ms",
        ),
        _dense(
            frozenset({"fp8_e4m3"}),
            frozenset({"bfloat16"}),
            50,
            "vLLM attention_backends.md: FLASHMLA, fp8_e4m3, page 64",
        ),
        _sparse(
            frozenset(Phase),
            "bf16",
            "nhd",
            frozenset({"paged", "ragged"}),
            f"{README}: sparse prefill, SM90 and SM100, flat bf16; the index cache wants pages of 64",
        ),
        _sparse(
            frozenset({Phase.DECODE, Phase.VERIFY}),
            "fp8_ds_mla",
            "record",
            frozenset({"paged"}),
            f"{README}: sparse decoding, FP8 in records of 656 bytes; one H200: 128 x 128 heads in 0.182 ms",
        ),
    ),
)
