"""append: new tokens of a layer, transformed, encoded and stored in its pages."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.append.naive import KVAppend, NaiveAppend, Target

__all__ = ["KVAppend", "Target", "prepare"]


def prepare(targets: Mapping[str, Target], joint_scale: Tensor | None = None) -> KVAppend:
    """Return what appends to these streams of a layer: one launch on a GPU, where there is a kernel for them.

    Args:
        targets: Where each stream is stored.
        joint_scale: Float32 [streams, 1, 1, 1] where streams have one shape and format, and can be encoded as one.

    Returns:
        A callable.
    """
    if all(target.pages.scale.is_cuda for target in targets.values()) and triton_present():
        from nibble.kernels.append import triton as fast

        for implementation in (fast.HeadsAppend, fast.RowAppend):
            if implementation.serves(targets):
                return implementation(targets)
    return NaiveAppend(targets, joint_scale)
