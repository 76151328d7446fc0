"""Index keys: how each format's keys of the indexer of sparse attention are read, inside a kernel.

EXTENSION POINT: an entry of KEYS gives a format its fused scoring. A key's own scale, which is positive, is no matter
of the decoder: it multiplies the key's score. Owns Keys, the argument through which a kernel receives them; what the
words mean is the decoders' business (decoders.py). Must not know of scores.

Shape suffixes: P pages, H heads, S slots of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.codecs.decoders import DECODERS, Decoder, fp8
from nibble.kernels.codecs.tiles import _DTYPES, LEAST_WIDTH, Plane
from nibble.kernels.sizes import next_power_of_2
from nibble.kernels.types import Paged


@triton.jit
def _e4m3(words, scale, DTYPE: tl.constexpr):
    """The values themselves: no dtype's range is too small for them."""
    low, high = fp8(words, 0, DTYPE, 4), fp8(words, 1, DTYPE, 4)
    return (low * 256.0).to(DTYPE), (high * 256.0).to(DTYPE)


@dataclass(frozen=True, slots=True)
class Kind:
    """scaled: whether the last plane is a float32 scale of each key. bytes: whether a key is 8-bit floats that
    choose_hopper.py can convert.
    """

    decoder: Decoder
    scaled: bool = False
    bytes: bool = False


KEYS: dict[str, Kind] = {
    **{name: Kind(DECODERS[name]) for name in ("fp32", "bf16", "fp16")},
    "index_fp8": Kind(Decoder(_e4m3, parts=2), scaled=True, bytes=True),
}
"""How the index keys of each format are read."""


class Keys(NamedTuple):
    """words: the plane of values. scales: that of scales, SCALED only. DECODE gives PARTS tiles of DTYPE."""

    words: Plane
    scales: Plane
    DECODE: Any
    DTYPE: Any
    PARTS: Any
    SCALED: Any
    PAGE_SIZE: Any

    @classmethod
    def of(cls, keys: Paged, dtype: torch.dtype, *, whole: bool = False) -> Keys:
        """The keys, decoded into `dtype`. whole: words of one byte. Worked out once."""
        known = _known.setdefault(keys, {})
        if (dtype, whole) not in known:
            known[dtype, whole] = cls._of(keys, dtype, whole)
        return known[dtype, whole]

    @classmethod
    def _of(cls, keys: Paged, dtype: torch.dtype, whole: bool) -> Keys:
        kind, data = KEYS[keys.format.name], keys.planes_PHS[0]
        if kind.decoder.parts > 1:
            data = data.view(torch.uint8 if whole else torch.int16)
        words = Plane.of(data, max(next_power_of_2(data.shape[3]), LEAST_WIDTH))
        scales = Plane.of(keys.planes_PHS[1].unsqueeze(3), 1) if kind.scaled else words
        constants = _DTYPES[dtype], kind.decoder.parts, kind.scaled, keys.page_size
        return cls(words, scales, kind.decoder.decode, *map(tl.constexpr, constants))


_known: WeakKeyDictionary[Paged, dict[tuple[torch.dtype, bool], Keys]] = WeakKeyDictionary()


def serves(keys: Paged) -> bool:
    """Whether there is a decoder for the keys."""
    kind = KEYS.get(keys.format.name)
    return (
        kind is not None and keys.heads == 1 and kind.decoder.serves(keys.dim) and _even(keys.planes_PHS[0])
    )


def _even(plane_PHS: Tensor) -> bool:
    """Whether bytes can be read as words of two."""
    return plane_PHS.itemsize > 1 or all(
        x % 2 == 0 for x in (plane_PHS.storage_offset(), *plane_PHS.stride()[:3])
    )


@triton.jit
def scale_of(keys, page, slot_N, keep_N):
    """Scales of keys; 1 where they have none."""
    at_N = keys.scales.data + page * keys.scales.PAGE + slot_N * keys.scales.SLOT
    return tl.load(at_N, mask=keep_N, other=0.0)
