"""What Nibble changes in a model's MLA layers and rotary embeddings.

MLA goes without expanding: attention is over the cached latent itself. Transformers' MLA layers compute a latent and a
rotary key for each token, and expand_kv() makes keys and values of all heads from them. Here expand_kv() returns the
latent itself, and the other factor of each product is applied to the query and to the output ("absorbed", DeepSeek-V2,
section 2.1.2):

    q_nope . (up_k latent) = (q_nope up_k) . latent         weights (up_v latent) = up_v (weights latent)

A layer caches rank + rope values a token instead of heads * (key + value). The rest of the family's code is unchanged.

Rotary frequencies do not depend on the batch. Some families choose them by the largest position in the batch, so a
short request's answer changes when a long one joins. Here they are chosen once, for the longest context that is served;
keys and queries of a request then always rotate alike. On a GPU cosines and sines are looked up in tables.

Shape suffixes: H heads, T tokens, N query values that are not rotary, R the latent's rank, P rotary values, V values of
a head's output; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nibble.errors import ConfigError

_BATCH_DEPENDENT = ("dynamic", "longrope")
_FIXED = "default"
"""Value of a module's rope_type with which Transformers does not change its frequencies."""


def context_factor(text: PretrainedConfig) -> float:
    """Return by what factor a context may exceed max_position_embeddings; above 1 for `dynamic` only."""
    parameters = getattr(text, "rope_parameters", None) or {}
    entries = [entry for entry in (parameters, *parameters.values()) if isinstance(entry, dict)]
    dynamic = [entry for entry in entries if entry.get("rope_type") == "dynamic"]
    return max((float(entry.get("factor", 1)) for entry in dynamic), default=1.0)


def fix_rope(model: nn.Module, max_context: int) -> list[str]:
    """Replace batch-dependent frequencies of `model` in place; return the names of the modules changed."""
    changed = []
    for name, module in model.named_modules():
        fixed = [_fix_frequencies(module, max_context, layer_type) for layer_type in _layer_types(module)]
        changed += [name] if any(fixed) else []
    return changed


def _layer_types(module: Any) -> list[str | None]:
    """Return the layer types for which a module has frequencies: [None] for one set of all, none if not rotary."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        return list(rope_type)
    return [None] if isinstance(rope_type, str) else []


def _fix_frequencies(module: Any, max_context: int, layer_type: str | None) -> bool:
    rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if not any(kind in rope_type for kind in _BATCH_DEPENDENT):
        return False
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    extra = {} if layer_type is None else {"layer_type": layer_type}
    device = torch.device("cpu") if buffer.is_meta else buffer.device
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](module.config, device, seq_len=max_context, **extra)
    # Not persistent: frequencies are computed, and no checkpoint has them.
    setattr(module, f"{prefix}inv_freq", nn.Buffer(inv_freq.to(buffer.device), persistent=False))
    setattr(module, f"{prefix}attention_scaling", scaling)
    # Without this, forward() would compute frequencies for the batch's largest position again.
    module.rope_type = _FIXED if layer_type is None else {**module.rope_type, layer_type: _FIXED}
    return True


LARGEST_TABLES = 1 << 27
"""Most bytes of a model's tables; if they would be larger, the model computes cosines and sines."""


class RopeTable(nn.Module):
    """Cosines and sines of all positions, looked up.

    Computing them in every step is slow: a compiler computes them again in each layer, and does not fuse their
    neighbours.
    """

    def __init__(self, tables: Mapping[str | None, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.names = {layer_type: f"table{i}" for i, layer_type in enumerate(tables)}
        for layer_type, (cos, sin) in tables.items():
            self.register_buffer(f"{self.names[layer_type]}_cos", cos, persistent=False)
            self.register_buffer(f"{self.names[layer_type]}_sin", sin, persistent=False)

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, T, D] in the dtype of `x`.

        Args:
            x: only its dtype is used.
            position_ids: int64 positions [1, T].
            layer_type: which tables, in models with several.
        """
        name = self.names[layer_type]
        cos, sin = getattr(self, f"{name}_cos"), getattr(self, f"{name}_sin")
        return cos[position_ids].to(x.dtype), sin[position_ids].to(x.dtype)


def tabulate_rope(model: Any, max_context: int) -> list[str]:
    """Replace modules of `model` that compute cosines and sines by tables; return their names."""
    modules = {name: module for name, module in model.named_modules() if _is_rotary(module)}
    tables_by_name = {name: _tables(module, max_context, model.dtype) for name, module in modules.items()}
    usable = {name: tables for name, tables in tables_by_name.items() if tables}
    if sum(x.nbytes for tables in usable.values() for pair in tables.values() for x in pair) > LARGEST_TABLES:
        return []
    for name, tables in usable.items():
        model.set_submodule(name, RopeTable(tables))
    return list(usable)


def _is_rotary(module: Any) -> bool:
    """Return whether `module` maps positions, and at most a layer type, to cosines and sines."""
    parameters = list(inspect.signature(module.forward).parameters)
    required, optional = ["x", "position_ids"], ["layer_type"]
    return hasattr(module, "rope_type") and parameters in (required, required + optional)


def _tables(module: Any, length: int, dtype: torch.dtype) -> dict[str | None, tuple[Tensor, Tensor]]:
    """Return tables [length, D] by layer type, none if the module returns something else."""
    device = next(module.buffers()).device
    # Rotary modules read only the dtype and the device of x.
    x, positions = torch.zeros(1, 1, 1, dtype=dtype, device=device), torch.arange(length, device=device)[None]
    tables = {}
    with torch.no_grad():
        for layer_type in _layer_types(module):
            try:
                out = module(x, positions, *([layer_type] if layer_type else []))
            except IndexError:  # positions have further dimensions here, as with those of images
                return {}
            if not (isinstance(out, tuple) and all(y.shape[:2] == (1, length) for y in out)):
                return {}
            tables[layer_type] = out[0][0].clone(), out[1][0].clone()
    return tables


ABSORBED = "nibble_absorbed"
"""Attribute of an MLA layer for its AbsorbedProjections."""
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


def absorptions(model: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """Return the MLA layers of `model` with the attributes to set; nothing is changed."""
    return [
        (module, {ABSORBED: _absorbed_projections(module), "expand_kv": _keep_latent})
        for module in model.modules()
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")
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
