"""move: stored tokens of one stream, from pages to other pages, in another format if need be.

What a tier of memory below the device's is made of: one of the stores may lie in the host's (host_memory.py). Owns the
torch reference, and the choice between it and the Triton twin. Must not know of tiers, requests or who decides what
moves.

Shape suffixes: M tokens that are moved, P pages, H heads, S slots of a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.formats.base import raw
from nibble.kernels import triton_present
from nibble.kernels.types import Paged


def copy_tokens(
    source: Paged,
    from_M: Tensor,
    target: Paged,
    to_M: Tensor,
    count: Tensor | None = None,
    *,
    programs: int | None = None,
) -> None:
    """Stores in slots to_M of `target` what `source` has in from_M; nothing where either is negative.

    A slot is page * page_size + offset, int64 or int32. Bytes are copied where both stores mean the same by them; else
    values are decoded to float32 and encoded anew. Slots of to_M that are not negative differ from each other, and from
    those that are read if both stores are one.

    On a GPU slots lie there, and a store that does not is reachable from it. The first move between two stores may wait
    for the device, no other does: after it a CUDA graph may hold one. count: int32 [1] on the device, how many entries
    count. programs: how many blocks of the GPU it may take at a time, None for as many as are of use.
    """
    if from_M.is_cuda and triton_present():
        from nibble.kernels.offload import triton_copy_tokens as twin

        if twin.serves(source, target, from_M.device):
            twin.move(source, from_M, target, to_M, count, programs=programs)
            return
    reference(source, from_M, target, to_M, count)


def reference(
    source: Paged, from_M: Tensor, target: Paged, to_M: Tensor, count: Tensor | None = None
) -> None:
    """The definition, in torch."""
    if count is not None:
        from_M, to_M = from_M[: int(count)], to_M[: int(count)]
    moved_M = (from_M >= 0) & (to_M >= 0)
    planes = _read(source, from_M[moved_M])
    if not alike(source, target):
        values = source.format.decode(planes, source.scale.to(planes[0].device))
        planes = target.format.encode(values, target.scale.to(values.device))
    _write(target, to_M[moved_M], planes)


def alike(source: Paged, target: Paged) -> bool:
    """Whether both stores mean the same by the same bytes."""
    return (
        (source.format.name, source.dim, _shapes(source)) == (target.format.name, target.dim, _shapes(target))
    ) and (not source.format.needs_scale or _equal(source.scale, target.scale))


def _shapes(pages: Paged) -> list[tuple[int, ...]]:
    return [(plane.shape[1], *plane.shape[3:]) for plane in pages.planes_PHS]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two scales are; they may lie on different devices."""
    return a is b or torch.equal(a.cpu().expand(b.shape), b.cpu())


def _read(pages: Paged, slots_M: Tensor) -> tuple[Tensor, ...]:
    """The planes of some tokens, [M, H, ...]."""
    return tuple(raw(plane)[_places(plane, slots_M)].view(plane.dtype) for plane in pages.planes_PHS)


def _write(pages: Paged, slots_M: Tensor, planes: tuple[Tensor, ...]) -> None:
    for stored, plane in zip(pages.planes_PHS, planes, strict=True):
        raw(stored)[_places(stored, slots_M)] = raw(plane.contiguous()).to(stored.device)


def _places(plane_PHS: Tensor, slots_M: Tensor) -> tuple[Tensor, slice, Tensor]:
    """What a plane is indexed with."""
    slots_M, size = slots_M.long().to(plane_PHS.device), plane_PHS.shape[2]
    return slots_M // size, slice(None), slots_M % size
