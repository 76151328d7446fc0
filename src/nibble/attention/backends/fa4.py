"""fa4: FlashAttention 4 (CuTe DSL) on Hopper and Blackwell, over pages of 16-bit caches. All else is staged.

A kernel is compiled at its first use. A page that holds a whole tile of keys is fetched whole, rows beyond a request's
end with it, and a NaN there gets into the sum of values, as the package says; so pages are smaller than a tile. MLA is
for big Blackwell. Decoding has no split-KV unless it is asked for, so it slows down with the context.
"""

from __future__ import annotations

from nibble.attention.backends.vendor import LATENT_FACTS, outdated, plain_rows, without_cuda
from nibble.attention.planner.support import BLACKWELL, HOPPER, PROMPT, BackendInfo, Origin
from nibble.model_spec import Phase

PACKAGE, DISTRIBUTION, OLDEST = "flash_attn.cute", "flash-attn-4", "4.0.0b36"
INSTALL = f"pip install '{DISTRIBUTION}[cu13]>={OLDEST}'"


def unavailable_reason() -> str | None:
    """What the package needs and this machine lacks. Its import takes seconds, and is left to the adapter."""
    return outdated(DISTRIBUTION, OLDEST) or without_cuda()


SOURCE = "flash-attn-4 4.0.0b36 interface.py: one dtype for all, pages that are no whole tile; not measured here yet"

BACKEND = BackendInfo(
    name="fa4",
    summary="FlashAttention 4 on Hopper and Blackwell, 16-bit caches",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.fa4:FA4",
    packages=(PACKAGE,),
    install=INSTALL,
    versions=OLDEST,
    unavailable_reason=unavailable_reason,
    support=(
        *plain_rows(
            phase=PROMPT | {Phase.DECODE}, kind={"mha"}, packing={"nhd"}, arch=HOPPER | BLACKWELL, page={16, 32, 64},
            dim={64, 96, 128}, source=SOURCE,
        ),
        *plain_rows(
            **LATENT_FACTS, phase=PROMPT, arch=BLACKWELL, page={16, 32}, group={1, 2, 4, 8, 16, 32, 64, 128},
            source=SOURCE,
        ),
    ),
)  # fmt: skip
