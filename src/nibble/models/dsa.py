"""Sparse attention (DSA): an indexer that returns what it would score with, instead of scoring.

Transformers' layers call their indexer without the context of a step. They pass its result to the attention function as
`indices`, and to later layers that share the selection. So the indexer is replaced by one that returns a Selection:
queries, key and weights, and, after a layer's attention has asked for them, the selected tokens.

Families rotate different values of an index key, in different ways, and no attribute says which. So every way is tried
on random tokens, and the one that selects what the family's own indexer selects is taken.

Shape suffixes: T tokens, H heads of the indexer, D values of a head, K selected tokens; a leading 1 is Transformers'
batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nibble.errors import ConfigError
from nibble.kernels.indexer import naive

ATTRIBUTES = ("wq_b", "wk", "k_norm", "weights_proj", "index_topk")
"""What an indexer of Transformers consists of."""
ARGUMENTS = ("hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids")
"""What the indexers that Indexer replaces are called with."""
ROTATIONS = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
"""Names of rotation functions in families' modules."""
TOKENS, TOP_K = 32, 4
"""Tokens on which indexers are compared, and how many of them each selects."""

Rotation = Callable[..., tuple[Tensor, Tensor]]


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
    """A family's indexer without its scores: projections, norm and rotation.

    Args:
        source: the family's own.
        rotate: the rotation function.
        first: where in a head the rotary values begin.
    """

    def __init__(self, source: Any, rotate: Rotation, first: int) -> None:
        super().__init__()
        self.wq_b, self.wk = source.wq_b, source.wk
        self.k_norm, self.weights_proj = source.k_norm, source.weights_proj
        self.heads, self.index_topk = source.n_heads, source.index_topk
        self.rotate, self.first, self.last = rotate, first, first + source.qk_rope_head_dim
        # Scores are linear in the weights, so both factors are applied to the weights, once a query.
        self.layer, self.scale = source.layer_idx, source.softmax_scale * source.n_heads**-0.5

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *_: Any,
        **__: Any,
    ) -> Selection:
        """Project and rotate the index queries and keys.

        Args:
            hidden_states: [1, T, hidden size].
            q_resid: compressed queries [1, T, rank].
            position_embeddings: cosines and sines of the positions.

        Returns:
            The inputs of the scores; nothing is selected yet.
        """
        x = hidden_states
        q_1THD = self.wq_b(q_resid).unflatten(-1, (self.heads, -1))
        # Some families keep the norm in float32.
        k_1T1D = self.k_norm(self.wk(x).to(self.k_norm.weight.dtype)).to(x.dtype).unsqueeze(2)
        rotary = slice(self.first, self.last)
        q_rope, k_rope = self.rotate(
            q_1THD[..., rotary], k_1T1D[..., rotary], *position_embeddings, unsqueeze_dim=2
        )
        q_1THD = torch.cat((q_1THD[..., : self.first], q_rope, q_1THD[..., self.last :]), -1)
        k_1T1D = torch.cat((k_1T1D[..., : self.first], k_rope, k_1T1D[..., self.last :]), -1)
        weights_1TH = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float() * self.scale
        return Selection(self.layer, q_1THD[0], k_1T1D[0], weights_1TH[0], self.index_topk)


def indexer_replacements(model: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """Return the layers of `model` that have an indexer, with the one to set; nothing is changed.

    Raises:
        ConfigError: an indexer does something else than Indexer.
    """
    layers: list[Any] = [m for m in model.modules() if _is_indexer(getattr(m, "indexer", None))]
    classes = {type(layer.indexer): layer.indexer for layer in reversed(layers)}
    layouts = {cls: _layout(source) for cls, source in classes.items()}
    return [(layer, {"indexer": Indexer(layer.indexer, *layouts[type(layer.indexer)])}) for layer in layers]


def _is_indexer(module: Any) -> bool:
    return isinstance(module, nn.Module) and all(hasattr(module, name) for name in ATTRIBUTES)


def _layout(source: Any) -> tuple[Rotation, int]:
    """Return the rotation of a family's indexer and where it begins; raise ConfigError if it is another indexer."""
    name, arguments = type(source).__name__, tuple(inspect.signature(source.forward).parameters)
    if arguments[: len(ARGUMENTS)] != ARGUMENTS:
        raise ConfigError(
            f"{name} selects tokens from {', '.join(arguments)}, and Nibble serves indexers that do so from "
            f"{', '.join(ARGUMENTS)}: this family cannot be served right"
        )
    functions = (getattr(sys.modules[type(source).__module__], rotation, None) for rotation in ROTATIONS)
    firsts = (0, source.head_dim - source.qk_rope_head_dim)
    layouts = [(function, first) for function in functions if function for first in firsts]
    # Without weights nothing can be compared, and all layouts have the same shapes.
    if layouts and source.wk.weight.is_meta:
        return layouts[0]
    for rotate, first in layouts:
        if _selects_alike(source, Indexer(source, rotate, first)):
            return rotate, first
    raise ConfigError(
        f"{name} selects other tokens than Nibble would in any layout that it has for indexers: this family cannot be "
        "served right"
    )


@contextmanager
def lower_topk(model: nn.Module) -> Iterator[None]:
    """Let the indexers of `model` select TOP_K tokens at most, in the body."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "index_topk")]
    before = [module.index_topk for module in modules]
    try:
        for module in modules:
            module.index_topk = min(module.index_topk, TOP_K)
        yield
    finally:
        for module, top_k in zip(modules, before, strict=True):
            module.index_topk = top_k


@torch.no_grad()
def _selects_alike(source: Any, indexer: Indexer) -> bool:
    """Return whether a family's indexer and ours select the same of random tokens, but for equal scores."""
    inputs, visible_TT = _random_inputs(source)
    with lower_topk(source):
        topk_indices_TK = source(**inputs)[0].long()
    ours = indexer(**inputs)
    scores_TT = naive.scores(ours.q_THD, ours.weights_TH, ours.key_T1D[:, 0].float())
    largest = float(scores_TT.abs().max())
    scores_TT = scores_TT.masked_fill(~visible_TT, float("-inf"))
    top_k = topk_indices_TK.shape[1]
    best_TK = scores_TT.topk(top_k).values
    own_TK = scores_TT.gather(1, topk_indices_TK).sort(descending=True).values
    # Scores are compared instead of tokens: of equal scores either may be selected. Only full rows: the first queries
    # see fewer tokens than they select.
    gap = float((best_TK - own_TK)[top_k - 1 :].abs().max())
    return gap <= largest * (1e-4 if inputs["hidden_states"].dtype == torch.float32 else 2e-2)


def _random_inputs(source: Any) -> tuple[dict[str, Any], Tensor]:
    """Return arguments of an indexer for TOKENS tokens, and which of them each query sees."""
    weight, generator = source.weights_proj.weight, torch.Generator().manual_seed(0)
    dtype, device = getattr(source.wk, "weight", weight).dtype, weight.device

    def random(width: int) -> Tensor:
        return torch.randn(1, TOKENS, width, generator=generator).to(device, dtype)

    angles = torch.randn(1, TOKENS, source.qk_rope_head_dim // 2, generator=generator).repeat(1, 1, 2) * 3
    rotary = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    visible_TT = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).tril()
    positions = torch.arange(TOKENS, device=device)[None]
    hidden, queries = random(source.wk.in_features), random(source.wq_b.in_features)
    values = (hidden, queries, rotary, visible_TT[None], positions)
    return dict(zip(ARGUMENTS, values, strict=True)), visible_TT
