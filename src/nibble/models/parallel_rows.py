"""Data-parallel attention: a rank has the tokens of its own requests, and layers that are divided need those of all.

Before a divided layer (an MLP, experts, a table of the vocabulary) the rows of all ranks are gathered, one rank's
behind the other's; behind it, when outputs are summed, each rank goes on with its own. All else, attention with all of
its heads, norms and routers, is computed for a rank's own rows alone.

A step has as many rows of each rank as its numbers say; what all ranks compute alike (measuring scales) has the same
number on all. A compiled model must not depend on these numbers, so rows are gathered, and a rank's own taken, by
operators that no compiler looks into: `nibble::gather_rows` and `nibble::own_rows`. How many rows all ranks have
together a compiled model reads from the shape of a tensor without values.

Shape suffixes: T tokens of this rank, H hidden size, K chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from nibble.kernels.collectives import Collectives
from nibble.models.parallel import Layout, tokenwise_modules

ROWS = "nibble_rows"
"""Attribute of a model whose layers read the rows of all ranks: its Rows."""


class Rows:
    """The rows of all ranks, as one of them sees them.

    Args:
        group: of all ranks.
        number: of the group, by which operators find this.
    """

    def __init__(self, group: Collectives, number: int) -> None:
        self.group, self.number = group, number
        self.marks: tuple[Tensor, Tensor] | None = None
        """In a step: no values of the tokens of all ranks [n, 0], and of the rows whose logits are computed."""
        self._sizes: Sequence[Sequence[int]] | None = None
        _of_number[number] = self

    @contextmanager
    def step(self, sizes: Sequence[Sequence[int]], device: torch.device) -> Iterator[None]:
        """Let ranks have these numbers of tokens, and of rows whose logits are computed, in the body.

        Logits are then those of all ranks' rows.
        """
        self._sizes = tokens, logits = sizes
        self.marks = torch.empty(sum(tokens), 0, device=device), torch.empty(sum(logits), 0, device=device)
        try:
            yield
        finally:
            self.marks = self._sizes = None

    def gather(self, x: Tensor, *, of_logits: bool = False) -> Tensor:
        """Return the rows [T, ...] of all ranks.

        Args:
            x: those of this rank.
            of_logits: whether these are the rows whose logits are computed.
        """
        if self.marks:
            # Some versions of torch.compile read no tuple by a bool.
            marks = self.marks[1] if of_logits else self.marks[0]
        else:
            marks = x.new_empty(len(x) * self.group.size, 0)
        y: Tensor = torch.ops.nibble.gather_rows(x, marks, self.number, of_logits)
        return y

    def own(self, y: Tensor, x: Tensor) -> Tensor:
        """Return this rank's rows of those of all ranks.

        Args:
            y: of all ranks.
            x: any values of this rank's rows.
        """
        z: Tensor = torch.ops.nibble.own_rows(y, x, self.number)
        return z

    def own_logits(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the logits of this rank's rows; those of all in a step, of which rank 0 samples."""
        return y if self.marks else self.own(y, x)

    def sizes(self, count: int, *, of_logits: bool = False) -> Sequence[int]:
        """Return the number of rows of each rank, of which this one has `count`."""
        sizes = self._sizes[of_logits] if self._sizes else (count,) * self.group.size
        assert sizes[self.group.rank] == count, f"{count} rows, of {sizes}"
        return sizes


def equal_rows(rows: Rows | None, own_B: Tensor) -> AbstractContextManager[None]:
    """Let all ranks have as many tokens and logits in the body as this one has rows, where each has its own."""
    if rows is None:
        return nullcontext()
    counts = (len(own_B),) * rows.group.size
    return rows.step((counts, counts), own_B.device)


_of_number: WeakValueDictionary[int, Rows] = WeakValueDictionary()  # each lives as long as its model


def _gather_rows(x: Tensor, marks: Tensor, number: int, of_logits: bool) -> Tensor:
    rows = _of_number[number]
    sizes = rows.sizes(len(x), of_logits=of_logits)
    most = max(sizes)
    padded = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
    parts = rows.group.all_gather(padded.contiguous())
    if min(sizes) == most:
        return parts.flatten(0, 1)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _own_rows(y: Tensor, x: Tensor, number: int) -> Tensor:
    rows = _of_number[number]
    start = sum(rows.sizes(len(x))[: rows.group.rank])
    # What an operator returns is no part of what it was given.
    return y[start : start + len(x)].clone(memory_format=torch.contiguous_format)


def _gather_rows_fake(x: Tensor, marks: Tensor, number: int, of_logits: bool) -> Tensor:
    return x.new_empty(marks.shape[0], *x.shape[1:])


def _own_rows_fake(y: Tensor, x: Tensor, number: int) -> Tensor:
    return y.new_empty(x.shape[0], *y.shape[1:])


_library = torch.library.Library("nibble", "FRAGMENT")  # what it defines lives as long as it does
_library.define("gather_rows(Tensor x, Tensor marks, int number, bool of_logits) -> Tensor")
_library.impl("gather_rows", _gather_rows, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::gather_rows", _gather_rows_fake, lib=_library)
_library.define("own_rows(Tensor y, Tensor x, int number) -> Tensor")
_library.impl("own_rows", _own_rows, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::own_rows", _own_rows_fake, lib=_library)


class GatheredRows(nn.Module):
    """A table of the vocabulary that reads the rows of all ranks.

    Args:
        layer: the table of tokens, or the output.
        rows: of all ranks.
        is_output: whether it is the output.
    """

    def __init__(self, layer: Any, rows: Rows, *, is_output: bool) -> None:
        super().__init__()
        self.layer, self.rows, self.is_output = layer, rows, is_output

    @property
    def weight(self) -> Tensor:
        """Return the part of the weight, for models that read its dtype."""
        weight: Tensor = self.layer.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of tokens [1, T] or of hidden states [1, S, H]."""
        flat = x.squeeze(0)
        if self.is_output:
            y: Tensor = self.layer(self.rows.gather(flat, of_logits=True))
            return self.rows.own_logits(y, flat)[None]
        return self.rows.own(self.layer(self.rows.gather(flat)), flat)[None]


def gather_rows(model: Any, layout: Layout, rows: Rows) -> None:
    """Let the divided layers of a joined model read the rows of all ranks, in place.

    Args:
        model: from join().
        layout: what is divided.
        rows: of all ranks.
    """
    for path in tokenwise_modules(model, layout):
        module = model.get_submodule(path)
        module.forward = MethodType(_gathered(type(module).forward, rows), module)
    for path in layout.experts:
        module = model.get_submodule(path)
        module.forward = MethodType(_gathered(module.forward.__func__, rows), module)
    if layout.is_vocabulary_divided:
        table, output = model.get_input_embeddings(), model.get_output_embeddings()
        model.set_input_embeddings(GatheredRows(table, rows, is_output=False))
        model.set_output_embeddings(GatheredRows(output, rows, is_output=True))
    else:
        # Rank 0 samples for all.
        output = model.get_output_embeddings()
        model.set_output_embeddings(GatheredRows(output, rows, is_output=True))


def _gather_choices(rows: Rows, experts_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return chosen experts and their weights of all ranks' tokens."""
    # In one launch: numbers of experts are small enough for float32.
    joined = rows.gather(torch.cat([experts_TK.float(), weights_TK.float()], 1))
    experts, weights = joined.split(experts_TK.shape[1], 1)
    return experts.to(experts_TK.dtype), weights.to(weights_TK.dtype)


def _gathered(own: Callable[..., Tensor], rows: Rows) -> Callable[..., Tensor]:
    """Return a forward() that reads the rows of all ranks, and returns those of this one.

    An MLP gets tokens [1, T, H] or [T, H]; experts get [T, H], and their numbers and weights [T, K].
    """

    def forward(self: Any, x: Tensor, *choices: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        all_rows = rows.gather(flat)
        shaped = all_rows.view(*[1] * (x.dim() - 2), *all_rows.shape)
        y = own(self, shaped, *(_gather_choices(rows, *choices) if choices else ()))
        return rows.own(y.reshape(-1, y.shape[-1]), flat).view(*x.shape[:-1], y.shape[-1])

    return forward
