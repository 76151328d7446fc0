"""What a KV format is: planes of bytes per token, and the definition of its encoding in torch.

Formats share two things here. E2M1, the 4-bit float of all FP4 formats: codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6, and
bit 3 is the sign (OCP Microscaling Formats (MX) v1.0, section 5.3.3); scales belong to the formats. And tables from
bytes to values: on a CPU a look-up is several times faster than a conversion.

A 4-bit format has one layout, and several encoders, which choose its block scales; all readers read what any of them
wrote. `amax` fits the largest magnitude of a block, as the sources of the formats say. `sweep`, the default, takes the
best of a few scales around that one, by squared error. It looks at the block alone, so bytes stay a function of the
token.

Shape suffixes: T tokens, H heads, D values of a head, B blocks of a head, P bytes of packed codes (D / 2 of E2M1),
C candidate scales, N blocks of all heads, S values of a block.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

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


def in_token_order(scales_PHSB: Tensor, interleave: int) -> Tensor:
    """Return block scales [P, H, S, B], token after token, of pages that are interleaved by so many tokens, or none."""
    if not interleave:
        return scales_PHSB
    groups = scales_PHSB.unflatten(-2, (-1, interleave)).flatten(-2)
    return groups.unflatten(-1, (-1, interleave)).transpose(-1, -2).flatten(-3, -2)


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a format: `shape` items of `dtype` (a torch dtype's name) per token."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of an item."""
        return torch_dtype(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token."""
        # By the dtype's name, which begins with its kind and its bits, so that a plan of memory needs no torch.
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        assert bits, f"dtype {self.dtype} does not say how many bits it has"
        return int(bits[1]) // 8 * prod(self.shape)


class KVFormat(ABC):
    """How one stream becomes bytes. Subclasses live one to a file, and are the definition for every kernel."""

    name: ClassVar[str]
    """What `--kv-format` and capability rows call it."""
    summary: ClassVar[str]
    """One line for the docs: what it is."""
    source: ClassVar[str]
    """One line for the docs: the spec or kernel that its bytes agree with."""
    block: ClassVar[int] = 1
    """Values of one head that share a scale; head_dim must be a multiple of it."""
    max_value: ClassVar[float | None] = None
    """Largest magnitude that a global scale of 1 can store. None where the format needs no global scale."""
    plain: ClassVar[str | None] = None
    """The compute dtype that it stores unchanged, None for a quantised format."""
    encoders: ClassVar[tuple[str, ...]] = ("",)
    """Ways to choose its block scales, the default first. A format with a single way has no name for it."""
    encoder = ""
    """The way that `encode` goes, one of `encoders`."""

    def encoded_by(self, encoder: str) -> KVFormat:
        """Return the format that goes the way `encoder`; itself if it has no such way."""
        if encoder == self.encoder or encoder not in self.encoders:
            return self
        # A copy: the registered format goes the default way.
        other = copy(self)
        other.encoder = encoder
        return other

    def bound(self, stream: Stream) -> KVFormat:
        """Return the format that encodes `stream`: itself, unless it must know more of it than its values show."""
        return self

    @abstractmethod
    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        """Return the planes that hold one token of `stream`."""

    @abstractmethod
    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Encode values [..., H, D] of any float dtype, which are not written.

        Args:
            x_THD: Values.
            scale: float32, the global scale, broadcastable to [..., H, 1]; 1.0 where the format needs none.

        Returns:
            One tensor [..., *plane.shape] per plane.
        """

    @abstractmethod
    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        """Decode planes [..., *plane.shape] to float32 [..., H, D], exactly what attention sees."""

    @property
    def is_4bit(self) -> bool:
        """Return whether values are 4-bit codes in blocks with a scale each, which encoders choose."""
        return bool(self.encoder)

    @property
    def needs_scale(self) -> bool:
        """Return whether the format has a global scale."""
        return self.max_value is not None

    def refuses(self, stream: Stream) -> str | None:
        """Return why `stream` cannot be stored in this format, or None."""
        if stream.dim % self.block:
            return (
                f"{self.name} shares a scale among {self.block} values of a head, and {stream.name} has heads of "
                f"{stream.dim} values, not a multiple of {self.block}"
            )
        return None

    def bytes_per_token(self, stream: Stream) -> int:
        """Return the bytes that one token of `stream` takes, the sum over the planes."""
        return sum(plane.bytes_per_token for plane in self.planes(stream))


ENCODERS = {
    "sweep": "of a few scales around amax's, the one with the least squared error",
    "amax": "the scale that fits the largest magnitude of a block, byte for byte as other engines append",
    "4over6": "of the scales that make 6 and 4 of the largest magnitude, the one with the less squared error",
}
"""What encoders do."""

E2M1_MAX = 6.0
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@functools.cache
def _e2m1_thresholds(ties_away: bool, device: torch.device) -> Tensor:
    """Return the largest float32 values that still belong to the lower of two neighbouring codes."""
    import torch

    # Whether a value that lies on a midpoint goes to the upper code: always, or where that code is even.
    up = [ties_away or code % 2 == 0 for code in range(1, 8)]
    middle = torch.tensor(_E2M1_MIDPOINTS, dtype=torch.float32)
    # bucketize() puts a value on a threshold into the lower bucket. One float below the midpoint,
    # the threshold sends the midpoint itself up.
    below = torch.nextafter(middle, torch.zeros(()))
    return torch.where(torch.tensor(up), below, middle).to(device)


@functools.cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Return int64 [256]: the two float32 values of every byte, side by side, to be looked up as one."""
    import torch

    values = torch.tensor((*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)), dtype=torch.float32)
    byte = torch.arange(256)
    # The low half of a byte is the even value. Both values together are the 8 bytes of one int64.
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    return pairs.view(torch.int64).flatten().to(device)


def pack_e2m1(x_D: Tensor, negative_D: Tensor, ties_away: bool = False) -> Tensor:
    """Pack float32 [..., D] into uint8 [..., P]: nearest codes of |x|, saturating at 6, with signs of their own.

    Args:
        x_D: Values, already divided by their scale.
        negative_D: Bool, which codes get the sign bit.
        ties_away: Whether a value midway between two codes goes to the upper one; else to the even one.
    """
    import torch

    codes_D = torch.bucketize(x_D.abs(), _e2m1_thresholds(ties_away, x_D.device), out_int32=True)
    # Callers differ in whether -0.0 has a sign, so they say what is negative.
    codes_D += negative_D.to(torch.int32) << 3
    return (codes_D[..., 0::2] + (codes_D[..., 1::2] << 4)).to(torch.uint8)


MOST_UNITS = 6144.0
"""What magnitudes are cut off at when errors are compared: 6 times the largest scale of the recipe, and a bit."""
_PIECE = 1 << 20
"""Values that are compared at a time, which bounds the memory that it takes."""
_EXPONENT = 0x7F800000
"""The bits of a float32's exponent."""


def least_error(x_NS: Tensor, steps_NC: Tensor) -> Tensor:
    """Return int64 [N]: which candidate scale stores a block with the least squared error, the first of equal ones.

    Every machine finds the same, whatever the order of its sums, with fused multiply-add or without: magnitudes are
    rounded once, to whole units, and all that follows is whole numbers, which float32 holds exactly below 2^24. A sum
    that is larger may be off, but never falls below that; so callers choose units in which the first candidate's sum
    is below 2^24. The quotient that finds a code may be rounded in any way: a code can differ only midway between two,
    which are equally far.

    Args:
        x_NS: float32 magnitudes of blocks, in units; NaN counts as MOST_UNITS. N stands for any dimensions.
        steps_NC: float32 candidate scales in units: multiples of 4, or 0, which stores zeros.
    """
    import torch

    if x_NS.numel() > _PIECE:
        shape, blocks = x_NS.shape[:-1], max(_PIECE // x_NS.shape[-1], 1)
        pieces = zip(x_NS.flatten(0, -2).split(blocks), steps_NC.flatten(0, -2).split(blocks), strict=True)
        return torch.cat([least_error(x, steps) for x, steps in pieces]).view(shape)
    z_N1S = x_NS.clamp(max=MOST_UNITS).nan_to_num_(MOST_UNITS).round_().unsqueeze(-2)
    steps_NC1 = steps_NC.unsqueeze(-1)
    # The scale 0 makes zeros of all codes.
    t_NCS = (z_N1S / steps_NC1.clamp(min=1.0)).clamp_(max=E2M1_MAX)
    # A power of two from which on float32 has the spacing that E2M1 has at t: adding it rounds.
    exponent_NCS = t_NCS.clamp(min=1.0).view(torch.int32).bitwise_and_(_EXPONENT)
    lift_NCS = exponent_NCS.view(torch.float32).mul_(2.0**22)
    values_NCS = t_NCS.add_(lift_NCS).sub_(lift_NCS)
    return torch.addcmul(z_N1S, values_NCS, steps_NC1, value=-1).square_().sum(-1).argmin(-1)


def unpack_e2m1(packed_P: Tensor) -> Tensor:
    """Unpack uint8 [..., P] into float32 [..., D]."""
    import torch

    return look_up(packed_P, _e2m1_pairs(packed_P.device)).view(torch.float32)


def look_up(codes: Tensor, table: Tensor) -> Tensor:
    """Return the values [...] that a table [256] has for one-byte codes [...]."""
    import torch

    # As int32, because index_select() takes no 8-bit indices.
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


@functools.cache
def float_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return float32 [256]: the value of every code of an 8-bit float dtype."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)


def to_float(codes: Tensor) -> Tensor:
    """Return an 8-bit float tensor in float32, exactly."""
    return look_up(codes, float_table(codes.dtype, codes.device))
