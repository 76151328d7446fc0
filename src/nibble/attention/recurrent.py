"""One recurrent layer of one step: bring its state forward, and read from it. The only writer of recurrent states.

What a layer is given are the tokens of all requests of the step, one request after the other; which state belongs to
which, and where it begins, is in the step's StateBatch (kernels/recurrence).

Shape suffixes: T tokens, C channels, W taps of a convolution, G heads of keys, K their values, H heads of the state,
V their values, N columns of a state of Mamba.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from nibble.kernels import recurrence as kernels
from nibble.kernels.recurrence import Convolution, LayerState, Projection, StateBatch
from nibble.kernels.recurrence.types import StateMetadata


@dataclass(frozen=True)
class RecurrentStates:
    """The recurrent states of a step."""

    layers: Mapping[int, LayerState]
    """By layer."""
    batch: StateBatch | StateMetadata
    """The step's requests, as the definition reads them, or on the device."""

    @cached_property
    def numbers(self) -> StateBatch | StateMetadata:
        """Return the requests as kernels read them: what computes on a CPU reads numbers, made once for all layers."""
        batch = self.batch
        if isinstance(batch, StateMetadata) and batch.slots_B.device.type == "cpu":
            return batch.on_host()
        return batch


def conv(
    states: RecurrentStates | None,
    layer: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """Convolve each channel over a request's tokens -> [T, C].

    Args:
        states: of the step.
        layer: the layer's index.
        x: new inputs [T, C].
        weight: taps [C, W], the last of which is for the present token.
        bias: [C].
        activation: name of a function of the output.
    """
    state, batch = _of_layer(states, layer)
    return kernels.causal_conv(x, weight, bias, activation, state, batch)


def recurrence(
    states: RecurrentStates | None,
    layer: int,
    q: Tensor,
    k: Tensor,
    x: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    delta: bool,
    unit: bool = False,
) -> Tensor:
    """Bring matrices forward by new keys and values, and query them -> [T, H, V].

    Args:
        states: of the step.
        layer: the layer's index.
        q: queries [T, G, K].
        k: keys [T, G, K].
        x: values [T, H, V].
        log_decay: float32 [T, H], or [T, H, K] where each column has its own.
        beta: float32 weights of updates [T, H].
        delta: whether what the state has for a key is taken from its value first.
        unit: whether queries and keys are normalised first, and queries multiplied with K^-1/2.
    """
    state, batch = _of_layer(states, layer)
    return kernels.recurrence(q, k, x, log_decay, beta, state, batch, delta=delta, unit=unit)


def conv_recurrence(
    states: RecurrentStates | None,
    layer: int,
    conv: Convolution,
    log_decay: Tensor,
    beta: Tensor,
    *,
    delta: bool,
    unit: bool,
) -> Tensor:
    """Convolve, and bring matrices forward by what comes of it, and query them -> [T, H, V].

    Args:
        states: of the step.
        layer: the layer's index.
        conv: the convolution, and where queries, keys and values are among its channels.
        log_decay: as in recurrence(), and so are the following.
        beta: see there.
        delta: see there.
        unit: see there.
    """
    state, batch = _of_layer(states, layer)
    return kernels.conv_recurrence(conv, log_decay, beta, state, batch, delta=delta, unit=unit)


def projected_recurrence(
    states: RecurrentStates | None,
    layer: int,
    projection: Projection,
    conv: Convolution,
    *,
    delta: bool,
    unit: bool,
) -> Tensor:
    """Compute gates, convolve, and bring matrices forward by what comes of it, and query them -> [T, H, V].

    Args:
        states: of the step.
        layer: the layer's index.
        projection: the products that the layer begins with, and where everything is in them.
        conv: the convolution; its own inputs are not read.
        delta: as in recurrence().
        unit: see there.
    """
    state, batch = _of_layer(states, layer)
    return kernels.projected_recurrence(projection, conv, state, batch, delta=delta, unit=unit)


def selective(
    states: RecurrentStates | None, layer: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> Tensor:
    """Bring the state of Mamba 1 forward, and read it -> [T, C].

    Args:
        states: of the step.
        layer: the layer's index.
        x: new inputs [T, C].
        dt: float32 step sizes [T, C].
        A: float32 log decays of a step of size 1, [C, N].
        B: weights of inputs [T, N].
        C: weights of the state [T, N].
    """
    state, batch = _of_layer(states, layer)
    return kernels.selective(x, dt, A, B, C, state, batch)


def _of_layer(states: RecurrentStates | None, layer: int) -> tuple[LayerState, StateBatch | StateMetadata]:
    assert states is not None, "whoever runs a model with recurrent layers gives the step their states"
    return states.layers[layer], states.numbers
