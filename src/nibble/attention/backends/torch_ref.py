"""torch_ref: the definition of attention over a paged cache, in plain torch, for every format and phase."""

from __future__ import annotations

from nibble.attention.planner.support import BackendInfo, Phase, Support

ANY_PHASE = frozenset(Phase)

BACKEND = BackendInfo(
    name="torch_ref",
    summary="the definition, in plain torch: every format, phase and machine; slow on a GPU",
    adapter="nibble.attention.backends.adapters.torch_ref:TorchRef",
    support=(
        Support(
            phase=ANY_PHASE,
            kind=frozenset({"mha"}),
            format=None,
            packing=frozenset({"nhd", "hnd"}),
            prefer=-10,
            source="tests/conformance",
        ),
        Support(
            phase=ANY_PHASE,
            kind=frozenset({"mla", "dsa"}),
            format=None,
            packing=frozenset({"nhd", "hnd", "record"}),
            prefer=-10,
            source="tests/conformance",
        ),
    ),
)
