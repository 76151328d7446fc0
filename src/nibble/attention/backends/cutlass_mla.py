"""cutlass_mla: the CUTLASS kernel for MLA on big Blackwell, by way of FlashInfer.

A query is one token of 128 heads.
"""

from __future__ import annotations

from nibble.attention.backends.flashinfer import INSTALL, PACKAGE, VERSIONS, unavailable_reason
from nibble.attention.backends.vendor import PLAIN, TOKEN, row
from nibble.attention.planner.support import BackendInfo

HEADS = 128
WORKSPACE = 128 << 20


BACKEND = BackendInfo(
    name="cutlass_mla",
    summary="CUTLASS MLA decoding on datacentre Blackwell, through FlashInfer",
    adapter="nibble.attention.backends.adapters.cutlass_mla:CutlassMla",
    packages=(PACKAGE,),
    install=INSTALL,
    versions=VERSIONS,
    unavailable_reason=unavailable_reason,
    graphs=True,
    support=tuple(
        row(
            "mla", phase=TOKEN, format={fmt}, arch={100, 103}, page={16, 32, 64, 128}, group=range(1, HEADS + 1),
            dtype={dtype}, prefer=40, held=WORKSPACE,
            cites="flashinfer/mla: cutlass, 128 heads, pages that divide 128, one dtype for cache and query",
        )
        for fmt, dtype in PLAIN
    ),
)  # fmt: skip
