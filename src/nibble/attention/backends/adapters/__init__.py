"""The adapters that call each backend's kernels, loaded by name, with torch.

Here is what the adapters of other people's kernels share: latents, lengths, workspaces and scales, as packages take
them.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.attention.backends.vendor import RANK, ROPE
from nibble.cache.pool import KVView, StreamView
from nibble.errors import BackendError
from nibble.kernels.types import Paged
from nibble.model_spec import LATENT


def check_latents(view: KVView, package: str) -> StreamView:
    """Return the stream of latents; raise BackendError if they are not of DeepSeek's shape."""
    latent = view.streams[LATENT]
    rank, rope = latent.stream.dim - latent.stream.rope, latent.stream.rope
    if (rank, rope) != (RANK, ROPE):
        raise BackendError(
            f"{package} reads latents of {RANK} values and {ROPE} rotary ones, and these have {rank} and {rope}; "
            "--attention-backend triton reads them"
        )
    return latent


def clamp_lens(lens_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return lengths of at least 1, and which were 0: bool [B, 1, 1], rows of padding that are to be zeros.

    For kernels that do not document what they do for a request of 0 tokens.
    """
    return lens_B.clamp(min=1), (lens_B == 0)[:, None, None]


def capability(x: Tensor) -> int:
    """Return the compute capability of a tensor's GPU, 90 on Hopper; 0 off GPUs."""
    if not x.is_cuda:
        return 0
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


class Workspace:
    """`size` bytes on a GPU, allocated at first use. Zeros, which counters of kernels start from."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._bytes: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the workspace, uint8. On a CPU, where stand-ins run, it is one byte."""
        if self._bytes is None:
            size = 1 if device.type == "cpu" else self._size
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._bytes


class Scales:
    """Global scales of streams as numbers, which packages take."""

    def __init__(self, package: str) -> None:
        self._package = package
        # Read from the device once for each stream of the pool, and dropped with the pool.
        self._scales: WeakKeyDictionary[Paged, float] = WeakKeyDictionary()

    def of(self, entry: StreamView) -> float:
        """Return a stream's scale, 1.0 for formats without; raise BackendError where heads have scales of their own."""
        if not entry.format.needs_scale:
            return 1.0
        if entry.scale.dim():
            raise BackendError(
                f"{self._package} takes one scale for all heads of {entry.stream.name!r}, and here each has its own; "
                "--attention-backend triton reads them, or calibrate with one scale a stream"
            )
        if entry.paged not in self._scales:
            self._scales[entry.paged] = float(entry.scale)
        return self._scales[entry.paged]
