"""What Triton's interpreter gets wrong of narrow floats, put right: it rounds halves up, loses carries, and multiplies
bits of bfloat16 as if they were integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

TYPES = {
    tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}  # fmt: skip
BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


def convert(x: Any, source: Any, target: Any, rounding: Any = None) -> Any:
    """Return the bits of values in another type, rounded to nearest, ties to even."""
    values = torch.frombuffer(bytearray(x.tobytes()), dtype=TYPES[source]).to(TYPES[target])
    bits, unsigned = BITS[values.itemsize]
    return values.view(bits).numpy().view(unsigned).reshape(x.shape)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter convert and multiply as GPUs do, until the test ends."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(convert(x.data, tl.bfloat16, tl.float32).view(np.float32), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        )
        return multiply(self, a, b, *rest)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
