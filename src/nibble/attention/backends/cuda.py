"""cuda: Nibble's own decode kernel in CUDA C++ (kernels/attention/decode.cu), compiled at first use by NVRTC.

Reads pages in their own bytes at memory speed on any GPU since Ampere, FP4 units or not.
"""

from __future__ import annotations

from nibble.attention.planner.support import GPUS, HALF_DTYPES, BackendInfo, Origin, Support
from nibble.hardware import may_have_gpu
from nibble.model_spec import Phase


def _unavailable_reason() -> str | None:
    if not may_have_gpu():  # there is nothing to compile for, and nvrtc.py imports torch
        return None
    try:
        from nibble.kernels.nvrtc import unavailable_reason
    except Exception as error:  # a broken package must not break every plan
        return f"cuda-bindings, which cannot be imported ({type(error).__name__}: {error})"
    return unavailable_reason()


FORMATS = frozenset({"bf16", "fp16", "nvfp4", "mxfp4", "fp4_mx16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3:nvfp4"})


def _row(phase: Phase, groups: range, source: str) -> Support:
    return Support(
        phase={phase},
        kind={"mha"},
        format=FORMATS,
        packing={"hnd"},
        arch=GPUS,
        page={16, 32, 64, 128},
        dim={64, 128, 256},
        group=set(groups),
        dtype=HALF_DTYPES,
        source=source,
    )


BACKEND = BackendInfo(
    name="cuda",
    summary="Nibble's decode kernel in CUDA C++: 4- and 8-bit pages at memory speed, on any GPU since Ampere",
    origin=Origin.OWN,
    adapter="nibble.attention.backends.adapters.cuda:Cuda",
    packages=("cuda.bindings",),
    install="pip install cuda-bindings nvidia-cuda-nvrtc",
    unavailable_reason=_unavailable_reason,
    graphs=True,
    support=(
        _row(
            Phase.DECODE,
            range(1, 17),
            "benchmarks/reports: decode attention on one H200; compiled for the others",
        ),
        _row(Phase.VERIFY, range(1, 3), "tests/conformance: up to 16 query rows of a KV head"),
    ),
)
