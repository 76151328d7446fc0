"""RoPE tables that do not depend on the batch.

The `dynamic` and `longrope` types of Transformers choose their frequencies by the largest position in the
batch, so that a short request's answer changes when a long one joins. Here they are chosen once, from the
longest context that is served, as if every request were that long; keys and queries of a request then always
rotate alike. Owns fix_rope(), stretch() and, for GPUs, tables of cosines and sines. Must not know of attention or of
caches.
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
"""What a module's rope_type is set to: Transformers then leaves its frequencies alone."""


def stretch(text: PretrainedConfig) -> float:
    """How many times max_position_embeddings a context may be: more than 1 for `dynamic`, which is made for
    that.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    found = [entry for entry in (parameters, *parameters.values()) if isinstance(entry, dict)]
    return max(
        (float(entry.get("factor", 1)) for entry in found if entry.get("rope_type") == "dynamic"), default=1.0
    )


def fix_rope(model: nn.Module, max_context: int) -> list[str]:
    """Replaces batch-dependent frequencies of `model` in place; returns the names of the modules it
    changed.
    """
    changed = []
    for name, module in model.named_modules():
        types = getattr(module, "rope_type", None)
        if isinstance(types, dict):
            fixed = [_fix(module, max_context, layer_type) for layer_type in list(types)]
        else:
            fixed = [isinstance(types, str) and _fix(module, max_context, None)]
        changed += [name] if any(fixed) else []
    return changed


def _fix(module: Any, max_context: int, layer_type: str | None) -> bool:
    rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if not any(kind in rope_type for kind in _BATCH_DEPENDENT):
        return False
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    extra = {} if layer_type is None else {"layer_type": layer_type}
    device = torch.device("cpu") if buffer.is_meta else buffer.device
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](module.config, device, seq_len=max_context, **extra)
    setattr(module, f"{prefix}inv_freq", nn.Buffer(inv_freq.to(buffer.device), persistent=False))
    setattr(module, f"{prefix}attention_scaling", scaling)
    if layer_type is None:
        module.rope_type = _FIXED
    else:
        module.rope_type = {**module.rope_type, layer_type: _FIXED}
    return True


LARGEST_TABLES = 1 << 27
"""Bytes that the tables of a model may take; where they would take more, it keeps computing."""


class RopeTable(nn.Module):
    """Cosines and sines of all positions, looked up.

    Computed anew in every step they cost more than it seems: a compiler works them out again in each layer, and does
    not fuse what is around them.
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
        name = self.names[layer_type]
        cos, sin = getattr(self, f"{name}_cos"), getattr(self, f"{name}_sin")
        return cos[position_ids].to(x.dtype), sin[position_ids].to(x.dtype)


def tabulate_rope(model: Any, max_context: int) -> list[str]:
    """Replaces modules of `model` that compute cosines and sines by tables of them; returns their names."""
    found = {name: module for name, module in model.named_modules() if _is_rotary(module)}
    made = {name: _tables(module, max_context, model.dtype) for name, module in found.items()}
    kept = {name: tables for name, tables in made.items() if tables}
    if sum(x.nbytes for tables in kept.values() for pair in tables.values() for x in pair) > LARGEST_TABLES:
        return []
    for name, tables in kept.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, RopeTable(tables))
    return list(kept)


def _is_rotary(module: Any) -> bool:
    """Whether it is called with positions, and a layer type at most, to give cosines and sines."""
    parameters = list(inspect.signature(module.forward).parameters)
    return hasattr(module, "rope_type") and parameters in (
        ["x", "position_ids"],
        ["x", "position_ids", "layer_type"],
    )


def _tables(module: Any, length: int, dtype: torch.dtype) -> dict[str | None, tuple[Tensor, Tensor]]:
    """Tables [length, D] by layer type; none where the module gives something else."""
    device = next(module.buffers()).device
    x, positions = torch.zeros(1, 1, 1, dtype=dtype, device=device), torch.arange(length, device=device)[None]
    found = {}
    with torch.no_grad():
        for layer_type in module.rope_type if isinstance(module.rope_type, dict) else (None,):
            out = module(x, positions, *([layer_type] if layer_type else []))
            if not (isinstance(out, tuple) and all(y.shape[:2] == (1, length) for y in out)):
                return {}
            found[layer_type] = out[0][0].clone(), out[1][0].clone()
    return found
