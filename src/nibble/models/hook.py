"""What Transformers models call in the place of attention and of recurrent states: translate it for attention/.

A keyword with a meaning is honoured or refused, never ignored.

Shape suffixes: T tokens, H query heads, G KV heads, D values of a head; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from nibble.attention import recurrent as states
from nibble.attention.choices import select_topk
from nibble.attention.layer import attention
from nibble.attention.operators import (
    Step,
    attention_op,
    conv_op,
    recurrence_op,
    select_topk_op,
    selective_op,
)
from nibble.attention.step import StepContext
from nibble.errors import ConfigError
from nibble.kernels.types import AttentionParams
from nibble.model_spec import LATENT, Recurrence
from nibble.models.dsa import Selection, indexer_replacements
from nibble.models.gates import whole_vectors
from nibble.models.mla import ABSORBED, AbsorbedProjections, absorptions
from nibble.models.recurrent import FUNCTIONS, RecurrentCall, recurrent_modules, silent_parents
from nibble.models.recurrent import HARMLESS as IMPLEMENTATIONS
from nibble.models.refusals import MaskRule

NAME = "nibble"
"""Name of the implementation that serves. It has no mask function, so no mask is built."""
PROBE = "nibble_probe"
"""Name of the same with a mask function that records the rule of each mask, for models/refusals.py."""
CONTEXT = "nibble_ctx"
"""Keyword of model(...) that carries the StepContext to every layer; a Step that holds it if the model is compiled,
or an Observer. Also the attribute of a mask that carries it where layers drop keywords."""

HARMLESS = frozenset({
    "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "position_embeddings", "layer_type", "cu_seq_lens_q", "deterministic",
    "shared_kv_states", "logits_to_keep", "num_items_in_batch", "layer_head_mask", "target_dtype",
})  # fmt: skip
"""Keywords that do not change causal attention over the pages of a request."""


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
    """Attend: query [1, H, T, D], key and value [1, G, T, D] -> ([1, T, H, D], None)."""
    ctx: StepContext | Step | Observer | None = rest.pop(CONTEXT, None)
    rule = getattr(attention_mask, _RULE, None)
    # An empty mask is that of attention_mask_for(), which hides nothing.
    built = attention_mask if rule is None and attention_mask is not None and attention_mask.numel() else None
    check_keywords(module, built, rest)
    # Before the query is absorbed: the default belongs to the family's head size, not to the latent's.
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # Families pass their sinks by either name.
    spec = AttentionParams(scale, sliding_window, softcap, s_aux if s_aux is not None else sinks)
    absorbed: AbsorbedProjections | None = getattr(module, ABSORBED, None)
    if absorbed is None:
        call = Call(layer_index(module), query, {"k": key, "v": value}, value.shape[-1], 0, spec, rule)
        # As Transformers' own attention functions do: some families look at the output as a view of other sizes.
        return _output(ctx, call, module, attention_mask).contiguous(), None
    query = absorbed.query(query)
    call = Call(layer_index(module), query, {LATENT: key}, absorbed.rank, absorbed.rope, spec, rule, indices)
    return absorbed.output(_output(ctx, call, module, attention_mask)), None


def _output(
    ctx: StepContext | Step | Observer | None, call: Call, module: nn.Module, mask: Tensor | None
) -> Tensor:
    """Return attention's output [1, T, H, Dv]."""
    if ctx is None:
        ctx = _context_of(mask, module)
    if isinstance(ctx, Observer):
        return ctx.observe(call)
    return attend(ctx, call)[None]


def _context_of(mask: Tensor | None, module: nn.Module) -> StepContext | Step | Observer:
    """Return the context that came with a mask, see attention_mask_for(); raise ConfigError if there is none."""
    ctx: StepContext | Step | Observer | None = getattr(mask, CONTEXT, None)
    if ctx is None:
        raise ConfigError(
            f"{type(module).__name__} gets neither the keywords nor the mask of the model's call, by which "
            "Nibble hands its cache to every layer, so this family cannot be served"
        )
    return ctx


def attend(ctx: StepContext | Step, call: Call) -> Tensor:
    """Compute a layer's attention in the context of a step -> [T, H, Dv]."""
    q_THD = call.query[0].transpose(0, 1)
    streams = {name: x[0].transpose(0, 1) for name, x in call.streams.items()}
    spec, selection = call.params, call.selection
    if selection:
        spec = replace(spec, topk_indices_TK=_topk_indices(ctx, selection), index_layer=selection.layer)
    # Under a compiler attention is a custom operator, which it calls without looking inside.
    if isinstance(ctx, Step):
        return attention_op(ctx, call.layer, q_THD, streams, call.width, spec)
    return attention(ctx, call.layer, q_THD, streams, spec)


def _topk_indices(ctx: StepContext | Step, selection: Selection) -> Tensor:
    """Return the tokens of a selection; layers that share one compute it once."""
    if selection.topk_indices_TK is None or selection.ctx is not ctx:
        selection.ctx = ctx
        arguments = selection.layer, selection.q_THD, selection.key_T1D, selection.weights_TH, selection.top_k
        select: Any = select_topk_op if isinstance(ctx, Step) else select_topk
        selection.topk_indices_TK = select(ctx, *arguments)
    return selection.topk_indices_TK


def layer_index(module: nn.Module) -> int:
    """Return the index of an attention module; raise ConfigError if it has none."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ConfigError(
            f"{type(module).__name__} does not say which layer it is; Nibble cannot place its cache"
        )
    return index


def check_keywords(module: nn.Module, mask: Tensor | None, rest: dict[str, Any]) -> None:
    """Raise ConfigError if the model asks for something that would be ignored.

    Args:
        module: the attention module that calls.
        mask: the mask it passes, if Transformers built one.
        rest: the remaining keywords.
    """
    # HARMLESS has is_causal, but False would let queries see later tokens.
    if rest.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(
            f"{type(module).__name__} attends with is_causal=False: queries see later tokens, or a mask hides "
            "those, and a cache of pages never builds masks; this family cannot be served right"
        )
    unknown = sorted(name for name, value in rest.items() if name not in HARMLESS and value is not None)
    if mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, and Nibble does not "
            "honour that: this family cannot be served right"
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's call of attention."""

    layer: int
    query: Tensor
    """[1, H, T, D]."""
    streams: dict[str, Tensor]
    """Streams to cache by name, [1, G, T, D] each."""
    width: int
    """Values of a head's output."""
    rope: int
    """Rotary values at the end of a latent, which belong to the key alone."""
    params: AttentionParams
    rule: MaskRule | None
    """The rule of the mask, if Transformers built one."""
    selection: Selection | None = None
    """The tokens that sparse attention looks at."""


class Observer:
    """Records each layer's calls of attention and of recurrent states while a model runs on the meta device."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.recurrent_calls: list[RecurrentCall] = []

    def observe(self, call: Call) -> Tensor:
        """Record `call` and return an empty output [1, T, H, Dv]."""
        self.calls.append(call)
        batch, heads, tokens, _ = call.query.shape
        return call.query.new_empty(batch, tokens, heads, call.width)

    def observe_recurrent(self, call: RecurrentCall) -> Tensor:
        """Record `call` and return an empty output; raise ConfigError where values are computed, which need states."""
        x: Tensor = call.arguments["x"]
        if not x.is_meta:
            raise ConfigError(
                "this measurement looks at attention alone, and some layers of this model keep a recurrent state, "
                "which it has not; choose a model whose layers all attend"
            )
        self.recurrent_calls.append(call)
        return torch.empty_like(x)


def _keep_state(
    module: nn.Module,
    ctx: StepContext | Step | Observer,
    rule: Recurrence,
    arguments: dict[str, Any],
    rest: Mapping[str, Any],
) -> Tensor:
    """Compute one call of a recurrent layer in the context of a step."""
    harmless = HARMLESS | IMPLEMENTATIONS
    unknown = sorted(name for name, x in rest.items() if not (x is None or x is False or name in harmless))
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its recurrence, and Nibble does not honour that: "
            "this family cannot be served right"
        )
    call = RecurrentCall(layer_index(module), rule, arguments)
    return ctx.observe_recurrent(call) if isinstance(ctx, Observer) else keep_state(ctx, call)


def keep_state(ctx: StepContext | Step, call: RecurrentCall) -> Tensor:
    """Bring a layer's states forward in the context of a step, and return what they answer."""
    is_compiled = isinstance(ctx, Step)
    serve: Any
    if call.rule == "conv":
        serve = conv_op if is_compiled else states.conv
    elif call.rule == "selective":
        serve = selective_op if is_compiled else states.selective
    else:
        serve = partial(recurrence_op if is_compiled else states.recurrence, delta=call.rule == "delta")
    return serve(ctx if isinstance(ctx, Step) else ctx.recurrent, call.layer, **call.arguments)


@cache
def _recurrent_forward(own: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return the forward() of a recurrent module, around one of recurrent_modules()."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        ctx = kwargs.pop(CONTEXT, None)
        if ctx is None:
            ctx = _context_of(mask, self)
        if mask is not None and not mask.numel():
            # It brought the context, and hides nothing.
            kwargs["attention_mask"] = None
        serve = partial(_keep_state, self, ctx)
        functions = {name: partial(FUNCTIONS[name], serve) for name in names}
        with whole_vectors():
            return own(self, *args, **functions, **kwargs)

    return forward


def _hand_on(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the forward() of a layer that keeps keywords to itself, with a mask that carries the context."""
    mask = kwargs.pop("attention_mask", None)
    mask = hidden_states.new_empty(0) if mask is None else mask
    setattr(mask, CONTEXT, kwargs.get(CONTEXT))
    return type(self).forward(self, hidden_states, *args, attention_mask=mask, **kwargs)


_RULE = "nibble_rule"


def _note_rule(
    q_length: int, kv_length: int, mask_function: MaskRule, attention_mask: Tensor | None = None, **_: Any
) -> Tensor:
    """Return an empty mask that remembers the rule it stands for; the signature is Transformers'."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    setattr(mask, _RULE, mask_function)
    # The mask that the model was called with may carry the context.
    setattr(mask, CONTEXT, getattr(attention_mask, CONTEXT, None))
    return mask


_MASK = "nibble_mask"
"""Attribute of models that are called with an empty mask: whether it carries the context."""


def adapt(model: Any) -> Any:
    """Adapt `model` in place and return it; it changes MLA, sparse attention and recurrent layers alone."""
    for module, attributes in adaptations(model):
        for name, value in attributes.items():
            setattr(module, name, value)
        if ABSORBED in attributes:
            attributes[ABSORBED].contiguous()
            # The two factors replace it: attention over the latent never expands keys and values.
            del module.kv_b_proj
    return model


def adaptations(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return what adapt() would change, as attributes by module, without changing the model."""
    indexers, recurrent = indexer_replacements(model), list(recurrent_modules(model))
    layers = silent_parents(model, [module for module, *_ in recurrent])
    carries = any(_drops_keywords(module) and module not in layers for module in model.modules())
    forwards = [(module, _recurrent_forward(own, names)) for module, own, names in recurrent]
    forwards += [(layer, _hand_on) for layer in layers]
    mask = [(model, {_MASK: carries})] if indexers or carries else []
    replaced = [(module, {"forward": MethodType(forward, module)}) for module, forward in forwards]
    return [*absorptions(model), *indexers, *replaced, *_missing_indices(model), *mask]


def _missing_indices(model: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """Return the attention modules that learn from each call which layer they are, with the index of their layer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [
        (part, {"layer_idx": index})
        for layers in lists
        for index, layer in enumerate(layers)
        for part in layer.modules()
        if getattr(part, "layer_idx", None) == _IN_CALLS
    ]


_IN_CALLS = -1
"""Index of a layer's attention that gets its index in each call."""


def _drops_keywords(module: nn.Module) -> bool:
    """Return whether a layer takes keywords and does not read them, so that its attention never gets the context."""
    if not any(isinstance(getattr(child, "layer_idx", None), int) for child in module.children()):
        return False
    code = inspect.unwrap(type(module).forward).__code__
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    arguments = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    keywords = code.co_varnames[arguments]
    # A newer Python names several variables in one instruction.
    operands = (x.argval if isinstance(x.argval, tuple) else (x.argval,) for x in dis.get_instructions(code))
    return not any(keywords in names for names in operands)


def attention_mask_for(model: Any, ids: Tensor, ctx: StepContext | Step | Observer) -> Tensor | None:
    """Return the attention mask to call `model` with: None, or an empty one, which Transformers passes on unchanged.

    Layers with an indexer cut its mask out of theirs. Where layers drop keywords, the mask carries the context to their
    attention instead: it belongs to one call of the model, so any number of them may run side by side.

    Args:
        model: from adapt().
        ids: its tokens [1, T].
        ctx: the context of the call.
    """
    carries = getattr(model, _MASK, None)
    if carries is None:
        return None
    mask = ids.new_empty(1, 1, 0, 0)
    attach_context(model, mask, ctx)
    return mask


def attach_context(model: Any, mask: Tensor, ctx: StepContext | Step | Observer) -> None:
    """Let `mask` carry the context, if the layers of `model` drop keywords."""
    if getattr(model, _MASK, False):
        setattr(mask, CONTEXT, ctx)


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(PROBE, _attend)
AttentionMaskInterface.register(PROBE, _note_rule)
