"""Backends of the package FlashInfer: its own templates, TensorRT-LLM's kernels and CUTLASS's.

**flashinfer**: the FA2 and FA3 templates over paged KV, dense MHA and absorbed MLA. Over NVFP4 the library does not
split long contexts on SM120. No sinks: the templates that have them are other wrappers. The MLA kernels cut a request's
queries, heads and all, into tiles of 64 or 128 rows. A token whose heads are in two tiles may lose its last key, and
the package refuses to plan that, so the number of heads must divide a tile; and a plan has room for 16384 tiles, which
a step of 16384 tokens of 128 heads fills.

**trtllm_mha**: TensorRT-LLM's MHA kernels: trtllm-gen on big Blackwell, XQA on SM90 and SM120. What is left out of the
rows, and why:

- FP8 with XQA on SM90: it rounds queries and weights to FP8, and is then further from the definition than twice plain
  torch. FP8 prompts with trtllm-gen: its context kernels want a query in FP8.
- NVFP4 with trtllm-gen: it reads the packing `trtllm`, and global scales of amax / 448 where checkpoints store
  amax / (6 * 448), but takes queries in FP8 and answers in FP8, further from the definition than twice plain torch.
- Sinks with XQA, and more than 16 query heads for a KV head: not tried.

**trtllm_mla**: TensorRT-LLM's MLA kernels, for big Blackwell. One new token to a request, or a few. Lengths and page
tables are read on the device, so a CUDA graph may hold a decode step. What is left out of the rows:

- FP8: the kernels want the query in it too, and are then further from the definition than twice plain torch. FP16: what
  they write is BF16. Both, and 4 bits, by --allow-staging.
- Prompts: FlashInfer's tests are of a few tokens to a request.
- From 65 to 127 heads, which FlashInfer refuses.

**cutlass_mla**: the CUTLASS kernel for MLA on big Blackwell. A query is one token of 128 heads.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from nibble.attention.backends.vendor import LATENT_FACTS, import_package, outdated, plain_rows, without_cuda
from nibble.attention.planner.support import (
    ALL,
    BLACKWELL,
    CONSUMER_BLACKWELL,
    GPUS,
    HALF_DTYPES,
    HOPPER,
    NEVER,
    TOKEN,
    BackendInfo,
    Origin,
    Support,
)
from nibble.kernels import import_problem

PACKAGE, DISTRIBUTION, OLDEST = "flashinfer", "flashinfer-python", "0.7.2"
JIT_CACHE = "flashinfer_jit_cache"
INSTALL = f"pip install '{DISTRIBUTION}>={OLDEST}', beside nvcc (the CUDA toolkit) or a flashinfer-jit-cache to match"

WORKSPACE = 512 << 20
"""Results of split contexts, for all wrappers: they run one after the other. As much for trtllm_mha."""
PLANS = 128 << 20
"""What wrappers keep of their plans: 8 MiB each, of up to four phases, a few kinds of layers, and COPIES of each."""
COPIES = 2
"""Wrappers of one kind: a step may be planned while the one before runs."""
TRTLLM_MLA_WORKSPACE = 256 << 20
CUTLASS_WORKSPACE = 128 << 20
CUTLASS_HEADS = 128


def import_flashinfer(name: str = PACKAGE) -> ModuleType:
    """Return the package or a module of it, or raise a BackendError that says why it cannot be imported."""
    return import_package(name, INSTALL)


def unavailable_reason() -> str | None:
    """Return what the package needs and this machine lacks: a version, a CUDA build of torch, or a compiler."""
    reason = outdated(DISTRIBUTION, OLDEST) or without_cuda()
    # Kernels are compiled at their first use, unless a package brings them compiled.
    if reason or _compiles():
        return reason
    return f"its kernels compiled, which takes nvcc or the package {JIT_CACHE}, and neither is here"


def _compiles() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return not import_problem(JIT_CACHE) or bool(shutil.which("nvcc")) or Path(home, "bin/nvcc").exists()


_backend = partial(
    BackendInfo,
    origin=Origin.VENDOR,
    packages=(PACKAGE,),
    install=INSTALL,
    versions=OLDEST,
    unavailable_reason=unavailable_reason,
)

HEAD_FACTS: dict[str, Any] = {
    "phase": ALL, "kind": {"mha"}, "packing": {"nhd", "hnd"}, "arch": GPUS, "sinks": NEVER,
    "lse": True, "workspace_bytes": WORKSPACE + PLANS,
}  # fmt: skip
FLASHINFER = _backend(
    name="flashinfer",
    summary="FlashInfer's FA2 and FA3 templates; its NVFP4 reader also runs outside Blackwell",
    adapter="nibble.attention.backends.adapters.flashinfer:FlashInfer",
    support=(
        *plain_rows(**HEAD_FACTS, dim={64, 128, 256}, source="flashinfer/prefill.py, decode.py"),
        Support(
            **HEAD_FACTS, format={"fp8_e4m3", "fp8_e5m2"}, dim={64, 128, 256}, dtype=HALF_DTYPES,
            source="flashinfer/prefill.py: fa2 reads both",
        ),
        Support(
            **HEAD_FACTS, format={"nvfp4"}, dim={128, 256}, dtype=HALF_DTYPES,
            source="flashinfer/prefill.py; wrong over heads of 64",
        ),
        *plain_rows(
            **LATENT_FACTS, phase=ALL, arch=GPUS, group={1, 2, 4, 8, 16, 32, 64, 128},
            workspace_bytes=WORKSPACE + PLANS, source="flashinfer/mla: any page size, heads that divide a tile",
        ),
    ),
)  # fmt: skip

TRTLLM_FACTS: dict[str, Any] = {
    "kind": {"mha"}, "packing": {"hnd"}, "page": {16, 32, 64}, "dim": {64, 128, 256}, "softcap": NEVER,
    "workspace_bytes": WORKSPACE,
}  # fmt: skip
GEN_FACTS = {**TRTLLM_FACTS, "arch": BLACKWELL}
XQA_FACTS = {**TRTLLM_FACTS, "phase": TOKEN, "group": set(range(1, 17)), "sinks": NEVER}
GEN_SOURCE = "vLLM attention_backends.md: FLASHINFER TRTLLM, SM 10.0, pages 16, 32, 64, sinks"
XQA_SOURCE = "SGLang: trtllm_mha decodes on SM90, SM100 and SM120; FlashInfer's XQA"
TRTLLM_MHA = _backend(
    name="trtllm_mha",
    summary="TensorRT-LLM's MHA kernels through FlashInfer; reads NVFP4 on consumer Blackwell",
    adapter="nibble.attention.backends.adapters.flashinfer:TrtllmMha",
    graphs=True,
    support=(
        *plain_rows(**GEN_FACTS, phase=ALL, source=GEN_SOURCE),
        Support(
            **GEN_FACTS, phase=TOKEN, format={"fp8_e4m3"}, dtype={"bfloat16"},
            source=f"{GEN_SOURCE}; FlashInfer: bf16 queries over e4m3",
        ),
        *plain_rows(**XQA_FACTS, arch=HOPPER | CONSUMER_BLACKWELL, source=XQA_SOURCE),
        Support(
            **XQA_FACTS, format={"fp8_e4m3", "nvfp4"}, arch=CONSUMER_BLACKWELL, dtype=HALF_DTYPES,
            source=f"{XQA_SOURCE}; SGLang 21601: NVFP4 decodes on SM120 with it",
        ),
    ),
)  # fmt: skip

TRTLLM_MLA = _backend(
    name="trtllm_mla",
    summary="TensorRT-LLM's MLA kernels through FlashInfer, on datacentre Blackwell",
    adapter="nibble.attention.backends.adapters.flashinfer:TrtllmMla",
    graphs=True,
    support=(
        Support(
            **LATENT_FACTS, phase=TOKEN, format={"bf16"}, arch=BLACKWELL, page={32, 64}, group={*range(1, 65), 128},
            dtype={"bfloat16"}, workspace_bytes=TRTLLM_MLA_WORKSPACE,
            source="flashinfer/mla/_core.py: trtllm-gen, pages of 32 and 64, to 64 heads or 128; FlashInfer 4644",
        ),
    ),
)  # fmt: skip

CUTLASS_MLA = _backend(
    name="cutlass_mla",
    summary="CUTLASS MLA decoding on datacentre Blackwell, through FlashInfer",
    adapter="nibble.attention.backends.adapters.flashinfer:CutlassMla",
    graphs=True,
    support=plain_rows(
        **LATENT_FACTS, phase=TOKEN, arch=BLACKWELL, page={16, 32, 64, 128}, group=set(range(1, CUTLASS_HEADS + 1)),
        workspace_bytes=CUTLASS_WORKSPACE,
        source="flashinfer/mla: cutlass, 128 heads, pages that divide 128, one dtype for cache and query",
    ),
)  # fmt: skip

BACKENDS = (FLASHINFER, TRTLLM_MHA, TRTLLM_MLA, CUTLASS_MLA)
