"""What every adapter that a CUDA graph may hold must do: a recorded decode step reads lengths and pages on the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from conformance.test_rows import Scene, Shape
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import Phase
from tape import record


def check(name: str, made: Scene, shape: Shape) -> None:
    """A tape in place of a CUDA graph: what changes in place is seen, and a row without tokens is zeros.

    made: a scene of four decoding requests, whose tokens are stored.
    """
    view, adapter, (known,) = made.ctx.pool.view(0), made.ctx.backends[name], made.ctx.meta.batches
    page_table_BN, lens_B = known.page_table_BN.clone(), torch.zeros(4, dtype=torch.int32)
    bound = page_table_BN.shape[1] * view.page_size
    width = shape.dim - shape.rope
    out, starts_B1 = made.q_THD.new_empty(*made.q_THD.shape[:2], width), torch.arange(5, dtype=torch.int32)
    slots_BK = torch.full((4, 24), -1, dtype=torch.int32) if shape.top_k else None
    spec = replace(made.spec, topk_slots_TK=slots_BK)

    def step() -> None:
        batch = AttentionBatch(Phase.DECODE, 0, 4, (1,) * 4, (bound,) * 4, page_table_BN, starts_B1, lens_B)
        out.copy_(adapter.attend(made.q_THD, view, batch, spec))

    with torch.inference_mode():
        replay = record(step)
        assert not out.any(), "padding"
        lens_B.copy_(torch.tensor([known.seq_lens[3], 0, known.seq_lens[1], 1]))
        page_table_BN.copy_(known.page_table_BN[[3, 1, 1, 0]])
        if slots_BK is not None:
            slots_BK[[0, 2, 3], 0] = page_table_BN[[0, 2, 3], 0] * view.page_size
        replay()
    later = AttentionBatch.from_lens(
        Phase.DECODE, 0, (1,) * 4, (known.seq_lens[3], 1, known.seq_lens[1], 1), page_table_BN
    )
    expected = adapter.attend(made.q_THD, view, later, spec)
    assert not out[1].any()
    assert torch.equal(out[[0, 2, 3]], expected[[0, 2, 3]]) and expected[3].any()
