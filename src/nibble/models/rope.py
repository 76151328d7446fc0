"""Rotary embeddings whose frequencies do not depend on the batch, and tables of cosines and sines for GPUs.

Some families choose their frequencies by the largest position in the batch, so a short request's answer changes when a
long one joins. Here they are chosen once, for the longest context that is served; keys and queries of a request then
always rotate alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_BATCH_DEPENDENT = ("dynamic", "longrope")
_FIXED = "default"
"""Value of a module's rope_type with which Transformers does not change its frequencies."""


def context_factor(text: PretrainedConfig) -> float:
    """Return by what factor a context may exceed max_position_embeddings; above 1 for `dynamic` only."""
    parameters = getattr(text, "rope_parameters", None) or {}
    entries = [entry for entry in (parameters, *parameters.values()) if isinstance(entry, dict)]
    return max(
        (float(entry.get("factor", 1)) for entry in entries if entry.get("rope_type") == "dynamic"),
        default=1.0,
    )


def fix_rope(model: nn.Module, max_context: int) -> list[str]:
    """Replace batch-dependent frequencies of `model` in place; return the names of the modules changed."""
    changed = []
    for name, module in model.named_modules():
        types = getattr(module, "rope_type", None)
        if isinstance(types, dict):
            fixed = [_fix_module(module, max_context, layer_type) for layer_type in list(types)]
        else:
            fixed = [isinstance(types, str) and _fix_module(module, max_context, None)]
        changed += [name] if any(fixed) else []
    return changed


def _fix_module(module: Any, max_context: int, layer_type: str | None) -> bool:
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
    if layer_type is None:
        module.rope_type = _FIXED
    else:
        module.rope_type = {**module.rope_type, layer_type: _FIXED}
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
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, RopeTable(tables))
    return list(usable)


def _is_rotary(module: Any) -> bool:
    """Return whether `module` maps positions, and at most a layer type, to cosines and sines."""
    parameters = list(inspect.signature(module.forward).parameters)
    return hasattr(module, "rope_type") and parameters in (
        ["x", "position_ids"],
        ["x", "position_ids", "layer_type"],
    )


def _tables(module: Any, length: int, dtype: torch.dtype) -> dict[str | None, tuple[Tensor, Tensor]]:
    """Return tables [length, D] by layer type, none if the module returns something else."""
    device = next(module.buffers()).device
    # Rotary modules read only the dtype and the device of x.
    x, positions = torch.zeros(1, 1, 1, dtype=dtype, device=device), torch.arange(length, device=device)[None]
    tables = {}
    with torch.no_grad():
        for layer_type in module.rope_type if isinstance(module.rope_type, dict) else (None,):
            out = module(x, positions, *([layer_type] if layer_type else []))
            if not (isinstance(out, tuple) and all(y.shape[:2] == (1, length) for y in out)):
                return {}
            tables[layer_type] = out[0][0].clone(), out[1][0].clone()
    return tables
