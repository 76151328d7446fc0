"""A paged cache full of random tokens, as an engine's would be, and who of Nibble's backends can read it.

Everything goes through Nibble's own pool: random K and V are written by PagedPool.write, pages of the requests are
scattered, and what attention is judged against is read back by the pool's views, so that the error of a format is not
counted. The cache has as many layers as it takes to be several times larger than the L2 cache.

Shape suffixes: T tokens, n query tokens, B requests, N pages of a request, L keys, H query heads, G KV heads, R query
heads of a KV head, D values of a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

import gpu
from nibble import formats
from nibble.attention import backends
from nibble.attention.planner.support import Need
from nibble.attention.step import AttentionBackend, PreparedBatch
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.layout import names as packings
from nibble.cache.pool import KVView, PagedPool
from nibble.cache.scales import ONE
from nibble.formats import scheme as schemes
from nibble.hardware import probe
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import Phase, Stream

CHUNK = 1 << 16
"""Tokens that are made up and written at a time."""
PREFERRED = "hnd"
STAGED = ", staged"


@dataclass(frozen=True)
class Heads:
    """What attention looks like in a model."""

    q: int = 32
    kv: int = 8
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.q}/{self.kv} d{self.dim}"

    @property
    def streams(self) -> tuple[Stream, Stream]:
        return Stream("k", self.kv, self.dim), Stream("v", self.kv, self.dim)

    def bytes_per_token(self, scheme: str) -> int:
        """Bytes of K and V of one token in one layer."""
        return sum(schemes.parse(scheme).format_of(stream).bytes_per_token(stream) for stream in self.streams)


def heads(text: str) -> Heads:
    """`64/4` or, with head_dim, `32/8/64`."""
    try:
        return Heads(*map(int, text.split("/")))
    except (TypeError, ValueError):
        raise SystemExit(f"cannot read the heads {text!r}; write them as 64/4 or 32/8/64") from None


def tokens(text: str) -> int:
    """`8K` -> 8192."""
    return int(text[:-1]) * 1024 if text.upper().endswith("K") else int(text)


def requests(text: str) -> tuple[int, ...]:
    """Stored tokens of each request: `64x8K`, `1x128K+31x4K`; a leading B may stand for the batch."""
    found: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"B?(\d+)x(\d+K?)", part.strip(), re.IGNORECASE)
        if not match:
            raise SystemExit(f"cannot read the shape {text!r}; write it as 64x8K or 1x128K+31x4K")
        found += [tokens(match[2])] * int(match[1])
    return tuple(found)


@dataclass(frozen=True)
class Cache:
    """Requests of `lens` stored tokens in a pool of `layers` equal layers. page_table_BN: int32, padded with 0."""

    heads: Heads
    lens: tuple[int, ...]
    scheme: str
    pool: PagedPool
    page_table_BN: Tensor
    layers: int

    @property
    def page_size(self) -> int:
        return self.pool.layout.page_size

    @property
    def packing(self) -> str:
        return self.pool.layout.packing

    @property
    def read_bytes(self) -> int:
        """What attention over all tokens of one layer must read."""
        return sum(self.lens) * self.heads.bytes_per_token(self.scheme)

    @cached_property
    def spec(self) -> AttentionParams:
        return AttentionParams(self.heads.dim**-0.5)

    def view(self, layer: int) -> KVView:
        return self.pool.view(layer)

    def segment(self, phase: Phase, query_lens: Sequence[int]) -> AttentionBatch:
        """The requests as one segment, their last query_lens tokens being new."""
        return AttentionBatch.from_lens(phase, 0, query_lens, self.lens, self.page_table_BN)

    def queries(self, rows: int) -> list[Tensor]:
        """Random queries [T, H, D] for each layer."""
        shape = (rows, self.heads.q, self.heads.dim)
        return [torch.randn(shape, dtype=dtype(), device=gpu.device()) for _ in range(self.layers)]

    def dequantised(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """What attention sees of one request: float32 K and V [L, G, D]."""
        view, length = self.view(layer), self.lens[request]
        pages = self.page_table_BN[request : request + 1, : -(-length // self.page_size)]
        k, v = (view.streams[name].gather_reference(pages)[0, :length] for name in "kv")
        return k, v


def dtype() -> torch.dtype:
    """The compute dtype: bfloat16, on a CPU float32."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def make_cache(
    heads: Heads, lens: Sequence[int], scheme: str, packing: str, page_size: int, layers: int | None = None
) -> Cache:
    """A cache of random tokens in scattered pages. layers: as many as it takes to outgrow the L2 cache, if None."""
    if layers is None:
        read = sum(lens) * heads.bytes_per_token(scheme)
        layers = min(max(-(-gpu.L2_TIMES * gpu.l2_bytes() // read), 1), gpu.CALLS)
    chosen = schemes.parse(scheme)
    streams = tuple(StreamLayout.of(stream, chosen.format_of(stream)) for stream in heads.streams)
    layout = CacheLayout(
        tuple(LayerLayout(i, streams, chosen.transforms) for i in range(layers)), page_size, packing
    )
    counts = [-(-length // page_size) for length in lens]
    pool = PagedPool(layout, sum(counts), ONE, gpu.device())
    for layer in range(layers):
        fill(pool, layer, heads)
    return Cache(heads, tuple(lens), scheme, pool, scattered(counts), layers)


def fill(pool: PagedPool, layer: int, heads: Heads) -> None:
    """Writes random tokens to every slot of a layer."""
    slots = pool.pages * pool.layout.page_size
    for start in range(0, slots, CHUNK):
        slot_mapping_T = torch.arange(start, min(start + CHUNK, slots), device=gpu.device())
        pool.write(layer, random_streams(len(slot_mapping_T), heads), slot_mapping_T)


def random_streams(count: int, heads: Heads) -> dict[str, Tensor]:
    """Random K and V [T, G, D]."""
    shape = (count, heads.kv, heads.dim)
    return {name: torch.randn(shape, dtype=dtype(), device=gpu.device()) for name in "kv"}


def scattered(counts: Sequence[int]) -> Tensor:
    """int32 [B, N]: page ids of requests that have counts[b] pages, in random order."""
    order = torch.randperm(sum(counts)).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, stop, count in zip(table, accumulate(counts), counts, strict=True):
        row[:count] = order[stop - count : stop]
    return table.to(gpu.device())


@dataclass(frozen=True)
class Way:
    """How a backend serves a scheme: from its own bytes, or (stage_to) from pages dequantised first."""

    backend: str
    packing: str
    stage_to: str | None = None

    @property
    def name(self) -> str:
        return f"{self.backend}{STAGED}" if self.stage_to else self.backend

    def adapter(self) -> AttentionBackend:
        return backends.create(backends.get(self.backend))


def ways(names: Iterable[str], phase: Phase, heads: Heads, scheme: str, page_size: int) -> list[Way]:
    """How each of the backends `names` that can run here serves a scheme; those that cannot are left out."""
    known = backends.available_backends()
    found = []
    for name in names:
        info = known.get(name)
        if info is None or not info.runnable:
            continue
        serves = info.serves
        key, plain = stored_format(heads, scheme), formats.plain(str(dtype()).removeprefix("torch.")).name
        native = [p for p in ordered_packings() if serves(need(phase, heads, key, p, page_size))]
        if native:
            found.append(Way(name, native[0]))
        elif serves(need(phase, heads, plain, "nhd", page_size)) and not phase.decodes:
            found.append(Way(name, PREFERRED, plain))
    return found


def ordered_packings() -> list[str]:
    return sorted(packings(), key=lambda name: name != PREFERRED)


def stored_format(heads: Heads, scheme: str) -> str:
    """What capability rows call a scheme's formats."""
    found = [schemes.parse(scheme).format_of(stream).name for stream in heads.streams]
    return ":".join(dict.fromkeys(found))


def need(phase: Phase, heads: Heads, key: str, packing: str, page_size: int) -> Need:
    arch, group = probe().arch, heads.q // heads.kv
    return Need(
        phase, "mha", key, packing, arch, page_size, heads.dim, group, str(dtype()).removeprefix("torch.")
    )


def begin_step(way: Way, adapter: AttentionBackend, segment: AttentionBatch, page_size: int) -> PreparedBatch:
    """What the layers of a step share."""
    return PreparedBatch(adapter, way.stage_to, segment, page_size, None)


def attend(prepared: PreparedBatch, q_THD: Tensor, view: KVView, spec: AttentionParams) -> Tensor:
    """One layer's attention as the engine calls it, staging included."""
    return prepared.attend(view.query(q_THD), view, spec)


def dense(q_nHD: Tensor, k_LGD: Tensor, v_LGD: Tensor, scale: float) -> Tensor:
    """Causal attention by the book, in the dtype of its arguments; the queries are the last n tokens."""
    n, length, groups = len(q_nHD), len(k_LGD), k_LGD.shape[1]
    q_GRnD = q_nHD.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
    scores = (q_GRnD.flatten(1, 2) @ k_LGD.permute(1, 2, 0)).unflatten(1, (-1, n)) * scale
    position = torch.arange(length - n, length, device=scores.device)[:, None]
    hidden = torch.arange(length, device=scores.device) > position
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out_GRnD = (weights.flatten(1, 2) @ v_LGD.transpose(0, 1)).unflatten(1, (-1, n))
    return out_GRnD.permute(2, 0, 1, 3).flatten(1, 2)


@dataclass(frozen=True)
class Error:
    """Relative errors against float64 over the same dequantised cache. plain: torch's own, in the compute dtype."""

    relative: float
    plain: float

    def gate(self, what: str, times: float = 2.0) -> None:
        """Stops the benchmark where a result is wrong: `not` lets no NaN pass."""
        if not self.relative <= times * self.plain + 1e-5:
            raise SystemExit(
                f"{what}: relative error {self.relative:.1e}, torch in the same dtype has {self.plain:.1e}; "
                "a wrong answer has no speed"
            )


def error(q_nHD: Tensor, out_nHD: Tensor, cache: Cache, layer: int, request: int, stop: int) -> Error:
    """The error of n rows of one request's output, the last of which stands for token `stop` - 1."""
    k, v = (x[:stop] for x in cache.dequantised(layer, request))
    q_nHD = cache.view(layer).query(q_nHD)
    scale = cache.spec.scale
    exact = dense(q_nHD.double(), k.double(), v.double(), scale)
    same = dense(q_nHD, k.to(q_nHD.dtype), v.to(q_nHD.dtype), scale)

    def relative(x: Tensor) -> float:
        return float((x.double() - exact).norm() / exact.norm())

    return Error(relative(out_nHD), relative(same))


def biggest(errors: Iterable[Error]) -> Error:
    """The error that comes nearest to its bound."""
    return max(errors, key=lambda found: found.relative / max(found.plain, 1e-9))


Attention = Callable[[Tensor, int], Tensor]
"""(q_THD, layer) -> out_THD over one layer of a cache."""
