"""Decode attention in CUDA C++ (decode.cu): which variant serves a call, and how it is launched.

Owns Decode. Must not know of plans, requests or packings other than the one it reads.

Shape suffixes: T query rows, B requests, N pages of a request, H query heads, G KV heads, D values of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels.codecs.cuda_traits import FORMATS, Format
from nibble.kernels.nvrtc import FLOAT, INT, POINTER, Kernel, cubin

SOURCE = Path(__file__).with_name("decode.cu")
HEAD_DIMS = (64, 128, 256)
COLUMNS = 16
"""Most query tokens x query heads of one KV head and request."""
MAX_BATCH = 2048
MAX_ROWS = 1 << 20
"""Most query rows of a batch, those that only fill up a KV head's columns included."""
EIGHT = 8
"""Blocks whose pieces are joined at once, where there are more."""
RESERVED = 1024 + 256
"""Bytes of a multiprocessor's shared memory that a block cannot have, and those that the kernel declares."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What the source is compiled for. columns: query rows of a KV head, 8 or 16; tokens of a tile;
    warps of a block."""

    dim: int
    key: Format
    value: Format
    columns: int
    tokens: int
    warps: int
    page: int
    bf16: bool
    softcap: bool

    @property
    def macros(self) -> dict[str, str | int]:
        return {
            "HEAD_DIM": self.dim,
            "K_FORMAT": self.key.name,
            "V_FORMAT": self.value.name,
            "COLUMNS": self.columns,
            "TILE": self.tokens,
            "WARPS": self.warps,
            "PAGE": self.page,
            "Q_BF16": int(self.bf16),
            "SOFTCAP": int(self.softcap),
        }

    def shared(self, batch: int) -> int:
        """Bytes of dynamic shared memory: a tile and two barriers for each warp, and the sums of tiles."""
        return self.warps * tile_bytes(self.key, self.value, self.dim) + 4 * (batch + 1)


def tokens_of_tile(key: Format) -> int:
    """Small tiles where values are large: short contexts spread more evenly."""
    return 32 if key.bits == 16 else 64


def tile_bytes(key: Format, value: Format, dim: int) -> int:
    """Shared memory of a warp: a tile of keys and values, and two barriers."""
    return tokens_of_tile(key) * (key.token_bytes(dim) + value.token_bytes(dim)) + 16


def warps_of_block(key: Format, value: Format, dim: int, columns: int, shared: int) -> int:
    """As many warps as registers and `shared` bytes allow; few where values need no decoding, and bytes are all that
    counts. Measured on an H200: a second tile in flight for each warp costs more than it brings, as it takes L1 cache
    or warps away.
    """
    room = shared - RESERVED - 4 * (MAX_BATCH + 1)
    most = 1024 // dim if key.bits == 16 else 8 if dim * columns > 1024 else 12
    tile = tile_bytes(key, value, dim)
    return next((warps for warps in (12, 8, 6, 4, 2) if warps <= most and warps * tile <= room), 1)


@cache
def _kernel(variant: Variant, arch: int, device: int) -> Kernel:
    return Kernel(cubin(SOURCE, arch, variant.macros), "decode", variant.shared(MAX_BATCH))


_TYPES = (*[POINTER] * 14, FLOAT, FLOAT, *[INT] * 7)


class Decode:
    """The launcher for one device and one stream of work: it owns the workspace that pieces of results go through."""

    def __init__(self, device: torch.device) -> None:
        found = torch.cuda.get_device_properties(device)
        self.arch = 10 * found.major + found.minor
        self.blocks = found.multi_processor_count
        self.shared: int = getattr(found, "shared_memory_per_block_optin")  # noqa: B009 (unknown to older stubs)
        self.device = device
        self._pieces: dict[tuple[int, int, int], Tensor] = {}
        of_eights = 2 * -(-self.blocks // EIGHT) * COLUMNS
        self._arrived = torch.zeros(MAX_ROWS + of_eights, dtype=torch.int32, device=device)

    def variant(
        self, formats: tuple[str, str], dim: int, page: int, columns: int, bf16: bool, softcap: bool
    ) -> Variant:
        """The variant for keys and values in these formats."""
        key, value, wide = FORMATS[formats[0]], FORMATS[formats[1]], 8 if columns <= 8 else 16
        warps = warps_of_block(key, value, dim, wide, self.shared)
        return Variant(dim, key, value, wide, tokens_of_tile(key), warps, page, bf16, softcap)

    def _workspace(self, variant: Variant) -> Tensor:
        """Room for a piece of each warp and two of each block: O, and maximum and sum of each column."""
        key = variant.warps, variant.columns, variant.dim
        if key not in self._pieces:
            rows = self.blocks * (variant.warps + 2) * variant.columns
            self._pieces[key] = torch.empty(rows, variant.dim + 2, device=self.device)
        return self._pieces[key]

    def __call__(
        self,
        q_THD: Tensor,
        key: tuple[Tensor, ...],
        value: tuple[Tensor, ...],
        formats: tuple[str, str],
        columns: int,
        lens_B: Tensor,
        starts_B1: Tensor | None,
        page_table_BN: Tensor,
        kv_scales: tuple[Tensor, Tensor],
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
        variant: Variant | None = None,
    ) -> Tensor:
        """Attention of a few query tokens a request over stored pages -> [T, H, D] like q_THD.

        q_THD: bfloat16 or float16, contiguous. key, value: planes [pages, G, slots, row] in `formats`, their values
        and, if there are any, scales. columns: most query tokens x query heads that a request has for a KV head.
        lens_B, starts_B1, page_table_BN: int32, as in kernels/types.py; no starts: one token each. kv_scales: float32,
        () or [G, 1] each. sinks_H: float32. variant: another than the one that fits best. Raises BackendError.
        """
        batch, heads, page = len(lens_B), key[0].shape[1], key[0].shape[2]
        if batch > MAX_BATCH or batch * heads * COLUMNS > MAX_ROWS:
            raise BackendError(
                f"a batch of {batch} requests x {heads} KV heads is more than the kernel can count"
            )
        chosen = variant or self.variant(
            formats, q_THD.shape[2], page, columns, q_THD.dtype is torch.bfloat16, softcap is not None
        )
        out = torch.empty_like(q_THD)
        pointers = (
            q_THD, out, *_planes(key), *_planes(value), lens_B, starts_B1, page_table_BN, *kv_scales, sinks_H,
            self._workspace(chosen), self._arrived,
        )  # fmt: skip
        values = (
            *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
            scale,
            softcap or 0.0,
            batch,
            page_table_BN.stride(0),
            heads,
            q_THD.shape[1] // heads,
            window or 0,
            *(int(entry.dim() > 0) for entry in kv_scales),
        )
        kernel = _kernel(chosen, self.arch, self.device.index or 0)
        kernel.launch(self.blocks, 32 * chosen.warps, chosen.shared(batch), _TYPES, values)
        return out


def _planes(planes: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """Values and scales."""
    return (planes[0], planes[1]) if len(planes) > 1 else (planes[0], None)
