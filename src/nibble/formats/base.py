"""What a KV format is: planes of bytes per token, and the definition of its encoding in torch.

Shape suffixes: T tokens, H heads, D values of a head, B blocks of a head, P bytes of packed codes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from nibble.errors import ConfigError
from nibble.model_spec import Stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_RAW = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`."""
    # Imported here: a plan of memory needs formats, but not torch.
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def raw(tensor: Tensor) -> Tensor:
    """Return the same bytes as integers: indexing is defined for those everywhere, for float8 it is not."""
    return tensor.view(torch_dtype(_RAW[tensor.dtype.itemsize]))


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a format: `shape` items of `dtype` (a torch dtype's name) per token."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of an item."""
        return torch_dtype(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes, planned without torch: a dtype's name begins with its kind and its bits."""
        # By its name, so that a plan of memory needs no torch.
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        assert bits, f"dtype {self.dtype} does not say how many bits it has"
        return int(bits[1]) // 8 * prod(self.shape)


class KVFormat(ABC):
    """How one stream becomes bytes. Subclasses live one to a file, and are the definition for every kernel.

    name: what `--kv-format` and capability rows call it.
    summary, source: one line each for the docs: what it is, and the spec or kernel that its bytes agree with.
    block: values of one head that share a scale; head_dim must be a multiple of it.
    max_value: largest magnitude that a global scale of 1 can store. None where the format needs no global scale.
    plain: the compute dtype that it stores unchanged, None for a quantised format.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    block: ClassVar[int] = 1
    max_value: ClassVar[float | None] = None
    plain: ClassVar[str | None] = None

    def bound(self, stream: Stream) -> KVFormat:
        """The format that encodes `stream`: itself, unless it must know more of it than its values show."""
        return self

    @abstractmethod
    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        """The planes that hold one token of `stream`."""

    @abstractmethod
    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """x_THD [..., H, D] of any float dtype -> one tensor [..., *plane.shape] per plane; `x_THD` is not written.

        scale: float32, the global scale, broadcastable to [..., H, 1]; 1.0 where the format needs none.
        """

    @abstractmethod
    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        """Planes [..., *plane.shape] -> float32 [..., H, D], exactly what attention sees."""

    @property
    def needs_scale(self) -> bool:
        """Return whether the format has a global scale."""
        return self.max_value is not None

    def refuses(self, stream: Stream) -> str | None:
        """Why `stream` cannot be stored in this format, or None."""
        if stream.dim % self.block:
            return (
                f"{self.name} shares a scale among {self.block} values of a head, and {stream.name} has heads of "
                f"{stream.dim} values, not a multiple of {self.block}"
            )
        return None

    def check(self, stream: Stream) -> None:
        """Raises ConfigError where the format refuses `stream`."""
        if reason := self.refuses(stream):
            raise ConfigError(reason)

    def bytes_per_token(self, stream: Stream) -> int:
        """Bytes that one token of `stream` takes, the sum over the planes."""
        return sum(plane.bytes_per_token for plane in self.planes(stream))
