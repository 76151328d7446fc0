"""BF16, FP16 and FP32: values as they are. The baseline that every other format is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nibble.formats.base import KVFormat, Plane, torch_dtype
from nibble.model_spec import Stream

if TYPE_CHECKING:
    from torch import Tensor


class Plain(KVFormat):
    """Values stored unchanged in a compute dtype; wider values are rounded to nearest even. Inf and NaN are kept."""

    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        """Return one plane of values."""
        return (Plane("data", str(self.plain), (stream.heads, stream.dim)),)

    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Cast [T, H, D] to the format's dtype."""
        return (x_THD.to(torch_dtype(str(self.plain))),)

    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        """Cast to float32 [..., H, D]."""
        return planes[0].float()


class BF16(Plain):
    """Values in bfloat16."""

    name, plain = "bf16", "bfloat16"
    summary = "two bytes a value, unquantised"
    source = "every engine's default"


class FP16(Plain):
    """Values in float16."""

    name, plain = "fp16", "float16"
    summary = "two bytes a value, for models that compute in float16; values beyond 65504 become infinite"
    source = "IEEE 754 binary16"


class FP32(Plain):
    """Values in float32."""

    name, plain = "fp32", "float32"
    summary = "four bytes a value: exact on a CPU, for tests and as the yardstick of errors"
    source = "IEEE 754 binary32"


FORMATS = (BF16(), FP16(), FP32())
