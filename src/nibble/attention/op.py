"""`nibble::attention`: one attention layer as an operator that a compiler of models calls and does not look into.

What a step stores and reads does not pass through the compiled model. The operator is given a number that is a
constant of that model, and finds there the StepContext that the model's owner has put. So there is no current step
of the process: any number of engines may run side by side. Owns the operator and Step. Must not know of models.

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nibble.attention.layer import StepContext, attention
from nibble.attention.layer import select_topk as _select_topk
from nibble.kernels.types import AttentionParams

_SIGNATURE = (
    "attention(Tensor q, Tensor[] streams, str names, int width, int step, int layer, float scale, int? window, "
    "float? softcap, Tensor? sinks, Tensor? chosen, int chooser) -> Tensor"
)
SEPARATOR = ","
_numbers = itertools.count()
_steps: WeakValueDictionary[int, Step] = WeakValueDictionary()


class Step:
    """Where one owner of a compiled model puts the context of the step that it is about to run."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.context: StepContext | None = None
        _steps[self.number] = self


def call(
    step: Step, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], width: int, params: AttentionParams
) -> Tensor:
    """attention() by way of the operator -> [T, H, width]."""
    found: Tensor = torch.ops.nibble.attention(
        q_THD, list(streams.values()), SEPARATOR.join(streams), width, step.number, layer, params.scale, params.window,
        params.softcap, params.sinks_H, params.topk_indices_TK, params.index_layer,
    )  # fmt: skip
    return found


def _context(step: int) -> StepContext:
    ctx = _steps[step].context
    assert ctx is not None, "the owner of a compiled model puts a context before it runs it"
    return ctx


def _attention(
    q: Tensor, streams: list[Tensor], names: str, width: int, step: int, layer: int, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None, chosen: Tensor | None, index_layer: int,
) -> Tensor:  # fmt: skip
    params = AttentionParams(scale, window, softcap, sinks, chosen, index_layer)
    named = dict(zip(names.split(SEPARATOR), streams, strict=True))
    return attention(_context(step), layer, q, named, params).contiguous()  # as _shape promises


def _shape(q: Tensor, streams: list[Tensor], names: str, width: int, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], width)


def select(step: Step, layer: int, q_THD: Tensor, key_T1D: Tensor, weights_TH: Tensor, top_k: int) -> Tensor:
    """attention/layer.py's select() by way of an operator -> int32 [T, top_k]."""
    found: Tensor = torch.ops.nibble.select(q_THD, key_T1D, weights_TH, step.number, layer, top_k)
    return found


def _select(q: Tensor, key: Tensor, weights: Tensor, step: int, layer: int, top_k: int) -> Tensor:
    return _select_topk(_context(step), layer, q, key, weights, top_k)


def _chosen_shape(q: Tensor, key: Tensor, weights: Tensor, step: int, layer: int, top_k: int) -> Tensor:
    return q.new_empty(q.shape[0], top_k, dtype=torch.int32)


_library = torch.library.Library("nibble", "FRAGMENT")  # what it defines lives as long as it does
_library.define(_SIGNATURE)
_library.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::attention", _shape, lib=_library)
_library.define("select(Tensor q, Tensor key, Tensor weights, int step, int layer, int top_k) -> Tensor")
_library.impl("select", _select, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::select", _chosen_shape, lib=_library)
