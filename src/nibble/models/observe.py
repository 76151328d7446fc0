"""ModelSpec by observation: a model without weights runs once on the meta device, and its calls are noted.

So heads, head sizes, windows, sinks, score capping, shared KV and the sizes of recurrent states are facts of the very
code that will run, for any family, with no table of families. What was observed is kept by observations.py.
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
from nibble.model_spec import (
    INDEX,
    LATENT,
    NO_LAYER,
    Kind,
    LayerGroup,
    ModelSpec,
    RecurrentGroup,
    StoredWeights,
    Stream,
)
from nibble.models import activations, hook, online, refusals, weight_bytes
from nibble.models import quantization as quantized
from nibble.models.experts import expert_matrices
from nibble.models.head_model import class_of
from nibble.models.hook import Call, adapt, attention_mask_for
from nibble.models.hub import first_line, quiet
from nibble.models.mla import context_factor, fix_rope
from nibble.models.recurrent import RecurrentCall
from nibble.models.towers import text_attention

_TOKENS = 31
"""Tokens of a pass: a number that no other size of a model is likely to have."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_specs: dict[tuple[str, str, str, int | None, str | None], ModelSpec] = {}
"""What was observed in this process."""


def skeleton(config: PretrainedConfig) -> nn.Module:
    """Return the model without weights, on the meta device; raise ConfigError where there is no language model."""
    model: nn.Module = adapt(bare_skeleton(config)).eval()
    return model


def bare_skeleton(config: PretrainedConfig) -> nn.Module:
    """Return the same as its family wrote it, with nothing replaced."""
    text = config.get_text_config()
    try:
        with torch.device("meta"), quiet():
            # Any dtype serves: nothing is computed, and weights are counted in the compute dtype.
            options = {"attn_implementation": text_attention(config, hook.NAME), "dtype": torch.bfloat16}
            model: nn.Module = class_of(config)._from_config(config, **options)
    except Exception as error:  # of all kinds: every family checks its config in its own way
        if isinstance(error, KeyError) and error.args == (hook.NAME,):
            reason = "it knows a fixed set of attention implementations, and Nibble's is not among them"
        else:
            reason = f"Transformers cannot make a model of this config: {first_line(error)}"
        raise ConfigError(f"{text.model_type} cannot be served: {reason}") from error
    return model


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
    groups, owner, states = _run(model, text, max_context or limit)
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
        states=states,
        has_experts=any(expert_matrices(module) for module in model.modules()),
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
) -> tuple[tuple[LayerGroup, ...], tuple[int, ...], tuple[RecurrentGroup, ...]]:
    # The skeleton must be what runs, so its frequencies are fixed as at load.
    fix_rope(model, max_context)
    family = text.model_type
    positions = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    with refusals.ConvolutionsWatch(model, family), refusals.PositionsWatch(positions) as watch:
        observer = record_calls(model, family, position_ids=positions)
    calls, states = observer.calls, _states(observer.recurrent_calls, family)
    _check(calls, states, text)
    watch.check(family)
    # A second pass with masks, whose rules must be what a paged cache assumes.
    model.set_attn_implementation(hook.PROBE)
    # No padding; keeps it from looking for packed rows.
    ones = torch.ones(1, _TOKENS, dtype=torch.bool, device="meta")
    with refusals.FullMask():
        masked = record_calls(model, family, attention_mask=ones).calls
    chunks = _chunks(text)
    masks = [(call.layer, call.rule, call.params.window, chunks.get(call.layer)) for call in masked]
    refusals.check_masks(masks, family, max_context)
    # A context of a single chunk is attended over whole.
    chunks = {layer: chunk for layer, chunk in chunks.items() if chunk < max_context}
    return _groups(calls, chunks), _owners(calls, text.num_hidden_layers), states


def _chunks(text: PretrainedConfig) -> dict[int, int]:
    """Return the tokens of a chunk by layer, of layers with chunked attention."""
    kinds = getattr(text, "layer_types", None) or ()
    return {
        layer: int(text.attention_chunk_size) for layer, kind in enumerate(kinds) if kind == refusals.CHUNKED
    }


def record_calls(model: nn.Module, family: str, **inputs: Tensor | None) -> hook.Observer:
    """Run a model of skeleton() and return what its layers called, attention by layer.

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
    observer.calls.sort(key=lambda call: call.layer)
    return observer


def _check(calls: Sequence[Call], states: Sequence[RecurrentGroup], text: PretrainedConfig) -> None:
    """Raise ConfigError unless each layer attends once over one key and value for each token, or has a state."""
    family, layers = text.model_type, text.num_hidden_layers
    counts = Counter(call.layer for call in calls)
    if not counts:
        reason = refusals.NO_ATTENTION if states else refusals.NO_INTERFACE
        raise ConfigError(f"{family} cannot be served: {reason}")
    layer, count = counts.most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"{family} cannot be served: layer {layer} attends {count} times in one pass; a cache of pages holds one "
            "key and value of a layer for each token"
        )
    mixing = {*counts, *(layer for group in states for layer in group.layers)}
    if without := sorted(set(range(layers)) - mixing - _tokenwise(text)):
        raise ConfigError(
            f"{family} cannot be served: {len(without)} of its {layers} layers do not attend to text (layer "
            f"{without[0]}), and have no recurrent state that Nibble sees"
        )
    if beyond := sorted(mixing - set(range(layers))):
        raise ConfigError(
            f"{family} cannot be served: its config has {layers} layers, and layer {beyond[0]} attends"
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


def _tokenwise(text: PretrainedConfig) -> set[int]:
    """Return the layers that compute each token by itself, as their types say."""
    kinds = refusals.layer_types(text)
    return {layer for layer, kind in enumerate(kinds) if kind in refusals.TOKENWISE}


def _owners(calls: Sequence[Call], layers: int) -> tuple[int, ...]:
    """Return for each layer the first one that got the very same key: itself, unless KV is shared."""
    first: dict[int, int] = {}
    # Layers that share KV hand on the very same tensor.
    owner = {
        call.layer: first.setdefault(id(next(iter(call.streams.values()))), call.layer) for call in calls
    }
    return tuple(owner.get(layer, NO_LAYER) for layer in range(layers))


def _states(calls: Sequence[RecurrentCall], family: str) -> tuple[RecurrentGroup, ...]:
    """Return layers that keep the same recurrent state, together."""
    by_layer: dict[int, list[RecurrentCall]] = {}
    for call in calls:
        by_layer.setdefault(call.layer, []).append(call)
    by_need: dict[RecurrentGroup, list[int]] = {}
    for layer, own in sorted(by_layer.items()):
        by_need.setdefault(_state(own, family), []).append(layer)
    return tuple(
        replace(need, name=f"{need.rule}{i or ''}", layers=tuple(layers))
        for i, (need, layers) in enumerate(by_need.items())
    )


def _state(calls: Sequence[RecurrentCall], family: str) -> RecurrentGroup:
    """Return what one layer keeps, without a name and its number; raise ConfigError if that is more than one state."""
    layer = calls[0].layer
    convolutions = [call for call in calls if call.rule == "conv"]
    rules = [call for call in calls if call.rule != "conv"]
    if len(convolutions) > 1 or len(rules) > 1:
        raise ConfigError(
            f"{family} cannot be served: layer {layer} keeps {len(convolutions)} convolutions and {len(rules)} "
            "matrices, and Nibble keeps one of each for a layer"
        )
    for call in calls:
        if (tokens := call.arguments["x"].shape[0]) != _TOKENS:
            raise ConfigError(
                f"{family} cannot be served: layer {layer} brings its state forward by {tokens} of {_TOKENS} tokens"
            )
    channels, taps = convolutions[0].arguments["weight"].shape if convolutions else (0, 0)
    need = RecurrentGroup("", rules[0].rule if rules else "conv", (), conv_channels=channels, conv_taps=taps)
    return _with_matrix(need, rules[0].arguments) if rules else need


def _with_matrix(need: RecurrentGroup, arguments: Mapping[str, Any]) -> RecurrentGroup:
    """Return what a layer keeps with the sizes of its matrices."""
    if need.rule == "selective":
        rows, columns = arguments["A"].shape
        return replace(need, heads=1, rows=rows, columns=columns, key_heads=1)
    (_, key_heads, columns), (_, heads, rows) = arguments["k"].shape, arguments["x"].shape
    key_decay = arguments["log_decay"].dim() == arguments["k"].dim()
    return replace(need, heads=heads, rows=rows, columns=columns, key_heads=key_heads, key_decay=key_decay)


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
