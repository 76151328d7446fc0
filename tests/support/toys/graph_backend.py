"""A toy backend that can be recorded, since its DECODE reads lengths from the device only; and two that cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.layer import AttentionBackend
from nibble.attention.planner.support import ALL, NEVER, BackendInfo, Support
from nibble.cache.pool import KVView, PagedPool
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import Phase


class Masked(AttentionBackend):
    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: None
    ) -> Tensor:
        if batch.phase is not Phase.DECODE:
            return TorchRef().attend(q_THD, view, batch, params)
        k_BLHD, v_BLHD = (
            view.streams[name]
            .gather_reference(batch.page_table_BN)
            .repeat_interleave(q_THD.shape[1] // view.streams["k"].stream.heads, 2)
            for name in "kv"
        )
        seen_BL = torch.arange(k_BLHD.shape[1]) < self.lengths(batch)[:, None]
        scores_BHL = torch.einsum("bhd,blhd->bhl", q_THD.float(), k_BLHD) * params.scale
        weights_BHL = scores_BHL.masked_fill(~seen_BL[:, None], float("-inf")).softmax(-1).nan_to_num()
        v_BLHD = v_BLHD.masked_fill(~seen_BL[:, :, None, None], 0.0)
        return torch.einsum("bhl,blhd->bhd", weights_BHL, v_BLHD).to(q_THD.dtype)

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
