"""triton: Nibble's own portable kernels, in Triton. Every format, phase and kind of attention on any GPU since Ampere.

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row
from nibble.attention.metadata import AttentionSpec, Segment
from nibble.cache.view import KVView
from nibble.geometry import LATENT
from nibble.kernels import mla, sparse

FORMATS = frozenset(
    {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp4_mx16", "mxfp4", "fp8_e4m3:nvfp4"}
)
LATENT_FORMATS = frozenset(
    {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp4_mx16", "mxfp4"}
)
GPUS = frozenset({80, 86, 89, 90, 100, 103, 120, 121})
PROMPT, PLAIN, HOPPER = frozenset({Phase.PREFILL, Phase.EXTEND}), frozenset({"bf16", "fp16"}), frozenset({90})
STAGED = 22
"""Of prompts over pages of 4 or 8 bits that were dequantised first: every tile of queries would decode them again."""
RACE = "benchmarks/backends.py on one H200"


def _heads(cites: str, staged: int | None = None) -> Row:
    """A row for heads; with `staged`, of prompts on Hopper over plain values, without windows."""
    return Row(
        phase=PROMPT if staged else frozenset(Phase),
        kind=frozenset({"mha"}),
        format=PLAIN if staged else FORMATS,
        packing=frozenset({"nhd", "hnd"}),
        arch=HOPPER if staged else GPUS,
        page=frozenset({16, 32, 64, 128}),
        dim=frozenset(range(16, 257, 16)),
        window=NEVER if staged else None,
        prefer=20,
        staged=staged,
        cites=cites,
    )


def _latent(kind: str, packing: set[str], prefer: int, cites: str, staged: int | None = None) -> Row:
    """A row for latents; with `staged`, of prompts on Hopper over plain values."""
    return Row(
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
        cites=cites,
    )


class Triton:
    """The adapter."""

    def __init__(self) -> None:
        from nibble.kernels.triton import attention

        self._kernel = attention.attend

    def attend(self, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec) -> Tensor:
        # a decode step may be recorded in a CUDA graph, where lengths are not known
        longest = () if segment.phase.decodes else (max(segment.kv_lens),)
        keys = view.keys
        if spec.slots_TK is not None:
            return sparse.attend(q_THD, keys.paged, keys.stream.rope, spec.slots_TK, spec.scale)
        if LATENT in view.streams:
            return mla.attend(q_THD, keys.paged, keys.stream.rope, segment, spec.scale, *longest)
        return self._kernel(q_THD, view.streams["k"].paged, view.streams["v"].paged, segment, spec, *longest)


BACKEND = BackendInfo(
    name="triton",
    summary="Nibble's portable Triton kernels: every format, dequantised in registers",
    packages=("triton",),
    install="pip install triton",
    adapter=Triton,
    graphs=True,
    rows=(
        _heads("on one H200, decoding 64 x 8K: nvfp4 in 0.255 ms (2.4 TB/s), bf16 in 0.495 ms (4.3 TB/s)"),
        _heads(
            f"{RACE}: 8K on 32K of NVFP4 with sinks in 13.7 ms over staged pages, 16.3 as they are",
            staged=STAGED,
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
