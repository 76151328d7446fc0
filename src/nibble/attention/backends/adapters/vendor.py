"""What adapters of other people's kernels share: latents, lengths, workspaces and scales as packages take them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.attention.backends.vendor import RANK, ROPE
from nibble.cache.view import KVView, StreamView
from nibble.errors import BackendError
from nibble.kernels.types import Paged
from nibble.model_spec import LATENT


def check_latents(view: KVView, package: str) -> StreamView:
    """The stream of latents, if it is one of DeepSeek's shape; BackendError otherwise."""
    found = view.streams[LATENT]
    rank, rope = found.stream.dim - found.stream.rope, found.stream.rope
    if (rank, rope) != (RANK, ROPE):
        raise BackendError(
            f"{package} reads latents of {RANK} values and {ROPE} rotary ones, and these have {rank} and {rope}; "
            "--attention-backend triton reads them"
        )
    return found


def clamp_lens(lens_B: Tensor) -> tuple[Tensor, Tensor]:
    """For kernels of which nobody says what they do for a request of 0 tokens, which is padding: lengths of at least 1,
    and whose rows are to be zeros, bool [B, 1, 1]."""
    return lens_B.clamp(min=1), (lens_B == 0)[:, None, None]


def capability(x: Tensor) -> int:
    """90 on a Hopper GPU; 0 off GPUs."""
    if not x.is_cuda:
        return 0
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


class Workspace:
    """`size` bytes on a GPU, made at first use: of zeros, which counters of kernels begin with. Stand-ins need none."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._bytes: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        if self._bytes is None:
            size = 1 if device.type == "cpu" else self._size
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._bytes


class Scales:
    """Global scales of streams as numbers, which packages take: read from the device once for each stream."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._known: WeakKeyDictionary[Paged, float] = WeakKeyDictionary()

    def of(self, entry: StreamView) -> float:
        """1.0 for formats without a scale; BackendError where heads have scales of their own."""
        if not entry.format.needs_scale:
            return 1.0
        if entry.scale.dim():
            raise BackendError(
                f"{self._package} takes one scale for all heads of {entry.stream.name!r}, and here each has its own; "
                "--attention-backend triton reads them, or calibrate with one scale a stream"
            )
        if entry.paged not in self._known:
            self._known[entry.paged] = float(entry.scale)
        return self._known[entry.paged]
