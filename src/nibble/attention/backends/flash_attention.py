"""FlashAttention 3 (fa3) and 4 (fa4), over pages of 16-bit caches. All else is staged.

fa3 has the Hopper kernels; for MLA they score with values too. Three packages bring it: FlashAttention's own build
(hopper/ of its source; the package index has no wheel), and what sglang-kernel and vLLM ship. Left out: FP8, which
wants the query in FP8 too and rounds weights to it, and is then further from the definition than twice plain torch.
--allow-staging serves those caches, and 4-bit ones, in 16 bits.

fa4 (CuTe DSL) is for Hopper and Blackwell, and for MLA on big Blackwell. A kernel is compiled at its first use. A page
that holds a whole tile of keys is fetched whole, rows beyond a request's end with it, and a NaN there gets into the sum
of values, as the package says; so pages are smaller than a tile. Decoding has no split-KV unless it is asked for, so it
slows down with the context.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from nibble.attention.backends.vendor import LATENT_FACTS, KernelPackages, outdated, plain_rows, without_cuda
from nibble.attention.planner.support import ALL, BLACKWELL, HOPPER, PROMPT, BackendInfo, Measurement, Origin
from nibble.model_spec import Phase

# FlashAttention 3

OWN_BUILD = "flash_attn_interface"
PARTS = ("PAGEDKV", "LOCAL", "SOFTCAP", "SPLIT", "FP16")
"""What a build may leave out, and rows promise."""
FA3_PAGES = frozenset({16, 32, 64, 128})
FA3_WORKSPACE = 128 << 20
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
    """Return what FlashAttention's own build says that it lacks, in a module beside it."""
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except Exception:  # builds of before August 2025 do not say
        return None
    missing = [part for part in PARTS if flags.get(f"FLASHATTENTION_DISABLE_{part}")]
    return f"was built without {', '.join(missing)}" if missing else None


FA3_KERNELS = KernelPackages(
    modules=(OWN_BUILD, "sgl_kernel.flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"),
    install="pip install sglang-kernel, or vllm, or build hopper/ of Dao-AILab/flash-attention from source",
    incompatibility=_fault,
    import_alone=frozenset({"vllm"}),
)
FA3 = BackendInfo(
    name="fa3",
    summary="FlashAttention 3 on Hopper, 16-bit caches",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.flash_attention:FA3",
    packages=FA3_KERNELS.packages,
    install=FA3_KERNELS.install,
    versions="vLLM 0.33.0, sglang-kernel 0.4.10",
    unavailable_reason=FA3_KERNELS.unavailable_reason,
    graphs=True,
    support=(
        *plain_rows(
            phase=ALL, kind={"mha"}, packing={"nhd"}, arch=HOPPER, page=FA3_PAGES, dim={64, 96, 128, 192, 256},
            lse=True, workspace_bytes=FA3_WORKSPACE,
            source="FlashAttention hopper/, paged KV",
            measured=Measurement("benchmarks/backends.py", phases=ALL),
        ),
        *plain_rows(
            **LATENT_FACTS, phase=ALL, arch=HOPPER, page=FA3_PAGES, group=set(range(1, 129)),
            lse=True, workspace_bytes=FA3_WORKSPACE, source="FlashAttention hopper/, qv",
            measured=Measurement("benchmarks/backends.py", phases=ALL),
        ),
    ),
)  # fmt: skip

# FlashAttention 4

FA4_MODULE, FA4_DISTRIBUTION, FA4_OLDEST = "flash_attn.cute", "flash-attn-4", "4.0.0b36"
FA4_INSTALL = f"pip install '{FA4_DISTRIBUTION}[cu13]>={FA4_OLDEST}'"
FA4_DOC = "flash-attn-4 4.0.0b36 interface.py: one dtype for all, pages that are no whole tile; not measured here yet"


def _fa4_unavailable_reason() -> str | None:
    # The package's import takes seconds, and is left to the adapter.
    return outdated(FA4_DISTRIBUTION, FA4_OLDEST) or without_cuda()


FA4 = BackendInfo(
    name="fa4",
    summary="FlashAttention 4 on Hopper and Blackwell, 16-bit caches",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.flash_attention:FA4",
    packages=(FA4_MODULE,),
    install=FA4_INSTALL,
    versions=FA4_OLDEST,
    unavailable_reason=_fa4_unavailable_reason,
    support=(
        *plain_rows(
            phase=PROMPT | {Phase.DECODE}, kind={"mha"}, packing={"nhd"}, arch=HOPPER | BLACKWELL, page={16, 32, 64},
            dim={64, 96, 128}, source=FA4_DOC,
        ),
        *plain_rows(
            **LATENT_FACTS, phase=PROMPT, arch=BLACKWELL, page={16, 32}, group={1, 2, 4, 8, 16, 32, 64, 128},
            source=FA4_DOC,
        ),
    ),
)  # fmt: skip

BACKENDS = (FA3, FA4)
