"""MLA without expanding: attention over the cached latent itself.

Transformers' MLA layers compute a latent and a rotary key for each token, and expand_kv() makes keys and values of all
heads from them. Here expand_kv() returns the latent itself, and the other factor of each product is applied to the
query and to the output ("absorbed", DeepSeek-V2, section 2.1.2):

    q_nope . (up_k latent) = (q_nope up_k) . latent         weights (up_v latent) = up_v (weights latent)

A layer caches rank + rope values a token instead of heads * (key + value). The rest of the family's code is unchanged.

Shape suffixes: H heads, T tokens, N query values that are not rotary, R the latent's rank, P rotary values, V values of
a head's output; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nibble.errors import ConfigError

NAME = "nibble_absorbed"
MIN_ROWS = 8
"""Fewest rows of a product on a CPU; the result of a row depends on their number below this."""


class AbsorbedProjections(nn.Module):
    """The two factors of expand_kv()'s weight: up_k_HNR for keys, up_v_HRV for values.

    Args:
        weight: [H * (N + V), R] of the layer's kv_b_proj.
        heads: H.
        nope: N.
        rope: P.
    """

    def __init__(self, weight: Tensor, heads: int, nope: int, rope: int) -> None:
        super().__init__()
        up_k, up_v = weight.detach().unflatten(0, (heads, -1)).tensor_split([nope], 1)
        self.up_k_HNR = nn.Parameter(up_k, requires_grad=False)
        # Transposed, so that output() multiplies from the right as query() does.
        self.up_v_HRV = nn.Parameter(up_v.transpose(1, 2), requires_grad=False)
        self.nope, self.rope = nope, rope

    def contiguous(self) -> AbsorbedProjections:
        """Copy both factors into the order in which products read them, and return self."""
        for factor in (self.up_k_HNR, self.up_v_HRV):
            factor.data = factor.data.contiguous()
        return self

    @property
    def rank(self) -> int:
        """Return R."""
        return self.up_k_HNR.shape[2]

    def query(self, query: Tensor) -> Tensor:
        """Map the query [1, H, T, N + P] -> [1, H, T, R + P]."""
        q_nope, q_rope = query.split([self.nope, self.rope], -1)
        return torch.cat((_product(q_nope[0], self.up_k_HNR)[None], q_rope), -1)

    def output(self, out_1THR: Tensor) -> Tensor:
        """Map attention's output [1, T, H, R] -> [1, T, H, V]."""
        return _product(out_1THR[0].transpose(0, 1), self.up_v_HRV).transpose(0, 1)[None]


def _product(x_HTA: Tensor, weight_HAB: Tensor) -> Tensor:
    """Multiply head by head. On a CPU rows are padded, so that a row's result does not depend on their number."""
    rows = x_HTA.shape[1]
    if x_HTA.device.type != "cpu" or rows >= MIN_ROWS:
        return x_HTA @ weight_HAB
    padded = torch.nn.functional.pad(x_HTA, (0, 0, 0, MIN_ROWS - rows))
    return (padded @ weight_HAB)[:, :rows]


def absorb_latents(model: nn.Module) -> int:
    """Replace expand_kv() of the MLA layers of `model` in place; return the number of layers."""
    layers = _mla_layers(model)
    for module in layers:
        setattr(module, NAME, _absorbed_projections(module).contiguous())
        # The two factors replace it: attention over the latent never expands keys and values.
        del module.kv_b_proj
        module.expand_kv = _keep_latent
    return len(layers)


def absorptions(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the MLA layers of `model` with the attributes that absorb_latents() would set; nothing is changed."""
    return [
        (module, {NAME: _absorbed_projections(module), "expand_kv": _keep_latent})
        for module in _mla_layers(model)
    ]


def _mla_layers(model: nn.Module) -> list[Any]:
    return [
        module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")
    ]


def _absorbed_projections(module: Any) -> AbsorbedProjections:
    if type(module.kv_b_proj) is not nn.Linear:
        raise ConfigError(
            f"{type(module).__name__} expands its latent by a {type(module.kv_b_proj).__name__}, and Nibble needs the "
            "plain weight of a linear layer; load that layer unquantised, and merge adapters of it"
        )
    nope, width = module.qk_nope_head_dim, module.qk_nope_head_dim + module.v_head_dim
    weight = module.kv_b_proj.weight
    return AbsorbedProjections(weight, len(weight) // width, nope, module.qk_rope_head_dim)


def _keep_latent(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Return the latent [1, 1, T, R + P] as keys, and its first R values as values."""
    return torch.cat((kv_nope, k_rot), -1), kv_nope
