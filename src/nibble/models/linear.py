"""Linear layers for the CPU whose result for a token does not depend on how many tokens are computed with it.

Plain float32 products sum in another order for 1 token than for 8; quantised K and V turn such a last-bit difference
into a whole step now and then, and an answer would depend on the batch. oneDNN products over weights packed for
small batches do not, and are 2 to 3 times faster from 2 tokens on. Where torch brings no oneDNN, layers stay as
they are. Owns pack_linears(). Must not know of attention or of caches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PACKED_FOR = 8
"""Tokens that weights are packed for."""


class PackedLinear(nn.Module):
    """y = x W^T + b, with W [out, in] packed by oneDNN. The packed weight is opaque, and replaces the plain one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The plain weight, unpacked anew at each reading: for models that look at it (its dtype, for one)."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def available() -> bool:
    """Whether this build of torch can pack weights."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_linears(model: nn.Module) -> int:
    """Replaces the float32 linear layers of a CPU model in place; returns how many."""
    if not available():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype == torch.float32 and child.weight.device.type == "cpu"
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)
