"""Latents of MLA with their rotary part in BF16: `fp8_ds_mla` and `nvfp4_ds_mla`.

Only the latent proper is quantised; rotary values carry positions, and are few.

fp8_ds_mla: E4M3 values, an FP32 scale per tile of 128 of them, rotary values: 512 + 16 + 128 = 656 bytes for 512 + 64.
A tile's scale is amax / 448, at least 1e-4, rounded up to a power of two. In the packing `record` a token's bytes are
those that FlashMLA's sparse decoding reads (its tests/quant.py, V32).

nvfp4_ds_mla: the latent as formats/nvfp4.py stores it, and rotary values: 256 + 32 + 128 = 416 bytes.

Infinities saturate; a NaN makes the scale of its tile, or block, NaN: the damage is seen, and stays there.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, ClassVar

from nibble.formats.base import KVFormat, Plane, to_float
from nibble.formats.fp8 import scaled_e4m3
from nibble.formats.nvfp4 import NVFP4
from nibble.model_spec import LATENT, Stream

if TYPE_CHECKING:
    from torch import Tensor

TILE = 128
LEAST = 1e-4
"""The least scale of a tile: one of zeros needs a scale above 0 too."""


class _Latent(KVFormat):
    """The latent in some planes, then its rotary part, if it has one, in another."""

    proper: ClassVar[KVFormat]
    """The format of the latent proper, of two planes."""
    rope = 0
    """Rotary values at the end of what is encoded; known to a format that is bound to a stream."""

    def bound(self, stream: Stream) -> KVFormat:
        # A copy: the registered format serves streams of every size.
        bound = copy(self)
        bound.rope = stream.rope
        return bound

    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        rope = (Plane("rope", "bfloat16", (stream.heads, stream.rope)),) if stream.rope else ()
        return (*self.proper.planes(_without_rope(stream)), *rope)

    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        values = x_THD.shape[-1] - self.rope
        rope = (x_THD[..., values:].bfloat16(),) if self.rope else ()
        return (*self.proper.encode(x_THD[..., :values], scale), *rope)

    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        import torch

        values = self.proper.decode(planes[:2], scale)
        return torch.cat((values, planes[2].float()), -1) if len(planes) > 2 else values

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


FORMATS = (FP8DsMla(), NVFP4DsMla())
