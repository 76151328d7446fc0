"""Experts that are divided among ranks by number: a rank has some of them whole.

The family's own code makes its modules, of a config of narrower layers (parallel.py), and then the experts get the
shapes that the config says (SHAPES). Routers stay whole: all ranks choose the same experts for a token. A rank computes
those that it has, and outputs are summed over ranks as those of parts of experts are. Nothing waits for the device, and
no token is sent anywhere: every rank has all tokens of a step.

Shape suffixes: T tokens, H hidden size, K chosen experts of a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nibble.errors import ConfigError
from nibble.models.experts import NAME, expert_matrices
from nibble.models.shards import Shard

SHAPES = "nibble_expert_shapes"
"""What the text part of a rank's config says of its experts: shapes by module and parameter."""
_NUMBERED = re.compile(r"^(?P<path>.*\bexperts)\.(?P<number>\d+)\.(?P<rest>.*)$")
"""The name of a tensor of one expert in a checkpoint."""


def divide_experts(whole: nn.Module, text: Any, size: int) -> None:
    """Let a config say that a rank has one N-th of the experts, each of them whole.

    Args:
        whole: the whole model, without weights.
        text: the text part of the config, which is changed.
        size: number of ranks.

    Raises:
        ConfigError: there are none, or their number is no multiple of the number of ranks.
    """
    shapes, counts = dict[str, dict[str, list[int]]](), set[int]()
    for path, module in whole.named_modules():
        if matrices := expert_matrices(module):
            count = len(next(iter(matrices.values())))
            counts.add(count)
            shapes[path] = {
                name: [count // size, *x.shape[1:]] for name, x in module.named_parameters(recurse=False)
            }
            if any(len(x) != count for x in module.parameters()):
                raise ConfigError(
                    f"{path} of {text.model_type} cannot be divided by --expert-parallel: it has more than experts"
                )
    if not counts:
        raise ConfigError(
            f"{text.model_type} has no experts that --expert-parallel could divide; leave the option out"
        )
    if uneven := [count for count in counts if count % size]:
        fitting = [n for n in range(2, min(counts) + 1) if not any(count % n for count in counts)]
        nearest = min(fitting, key=lambda n: (abs(n - size), n), default=1)
        raise ConfigError(
            f"{uneven[0]} experts cannot be divided evenly among {size} GPUs by --expert-parallel: choose "
            f"--tp {nearest}, or leave the option out, and each expert is divided"
        )
    setattr(text, SHAPES, shapes)


def class_of_rank(cls: Any, config: PretrainedConfig) -> Any:
    """Return the class of a model, or one whose models have fewer experts where the config says so."""
    if cls is None or not getattr(config.get_text_config(), SHAPES, None):
        return cls
    # Of the same name: families are found by it.
    return type(cls.__name__, (FewerExperts, cls), {"__module__": cls.__module__})


class FewerExperts:
    """Base that comes before a model's class, and leaves the model that it makes a rank's experts."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        _resize(self, getattr(config.get_text_config(), SHAPES))


def _resize(model: Any, shapes: Mapping[str, Mapping[str, list[int]]]) -> None:
    for path, own in shapes.items():
        experts = model.get_submodule(path)
        for name, shape in own.items():
            before = getattr(experts, name)
            after = torch.empty(shape, dtype=before.dtype, device=before.device)
            setattr(experts, name, nn.Parameter(after, requires_grad=before.requires_grad))
        experts.num_experts = next(iter(own.values()))[0]


def choose_own(model: Any, paths: tuple[str, ...], shard: Shard) -> None:
    """Let modules with a rank's experts compute those, of all that tokens choose, in place.

    Args:
        model: of the rank, as it was loaded.
        paths: the modules.
        shard: the rank.
    """
    for path in paths:
        experts = model.get_submodule(path)
        count = experts.num_experts
        device = next(chain(experts.parameters(), experts.buffers())).device
        # No number: compiled code is that of any rank.
        experts.register_buffer(
            "first_expert", torch.tensor([shard.rank * count], device=device), persistent=False
        )
        experts.forward = MethodType(_own_forward(type(experts).forward), experts)


def _own_forward(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward() of experts that leaves out choices of other ranks' experts."""

    def forward(self: Any, x_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        own_TK = chosen_TK - self.first_expert
        is_own_TK = (own_TK >= 0) & (own_TK < self.num_experts)
        # Our function passes over a number behind the last; families compute an expert of theirs for nothing.
        none = self.num_experts if self.config._experts_implementation == NAME else own_TK % self.num_experts
        return own(self, x_TH, torch.where(is_own_TK, own_TK, none), torch.where(is_own_TK, weights_TK, 0.0))

    return forward


class OwnExperts:
    """Which tensors of single experts a rank loads.

    Args:
        whole: names of a checkpoint of the whole model.
        part: names of one of a rank.
        shard: the rank.
    """

    def __init__(self, whole: Mapping[str, Any], part: Mapping[str, Any], shard: Shard) -> None:
        self.shard = shard
        others = [match for name in whole if name not in part and (match := _NUMBERED.match(name))]
        self._paths = {match["path"] for match in others}
        own = [match for name in part if (match := _NUMBERED.match(name)) and match["path"] in self._paths]
        self.count = 1 + max((int(match["number"]) for match in own), default=-1)

    def name_of(self, name: str, stored: str) -> str | None:
        """Return how the rank calls a tensor; None for one of an expert of another rank.

        Args:
            name: as the family calls it.
            stored: as the checkpoint does.
        """
        match, own = _NUMBERED.match(name), _NUMBERED.match(stored)
        if match is None or own is None or match["path"] not in self._paths:
            return stored
        rank, number = divmod(int(match["number"]), self.count)
        return f"{own['path']}.{number}.{own['rest']}" if rank == self.shard.rank else None
