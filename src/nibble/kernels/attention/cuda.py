"""Launchers of decode.cu and decode_fixed.cu, decode attention in CUDA C++: which variant serves a call, its arguments.

Shape suffixes: T query rows, B requests, N pages of a request, H query heads, G KV heads, D values of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels import GPU, HEAD_DIMS, SM90, cdiv, gpu_of
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.codecs import CUDA_FORMATS as FORMATS
from nibble.kernels.codecs.base import CudaFormat as Format
from nibble.kernels.nvrtc import FLOAT, INT, POINTER, Kernel, code_of
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged

SOURCE = Path(__file__).with_name("decode.cu")
FIXED_SOURCE = Path(__file__).with_name("decode_fixed.cu")
PAGE_SIZES = (16, 32, 64, 128)
WIDTHS = (8, 16, 32)
"""Query tokens x query heads of one KV head and request that variants are compiled for."""
WIDEST_DIM = 128
"""The widest heads of which a warp's registers hold the most of these."""
FIXED_COLUMNS = 16
"""Most of them over fixed splits."""
MAX_BATCH = 2048
MAX_ROWS = 1 << 20
"""Most query rows of a batch, including those that only pad a KV head's columns."""
MERGE_BLOCKS = 8
"""Blocks whose partial results are merged at once, if there are more. MERGE_BLOCKS of decode.cu."""
RESERVED = 1024 + 256
"""Bytes of a multiprocessor's shared memory that a block cannot have, plus those that the kernel declares."""
_TYPES = (*[POINTER] * 14, FLOAT, FLOAT, *[INT] * 7)
_FIXED_TYPES = (*[POINTER] * 12, FLOAT, *[INT] * 8)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a block works: what its warps have in registers and shared memory."""

    tokens: int
    """Tokens of a tile."""
    warps: int
    """Warps of a block."""
    queries_in_registers: bool
    """Whether a warp's queries are there, and not in shared memory."""

    def warp_bytes(self, key: Format, value: Format, dim: int, columns: int) -> int:
        """Return the shared memory of a warp: a tile of keys and values, or what it leaves there, and two barriers.

        Of queries that are not in registers, these too.

        Args:
            key: The format of keys.
            value: The format of values.
            dim: Values of a head.
            columns: Query rows of a KV head, one of WIDTHS.

        Returns:
            Bytes.
        """
        tile = max(self.tokens * (key.token_bytes(dim) + value.token_bytes(dim)), columns * (4 * dim + 8))
        return tile + 16 + (0 if self.queries_in_registers else 2 * columns * dim)


@dataclass(frozen=True, slots=True)
class Variant:
    """What the source is compiled for."""

    dim: int
    key: Format
    value: Format
    columns: int
    """Query rows of a KV head: one of WIDTHS."""
    tiling: Tiling
    page: int
    bf16: bool
    softcap: bool
    lse: bool = False
    """Whether the log-sum-exp is stored too, and values are float32."""
    join: bool = False
    """Whether attention over other keys is merged into the output."""

    @property
    def macros(self) -> dict[str, str | int]:
        """The macros of the source."""
        return {
            "HEAD_DIM": self.dim,
            "K_FORMAT": self.key.name,
            "V_FORMAT": self.value.name,
            "COLUMNS": self.columns,
            "TILE": self.tiling.tokens,
            "WARPS": self.tiling.warps,
            "QUERIES_IN_REGISTERS": int(self.tiling.queries_in_registers),
            "PAGE": self.page,
            "Q_BF16": int(self.bf16),
            "SOFTCAP": int(self.softcap),
            "LSE": int(self.lse),
            "JOIN": int(self.join),
        }

    def shared_bytes(self, batch: int) -> int:
        """Return the dynamic shared memory for a batch: tiles and barriers of all warps, and sums of tiles."""
        of_warp = self.tiling.warp_bytes(self.key, self.value, self.dim, self.columns)
        return self.tiling.warps * of_warp + 4 * (batch + 1)


def most_columns(dim: int) -> int:
    """Return the most query rows of a KV head and request that a kernel serves in one reading of the cache."""
    return WIDTHS[-1] if dim <= WIDEST_DIM else WIDTHS[-2]


def columns_of(batch: AttentionBatch, heads: int, kv_heads: int) -> int:
    """Return the most query rows that a request of a batch has for a KV head."""
    return max(batch.query_lens) * heads // kv_heads


def tiling_of(key: Format, value: Format, dim: int, columns: int, shared: int) -> Tiling:
    """Return the tiling for a call: as many warps as registers and shared memory allow.

    Tiles are small where values are large, so that short contexts spread more evenly, and where columns are many, as
    their scores are in registers. Few warps are enough where values need no decoding, and only bytes count. Measured on
    an H200: a second tile in flight for each warp costs more than it brings, as it takes L1 cache or warps away.

    Args:
        key: The format of keys.
        value: The format of values.
        dim: Values of a head.
        columns: Query rows of a KV head, one of WIDTHS.
        shared: Bytes of shared memory that a block can have.
    """
    in_registers, tokens, most = columns <= WIDTHS[1], 64, 8 if dim * columns > 1024 else 12
    if key.bits == 16:
        tokens, most = 32, 1024 // dim
    elif columns > WIDTHS[1]:
        tokens = 32
    tilings = [Tiling(tokens, warps, in_registers) for warps in (12, 8, 6, 4, 2, 1) if warps <= most]
    # For the largest batch, so that one variant serves all batches.
    available = shared - RESERVED - 4 * (MAX_BATCH + 1)
    fitting = (t for t in tilings if t.warps * t.warp_bytes(key, value, dim, columns) <= available)
    return next(fitting, tilings[-1])


@cache
def variant_of(
    k_format: str,
    v_format: str,
    dim: int,
    page: int,
    columns: int,
    bf16: bool,
    softcap: bool,
    shared: int,
    lse: bool = False,
    join: bool = False,
) -> Variant:
    """Return the variant that serves a call.

    Args:
        k_format: The format of keys.
        v_format: The format of values.
        dim: Values of a head.
        page: Slots of a page.
        columns: Most query tokens x query heads that a request has for a KV head.
        bf16: Queries are bfloat16, not float16.
        softcap: Scores are capped.
        shared: Bytes of shared memory that a block can have.
        lse: The log-sum-exp is stored too.
        join: Attention over other keys is merged into the output.
    """
    key, value = FORMATS[k_format], FORMATS[v_format]
    wide = next(width for width in WIDTHS if width >= columns)
    tiling = tiling_of(key, value, dim, wide, shared)
    return Variant(dim, key, value, wide, tiling, page, bf16, softcap, lse, join)


@cache
def _kernel(variant: Variant, arch: int, device: int) -> Kernel:
    return Kernel(code_of(SOURCE, arch, variant.macros), "decode", variant.shared_bytes(MAX_BATCH))


class Decode:
    """The launcher for one device and one stream of launches. It has the workspace of partial results."""

    def __init__(self, device: torch.device) -> None:
        """Allocate the counters of merges for a CUDA device."""
        self.gpu, self.device = gpu_of(device), device
        self._workspaces: dict[tuple[int, int, int], Tensor] = {}
        first_round = 2 * cdiv(self.gpu.processors, MERGE_BLOCKS) * WIDTHS[-1]
        # The kernel leaves all counters at zero.
        self._counters = torch.zeros(MAX_ROWS + first_round, dtype=torch.int32, device=device)

    def _workspace(self, variant: Variant) -> Tensor:
        """Return the workspace: a partial result of each warp and two of each block (O, maximum and sum of columns)."""
        key = variant.tiling.warps, variant.columns, variant.dim
        if key not in self._workspaces:
            rows = self.gpu.processors * (variant.tiling.warps + 2) * variant.columns
            self._workspaces[key] = torch.empty(rows, variant.dim + 2, device=self.device)
        return self._workspaces[key]

    def __call__(
        self, q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams,
        out_THD: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the attention of a few query tokens a request over stored pages.

        Args:
            q_THD: Queries, bfloat16 or float16, contiguous.
            k: Pages of the keys.
            v: Pages of the values.
            batch: The pages and lengths of requests.
            params: Scale, window, capping and sinks.
            out_THD: Where to leave the output, contiguous, if anywhere.

        Returns:
            The output [T, H, D] in the dtype of q_THD.

        Raises:
            BackendError: The batch is larger than the kernel can count, or its requests have too many query rows.
        """
        out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
        return self._launch(q_THD, k, v, batch, params, out_THD)

    def partial(
        self, q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams
    ) -> PartialAttention:
        """Compute the same in float32, with its log-sum-exp. Arguments and errors are those of a call.

        Args:
            q_THD: Queries, bfloat16 or float16, contiguous.
            k: Pages of the keys.
            v: Pages of the values.
            batch: The pages and lengths of requests.
            params: Scale, window, capping and sinks.
        """
        out_THD = torch.empty_like(q_THD, dtype=torch.float32)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        return PartialAttention(self._launch(q_THD, k, v, batch, params, out_THD, lse_TH=lse_TH), lse_TH.T)

    def merged(
        self, q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams,
        other: PartialAttention,
    ) -> Tensor:  # fmt: skip
        """Compute the same, merged with attention over other keys. Errors are those of a call.

        Args:
            q_THD: Queries, bfloat16 or float16, contiguous.
            k: Pages of the keys.
            v: Pages of the values.
            batch: The pages and lengths of requests.
            params: Scale, window, capping and sinks.
            other: Attention of the same queries over other keys.

        Returns:
            Attention over all keys [T, H, D] in the dtype of q_THD.
        """
        # The kernel reads both in one order, in which Nibble's other kernels write them.
        parts = other.values_THD.float().contiguous(), other.lse_HT.T.contiguous()
        return self._launch(q_THD, k, v, batch, params, torch.empty_like(q_THD), join=parts)

    def _launch(
        self, q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams, out_THD: Tensor, *,
        lse_TH: Tensor | None = None, join: tuple[Tensor, ...] = (),
    ) -> Tensor:  # fmt: skip
        (_, heads, dim), requests, queries = q_THD.shape, len(batch.seq_lens_B), max(batch.query_lens)
        columns, most = columns_of(batch, heads, k.heads), most_columns(dim)
        if columns > most:
            raise BackendError(f"{queries} tokens a request make {columns} query rows; {most} is the most")
        bf16, softcap = q_THD.dtype is torch.bfloat16, params.softcap is not None
        variant = variant_of(
            k.format.name, v.format.name, dim, k.page_size, columns, bf16, softcap, self.gpu.memory,
            lse_TH is not None, bool(join),
        )  # fmt: skip
        if requests > MAX_BATCH or requests * k.heads * variant.columns > MAX_ROWS:
            raise BackendError(
                f"a batch of {requests} requests x {k.heads} KV heads is more than the kernel can count"
            )
        # A null pointer tells the kernel that there is no such argument.
        pointers = (
            q_THD, out_THD, *_values_and_scales(k), *_values_and_scales(v), batch.seq_lens_B,
            None if queries == 1 else batch.cu_seqlens_q_B1, batch.page_table_BN, k.scale, v.scale,
            None if params.sinks_H is None else params.sinks_H.float(), self._workspace(variant), self._counters,
        )  # fmt: skip
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in pointers)
        sizes = requests, batch.page_table_BN.stride(0), k.heads, heads // k.heads, params.window or 0
        per_head = (int(pages.scale.dim() > 0) for pages in (k, v))
        # Only variants that read or write more than the output have these.
        others = [tensor.data_ptr() for tensor in (*join, lse_TH) if tensor is not None]
        arguments = (*addresses, params.scale, params.softcap or 0.0, *sizes, *per_head, *others)
        kernel = _kernel(variant, self.gpu.arch, self.device.index or 0)
        types = _TYPES + (POINTER,) * len(others)
        kernel.launch(
            self.gpu.processors, 32 * variant.tiling.warps, variant.shared_bytes(requests), types, arguments,
            starts_early=self.gpu.arch >= SM90,
        )  # fmt: skip
        return out_THD


@dataclass(frozen=True, slots=True)
class FixedDecode:
    """The launcher of decode_fixed.cu for one layer's pages."""

    key: Format
    value: Format
    dim: int
    page: int
    gpu: GPU
    tile: int
    """Tokens of a tile."""

    @classmethod
    def of(cls, k: Paged, v: Paged, gpu: GPU) -> FixedDecode | None:
        """Return the launcher that serves these pages, if one does."""
        plain = all(x.is_contiguous() for pages in (k, v) for x in pages.planes_PHS)
        if not plain or k.interleave or v.interleave or k.dim != v.dim:
            return None
        if k.dim not in HEAD_DIMS or k.page_size not in PAGE_SIZES:
            return None
        key, value = FORMATS[k.format.name], FORMATS[v.format.name]
        tile = tiling_of(key, value, k.dim, WIDTHS[0], gpu.memory).tokens
        return cls(key, value, k.dim, k.page_size, gpu, tile)

    def serves(self, q_THD: Tensor, k: Paged, batch: AttentionBatch, params: AttentionParams) -> bool:
        """Return whether the kernel serves these queries."""
        columns = columns_of(batch, q_THD.shape[1], k.heads)
        is_half = q_THD.dtype in (torch.bfloat16, torch.float16)
        return (
            is_half and columns <= FIXED_COLUMNS and len(batch.seq_lens_B) <= MAX_BATCH and not params.softcap
        )

    def fixed_parts(
        self, q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams,
        parts: tuple[Tensor, Tensor], size: int,
    ) -> None:  # fmt: skip
        """Compute each split of keys by itself.

        Args:
            q_THD: Queries, contiguous.
            k: Pages of the keys.
            v: Pages of the values.
            batch: The pages and lengths of requests.
            params: Scale and window.
            parts: What flash.combine_fixed_kernel merges: float32 [S, T, H, D] and [S, T, H, 3].
            size: Keys of a split.

        Raises:
            BackendError: The driver refuses the launch.
        """
        (rows, heads, _), queries = q_THD.shape, max(batch.query_lens)
        wide, bf16 = 8 if queries * heads // k.heads <= 8 else 16, q_THD.dtype is torch.bfloat16
        tiling = tiling_of(self.key, self.value, self.dim, wide, self.gpu.memory)
        variant = Variant(self.dim, self.key, self.value, wide, tiling, self.page, bf16, False)
        pointers = (
            q_THD, *parts, *_values_and_scales(k), *_values_and_scales(v), batch.seq_lens_B,
            None if queries == 1 else batch.cu_seqlens_q_B1, batch.page_table_BN, k.scale, v.scale,
        )  # fmt: skip
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in pointers)
        requests, group = len(batch.seq_lens_B), heads // k.heads
        sizes = rows, requests, batch.page_table_BN.stride(0), k.heads, group, params.window or 0
        per_head = (int(pages.scale.dim() > 0) for pages in (k, v))
        kernel = _fixed_kernel(variant, size, self.gpu.arch, q_THD.device.index or 0)
        kernel.launch(
            self.gpu.processors, 32 * tiling.warps, variant.shared_bytes(requests), _FIXED_TYPES,
            (*addresses, params.scale, *sizes, *per_head),
        )  # fmt: skip


@cache
def _fixed_kernel(variant: Variant, size: int, arch: int, device: int) -> Kernel:
    code = code_of(FIXED_SOURCE, arch, variant.macros | {"SPLIT": size})
    return Kernel(code, "decode_fixed", variant.shared_bytes(MAX_BATCH))


def _values_and_scales(pages: Paged) -> tuple[Tensor, Tensor | None]:
    """Return the plane of values, and that of block scales if there is one."""
    values, *scales = pages.planes_PHS
    return values, scales[0] if scales else None
