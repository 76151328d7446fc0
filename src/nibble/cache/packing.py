"""Packings: how the planes of a format lie in a page.

    nhd      [page, token, head, values]   one token's heads together
    hnd      [page, head, token, values]   one head's tokens together
    record   [page, token, head, bytes]    all planes of a token together, in their order

Shape suffixes: P pages, S slots in a page, H heads, B requests, N pages of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nibble.errors import ConfigError, unknown
from nibble.formats.base import Plane, raw

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """One way to lay out planes in pages."""

    name: str
    heads_first: bool
    """Whether a page holds [head, token, ...] and not [token, head, ...]."""
    record: bool = False
    """Whether planes are columns of one array of bytes."""

    def allocate(
        self,
        planes: Sequence[Plane],
        pages: int,
        page_size: int,
        device: torch.device,
        empty: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return uninitialised storage for a stream's planes.

        Args:
            planes: the planes of the stream's format.
            pages: number of pages.
            page_size: tokens of a page.
            device: where the storage lies.
            empty: allocates it, with the signature of torch.empty, which is the default.
        """
        import torch  # plans know packings without it

        empty = empty or torch.empty
        if self.record:
            # All planes have the same heads, so a record has equally many bytes for each head.
            width = sum(plane.bytes_per_token for plane in planes) // planes[0].shape[0]
            shape = (pages, page_size, planes[0].shape[0], width)
            return tuple(_columns(planes, empty(shape, dtype=torch.uint8, device=device)))
        return tuple(
            empty(self._shape(plane, pages, page_size), dtype=plane.torch_dtype, device=device)
            for plane in planes
        )

    def _shape(self, plane: Plane, pages: int, page_size: int) -> tuple[int, ...]:
        heads, *rest = plane.shape
        inner = (heads, page_size) if self.heads_first else (page_size, heads)
        return (pages, *inner, *rest)

    def gather(self, storage: Tensor, page_table_BN: Tensor) -> Tensor:
        """Read whole pages: integer page_table_BN -> [B, N * page_size, H, ...]."""
        # As integers: index_select() is not defined for float8 everywhere.
        values = raw(storage).index_select(0, page_table_BN.flatten()).view(storage.dtype)
        if self.heads_first:
            values = values.transpose(1, 2)
        return values.reshape(len(page_table_BN), -1, *values.shape[2:])


def _columns(planes: Sequence[Plane], records_PSHB: Tensor) -> Iterator[Tensor]:
    heads = planes[0].shape[0]
    widths = [plane.bytes_per_token // heads for plane in planes]
    for plane, column in zip(planes, records_PSHB.split(widths, -1), strict=True):
        # A column is a view: what is written to the plane lands in the records.
        values = column.view(plane.torch_dtype)
        # A plane of one item a head, such as a scale, has no dimension for items.
        yield values if len(plane.shape) > 1 else values.squeeze(-1)


_PACKINGS = (Packing("nhd", False), Packing("hnd", True), Packing("record", False, record=True))
_TABLE = {packing.name: packing for packing in _PACKINGS}


def names() -> tuple[str, ...]:
    """Return the names of all packings."""
    return tuple(_TABLE)


def get(name: str) -> Packing:
    """Return the packing called `name`; raise ConfigError if there is none."""
    if name not in _TABLE:
        raise ConfigError(unknown("packing", name, names()))
    return _TABLE[name]
