"""trtllm_mla: TensorRT-LLM's MLA kernels by way of FlashInfer, for big Blackwell. One new token to a request, or a few.

Lengths and page tables are read on the device, so a CUDA graph may hold a decode step. What is left out of the rows:

- FP8: the kernels want the query in it too, and are then further from the definition than twice plain torch. FP16: what
  they write is BF16. Both, and 4 bits, by --allow-staging.
- Prompts: FlashInfer's tests are of a few tokens to a request.
- From 65 to 127 heads, which FlashInfer refuses.
"""

from __future__ import annotations

from nibble.attention.backends.flashinfer import INSTALL, PACKAGE, VERSIONS, unavailable_reason
from nibble.attention.backends.vendor import LATENT_FACTS
from nibble.attention.planner.support import BLACKWELL, TOKEN, BackendInfo, Origin, Support

WORKSPACE = 256 << 20

BACKEND = BackendInfo(
    name="trtllm_mla",
    summary="TensorRT-LLM's MLA kernels through FlashInfer, on datacentre Blackwell",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.trtllm_mla:TrtllmMla",
    packages=(PACKAGE,),
    install=INSTALL,
    versions=VERSIONS,
    unavailable_reason=unavailable_reason,
    graphs=True,
    support=(
        Support(
            **LATENT_FACTS, phase=TOKEN, format={"bf16"}, arch=BLACKWELL, page={32, 64}, group={*range(1, 65), 128},
            dtype={"bfloat16"}, workspace_bytes=WORKSPACE,
            source="flashinfer/mla/_core.py: trtllm-gen, pages of 32 and 64, to 64 heads or 128; FlashInfer 4644",
        ),
    ),
)  # fmt: skip
