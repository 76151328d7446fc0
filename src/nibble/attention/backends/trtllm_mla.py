"""trtllm_mla: TensorRT-LLM's MLA kernels through FlashInfer, for big Blackwell. They read no block scale."""

from __future__ import annotations

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row

BACKEND = BackendInfo(
    name="trtllm_mla",
    summary="TensorRT-LLM's MLA kernels through FlashInfer, on datacentre Blackwell",
    packages=("flashinfer",),
    install="pip install flashinfer-python",
    rows=(
        Row(
            phase=frozenset(Phase),
            kind=frozenset({"mla"}),
            format=frozenset({"bf16", "fp16", "fp8_e4m3"}),
            packing=frozenset({"nhd"}),
            arch=frozenset({100, 103}),
            page=frozenset({32, 64}),
            dim=frozenset({576}),
            dtype=frozenset({"bfloat16", "float16"}),
            window=NEVER,
            softcap=NEVER,
            sinks=NEVER,
            prefer=60,
            cites="vLLM attention_backends.md: FLASHINFER_MLA, pages 32, 64; FlashInfer 4644: no FP4 scales",
        ),
    ),
)
