"""A toy backend that can be recorded, since steps without prompts read lengths from the device; and two that cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.planner.support import ALL, NEVER, BackendInfo, Support
from nibble.attention.step import AttentionBackend
from nibble.cache.pool import KVView, PagedPool
from nibble.kernels.types import AttentionBatch, AttentionParams


class Masked(AttentionBackend):
    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: None
    ) -> Tensor:
        if not batch.phase.decodes:
            return TorchRef().attend(q_THD, view, batch, params)
        k_TLHD, v_TLHD = (
            view.streams[name]
            .gather_reference(batch.page_table_TN)
            .repeat_interleave(q_THD.shape[1] // view.streams["k"].stream.heads, 2)
            for name in "kv"
        )
        seen_TL = torch.arange(k_TLHD.shape[1]) < self.seen(batch)[:, None]
        scores_THL = torch.einsum("thd,tlhd->thl", q_THD.float(), k_TLHD) * params.scale
        weights_THL = scores_THL.masked_fill(~seen_TL[:, None], float("-inf")).softmax(-1).nan_to_num()
        v_TLHD = v_TLHD.masked_fill(~seen_TL[:, :, None, None], 0.0)
        return torch.einsum("thl,tlhd->thd", weights_THL, v_TLHD).to(q_THD.dtype)

    def seen(self, batch: AttentionBatch) -> Tensor:
        """Return the tokens that each row sees."""
        total, lens_B = batch.stop - batch.start, self.lengths(batch)
        if len(batch.query_lens) == total:
            return lens_B
        # The last row of a request is its last token.
        shift_B = lens_B - batch.cu_seqlens_q_B1[1:]
        shift_T = shift_B.repeat_interleave(batch.cu_seqlens_q_B1.diff(), 0, output_size=total)
        return torch.arange(1, total + 1) + shift_T

    def lengths(self, batch: AttentionBatch) -> Tensor:
        return batch.seq_lens_B


class Frozen(Masked):
    """Takes lengths from the host's tuple: right in a step of its own, and wrong in one that is replayed."""

    def lengths(self, batch: AttentionBatch) -> Tensor:
        return torch.tensor(batch.seq_lens, dtype=torch.int32)


class Peeking(Masked):
    """Waits for the device to read lengths."""

    def lengths(self, batch: AttentionBatch) -> Tensor:
        return batch.seq_lens_B.clamp(max=int(batch.seq_lens_B.max()))


def info(adapter: type[Masked]) -> BackendInfo:
    return BackendInfo(
        name="toy_graph",
        summary="dense attention under a mask of lengths",
        adapter=adapter,
        graphs=True,
        verify_graphs=True,
        support=(
            Support(
                phase=ALL, kind={"mha"}, format=None, packing={"hnd"},
                window=NEVER, softcap=NEVER, sinks=NEVER, source="this test",
            ),
        ),
    )  # fmt: skip


class MaskedAppend:
    """Writes every slot of the pool, by a mask: no matter what the slots are, the same calls."""

    captures = True

    def __init__(self, pool: PagedPool, layer: int) -> None:
        self.view = pool.view(layer)

    def __call__(
        self, streams: dict[str, Tensor], slot_mapping_T: Tensor, exact_slot_mapping_T: Tensor | None = None
    ) -> None:
        assert exact_slot_mapping_T is None
        for name, x_THD in streams.items():
            entry = self.view.streams[name]
            for plane, values in zip(entry.planes, entry.format.encode(x_THD, entry.scale), strict=True):
                whole = plane.view(torch.uint8).transpose(1, 2)  # [page, slot, head, bytes]
                flat = whole.flatten(0, 1)
                hits_ST = torch.arange(len(flat))[:, None] == slot_mapping_T
                chosen = values.view(torch.uint8)[hits_ST.int().argmax(1)]
                written = torch.where(hits_ST.any(1)[:, None, None], chosen, flat)
                whole.copy_(written.unflatten(0, whole.shape[:2]))


def make_recordable(pool: PagedPool) -> None:
    """Gives a pool writes that can be recorded."""
    pool._appends = {layer: (("k", MaskedAppend(pool, layer)),) for layer in pool.views}
