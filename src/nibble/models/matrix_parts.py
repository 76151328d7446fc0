"""The tensors that a checkpoint has of a quantised matrix. unpack.py and pack.py read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibble.errors import WeightError

BLOCK, CPU = (128, 128), torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of a matrix."""

    name: str
    """Of the matrix, for errors."""
    stored: Mapping[str, Any]
    """Safetensors' slices by the end of their names."""
    config: Mapping[str, Any]
    """The checkpoint's `quantization_config`."""
    device: torch.device = CPU
    """Where the matrix shall be."""

    def __getitem__(self, end: str) -> Tensor:
        if end not in self.stored:
            raise WeightError(f"the checkpoint lacks {end!r} beside the quantised matrix {self.name}")
        tensor: Tensor = self.stored[end][...]
        return tensor

    def get(self, *ends: str) -> Tensor | None:
        """Return the first of them that is there."""
        return next((self[end] for end in ends if end in self.stored), None)

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs of a block of FP8."""
        height, width = self.config.get("weight_block_size") or BLOCK
        return height, width

    def check(self, right: bool, what: str) -> None:
        """Raise WeightError unless what is stored fits together."""
        if not right:
            raise WeightError(f"the quantised matrix {self.name} does not fit together: {what}")
