"""cutlass_mla: the CUTLASS kernel for MLA on big Blackwell, by way of FlashInfer.

A query is one token of 128 heads.
"""

from __future__ import annotations

from nibble.attention.backends.flashinfer import INSTALL, PACKAGE, VERSIONS, unavailable_reason
from nibble.attention.backends.vendor import LATENT_FACTS, plain_rows
from nibble.attention.planner.support import BLACKWELL, TOKEN, BackendInfo, Origin

HEADS = 128
WORKSPACE = 128 << 20

BACKEND = BackendInfo(
    name="cutlass_mla",
    summary="CUTLASS MLA decoding on datacentre Blackwell, through FlashInfer",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.cutlass_mla:CutlassMla",
    packages=(PACKAGE,),
    install=INSTALL,
    versions=VERSIONS,
    unavailable_reason=unavailable_reason,
    graphs=True,
    support=plain_rows(
        **LATENT_FACTS, phase=TOKEN, arch=BLACKWELL, page={16, 32, 64, 128}, group=set(range(1, HEADS + 1)),
        workspace_bytes=WORKSPACE,
        source="flashinfer/mla: cutlass, 128 heads, pages that divide 128, one dtype for cache and query",
    ),
)  # fmt: skip
