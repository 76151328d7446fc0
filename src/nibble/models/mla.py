"""MLA without expanding: attention over the cached latent itself.

Transformers' MLA layers compute a latent and a rotary key for each token, and hand them to expand_kv(), which makes
keys and values of all heads. Here expand_kv() hands the latent on as it is, and the other factor of each product goes
to the query and to the output instead ("absorbed", DeepSeek-V2, section 2.1.2):

    q_nope . (up_k latent) = (q_nope up_k) . latent         weights (up_v latent) = up_v (weights latent)

So a layer caches rank + rope values a token instead of heads * (key + value), and everything else of the family's code
runs as it stands. Owns absorb(), absorptions() and Absorbed. Must not know of caches.

Shape suffixes: H heads, T tokens, N query values that are not rotary, R the latent's rank, P rotary values, V values of
a head's output; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nibble.errors import ConfigError

NAME = "nibble_absorbed"
ROWS = 8
"""Rows of a product on a CPU at least."""


class Absorbed(nn.Module):
    """What expand_kv() would have applied: up_k_HNR to keys, up_v_HRV to values, both parts of `weight`. rope: P."""

    def __init__(self, weight: Tensor, heads: int, nope: int, rope: int) -> None:
        super().__init__()
        up_k, up_v = weight.detach().unflatten(0, (heads, -1)).tensor_split([nope], 1)
        self.up_k_HNR = nn.Parameter(up_k, requires_grad=False)
        self.up_v_HRV = nn.Parameter(up_v.transpose(1, 2), requires_grad=False)
        self.nope, self.rope = nope, rope

    def alone(self) -> Absorbed:
        """Itself, with copies of its own in the order in which products read them."""
        for factor in (self.up_k_HNR, self.up_v_HRV):
            factor.data = factor.data.contiguous()
        return self

    @property
    def rank(self) -> int:
        return self.up_k_HNR.shape[2]

    def query(self, query: Tensor) -> Tensor:
        """[1, H, T, N + P] -> [1, H, T, R + P]."""
        q_nope, q_rope = query.split([self.nope, self.rope], -1)
        return torch.cat((_product(q_nope[0], self.up_k_HNR)[None], q_rope), -1)

    def output(self, out_1THR: Tensor) -> Tensor:
        """[1, T, H, R] -> [1, T, H, V]."""
        return _product(out_1THR[0].transpose(0, 1), self.up_v_HRV).transpose(0, 1)[None]


def _product(x_HTA: Tensor, weight_HAB: Tensor) -> Tensor:
    """Head by head. On a CPU rows come in eights, so that a row's result does not depend on their number."""
    rows = x_HTA.shape[1]
    if x_HTA.device.type != "cpu" or rows >= ROWS:
        return x_HTA @ weight_HAB
    padded = torch.nn.functional.pad(x_HTA, (0, 0, 0, ROWS - rows))
    return (padded @ weight_HAB)[:, :rows]


def absorb(model: nn.Module) -> int:
    """Gives the MLA layers of `model` an expand_kv() that keeps the latent, in place; returns how many it found."""
    found = _expanding(model)
    for module in found:
        setattr(module, NAME, _absorbed(module).alone())
        del module.kv_b_proj
        module.expand_kv = _keep
    return len(found)


def absorptions(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """MLA layers of `model`, which is not changed, with the attributes by which absorb() would have replaced theirs."""
    return [(module, {NAME: _absorbed(module), "expand_kv": _keep}) for module in _expanding(model)]


def _expanding(model: nn.Module) -> list[Any]:
    return [
        module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")
    ]


def _absorbed(module: Any) -> Absorbed:
    if type(module.kv_b_proj) is not nn.Linear:
        raise ConfigError(
            f"{type(module).__name__} expands its latent by a {type(module.kv_b_proj).__name__}, and Nibble needs the "
            "plain weight of a linear layer; load that layer unquantised, and merge adapters of it"
        )
    nope, width = module.qk_nope_head_dim, module.qk_nope_head_dim + module.v_head_dim
    weight = module.kv_b_proj.weight
    return Absorbed(weight, len(weight) // width, nope, module.qk_rope_head_dim)


def _keep(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """The latent [1, 1, T, R + P] in the place of keys, and its values in the place of values."""
    return torch.cat((kv_nope, k_rot), -1), kv_nope
