"""fa3: FlashAttention 3, the Hopper kernels, over pages of 16-bit caches. For MLA they score with values too.

Three packages bring it: FlashAttention's own build (hopper/ of its source; the package index has no wheel), and what
sglang-kernel and vLLM ship. Left out: FP8, which wants the query in FP8 too and rounds weights to it, and is then
further from the definition than twice plain torch. --allow-staging serves those caches, and 4-bit ones, in 16 bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from nibble.attention.backends.vendor import PLAIN, TOKEN, KernelPackages, row
from nibble.attention.planner.support import NEVER, PROMPT, WITH, BackendInfo, Phase

OWN = "flash_attn_interface"
PARTS = ("PAGEDKV", "LOCAL", "SOFTCAP", "SPLIT", "FP16")
"""What a build may leave out, and rows promise."""
HELD = 128 << 20
"""Partial results of split contexts."""


def _fault(kernels: ModuleType) -> str | None:
    if not getattr(kernels, "FA3_AVAILABLE", True):  # vLLM's
        return f"has no FA3 ({kernels.FA3_UNAVAILABLE_REASON})"
    if not (hasattr(kernels, "flash_attn_with_kvcache") or hasattr(kernels, "FA3_AVAILABLE")):
        return "has no flash_attn_with_kvcache"
    if kernels.__name__ == OWN:
        return _left_out()
    return None


def _left_out() -> str | None:
    """What FlashAttention's own build says of itself, in a module beside it."""
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except Exception:  # builds of before August 2025 do not say
        return None
    missing = [part for part in PARTS if flags.get(f"FLASHATTENTION_DISABLE_{part}")]
    return f"was built without {', '.join(missing)}" if missing else None


KERNELS = KernelPackages(
    modules=(OWN, "sgl_kernel.flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"),
    install="pip install sglang-kernel, or vllm, or build hopper/ of Dao-AILab/flash-attention from source",
    incompatibility=_fault,
    import_alone=frozenset({"vllm"}),
)


HOPPER = {90}
RACE = "benchmarks/backends.py on one H200"
DIMS, PAGES = {64, 96, 128, 192, 256}, {16, 32, 64, 128}
FEW = range(1, 5)
STAGED = 30
"""Prompts over caches of fewer bits, which are dequantised for it: still 1.1 to 4 times as fast as kernels that read
them as they are, but for torch's fused ones, which know neither caps, sinks nor latents."""
HEAD_ROWS: tuple[tuple[Iterable[Phase], dict[str, Any], int, int | None, str], ...] = (
    (
        {Phase.PREFILL},
        {"window": NEVER},
        39,
        STAGED,
        "1x8K in 0.957 ms, sdpa 0.985; groups of 8, 1.07 x sdpa",
    ),
    (
        {Phase.PREFILL},
        {"window": NEVER, "sinks": NEVER, "kv_heads": FEW},
        42,
        42,
        "1 KV head: sdpa 1.3 x; staging is taken to add 0.02 ms, as to triton",
    ),
    ({Phase.EXTEND}, {"window": NEVER}, 42, STAGED, "2K on 32K in 1.75 ms, sdpa 1.89"),
    (
        {Phase.EXTEND},
        {"window": NEVER, "sinks": NEVER, "kv_heads": FEW},
        42,
        42,
        "1 KV head: sdpa 1.1 x; staging is taken to add 0.02 ms, as to triton",
    ),
    (PROMPT, {"window": WITH, "sinks": NEVER}, 39, None, "taken to be as without windows, which were raced"),
    (
        PROMPT,
        {"window": WITH, "sinks": NEVER, "softcap": WITH},
        39,
        STAGED,
        "taken to be as without windows, which were raced",
    ),
    (PROMPT, {"window": WITH, "sinks": WITH}, 15, None, "a window of 128: 1.5 to 2 x triton, staged 4 x"),
    (TOKEN, {"sinks": NEVER}, 32, None, "64x8K in 0.491 ms, 4.37 TB/s"),
    (
        TOKEN,
        {"sinks": WITH},
        15,
        None,
        "sinks cost a pass of their own: 1.18 x triton, 2.2 x with a window",
    ),
)
"""Phases, conditions, prefer, the same over staged pages."""
MANY = range(33, 129)
LATENT_ROWS = (
    (PROMPT, range(1, 129), 35, STAGED, "2K on 32K in 3.5 ms with 16 heads, flashinfer 1.3 x, triton 2.1 x"),
    (TOKEN, range(1, 33), 18, None, "16 heads: 1.08 x the best, triton 1.03 x on pages of 64"),
    (TOKEN, MANY, 54, None, "128 heads: 1.14 x flashmla, triton 1.58 x"),
)
"""Phases, query heads, prefer, the same over staged pages."""

BACKEND = BackendInfo(
    name="fa3",
    summary="FlashAttention 3 on Hopper, 16-bit caches",
    adapter="nibble.attention.backends.adapters.fa3:FA3",
    packages=KERNELS.packages,
    install=KERNELS.install,
    versions="vLLM 0.33.0, sglang-kernel 0.4.10",
    unavailable_reason=KERNELS.unavailable_reason,
    graphs=True,
    support=(
        *(
            row(
                "mha", phase=phase, format={fmt}, packing={"nhd"}, arch=HOPPER, page=PAGES, dim=DIMS, dtype={dtype},
                prefer=prefer, staged=staged, held=HELD, cites=f"{RACE}: {cites}", **facts,
            )
            for phase, facts, prefer, staged, cites in HEAD_ROWS
            for fmt, dtype in PLAIN
        ),
        *(
            row(
                "mla", phase=phase, format={fmt}, arch=HOPPER, page=PAGES, group=groups, dtype={dtype}, prefer=prefer,
                staged=staged, held=HELD, cites=f"{RACE}: {cites}",
            )
            for phase, groups, prefer, staged, cites in LATENT_ROWS
            for fmt, dtype in PLAIN
        ),
    ),
)  # fmt: skip
