"""triton: Nibble's own portable kernels, in Triton.

They serve every format, phase and kind of attention on any GPU since Ampere.
"""

from __future__ import annotations

from typing import Any

from nibble.attention.planner.support import NEVER, PROMPT, WITH, BackendInfo, Phase, Support

FORMATS = frozenset(
    {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp4_mx16", "mxfp4", "fp8_e4m3:nvfp4"}
)
LATENT_FORMATS = frozenset(
    {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp4_mx16", "mxfp4"}
)
FP4 = frozenset({"nvfp4", "fp4_mx16", "mxfp4"})
GPUS = frozenset({80, 86, 89, 90, 100, 103, 120, 121})
PLAIN, HOPPER = frozenset({"bf16", "fp16"}), frozenset({90})
STAGED = 22
"""Of prompts over pages of 4 or 8 bits that were dequantised first: every tile of queries would decode them again."""
RACE = "benchmarks/backends.py on one H200"


def _heads(cites: str, staged: int | None = None, **facts: frozenset[Any]) -> Support:
    """A row for heads; with `staged`, of prompts on Hopper over plain values."""
    given: dict[str, Any] = {"phase": PROMPT if staged else frozenset(Phase)}
    return Support(
        kind=frozenset({"mha"}),
        format=PLAIN if staged else FORMATS,
        packing=frozenset({"nhd", "hnd"}),
        arch=HOPPER if staged else GPUS,
        page=frozenset({16, 32, 64, 128}),
        dim=frozenset(range(16, 257, 16)),
        prefer=20,
        staged=staged,
        source=cites,
        **given | facts,
    )


def _latent(kind: str, packing: set[str], prefer: int, cites: str, staged: int | None = None) -> Support:
    """A row for latents; with `staged`, of prompts on Hopper over plain values."""
    return Support(
        phase=PROMPT if staged else frozenset(Phase),
        kind=frozenset({kind}),
        format=PLAIN if staged else LATENT_FORMATS,
        packing=frozenset(packing),
        arch=HOPPER if staged else GPUS,
        page=frozenset({16, 32, 64, 128}),
        dim=frozenset(range(96, 641, 32)),
        dtype=frozenset({"bfloat16", "float16"}),
        window=NEVER,
        softcap=NEVER,
        sinks=NEVER,
        prefer=prefer,
        staged=staged,
        source=cites,
    )


BACKEND = BackendInfo(
    name="triton",
    summary="Nibble's portable Triton kernels: every format, dequantised in registers",
    packages=("triton",),
    install="pip install triton",
    adapter="nibble.attention.backends.adapters.triton:Triton",
    graphs=True,
    support=(
        _heads("on one H200, decoding 64 x 8K: nvfp4 in 0.255 ms (2.4 TB/s), bf16 in 0.495 ms (4.3 TB/s)"),
        _heads(
            f"{RACE}: 8K on 32K of NVFP4 with sinks in 12.3 ms over staged pages, 15.9 as they are",
            STAGED,
            window=NEVER,
        ),
        _heads(
            f"{RACE}: windows of 4096, 8K on 32K of NVFP4 in 1.48 ms over staged pages, 2.21 as they are",
            STAGED,
            window=WITH,
            softcap=WITH,
            sinks=NEVER,
        ),
        _heads(
            f"{RACE}: windows of 128, 8K of NVFP4 in 0.155 ms over staged pages, 0.19 as they are; of FP8 0.146",
            STAGED,
            phase=frozenset({Phase.PREFILL}),
            window=WITH,
            sinks=WITH,
            stored=FP4,
        ),
        _latent(
            "mla",
            {"nhd", "hnd"},
            20,
            f"{RACE}: 8K on 32K of NVFP4, 128 heads, 1.1 x as fast over staged pages, of FP8 1.2 x",
            STAGED,
        ),
        _latent(
            "mla",
            {"nhd", "hnd"},
            20,
            "on one H200, decoding 64 x 8K: bf16 in 0.147 ms with 16 heads, 0.42 ms with 128",
        ),
        _latent("dsa", {"record"}, 22, "benchmarks/sparse_decode.py; a token is one run of bytes"),
        _latent("dsa", {"nhd", "hnd"}, 20, "benchmarks/sparse_decode.py"),
    ),
)
