"""The attention function that Transformers models call: from their arguments to attention/layer.py.

A keyword that carries meaning is honoured or refused, never swallowed. Must not know of any model family.

Shape suffixes: T tokens, H query heads, G KV heads, D values of a head; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from nibble.attention import op
from nibble.attention.layer import StepContext, attention, select_topk
from nibble.errors import ConfigError
from nibble.kernels.types import AttentionParams
from nibble.model_spec import LATENT
from nibble.models import mla as latent
from nibble.models.dsa import Selection
from nibble.models.guard import MaskRule
from nibble.models.mla import Absorbed

NAME = "nibble"
"""The implementation that serves: it has no mask function, so that no mask is ever built."""
PROBE = "nibble_probe"
"""The same with a mask function that notes the rule of each mask, for models/guard.py to judge."""
CONTEXT = "nibble_ctx"
"""The keyword of model(...) that carries the StepContext to every layer; the Step that holds it, where the model is
compiled; or an Observer."""

HARMLESS = frozenset(
    {
        "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict", "position_embeddings",
        "layer_type", "cu_seq_lens_q", "deterministic", "shared_kv_states", "logits_to_keep",
        "num_items_in_batch", "layer_head_mask", "target_dtype",
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
    indices: Selection | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D] -> ([1, T, H, D], None)."""
    ctx: StepContext | op.Step | Observer | None = rest.pop(CONTEXT, None)
    rule = getattr(attention_mask, _RULE, None)
    built = attention_mask if rule is None and attention_mask is not None and attention_mask.numel() else None
    refuse_unknown(module, built, rest)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    spec = AttentionParams(scale, sliding_window, softcap, s_aux if s_aux is not None else sinks)
    absorbed: Absorbed | None = getattr(module, latent.NAME, None)
    if absorbed is None:
        call = Call(layer_index(module), query, {"k": key, "v": value}, value.shape[-1], 0, spec, rule)
        return _answer(ctx, call, module), None
    query = absorbed.query(query)
    call = Call(layer_index(module), query, {LATENT: key}, absorbed.rank, absorbed.rope, spec, rule, indices)
    return absorbed.output(_answer(ctx, call, module)), None


def _answer(ctx: StepContext | op.Step | Observer | None, call: Call, module: nn.Module) -> Tensor:
    """What attention says -> [1, T, H, Dv]."""
    if isinstance(ctx, Observer):
        return ctx.observe(call)
    if ctx is None:
        raise ConfigError(
            f"{type(module).__name__} was not given {CONTEXT}: the layers of this family do not hand "
            "keywords on to their attention, so it cannot be served"
        )
    return attend(ctx, call)[None]


def attend(ctx: StepContext | op.Step, call: Call) -> Tensor:
    """A layer's attention in the context of a step -> [T, H, Dv]."""
    q_THD = call.query[0].transpose(0, 1)
    streams = {name: x[0].transpose(0, 1) for name, x in call.streams.items()}
    spec, asked = call.spec, call.selection
    if asked:
        spec = replace(spec, topk_indices_TK=_chosen(ctx, asked), index_layer=asked.layer)
    if isinstance(ctx, op.Step):
        return op.call(ctx, call.layer, q_THD, streams, call.width, spec)
    return attention(ctx, call.layer, q_THD, streams, spec)


def _chosen(ctx: StepContext | op.Step, asked: Selection) -> Tensor:
    """The tokens of a selection. Layers that share one ask once."""
    if asked.topk_indices_TK is None or asked.ctx is not ctx:
        asked.ctx = ctx
        arguments = asked.layer, asked.q_THD, asked.key_T1D, asked.weights_TH, asked.top_k
        asked.topk_indices_TK = (
            op.select(ctx, *arguments) if isinstance(ctx, op.Step) else select_topk(ctx, *arguments)
        )
    return asked.topk_indices_TK


def layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ConfigError(
            f"{type(module).__name__} does not say which layer it is; Nibble cannot place its cache"
        )
    return index


def refuse_unknown(module: nn.Module, mask: Tensor | None, rest: dict[str, Any]) -> None:
    """Raises ConfigError where the model asks for something that would be ignored."""
    unknown = sorted(name for name, value in rest.items() if name not in HARMLESS and value is not None)
    if rest.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, and Nibble does not "
            "honour that: this family cannot be served right"
        )


@dataclass(frozen=True, slots=True)
class Call:
    """What one layer asked of attention: query [1, H, T, D], and streams [1, G, T, D] to be cached, by name.

    width: values of a head's output. rope: values at the end of a latent that are rotary, and of the key alone.
    rule: what the mask is made from, if Transformers built one. selection: which tokens are looked at, if not all.
    """

    layer: int
    query: Tensor
    streams: dict[str, Tensor]
    width: int
    rope: int
    spec: AttentionParams
    rule: MaskRule | None
    selection: Selection | None = None


class Observer:
    """Records what each layer asks of attention while a model runs on the meta device."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def observe(self, call: Call) -> Tensor:
        self.calls.append(call)
        batch, heads, tokens, _ = call.query.shape
        return call.query.new_empty(batch, tokens, heads, call.width)


_RULE = "nibble_rule"


def _note_rule(q_length: int, kv_length: int, mask_function: MaskRule, **_: Any) -> Tensor:
    """A mask function that builds nothing: an empty tensor that remembers the rule it stands for."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    setattr(mask, _RULE, mask_function)
    return mask


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(PROBE, _attend)
AttentionMaskInterface.register(PROBE, _note_rule)
