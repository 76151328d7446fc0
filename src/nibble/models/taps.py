"""Hidden states that a forward pass leaves for a head that drafts, as an output of the step beside its logits.

Hooks note them where the family's own code has them, whatever its class: what the last norm hands on, or what some
layers get. They are part of what is traced, so a compiled or recorded step has them as another output.

Shape suffixes: T tokens of a step, X values of a token: a hidden size, or one for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nibble.errors import ConfigError

TAPS = "nibble_taps"
"""Attribute of a model that is drafted for: its Taps."""


class Taps:
    """What hooks note during one pass.

    Args:
        layers: whose inputs are noted; None: the model's output, behind its last norm.
    """

    def __init__(self, layers: Sequence[int] | None) -> None:
        self.layers = layers
        self.states: dict[int, Tensor] = {}

    def note(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        """Note what a module hands on."""
        if not isinstance(output, Tensor):
            output = output[0]
        # A copy, because layers may add in place.
        self.states[place] = output if self.layers is None else output.clone()

    def take(self) -> Tensor:
        """Return the hidden states [T, X] of the pass, and forget them."""
        states = [self.states[place] for place in sorted(self.states)]
        self.states.clear()
        return (states[0] if len(states) == 1 else torch.cat(states, dim=-1))[0]


def attach(model: Any, name: str, modules: nn.ModuleList, layers: Sequence[int] | None) -> None:
    """Let a model's passes leave hidden states; see Taps.

    Args:
        model: that is drafted for.
        name: of its list of layers.
        modules: the list.
        layers: whose inputs are wanted, from 1 on; None: the model's output.

    Raises:
        ConfigError: it has no such layer.
    """
    taps = Taps(layers)
    if layers is None:
        model.get_submodule(name.rpartition(".")[0]).register_forward_hook(partial(taps.note, 0))
    for place, layer in enumerate(layers or ()):
        if not 1 <= layer <= len(modules):
            raise ConfigError(
                f"the head reads what layer {layer} gets, and the model has {len(modules)} layers: it was trained for "
                "another model"
            )
        # What a layer gets is what the one before it hands on.
        modules[layer - 1].register_forward_hook(partial(taps.note, place))
    setattr(model, TAPS, taps)


def width(layers: Sequence[int] | None, hidden_size: int) -> int:
    """Return the values of a token that taps leave."""
    return hidden_size * (1 if layers is None else len(layers))
