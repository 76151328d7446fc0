"""The producer warps of sparse_gluon_sm90.py: they bring the rows of a list of slots, decoded, into shared memory.

Plain latents are copied asynchronously. Packed ones come through registers, a tile ahead of what is decoded. What the
words of a row mean is the decoders' business (codecs/), except that this GPU converts FP8 by instructions.

Shape suffixes: N latents of a tile, W words of a section. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from nibble.kernels.codecs import LATENTS
from nibble.kernels.codecs.nvfp4 import e4m3_scale
from nibble.kernels.codecs.tiles import ALIKE, APART, NO_ROPE, Section
from nibble.kernels.mla.gluon_sm90 import section_layouts

MAX_SCALE = tl.constexpr(128.0)
"""A scale with which no FP8 value leaves float16's range."""


# ---- FP8 by instructions of SM89 and later ---------------------------------------------------------------------------

DECODE_FOUR = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; mul.f16x2 $0, $0, $3; mul.f16x2 $1, $1, $3; }"
)
"""Four E4M3 codes of two words at once, even and odd ones, times the scales of both words."""
DECODE_FOUR_SCALES = tl.constexpr(
    "{ .reg .b32 f; .reg .b16 l, h; mov.b32 {l, h}, $2; mov.b32 f, 0x58005800; "
    "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; mul.f16x2 $0, $0, f; mul.f16x2 $1, $1, f; }"
)
"""Four E4M3 codes as e4m3_scale makes float16 of them: times 2^7."""


@triton.jit
def _decode_e4m3(items, scale, DTYPE: tl.constexpr):
    """Decode words of two E4M3 values, times their block scales."""
    OUT: tl.constexpr = (tl.float16, tl.float16)
    return tl.inline_asm_elementwise(DECODE_FOUR, "=&r,=&r,r,r", [items, scale], OUT, is_pure=True, pack=2)


@triton.jit
def _limited_scale(codes, DTYPE: tl.constexpr):
    """Return float32 scales in DTYPE, at most MAX_SCALE."""
    return tl.where(codes > MAX_SCALE, MAX_SCALE, codes).to(DTYPE)


@triton.jit
def _decode_e4m3_scale(codes, DTYPE: tl.constexpr):
    """Decode E4M3 block scales."""
    return tl.inline_asm_elementwise(
        DECODE_FOUR_SCALES, "=&r,=&r,r", [codes], tl.float16, is_pure=True, pack=4
    )


def with_fp8_instructions(format_name: str, section: Section) -> tuple[Section, float]:
    """Return the section, decoded by instructions of this GPU if there are any for its format.

    E4M3 values with float32 scales become float16: latents are not as large as to leave its range, and saturate if they
    are. What is lost in a tile of tiny ones is less than what its E4M3 values lack.

    Args:
        format_name: The format of the latents.
        section: The section of the latent proper.

    Returns:
        The section, and the factor that its decoded values must still be multiplied by.
    """
    decoder = LATENTS[format_name].decoder
    if decoder.scale is e4m3_scale and section.DTYPE.value == tl.float16:
        return section._replace(DECODE_SCALE=_decode_e4m3_scale), decoder.fold
    if section.PARTS.value == 2 and decoder.block and section.blocks.data.is_floating_point():
        in_fp16 = section._replace(
            DECODE=_decode_e4m3, DECODE_SCALE=_limited_scale, DTYPE=tl.constexpr(tl.float16)
        )
        return in_fp16, 1.0
    return section, decoder.fold


# ---- load ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_slots(slots, first, stop, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the slots of a tile; -1 past its end."""
    n_N = first + gl.arange(0, N, layout=LAYOUT)
    return gl.load(slots + n_N, mask=n_N < stop, other=-1)


@gluon.jit
def _row_offsets(plane, slot_N, PAGE_SIZE: gl.constexpr, EACH: gl.constexpr):
    """Return where each slot's row lies in a plane, in units of EACH items, and whether there is one."""
    keep_N = slot_N >= 0
    safe_N = gl.where(keep_N, slot_N, 0)
    if plane.PAGE == PAGE_SIZE * plane.SLOT:
        row_N = safe_N.to(gl.int64) * (plane.SLOT // EACH)
    else:
        row_N = (safe_N // PAGE_SIZE).to(gl.int64) * (plane.PAGE // EACH) + safe_N % PAGE_SIZE * (
            plane.SLOT // EACH
        )
    return row_N, keep_N


@gluon.jit
def _row_pointers(
    plane, slot_N, PAGE_SIZE: gl.constexpr, WIDTH: gl.constexpr, SKIP: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return pointers to WIDTH items of each slot's row from item SKIP on, and which of them there are."""
    item_W = SKIP + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    row_N, keep_N = _row_offsets(plane, slot_N, PAGE_SIZE, 1)
    at = (plane.data + row_N)[:, None] + item_W[None, :]
    return at, gl.expand_dims(keep_N, 1) & (item_W < plane.COUNT)[None, :]


@gluon.jit
def _load_rows(
    section, index, FIRST: gl.constexpr, N: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr
):
    """Load N rows of a tile to registers: pairs of words, and codes of block scales where each thread needs them."""
    # Two words in an integer of 32 bits: each alone would take as many registers.
    CODES: gl.constexpr = gl.SliceLayout(2, BLOCKS)
    slot_N = index.slice(FIRST, N).load(gl.SliceLayout(1, PAIRS))
    row_N, keep_N = _row_offsets(section.items, slot_N, section.PAGE_SIZE, 2)
    pair_W = gl.arange(0, section.items.WIDTH // 2, layout=gl.SliceLayout(0, PAIRS))
    keep = gl.expand_dims(keep_N, 1) & (pair_W < section.items.COUNT // 2)[None, :]
    data = section.items.data.to(gl.pointer_type(gl.int32), bitcast=True)
    pairs, codes = gl.load((data + row_N)[:, None] + pair_W[None, :], mask=keep, other=0), 0
    if section.EACH:
        slot_N = index.slice(FIRST, N).load(gl.SliceLayout(1, CODES))
        at, keep = _row_pointers(section.blocks, slot_N, section.PAGE_SIZE, section.blocks.WIDTH, 0, CODES)
        codes = gl.load(at, mask=keep, other=0)
    return pairs, codes


@gluon.jit
def _split_pairs(section, pairs, LAYOUT: gl.constexpr):
    """Return the words of pairs."""
    both = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16))
    items = gl.reshape(both, [pairs.shape[0], pairs.shape[1] * 2])
    items = gl.convert_layout(items, LAYOUT, assert_trivial=True)
    return items.to(section.items.data.dtype.element_ty, bitcast=True)


@gluon.jit
def _decode_rows(section, rows, tiles, stage, FIRST: gl.constexpr, ITEMS: gl.constexpr):
    """Decode rows of a tile, as _load_rows returned them, into shared memory, part by part."""
    items, wide = _split_pairs(section, rows[0], ITEMS), 0
    if section.EACH:
        scales = section.DECODE_SCALE(rows[1], section.DTYPE)
        EACH: gl.constexpr = items.shape[1] // scales.shape[1]
        spread = gl.expand_dims(scales, 2).broadcast_to([scales.shape[0], scales.shape[1], EACH])
        wide = gl.convert_layout(gl.reshape(spread, items.shape), ITEMS, assert_trivial=True)
    parts = section.DECODE(items, wide, section.DTYPE)
    for j in gl.static_range(len(parts)):
        tiles[j].index(stage).slice(FIRST, parts[j].shape[0], 0).store(parts[j])


@gluon.jit
def _start_copy(section, slot_N, tiles, stage, LAYOUT: gl.constexpr):
    """Start to copy a tile of plain values."""
    WIDTH: gl.constexpr = tiles[0].shape[2]
    for j in gl.static_range(len(tiles)):
        at, keep = _row_pointers(section.items, slot_N, section.PAGE_SIZE, WIDTH, j * WIDTH, LAYOUT)
        async_copy.async_copy_global_to_shared(tiles[j].index(stage), at, mask=keep)


@gluon.jit
def _store_biases(biases, stage, slot_N):
    """Store what is added to scores: -inf where there is no slot."""
    biases.index(stage).store(gl.where(slot_N >= 0, 0.0, float("-inf")))


# ---- the warps' loops ------------------------------------------------------------------------------------------------


@gluon.jit
def produce(
    latent, rope, tiles, rope_tiles, index, biases, full, empty, slots, start, stop, ROPE: gl.constexpr,
    N: gl.constexpr, ITEMS: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr,
    ROPE_ITEMS: gl.constexpr, ROPE_PAIRS: gl.constexpr, ROPE_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Fill the two stages in turn, each when it is empty.

    Args:
        latent: The section of the latent proper.
        rope: The section of rotary values.
        tiles: Shared memory [2, N, W] of each part of the latent proper.
        rope_tiles: The same of rotary values.
        index: Shared memory [N] for slots.
        biases: Shared memory [2, N] for what is added to scores.
        full: A barrier of each stage: it has been filled.
        empty: A barrier of each stage: it has been used.
        slots: Pointer to the list of slots.
        start: The first entry of the list.
        stop: The entry after the last.
        ROPE: NO_ROPE, ALIKE or APART.
        N: Latents of a tile.
        ITEMS: Layout of words of the latent proper.
        PAIRS: Layout of pairs of words.
        BLOCKS: Layout of blocks x words.
        ROPE_ITEMS: ITEMS of rotary values.
        ROPE_PAIRS: PAIRS of rotary values.
        ROPE_BLOCKS: BLOCKS of rotary values.
    """
    if latent.PARTS == 1:
        _produce_plain(
            latent, rope, tiles, rope_tiles, biases, full, empty, slots, start, stop, ROPE, N, ITEMS, ROPE_ITEMS
        )  # fmt: skip
    else:
        _produce_packed(
            latent, rope, tiles, rope_tiles, index, biases, full, empty, slots, start, stop, ROPE, N, ITEMS,
            PAIRS, BLOCKS, ROPE_ITEMS, ROPE_PAIRS, ROPE_BLOCKS,
        )  # fmt: skip


@gluon.jit
def _produce_plain(
    latent, rope, tiles, rope_tiles, biases, full, empty, slots, start, stop, ROPE: gl.constexpr,
    N: gl.constexpr, ITEMS: gl.constexpr, ROPE_ITEMS: gl.constexpr,
):  # fmt: skip
    """Copy plain latents. Slots are loaded a tile ahead, so that copies do not wait for them."""
    slot_N = _load_slots(slots, start, stop, N, gl.SliceLayout(1, ITEMS))
    for first in range(start, stop, N):
        turn = (first - start) // N
        stage = turn % 2
        next_slot_N = _load_slots(slots, first + N, stop, N, gl.SliceLayout(1, ITEMS))
        mbarrier.wait(empty.index(stage), (turn // 2 & 1) ^ 1)
        if ROPE != NO_ROPE:
            rope_slot_N = _load_slots(slots, first, stop, N, gl.SliceLayout(1, ROPE_ITEMS))
            _start_copy(rope, rope_slot_N, rope_tiles, stage, ROPE_ITEMS)
        _start_copy(latent, slot_N, tiles, stage, ITEMS)
        # Each thread's copies arrive by themselves; one more arrival is for the biases.
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        _store_biases(biases, stage, slot_N)
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage))
        slot_N = next_slot_N


@gluon.jit
def _produce_packed(
    latent, rope, tiles, rope_tiles, index, biases, full, empty, slots, start, stop, ROPE: gl.constexpr,
    N: gl.constexpr, ITEMS: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr, ROPE_ITEMS: gl.constexpr,
    ROPE_PAIRS: gl.constexpr, ROPE_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Load and decode packed latents."""
    # Rows are loaded a tile ahead, to registers, where they take no shared memory. Their slots are loaded two tiles
    # ahead, few to a thread.
    FEW: gl.constexpr = gl.BlockedLayout([N // 32], [32], [gl.num_warps()], [0])
    HALF: gl.constexpr = N // 2
    slot_N = _load_slots(slots, start, stop, N, FEW)
    index.store(slot_N)
    gl.thread_barrier()
    lower = _load_rows(latent, index, 0, HALF, PAIRS, BLOCKS)
    upper = _load_rows(latent, index, HALF, HALF, PAIRS, BLOCKS)
    rope_rows = upper
    if ROPE == ALIKE:
        rope_rows = _load_rows(rope, index, 0, N, ROPE_PAIRS, ROPE_BLOCKS)
    next_slot_N = _load_slots(slots, start + N, stop, N, FEW)
    for first in range(start, stop, N):
        # --- wait for an empty stage
        turn = (first - start) // N
        stage = turn % 2
        mbarrier.wait(empty.index(stage), (turn // 2 & 1) ^ 1)
        _store_biases(biases, stage, slot_N)
        if ROPE == APART:  # plain rotary values are copied while the rest is decoded
            rope_slot_N = index.load(gl.SliceLayout(1, ROPE_ITEMS))
            _start_copy(rope, rope_slot_N, rope_tiles, stage, ROPE_ITEMS)
            async_copy.commit_group()

        # --- decode
        _decode_rows(latent, lower, tiles, stage, 0, ITEMS)
        index.store(next_slot_N)
        gl.thread_barrier()
        if ROPE == ALIKE:
            _decode_rows(rope, rope_rows, rope_tiles, stage, 0, ROPE_ITEMS)
        _decode_rows(latent, upper, tiles, stage, HALF, ITEMS)
        if ROPE == APART:
            async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage))

        # --- load the next tile: behind the fence, which would wait for these loads too
        lower = _load_rows(latent, index, 0, HALF, PAIRS, BLOCKS)
        upper = _load_rows(latent, index, HALF, HALF, PAIRS, BLOCKS)
        if ROPE == ALIKE:
            rope_rows = _load_rows(rope, index, 0, N, ROPE_PAIRS, ROPE_BLOCKS)
        slot_N = next_slot_N
        next_slot_N = _load_slots(slots, first + 2 * N, stop, N, FEW)


def producer_layouts(section: Section, warps: int) -> tuple[Any, Any, Any]:
    """Return the layouts of a section's words, of pairs of them, and of blocks x words."""
    items_layout, blocks, _ = section_layouts(section, warps)
    pairs = gl.BlockedLayout(
        [1, 4], items_layout.threads_per_warp, items_layout.warps_per_cta, items_layout.order
    )
    return items_layout, pairs, blocks
