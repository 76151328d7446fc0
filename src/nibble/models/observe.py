"""Geometry by observation: a model without weights runs once on the meta device, and says what it asks of attention.

So heads, head sizes, windows, sinks, score capping and shared KV are facts of the very code that will run, for any
family, with no table of families. MLA models are read off their config instead, since unswapped they expand the
latent. Owns observe(). Must not know of caches, formats or backends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from nibble.attention.metadata import AttentionSpec
from nibble.errors import ConfigError
from nibble.geometry import Geometry, Kind, LayerGroup, Stream
from nibble.models import hook
from nibble.models.rope import fix_rope

_Call = tuple[int, Tensor, Tensor, Tensor, AttentionSpec]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def skeleton(config: PretrainedConfig) -> nn.Module:
    """The model without weights, on the meta device; raises ConfigError where it has no causal language model."""
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(text, attn_implementation=hook.NAME, dtype="bfloat16")
    except (ValueError, KeyError, ImportError, AttributeError) as error:
        raise ConfigError(f"{text.model_type} cannot be served: {error}") from error
    return model.eval()


def observe(config: PretrainedConfig, name: str, dtype: str, max_context: int | None = None) -> Geometry:
    """The geometry of a model. dtype: compute dtype, in which `weight_bytes` is counted. Raises ConfigError."""
    text = config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", None) or 1 << 17)
    if max_context is not None and max_context > limit:
        raise ConfigError(f"max_context {max_context} is more than the {limit} tokens that {name} was made for")
    model = skeleton(config)
    weights = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()) * BYTES[dtype]
    groups, owner = _latent(text) if getattr(text, "kv_lora_rank", None) else _run(model, text, max_context or limit)
    return Geometry(
        model=name,
        family=text.model_type,
        groups=groups,
        owner=owner,
        max_context=max_context or limit,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        weight_bytes=weights,
    )


def _run(model: nn.Module, text: PretrainedConfig, max_context: int) -> tuple[tuple[LayerGroup, ...], tuple[int, ...]]:
    fix_rope(model, max_context)
    observer = hook.Observer()
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    positions = torch.zeros(1, 8, dtype=torch.long, device="meta")
    with torch.inference_mode():
        try:
            model(input_ids=ids, position_ids=positions, use_cache=False, **{hook.CONTEXT: observer})
        except (RuntimeError, TypeError, NotImplementedError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{text.model_type} cannot be served: its attention does not go through Transformers' "
                f"AttentionInterface as Nibble needs it ({type(error).__name__}: {error})"
            ) from error
    calls = sorted(observer.calls, key=lambda call: call[0])
    if [call[0] for call in calls] != list(range(text.num_hidden_layers)):
        raise ConfigError(
            f"{text.model_type} cannot be served: {text.num_hidden_layers - len(calls)} of its "
            f"{text.num_hidden_layers} layers do not attend through keys and values"
        )
    return _groups(calls), _owners(calls)


def _owners(calls: Sequence[_Call]) -> tuple[int, ...]:
    """For each layer the first one that was given the very same key: itself, unless KV is shared."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(key), layer) for layer, _, key, _, _ in calls)


def _groups(calls: Sequence[_Call]) -> tuple[LayerGroup, ...]:
    """Layers that ask the same of attention, together."""
    found: dict[tuple[object, ...], list[int]] = {}
    for layer, query, key, value, spec in calls:
        streams = (Stream("k", key.shape[1], key.shape[3]), Stream("v", value.shape[1], value.shape[3]))
        facts = (streams, query.shape[1], spec.window, bool(spec.softcap), spec.sinks_H is not None)
        found.setdefault(facts, []).append(layer)
    return tuple(
        LayerGroup(_name(window, i), "mha", streams, tuple(layers), heads, window, softcap, sinks)  # type: ignore[arg-type]
        for i, ((streams, heads, window, softcap, sinks), layers) in enumerate(found.items())
    )


def _name(window: object, index: int) -> str:
    return f"{'full' if window is None else 'sliding'}{index or ''}"


def _latent(text: PretrainedConfig) -> tuple[tuple[LayerGroup, ...], tuple[int, ...]]:
    """MLA and DSA: the latent that an absorbed attention caches, from the config's ranks."""
    kind: Kind = "dsa" if getattr(text, "index_topk", None) else "mla"
    rope = text.qk_rope_head_dim
    streams = (Stream("latent", 1, text.kv_lora_rank + rope, rope),)
    layers = tuple(range(text.num_hidden_layers))
    if kind == "dsa":
        streams += (Stream("index_k", 1, text.index_head_dim, rope),)
    return (LayerGroup(kind, kind, streams, layers, text.num_attention_heads),), layers
