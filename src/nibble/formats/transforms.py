"""Transforms of K that cost no bytes and make it easier to quantise, with what they ask of the query.

Each leaves the softmax of attention as it was:

- kmean: K minus a static mean per head. Scores shift by q . mean, the same for all keys of a query, and a softmax
  does not see a shift. Learned sinks and score capping do see it, so those models are refused.
- rot: K and Q times an orthogonal Hadamard matrix, block-wise where head_dim is no power of two. Scores are
  unchanged; outliers of single channels are spread over the block.

Shape suffixes: T tokens, H heads, D values of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nibble.errors import ConfigError, unknown
from nibble.model_spec import LayerGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIN_ROWS = 16
"""Rows that are rotated at a time at least."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One transform of K."""

    name: str
    summary: str
    participle: str
    """What keys are after it, for sentences."""
    key: Callable[[Tensor, Tensor | None], Tensor]
    """(k_THD, mean_HD or None) -> float32 k_THD."""
    needs_mean: bool = False
    """Whether calibration must supply the mean."""
    shifts_scores: bool = False
    """Whether scores shift, alike for all keys of a query."""
    rotates: bool = False
    """Whether the query goes the same way (kernels/linear/__init__.py)."""

    def refuses(self, group: LayerGroup) -> str | None:
        """Return why a layer group cannot use this transform, or None."""
        if group.kind != "mha":
            return f"{self.name} transforms K heads, and {group.kind} caches a latent instead"
        if self.shifts_scores and (group.sinks or group.softcap):
            return (
                f"{self.name} shifts scores, which {'sinks' if group.sinks else 'score capping'} would notice"
            )
        return None


@functools.cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Return float32 [size, size], orthogonal and symmetric; size is a power of two (Sylvester's construction)."""
    import torch

    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    # Divided by its root, the matrix is orthogonal; being symmetric too, it is its own inverse.
    return (matrix / size**0.5).to(device)


def rotate(x_THD: Tensor, mean_HD: Tensor | None = None) -> Tensor:
    """Multiply x_THD in float32, block by block, by a Hadamard matrix; the operation is its own inverse."""
    dim = x_THD.shape[-1]
    block = dim & -dim  # the largest power of two that divides dim
    # In one layout: products of other strides round otherwise, and keys of a step are a view of its heads. On some CPUs
    # products of a few rows do, too.
    rows = padded = x_THD.float().contiguous().view(-1, block)
    if len(rows) < MIN_ROWS:
        padded = rows.new_zeros(MIN_ROWS, block)
        padded[: len(rows)] = rows
    return (padded @ hadamard(block, x_THD.device))[: len(rows)].view(x_THD.shape)


def _subtract(x_THD: Tensor, mean_HD: Tensor | None) -> Tensor:
    assert mean_HD is not None
    return x_THD.float() - mean_HD


# The order is the order of application: the mean is that of unrotated keys.
_TABLE = {
    entry.name: entry
    for entry in (
        Transform(
            "kmean",
            "subtract a static per-head mean of K",
            "less their mean",
            _subtract,
            needs_mean=True,
            shifts_scores=True,
        ),
        Transform("rot", "rotate K and Q by a Hadamard matrix", "rotated", rotate, rotates=True),
    )
}


def names() -> tuple[str, ...]:
    """Return the names of all transforms, in the order in which they are applied."""
    return tuple(_TABLE)


def get(name: str) -> Transform:
    """Return the transform called `name`, or raise ConfigError."""
    if name not in _TABLE:
        raise ConfigError(unknown("transform", name, names()))
    return _TABLE[name]
