"""attention: queries over paged keys and values, for every phase.

Owns the operation's signature and its torch reference. Queries are the last tokens of their requests, so each sees the
stored tokens up to its own, itself included. Must not know of pools, plans or engines.

Shape suffixes: T query tokens, B requests, N pages of a request, n query tokens of a request, L its stored tokens,
H query heads, G KV heads, D values of a head.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nibble.kernels.gather import Paged
from nibble.kernels.gather import reference as gathered


class Requests(Protocol):
    """Who asks. Lengths are on the device, where a replayed CUDA graph may change them: seq_lens_B, whose zeros are
    padding, and cu_seqlens_q_B1, the first row of each request with the end of the last. query_lens is the host's copy.
    """

    @property
    def query_lens(self) -> tuple[int, ...]: ...
    @property
    def page_table_BN(self) -> Tensor: ...
    @property
    def cu_seqlens_q_B1(self) -> Tensor: ...
    @property
    def seq_lens_B(self) -> Tensor: ...


class Softmax(Protocol):
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


def reference(q_THD: Tensor, k: Paged, v: Paged, requests: Requests, softmax: Softmax) -> Tensor:
    """The definition, in torch and float32 -> [T, H, D] in the query's dtype; zeros for padding."""
    out_THD = torch.zeros_like(q_THD)
    for i, length in enumerate(requests.seq_lens_B.tolist()):
        if length:
            rows = slice(*requests.cu_seqlens_q_B1[i : i + 2].tolist())
            pages = requests.page_table_BN[i : i + 1, : -(-length // k.page_size)]
            k_GLD, v_GLD = (
                gathered(x, pages, torch.float32, heads_first=True)[0, :, :length] for x in (k, v)
            )
            out_THD[rows] = _dense(q_THD[rows].float(), k_GLD, v_GLD, softmax).to(q_THD.dtype)
    return out_THD


def _dense(q_nHD: Tensor, k_GLD: Tensor, v_GLD: Tensor, softmax: Softmax) -> Tensor:
    n, heads, _ = q_nHD.shape
    length, group = k_GLD.shape[1], heads // len(k_GLD)
    k_HLD, v_HLD = k_GLD.repeat_interleave(group, 0), v_GLD.repeat_interleave(group, 0)
    scores = q_nHD.transpose(0, 1) @ k_HLD.transpose(1, 2) * softmax.scale
    if softmax.softcap:
        scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
    key = torch.arange(length, device=scores.device)
    query = key[length - n :, None]
    hidden = (key > query) | (key <= query - (softmax.window or length))
    scores = scores.masked_fill(hidden, float("-inf"))
    if softmax.sinks_H is not None:
        scores = torch.cat((scores, softmax.sinks_H.float().view(-1, 1, 1).expand(-1, n, 1)), -1)
    return (scores.softmax(-1)[..., :length] @ v_HLD).transpose(0, 1)
