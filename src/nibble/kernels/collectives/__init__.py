"""What the ranks of a model that is divided among GPUs send one another, as operators that no compiler looks into.

`nibble::all_reduce` adds what all ranks have, `nibble::all_gather` puts it side by side. Both are given the number of a
group of this process. Every rank must call the same operators in the same order; what a call adds up is in the order of
ranks wherever that is not the library's choice, so all ranks get the same bits.

Shape suffixes: T tokens, H values of a token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Collectives(Protocol):
    """A rank of a group, and how it reaches the others."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, in a tensor of its own."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what all ranks have, [size, *x.shape]."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Overwrite `x` by that of rank 0."""
        ...

    def barrier(self) -> None:
        """Wait until every rank is here."""
        ...


def broadcast(
    group: Collectives, device: torch.device, values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what rank 0 has, plain data; the others give nothing."""
    text = json.dumps(dict(values or {})).encode()
    length = torch.tensor([len(text)], device=device)
    group.broadcast(length)
    content = torch.tensor(list(text), dtype=torch.uint8, device=device)
    if group.rank:
        content = torch.empty(int(length), dtype=torch.uint8, device=device)
    group.broadcast(content)
    return cast("dict[str, Any]", json.loads(bytes(content.tolist())))


_numbers = itertools.count()
_groups: dict[int, Collectives] = {}


def register(group: Collectives) -> int:
    """Return the number by which operators find a group, until release()."""
    number = next(_numbers)
    _groups[number] = group
    return number


def release(number: int) -> None:
    """Forget a group."""
    _groups.pop(number, None)


def all_reduce(x: Tensor, group: int) -> Tensor:
    """Return the sum of `x` over all ranks of a group."""
    y: Tensor = torch.ops.nibble.all_reduce(x, group)
    return y


def all_gather(x: Tensor, group: int, size: int) -> Tensor:
    """Return the last dimensions of all ranks side by side: [..., H] -> [..., size * H].

    Args:
        x: of this rank.
        group: from register().
        size: ranks of the group.
    """
    y: Tensor = torch.ops.nibble.all_gather(x, group, size)
    return y


def side_by_side(parts: Tensor) -> Tensor:
    """Return [size, ..., H] as [..., size * H]."""
    return parts.movedim(0, -2).flatten(-2)


def _all_reduce(x: Tensor, group: int) -> Tensor:
    return _groups[group].all_reduce(x)


def _all_gather(x: Tensor, group: int, size: int) -> Tensor:
    return side_by_side(_groups[group].all_gather(x.contiguous())).contiguous()


def _all_gather_fake(x: Tensor, group: int, size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] * size)


_library = torch.library.Library("nibble", "FRAGMENT")  # what it defines lives as long as it does
_library.define("all_reduce(Tensor x, int group) -> Tensor")
_library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::all_reduce", lambda x, group: x.new_empty(x.shape), lib=_library)
_library.define("all_gather(Tensor x, int group, int size) -> Tensor")
_library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::all_gather", _all_gather_fake, lib=_library)
