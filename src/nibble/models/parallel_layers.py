"""Layers of a model that is divided among ranks: what they compute is put together by collectives.

They go around the layers that serve (linear.py), when all of those are in place, so that a layer of which a rank has
some outputs is a plain linear layer, and one of which it has some inputs the same with a sum behind it.

In a deterministic model nothing is summed over ranks: a layer of which a rank has some inputs gathers the others, and
computes a part of the outputs over all inputs, which are put side by side. So every value is that of one rank, to the
last bit.

Shape suffixes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nibble.errors import ConfigError
from nibble.kernels import collectives
from nibble.kernels.collectives import Collectives
from nibble.models.linear import PackedLinear, QuantizedLinear
from nibble.models.parallel import Layout, rows_of
from nibble.models.shards import Shard


class SummedLinear(nn.Module):
    """A layer of whose inputs each rank has a part: outputs are summed, then the bias is added once."""

    def __init__(self, layer: Any, group: int) -> None:
        super().__init__()
        self.bias = layer.bias
        layer.bias = None
        self.layer, self.group = layer, group

    @property
    def weight(self) -> Tensor:
        """Return the part of the weight, for models that read its dtype."""
        weight: Tensor = self.layer.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        y = collectives.all_reduce(self.layer(x), self.group)
        return y if self.bias is None else y + self.bias


class GatheredLinear(nn.Module):
    """A layer of whose outputs each rank has a part: these are put side by side; inputs, too, where they are parts."""

    def __init__(self, layer: Any, group: int, size: int, *, gathers_inputs: bool = False) -> None:
        super().__init__()
        self.layer, self.group, self.size, self.gathers_inputs = layer, group, size, gathers_inputs

    @property
    def weight(self) -> Tensor:
        """Return the part of the weight, for models that read its dtype."""
        weight: Tensor = self.layer.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        if self.gathers_inputs:
            x = collectives.all_gather(x, self.group, self.size)
        return collectives.all_gather(self.layer(x), self.group, self.size)


def _summed_forward(own: Callable[..., Tensor], group: int) -> Callable[..., Tensor]:
    """Return a forward() of experts of which each rank has some, or a part of each: outputs are summed."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return collectives.all_reduce(own(self, *args, **kwargs), group)

    return forward


class DividedEmbedding(nn.Module):
    """A table of which each rank has some rows; of all ranks one has a token's."""

    first: Tensor

    def __init__(self, table: nn.Embedding, shard: Shard, group: int) -> None:
        super().__init__()
        self.table, self.group = table, group
        # No number: compiled code is that of any rank.
        first = torch.tensor([shard.rank * table.num_embeddings], device=table.weight.device)
        self.register_buffer("first", first, persistent=False)

    @property
    def weight(self) -> Tensor:
        """Return the rows of this rank."""
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return embeddings [..., H]."""
        own = ids - self.first
        is_own = (own >= 0) & (own < self.table.num_embeddings)
        x = self.table(torch.where(is_own, own, 0))
        return collectives.all_reduce(torch.where(is_own.unsqueeze(-1), x, 0), self.group)


def join(
    model: Any, layout: Layout, shard: Shard, group: Collectives, number: int, *, deterministic: bool = False
) -> None:
    """Put together what ranks compute of a prepared model, in place.

    Args:
        model: from prepare_model().
        layout: what is divided.
        shard: this rank.
        group: of all ranks.
        number: by which operators find it.
        deterministic: gather inputs instead of summing outputs.

    Raises:
        ConfigError: a layer cannot be computed deterministically.
    """
    for name in rows_of(model, layout):
        layer = model.get_submodule(name)
        if deterministic:
            layer = GatheredLinear(
                _by_outputs(layer, name, shard, group), number, shard.size, gathers_inputs=True
            )
        else:
            layer = SummedLinear(layer, number)
        model.set_submodule(name, layer)
    for name in layout.experts:
        if deterministic:
            raise ConfigError(
                "--deterministic with --tp is not served for experts: what they compute is summed over GPUs"
            )
        experts = model.get_submodule(name)
        # The module stays: families read sizes of it.
        own = experts.forward.__func__ if name in layout.whole_experts else type(experts).forward
        experts.forward = MethodType(_summed_forward(own, number), experts)
    if layout.is_vocabulary_divided:
        output, table = model.get_output_embeddings(), model.get_input_embeddings()
        model.set_input_embeddings(DividedEmbedding(table, shard, number))
        model.set_output_embeddings(GatheredLinear(output, number, shard.size))


def drop_repeated_biases(model: Any, layout: Layout, shard: Shard) -> None:
    """Let the biases of experts, whose outputs are summed, be those of rank 0 alone."""
    for name in set(layout.experts) - set(layout.whole_experts):
        bias = getattr(model.get_submodule(name), "down_proj_bias", None)
        if bias is not None and shard.rank:
            bias.data.zero_()


def _by_outputs(layer: Any, name: str, shard: Shard, group: Collectives) -> nn.Module:
    """Return the layer with some outputs and all inputs, of one with all outputs and some inputs."""
    if isinstance(layer, QuantizedLinear):
        raise ConfigError(f"--deterministic with --tp needs unpacked weights: {name} is kept packed")
    weight = layer.weight.detach()
    if len(weight) % shard.size:
        raise ConfigError(
            f"--deterministic with --tp: {len(weight)} outputs of {name} are no multiple of {shard.size}"
        )
    whole = collectives.side_by_side(group.all_gather(weight.contiguous()))
    first, stop = shard.part(len(whole), len(whole) // shard.size)
    own = whole[first:stop].contiguous()
    bias = None if layer.bias is None else layer.bias.detach()[first:stop].contiguous()
    if isinstance(layer, PackedLinear):
        return PackedLinear(own, bias)
    plain = nn.Linear(own.shape[1], own.shape[0], bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(own, requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain
