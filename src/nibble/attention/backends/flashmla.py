"""flashmla: DeepSeek's FlashMLA. Dense decoding on Hopper, and sparse attention on Hopper and big Blackwell.

Three packages bring it: sgl-flash-mla (prebuilt; the kernels for Hopper and for these formats are its legacy half),
FlashMLA built from a source of January to September 2026, before those kernels were dropped, and what vLLM and
sglang-kernel ship. Left out: dense FP8, whose kernel wants the query in FP8 too, and is then further from the
definition than twice plain torch. --allow-staging serves those caches, and 4-bit ones, in 16 bits.
"""

from __future__ import annotations

from inspect import signature
from types import ModuleType
from typing import Any

from nibble.attention.backends.vendor import LATENT_FACTS, KernelPackages, plain_rows
from nibble.attention.planner.support import (
    ALL,
    BLACKWELL,
    HOPPER,
    TOKEN,
    BackendInfo,
    Measurement,
    Origin,
    Support,
)

SPARSE_HEADS = (64, 128)
"""What the sparse kernels are built for."""
WORKSPACE = 128 << 20
"""Partial results of a call: 128 heads of 512 floats for each of 256 requests and 132 parts of the chip."""


def _fault(kernels: ModuleType) -> str | None:
    if not hasattr(kernels, "FlashMLASchedMeta"):
        return "is older than January 2026"
    options = signature(kernels.flash_mla_with_kvcache).parameters
    if "use_legacy" in options:
        try:
            # True asks for the legacy half, which has the kernels for Hopper and for these formats.
            kernels.get_ops(True)
        except RuntimeError as error:
            return f"was built without its legacy half ({error})"
    elif kernels.__name__.startswith("flash_mla.") and "enable_batch_invariant" in options:
        return "is of September 2026 or later, which has no kernels for Hopper, nor for these formats"
    return None


KERNELS = KernelPackages(
    modules=(
        "flash_mla.flash_mla_interface",
        "sgl_kernel.flash_mla",
        "vllm.third_party.flashmla.flash_mla_interface",
    ),
    install="pip install sgl-flash-mla",
    incompatibility=_fault,
    import_alone=frozenset({"vllm"}),
)

README = "deepseek-ai/FlashMLA README"
SPARSE_FACTS: dict[str, Any] = LATENT_FACTS | {
    "kind": {"dsa"}, "arch": HOPPER | BLACKWELL, "page": {64}, "group": set(range(1, SPARSE_HEADS[-1] + 1)),
    "dtype": {"bfloat16"},
}  # fmt: skip

BACKEND = BackendInfo(
    name="flashmla",
    summary="FlashMLA: dense MLA decoding on Hopper, sparse attention on Hopper and Blackwell",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.flashmla:FlashMLA",
    packages=KERNELS.packages,
    install=KERNELS.install,
    versions="sgl-flash-mla 1.0.0, vLLM 0.33.0, sglang-kernel 0.4.10",
    unavailable_reason=KERNELS.unavailable_reason,
    graphs=True,
    support=(
        *plain_rows(
            **LATENT_FACTS, phase=TOKEN, arch=HOPPER, page={64}, group=set(range(1, 129)), workspace_bytes=WORKSPACE,
            source=f"{README}: dense decoding, SM90",
        ),
        Support(
            **SPARSE_FACTS, phase=ALL, format={"bf16"}, addressing={"paged", "ragged"},
            source=f"{README}: sparse prefill, SM90 and SM100, flat bf16; the index cache wants pages of 64",
        ),
        Support(
            **SPARSE_FACTS | {"packing": {"record"}}, phase=TOKEN, format={"fp8_ds_mla"}, workspace_bytes=WORKSPACE,
            source=f"{README}: sparse decoding, FP8 in records of 656 bytes",
            measured=Measurement("128 x 128 heads in 0.182 ms"),
        ),
    ),
)  # fmt: skip
