"""The bytes of the cache: one pool class for all formats, which allocates what the layout says.

Shape suffixes: T tokens, H heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nibble.cache import packing as packings
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.scales import KVScales
from nibble.cache.view import KVView, StreamView
from nibble.formats import transforms as transforms_of
from nibble.formats.base import raw
from nibble.kernels import append
from nibble.model_spec import INDEX

POISON = 0xFF
"""A byte that makes NaN in every format that has one."""


class PagedPool:
    """Pages of every stored layer, and the writer of each.

    Args:
        layout: what each layer stores.
        pages: number of pages.
        scales: global scales and means of K.
        device: where the pages lie.
        frames: with a host tier, the pages of what attention reads that have room here; index keys have room for all.
        poison: fill with bytes that decode to NaN wherever the format can, so that a read of an unwritten slot shows.

    Raises:
        ScaleError: a scale that the layout needs is missing.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pages: int,
        scales: KVScales,
        device: torch.device | str = "cpu",
        *,
        frames: int | None = None,
        poison: bool = False,
    ) -> None:
        self.layout = layout
        self.pages, self.frames = pages, frames or pages
        self.device = torch.device(device)
        self.views = {layer.layer: self._allocate(layer, scales) for layer in layout.layers}
        self._appends = {layer: tuple(_appends(view)) for layer, view in self.views.items()}
        if poison:
            for plane in self._planes():
                raw(plane).fill_(POISON if plane.itemsize == 1 else -1)  # sets all bits in both cases

    def _allocate(self, layer: LayerLayout, scales: KVScales) -> KVView:
        mean = scales.mean(layer.layer, layer.transforms)
        streams = {
            entry.stream.name: self._stream(
                entry, scales.scale(layer.layer, entry.stream.name, layer.transforms, entry.codec)
            )
            for entry in layer.streams
        }
        return KVView(
            streams,
            self.layout.page_size,
            tuple(transforms_of.get(name) for name in layer.transforms),
            None if mean is None else torch.tensor(mean, device=self.device),
            _joint_scale(tuple(entry for name, entry in streams.items() if name != INDEX)),
        )

    def _stream(self, entry: StreamLayout, scale: float | tuple[float, ...]) -> StreamView:
        packing = packings.get(self.layout.packing_of(entry))
        # Index keys are never offloaded, because every step scores all of them.
        pages = self.pages if entry.stream.name == INDEX else self.frames
        planes = packing.allocate(entry.codec.planes(entry.stream), pages, self.layout.page_size, self.device)
        value = torch.tensor(scale, dtype=torch.float32, device=self.device)
        # A scale per head, [H], becomes [H, 1] and so broadcasts over the values of a head.
        return StreamView(
            entry.stream, entry.codec, packing, planes, value.unsqueeze(-1) if value.dim() else value
        )

    def _planes(self) -> list[Tensor]:
        return [p for view in self.views.values() for stream in view.streams.values() for p in stream.planes]

    @property
    def nbytes(self) -> int:
        """Return the bytes allocated for pages."""
        return sum(plane.nbytes for plane in self._planes())

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph may hold a write to any layer."""
        return all(write.is_capturable for writes in self._appends.values() for _, write in writes)

    def view(self, layer: int) -> KVView:
        """Return what a backend reads of stored layer `layer`."""
        return self.views[layer]

    def write(self, layer: int, streams: Mapping[str, Tensor], slot_mapping_T: Tensor) -> None:
        """Encode and store new tokens.

        Streams that attention reads are passed together. An index key is needed earlier and may come alone.

        Args:
            layer: a stored layer.
            streams: stream name -> [T, H, D].
            slot_mapping_T: int64 slots; nothing is stored where negative.
        """
        for first, write in self._appends[layer]:
            if first in streams:
                write(
                    {name: x for name, x in streams.items() if (name == INDEX) == (first == INDEX)},
                    slot_mapping_T,
                )


def _appends(view: KVView) -> Iterator[tuple[str, append.KVAppend]]:
    """Yield the writers of a layer, each with the first of the streams that it writes together."""
    targets = _targets(view)
    # An index key has a writer of its own, because it comes before keys and values of its layer.
    index = targets.pop(INDEX, None)
    yield next(iter(targets)), append.prepare(targets, view.joint_scale)
    if index is not None:
        yield INDEX, append.prepare({INDEX: index})


def _targets(view: KVView) -> dict[str, append.Target]:
    """Return what a writer needs of each stream. Only keys are transformed."""
    targets = {name: append.Target(entry.paged) for name, entry in view.streams.items()}
    if view.transforms:
        targets["k"] = append.Target(view.streams["k"].paged, view.transforms, view.k_mean_HD)
    return targets


def _joint_scale(streams: tuple[StreamView, ...]) -> Tensor | None:
    """Return float32 [streams, 1, 1, 1] if all streams are alike and have a single scale each, else None."""
    # Only streams of one format and shape can be stacked and encoded at once.
    kinds = {(entry.format.name, entry.stream.heads, entry.stream.dim) for entry in streams}
    if len(kinds) > 1 or any(entry.scale.dim() for entry in streams):
        return None
    return torch.stack([entry.scale for entry in streams]).view(-1, 1, 1, 1)
