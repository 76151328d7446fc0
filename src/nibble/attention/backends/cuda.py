"""cuda: Nibble's own decode kernel in CUDA C++ (kernels/attention/decode.cu), compiled at first use by NVRTC.

Reads pages in their own bytes at memory speed on any GPU since Ampere, FP4 units or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from nibble.attention.planner.support import BackendInfo, Phase, Support
from nibble.hardware import may_have_gpu

DIMS = (64, 128, 256)


def _unavailable_reason() -> str | None:
    if not may_have_gpu():  # there is nothing to compile for, and nvrtc.py imports torch
        return None
    try:
        from nibble.kernels.nvrtc import trouble
    except Exception as error:  # a broken package must not break every plan
        return f"cuda-bindings, which cannot be imported ({type(error).__name__}: {error})"
    return trouble()


def _row(
    phase: Phase,
    formats: set[str],
    arch: set[int],
    groups: range,
    prefer: int,
    cites: str,
    dims: Iterable[int] = DIMS,
) -> Support:
    return Support(
        phase=frozenset({phase}),
        kind=frozenset({"mha"}),
        format=frozenset(formats),
        packing=frozenset({"hnd"}),
        arch=frozenset(arch),
        page=frozenset({16, 32, 64, 128}),
        dim=frozenset(dims),
        group=frozenset(groups),
        dtype=frozenset({"bfloat16", "float16"}),
        prefer=prefer,
        source=cites,
    )


LOW = {"nvfp4", "mxfp4", "fp4_mx16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3:nvfp4"}
HALVES = {"bf16", "fp16"}
BEFORE_BLACKWELL, BLACKWELL, HOPPER = {80, 86, 89, 90}, {100, 103, 120, 121}, {90}
REPORT = "benchmarks/reports: decode attention on one H200"
RACE = "benchmarks/backends.py on one H200"

BACKEND = BackendInfo(
    name="cuda",
    summary="Nibble's decode kernel in CUDA C++: 4- and 8-bit pages at memory speed, on any GPU since Ampere",
    adapter="nibble.attention.backends.adapters.cuda:Cuda",
    packages=("cuda.bindings",),
    install="pip install cuda-bindings nvidia-cuda-nvrtc",
    unavailable_reason=_unavailable_reason,
    graphs=True,
    support=(
        _row(Phase.DECODE, LOW, BEFORE_BLACKWELL, range(1, 17), 60, REPORT),
        _row(
            Phase.DECODE,
            HALVES,
            BEFORE_BLACKWELL - HOPPER,
            range(1, 17),
            51,
            "compiled for it, not yet measured on it",
        ),
        # All kernels read 16 bits at memory speed: who decodes must not keep prompts from a better packing.
        _row(Phase.DECODE, HALVES, HOPPER, range(1, 17), 32, f"{RACE}: within 5 % of the best", (128, 256)),
        _row(
            Phase.DECODE,
            HALVES,
            HOPPER,
            range(1, 17),
            18,
            f"{RACE}: heads of 64 with sinks, 1.05 x triton",
            (64,),
        ),
        _row(
            Phase.DECODE, LOW | HALVES, BLACKWELL, range(1, 17), 30, "compiled for it, not yet measured on it"
        ),
        _row(
            Phase.VERIFY,
            LOW | HALVES,
            BEFORE_BLACKWELL | BLACKWELL,
            range(1, 3),
            30,
            "tests/conformance: up to 16 query rows of a KV head",
        ),
    ),
)
