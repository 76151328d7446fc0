"""The exact window by its definition, dense and apart from pages, routes and kernels: what the start-up test expects.

Shape suffixes: n query tokens of a request, L its tokens, H query heads, G KV heads, D values of a head, K chosen ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.cache.pool import KVView
from nibble.kernels.attention.naive import softmax_lse
from nibble.kernels.types import AttentionParams
from nibble.model_spec import LATENT


@dataclass(frozen=True, slots=True)
class Tokens:
    """Keys and values of all tokens of a request, float32 [L, G, D]."""

    k_LGD: Tensor
    v_LGD: Tensor

    @classmethod
    def from_streams(cls, streams: Mapping[str, Tensor], rope: int) -> Tokens:
        """Return them as attention reads streams [L, G, D].

        Args:
            streams: by name.
            rope: values at the end of a latent that belong to the key alone.
        """
        if LATENT in streams:
            latent_LGD = streams[LATENT].float()
            return cls(latent_LGD, latent_LGD[..., : latent_LGD.shape[-1] - rope])
        return cls(streams["k"].float(), streams["v"].float())

    @classmethod
    def from_pages(cls, view: KVView, names: Mapping[str, Tensor], pages_N: Tensor, length: int) -> Tokens:
        """Return them as they are decoded from a request's pages, keys without their transforms.

        Args:
            view: the layer's pages.
            names: which streams are read.
            pages_N: int32 pages of the request.
            length: its tokens.
        """
        streams = {name: view.streams[name].gather_reference(pages_N[None])[0, :length] for name in names}
        for transform in reversed(view.transforms):
            # A rotation is its own inverse.
            if transform.rotates:
                streams["k"] = transform.key(streams["k"], None)
            elif view.k_mean_HD is not None:
                streams["k"] = streams["k"] + view.k_mean_HD
        return cls.from_streams(streams, view.keys.stream.rope)


def attend(
    q_nHD: Tensor,
    exact: Tokens,
    stored: Tokens,
    params: AttentionParams,
    tokens: int,
    chunk: int | None,
    sinks: int = 0,
) -> Tensor:
    """Return attention of a request's last n tokens -> float32 [n, H, Dv].

    Args:
        q_nHD: the queries.
        exact: what near tokens are.
        stored: what all others are.
        params: what the layer asks for; its chosen tokens are those of these queries.
        tokens: a token is near to a query that comes fewer tokens behind it.
        chunk: tokens of a chunk, None without.
        sinks: the first tokens, which are read as near ones are.
    """
    n, heads, _ = q_nHD.shape
    length, group = len(exact.k_LGD), heads // exact.k_LGD.shape[1]
    key_L = torch.arange(length, device=q_nHD.device)
    query_n1 = key_L[length - n :, None]
    distance_nL = query_n1 - key_L
    near_nL = (distance_nL < tokens) | (key_L < sinks)
    q_HnD = q_nHD.float().transpose(0, 1)
    near_k, far_k, near_v, far_v = (
        x.transpose(0, 1).repeat_interleave(group, 0)
        for x in (exact.k_LGD, stored.k_LGD, exact.v_LGD, stored.v_LGD)
    )
    scores_HnL = torch.where(near_nL, q_HnD @ near_k.mT, q_HnD @ far_k.mT) * params.scale
    if params.softcap:
        scores_HnL = params.softcap * torch.tanh(scores_HnL / params.softcap)
    hidden_nL = (distance_nL < 0) | (distance_nL >= (params.window or length))
    if chunk:
        hidden_nL |= key_L < query_n1 // chunk * chunk
    if params.topk_indices_TK is not None:
        hidden_nL |= ~_choice_mask(params.topk_indices_TK, length)
    scores_HnL = scores_HnL.masked_fill(hidden_nL, -torch.inf)
    # One softmax over both: side by side they are twice as many keys, of which each hides what the other has.
    both = torch.cat(
        (scores_HnL.masked_fill(~near_nL, -torch.inf), scores_HnL.masked_fill(near_nL, -torch.inf)), -1
    )
    return softmax_lse(both, torch.cat((near_v, far_v), 1), params.sinks_H).values_THD


def _choice_mask(topk_indices_nK: Tensor, length: int) -> Tensor:
    """Return which tokens each query has chosen: bool [n, L]."""
    # A column more takes padding, which is negative.
    chosen_nL = torch.zeros(len(topk_indices_nK), length + 1, dtype=torch.bool, device=topk_indices_nK.device)
    places_nK = torch.where(topk_indices_nK < 0, length, topk_indices_nK).long()
    return chosen_nL.scatter_(1, places_nK, True)[:, :length]
