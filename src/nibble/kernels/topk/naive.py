"""The largest values of rows by the book: a stable sort, in which NaN is larger than all others.

Shape suffixes: K largest values; S rows, V values of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = -1
"""Stands for a token where logits are not numbers."""


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values along the last dimension, descending, and their places [..., K]."""
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def likeliest(x_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each row's largest value, the first of several, and the same, NO_TOKEN where that is NaN."""
    peaks_S, tokens_S = x_SV.max(-1)
    return tokens_S, tokens_S.masked_fill(peaks_S.isnan(), NO_TOKEN)


def draw_likeliest(x_SV: Tensor, ids_V: Tensor | None, tokens_S: Tensor, chances_S: Tensor) -> None:
    """Write the id of each row's largest value, the first of several, and its chance."""
    x_SV = x_SV.float()
    peaks_S, places_S = x_SV.max(-1)
    # Infinite values are equal, and their difference is no number.
    over_SV = torch.where(x_SV == peaks_S[:, None], 1.0, (x_SV - peaks_S[:, None]).exp())
    tokens_S.copy_(places_S if ids_V is None else ids_V[places_S])
    chances_S.copy_(1 / over_SV.sum(-1))
