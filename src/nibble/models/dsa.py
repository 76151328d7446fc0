"""Sparse attention (DSA): an indexer that returns what it would score with, instead of scoring.

Transformers' layers call their indexer without the context of a step. They pass its result to the attention function as
`indices`, and to later layers that share the selection. So the indexer is replaced by one that returns a Selection:
queries, key and weights, and, after a layer's attention has asked for them, the selected tokens.

Shape suffixes: T tokens, H heads of the indexer, D values of a head; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROTATIONS = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
"""Names of rotation functions in families' modules; an indexer's code names one of them."""


class Selection:
    """The inputs of the indexer of `layer`, and its result once it is computed.

    Args:
        layer: the layer whose indexer it is.
        q_THD: index queries.
        key_T1D: index keys.
        weights_TH: weights of the heads.
        top_k: tokens to select.
    """

    def __init__(self, layer: int, q_THD: Tensor, key_T1D: Tensor, weights_TH: Tensor, top_k: int) -> None:
        self.layer, self.top_k = layer, top_k
        self.q_THD, self.key_T1D, self.weights_TH = q_THD, key_T1D, weights_TH
        self.topk_indices_TK: Tensor | None = None
        # The step in which topk_indices_TK was computed.
        self.ctx: Any = None


class Indexer(nn.Module):
    """A family's indexer without its scores: projections, norm and rotation."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.wq_b, self.wk = source.wq_b, source.wk
        self.k_norm, self.weights_proj = source.k_norm, source.weights_proj
        self.heads, self.rope, self.top_k = source.n_heads, source.qk_rope_head_dim, source.index_topk
        # Scores are linear in the weights, so both factors are applied to the weights, once a query.
        self.layer, self.scale = source.layer_idx, source.softmax_scale * source.n_heads**-0.5
        self.rotate = _rotation(type(source))

    def forward(
        self, x: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
    ) -> Selection:
        """Project and rotate the index queries and keys.

        Args:
            x: hidden states [1, T, hidden size].
            q_resid: compressed queries [1, T, rank].
            position_embeddings: cosines and sines of the positions.

        Returns:
            The inputs of the scores; nothing is selected yet.
        """
        q_1THD = self.wq_b(q_resid).unflatten(-1, (self.heads, -1))
        k_1T1D = self.k_norm(self.wk(x)).unsqueeze(2)
        # Rotary values come first in a head of the indexer; in a latent they come last.
        q_rope, k_rope = self.rotate(
            q_1THD[..., : self.rope], k_1T1D[..., : self.rope], *position_embeddings, unsqueeze_dim=2
        )
        q_1THD = torch.cat((q_rope, q_1THD[..., self.rope :]), -1)
        k_1T1D = torch.cat((k_rope, k_1T1D[..., self.rope :]), -1)
        weights_1TH = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float() * self.scale
        return Selection(self.layer, q_1THD[0], k_1T1D[0], weights_1TH[0], self.top_k)


def _rotation(indexer: type) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the rotation function of a family's indexer."""
    # Families pair rotary values in two ways, and no attribute says which: only the code does.
    names = inspect.unwrap(indexer.forward).__code__.co_names  # type: ignore[attr-defined]
    rotation = next(name for name in ROTATIONS if name in names)
    return getattr(sys.modules[indexer.__module__], rotation)


def indexer_replacements(model: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """Return the layers of `model` that have an indexer, with the one to set; nothing is changed."""
    layers: list[Any] = [m for m in model.modules() if _is_indexer(getattr(m, "indexer", None))]
    return [(layer, {"indexer": Indexer(layer.indexer)}) for layer in layers]


def _is_indexer(module: Any) -> bool:
    names = "wq_b", "wk", "index_topk"
    return isinstance(module, nn.Module) and all(hasattr(module, name) for name in names)
