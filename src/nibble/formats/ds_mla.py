"""Latents of MLA with their rotary part apart: `fp8_ds_mla`, `nvfp4_ds_mla` and `nvfp4_ds_mla_fp8rope`.

Rotary values carry positions, and are few: they stay in BF16, or in FP8 where the name says so.

fp8_ds_mla: E4M3 values, an FP32 scale per tile of 128 of them, rotary values: 512 + 16 + 128 = 656 bytes for 512 + 64.
A tile's scale is amax / 448, at least 1e-4, rounded up to a power of two. In the packing `record` a token's bytes are
those that FlashMLA's sparse decoding reads (its tests/quant.py, V32).

nvfp4_ds_mla: the latent as formats/nvfp4.py stores it, and rotary values: 256 + 32 + 128 = 416 bytes.

nvfp4_ds_mla_fp8rope: NVFP4 with a global scale of 1, so that a record describes itself, and rotary values in E4M3
without any scale: 256 + 64 + 32 = 352 bytes, block scales last. In the packing `record` a token's bytes are those that
FlashMLA's sparse decoding for SM100 reads (vllm-project/FlashMLA, pull request 18).

Infinities saturate; a NaN makes the scale of its tile, or block, NaN: the damage is seen, and stays there.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from nibble.formats.base import KVFormat, Plane, to_float
from nibble.formats.fp8 import E4M3, scaled_e4m3
from nibble.formats.nvfp4 import NVFP4
from nibble.formats.unquantised import BF16
from nibble.model_spec import LATENT, Stream

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
TILE = 128
LEAST = 1e-4
"""The least scale of a tile: one of zeros needs a scale above 0 too."""


class _Latent(KVFormat):
    """The latent in two planes, and its rotary part, if it has one, in another."""

    proper: ClassVar[KVFormat]
    """The format of the latent proper, of two planes."""
    rotary: ClassVar[KVFormat] = BF16()
    """The format of rotary values, of one plane, stored as if its scale was 1."""
    rope_plane: ClassVar[int] = 2
    """Which of the three planes holds the rotary values."""
    rope = 0
    """Rotary values at the end of what is encoded; known to a format that is bound to a stream."""

    def bound(self, stream: Stream) -> KVFormat:
        # A copy: the registered format serves streams of every size.
        bound = copy(self)
        bound.rope = stream.rope
        return bound

    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        proper = self.proper.planes(_without_rope(stream))
        if not stream.rope:
            return proper
        (rotary,) = self.rotary.planes(Stream(stream.name, stream.heads, stream.rope))
        return self._with_rope(proper, replace(rotary, name="rope"))

    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        values = x_THD.shape[-1] - self.rope
        proper = self.proper.encoded_by(self.encoder).encode(x_THD[..., :values], scale)
        if not self.rope:
            return proper
        (rotary,) = self.rotary.encode(x_THD[..., values:], scale.new_ones(()))
        return self._with_rope(proper, rotary)

    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        import torch

        if len(planes) == 2:
            return self.proper.decode(planes, scale)
        at = self.rope_plane
        values = self.proper.decode((*planes[:at], *planes[at + 1 :]), scale)
        rotary = self.rotary.decode(planes[at : at + 1], scale.new_ones(()))
        return torch.cat((values, rotary), -1)

    def _with_rope(self, proper: tuple[_T, ...], rotary: _T) -> tuple[_T, ...]:
        return (*proper[: self.rope_plane], rotary, *proper[self.rope_plane :])

    def refuses(self, stream: Stream) -> str | None:
        if stream.name != LATENT:
            return f"{self.name} stores the latent of MLA, which {stream.name} is not"
        # Only the latent proper must divide into blocks; rotary values are stored as they are.
        return super().refuses(_without_rope(stream))


def _without_rope(stream: Stream) -> Stream:
    return Stream(stream.name, stream.heads, stream.dim - stream.rope)


class _FP8Tiles(KVFormat):
    """E4M3 values with a float32 scale per tile."""

    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        data = Plane("data", "float8_e4m3fn", (stream.heads, stream.dim))
        return data, Plane("scale", "float32", (stream.heads, stream.dim // TILE))

    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        codes, scales = scaled_e4m3(x_THD.unflatten(-1, (-1, TILE)), LEAST)
        return codes.flatten(-2), scales

    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        codes, scales = planes
        return to_float(codes).unflatten(-1, (-1, TILE)).mul_(scales.unsqueeze(-1)).flatten(-2)


class FP8DsMla(_Latent):
    """FP8 latents with a scale per 128 values and BF16 rotary values, as FlashMLA reads them."""

    name = "fp8_ds_mla"
    summary = "latents of MLA: E4M3 with an FP32 scale per 128 values, rotary values in BF16"
    source = "FlashMLA, sparse decoding for DeepSeek V3.2"
    block, proper = TILE, _FP8Tiles()


class NVFP4DsMla(_Latent):
    """NVFP4 latents with BF16 rotary values."""

    name = "nvfp4_ds_mla"
    summary = "latents of MLA: NVFP4, rotary values in BF16"
    source = "vLLM's and SGLang's nvfp4_ds_mla; the block format is NVIDIA NVFP4"
    block, max_value, proper = NVFP4.block, NVFP4.max_value, NVFP4()
    encoders, encoder = NVFP4.encoders, NVFP4.encoder


class NVFP4DsMlaFP8Rope(_Latent):
    """NVFP4 latents of a global scale of 1 with E4M3 rotary values, as FlashMLA reads them on SM100."""

    name = "nvfp4_ds_mla_fp8rope"
    summary = "latents of MLA: NVFP4 without a global scale, rotary values in E4M3"
    source = "FlashMLA's nvfp4.fp8rope, sparse decoding on SM100"
    block, proper, rotary, rope_plane = NVFP4.block, NVFP4(), E4M3(), 1
    encoders, encoder = NVFP4.encoders, NVFP4.encoder


FORMATS = (FP8DsMla(), NVFP4DsMla(), NVFP4DsMlaFP8Rope())
