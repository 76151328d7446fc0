"""fa4: FlashAttention 4 (CuTe DSL) on Hopper and Blackwell, over pages of 16-bit caches. All else is staged.

A kernel is compiled at its first use. A page that holds a whole tile of keys is fetched whole, rows beyond a request's
end with it, and a NaN there gets into the sum of values, as the package says; so pages are smaller than a tile. MLA is
for big Blackwell. Decoding has no split-KV unless it is asked for, so it slows down with the context.
"""

from __future__ import annotations

from nibble.attention.backends.vendor import (
    PLAIN,
    outdated,
    row,
    without_cuda,
)
from nibble.attention.planner.support import PROMPT, BackendInfo, Phase

PACKAGE, DISTRIBUTION, OLDEST = "flash_attn.cute", "flash-attn-4", "4.0.0b36"
INSTALL = f"pip install '{DISTRIBUTION}[cu13]>={OLDEST}'"


def unavailable_reason() -> str | None:
    """What the package needs and this machine lacks. Its import takes seconds, and is left to the adapter."""
    return outdated(DISTRIBUTION, OLDEST) or without_cuda()


HOPPER, BLACKWELL = {90}, {100, 103}
ONE = {Phase.DECODE}
MHA = ((PROMPT, BLACKWELL, 36), (PROMPT, HOPPER, 19), (ONE, BLACKWELL, 25), (ONE, HOPPER, 15))
"""Phases, GPUs, prefer: on Hopper behind everything that was measured there."""
CITES = "flash-attn-4 4.0.0b36 interface.py: one dtype for all, pages that are no whole tile; not measured here yet"

BACKEND = BackendInfo(
    name="fa4",
    summary="FlashAttention 4 on Hopper and Blackwell, 16-bit caches",
    adapter="nibble.attention.backends.adapters.fa4:FA4",
    packages=(PACKAGE,),
    install=INSTALL,
    versions=OLDEST,
    unavailable_reason=unavailable_reason,
    support=(
        *(
            row(
                "mha", phase=phase, format={fmt}, packing={"nhd"}, arch=arch, page={16, 32, 64}, dim={64, 96, 128},
                dtype={dtype}, prefer=prefer, cites=CITES,
            )
            for phase, arch, prefer in MHA
            for fmt, dtype in PLAIN
        ),
        *(
            row(
                "mla", phase=PROMPT, format={fmt}, arch=BLACKWELL, page={16, 32}, group={1, 2, 4, 8, 16, 32, 64, 128},
                dtype={dtype}, prefer=18, cites=CITES,
            )
            for fmt, dtype in PLAIN
        ),
    ),
)  # fmt: skip
