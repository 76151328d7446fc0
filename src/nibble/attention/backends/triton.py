"""triton: Nibble's own portable kernels, in Triton.

They serve every format, phase and kind of attention on any GPU since Ampere.
"""

from __future__ import annotations

from typing import Any

from nibble.attention.planner.support import ALL, GPUS, HALF_DTYPES, NEVER, BackendInfo, Origin, Support

PAGES = frozenset({16, 32, 64, 128})
LATENTS: dict[str, Any] = {
    "phase": ALL,
    "format": {
        "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp4_mx16", "mxfp4"
    },
    "arch": GPUS, "page": PAGES, "dim": set(range(96, 641, 32)), "dtype": HALF_DTYPES,
    "window": NEVER, "softcap": NEVER, "sinks": NEVER,
}  # fmt: skip

BACKEND = BackendInfo(
    name="triton",
    summary="Nibble's portable Triton kernels: every format, dequantised in registers",
    origin=Origin.PORTABLE,
    packages=("triton",),
    install="pip install triton",
    adapter="nibble.attention.backends.adapters.triton:Triton",
    graphs=True,
    support=(
        Support(
            phase=ALL,
            kind={"mha"},
            format={
                "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp4_mx16", "mxfp4", "fp8_e4m3:nvfp4"
            },
            packing={"nhd", "hnd"},
            arch=GPUS,
            page=PAGES,
            dim=set(range(16, 257, 16)),
            source="on one H200, decoding 64 x 8K: nvfp4 in 0.255 ms (2.4 TB/s), bf16 in 0.495 ms (4.3 TB/s)",
        ),
        Support(
            **LATENTS,
            kind={"mla"},
            packing={"nhd", "hnd"},
            source="on one H200, decoding 64 x 8K: bf16 in 0.147 ms with 16 heads, 0.42 ms with 128",
        ),
        Support(
            **LATENTS, kind={"dsa"}, packing={"record"}, source="benchmarks/sparse_decode.py: one run of bytes"
        ),
        Support(**LATENTS, kind={"dsa"}, packing={"nhd", "hnd"}, source="benchmarks/sparse_decode.py"),
    ),
)  # fmt: skip
