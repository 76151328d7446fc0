"""What is done to every model before it is observed or served: latents stay latents, indexers hand on what they ask.

Owns adapted(), adaptations(), and what such a model must be given in each call. Must not know of weights or caches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nibble.models.dsa import absorb_indexers, stand_ins
from nibble.models.mla import absorb, absorptions

_SPARSE = "nibble_sparse"


def adapted(model: Any) -> Any:
    """The model, changed in place; nothing is done to one that neither expands a latent nor selects tokens."""
    absorb(model)
    if absorb_indexers(model):
        setattr(model, _SPARSE, True)
    return model


def adaptations(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    """What adapted() would change, as attributes by module; the model stays as it is."""
    indexers = stand_ins(model)
    return [*absorptions(model), *indexers, *([(model, {_SPARSE: True})] if indexers else [])]


def mask_for(model: Any, ids: Tensor) -> Tensor | None:
    """The mask to call a model with: none; an empty one where layers cut their indexer's mask out of it. Transformers
    hands a mask of four dimensions on as it is.
    """
    return ids.new_empty(1, 1, 0, 0) if getattr(model, _SPARSE, False) else None
