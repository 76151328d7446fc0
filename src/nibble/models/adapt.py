"""What is done to every model before it is observed or served: latents stay latents, indexers hand on what they ask.

Owns adapted(), and what such a model must be given in each call. Must not know of weights or caches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nibble.models.latent import absorb
from nibble.models.sparse import absorb_indexers

_SPARSE = "nibble_sparse"


def adapted(model: Any) -> Any:
    """The model, changed in place; nothing is done to one that neither expands a latent nor selects tokens."""
    absorb(model)
    if absorb_indexers(model):
        setattr(model, _SPARSE, True)
    return model


def mask_for(model: Any, ids: Tensor) -> Tensor | None:
    """The mask to call a model with: none; an empty one where layers cut their indexer's mask out of it. Transformers
    hands a mask of four dimensions on as it is.
    """
    return ids.new_empty(1, 1, 0, 0) if getattr(model, _SPARSE, False) else None
