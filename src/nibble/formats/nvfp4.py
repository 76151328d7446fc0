"""NVFP4: E2M1 codes, an E4M3 scale per 16 values of a head, and one FP32 global scale per layer and stream.

x = e2m1 * block_scale * global. block_scale = amax_block / (6 * global), rounded to E4M3 (to nearest even,
saturating at 448); values are multiplied by the reciprocal of the ROUNDED scale and rounded to nearest, ties to
even, as FlashInfer's paged append does, byte for byte. Checkpoints store global = amax / (6 * 448).

That is the encoder `amax`. The others try several scales and take the one with the least squared error, the first of
equal ones; with it, values are rounded likewise:

- sweep: the E4M3 codes amax's + (0, -1, 1, 4, 5), up to 448. These five of all neighbours win nearly always: one or two
  codes further up the largest value of a block rounds to 6 still, with more error; 4 and 5 codes up it becomes 4.
- 4over6: amax_block / (6 * global) and amax_block / (4 * global), both rounded to E4M3 (vLLM's nvfp4_4over6).

Errors are compared in units of global * 2^(e - 16), where e is the exponent field of amax's code, at least 1: its scale
has 512 to 960 of them, fewer where it is subnormal. Magnitudes are multiplied by 2^(16 - e) / global and rounded to
whole units; the rest is exact (least_error() in formats/base.py).

A block whose scale rounds to zero decodes to zeros; if not all of it is zero, `sweep` finds a scale above 0. Infinities
saturate, and a block whose scale does keeps 448. A NaN makes the scale of its block NaN: the damage is seen, and stays
within those 16 values.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from nibble.formats.base import (
    E2M1_MAX,
    KVFormat,
    Plane,
    float_table,
    least_error,
    pack_e2m1,
    raw,
    to_float,
    torch_dtype,
    unpack_e2m1,
)
from nibble.model_spec import Stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 16
SCALE_MAX = 448.0
MAX_CODE, NAN_CODE = 126, 127
"""E4M3 codes of 448 and of NaN."""
OFFSETS = (0, -1, 1, 4, 5)
"""Candidates of `sweep`, counted in codes from amax's; benchmarks/encoder_candidates.py has what others gain."""


class NVFP4(KVFormat):
    """E2M1 values, an E4M3 scale per 16 of them, and a global float32 scale."""

    name = "nvfp4"
    summary = "half a byte a value, an E4M3 scale per 16 values, one FP32 scale per layer and stream"
    source = "NVIDIA NVFP4; FlashInfer's nvfp4 paged KV append; ModelOpt and compressed-tensors checkpoints"
    block = BLOCK
    max_value = E2M1_MAX * SCALE_MAX
    encoders, encoder = ("sweep", "amax", "4over6"), "sweep"

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
        rounded = _block_scales(x.abs(), scale, self.encoder)
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


def _block_scales(magnitude: Tensor, scale: Tensor, encoder: str) -> Tensor:
    """Return E4M3 scales [..., B, 1] of blocks of magnitudes [..., B, S] under global scales."""
    import torch

    amax = magnitude.amax(-1, keepdim=True)
    fitted = _fitted(amax, scale, E2M1_MAX)
    if encoder == "amax":
        return fitted
    # The first of all candidates is amax's.
    codes_BC = raw(fitted)
    if encoder == "sweep":
        codes_BC = _neighbours(scale.device)[codes_BC.squeeze(-1).int()]
    else:
        codes_BC = torch.cat((codes_BC, raw(_fitted(amax, scale, 4.0))), -1)
    index_BC = codes_BC.int()
    units_B1 = _units(scale.device)[index_BC[..., :1]]
    steps_BC = float_table(fitted.dtype, scale.device)[index_BC].mul_(units_B1)
    best_B = least_error(magnitude * (units_B1 / scale), steps_BC)
    return codes_BC.gather(-1, best_B.unsqueeze(-1)).view(fitted.dtype)


def _fitted(amax: Tensor, scale: Tensor, largest: float) -> Tensor:
    """Return E4M3 block scales that make the value `largest` of the largest magnitude."""
    return (amax / (largest * scale)).clamp_(max=SCALE_MAX).to(torch_dtype("float8_e4m3fn"))


@functools.cache
def _neighbours(device: torch.device) -> Tensor:
    """Return uint8 [128, C]: for each E4M3 code the candidates of `sweep`."""
    import torch

    codes = torch.arange(NAN_CODE + 1).unsqueeze(-1)
    around = (codes + torch.tensor(OFFSETS)).clamp(0, MAX_CODE)
    # A scale that saturates is kept, since a smaller one would cut off more; so is NaN.
    return torch.where(codes < MAX_CODE, around, codes).byte().to(device)


@functools.cache
def _units(device: torch.device) -> Tensor:
    """Return float32 [128]: for each E4M3 code how many units make the global scale, 2^(16 - e)."""
    import torch

    return torch.exp2(16.0 - (torch.arange(NAN_CODE + 1) >> 3).clamp(min=1)).to(device)


FORMATS = (NVFP4(),)
