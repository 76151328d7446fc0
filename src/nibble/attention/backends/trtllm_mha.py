"""trtllm_mha: TensorRT-LLM's MHA kernels by way of FlashInfer: trtllm-gen on big Blackwell, XQA on SM90 and SM120.

What is left out of the rows, and why:

- FP8 with XQA on SM90: it rounds queries and weights to FP8, and is then further from the definition than twice plain
  torch. FP8 prompts with trtllm-gen: its context kernels want a query in FP8.
- NVFP4 with trtllm-gen: it wants V's block scales interleaved by four tokens, a packing that pools do not have, and
  global scales of amax / 448 where checkpoints store amax / (6 * 448).
- Sinks with XQA, and more than 16 query heads for a KV head: not tried.
"""

from __future__ import annotations

from typing import Any

from nibble.attention.backends.flashinfer import (
    INSTALL,
    PACKAGE,
    VERSIONS,
    WORKSPACE,
    unavailable_reason,
)
from nibble.attention.backends.vendor import plain_rows
from nibble.attention.planner.support import (
    ALL,
    BLACKWELL,
    CONSUMER_BLACKWELL,
    HALF_DTYPES,
    HOPPER,
    NEVER,
    TOKEN,
    BackendInfo,
    Origin,
    Support,
)

HEADS: dict[str, Any] = {
    "kind": {"mha"}, "packing": {"hnd"}, "page": {16, 32, 64}, "dim": {64, 128, 256}, "softcap": NEVER,
    "workspace_bytes": WORKSPACE,
}  # fmt: skip
GEN = {**HEADS, "arch": BLACKWELL}
XQA = {**HEADS, "phase": TOKEN, "group": set(range(1, 17)), "sinks": NEVER}
GEN_SOURCE = "vLLM attention_backends.md: FLASHINFER TRTLLM, SM 10.0, pages 16, 32, 64, sinks"
XQA_SOURCE = "SGLang: trtllm_mha decodes on SM90, SM100 and SM120; FlashInfer's XQA"

BACKEND = BackendInfo(
    name="trtllm_mha",
    summary="TensorRT-LLM's MHA kernels through FlashInfer; reads NVFP4 on consumer Blackwell",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.trtllm_mha:TrtllmMha",
    packages=(PACKAGE,),
    install=INSTALL,
    versions=VERSIONS,
    unavailable_reason=unavailable_reason,
    graphs=True,
    support=(
        *plain_rows(**GEN, phase=ALL, source=GEN_SOURCE),
        Support(
            **GEN, phase=TOKEN, format={"fp8_e4m3"}, dtype={"bfloat16"},
            source=f"{GEN_SOURCE}; FlashInfer: bf16 queries over e4m3",
        ),
        *plain_rows(**XQA, arch=HOPPER | CONSUMER_BLACKWELL, source=XQA_SOURCE),
        Support(
            **XQA, format={"fp8_e4m3", "nvfp4"}, arch=CONSUMER_BLACKWELL, dtype=HALF_DTYPES,
            source=f"{XQA_SOURCE}; SGLang 21601: NVFP4 decodes on SM120 with it",
        ),
    ),
)  # fmt: skip
