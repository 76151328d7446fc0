"""FP4 with power-of-two block scales and no global scale: OCP MXFP4 (block 32) and `fp4_mx16` (block 16).

x = e2m1 * 2^e, with e + 127 stored in a byte (E8M0). They differ in block, in the choice of e, and in ties:

- mxfp4: e = floor(log2(amax)) - 2, ties to even (OCP Microscaling v1.0, section 6.3): the largest value of a
  block may saturate at 6.
- fp4_mx16: e = ceil(log2(max(amax / 6, 1e-10))), ties away from zero, as SGLang's `fp4_mx_block16` stores it.
  Of BF16 values SGLang's eager code rounds some otherwise than its compiled code; these bytes are the compiled code's.

That is the encoder `amax` of each. `sweep` takes floor(log2(amax)) - 2 or one more, in both: whichever has the smaller
squared error, of magnitudes that are rounded to 2^(e - 8) of the smaller e; where errors are equal, that one. A larger
exponent never wins, as its values are some of those one below; a smaller one did nowhere.

A block of zeros stores zero codes. Infinities saturate to the largest finite power of two times 6. A NaN makes
its block NaN (E8M0 code 255).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nibble.formats.base import (
    E2M1_MAX,
    KVFormat,
    Plane,
    least_error,
    pack_e2m1,
    to_float,
    torch_dtype,
    unpack_e2m1,
)
from nibble.model_spec import Stream

if TYPE_CHECKING:
    from torch import Tensor

BIAS, NAN_CODE = 127, 255
E_MIN, E_MAX = -127, 125
"""6 * 2^125 is the largest product of a code and a scale that float32 and bfloat16 can hold."""
UNITS = 256.0
"""Units of the smaller scale, in which `sweep` compares errors."""


class MX(KVFormat):
    """What both formats share; `exponent` and `ties_away` are the recipe's."""

    encoders, encoder = ("sweep", "amax"), "sweep"
    ties_away = False

    def exponent(self, amax: Tensor) -> Tensor:
        """Return amax's float32 exponent of a finite block, before clamping: exact, so that machines agree."""
        raise NotImplementedError

    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        """Return the planes of packed codes and of E8M0 block scales."""
        return (
            Plane("data", "uint8", (stream.heads, stream.dim // 2)),
            Plane("scale", "uint8", (stream.heads, stream.dim // self.block)),
        )

    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Encode [T, H, D] block by block."""
        x = x_THD.float().unflatten(-1, (-1, self.block))
        amax = x.abs().amax(-1, keepdim=True)
        # frexp() leaves the exponent of NaN and infinity open. NaN returns in the next line.
        finite = amax.nan_to_num()
        exponent = self.exponent(finite).clamp_(E_MIN, E_MAX) if self.encoder == "amax" else _best(x, finite)
        stored = (exponent + BIAS).masked_fill_(amax.isnan(), NAN_CODE).byte()
        # A power of two scales without rounding, so pack_e2m1() rounds the value itself.
        scaled = x.ldexp(-exponent).flatten(-2)
        return pack_e2m1(scaled, scaled < 0, self.ties_away), stored.squeeze(-1)

    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        """Decode to float32 [..., H, D]."""
        data, stored = planes
        values = unpack_e2m1(data).unflatten(-1, (-1, self.block))
        return values.mul_(to_float(stored.view(torch_dtype("float8_e8m0fnu"))).unsqueeze(-1)).flatten(-2)


def _floor(amax: Tensor) -> Tensor:
    """Return floor(log2(amax)) - 2, by which the largest value of a block becomes 4 or more, and less than 8."""
    exponent = amax.frexp()[1] - 1  # floor(log2(amax))
    # frexp(0) has the exponent of 0.5, so a block of zeros needs a case of its own.
    return (exponent.float() - 2).masked_fill_(amax == 0, E_MIN)


def _best(x: Tensor, amax: Tensor) -> Tensor:
    """Return the exponents [..., B, 1] with the least error of blocks x [..., B, S]."""
    import torch

    low = _floor(amax).clamp_(E_MIN, E_MAX)
    counts = x.ldexp(-low).abs_().mul_(UNITS)
    # The larger scale is twice the smaller one, but for the largest there is.
    steps_2 = torch.cat((torch.full_like(low, UNITS), torch.where(low < E_MAX, 2 * UNITS, UNITS)), -1)
    return low + least_error(counts, steps_2).unsqueeze(-1)


class MXFP4(MX):
    """OCP MXFP4: E2M1 values, an E8M0 scale per 32 of them."""

    name, block = "mxfp4", 32
    summary = "half a byte a value, a power-of-two scale per 32 values, no global scale"
    source = "OCP Microscaling Formats (MX) v1.0"

    def exponent(self, amax: Tensor) -> Tensor:
        """Return the block's exponent: floor(log2(amax)) - 2."""
        return _floor(amax)


class FP4MX16(MX):
    """E2M1 values, an E8M0 scale per 16 of them, rounded up; ties away from zero."""

    name, block, ties_away = "fp4_mx16", 16, True
    summary = "half a byte a value, a power-of-two scale per 16 values, no global scale"
    source = "SGLang's fp4_mx_block16 (earlier fp4_e2m1)"

    def exponent(self, amax: Tensor) -> Tensor:
        """Return the block's exponent: ceil(log2(amax / 6))."""
        mantissa, exponent = (amax / E2M1_MAX).clamp(min=1e-10).frexp()
        # ceil(log2): a mantissa is at least 0.5 and below 1.
        return (exponent - (mantissa == 0.5).int()).float()


FORMATS = (MXFP4(), FP4MX16())
