"""Latents: how each format's latents of multi-head latent attention are read, inside a kernel.

EXTENSION POINT: an entry of LATENTS gives a format its attention over latents. A row has two sections, the latent
proper and its rotary values, which lie in the same planes or apart. Owns Section, the argument through which a kernel
receives one; what the words mean is the decoders' business (decoders.py). Must not know of attention.

Shape suffixes: P pages, H heads, S slots of a page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.codecs.decoders import DECODERS, HAS_PTX, Decoder, e2m1_parts, fp8, plain
from nibble.kernels.codecs.tiles import _DTYPES, LEAST_WIDTH, Plane
from nibble.kernels.sizes import next_power_of_2
from nibble.kernels.types import Paged

NO_ROPE, ALIKE, APART = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Rotary values: none, in the latent's own format and scale, or plain values in a plane of their own."""


@triton.jit
def _float_scale(codes, DTYPE: tl.constexpr):
    return codes.to(DTYPE)


@triton.jit
def _fp8_scaled(words, scale, DTYPE: tl.constexpr):
    return fp8(words, 0, DTYPE, 4) * scale, fp8(words, 1, DTYPE, 4) * scale


EIGHT = tl.constexpr(
    "{ .reg .b32 a, b, s; "
    "and.b32 s, $4, 0x80808080; shr.b32 a, $4, 3; and.b32 a, a, 0x0E0E0E0E; or.b32 a, a, s; "
    "shl.b32 s, $4, 4; and.b32 s, s, 0x80808080; shl.b32 b, $4, 1; and.b32 b, b, 0x0E0E0E0E; or.b32 b, b, s; "
    "prmt.b32 s, b, 0, 0x2404; mul.f16x2 $0, s, $5; prmt.b32 s, a, 0, 0x2404; mul.f16x2 $1, s, $5; "
    "and.b32 b, b, 0xFF00FF00; mul.f16x2 $2, b, $5; and.b32 a, a, 0xFF00FF00; mul.f16x2 $3, a, $5; }"
)
"""Eight E2M1 codes of two words at once: the upper bytes of float16s, of even and of odd codes, then halves."""


@triton.jit
def _nvfp4(words, scale, DTYPE: tl.constexpr):
    if HAS_PTX and tl.float16 == DTYPE:
        OUT: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        parts = tl.inline_asm_elementwise(
            EIGHT, "=&r,=&r,=&r,=&r,r,r", [words, scale], OUT, is_pure=True, pack=2
        )
    else:
        parts = e2m1_parts(words, scale, False)
    return parts


@dataclass(frozen=True, slots=True)
class Latent:
    """decoder: of the latent proper. apart: whether rotary values are a plain plane of their own, the last."""

    decoder: Decoder
    apart: bool = False


LATENTS: dict[str, Latent] = {
    **{name: Latent(decoder) for name, decoder in DECODERS.items()},
    "fp8_ds_mla": Latent(Decoder(_fp8_scaled, _float_scale, parts=2, block=128, fold=256.0), apart=True),
    "nvfp4": Latent(replace(DECODERS["nvfp4"], decode=_nvfp4)),
    "nvfp4_ds_mla": Latent(replace(DECODERS["nvfp4"], decode=_nvfp4), apart=True),
}
"""How the latents of each format are read."""


class Section(NamedTuple):
    """Neighbouring values of a row: their words and block scales. The rest is the decoder's; see tiles.Tiles."""

    words: Plane
    blocks: Plane
    DECODE: Any
    DECODE_SCALE: Any
    DTYPE: Any
    PARTS: Any
    EACH: Any
    PAGE_SIZE: Any

    @classmethod
    def of(cls, data: Tensor, scales: Tensor | None, decoder: Decoder, dtype: torch.dtype) -> Section:
        """data, scales: planes of the section's values alone; data in words."""
        width = max(next_power_of_2(data.shape[3]), LEAST_WIDTH)
        words = blocks = Plane.of(data, width)
        if scales is not None:
            blocks = Plane.of(scales, width * decoder.parts // decoder.block)
        constants = _DTYPES[dtype], decoder.parts, int(scales is not None), data.shape[2]
        return cls(words, blocks, decoder.decode, decoder.scale, *map(tl.constexpr, constants))


_known: WeakKeyDictionary[Paged, dict[tuple[int, torch.dtype], tuple[Section, Section, int]]] = (
    WeakKeyDictionary()
)


def serves(latents: Paged, rope: int) -> bool:
    """Whether there is a decoder for the latents, and both their sections are whole words and blocks."""
    found = LATENTS.get(latents.format.name)
    if found is None or latents.heads != 1:
        return False
    return found.decoder.serves(latents.dim - rope) and (found.apart or found.decoder.serves(rope))


def sections(latents: Paged, rope: int, query: torch.dtype) -> tuple[Section, Section, int]:
    """The latent proper, its rotary values, and which kind these are. Worked out once."""
    known = _known.setdefault(latents, {})
    if (rope, query) not in known:
        known[rope, query] = _made(latents, rope, query)
    return known[rope, query]


def _made(latents: Paged, rope: int, query: torch.dtype) -> tuple[Section, Section, int]:
    found, rank = LATENTS[latents.format.name], latents.dim - rope
    decoder = found.decoder
    dtype = query if decoder.half is None or query == torch.float32 else decoder.half
    data = latents.planes_PHS[0].view(torch.int16) if decoder.parts > 1 else latents.planes_PHS[0]
    scales = latents.planes_PHS[1] if decoder.block else None
    if scales is not None and scales.dtype.itemsize == 1:
        scales = scales.view(torch.uint8)
    words, blocks = rank // decoder.parts, rank // max(decoder.block, 1)
    proper = Section.of(data[..., :words], scales if scales is None else scales[..., :blocks], decoder, dtype)
    if not rope:
        return proper, proper, NO_ROPE.value
    if found.apart:
        return proper, Section.of(latents.planes_PHS[2], None, Decoder(plain), query), APART.value
    rest = Section.of(data[..., words:], scales if scales is None else scales[..., blocks:], decoder, dtype)
    return proper, rest, ALIKE.value
