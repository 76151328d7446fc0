"""NVFP4: E2M1 codes, an E4M3 scale per 16 values of a head, and one FP32 global scale per layer and stream.

x = e2m1 * block_scale * global. block_scale = amax_block / (6 * global), rounded to E4M3 (to nearest even,
saturating at 448); values are multiplied by the reciprocal of the ROUNDED scale and rounded to nearest, ties to
even, as FlashInfer's paged append does, byte for byte. Checkpoints store global = amax / (6 * 448).

A block whose scale rounds to zero decodes to zeros. Infinities saturate. A NaN makes the scale of its block NaN:
the damage is seen, and stays within those 16 values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nibble.formats.base import E2M1_MAX, KVFormat, Plane, pack_e2m1, to_float, torch_dtype, unpack_e2m1
from nibble.model_spec import Stream

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 16
SCALE_MAX = 448.0


class NVFP4(KVFormat):
    """E2M1 values, an E4M3 scale per 16 of them, and a global float32 scale."""

    name = "nvfp4"
    summary = "half a byte a value, an E4M3 scale per 16 values, one FP32 scale per layer and stream"
    source = "NVIDIA NVFP4; FlashInfer's nvfp4 paged KV append; ModelOpt and compressed-tensors checkpoints"
    block = BLOCK
    max_value = E2M1_MAX * SCALE_MAX

    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        """Return the planes of packed codes and of E4M3 block scales."""
        return (
            Plane("data", "uint8", (stream.heads, stream.dim // 2)),
            Plane("scale", "float8_e4m3fn", (stream.heads, stream.dim // BLOCK)),
        )

    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Encode [T, H, D]; values are divided by the rounded block scale."""
        x = x_THD.float().unflatten(-1, (-1, BLOCK))
        # The scale is per block here, one dimension more than per value: [H, 1] becomes [H, 1, 1].
        scale = scale.unsqueeze(-1) if scale.dim() else scale
        ideal = x.abs().amax(-1, keepdim=True) / (E2M1_MAX * scale)
        rounded = ideal.clamp_(max=SCALE_MAX).to(torch_dtype("float8_e4m3fn"))
        # Of the rounded scale, because decoding multiplies by that one.
        inverse = (rounded.float() * scale).reciprocal_()
        # A block whose scale is zero is stored as (signed) zeros.
        inverse.nan_to_num_(nan=math.nan, posinf=0.0)
        scaled = (x * inverse).flatten(-2)
        # By the sign bit and not by x < 0, so that -0.0 keeps its sign.
        return pack_e2m1(scaled, x_THD.signbit()), rounded.squeeze(-1)

    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        """Decode to float32 [..., H, D]."""
        data, block_scale = planes
        values = unpack_e2m1(data).unflatten(-1, (-1, BLOCK))
        # Both scales first: that is one product per block in place of one per value.
        return values.mul_((to_float(block_scale) * scale).unsqueeze(-1)).flatten(-2)


FORMATS = (NVFP4(),)
