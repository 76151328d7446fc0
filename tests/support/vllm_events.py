"""KV events as vLLM 0.33 declares them (vllm/distributed/kv_events.py), for decoding what Nibble publishes.

The fields and their order are that file's; what is decoded with these classes is understood by its subscribers.
"""

from __future__ import annotations

from typing import Any

import msgspec


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class FollowedTree:
    """A prefix tree that is known by events alone: each page with its tokens and those above it, and the salt."""

    def __init__(self) -> None:
        self.pages: dict[bytes | int, tuple[str, tuple[int, ...]]] = {}

    def take(self, payload: bytes) -> None:
        for event in decode(payload).events:
            if isinstance(event, BlockStored):
                self.store(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.pages[name]
            else:
                self.pages.clear()

    def store(self, event: BlockStored) -> None:
        size, keys = event.block_size, event.extra_keys or [None] * len(event.block_hashes)
        assert len(event.token_ids) == size * len(event.block_hashes) and len(keys) == len(event.block_hashes)
        salt = keys[0][0] if keys[0] else ""
        parent = ("" if event.parent_block_hash is None else self.pages[event.parent_block_hash][0]) or salt
        tokens = () if event.parent_block_hash is None else self.pages[event.parent_block_hash][1]
        for i, name in enumerate(event.block_hashes):
            assert name not in self.pages, "a page was stored twice"
            tokens = (*tokens, *event.token_ids[i * size : i * size + size])
            self.pages[name] = parent, tokens
