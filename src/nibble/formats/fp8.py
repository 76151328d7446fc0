"""FP8 with one FP32 scale per layer and stream: E4M3 and E5M2.

A value is stored as saturate(x / scale), rounded to nearest even: what the FP8 caches of the ecosystem hold.
Infinities saturate to the largest finite value; NaN stays NaN in its own value only. Values below half the
smallest subnormal become zero of the same sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nibble.formats.base import KVFormat, Plane, to_float, torch_dtype
from nibble.model_spec import Stream

if TYPE_CHECKING:
    from torch import Tensor

E4M3_MAX, MOST = 448.0, 2.0**118
"""The largest E4M3 value, and a bound of scales that keeps what is infinite finite."""


def scaled_e4m3(x_BD: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return x_BD in E4M3, and a float32 scale for each row: amax / 448, at least `least`, up to a power of two."""
    x_BD = x_BD.float()
    ideal = (x_BD.abs().amax(-1) / E4M3_MAX).clamp(min=least, max=MOST)
    # Up, and not to the nearest: a smaller power of two would saturate the largest value.
    scales_B = ideal.log2().ceil().exp2()
    # What exceeds the limit, such as an infinity, would become NaN by the cast alone.
    codes = (x_BD / scales_B.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch_dtype("float8_e4m3fn")), scales_B


class FP8(KVFormat):
    """One byte a value. `max_value` is the largest finite code."""

    dtype: ClassVar[str]
    """The torch dtype's name."""

    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        """Return one plane of data; the scale lies outside the pool."""
        return (Plane("data", self.dtype, (stream.heads, stream.dim)),)

    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Encode [T, H, D] / scale by a saturating cast."""
        limit = self.max_value
        assert limit is not None
        # torch's cast does not saturate: beyond the limit it gives NaN in E4M3, infinity in E5M2.
        return ((x_THD.float() / scale).clamp_(-limit, limit).to(torch_dtype(self.dtype)),)

    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        """Decode to float32 [..., H, D]."""
        return to_float(planes[0]).mul_(scale)


class E4M3(FP8):
    """FP8 with 4 bits of exponent, largest value 448."""

    name, dtype, max_value = "fp8_e4m3", "float8_e4m3fn", E4M3_MAX
    summary = "one byte a value: 4 exponent and 3 mantissa bits; one FP32 scale per layer and stream"
    source = "OCP FP8 (OFP8) E4M3"


class E5M2(FP8):
    """FP8 with 5 bits of exponent, largest value 57,344."""

    name, dtype, max_value = "fp8_e5m2", "float8_e5m2", 57344.0
    summary = "one byte a value: 5 exponent and 2 mantissa bits; one FP32 scale per layer and stream"
    source = "OCP FP8 (OFP8) E5M2"


FORMATS = (E4M3(), E5M2())
