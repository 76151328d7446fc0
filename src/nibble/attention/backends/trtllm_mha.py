"""trtllm_mha: TensorRT-LLM's MHA kernels by way of FlashInfer: trtllm-gen on big Blackwell, XQA on SM90 and SM120.

What is left out of the rows, and why:

- FP8 with XQA on SM90: it rounds queries and weights to FP8, and is then further from the definition than twice plain
  torch. FP8 prompts with trtllm-gen: its context kernels want a query in FP8.
- NVFP4 with trtllm-gen: it wants V's block scales interleaved by four tokens, a packing that pools do not have, and
  global scales of amax / 448 where checkpoints store amax / (6 * 448).
- Sinks with XQA, and more than 16 query heads for a KV head: not tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nibble.attention.backends.flashinfer import (
    INSTALL,
    PACKAGE,
    VERSIONS,
    WORKSPACE,
    unavailable_reason,
)
from nibble.attention.backends.vendor import (
    ALL,
    HALVES,
    PLAIN,
    TOKEN,
    row,
)
from nibble.attention.planner.support import NEVER, BackendInfo, Phase, Support

DATACENTRE, CONSUMER, HOPPER = frozenset({100, 103}), frozenset({120, 121}), frozenset({90})
GEN = "vLLM attention_backends.md: FLASHINFER TRTLLM, SM 10.0, pages 16, 32, 64, sinks"
XQA = "SGLang: trtllm_mha decodes on SM90, SM100 and SM120; FlashInfer's XQA"

ON_HOPPER: tuple[tuple[frozenset[Phase], int, str, dict[str, Iterable[Any]]], ...] = (
    (frozenset({Phase.DECODE}), 28, "64 x 8K in 0.509 ms, others 0.491 to 0.504", {}),
    (
        frozenset({Phase.VERIFY}),
        28,
        "8 KV heads: 1.06 to 1.1 x fa3, triton 1.1 to 1.2 x",
        {"kv_heads": range(5, 257)},
    ),
    (frozenset({Phase.VERIFY}), 15, "1 KV head: 1.86 x fa3, triton 1.08 x", {"kv_heads": range(1, 5)}),
)
"""Phases, prefer, why, and of what."""


def _row(
    phase: frozenset[Phase],
    fmt: str,
    dtypes: Iterable[str],
    arch: frozenset[int],
    prefer: int,
    cites: str,
    **more: Iterable[Any],
) -> Support:
    own: dict[str, Any] = {} if arch == DATACENTRE else {"group": frozenset(range(1, 17)), "sinks": NEVER}
    own |= more
    return row(
        "mha", phase=phase, format={fmt}, packing={"hnd"}, arch=arch, page={16, 32, 64}, dim={64, 128, 256},
        dtype=dtypes, softcap=NEVER, prefer=prefer, held=WORKSPACE, cites=cites, **own,
    )  # fmt: skip


BACKEND = BackendInfo(
    name="trtllm_mha",
    summary="TensorRT-LLM's MHA kernels through FlashInfer; reads NVFP4 on consumer Blackwell",
    adapter="nibble.attention.backends.adapters.trtllm_mha:TrtllmMha",
    packages=(PACKAGE,),
    install=INSTALL,
    versions=VERSIONS,
    unavailable_reason=unavailable_reason,
    graphs=True,
    support=(
        *(_row(ALL, fmt, {dtype}, DATACENTRE, 60, GEN) for fmt, dtype in PLAIN),
        _row(TOKEN, "fp8_e4m3", {"bfloat16"}, DATACENTRE, 60, f"{GEN}; FlashInfer: bf16 queries over e4m3"),
        *(
            _row(phase, fmt, {dtype}, HOPPER, prefer, f"{XQA}; one H200: {cites}", **more)
            for phase, prefer, cites, more in ON_HOPPER
            for fmt, dtype in PLAIN
        ),
        *(_row(TOKEN, fmt, {dtype}, CONSUMER, 45, XQA) for fmt, dtype in PLAIN),
        _row(TOKEN, "fp8_e4m3", HALVES, CONSUMER, 45, XQA),
        _row(TOKEN, "nvfp4", HALVES, CONSUMER, 45, "SGLang 21601: NVFP4 decodes on SM120 with XQA"),
    ),
)
