"""PagedPool: the bytes of the cache. The only pool class, for all formats; it allocates what the layout says.

Owns the storage of every stored layer, and writing to it. Who owns which page is manager.py's business; must not
know of requests, phases or backends.

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
    """Pages of every stored layer. scales: raises ScaleError here where the layout needs one that is missing.

    frames: how many pages of what attention reads there is room for, where a host tier holds the rest; of index keys
    there are all. poison: fill with bytes that decode to NaN wherever the format can, so that a read of an unwritten
    slot shows.
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
                raw(plane).fill_(POISON if plane.itemsize == 1 else -1)  # all bits, either way

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
        pages = self.pages if entry.stream.name == INDEX else self.frames
        planes = packing.allocate(entry.codec.planes(entry.stream), pages, self.layout.page_size, self.device)
        value = torch.tensor(scale, dtype=torch.float32, device=self.device)
        return StreamView(
            entry.stream, entry.codec, packing, planes, value.unsqueeze(-1) if value.dim() else value
        )

    def _planes(self) -> list[Tensor]:
        return [p for view in self.views.values() for stream in view.streams.values() for p in stream.planes]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for pages."""
        return sum(plane.nbytes for plane in self._planes())

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph may hold a write to any layer."""
        return all(write.is_capturable for writes in self._appends.values() for _, write in writes)

    def view(self, layer: int) -> KVView:
        """What a backend reads of stored layer `layer`."""
        return self.views[layer]

    def write(self, layer: int, streams: Mapping[str, Tensor], slot_mapping_T: Tensor) -> None:
        """Encodes and stores streams (name -> [T, H, D]) of T tokens at int64 slot_mapping_T; nothing where negative.

        What attention reads is given together; an index key is needed earlier, and may come alone.
        """
        for first, write in self._appends[layer]:
            if first in streams:
                write(
                    {name: x for name, x in streams.items() if (name == INDEX) == (first == INDEX)},
                    slot_mapping_T,
                )


def _appends(view: KVView) -> Iterator[tuple[str, append.KVAppend]]:
    """What writes the streams of a layer, by the first of those that it writes together."""
    targets = _targets(view)
    index = targets.pop(INDEX, None)
    yield next(iter(targets)), append.prepare(targets, view.joint_scale)
    if index is not None:
        yield INDEX, append.prepare({INDEX: index})


def _targets(view: KVView) -> dict[str, append.Target]:
    """What a writer must know of each stream. Keys alone are transformed."""
    targets = {name: append.Target(entry.paged) for name, entry in view.streams.items()}
    if view.transforms:
        targets["k"] = append.Target(view.streams["k"].paged, view.transforms, view.k_mean_HD)
    return targets


def _joint_scale(streams: tuple[StreamView, ...]) -> Tensor | None:
    """float32 [streams, 1, 1, 1] where all streams have one shape, one format and a single scale each, else None."""
    kinds = {(entry.format.name, entry.stream.heads, entry.stream.dim) for entry in streams}
    if len(kinds) > 1 or any(entry.scale.dim() for entry in streams):
        return None
    return torch.stack([entry.scale for entry in streams]).view(-1, 1, 1, 1)
