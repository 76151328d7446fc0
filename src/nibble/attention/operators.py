"""The operators that a compiler of models calls for attention and for recurrent states, and does not look into.

`nibble::attention` calls attention() of layer.py, `nibble::select` select_topk() of choices.py, and
`nibble::causal_conv`, `nibble::recurrence`, `nibble::conv_recurrence` and `nibble::projected_recurrence` (which graph
passes put in the place of these two) and `nibble::selective` the functions of recurrent.py. What a step stores and
reads does not pass through the compiled model: the operator is given a number, and finds there the StepContext that the
model's owner has set. So there is no current step of the process: any number of engines may run side by side. The
number is an input of the compiled model and no constant, so all engines of a model have the same code, in this process
and in the next.

Shape suffixes: T tokens, H query heads, D values of a head. Those of recurrent states are in recurrent.py.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nibble.attention import recurrent
from nibble.attention.choices import select_topk
from nibble.attention.layer import attention
from nibble.attention.step import StepContext
from nibble.kernels.recurrence import Convolution, Projection, Runs
from nibble.kernels.types import AttentionParams, Rope

SEPARATOR = ","
_numbers = itertools.count()
# Weak: a compiled model is given the number alone, so a Step goes with its owner.
_steps: WeakValueDictionary[int, Step] = WeakValueDictionary()


class Step:
    """Where one owner of a compiled model sets the context of the step that it is about to run."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")
        """int64 [] on the CPU, where reading it waits for nothing. A compiler makes constants of plain numbers."""
        self.context: StepContext | None = None
        self.out: Tensor | None = None
        """Where the next operator may leave what it returns."""
        _steps[number] = self

    def __getstate__(self) -> dict[str, object]:
        """Return what models/compile_cache.py keeps of a step on disk: nothing of its pool and kernels."""
        return {"number": self.number, "context": None, "out": None}


@dataclass(frozen=True, slots=True)
class Seam:
    """A call of an operator, where a step that is recorded piecewise is cut (engine/piecewise.py)."""

    step: Step
    arguments: tuple[Any, ...]
    _body: Callable[..., Tensor]
    _fake: Callable[..., Tensor]

    def of(self, arguments: tuple[Any, ...]) -> Seam:
        """Return the same call of other arguments."""
        return replace(self, arguments=arguments)

    def empty(self) -> Tensor:
        """Return a tensor as the operator returns one, of any values."""
        return self._fake(*self.arguments)

    def call(self, ctx: StepContext, out: Tensor) -> None:
        """Compute in a step what the operator returns.

        Args:
            ctx: of the step.
            out: gets it.
        """
        self.step.context, self.step.out = ctx, out
        try:
            result = self._body(*self.arguments)
        finally:
            self.step.out = None
        if result is not out:
            out.copy_(result)


def attention_op(
    step: Step, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], width: int, params: AttentionParams
) -> Tensor:
    """Call attention() by way of the operator.

    Args:
        step: holds the context when the operator runs.
        layer: the layer's index.
        q_THD: the query, padding rows included.
        streams: the new tokens' values by stream.
        width: values of a head of the output.
        params: what the layer asks for.

    Returns:
        [T, H, width].
    """
    return torch.ops.nibble.attention(
        q_THD, list(streams.values()), SEPARATOR.join(streams), width, step.number, layer, params.scale, params.window,
        params.softcap, params.sinks_H, params.topk_indices_TK, params.index_layer, [], 0.0, 0.0, False,
    )  # fmt: skip


def select_topk_op(
    step: Step, layer: int, q_THD: Tensor, key_T1D: Tensor, weights_TH: Tensor, top_k: int
) -> Tensor:
    """Call select_topk() by way of the operator -> int32 [T, top_k].

    Args:
        step: holds the context when the operator runs.
        layer: the layer's index.
        q_THD: the indexer's query.
        key_T1D: its new keys.
        weights_TH: weights of its heads.
        top_k: tokens to choose.
    """
    return torch.ops.nibble.select(q_THD, key_T1D, weights_TH, step.number, layer, top_k)


def conv_op(
    step: Step, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Call recurrent.conv() by way of the operator -> [T, C].

    Args:
        step: holds the context when the operator runs.
        layer: the layer's index.
        x: new inputs [T, C].
        weight: taps [C, W].
        bias: [C].
        activation: Name of a function of the output.
    """
    return torch.ops.nibble.causal_conv(x, weight, bias, activation, step.number, layer)


def recurrence_op(
    step: Step, layer: int, q: Tensor, k: Tensor, x: Tensor, log_decay: Tensor, beta: Tensor, *, delta: bool,
    unit: bool = False,
) -> Tensor:  # fmt: skip
    """Call recurrent.recurrence() by way of the operator -> [T, H, V].

    Args:
        step: holds the context when the operator runs.
        layer: the layer's index.
        q: queries [T, G, K].
        k: keys [T, G, K].
        x: values [T, H, V].
        log_decay: [T, H], or [T, H, K].
        beta: [T, H].
        delta: whether the delta rule applies.
        unit: whether queries and keys are normalised.
    """
    return torch.ops.nibble.recurrence(q, k, x, log_decay, beta, step.number, layer, delta, unit)


def selective_op(step: Step, layer: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Call recurrent.selective() by way of the operator -> [T, C].

    Args:
        step: holds the context when the operator runs.
        layer: the layer's index.
        x: new inputs [T, C].
        dt: step sizes [T, C].
        A: log decays of a step of size 1, [C, N].
        B: weights of inputs [T, N].
        C: weights of the state [T, N].
    """
    return torch.ops.nibble.selective(x, dt, A, B, C, step.number, layer)


def _context(step: Tensor) -> StepContext:
    return _context_of(_steps[int(step)])


def _context_of(owner: Step) -> StepContext:
    assert owner.context is not None, "the owner of a compiled model sets a context before it runs it"
    return owner.context


def _attention(
    q: Tensor, streams: list[Tensor], names: str, width: int, step: Tensor, layer: int, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None, topk_indices: Tensor | None, index_layer: int,
    rope: list[Tensor], eps: float, offset: float, logits_only: bool,
) -> Tensor:  # fmt: skip
    params = AttentionParams(scale, window, softcap, sinks, topk_indices, index_layer)
    streams_by_name = dict(zip(names.split(SEPARATOR), streams, strict=True))
    owner = _steps[int(step)]
    turned = Rope(rope[0], rope[1], tuple(rope[2:]), eps, offset) if rope else None
    out = attention(
        _context_of(owner), layer, q, streams_by_name, params, owner.out, turned, logits_only=logits_only
    )
    return out.contiguous()  # as the fake implementation promises


def _attention_fake(q: Tensor, streams: list[Tensor], names: str, width: int, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], width)


def _select(q: Tensor, key: Tensor, weights: Tensor, step: Tensor, layer: int, top_k: int) -> Tensor:
    owner = _steps[int(step)]
    return select_topk(_context_of(owner), layer, q, key, weights, top_k, owner.out)


def _select_fake(q: Tensor, key: Tensor, weights: Tensor, step: Tensor, layer: int, top_k: int) -> Tensor:
    return q.new_empty(q.shape[0], top_k, dtype=torch.int32)


def _implement(name: str, body: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """Implement an operator, whose calls a step may be given to cut itself there."""
    place = list(inspect.signature(body).parameters).index("step")

    @functools.wraps(body)
    def call(*arguments: Any) -> Tensor:
        step = _steps[int(arguments[place])]
        if step.context is not None and step.context.cut:
            return step.context.cut(Seam(step, arguments, body, fake))
        return body(*arguments)

    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nibble::{name}", fake, lib=_library)


_library = torch.library.Library("nibble", "FRAGMENT")  # what it defines lives as long as it does
_library.define(
    "attention(Tensor q, Tensor[] streams, str names, int width, Tensor step, int layer, float scale, int? window, "
    "float? softcap, Tensor? sinks, Tensor? topk_indices, int index_layer, Tensor[] rope, float eps, float offset, "
    "bool logits_only) -> Tensor"
)
_implement("attention", _attention, _attention_fake)
_library.define("select(Tensor q, Tensor key, Tensor weights, Tensor step, int layer, int top_k) -> Tensor")
_implement("select", _select, _select_fake)


def _causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, step: Tensor, layer: int
) -> Tensor:
    return recurrent.conv(_context(step).recurrent, layer, x, weight, bias, activation).contiguous()


def _recurrence(
    q: Tensor, k: Tensor, x: Tensor, log_decay: Tensor, beta: Tensor, step: Tensor, layer: int, delta: bool, unit: bool
) -> Tensor:  # fmt: skip
    states = _context(step).recurrent
    return recurrent.recurrence(states, layer, q, k, x, log_decay, beta, delta=delta, unit=unit).contiguous()


def _conv_recurrence(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, places: list[int], log_decay: Tensor,
    beta: Tensor, step: Tensor, layer: int, delta: bool, unit: bool, heads: int, rows: int,
) -> Tensor:  # fmt: skip
    conv = Convolution(x, weight, bias, activation, *places)
    states = _context(step).recurrent
    return recurrent.conv_recurrence(
        states, layer, conv, log_decay, beta, delta=delta, unit=unit
    ).contiguous()


def _conv_recurrence_fake(x: Tensor, *arguments: Any) -> Tensor:
    heads, rows = arguments[-2:]
    return x.new_empty(x.shape[0], heads, rows)


def _projected_recurrence(
    x: Tensor, a: Tensor, b: Tensor, paces: Tensor, offsets: Tensor, runs: list[int], weight: Tensor,
    bias: Tensor | None, activation: str | None, places: list[int], step: Tensor, layer: int, delta: bool, unit: bool,
    heads: int, rows: int,
) -> Tensor:  # fmt: skip
    x_TW, a_TW, b_TW = (y.flatten(0, -2) for y in (x, a, b))
    places_of_parts = tuple(Runs(*runs[i : i + 3]) for i in range(0, len(runs), 3))
    projection = Projection(x_TW, a_TW, b_TW, places_of_parts, paces, offsets)
    conv = Convolution(x_TW, weight, bias, activation, *places)
    states = _context(step).recurrent
    out = recurrent.projected_recurrence(states, layer, projection, conv, delta=delta, unit=unit)
    return out.contiguous()


def _projected_recurrence_fake(x: Tensor, *arguments: Any) -> Tensor:
    heads, rows = arguments[-2:]
    return x.new_empty(math.prod(x.shape[:-1]), heads, rows)


def _selective(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, step: Tensor, layer: int) -> Tensor:
    return recurrent.selective(_context(step).recurrent, layer, x, dt, A, B, C).contiguous()


def _like_x(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _recurrence_fake(q: Tensor, k: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


_library.define(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, str? activation, Tensor step, int layer) -> Tensor"
)
_implement("causal_conv", _causal_conv, _like_x)
_library.define(
    "recurrence(Tensor q, Tensor k, Tensor x, Tensor log_decay, Tensor beta, Tensor step, int layer, bool delta, "
    "bool unit) -> Tensor"
)
_implement("recurrence", _recurrence, _recurrence_fake)
_library.define(
    "conv_recurrence(Tensor x, Tensor weight, Tensor? bias, str? activation, int[] places, Tensor log_decay, "
    "Tensor beta, Tensor step, int layer, bool delta, bool unit, int heads, int rows) -> Tensor"
)
_implement("conv_recurrence", _conv_recurrence, _conv_recurrence_fake)
_library.define(
    "projected_recurrence(Tensor x, Tensor a, Tensor b, Tensor paces, Tensor offsets, int[] runs, Tensor weight, "
    "Tensor? bias, str? activation, int[] places, Tensor step, int layer, bool delta, bool unit, int heads, int rows) "
    "-> Tensor"
)
_implement("projected_recurrence", _projected_recurrence, _projected_recurrence_fake)
_library.define(
    "selective(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor step, int layer) -> Tensor"
)
_implement("selective", _selective, _like_x)
