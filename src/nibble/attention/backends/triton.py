"""triton: Nibble's own portable kernels, in Triton. Every format and phase of MHA on any GPU since Ampere."""

from __future__ import annotations

from nibble.attention.capability import BackendInfo, Phase, Row

BACKEND = BackendInfo(
    name="triton",
    summary="Nibble's portable Triton kernels: every format, dequantised in registers",
    package="triton",
    install="pip install triton",
    rows=(
        Row(
            phase=frozenset(Phase),
            kind=frozenset({"mha"}),
            format=frozenset(
                {
                    "fp32",
                    "bf16",
                    "fp16",
                    "fp8_e4m3",
                    "fp8_e5m2",
                    "nvfp4",
                    "fp4_mx16",
                    "mxfp4",
                    "fp8_e4m3:nvfp4",
                }
            ),
            packing=frozenset({"nhd", "hnd"}),
            arch=frozenset({80, 86, 89, 90, 100, 103, 120, 121}),
            page=frozenset({16, 32, 64, 128}),
            dim=frozenset(range(16, 257, 16)),
            prefer=20,
            cites="a Triton nvfp4 decode kernel on one H200: 64 x 8K in 0.484 ms, 1.25 TB/s",
        ),
    ),
)
