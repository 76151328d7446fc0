"""Triton kernels that store new tokens of a layer, rotated, transformed and encoded, or dequantise whole pages.

What a format does to a tile is its encoder's business (codecs/base.py), which the kernel gets as an argument: a kernel
knows planes, and no format. K and V go through HeadsAppend, a single stream of one head (latents, index keys) through
RowAppend, which also serves columns of records. HeadsAppend fills exact pages in the same launch, and rotates queries.

Shape suffixes: T tokens, H heads, D values of a head, R rows of a tile: heads of a token in HeadsAppend, tokens in
RowAppend and gather_kernel; B requests, N pages of a request, L tokens (N * page size). A tile's R and D are padded to
powers of two. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from nibble.kernels import ahead, cdiv, gpu_of, next_power_of_2
from nibble.kernels.append.naive import Target, append_with_rope
from nibble.kernels.codecs import DECODERS, ENCODERS, tiles
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.launches import Launches
from nibble.kernels.linear.triton import rotate_tile
from nibble.kernels.types import Paged, Rope

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


@triton.jit(do_not_specialize=["stored", "eps"])
def append_heads_kernel(
    k, v, slots, exact_slots, exact_k, exact_v, k_planes, v_planes, k_scale_H, v_scale_H, k_mean_HD,
    q, q_out, k_out, cos, sin, q_norm_D, k_norm_D, eps, stored,
    k_stride_T, k_stride_H, v_stride_T, v_stride_H, q_stride_T, q_stride_H,
    K_ENCODE: tl.constexpr, V_ENCODE: tl.constexpr, K_WIDTHS: tl.constexpr, V_WIDTHS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, ROTATE: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    HEADS_FIRST: tl.constexpr, EXACT_HEADS_FIRST: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
    ROPE: tl.constexpr, Q_HEADS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Append R heads of a token of K or V. Grid: tokens, groups of R heads, and 2: K and V.

    Where there are exact pages, the heads are stored there too, at a slot of their own. ROPE: values of a head of keys
    that are rotated first. Then queries are rotated, too, by as many more programs as their heads need.
    """
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    head_R = tl.program_id(1) * R + tl.arange(0, R)
    if ROPE:
        cos += token * ROPE
        sin += token * ROPE
        if part >= 2:
            q_head_R = head_R + (part - 2) * tl.num_programs(1) * R
            keep_R = q_head_R < Q_HEADS
            rows = q + token * q_stride_T + q_head_R * q_stride_H
            q_RD = _load_with_rope(rows, keep_R, cos, sin, q_norm_D, eps, K_DIM, ROPE, OFFSET)
            _store_rows(q_out, q_RD, token * Q_HEADS + q_head_R, keep_R, K_DIM)
            return
        if token >= stored:
            return
    slot = tl.load(slots + token)
    place, exact_place = _place(slot, head_R, HEADS, PAGE, HEADS_FIRST), None
    if exact_slots is not None:
        exact_slot = tl.load(exact_slots + token)
        if (slot < 0) & (exact_slot < 0) & (k_out is None):
            return
        exact_place = _place(exact_slot, head_R, HEADS, PAGE, EXACT_HEADS_FIRST)
    if part == 0:
        # --- load and transform
        live_R = _live(head_R, place, exact_place, k_out, HEADS)
        rows = k + token * k_stride_T + head_R * k_stride_H
        if ROPE:
            k_RD = _load_with_rope(rows, live_R, cos, sin, k_norm_D, eps, K_DIM, ROPE, OFFSET)
            if k_out is not None:
                _store_rows(k_out, k_RD, token * HEADS + head_R, live_R, K_DIM)
        else:
            k_RD = _load_rows(rows, live_R, K_DIM)
        _append_rows(
            k_RD, k_mean_HD, k_scale_H, k_planes, exact_k, head_R, place, exact_place, K_DIM, ROTATE, K_ENCODE,
            K_WIDTHS,
        )  # fmt: skip
    else:
        live_R = _live(head_R, place, exact_place, None, HEADS)
        v_RD = _load_rows(v + token * v_stride_T + head_R * v_stride_H, live_R, V_DIM)
        _append_rows(
            v_RD, None, v_scale_H, v_planes, exact_v, head_R, place, exact_place, V_DIM, 0, V_ENCODE, V_WIDTHS
        )


@triton.jit
def _live(head_R, place, exact_place, out, HEADS: tl.constexpr):
    """Return which heads are needed: those that are stored anywhere, and all where they are left in `out`."""
    live_R = place[1]
    if exact_place is not None:
        live_R |= exact_place[1]
    if out is not None:
        live_R = head_R < HEADS
    return live_R


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
    x_RD, mean_HD, scale_H, planes, exact, head_R, place, exact_place,
    DIM: tl.constexpr, ROTATE: tl.constexpr, ENCODE: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Append some heads of a token of one stream at their place, and as they are to exact pages."""
    row_R, keep_R = place
    if exact_place is not None:
        _store_rows(exact, x_RD, exact_place[0], exact_place[1], DIM)
    # The mean is that of keys before this rotation, so it is subtracted first.
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
def _load_with_rope(
    rows, keep_R, cos, sin, weight_D, eps, DIM: tl.constexpr, ROPE: tl.constexpr, OFFSET: tl.constexpr
):
    """Load rows, normed where there is a weight, and with rotary positions, rounded to what they are stored in."""
    column = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    turns, low = column < ROPE, column < ROPE // 2
    other = tl.where(low, column + ROPE // 2, column - ROPE // 2)
    if ROPE % 16 == 0:
        # Eight values are one load, which the compiler cannot see.
        other = tl.max_contiguous(tl.multiple_of(other, [1, 8]), [1, 8])
    x_RD = _load_rows(rows, keep_R, DIM)
    y_RD = tl.load(rows[:, None] + other, mask=keep_R[:, None] & turns, other=0.0).to(tl.float32)
    # Each row loads what all rows need: to hand it on between threads would take longer.
    spread = tl.zeros([keep_R.shape[0], 1], tl.int32)
    if weight_D is not None:
        factor_R1 = tl.rsqrt(tl.sum(x_RD * x_RD, 1) / DIM + eps)[:, None]
        own_RD = tl.load(weight_D + column + spread, mask=column + spread < DIM, other=0.0)
        others_RD = tl.load(weight_D + other + spread, mask=turns & (spread == 0), other=0.0)
        x_RD *= factor_R1 * (own_RD.to(tl.float32) + OFFSET)
        y_RD *= factor_R1 * (others_RD.to(tl.float32) + OFFSET)
    c_RD = tl.load(cos + column + spread, mask=column + spread < ROPE, other=1.0).to(tl.float32)
    s_RD = tl.load(sin + column + spread, mask=column + spread < ROPE, other=0.0).to(tl.float32)
    x_RD = x_RD * c_RD + tl.where(low, -y_RD, y_RD) * s_RD
    return x_RD.to(rows.dtype.element_ty).to(tl.float32)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Queries:
    """Queries, and what rotates them and keys, as the kernel takes it."""

    pointers: tuple[Tensor | None, ...]
    """Queries, where they go, where keys go, cosines, sines, and the weights of norms."""
    eps: float
    strides: tuple[int, int]
    """Of a token and of a head."""
    width: int | None
    """Values of a head that are rotated."""
    heads: int | None
    offset: float
    """Of the weights of norms."""

    @classmethod
    def of(cls, q_THD: Tensor, out_THD: Tensor, k_out_THD: Tensor | None, rope: Rope) -> _Queries:
        """Return what the kernel takes."""
        tables = rope.cos_TR.contiguous(), rope.sin_TR.contiguous()
        return cls(
            (q_THD, out_THD, k_out_THD, *tables, rope.q_norm_D, rope.k_norm_D), rope.eps,
            (q_THD.stride(0), q_THD.stride(1)), rope.cos_TR.shape[1], q_THD.shape[1], rope.offset,
        )  # fmt: skip


NO_QUERIES = _Queries((None,) * 7, 0.0, (0, 0), None, None, 0.0)
"""Where keys are stored as they are given."""


class HeadsAppend:
    """Appends K and V of a layer; see naive.KVAppend."""

    is_capturable = True

    def __init__(self, targets: Mapping[str, Target]) -> None:
        k, v = targets["k"].pages, targets["v"].pages
        exact = [pages for target in (targets["k"], targets["v"]) if (pages := target.exact)]
        widest = next_power_of_2(max(k.dim, v.dim))
        rows = min(next_power_of_2(k.heads), max(1, PROGRAM_VALUES // widest))
        self._dim, self._rows, self._groups = k.dim, rows, cdiv(k.heads, rows)
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
        self._append(streams, slot_mapping_T, exact_slot_mapping_T, len(slot_mapping_T), NO_QUERIES)

    def append_with_rope(
        self,
        q_THD: Tensor,
        streams: Mapping[str, Tensor],
        slot_mapping_T: Tensor,
        exact_slot_mapping_T: Tensor | None,
        rope: Rope,
        *,
        keeps_keys: bool,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Rotate queries and keys, and store `k` and `v`; see naive.append_with_rope()."""
        k_THD = streams["k"]
        if q_THD.shape[2] != self._dim or {q_THD.dtype, k_THD.dtype} != {rope.cos_TR.dtype}:
            return append_with_rope(
                self, q_THD, streams, slot_mapping_T, exact_slot_mapping_T, rope, keeps_keys=keeps_keys
            )
        out_THD = q_THD.new_empty(q_THD.shape)
        rotated = {"k": k_THD.new_empty(k_THD.shape)} if keeps_keys else {}
        queries = _Queries.of(_readable(q_THD), out_THD, rotated.get("k"), rope)
        self._append(streams, slot_mapping_T, exact_slot_mapping_T, len(q_THD), queries)
        return out_THD, {**rotated, "v": streams["v"]}

    def _append(
        self,
        streams: Mapping[str, Tensor],
        slot_mapping_T: Tensor,
        exact_slot_mapping_T: Tensor | None,
        tokens: int,
        queries: _Queries,
    ) -> None:
        """Launch the kernel for so many tokens, of which those that have slots are stored."""
        if not tokens:
            return
        k, v = _readable(streams["k"]), _readable(streams["v"])
        assert self._exact or exact_slot_mapping_T is None, "there are exact slots, but no exact pages"
        exact = NO_EXACT if exact_slot_mapping_T is None else (exact_slot_mapping_T, *self._exact)
        # A rehearsal runs few tokens behind rotary positions, and prompts have many.
        sizes = {*self._warps} if ahead.is_rehearsal() else {self._warps[tokens > FEW_TOKENS]}
        strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1), *queries.strides
        programs = 2 + cdiv(queries.heads or 0, self._groups * self._rows)
        constants = queries.width, queries.heads, queries.offset
        for warps in sizes:
            self._launches(
                append_heads_kernel, (tokens, self._groups, programs),
                (k, v, slot_mapping_T, exact[0], *strides, *queries.pointers, (warps, *constants)),
                (k, v, slot_mapping_T, *exact, *self._tensors, *queries.pointers, queries.eps, len(slot_mapping_T),
                 *strides, *self._constants, *constants),
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
    append_with_rope = append_with_rope

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
