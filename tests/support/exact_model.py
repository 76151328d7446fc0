"""A model of what exact pages hold: the tokens behind every copy, and in how many layers it is right.

The keys and values of a token in layer `l + 1` follow from what it reads in layer `l`: pages, and exact copies of the
tokens before it as far as the window reaches. So a copy is right in one layer more than the worst of those that it was
computed from, and a copy of something else, or of nothing, is right in none. Sinks are read by all tokens after them.
"""

from __future__ import annotations

from collections.abc import Sequence

from nibble.cache.exact_window import ExactWindow
from nibble.cache.lease import Lease

Copy = tuple[int, int]
"""The hash of all tokens up to this one, and the layers in which it is right."""


def prefix_hashes(tokens: Sequence[int], namespace: str = "") -> list[int]:
    """One for each token, of all tokens up to it."""
    hashes, seen = [], hash(namespace)
    for token in tokens:
        seen = hash((seen, token))
        hashes.append(seen)
    return hashes


class ExactModel:
    """Exact pages as a device would fill them."""

    def __init__(self, window: ExactWindow, page_size: int) -> None:
        self.window, self.page_size = window, page_size
        self.cells: dict[tuple[int, int], Copy] = {}

    def read(self, lease: Lease, hashes: Sequence[int], position: int) -> int:
        """The layers in which the copy of a stored token is right, as `lease` finds it."""
        page = lease.exact_pages.get(position // self.page_size)
        content, layers = self.cells.get((page, position % self.page_size), (None, 0))
        return layers if content == hashes[position] else 0

    def compute(self, lease: Lease, hashes: Sequence[int], start: int, end: int, write_from: int) -> None:
        """A chunk: what is written to pages, or sampled from, must be right in all layers."""
        reach, top = self.window.tokens - 1, self.window.num_layers
        sinks = range(self.window.num_sinks * self.page_size)
        before = {*sinks[:start], *range(max(start - reach, 0), start)}
        layers = {p: self.read(lease, hashes, p) for p in before}
        for p in range(start, end):
            near = {*sinks[:p], *range(max(p - reach, 0), p)}
            layers[p] = min([top, *(layers[q] + 1 for q in near)])
            assert p < write_from or layers[p] == top, (
                f"token {p} of a chunk from {start} on reads a wrong exact copy: right in {layers[p]} layers"
            )
        for p in range(start, end):
            page = lease.exact_pages.get(p // self.page_size)
            if page is not None:
                self.cells[page, p % self.page_size] = hashes[p], layers[p]

    def check_snapshot(self, lease: Lease, hashes: Sequence[int], values: Sequence[int | None]) -> None:
        """What is attached to the pages of `lease` holds their tokens, right in all layers."""
        for i, page in enumerate(values):
            for offset in range(self.page_size) if page is not None else ():
                copy = self.cells.get((page, offset))
                expected = hashes[i * self.page_size + offset], self.window.num_layers
                assert copy == expected, f"the snapshot of page {i} holds {copy} at {offset}, not {expected}"
