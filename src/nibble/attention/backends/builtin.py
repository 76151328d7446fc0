"""Backends that need no other package than torch and Triton: Nibble's own kernels, and what torch brings.

- triton: Nibble's portable kernels. They serve every format, phase and kind of attention on any GPU since Ampere.
- triton_invariant: the same with splits of keys at fixed positions and one arithmetic for all phases, for
  --deterministic.
- cuda: Nibble's kernels in CUDA C++, compiled at first use by NVRTC. The decode kernel (kernels/attention/decode.cu)
  reads pages in their own bytes at memory speed on any GPU since Ampere, FP4 units or not. Prompts are for Hopper
  (prefill_sm90.cu), over pages that are dequantised into a workspace.
- torch_ref: the definition of attention over a paged cache, in plain torch, for every format and phase.
- sdpa: the attention that torch brings. On a GPU its fused kernels, for new tokens over a prefix in any format;
  elsewhere quantised pages are staged (attention/staging.py). Torch's functions cap no scores and have no sinks.
- flex_attention: torch's FlexAttention over gathered pages. On a GPU compiled, on a CPU as torch interprets it.
  Quantised pages are staged.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

from nibble.attention.planner.support import (
    ALL,
    BLACKWELL,
    GPUS,
    HALF_DTYPES,
    HOPPER,
    MAX_STAGED_TOKENS,
    NEVER,
    PROMPT,
    BackendInfo,
    Measurement,
    Origin,
    Support,
)
from nibble.hardware import may_have_gpu
from nibble.kernels import FIXED_SPLIT, MIN_REQUESTS, PREFILL_WORKSPACE
from nibble.model_spec import Phase

PAGES = frozenset({16, 32, 64, 128})
CUDNN_DIM = 128
"""The widest heads that cuDNN's kernel takes."""
FLEX_COPIES = 2
"""Of gathered pages, while what lies behind a request's tokens is cleared."""


def _no_nvrtc() -> str | None:
    if not may_have_gpu():  # there is nothing to compile for, and nvrtc.py imports torch
        return None
    try:
        from nibble.kernels.nvrtc import unavailable_reason
    except Exception as error:  # a broken package must not break every plan
        return f"cuda-bindings, which cannot be imported ({type(error).__name__}: {error})"
    return unavailable_reason()


LATENT_FACTS: dict[str, Any] = {
    "phase": ALL,
    "format": {
        "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp4_mx16", "mxfp4"
    },
    "arch": GPUS, "page": PAGES, "dim": set(range(96, 641, 32)), "dtype": HALF_DTYPES, "softcap": NEVER, "sinks": NEVER,
    "lse": True,
}  # fmt: skip

TRITON = BackendInfo(
    name="triton",
    summary="Nibble's portable Triton kernels: every format, dequantised in registers",
    origin=Origin.PORTABLE,
    packages=("triton",),
    install="pip install triton",
    adapter="nibble.attention.backends.adapters.triton_cuda:Triton",
    graphs=True,
    verify_graphs=True,
    compiled_requests=MIN_REQUESTS,
    support=(
        Support(
            phase=ALL,
            kind={"mha"},
            format={
                "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "fp4_mx16", "mxfp4", "fp8_e4m3:nvfp4"
            },
            packing={"nhd", "hnd"},
            arch=GPUS,
            page=PAGES,
            dim=set(range(16, 257, 16)),
            lse=True,
            source="tests/conformance",
            measured=Measurement("decoding 64 x 8K: nvfp4 in 0.255 ms (2.4 TB/s), bf16 in 0.495 ms (4.3 TB/s)"),
        ),
        Support(
            **LATENT_FACTS,
            kind={"mla"},
            packing={"nhd", "hnd"},
            source="tests/conformance",
            measured=Measurement("decoding 64 x 8K: bf16 in 0.147 ms with 16 heads, 0.42 ms with 128"),
        ),
        Support(
            **LATENT_FACTS,
            kind={"dsa"},
            packing={"record"},
            window=NEVER,
            source="benchmarks/sparse_decode.py: one run of bytes",
        ),
        Support(
            **LATENT_FACTS,
            kind={"dsa"},
            packing={"nhd", "hnd"},
            window=NEVER,
            source="benchmarks/sparse_decode.py",
        ),
    ),
)  # fmt: skip

TRITON_INVARIANT = BackendInfo(
    name="triton_invariant",
    summary="the same kernels with one arithmetic for all phases and batches, for --deterministic",
    origin=Origin.PORTABLE,
    packages=("triton",),
    install="pip install triton",
    adapter="nibble.attention.backends.adapters.triton_cuda:TritonInvariant",
    graphs=True,
    verify_graphs=True,
    support=tuple(
        replace(
            row,
            # Where all phases use one kernel, there is no reason for another packing than the fastest.
            packing={"hnd"},
            batch_invariance=frozenset({False, True}),
            # In float32 products have no tensor cores, and how threads share a row's sum depends on the tile.
            dtype=HALF_DTYPES,
            # The near part of an exact window would have another arithmetic in each phase, so nothing is merged.
            lse=False,
            fixed_split=FIXED_SPLIT,
            measured=None,
        )
        for row in TRITON.support
        if row.kind & {"mha", "mla"}
    ),
)

CUDA_FORMATS = {"bf16", "fp16", "nvfp4", "mxfp4", "fp4_mx16", "fp8_e4m3", "fp8_e5m2"}
CUDA_PAIRS = {f"{k}:{v}" for k, v in permutations(sorted(CUDA_FORMATS), 2)}
"""Formats of keys and values, each dequantised by itself."""
DECODE_FACTS: dict[str, Any] = {
    "kind": {"mha"},
    "format": CUDA_FORMATS | {"fp8_e4m3:nvfp4"},
    "packing": {"hnd"},
    "arch": GPUS,
    "page": PAGES,
    "dim": {64, 128, 256},
    "dtype": HALF_DTYPES,
    "lse": True,
}
CUDA = BackendInfo(
    name="cuda",
    summary="Nibble's kernels in CUDA C++: decoding at memory speed on any GPU since Ampere; prompts on Hopper",
    origin=Origin.OWN,
    adapter="nibble.attention.backends.adapters.triton_cuda:Cuda",
    packages=("cuda.bindings",),
    install="pip install cuda-bindings nvidia-cuda-nvrtc",
    unavailable_reason=_no_nvrtc,
    graphs=True,
    verify_graphs=True,
    compiled_requests=MIN_REQUESTS,
    support=(
        Support(
            **DECODE_FACTS,
            phase={Phase.DECODE},
            group=set(range(1, 17)),
            source="compiled for all of them",
            measured=Measurement("benchmarks/reports: decode attention"),
        ),
        Support(
            **DECODE_FACTS,
            phase={Phase.VERIFY},
            group=set(range(1, 17)),
            source="tests/conformance: up to 32 query rows of a KV head, 16 of heads of 256; more by triton's kernel",
        ),
        Support(
            phase=PROMPT,
            kind={"mha"},
            format=CUDA_FORMATS | CUDA_PAIRS,
            packing={"nhd", "hnd"},
            arch=HOPPER,
            page=PAGES,
            dim={64, 128},
            dtype=HALF_DTYPES,
            lse=True,
            workspace=PREFILL_WORKSPACE,
            source="tests/conformance",
            measured=Measurement(
                "8K new on 8K stored: nvfp4 at 660 TFLOP/s, bf16 at 635; 8 prompts of 1K at 450",
                phases=PROMPT,
            ),
        ),
    ),
)

REF_FACTS: dict[str, Any] = {
    "phase": ALL, "format": None, "lse": True, "gathers": True, "source": "tests/conformance"
}  # fmt: skip
TORCH_REF = BackendInfo(
    name="torch_ref",
    summary="the definition, in plain torch: every format, phase and machine; slow on a GPU",
    origin=Origin.REFERENCE,
    adapter="nibble.attention.backends.adapters.torch_backends:TorchRef",
    support=(
        Support(**REF_FACTS, kind={"mha"}, packing={"nhd", "hnd"}),
        # Scales are interleaved by four tokens and by four of each token.
        Support(
            **REF_FACTS,
            kind={"mha"},
            packing={"trtllm"},
            page=PAGES,
            dim=set(range(64, 513, 64)),
        ),
        Support(**REF_FACTS, kind={"mla"}, packing={"nhd", "hnd", "record"}),
        # Over chosen tokens it has sinks, but neither windows nor caps.
        Support(**REF_FACTS, kind={"dsa"}, packing={"nhd", "hnd", "record"}, window=NEVER, softcap=NEVER),
        # Tiles lie at fixed keys. A GPU's products depend on their size all the same.
        Support(
            **REF_FACTS, kind={"mha", "mla", "dsa"}, packing={"nhd", "hnd"}, arch={0}, batch_invariance={True}
        ),
    ),
)

SDPA = BackendInfo(
    name="sdpa",
    summary="what torch brings: on GPUs its fused kernels, for prompts over any format; last bits vary with the batch",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.torch_backends:SDPA",
    support=(
        Support(
            phase=PROMPT,
            kind={"mha"},
            format=None,
            packing={"nhd", "hnd"},
            arch=HOPPER | BLACKWELL,
            dim=set(range(16, CUDNN_DIM + 1, 8)),
            dtype=HALF_DTYPES,
            # A window needs a mask, and the fused kernels take none.
            window=NEVER,
            softcap=NEVER,
            sinks=NEVER,
            lse=True,
            workspace=PREFILL_WORKSPACE,
            source="tests/conformance",
            measured=Measurement(
                "benchmarks/extend.py, 8K new on 32K stored: nvfp4 at 614 TFLOP/s, bf16 at 595", phases=PROMPT
            ),
        ),
        Support(
            phase=ALL,
            kind={"mha"},
            format={"fp32", "bf16", "fp16"},
            packing={"nhd", "hnd"},
            softcap=NEVER,
            sinks=NEVER,
            # torch's function knows no pages, so they are copied into one tensor first.
            gathers=True,
            source="tests/conformance",
        ),
    ),
)

FLEX_ATTENTION = BackendInfo(
    name="flex_attention",
    summary="torch's FlexAttention, compiled, over gathered pages",
    origin=Origin.PORTABLE,
    adapter="nibble.attention.backends.adapters.torch_backends:FlexAttention",
    support=(
        Support(
            phase=ALL,
            kind={"mha"},
            format={"fp32", "bf16", "fp16"},
            packing={"nhd", "hnd"},
            arch=GPUS | {0},
            lse=True,
            gathers=True,
            workspace=FLEX_COPIES * MAX_STAGED_TOKENS,
            source="vLLM attention_backends.md: FLEX_ATTENTION, any page and head size; sinks by the log-sum-exp",
        ),
    ),
)

BACKENDS = (TRITON, TRITON_INVARIANT, CUDA, TORCH_REF, SDPA, FLEX_ATTENTION)
