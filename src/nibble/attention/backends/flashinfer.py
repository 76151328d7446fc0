"""flashinfer: FlashInfer's FA2 and FA3 templates over paged KV, dense MHA and absorbed MLA.

NVFP4 is read by the FA2 template on any of these GPUs, with split-KV switched off by the library, so that few
requests with long contexts leave most of a GPU idle. Its MLA kernel addresses single tokens: with one head
per token the storage is flat, and a page table of any page size can be spelt out as one of pages of one
token.
"""

from __future__ import annotations

from nibble.attention.capability import NEVER, BackendInfo, Phase, Row

GPUS = frozenset({80, 86, 89, 90, 100, 103, 120, 121})
HALVES = frozenset({"bfloat16", "float16"})


def _mha(formats: frozenset[str], prefer: int, cites: str) -> Row:
    return Row(
        phase=frozenset(Phase),
        kind=frozenset({"mha"}),
        format=formats,
        packing=frozenset({"nhd", "hnd"}),
        arch=GPUS,
        dim=frozenset({64, 128, 256}),
        dtype=HALVES,
        sinks=NEVER,
        prefer=prefer,
        cites=cites,
    )


BACKEND = BackendInfo(
    name="flashinfer",
    summary="FlashInfer's FA2 and FA3 templates; its NVFP4 reader also runs outside Blackwell",
    package="flashinfer",
    install="pip install flashinfer-python",
    rows=(
        _mha(frozenset({"bf16", "fp16"}), 50, "one H200: 64 x 8K in 0.502 ms, 4.28 TB/s"),
        _mha(frozenset({"fp8_e4m3", "fp8_e5m2"}), 40, "one H200: 64 x 8K in 0.420 ms, 2.56 TB/s"),
        _mha(frozenset({"nvfp4"}), 10, "one H200: 64 x 8K in 0.675 ms, 0.89 TB/s; slower than bf16"),
        Row(
            phase=frozenset(Phase),
            kind=frozenset({"mla"}),
            format=frozenset({"bf16", "fp16"}),
            packing=frozenset({"nhd"}),
            arch=GPUS,
            dim=frozenset({576}),
            dtype=HALVES,
            window=NEVER,
            softcap=NEVER,
            sinks=NEVER,
            prefer=45,
            cites="docs.flashinfer.ai, mla: ckv 512 + kpe 64, page_size 1; on one H200 as fast as FlashMLA",
        ),
    ),
)
