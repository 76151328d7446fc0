"""HostTier: latents of all pages in the host's memory, in the device's format or a smaller one.

A token is one record, whatever the packing of the pool, so that bringing it to the device is one read. For a GPU the
memory is pinned, and kernels read and write it in place (kernels/move.py). Index keys stay on the device, where every
step scores all of them. Owns the storage. Must not know which pages are where (residency.py), nor of requests.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from nibble.cache import packing as packings
from nibble.cache.layout import CacheLayout, StreamLayout
from nibble.cache.scales import KVScales
from nibble.cache.view import StreamView
from nibble.errors import CapacityError
from nibble.kernels.gather import Paged


class HostTier:
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
        packing = packings.get(self.layout.packing)
        size = self.layout.page_size
        try:
            planes = packing.allocate(entry.codec.planes(entry.stream), pages, size, torch.device("cpu"))
        except RuntimeError as error:  # torch's own of the host's memory is no OutOfMemoryError
            raise CapacityError(
                f"the host has no memory for {pages} pages of the cache ({error}); a smaller --hisparse "
                "host_memory=... would help"
            ) from error
        if device.type == "cuda":
            _pin(planes[0])
        value = torch.tensor(scale, dtype=torch.float32, device=device)
        return StreamView(entry.stream, entry.codec, packing, planes, value)

    def paged(self, layer: int) -> Paged:
        """The latents of stored layer `layer`."""
        return self._views[layer].paged


def _pin(plane: Tensor) -> None:
    """Locks the memory that `plane` is a column of. PyTorch's own pinned memory comes in powers of two."""
    storage = plane.untyped_storage()
    driver = torch.cuda.cudart()
    error = int(driver.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if error:
        raise CapacityError(
            f"{storage.nbytes() >> 20} MiB of host memory cannot be pinned (CUDA error {error}); "
            "a smaller --hisparse host_memory=..., or a higher limit of locked memory (ulimit -l), would help"
        )
    weakref.finalize(storage, driver.cudaHostUnregister, storage.data_ptr())
