"""cuda: Nibble's own decode kernel in CUDA C++ (kernels/attention/decode.cu), compiled at first use by NVRTC.

Reads pages in their own bytes at memory speed on any GPU since Ampere, FP4 units or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from nibble.attention.metadata import AttentionBatch, AttentionParams
from nibble.attention.planner.support import BackendInfo, Phase, Support
from nibble.cache.view import KVView
from nibble.errors import BackendError

if TYPE_CHECKING:
    from nibble.kernels.attention.cuda import Decode


class Cuda:
    """The adapter. Its workspace serves one step at a time."""

    def __init__(self) -> None:
        self._decode: Decode | None = None

    def attend(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        from nibble.kernels.attention.cuda import COLUMNS, Decode

        if self._decode is None:
            self._decode = Decode(q_THD.device)
        k, v = view.streams["k"], view.streams["v"]
        queries = max(segment.query_lens)
        columns = queries * q_THD.shape[1] // k.stream.heads
        if columns > COLUMNS:
            raise BackendError(f"{queries} tokens a request make {columns} query rows; {COLUMNS} is the most")
        return self._decode(
            q_THD.contiguous(),
            k.planes,
            v.planes,
            (k.format.name, v.format.name),
            columns,
            segment.seq_lens_B,
            None if queries == 1 else segment.cu_seqlens_q_B1,
            segment.page_table_BN,
            (k.scale, v.scale),
            spec.scale,
            spec.window,
            spec.softcap,
            None if spec.sinks_H is None else spec.sinks_H.float(),
        )


DIMS = (64, 128, 256)


def _trouble() -> str | None:
    try:
        from nibble.kernels.nvrtc import unavailable_reason
    except Exception as error:  # a broken package must not break every plan
        return f"cuda-bindings, which cannot be imported ({type(error).__name__}: {error})"
    return unavailable_reason()


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
    adapter=Cuda,
    packages=("cuda.bindings",),
    install="pip install cuda-bindings nvidia-cuda-nvrtc",
    unavailable_reason=_trouble,
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
