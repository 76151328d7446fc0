"""What happens to the prefix cache, as events that routers follow: pages stored, pages removed, everything cleared.

The events are vLLM's (`vllm/distributed/kv_events.py`, as of its 0.33), whose schema llm-d, Dynamo and Ray's routers
read; a page is called a block there. A page is named by a hash of 64 bits, which covers its tokens, all tokens before
them, and the namespace: the layout and scheme of pages, the version of their scales, and the salt. So equal names mean
equal bytes, on any replica.

Nothing is recorded, and nothing costs time, until somebody observes the tree (`CacheManager.observe`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from struct import Struct
from typing import Any

import msgspec

from nibble.cache.radix_cache import Node

HASH_BYTES = 8
"""Consumers of the schema keep hashes as integers of 64 bits."""
MEDIUM = "GPU"
"""vLLM's word for the pool that the engine computes with, on a CPU too."""


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True, frozen=True):
    """An event: on the wire a map, whose `type` is the name of the class."""


class BlockStored(_Event, frozen=True):
    """Pages entered the tree, each below the one before it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The page above the first one; None at the root of a namespace."""
    token_ids: list[int]
    """Of all these pages."""
    block_size: int
    """Tokens of a page."""
    lora_id: int | None
    """None, as lora_name is."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """Of each page what its hash covers beside tokens, as vLLM has it: the salt, at the first page of a namespace."""


class BlockRemoved(_Event, frozen=True):
    """Pages left the tree; none of those that stay lies below one of them."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True):
    """All pages left the tree."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
Sink = Callable[[Sequence[KVEvent]], None]
"""Takes what happened since it was called last; token_ids are lists that nobody changes."""


def root_hash(namespace: str) -> int:
    """Return what stands for the page above the first one in the hashes of a namespace."""
    return _digest(namespace.encode())


def page_hash(parent: int, packed_tokens: bytes) -> int:
    """Return the name of a page. packed_tokens: its tokens, 8 bytes each."""
    return _digest(parent.to_bytes(HASH_BYTES, "little") + packed_tokens)


def page_hashes(root: int, tokens: Sequence[int], page_size: int) -> Iterator[int]:
    """Yield the names of the pages that a prompt may find in the tree, as they are asked for.

    The last token is always computed, so that a page which only it completes is left out.

    Args:
        root: root_hash() of the namespace.
        tokens: the prompt.
        page_size: tokens of a page.
    """
    pack, parent = Struct(f"{page_size}q").pack, root
    for end in range(page_size, len(tokens), page_size):
        parent = page_hash(parent, pack(*tokens[end - page_size : end]))
        yield parent


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=HASH_BYTES).digest(), "little")


class CacheEvents:
    """Records what happens to a radix tree, and hands it on.

    Args:
        namespace: of the engine; the tree's own namespaces are `namespace/salt`.
        page_size: tokens of a page.
    """

    def __init__(self, namespace: str, page_size: int) -> None:
        self.namespace, self.page_size = namespace, page_size
        self.sinks: list[Sink] = []
        self._hashes: dict[int, int] = {}
        """Names of the pages that are in the tree."""
        self._events: list[KVEvent] = []

    def stored(self, parent: Node, page_tokens: Sequence[int], packed_tokens: bytes, page: int) -> None:
        """Note a page that entered the tree.

        Args:
            parent: the page above it, or its namespace.
            page_tokens: its tokens.
            packed_tokens: the same, 8 bytes each.
            page: its number.
        """
        above = root_hash(parent) if isinstance(parent, str) else self._hashes[parent]
        name = self._hashes[page] = page_hash(above, packed_tokens)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == above:
            # The pages of one prompt come one after the other: one event has them all.
            last.block_hashes.append(name)
            last.token_ids.extend(page_tokens)
            if last.extra_keys:
                last.extra_keys.append(None)
            return
        salt = parent.removeprefix(f"{self.namespace}/") if isinstance(parent, str) else ""
        parent_hash = None if isinstance(parent, str) else above
        extra: list[tuple[Any, ...] | None] | None = [(salt,)] if salt else None
        self._events.append(
            BlockStored(
                [name], parent_hash, list(page_tokens), self.page_size, None, MEDIUM, None, extra_keys=extra
            )
        )

    def removed(self, page: int) -> None:
        """Note a page that left the tree."""
        name = self._hashes.pop(page)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(name)
        else:
            self._events.append(BlockRemoved([name], MEDIUM))

    def cleared(self) -> None:
        """Note that all pages left the tree."""
        self._hashes.clear()
        # What happened before has no effect any more.
        self._events = [AllBlocksCleared()]

    def hashes(self, pages: Iterable[int]) -> list[int]:
        """Return the names of pages of the tree."""
        return [self._hashes[page] for page in pages]

    def flush(self) -> None:
        """Hand what happened to those who observe."""
        if not self._events:
            return
        events, self._events = self._events, []
        for sink in self.sinks:
            sink(events)
