"""HostPool: latents of all pages in the host's memory, in the device's format or a smaller one.

A token is one record, whatever the packing of the pool, so that bringing it to the device is one read. Kernels of a GPU
read and write the memory in place (kernels/offload/host_memory.py, kernels/offload/copy_tokens.py). Index keys stay on the device, where every
step scores all of them. Owns the storage. Must not know which pages are where (residency.py), nor of requests.
"""

from __future__ import annotations

import torch

from nibble.cache import packing as packings
from nibble.cache.layout import CacheLayout, StreamLayout
from nibble.cache.scales import KVScales
from nibble.cache.view import StreamView
from nibble.errors import CapacityError
from nibble.kernels.offload import host_memory
from nibble.kernels.types import Paged


class HostPool:
    """Room for `pages` pages of every stored layer. layout: of the host, latents alone. device: who reads it."""

    def __init__(self, layout: CacheLayout, pages: int, scales: KVScales, device: torch.device) -> None:
        self.layout = layout
        self._views: dict[int, StreamView] = {}
        for layer in layout.layers:
            (entry,) = layer.streams
            scale = scales.scale(layer.layer, entry.stream.name, layer.transforms, entry.codec)
            self._views[layer.layer] = self._stream(entry, pages, scale, device)

    def _stream(
        self, entry: StreamLayout, pages: int, scale: float | tuple[float, ...], device: torch.device
    ) -> StreamView:
        packing, size = packings.get(self.layout.packing), self.layout.page_size
        empty = torch.empty if device.type == "cpu" else host_memory.empty
        try:
            planes = packing.allocate(entry.codec.planes(entry.stream), pages, size, device, empty)
        except RuntimeError as error:  # torch's own of the host's memory is no OutOfMemoryError
            raise CapacityError(
                f"the host has no memory for {pages} pages of the cache ({error}); a smaller --hisparse "
                "host_memory=... would help"
            ) from error
        value = torch.tensor(scale, dtype=torch.float32, device=device)
        return StreamView(entry.stream, entry.codec, packing, planes, value)

    def paged(self, layer: int) -> Paged:
        """The latents of stored layer `layer`."""
        return self._views[layer].paged
