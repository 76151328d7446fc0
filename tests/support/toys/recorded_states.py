"""Recurrent states whose numbers are read when a step runs, so that a tape can record them: the definition, as operators.

As a kernel on a GPU does, they read slots and positions from tensors; what Python knew at the time of recording is not
used. A tape sees one call each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.attention import recurrent
from nibble.attention.recurrent import RecurrentStates
from nibble.kernels.recurrence import LayerState, naive
from nibble.kernels.recurrence.types import StateBatch, StateMetadata

_library = torch.library.Library("recorded_states", "DEF")
_library.define(
    "run(Tensor?[] inputs, Tensor slots, Tensor starts, Tensor cu_seqlens, Tensor? settled, int call) -> Tensor"
)
_calls: list[Any] = []


def _run(
    inputs: list[Tensor | None],
    slots: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor,
    settled: Tensor | None,
    call: int,
) -> Tensor:
    function, state, options = _calls[call]
    batch = StateMetadata(slots, starts, cu_seqlens, 1, settled).on_host()
    # The definition knows no padding between requests.
    counts, first = cu_seqlens.diff(), inputs[0]
    assert first is not None
    rows = torch.arange(int(cu_seqlens[-1]))[(slots >= 0).repeat_interleave(counts)]
    of_rows = [None if x is None else x[rows] for x in inputs[: options["of_rows"]]]
    others = {name: value for name, value in options.items() if name != "of_rows"}
    found: Tensor = function(*of_rows, *inputs[len(of_rows) :], state, batch, **others)
    out = found.new_zeros(len(first), *found.shape[1:])
    out[rows] = found
    return out


_library.impl("run", _run, "CompositeExplicitAutograd")


def _recorded(
    function: Any,
    *inputs: Tensor | None,
    batch: StateBatch | StateMetadata,
    state: LayerState,
    **options: Any,
) -> Tensor:
    if isinstance(batch, StateBatch):  # of the comparison at load
        options.pop("of_rows")
        result: Tensor = function(*inputs, state, batch, **options)
        return result
    _calls.append((function, state, options))
    numbers = batch.slots_B, batch.starts_B, batch.cu_seqlens_B1, batch.settled_B
    out: Tensor = torch.ops.recorded_states.run(inputs, *numbers, len(_calls) - 1)
    return out


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Any, batch: Any
) -> Tensor:
    def conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Any, batch: Any) -> Tensor:
        return naive.causal_conv(x, weight, bias, activation, state, batch)

    return _recorded(conv, x, weight, bias, batch=batch, state=state, of_rows=1)


def _recurrence(*inputs: Any, delta: bool, unit: bool) -> Tensor:
    *tensors, state, batch = inputs
    if unit:
        tensors[:2] = naive.unit_rows(*tensors[:2])
    return _recorded(naive.recurrence, *tensors, batch=batch, state=state, delta=delta, of_rows=len(tensors))


def _of_layer(states: RecurrentStates | None, layer: int) -> tuple[LayerState, Any]:
    assert states is not None
    return states.layers[layer], states.batch


@contextmanager
def recordable() -> Iterator[None]:
    """Let recurrent layers be computed by operators that a tape records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "kernels", SimpleNamespace(causal_conv=_conv, recurrence=_recurrence))
        patch.setattr(recurrent, "_of_layer", _of_layer)
        yield
    _calls.clear()
