"""cutlass_mla: the CUTLASS MLA kernel for datacentre Blackwell. It decodes only, and wants pages of 128."""

from __future__ import annotations

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row

BACKEND = BackendInfo(
    name="cutlass_mla",
    summary="CUTLASS MLA decoding on datacentre Blackwell",
    packages=("sgl_kernel",),
    install="pip install sgl-kernel",
    rows=(
        Row(
            phase=frozenset({Phase.DECODE, Phase.VERIFY}),
            kind=frozenset({"mla"}),
            format=frozenset({"bf16", "fp16", "fp8_e4m3"}),
            packing=frozenset({"nhd"}),
            arch=frozenset({100, 103}),
            page=frozenset({128}),
            dim=frozenset({576}),
            dtype=frozenset({"bfloat16", "float16"}),
            window=NEVER,
            softcap=NEVER,
            sinks=NEVER,
            prefer=40,
            cites="vLLM attention_backends.md: CUTLASS_MLA, SM 10.x, page 128; SGLang: spec topk=1",
        ),
    ),
)
