"""triton: Nibble's own portable kernels, in Triton. Every format and phase of MHA and MLA on any GPU since Ampere.

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row
from nibble.attention.metadata import AttentionSpec, Segment
from nibble.cache.view import KVView
from nibble.geometry import LATENT
from nibble.kernels import mla


class Triton:
    """The adapter."""

    def __init__(self) -> None:
        from nibble.kernels.triton import attention

        self._kernel = attention.attend

    def attend(self, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec) -> Tensor:
        # a decode step may be recorded in a CUDA graph, where lengths are not known
        longest = () if segment.phase.decodes else (max(segment.kv_lens),)
        if LATENT in view.streams:
            keys = view.keys
            return mla.attend(q_THD, keys.paged, keys.stream.rope, segment, spec.scale, *longest)
        return self._kernel(q_THD, view.streams["k"].paged, view.streams["v"].paged, segment, spec, *longest)


BACKEND = BackendInfo(
    name="triton",
    summary="Nibble's portable Triton kernels: every format, dequantised in registers",
    package="triton",
    install="pip install triton",
    adapter=Triton,
    graphs=True,
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
            cites="on one H200, decoding 64 x 8K: nvfp4 in 0.255 ms (2.4 TB/s), bf16 in 0.495 ms (4.3 TB/s)",
        ),
        Row(
            phase=frozenset(Phase),
            kind=frozenset({"mla"}),
            format=frozenset({"bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp4_mx16"}),
            packing=frozenset({"nhd", "hnd"}),
            arch=frozenset({80, 86, 89, 90, 100, 103, 120, 121}),
            page=frozenset({16, 32, 64, 128}),
            dim=frozenset(range(96, 641, 32)),
            dtype=frozenset({"bfloat16", "float16"}),
            window=NEVER,
            softcap=NEVER,
            sinks=NEVER,
            prefer=20,
            cites="on one H200, decoding 64 x 8K: bf16 in 0.147 ms with 16 heads, 0.42 ms with 128",
        ),
    ),
)
