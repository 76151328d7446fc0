"""Latents of all pages in host memory, in the device's format or a smaller one.

A token is one record, whatever the packing of the device's pool, so that fetching it is one read. Kernels read and
write this memory in place (kernels/offload/).
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
    """Storage of every stored layer's latents.

    Args:
        layout: the host's layout, latents only.
        pages: pages of the pool.
        scales: global scales of the formats.
        device: the device that reads and writes the memory.

    Raises:
        CapacityError: the host has too little memory.
    """

    def __init__(self, layout: CacheLayout, pages: int, scales: KVScales, device: torch.device) -> None:
        self.layout = layout
        self._views: dict[int, StreamView] = {}
        for layer in layout.layers:
            # A latent is the only stream here, because index keys stay on the device.
            (entry,) = layer.streams
            scale = scales.scale(layer.layer, entry.stream.name, layer.transforms, entry.codec)
            self._views[layer.layer] = self._stream(entry, pages, scale, device)

    def _stream(
        self, entry: StreamLayout, pages: int, scale: float | tuple[float, ...], device: torch.device
    ) -> StreamView:
        packing, size = packings.get(self.layout.packing), self.layout.page_size
        # Kernels of a GPU read and write this memory in place, which ordinary memory does not allow.
        empty = torch.empty if device.type == "cpu" else host_memory.empty
        try:
            planes = packing.allocate(entry.codec.planes(entry.stream), pages, size, device, empty)
        except RuntimeError as error:  # torch raises no OutOfMemoryError for host memory
            raise CapacityError(
                f"the host has no memory for {pages} pages of the cache ({error}); a smaller --hisparse "
                "host_memory=... would help"
            ) from error
        value = torch.tensor(scale, dtype=torch.float32, device=device)
        return StreamView(entry.stream, entry.codec, packing, planes, value)

    def paged(self, layer: int) -> Paged:
        """Return the latents of stored layer `layer`, as kernels read them."""
        return self._views[layer].paged
