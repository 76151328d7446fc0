"""Who looks on while a step attends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from nibble.kernels.types import AttentionParams


class AttentionObserver(Protocol):
    """Looks on while a step attends (engine/error_monitor.py). Must not write to what it is shown."""

    def observe(
        self,
        layer: int,
        q_THD: Tensor,
        streams: Mapping[str, Tensor],
        params: AttentionParams,
        out_THD: Tensor,
    ) -> None:
        """Compare a layer's query and streams, behind norms and rotary positions, with its output.

        Args:
            layer: the layer's index.
            q_THD: its query.
            streams: its new tokens.
            params: what it asked for.
            out_THD: what attention returned.
        """
        ...
