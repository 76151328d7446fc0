"""What kernels read: the pages of a stream, the requests of a step, and what happens to scores.

Shape suffixes: P pages, H heads, S slots of a page, B requests, N pages of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nibble.formats import KVFormat


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Paged:
    """The pages of one stream of a layer."""

    format: KVFormat
    dim: int
    planes_PHS: tuple[Tensor, ...]
    """The format's planes as [page, head, slot, values], with any strides before the last."""
    scale: Tensor
    """The global scale: float32, () or [H, 1]."""

    @property
    def heads(self) -> int:
        """Return the number of heads."""
        return self.planes_PHS[0].shape[1]

    @property
    def page_size(self) -> int:
        """Return the number of tokens in a page."""
        return self.planes_PHS[0].shape[2]


class AttentionBatch(Protocol):
    """The requests of a call. A replayed CUDA graph may change the lengths that stand on the device: seq_lens_B, whose
    zeros are padding, and cu_seqlens_q_B1, the first row of each request with the end of the last.
    """

    @property
    def query_lens(self) -> tuple[int, ...]: ...
    @property
    def page_table_BN(self) -> Tensor: ...
    @property
    def cu_seqlens_q_B1(self) -> Tensor: ...
    @property
    def seq_lens_B(self) -> Tensor: ...


class AttentionParams(Protocol):
    """What happens to scores. window: tokens seen, the present one included. softcap: scores become
    softcap * tanh(score / softcap). sinks_H: a logit per query head that joins the sum of the softmax.
    """

    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def sinks_H(self) -> Tensor | None: ...
