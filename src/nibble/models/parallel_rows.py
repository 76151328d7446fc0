"""Data-parallel attention: a rank has the tokens of its own requests, and layers that are divided need those of all.

Before a divided layer (an MLP, experts, a table of the vocabulary) the rows of all ranks are gathered, one rank's
behind the other's; behind it, when outputs are summed, each rank goes on with its own. All else, attention with all of
its heads, norms and routers, is computed for a rank's own rows alone.

A step has as many rows of each rank as its numbers say; what all ranks compute alike (measuring scales) has the same
number on all.

Shape suffixes: T tokens of this rank, H hidden size, K chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nibble.kernels.collectives import Collectives
from nibble.models.parallel import Layout, tokenwise_modules


class Rows:
    """The rows of all ranks, as one of them sees them.

    Args:
        group: of all ranks.
    """

    def __init__(self, group: Collectives) -> None:
        self.group = group
        self._tokens: tuple[int, ...] | None = None
        self._logits: tuple[int, ...] | None = None

    @contextmanager
    def step(self, tokens: Sequence[int], logits: Sequence[int]) -> Iterator[None]:
        """Let ranks have these numbers of tokens, and of rows whose logits are computed, in the body.

        Logits are then those of all ranks' rows.
        """
        self._tokens, self._logits = tuple(tokens), tuple(logits)
        try:
            yield
        finally:
            self._tokens = self._logits = None

    def gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the rows [T, ...] of all ranks.

        Args:
            x: those of this rank.
            sizes: of all ranks; None: those of the step.
        """
        sizes = sizes or self._tokens or (len(x),) * self.group.size
        assert sizes[self.group.rank] == len(x), f"{len(x)} rows, of {sizes}"
        most = max(sizes)
        padded = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        parts = self.group.all_gather(padded.contiguous())
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def own(self, y: Tensor, count: int) -> Tensor:
        """Return this rank's rows of those of all ranks.

        Args:
            y: of all ranks.
            count: rows of this rank.
        """
        sizes = self._tokens or (count,) * self.group.size
        start = sum(sizes[: self.group.rank])
        return y[start : start + count]

    def gather_logit_rows(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks whose logits are computed."""
        return self.gather(x, self._logits or (len(x),) * self.group.size)

    def own_logits(self, y: Tensor, count: int) -> Tensor:
        """Return the logits of this rank's rows; those of all in a step, of which rank 0 samples."""
        start = self.group.rank * count
        return y if self._logits else y[start : start + count]


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
            y: Tensor = self.layer(self.rows.gather_logit_rows(flat))
            return self.rows.own_logits(y, len(flat))[None]
        return self.rows.own(self.layer(self.rows.gather(flat)), len(flat))[None]


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


def _gathered(own: Callable[..., Tensor], rows: Rows) -> Callable[..., Tensor]:
    """Return a forward() that reads the rows of all ranks, and returns those of this one.

    An MLP gets tokens [1, T, H] or [T, H]; experts get [T, H], and their numbers and weights [T, K].
    """

    def forward(self: Any, x: Tensor, *others: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        all_rows = rows.gather(flat)
        shaped = all_rows.view(*[1] * (x.dim() - 2), *all_rows.shape)
        y = own(self, shaped, *map(rows.gather, others))
        return rows.own(y.reshape(-1, y.shape[-1]), len(flat)).view(*x.shape[:-1], y.shape[-1])

    return forward
