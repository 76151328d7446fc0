"""Triton twin of kernels/attention/__init__.py: one kernel for all phases (attention_kernel.py), in tiles of different shapes.

Owns how a tile is shaped, and how keys are split where there are too few queries to fill the GPU. Grids depend on what
a CUDA graph keeps: the number of requests, and of their query tokens.

Shape suffixes: T query tokens, H query heads, D values of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.runtime import driver

from nibble.kernels.attention.triton_kernel import LEAST_KEYS, attend_kernel, combine_kernel
from nibble.kernels.codecs.decoders import DECODERS
from nibble.kernels.codecs.tiles import Tiles, serves
from nibble.kernels.sizes import cdiv, next_power_of_2
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged

__all__ = ["GPU", "Shape", "paged_attention", "serves", "shape_of"]

SIZES = 8
"""Sizes of a share of keys that are weighed against each other."""
SPLITS_AT_ONCE = 64
MANY = 1 << 30
MANY_ROWS = 65
"""Rows from which it makes no difference how many there are."""
HOPPER = 90


@dataclass(frozen=True, slots=True)
class GPU:
    """arch: compute capability, 90 for SM90. memory: bytes of shared memory that a program may have."""

    arch: int
    processors: int
    memory: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What a token's key and value are made of: parts of a decoded word, the wider one's values, and bytes of both in
    a tile, whose rows are padded to powers of two.
    """

    parts: int
    dim: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile: rows, and keys; whether the parts of a tile of keys are joined; and how it is computed: warps, stages of
    loads in flight, and programs that a processor is expected to run at a time.
    """

    rows: int
    keys: int
    join: bool
    warps: int
    stages: int
    programs: int


def shape_of(tokens: int, group: int, k: Paged, v: Paged, query: torch.dtype, gpu: GPU) -> Shape:
    """The tile for so many query tokens of a request, and query heads of a KV head."""
    return _fitting(min(tokens * group, MANY_ROWS), group, stored(k, v), query.itemsize, gpu)


@functools.cache
def _fitting(rows: int, group: int, kv: Stored, item: int, gpu: GPU) -> Shape:
    wide = (replace(shape, rows=max(shape.rows, next_power_of_2(group))) for shape in _shapes(rows, kv, gpu))
    return next(shape for shape in wide if memory_of(shape, kv, item, gpu) <= gpu.memory)


def _shapes(rows: int, kv: Stored, gpu: GPU) -> Iterator[Shape]:
    """From the fastest to the smallest. Decoding a tile of keys pays if many rows share it."""
    dim = next_power_of_2(kv.dim)
    if rows <= 16:  # a warp decodes 64 values of a row, and no two the same
        warps = 4 if kv.parts < 4 else max(dim // 64, 1)
        first = Shape(16, 64, False, warps, 3, 3 if warps == 4 else 8 // warps)
    elif rows < MANY_ROWS or gpu.arch != HOPPER:
        first = Shape(64, 64, True, 4, 3, 2)
    else:
        first = Shape(256 if dim <= 128 and kv.parts * dim >= 256 else 128, 64, True, 8, 3, 1)
    yield first
    yield replace(first, stages=2)
    for keys in (64, 32, 16):
        yield replace(first, rows=min(first.rows, 64), warps=min(first.warps, 4), stages=2, keys=keys)
    yield Shape(16, 16, False, 4, 1, 1)


def memory_of(shape: Shape, kv: Stored, item: int, gpu: GPU) -> int:
    """Bytes of shared memory that a tile takes, or somewhat more. Hopper multiplies weights of joined tiles from
    registers. item: bytes of a query's value.
    """
    dim = next_power_of_2(kv.dim)
    decoded = 2 * dim * item if shape.join and kv.parts > 1 else 0
    weights = 0 if shape.join and gpu.arch == HOPPER else shape.rows * shape.keys * item
    return shape.keys * (shape.stages * kv.bytes + decoded) + shape.rows * dim * item + weights


def stored(k: Paged, v: Paged) -> Stored:
    parts = max(DECODERS[stream.format.name].parts for stream in (k, v))
    widths = [next_power_of_2(plane.shape[3]) * plane.itemsize for x in (k, v) for plane in x.planes_PHS]
    return Stored(parts, max(k.dim, v.dim), sum(widths))


def paged_attention(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams, longest: int = MANY, *,
    shape: Shape | None = None, slots: int | None = None,
) -> Tensor:  # fmt: skip
    """See kernels/attention/__init__.py. longest: a bound on stored tokens where one is known, which is not so in a CUDA graph.

    slots: programs that run at a time for one tile of queries and KV head; keys are split among them if more than 1.
    """
    (tokens, heads, dim), gpu = q_THD.shape, gpu_of(q_THD.device)
    group, count, most = heads // k.heads, len(batch.seq_lens_B), max(batch.query_lens)
    shape = shape or shape_of(most, group, k, v, q_THD.dtype, gpu)
    tiles = cdiv(most, shape.rows // group)
    if slots is None:
        slots = shape.programs * gpu.processors // (tiles * k.heads) if longest > LEAST_KEYS.value else 0
    split = slots > 1
    programs = count + SIZES // 2 * slots if split else count
    out = q_THD.new_empty(tokens, heads, v.dim)
    parts, lse, plan = (
        _workspace(programs * tiles * k.heads * shape.rows, v.dim, count, out) if split else (out,) * 3
    )
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    attend_kernel[(tiles, k.heads, programs)](
        q_THD, out, parts, lse, plan, _tiles(k, q_THD.dtype, shape.join), _tiles(v, q_THD.dtype, shape.join),
        batch.page_table_BN, batch.cu_seqlens_q_B1, batch.seq_lens_B,
        q_THD if params.sinks_H is None else params.sinks_H, params.scale, params.softcap or 0.0,
        count, slots, batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1), group, dim, v.dim,
        params.window or 0, params.softcap is not None, params.sinks_H is not None, split,
        shape.join, shape.rows, shape.keys, max(next_power_of_2(count), 32), SIZES,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if split:
        combine_kernel[(most, heads, count)](
            out, parts, lse, plan, batch.cu_seqlens_q_B1, tiles,
            group, v.dim, next_power_of_2(v.dim), shape.rows, SPLITS_AT_ONCE,
        )  # fmt: skip
    return out


def _workspace(rows: int, dim: int, requests: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What programs leave to be combined: values and log-sum-exps of rows, and where those of each request begin."""
    return (
        like.new_empty(rows, dim, dtype=torch.float32),
        like.new_empty(rows, dtype=torch.float32),
        like.new_empty(requests, 2, dtype=torch.int32),
    )


def _tiles(stream: Paged, query: torch.dtype, join: bool) -> Tiles:
    """Joined tiles are in the query's dtype, so that the tensor cores may read the query where it was loaded to."""
    half = DECODERS[stream.format.name].half
    return Tiles.of(stream, query if join or half is None or query == torch.float32 else half, copied=join)


@functools.cache
def gpu_of(device: torch.device) -> GPU:
    if device.type != "cuda":
        return GPU(0, 1, MANY)
    found = driver.active.utils.get_device_properties(device.index or 0)
    arch = driver.active.get_current_target().arch
    return GPU(arch, found["multiprocessor_count"], found["max_shared_mem"])
