"""A toy format in one file: INT8 with one float32 scale per token and head, computed from the values."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.formats import KVFormat, Plane
from nibble.model_spec import Stream


class Int8(KVFormat):
    name = "toy_int8"
    summary = "one byte a value, one FP32 scale per token and head"
    source = "this test"

    def planes(self, stream: Stream) -> tuple[Plane, ...]:
        return (Plane("data", "int8", (stream.heads, stream.dim)), Plane("scale", "float32", (stream.heads,)))

    def encode(self, x_THD: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        step = x_THD.float().abs().amax(-1).clamp(min=1e-12) / 127
        return (x_THD.float() / step.unsqueeze(-1)).round().to(torch.int8), step

    def decode(self, planes: tuple[Tensor, ...], scale: Tensor) -> Tensor:
        data, step = planes
        return data.float() * step.unsqueeze(-1)


FORMATS = (Int8(),)
