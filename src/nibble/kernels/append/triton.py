"""Triton kernels that transform, encode and store new tokens of a layer, or dequantise whole pages, in one launch.

What a format does to a tile is its encoder's business (codecs/base.py), which the kernel gets as an argument: a kernel
knows planes, and no format. K and V go through HeadsAppend, a single stream of one head (latents, index keys) through
RowAppend, which also serves columns of records. HeadsAppend fills exact pages in the same launch.

Shape suffixes: T tokens, H heads, D values of a head, R rows of a tile: heads of a token in HeadsAppend, tokens in
RowAppend and gather_kernel; B requests, N pages of a request, L tokens (N * page size). A tile's R and D are padded to
powers of two. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from nibble.kernels import cdiv, gpu_of, next_power_of_2
from nibble.kernels.append.naive import Target
from nibble.kernels.codecs import DECODERS, ENCODERS, tiles
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.launches import Launches
from nibble.kernels.linear.triton import rotate_tile
from nibble.kernels.types import Paged

serves = tiles.serves
TRANSFORMS = ("kmean", "rot")
"""What the kernel can do to keys, in the order in which it does."""
PROGRAM_VALUES = 1024
"""Values that a program takes of a token of K or V."""
FEW_TOKENS = 1024
"""Tokens up to which a thread takes few values (8 of K or V), so that the work spreads over the GPU; with more tokens
it takes 32, or several rows."""
MANY_ROWS, ROW_WARPS = 4, 2
"""Of a program of RowAppend, where there are more tokens."""
NO_EXACT = (None, None, None)
"""Stands for the slots and planes of exact pages where nothing is stored there."""
TILE_VALUES = 4096
"""Values of a tile of gather_kernel."""


# ---- K and V ---------------------------------------------------------------------------------------------------------


@triton.jit
def append_heads_kernel(
    k, v, slots, exact_slots, exact_k, exact_v, k_planes, v_planes, k_scale_H, v_scale_H, k_mean_HD,
    k_stride_T, k_stride_H, v_stride_T, v_stride_H,
    K_ENCODE: tl.constexpr, V_ENCODE: tl.constexpr, K_WIDTHS: tl.constexpr, V_WIDTHS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, ROTATE: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    HEADS_FIRST: tl.constexpr, EXACT_HEADS_FIRST: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Append R heads of a token of K or V. Grid: tokens, groups of R heads, and 2: K and V.

    Where there are exact pages, the heads are stored there too, at a slot of their own.
    """
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head_R = tl.program_id(1) * R + tl.arange(0, R)
    slot = tl.load(slots + token)
    place, exact_place = _place(slot, head_R, HEADS, PAGE, HEADS_FIRST), None
    if exact_slots is not None:
        exact_slot = tl.load(exact_slots + token)
        if (slot < 0) & (exact_slot < 0):
            return
        exact_place = _place(exact_slot, head_R, HEADS, PAGE, EXACT_HEADS_FIRST)
    if tl.program_id(2) == 0:
        _append_rows(
            k + token * k_stride_T, k_stride_H, k_mean_HD, k_scale_H, k_planes, exact_k, head_R, place, exact_place,
            K_DIM, ROTATE, K_ENCODE, K_WIDTHS,
        )  # fmt: skip
    else:
        _append_rows(
            v + token * v_stride_T, v_stride_H, None, v_scale_H, v_planes, exact_v, head_R, place, exact_place,
            V_DIM, 0, V_ENCODE, V_WIDTHS,
        )  # fmt: skip


@triton.jit
def _place(slot, head_R, HEADS: tl.constexpr, PAGE: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """Return the rows of some heads of a token, counted over a whole plane, and which of them are stored."""
    keep_R = (head_R < HEADS) & (tl.broadcast_to(slot, head_R.shape) >= 0)
    slot = slot.to(tl.uint32)  # divides faster than 64 bits
    if HEADS_FIRST:
        row_R = (slot // PAGE * (HEADS * PAGE) + slot % PAGE).to(tl.int64) + head_R * PAGE
    else:
        row_R = (slot * HEADS).to(tl.int64) + head_R
    return row_R, keep_R


@triton.jit
def _append_rows(
    x, stride, mean_HD, scale_H, planes, exact, head_R, place, exact_place,
    DIM: tl.constexpr, ROTATE: tl.constexpr, ENCODE: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Append some heads of a token of one stream at their place, and as they are to exact pages."""
    row_R, keep_R = place
    # --- load and transform
    live_R = keep_R if exact_place is None else keep_R | exact_place[1]
    x_RD = _load_rows(x + head_R * stride, live_R, DIM)
    if exact_place is not None:
        _store_rows(exact, x_RD, exact_place[0], exact_place[1], DIM)
    # The mean is that of keys before their rotation, so it is subtracted first.
    if mean_HD is not None:
        x_RD -= _load_rows(mean_HD + head_R * DIM, keep_R, DIM)
    if ROTATE:
        x_RD = rotate_tile(x_RD, ROTATE)
    # --- encode
    scale_R = tl.load(scale_H + head_R, mask=keep_R, other=1.0)
    encoded = ENCODE(x_RD, scale_R[:, None])
    # --- store
    for i in tl.static_range(len(WIDTHS)):
        _store_rows(planes[i], encoded[i], row_R, keep_R, WIDTHS[i])


@triton.jit
def _load_rows(rows, keep_R, DIM: tl.constexpr):
    """Load rows of DIM values as float32 [R, D]; zeros where they are not kept."""
    column = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    return tl.load(rows[:, None] + column, mask=keep_R[:, None] & (column < DIM), other=0.0).to(tl.float32)


@triton.jit
def _store_rows(plane, x_RW, row_R, keep_R, WIDTH: tl.constexpr):
    """Store rows of WIDTH items that are kept."""
    column = tl.arange(0, x_RW.shape[1])[None, :]
    tl.store(plane + (row_R * WIDTH)[:, None] + column, x_RW, mask=keep_R[:, None] & (column < WIDTH))


class HeadsAppend:
    """Appends K and V of a layer; see naive.KVAppend."""

    is_capturable = True

    def __init__(self, targets: Mapping[str, Target]) -> None:
        k, v = targets["k"].pages, targets["v"].pages
        exact = [pages for target in (targets["k"], targets["v"]) if (pages := target.exact)]
        widest = next_power_of_2(max(k.dim, v.dim))
        rows = min(next_power_of_2(k.heads), max(1, PROGRAM_VALUES // widest))
        self._groups = cdiv(k.heads, rows)
        self._warps = max(1, rows * widest // 256), max(1, rows * widest // 1024)
        self._exact = tuple(pages.planes_PHS[0] for pages in exact)
        self._tensors = (_planes(k), _planes(v), _scale(k), _scale(v), _mean(targets["k"]))
        self._launch, self._launches = launch_options(gpu_of(k.planes_PHS[0].device)), Launches()
        # The size of the blocks of a head that are rotated, 0 for none.
        rotation = k.dim & -k.dim if any(transform.rotates for transform in targets["k"].transforms) else 0
        self._constants = (
            _encoder(k), _encoder(v), _widths(k), _widths(v), k.dim, v.dim,
            rotation, k.heads, k.page_size, _heads_first(k), bool(exact) and _heads_first(exact[0]), rows,
            bool(self._launch),
        )  # fmt: skip

    def __call__(
        self,
        streams: Mapping[str, Tensor],
        slot_mapping_T: Tensor,
        exact_slot_mapping_T: Tensor | None = None,
    ) -> None:
        """Store `k` and `v`."""
        k, v = _readable(streams["k"]), _readable(streams["v"])
        tokens = slot_mapping_T.shape[0]
        assert self._exact or exact_slot_mapping_T is None, "there are exact slots, but no exact pages"
        exact = NO_EXACT if exact_slot_mapping_T is None else (exact_slot_mapping_T, *self._exact)
        if tokens:
            warps = self._warps[tokens > FEW_TOKENS]
            strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
            self._launches(
                append_heads_kernel, (tokens, self._groups, 2), (k, v, slot_mapping_T, exact[0], *strides, (warps,)),
                (k, v, slot_mapping_T, *exact, *self._tensors, *strides, *self._constants),
                num_warps=warps, **self._launch,
            )  # fmt: skip

    @staticmethod
    def serves(targets: Mapping[str, Target]) -> bool:
        """Return whether the kernel can store these streams."""
        if targets.keys() != {"k", "v"} or targets["v"].transforms:
            return False
        k, v = targets["k"], targets["v"]
        names = [transform.name for transform in k.transforms]
        pages, exact = [k.pages, v.pages], [stored for stored in (k.exact, v.exact) if stored]
        return (
            names == [name for name in TRANSFORMS if name in names]
            and len({(stored.heads, stored.page_size) for stored in (*pages, *exact)}) == 1
            # Exact pages may have another order of heads and tokens.
            and all(len({_heads_first(stored) for stored in pair}) == 1 for pair in (pages, exact) if pair)
            and all(map(_serves, (*pages, *exact)))
            and len(exact) != 1
            and all(stored.format.plain for stored in exact)
        )


def _serves(pages: Paged) -> bool:
    return (
        pages.format.encoder in ENCODERS.get(pages.format.name, ())
        and pages.dim % 16 == 0
        and not pages.interleave
        # Rows lie side by side, in one order or the other: a column of records does not.
        and all(x.is_contiguous() or x.transpose(1, 2).is_contiguous() for x in pages.planes_PHS)
        # Rows are counted in 32 bits.
        and all(prod(plane.shape[:3]) < 1 << 31 for plane in pages.planes_PHS)
    )


def _encoder(pages: Paged) -> JITFunction:
    return ENCODERS[pages.format.name][pages.format.encoder]


def _readable(x_THD: Tensor) -> Tensor:
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()


def _heads_first(pages: Paged) -> bool:
    """Return whether a head's tokens lie together in a page; else a token's heads do."""
    return pages.planes_PHS[0].is_contiguous()


def _planes(pages: Paged) -> tuple[Tensor, ...]:
    """Return planes as what encoders return: one-byte floats as integers."""
    return tuple(p.view(torch.uint8) if p.dtype.itemsize == 1 else p for p in pages.planes_PHS)


def _widths(pages: Paged) -> tuple[int, ...]:
    """Return the items of each plane for a token's head."""
    return tuple(prod(plane.shape[3:]) for plane in pages.planes_PHS)


def _scale(pages: Paged) -> Tensor:
    # One scale for each head, so that the kernel has a single case.
    return pages.scale.flatten().expand(pages.heads).contiguous()


def _mean(target: Target) -> Tensor | None:
    """Return what is subtracted from keys, if anything is."""
    if not any(transform.needs_mean for transform in target.transforms):
        return None
    assert target.mean_HD is not None
    return target.mean_HD.contiguous()


# ---- latents and index keys ------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def append_rows_kernel(x, slots, spans, tokens, stride, R: tl.constexpr):
    """Append R tokens of a stream of one head, span by span. Grid: tiles of tokens."""
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    # Tokens behind the last get a negative slot, for which nothing is stored.
    slot_R = tl.load(slots + token_R, mask=token_R < tokens, other=-1).to(tl.int64)
    row_R = x + token_R.to(tl.int64) * stride
    for i in tl.static_range(len(spans)):
        value = tl.arange(0, spans[i].WIDTH)[None, :]
        keep = (slot_R >= 0)[:, None] & (value < spans[i].COUNT)
        x_RD = tl.load(row_R[:, None] + (spans[i].FIRST + value), mask=keep, other=0.0).to(tl.float32)
        tiles.store_span(spans[i], x_RD, slot_R)


class RowAppend:
    """Appends the one stream of a layer that has one head; see naive.KVAppend."""

    is_capturable = True

    def __init__(self, targets: Mapping[str, Target]) -> None:
        ((self._name, target),) = targets.items()
        self._spans = _spans(target.pages)
        self._exact_spans = _spans(target.exact) if target.exact else None

    def __call__(
        self,
        streams: Mapping[str, Tensor],
        slot_mapping_T: Tensor,
        exact_slot_mapping_T: Tensor | None = None,
    ) -> None:
        """Store the stream, in a launch for each kind of pages."""
        x_THD = _readable(streams[self._name])
        self._store(x_THD, slot_mapping_T, self._spans)
        if exact_slot_mapping_T is not None:
            assert self._exact_spans, "there are exact slots, but no exact pages"
            self._store(x_THD, exact_slot_mapping_T, self._exact_spans)

    def _store(self, x_THD: Tensor, slot_mapping_T: Tensor, spans: tuple[tiles.Span, ...]) -> None:
        tokens = len(slot_mapping_T)
        rows = 1 if tokens <= FEW_TOKENS else MANY_ROWS
        if tokens:
            append_rows_kernel[cdiv(tokens, rows),](
                x_THD, slot_mapping_T, spans, tokens, x_THD.stride(0), R=rows, num_warps=ROW_WARPS
            )

    @staticmethod
    def serves(targets: Mapping[str, Target]) -> bool:
        """Return whether the kernel can store this stream."""
        if len(targets) != 1:
            return False
        (target,) = targets.values()
        pages = [stored for stored in (target.pages, target.exact) if stored]
        return not target.transforms and all(map(tiles.serves_rows, pages))


def _spans(pages: Paged) -> tuple[tiles.Span, ...]:
    return tuple(tiles.span(pages, pages.scale, *part) for part in tiles.spans_of(pages))


# ---- whole pages -----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length", "pages_stride"], do_not_specialize_on_alignment=["pages"])
def gather_kernel(
    stream, pages, out, length, pages_stride, out_stride, head_stride, token_stride,
    DIM: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Dequantise R tokens of a head. Grid: tiles of tokens, heads, requests."""
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, n_R = tl.program_id(0) * R, tl.arange(0, R)
    keep_R = start + n_R < length
    values_RD = tiles.dequantized(stream, pages + request * pages_stride, start, n_R, length, head)
    # --- store
    d = tl.arange(0, stream.items.WIDTH * stream.PARTS)[None, :]
    out += request * out_stride + head.to(tl.int64) * head_stride
    row_R = out + (start + n_R).to(tl.int64) * token_stride
    tl.store(row_R[:, None] + d, values_RD.to(out.dtype.element_ty), mask=keep_R[:, None] & (d < DIM))


def dequantize_pages(
    stream: Paged, page_table_BN: Tensor, dtype: torch.dtype, *, heads_first: bool = False
) -> Tensor:
    """Return whole pages, dequantised as naive.py defines it.

    Args:
        stream: Pages of one stream.
        page_table_BN: Int32 page ids.
        dtype: Of the values.
        heads_first: Whether heads come before tokens.

    Returns:
        [B, L, H, D], or [B, H, L, D] where heads come first.
    """
    (requests, pages), heads, dim = page_table_BN.shape, stream.heads, stream.dim
    length = pages * stream.page_size
    inner = (heads, length) if heads_first else (length, heads)
    out = torch.empty(requests, *inner, dim, dtype=dtype, device=page_table_BN.device)
    head_stride, token_stride = (length * dim, dim) if heads_first else (dim, heads * dim)
    rows = max(1, TILE_VALUES // next_power_of_2(dim))
    if out.numel():
        # What words are decoded into holds every value exactly.
        stored = tiles.Tiles.of(stream, DECODERS[stream.format.name].half or torch.float32)
        gather_kernel[(cdiv(length, rows), heads, requests)](
            stored, page_table_BN, out, length, page_table_BN.stride(0), length * heads * dim, head_stride,
            token_stride, DIM=dim, R=rows,
        )  # fmt: skip
    return out
