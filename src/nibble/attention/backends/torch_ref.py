"""torch_ref: the definition of attention over a paged cache, in plain torch, for every format and phase."""

from __future__ import annotations

from nibble.attention.planner.support import ALL, BackendInfo, Origin, Support

BACKEND = BackendInfo(
    name="torch_ref",
    summary="the definition, in plain torch: every format, phase and machine; slow on a GPU",
    origin=Origin.REFERENCE,
    adapter="nibble.attention.backends.adapters.torch_ref:TorchRef",
    support=(
        Support(
            phase=ALL,
            kind={"mha"},
            format=None,
            packing={"nhd", "hnd"},
            gathers=True,
            source="tests/conformance",
        ),
        Support(
            phase=ALL,
            kind={"mla", "dsa"},
            format=None,
            packing={"nhd", "hnd", "record"},
            gathers=True,
            source="tests/conformance",
        ),
    ),
)
