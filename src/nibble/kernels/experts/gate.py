"""What becomes of the outputs of experts' first matrices: half as many values, which their second ones multiply.

Shape suffixes: S rows, one for each choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SILU, CLAMPED = "silu", "clamped"


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate that kernels compute; a and b are what it joins."""

    kind: str
    """SILU: a is the first half of outputs, b the second, and silu(a) * b is left. CLAMPED: a and b are neighbours, a
    is clamped from above and b on both sides, and a * sigmoid(factor * a) * (b + 1) is left."""
    limit: float = 0.0
    factor: float = 1.0


def gated(y: Tensor, gate: Gate) -> Tensor:
    """Return what a gate leaves of outputs [S, 2 N] -> [S, N], computed in float32."""
    if gate.kind == SILU:
        a, b = y.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(a) * b).to(y.dtype)
    a, b = y[:, ::2].float(), y[:, 1::2].float()
    a, b = a.clamp(max=gate.limit), b.clamp(-gate.limit, gate.limit)
    return (a * torch.sigmoid(gate.factor * a) * (b + 1)).to(y.dtype)
