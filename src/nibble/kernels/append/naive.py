"""Appending new tokens of a layer to its pages, and dequantising pages and tokens, by the book in torch.

Shape suffixes: T tokens, P pages, H heads, S slots of a page, D values of a head, R of them that rope rotates;
B requests, N pages of a request, L tokens (N * S).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nibble.formats.base import in_token_order, raw
from nibble.formats.transforms import Transform
from nibble.kernels.types import Paged, Rope


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a stream of one layer is stored, and what is done to it on the way."""

    pages: Paged
    transforms: tuple[Transform, ...] = ()
    """Applied in order before the stream is encoded."""
    mean_HD: Tensor | None = None
    """What transforms that need a mean subtract."""
    exact: Paged | None = None
    """Plain pages of the same size, in which it is stored as the model made it too; all streams have some, or none."""


class KVAppend(Protocol):
    """Stores tokens of one layer. One is prepared per layer: what does not change from step to step is settled then."""

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph may hold it."""
        ...

    def __call__(
        self,
        streams: Mapping[str, Tensor],
        slot_mapping_T: Tensor,
        exact_slot_mapping_T: Tensor | None = None,
    ) -> None:
        """Store streams (name -> [T, H, D]) at slots, page * page_size + offset each; nothing where negative.

        Exact slots, if they are given, are those in exact pages. A token may have either slot, both or none.
        """
        ...

    def append_with_rope(
        self,
        q_THD: Tensor,
        streams: Mapping[str, Tensor],
        slot_mapping_T: Tensor,
        exact_slot_mapping_T: Tensor | None,
        rope: Rope,
        *,
        keeps_keys: bool,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Rotate queries and keys, and store keys and values; see append_with_rope()."""
        ...


def append_with_rope(
    write: KVAppend,
    q_THD: Tensor,
    streams: Mapping[str, Tensor],
    slot_mapping_T: Tensor,
    exact_slot_mapping_T: Tensor | None,
    rope: Rope,
    *,
    keeps_keys: bool,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Rotate queries and keys, and store keys and values.

    Args:
        write: stores streams.
        q_THD: queries, and maybe rows of padding behind those that are stored.
        streams: `k` and `v`, of the rows that are stored.
        slot_mapping_T: see KVAppend.
        exact_slot_mapping_T: see KVAppend.
        rope: of all rows of the queries.
        keeps_keys: whether anybody else needs rotated keys.

    Returns:
        Queries and streams as attention takes them; keys may not be among these where they are not kept.
    """
    streams = {**streams, "k": apply_rope_to_keys(streams["k"], rope)}
    write(streams, slot_mapping_T, exact_slot_mapping_T)
    return apply_rope(q_THD, rope, rope.q_norm_D), streams


class NaiveAppend:
    """The definition. Streams that are alike are encoded in one go, which halves the calls."""

    is_capturable = False
    append_with_rope = append_with_rope

    def __init__(self, targets: Mapping[str, Target], joint_scale: Tensor | None = None) -> None:
        self._targets = targets
        self._joint_scale = joint_scale
        self._writers = {
            name: tuple(
                _writer(plane, target.pages.interleave_of(i))
                for i, plane in enumerate(target.pages.planes_PHS)
            )
            for name, target in targets.items()
        }
        exact = {name: Target(target.exact) for name, target in targets.items() if target.exact}
        self._exact = NaiveAppend(exact) if exact else None

    def __call__(
        self,
        streams: Mapping[str, Tensor],
        slot_mapping_T: Tensor,
        exact_slot_mapping_T: Tensor | None = None,
    ) -> None:
        """Store streams; see KVAppend."""
        if exact_slot_mapping_T is not None:
            assert self._exact, "there are exact slots, but no exact pages"
            self._exact(streams, exact_slot_mapping_T)
        if len(slot_mapping_T) and int(slot_mapping_T.min()) < 0:
            stored_T = slot_mapping_T >= 0
            streams = {name: x_THD[stored_T] for name, x_THD in streams.items()}
            slot_mapping_T = slot_mapping_T[stored_T]
        values = {name: _transformed(x_THD, self._targets[name]) for name, x_THD in streams.items()}
        for name, planes in self._encoded(values):
            for write, plane in zip(self._writers[name], planes, strict=True):
                write(slot_mapping_T, raw(plane))

    def _encoded(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Yield each stream's name with its planes."""
        pages = [self._targets[name].pages for name in values]
        if self._joint_scale is None:
            for (name, x_THD), entry in zip(values.items(), pages, strict=True):
                yield name, entry.format.encode(x_THD, entry.scale)
            return
        joint = pages[0].format.encode(torch.stack(tuple(values.values())), self._joint_scale)
        for i, name in enumerate(values):
            yield name, tuple(plane[i] for plane in joint)


def _transformed(x_THD: Tensor, target: Target) -> Tensor:
    for transform in target.transforms:
        x_THD = transform.key(x_THD, target.mean_HD)
    return x_THD


def apply_rope(x_THD: Tensor, rope: Rope, weight_D: Tensor | None) -> Tensor:
    """Return heads of queries or keys, normed where there is a weight, and rotated; rounded once.

    Args:
        x_THD: as products made them.
        rope: of their tokens.
        weight_D: of the norm.
    """
    cos_T1R, sin_T1R, x = rope.cos_TR[:, None].float(), rope.sin_TR[:, None].float(), x_THD.float()
    if weight_D is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rope.eps) * (weight_D.float() + rope.offset)
    turning, rest = x.split((cos_T1R.shape[-1], x.shape[-1] - cos_T1R.shape[-1]), -1)
    low, high = turning.chunk(2, -1)
    turned = turning * cos_T1R + torch.cat((-high, low), -1) * sin_T1R
    return torch.cat((turned, rest), -1).to(x_THD.dtype)


def apply_rope_to_keys(k_THD: Tensor, rope: Rope) -> Tensor:
    """Return keys of a step's first tokens, normed and rotated."""
    tokens = len(k_THD)
    of_these = replace(rope, cos_TR=rope.cos_TR[:tokens], sin_TR=rope.sin_TR[:tokens])
    return apply_rope(k_THD, of_these, rope.k_norm_D)


def _writer(storage_PHS: Tensor, interleave: int) -> Callable[[Tensor, Tensor], None]:
    """Return what writes a plane: (slot_mapping_T, values [T, H, ...] as integers)."""
    storage, size = raw(storage_PHS), storage_PHS.shape[2]

    def to_rows(slot_mapping_T: Tensor, values: Tensor) -> None:
        rows.index_copy_(0, slot_mapping_T, values)

    def to_pages(slot_mapping_T: Tensor, values: Tensor) -> None:
        storage[slot_mapping_T // size, :, slot_mapping_T % size] = values

    def interleaved(slot_mapping_T: Tensor, values: Tensor) -> None:
        page_T, slot_T = slot_mapping_T // size, slot_mapping_T % size
        groups_PHG[page_T, :, slot_T // interleave, :, slot_T % interleave] = values

    if interleave:
        # G groups of tokens; of each, scale after scale, and of each scale token after token.
        groups_PHG = storage.flatten(-2).unflatten(-1, (size // interleave, -1, interleave))
        return interleaved
    # A slot is the number of a row only where pages hold token after token.
    if not (tokens := storage.transpose(1, 2)).is_contiguous():
        return to_pages
    rows = tokens.flatten(0, 1)
    return to_rows


def dequantize_pages(
    stream: Paged, page_table_BN: Tensor, dtype: torch.dtype, *, heads_first: bool = False
) -> Tensor:
    """Return whole pages, dequantised.

    Args:
        stream: Pages of one stream.
        page_table_BN: Int32 page ids.
        dtype: Of the values.
        heads_first: Whether heads come before tokens.

    Returns:
        [B, L, H, D], or [B, H, L, D] where heads come first.
    """
    planes = tuple(
        _pages(plane, page_table_BN, stream.interleave_of(i)) for i, plane in enumerate(stream.planes_PHS)
    )
    scale = stream.scale.unsqueeze(-1) if stream.scale.dim() else stream.scale
    values_BHLD = stream.format.decode(planes, scale)
    return (values_BHLD if heads_first else values_BHLD.transpose(1, 2)).to(dtype).contiguous()


def dequantize_tokens(stream: Paged, slots: Tensor) -> Tensor:
    """Return single tokens: int64 slots [...], page * page_size + offset -> float32 [..., H, D]."""
    page, offset = slots // stream.page_size, slots % stream.page_size
    assert not stream.interleave, "only latents are read token by token"
    planes = tuple(raw(plane)[page, :, offset].view(plane.dtype) for plane in stream.planes_PHS)
    return stream.format.decode(planes, stream.scale)


def _pages(plane_PHS: Tensor, page_table_BN: Tensor, interleave: int) -> Tensor:
    """Return [B, H, L, ...] of a plane."""
    pages = in_token_order(raw(plane_PHS)[page_table_BN.long()], interleave)
    return pages.transpose(1, 2).flatten(2, 3).view(plane_PHS.dtype)
