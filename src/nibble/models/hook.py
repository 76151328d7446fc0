"""The attention function that Transformers models call: from their arguments to attention/layer.py.

Registered by name, without a mask function, so that no mask is ever built. A keyword that carries meaning is
honoured or refused, never swallowed. Must not know of any model family.

Shape suffixes: T tokens, H query heads, G KV heads, D values of a head; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from nibble.attention.layer import StepContext, attention
from nibble.attention.metadata import AttentionSpec
from nibble.errors import ConfigError

NAME = "nibble"
CONTEXT = "nibble_ctx"
"""The keyword of model(...) that carries the StepContext, or an Observer, to every layer."""

HARMLESS = frozenset(
    {
        "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
        "output_router_logits", "return_dict", "position_embeddings", "layer_type", "cu_seq_lens_q", "deterministic",
        "shared_kv_states", "logits_to_keep", "num_items_in_batch", "layer_head_mask", "target_dtype",
    }
)  # fmt: skip
"""Keywords that change nothing for causal attention over the pages of a request."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D] -> ([1, T, H, D], None)."""
    ctx: StepContext | Observer = rest.pop(CONTEXT)
    refuse_unknown(module, attention_mask, rest)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    spec = AttentionSpec(scale, sliding_window, softcap, s_aux if s_aux is not None else sinks)
    layer = layer_index(module)
    if isinstance(ctx, Observer):
        return ctx.observe(layer, query, key, value, spec), None
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention(ctx, layer, q_THD, {"k": k_TGD, "v": v_TGD}, spec)[None], None


def layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ConfigError(f"{type(module).__name__} does not say which layer it is; Nibble cannot place its cache")
    return index


def refuse_unknown(module: nn.Module, mask: Tensor | None, rest: dict[str, Any]) -> None:
    """Raises ConfigError where the model asks for something that would be ignored."""
    unknown = sorted(name for name, value in rest.items() if name not in HARMLESS and value is not None)
    if mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, and Nibble does not honour that: "
            "this family cannot be served right"
        )


class Observer:
    """Records what each layer asks of attention while a model runs on the meta device."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Tensor, Tensor, Tensor, AttentionSpec]] = []

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self.calls.append((layer, query, key, value, spec))
        batch, heads, tokens, _ = query.shape
        return torch.empty(batch, tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device)


AttentionInterface.register(NAME, _attend)
