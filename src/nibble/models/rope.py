"""RoPE tables that do not depend on the batch.

The `dynamic` and `longrope` types of Transformers choose their frequencies by the largest position in the
batch, so that a short request's answer changes when a long one joins. Here they are chosen once, from the
longest context that is served, as if every request were that long; keys and queries of a request then always
rotate alike. Owns fix_rope() and stretch(). Must not know of attention or of caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
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
