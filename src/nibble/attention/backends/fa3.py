"""fa3: FlashAttention 3, the Hopper kernels, over pages of 16-bit caches. For MLA they score with values too.

Three packages bring it: FlashAttention's own build (hopper/ of its source; the package index has no wheel), and what
sglang-kernel and vLLM ship. Left out: FP8, which wants the query in FP8 too and rounds weights to it, and is then
further from the definition than twice plain torch. --allow-staging serves those caches, and 4-bit ones, in 16 bits.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from nibble.attention.backends.vendor import LATENT_FACTS, KernelPackages, plain_rows
from nibble.attention.planner.support import ALL, HOPPER, BackendInfo, Origin

OWN_BUILD = "flash_attn_interface"
PARTS = ("PAGEDKV", "LOCAL", "SOFTCAP", "SPLIT", "FP16")
"""What a build may leave out, and rows promise."""
WORKSPACE = 128 << 20
"""Partial results of split contexts."""


def _fault(kernels: ModuleType) -> str | None:
    if not getattr(kernels, "FA3_AVAILABLE", True):  # vLLM's
        return f"has no FA3 ({kernels.FA3_UNAVAILABLE_REASON})"
    if not (hasattr(kernels, "flash_attn_with_kvcache") or hasattr(kernels, "FA3_AVAILABLE")):
        return "has no flash_attn_with_kvcache"
    if kernels.__name__ == OWN_BUILD:
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
    modules=(OWN_BUILD, "sgl_kernel.flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"),
    install="pip install sglang-kernel, or vllm, or build hopper/ of Dao-AILab/flash-attention from source",
    incompatibility=_fault,
    import_alone=frozenset({"vllm"}),
)

PAGES = frozenset({16, 32, 64, 128})

BACKEND = BackendInfo(
    name="fa3",
    summary="FlashAttention 3 on Hopper, 16-bit caches",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.fa3:FA3",
    packages=KERNELS.packages,
    install=KERNELS.install,
    versions="vLLM 0.33.0, sglang-kernel 0.4.10",
    unavailable_reason=KERNELS.unavailable_reason,
    graphs=True,
    support=(
        *plain_rows(
            phase=ALL, kind={"mha"}, packing={"nhd"}, arch=HOPPER, page=PAGES, dim={64, 96, 128, 192, 256},
            workspace_bytes=WORKSPACE, source="FlashAttention hopper/, paged KV; benchmarks/backends.py on one H200",
        ),
        *plain_rows(
            **LATENT_FACTS, phase=ALL, arch=HOPPER, page=PAGES, group=set(range(1, 129)),
            workspace_bytes=WORKSPACE, source="FlashAttention hopper/, qv; benchmarks/backends.py on one H200",
        ),
    ),
)  # fmt: skip
