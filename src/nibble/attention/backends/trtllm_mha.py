"""trtllm_mha: TensorRT-LLM's MHA kernels by way of FlashInfer: trtllm-gen on big Blackwell, XQA elsewhere.

For NVFP4, trtllm-gen wants V's block scales interleaved by four tokens: the packing `hnd_v4`, else as
`hnd`. It also expects a global scale of amax / 448 where checkpoints store amax / (6 * 448); the factor 6
is the adapter's affair.
"""

from __future__ import annotations

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row

DATACENTRE, CONSUMER, HOPPER = frozenset({100, 103}), frozenset({120, 121}), frozenset({90})
TOKEN = frozenset({Phase.DECODE, Phase.VERIFY})
GEN = "vLLM attention_backends.md: FLASHINFER TRTLLM, SM 10.0, pages 16, 32, 64, sinks"
XQA = "SGLang: trtllm_mha decodes on SM90, SM100 and SM120; FlashInfer's XQA"


def _row(
    phase: frozenset[Phase],
    formats: frozenset[str],
    arch: frozenset[int],
    prefer: int,
    cites: str,
    packing: str = "hnd",
    sinks: frozenset[bool] | None = NEVER,
) -> Row:
    return Row(
        phase=phase,
        kind=frozenset({"mha"}),
        format=formats,
        packing=frozenset({packing}),
        arch=arch,
        page=frozenset({16, 32, 64}),
        dim=frozenset({64, 128, 256}),
        dtype=frozenset({"bfloat16", "float16"}),
        softcap=NEVER,
        sinks=sinks,
        prefer=prefer,
        cites=cites,
    )


BACKEND = BackendInfo(
    name="trtllm_mha",
    summary="TensorRT-LLM's MHA kernels through FlashInfer; reads NVFP4 on Blackwell",
    package="flashinfer",
    install="pip install flashinfer-python",
    rows=(
        _row(frozenset(Phase), frozenset({"bf16", "fp16", "fp8_e4m3"}), DATACENTRE, 60, GEN, sinks=None),
        _row(
            frozenset(Phase),
            frozenset({"nvfp4"}),
            DATACENTRE,
            60,
            "SGLang 36340: prefill, decode, verify",
            "hnd_v4",
        ),
        _row(TOKEN, frozenset({"bf16", "fp16"}), HOPPER, 40, f"{XQA}; one H200: 64 x 8K in 0.575 ms"),
        _row(
            TOKEN, frozenset({"fp8_e4m3"}), HOPPER, 55, f"{XQA}; one H200: 64 x 8K in 0.324 ms, the best FP8"
        ),
        _row(TOKEN, frozenset({"bf16", "fp16", "fp8_e4m3"}), CONSUMER, 45, XQA),
        _row(TOKEN, frozenset({"nvfp4"}), CONSUMER, 45, "SGLang 21601: NVFP4 decodes on SM120 with XQA"),
    ),
)
