"""ModelSpec by observation: a model without weights runs once on the meta device, and its calls of attention are noted.

So heads, head sizes, windows, sinks, score capping and shared KV are facts of the very code that will run, for any
family, with no table of families. What was observed is kept by observations.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nibble.errors import ConfigError, NibbleError
from nibble.model_spec import INDEX, LATENT, Kind, LayerGroup, ModelSpec, StoredWeights, Stream
from nibble.models import activations, hook, online, refusals, weight_bytes
from nibble.models import quantization as quantized
from nibble.models.experts import expert_matrices
from nibble.models.hook import Call, adapt, attention_mask_for
from nibble.models.hub import first_line, quiet
from nibble.models.mla import context_factor, fix_rope
from nibble.models.towers import model_class, text_attention

_TOKENS = 31
"""Tokens of a pass: a number that no other size of a model is likely to have."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_specs: dict[tuple[str, str, str, int | None, str | None], ModelSpec] = {}
"""What was observed in this process."""


def skeleton(config: PretrainedConfig) -> nn.Module:
    """Return the model without weights, on the meta device; raise ConfigError where there is no language model."""
    text = config.get_text_config()
    try:
        with torch.device("meta"), quiet():
            # Any dtype serves: nothing is computed, and weights are counted in the compute dtype.
            options = {"attn_implementation": text_attention(config, hook.NAME), "dtype": torch.bfloat16}
            model: nn.Module = model_class(config)._from_config(config, **options)
    except Exception as error:  # of all kinds: every family checks its config in its own way
        if isinstance(error, KeyError) and error.args == (hook.NAME,):
            reason = "it knows a fixed set of attention implementations, and Nibble's is not among them"
        else:
            reason = f"Transformers cannot make a model of this config: {first_line(error)}"
        raise ConfigError(f"{text.model_type} cannot be served: {reason}") from error
    return adapt(model).eval()


def observe(
    config: PretrainedConfig,
    name: str,
    dtype: str,
    max_context: int | None = None,
    weights: str | None = None,
) -> ModelSpec:
    """Return what a model needs of attention; a config is observed once in a process.

    Args:
        config: The model's config.
        name: What the model is called.
        dtype: The compute dtype, in which `weight_bytes` is counted.
        max_context: The longest context in tokens, None for the model's own.
        weights: A format that linear layers are quantised to as they load (online.py), None for none.

    Raises:
        ConfigError: The model cannot be served, or not so, or the context is too long for it.
    """
    # All values, also those that are the defaults of this version.
    key = config.to_json_string(use_diff=False), name, dtype, max_context, weights
    if key not in _specs:
        _specs[key] = observe_skeleton(skeleton(config), name, dtype, max_context, weights)
    return _specs[key]


def context_limits(text: PretrainedConfig) -> tuple[int, int]:
    """Return the tokens that a model takes by itself, and the most that may be asked of it."""
    limit = int(getattr(text, "max_position_embeddings", None) or 0)
    # A config that does not say, or says -1 (any), stands for 128K.
    limit = limit if limit > 0 else 1 << 17
    return limit, int(limit * context_factor(text))


def observe_skeleton(
    model: Any, name: str, dtype: str, max_context: int | None = None, weights: str | None = None
) -> ModelSpec:
    """Return what the model that skeleton() gave needs of attention; see observe().

    Args:
        model: from skeleton().
        name: what the model is called.
        dtype: the compute dtype.
        max_context: the longest context in tokens, None for the model's own.
        weights: a format that linear layers are quantised to as they load, None for none.

    Raises:
        ConfigError: the model cannot be served, or not so, or the context is too long for it.
    """
    config = model.config
    text = config.get_text_config()
    limit, longest = context_limits(text)
    if max_context is not None and max_context > longest:
        raise ConfigError(
            f"max_context {max_context} is more than the {longest} tokens that {name} was made for"
        )
    # Tied weights are one parameter under several names.
    full = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()) * BYTES[dtype]
    groups, owner = _run(model, text, max_context or limit)
    return ModelSpec(
        model=name,
        family=text.model_type,
        groups=groups,
        owner=owner,
        max_context=max_context or limit,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        weight_bytes=full,
        stored_weights=_stored_weights(model, config, dtype, weights),
    )


def _stored_weights(
    model: Any, config: PretrainedConfig, dtype: str, weights: str | None
) -> StoredWeights | None:
    """Return what the quantised weights of a checkpoint take; None where they are not quantised."""
    if weights:
        return online.outline(weights, _parameters(model), dtype, config)
    entry = quantized.quantization_entry(config)
    quantization = quantized.parse(entry)
    if quantization is None:
        return None
    size = weight_bytes.stored_bytes(quantization, _parameters(model))
    packed, experts = (
        weight_bytes.packed_bytes(quantization, _parameters(model), dtype, linears=linears)
        for linears in (True, False)
    )
    formats = [(rule.format.packed, rule.format.activations) for rule in quantization.rules]
    requests, has_fp8 = activations.outline(formats)
    return StoredWeights(
        quantization.method, quantization.kind, size, packed, experts, quantized.unreadable(entry),
        activations=requests, has_fp8=has_fp8,
    )  # fmt: skip


def _parameters(model: nn.Module) -> Iterator[weight_bytes.Parameter]:
    """Yield the parameters of a model, each once, though some have several names."""
    counted: set[int] = set()
    for path, module in model.named_modules():
        experts, is_transposed = expert_matrices(module), bool(getattr(module, "is_transposed", False))
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in counted:
                counted.add(id(parameter))
                linear = isinstance(module, nn.Linear) and name == "weight"
                yield weight_bytes.Parameter(
                    path, tuple(parameter.shape), linear, name in experts, is_transposed
                )


def _run(
    model: Any, text: PretrainedConfig, max_context: int
) -> tuple[tuple[LayerGroup, ...], tuple[int, ...]]:
    # The skeleton must be what runs, so its frequencies are fixed as at load.
    fix_rope(model, max_context)
    family = text.model_type
    positions = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    with refusals.ConvolutionsWatch(model, family), refusals.PositionsWatch(positions) as watch:
        calls = record_calls(model, family, position_ids=positions)
    _check(calls, text)
    watch.check(family)
    # A second pass with masks, whose rules must be what a paged cache assumes.
    model.set_attn_implementation(hook.PROBE)
    # No padding; keeps it from looking for packed rows.
    ones = torch.ones(1, _TOKENS, dtype=torch.bool, device="meta")
    with refusals.FullMask():
        masked = record_calls(model, family, attention_mask=ones)
    chunks = _chunks(text)
    masks = [(call.rule, call.params.window, chunks.get(call.layer)) for call in masked]
    refusals.check_masks(masks, family, max_context)
    # A context of a single chunk is attended over whole.
    chunks = {layer: chunk for layer, chunk in chunks.items() if chunk < max_context}
    return _groups(calls, chunks), _owners(calls)


def _chunks(text: PretrainedConfig) -> dict[int, int]:
    """Return the tokens of a chunk by layer, of layers with chunked attention."""
    kinds = getattr(text, "layer_types", None) or ()
    return {
        layer: int(text.attention_chunk_size) for layer, kind in enumerate(kinds) if kind == refusals.CHUNKED
    }


def record_calls(model: nn.Module, family: str, **inputs: Tensor | None) -> list[Call]:
    """Run a model of skeleton() and return what each layer needs of attention, by layer.

    The model is called as in engine/model_runner.py: all tokens are computed, and the logits of one.

    Args:
        model: from skeleton().
        family: for messages.
        inputs: arguments of the model beside its tokens; without a mask it gets that of attention_mask_for().

    Raises:
        ConfigError: the model does not get that far.
    """
    # The context in which the model runs takes notes in place of attending.
    observer = hook.Observer()
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    keep = torch.zeros(1, dtype=torch.long, device="meta")
    inputs = {"attention_mask": attention_mask_for(model, ids, observer), "logits_to_keep": keep, **inputs}
    if (mask := inputs["attention_mask"]) is not None:
        hook.attach_context(model, mask, observer)
    with torch.inference_mode(), refusals.EmptyRouting():
        try:
            out = model(input_ids=ids, use_cache=False, **inputs, **{hook.CONTEXT: observer})
        except NibbleError:
            raise
        except Exception as error:  # whatever foreign code stumbles over, it cannot be served
            reason = refusals.failure_reason(model, error)
            raise ConfigError(f"{family} cannot be served: {reason}") from error
    if out.logits.shape[1] != 1:
        raise ConfigError(f"{family} cannot be served: it cannot compute the logits of chosen tokens only")
    return sorted(observer.calls, key=lambda call: call.layer)


def _check(calls: Sequence[Call], text: PretrainedConfig) -> None:
    """Raise ConfigError unless each layer attends once, over one key and value for each token."""
    family, layers = text.model_type, text.num_hidden_layers
    counts = Counter(call.layer for call in calls)
    if not counts:
        raise ConfigError(f"{family} cannot be served: {refusals.NO_INTERFACE}")
    layer, count = counts.most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"{family} cannot be served: layer {layer} attends {count} times in one pass; a cache of pages holds one "
            "key and value of a layer for each token"
        )
    if without := sorted(set(range(layers)) - set(counts)):
        raise ConfigError(
            f"{family} cannot be served: {len(without)} of its {layers} layers do not attend to text (layer "
            f"{without[0]}); a cache of pages holds keys and values of every layer"
        )
    if len(counts) > layers:
        raise ConfigError(
            f"{family} cannot be served: {len(counts)} layers attend, and its config has {layers}"
        )
    for call in calls:
        queries, stored = call.query.shape[2], {x.shape[2] for x in call.streams.values()}
        # A cache of pages has one key for each token; other counts would be addressed wrongly.
        if {queries} | stored != {_TOKENS}:
            keys = max(stored)
            raise ConfigError(
                f"{family} cannot be served: layer {call.layer} attends from {queries} queries over {keys} "
                f"keys for {_TOKENS} tokens; a cache of pages holds one key for each token"
            )


def _owners(calls: Sequence[Call]) -> tuple[int, ...]:
    """Return for each layer the first one that got the very same key: itself, unless KV is shared."""
    first: dict[int, int] = {}
    # Layers that share KV hand on the very same tensor.
    return tuple(first.setdefault(id(next(iter(call.streams.values()))), call.layer) for call in calls)


def _groups(calls: Sequence[Call], chunks: Mapping[int, int]) -> tuple[LayerGroup, ...]:
    """Return layers that need the same of attention, together."""
    by_need: dict[LayerGroup, list[int]] = {}
    for call in calls:
        by_need.setdefault(_need(call, chunks.get(call.layer)), []).append(call.layer)
    return tuple(
        replace(need, name=_name(need, i), layers=tuple(layers))
        for i, (need, layers) in enumerate(by_need.items())
    )


def _need(call: Call, chunk: int | None) -> LayerGroup:
    """Return what one layer needs, without a name and its number."""
    params, streams, top_k = call.params, _streams(call), call.selection.top_k if call.selection else 0
    kind: Kind = "dsa" if top_k else "mla" if streams[0].name == LATENT else "mha"
    heads, sinks = call.query.shape[1], params.sinks_H is not None
    return LayerGroup("", kind, streams, (), heads, params.window, bool(params.softcap), sinks, top_k, chunk)


def _streams(call: Call) -> tuple[Stream, ...]:
    """Return what a layer stores. The layer of an indexer stores its key, which is scored for other layers too."""
    streams = tuple(Stream(name, x.shape[1], x.shape[3], call.rope) for name, x in call.streams.items())
    if call.selection is None or call.selection.layer != call.layer:
        return streams
    _, heads, dim = call.selection.key_T1D.shape
    return (*streams, Stream(INDEX, heads, dim, call.rope))


def _name(group: LayerGroup, index: int) -> str:
    kind = "sparse" if group.top_k else "chunked" if group.chunk else "sliding" if group.window else "full"
    return f"{kind}{index or ''}"
