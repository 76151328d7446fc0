"""Requests of random tokens in scattered pages of one layer group, in enough layers to outgrow the L2 cache.

Everything goes through the engine's own pool: random streams are written by PagedPool.write, so that the error of a
format is not counted when what is read is judged.

Shape suffixes: T tokens, B requests, N pages of a request, H heads, D values of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nibble.attention.planner.needs import SchemeGroup
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import ONE
from nibble.cache.view import KVView
from nibble.errors import ConfigError
from nibble.evals.tuning import timing as clock
from nibble.evals.tuning.workloads import Workload
from nibble.kernels.types import AttentionBatch, AttentionParams

CHUNK = 1 << 16
"""Tokens that are made up and written at a time."""
SOFTCAP = 5.0
"""Where scores are capped, so that it is seen."""
ROWS = 8
"""Rows of a request that are checked at each place."""
SEED = 7


@dataclass(frozen=True)
class Fixture:
    """Requests in a pool, and their queries."""

    pool: PagedPool
    segment: AttentionBatch
    queries: tuple[Tensor, ...]
    spec: AttentionParams
    samples: tuple[tuple[slice, AttentionBatch], ...]
    """Rows whose answers are checked, each with a batch of their own."""
    read_bytes: int
    """What one call must read of the cache."""

    @property
    def layers(self) -> int:
        """Return the number of layers of the pool."""
        return len(self.queries)

    def view(self, layer: int) -> KVView:
        """Return what a backend reads of a layer."""
        return self.pool.view(layer)


def make_fixture(
    part: SchemeGroup, workload: Workload, page: int, packing: str, dtype: str, device: str
) -> Fixture:
    """Return requests of `workload` for the layers of `part`.

    Args:
        part: The layers, with what they store.
        workload: The requests.
        page: Tokens of a page.
        packing: Of the pages.
        dtype: Of queries.
        device: Where all of it lies.

    Raises:
        ConfigError: Attention is sparse.
    """
    group = part.group
    if group.top_k:
        raise ConfigError("sparse attention is not timed: its indexer chooses what it reads")
    rng = torch.Generator(device).manual_seed(SEED)
    entries = tuple(StreamLayout(stream, part.scheme.format_of(stream).name) for stream in group.streams)
    size = sum(entry.bytes_per_token for entry in entries)
    # With a window, the first new token reaches back the furthest.
    num_attended = min(workload.stored, workload.new + group.window) if group.window else workload.stored
    read = workload.requests * num_attended * size
    shape = (workload.requests * workload.new, group.q_heads, group.head_dim)
    query_bytes = math.prod(shape) * getattr(torch, dtype).itemsize
    # As many layers as outgrow the L2 cache, so that no call reads from it what another has left there.
    layers = min(max(-(-clock.L2_TIMES * clock.l2_bytes(device) // (read + query_bytes)), 1), clock.CALLS)
    layout = CacheLayout(tuple(LayerLayout(i, entries, ()) for i in range(layers)), page, packing)
    pages = -(-workload.stored // page)
    pool = PagedPool(layout, workload.requests * pages, ONE, device)
    for layer in range(layers):
        _fill(pool, layer, getattr(torch, dtype), rng)
    # The pages of a request that is served are not neighbours either.
    order = torch.randperm(workload.requests * pages, generator=rng, device=device).int()
    page_table_BN = order.view(workload.requests, pages)
    shape = (workload.requests * workload.new, group.q_heads, group.head_dim)
    queries = tuple(
        torch.randn(shape, generator=rng, dtype=getattr(torch, dtype), device=device) for _ in range(layers)
    )
    sinks = torch.randn(group.q_heads, generator=rng, device=device) if group.sinks else None
    spec = AttentionParams(group.head_dim**-0.5, group.window, SOFTCAP if group.softcap else None, sinks)
    segment = AttentionBatch.from_lens(
        workload.phase,
        0,
        [workload.new] * workload.requests,
        [workload.stored] * workload.requests,
        page_table_BN,
    )
    return Fixture(pool, segment, queries, spec, _samples(workload, page_table_BN), read)


def _fill(pool: PagedPool, layer: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Write random tokens to every slot of a layer."""
    slots, device = pool.pages * pool.layout.page_size, pool.device
    entries = pool.layout.layers[layer].streams
    # All tokens at once would take more memory than the pool that stores them in fewer bits.
    for start in range(0, slots, CHUNK):
        slot_mapping_T = torch.arange(start, min(start + CHUNK, slots), device=device)
        random = {
            entry.stream.name: torch.randn(
                len(slot_mapping_T),
                entry.stream.heads,
                entry.stream.dim,
                generator=rng,
                dtype=dtype,
                device=device,
            )
            for entry in entries
        }
        pool.write(layer, random, slot_mapping_T)


def _samples(workload: Workload, page_table_BN: Tensor) -> tuple[tuple[slice, AttentionBatch], ...]:
    """The first and the last rows of the first and the last request."""
    starts = list(accumulate([workload.new] * workload.requests, initial=0))
    rows = min(ROWS, workload.new)
    samples = []
    # Wrong offsets and bounds show at the first and at the last request.
    for request in sorted({0, workload.requests - 1}):
        for first in sorted({0, workload.new - rows}):
            begin, stored = starts[request] + first, workload.stored - workload.new + first + rows
            batch = AttentionBatch.from_lens(
                workload.phase, 0, [rows], [stored], page_table_BN[request : request + 1]
            )
            samples.append((slice(begin, begin + rows), batch))
    return tuple(samples)
