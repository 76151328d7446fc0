"""Packings: how the planes of a format lie in a page.

Owns Packing and the table of them. A backend's row names those it reads. Tokens are written by kernels/append.py.
Must not know what planes mean.

    nhd   [page, token, head, values]   one token's heads together
    hnd   [page, head, token, values]   one head's tokens together

Shape suffixes: P pages, S slots in a page, H heads, B requests, N pages of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nibble.errors import ConfigError, unknown
from nibble.formats.base import Plane, raw


@dataclass(frozen=True, slots=True)
class Packing:
    """heads_first: whether a page holds [head, token, ...] or [token, head, ...]."""

    name: str
    heads_first: bool

    def shape(self, plane: Plane, pages: int, page_size: int) -> tuple[int, ...]:
        """The shape of a plane's storage."""
        heads, *rest = plane.shape
        inner = (heads, page_size) if self.heads_first else (page_size, heads)
        return (pages, *inner, *rest)

    def gather(self, storage: Tensor, pages_BN: Tensor) -> Tensor:
        """Reads whole pages: integer pages_BN -> [B, N * page_size, H, ...]."""
        found = raw(storage).index_select(0, pages_BN.flatten()).view(storage.dtype)
        if self.heads_first:
            found = found.transpose(1, 2)
        return found.reshape(len(pages_BN), -1, *found.shape[2:])


_TABLE = {packing.name: packing for packing in (Packing("nhd", False), Packing("hnd", True))}


def names() -> tuple[str, ...]:
    return tuple(_TABLE)


def get(name: str) -> Packing:
    """The packing called `name`; raises ConfigError."""
    if name not in _TABLE:
        raise ConfigError(unknown("packing", name, names()))
    return _TABLE[name]
