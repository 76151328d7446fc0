"""Append: new tokens of a layer, transformed, encoded and stored in its pages.

Owns Target, the torch reference, and the choice between it and the Triton twin. Must not know of the pool that holds
the pages, nor of requests.

Shape suffixes: T tokens, P pages, H heads, S slots of a page, D values of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nibble.formats.base import raw
from nibble.formats.transforms import Transform
from nibble.kernels import triton_present
from nibble.kernels.types import Paged


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a stream of one layer is stored, and what is done to it on the way.

    transforms: applied in order before the stream is encoded, with mean_HD where they need it.
    """

    pages: Paged
    transforms: tuple[Transform, ...] = ()
    mean_HD: Tensor | None = None


class KVAppend(Protocol):
    """Stores tokens of one layer. Made once per layer: what does not change from step to step is worked out then.

    captures: whether a CUDA graph may hold it.
    """

    @property
    def is_capturable(self) -> bool: ...

    def __call__(self, streams: Mapping[str, Tensor], slot_mapping_T: Tensor) -> None:
        """Stores streams (name -> [T, H, D]) at slot_mapping_T, each page * page_size + offset; nothing where negative."""
        ...


def prepare(targets: Mapping[str, Target], joint_scale: Tensor | None = None) -> KVAppend:
    """The Append of a layer with these streams: one launch on a GPU where the twin can, else the reference.

    joint_scale: float32 [streams, 1, 1, 1] where streams have one shape and format, and can be encoded as one.
    """
    on_gpu = all(target.pages.scale.is_cuda for target in targets.values())
    if on_gpu and triton_present():
        from nibble.kernels.append import triton as append
        from nibble.kernels.append import triton_latent as append_latent

        for twin in (append, append_latent):
            if twin.serves(targets):
                return twin.Append(targets)
    return Reference(targets, joint_scale)


class Reference:
    """The definition, in plain torch. Streams that are alike are encoded in one go, which halves the calls."""

    is_capturable = False

    def __init__(self, targets: Mapping[str, Target], joint_scale: Tensor | None = None) -> None:
        self._targets = targets
        self._joint_scale = joint_scale
        self._writers = {
            name: tuple(map(_writer, target.pages.planes_PHS)) for name, target in targets.items()
        }

    def __call__(self, streams: Mapping[str, Tensor], slot_mapping_T: Tensor) -> None:
        if len(slot_mapping_T) and int(slot_mapping_T.min()) < 0:
            stored_T = slot_mapping_T >= 0
            streams = {name: x_THD[stored_T] for name, x_THD in streams.items()}
            slot_mapping_T = slot_mapping_T[stored_T]
        values = {name: _transformed(x_THD, self._targets[name]) for name, x_THD in streams.items()}
        for name, planes in self._encoded(values):
            for write, plane in zip(self._writers[name], planes, strict=True):
                write(slot_mapping_T, raw(plane))

    def _encoded(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Each stream's name with its planes."""
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


def _writer(storage_PHS: Tensor) -> Callable[[Tensor, Tensor], None]:
    """What writes a plane: (slot_mapping_T, values [T, H, ...] as integers)."""
    storage, size = raw(storage_PHS), storage_PHS.shape[2]

    def to_rows(slot_mapping_T: Tensor, values: Tensor) -> None:
        rows.index_copy_(0, slot_mapping_T, values)

    def to_pages(slot_mapping_T: Tensor, values: Tensor) -> None:
        storage[slot_mapping_T // size, :, slot_mapping_T % size] = values

    if not (tokens := storage.transpose(1, 2)).is_contiguous():
        return to_pages
    rows = tokens.flatten(0, 1)
    return to_rows
