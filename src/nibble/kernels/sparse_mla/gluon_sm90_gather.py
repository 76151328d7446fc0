"""What gathers latents for sparse_hopper.py: warps that bring rows of chosen slots, decoded, into shared memory.

Plain latents are copied asynchronously. Packed ones come through registers, ahead of what is decoded. What the words of
a row mean is the decoders' business (decoders_latent.py), but that this GPU converts FP8 by instructions. Must not know
of attention.

Shape suffixes: N latents of a tile, W words of a section. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from nibble.kernels.codecs import LATENTS
from nibble.kernels.codecs.nvfp4 import e4m3_scale
from nibble.kernels.codecs.tiles import ALIKE, APART, NO_ROPE, Section
from nibble.kernels.mla.gluon_sm90 import _of_words

LARGEST_SCALE = tl.constexpr(128.0)
"""By which no FP8 value leaves float16's range."""


# ---- FP8 by instructions of SM89 and later ---------------------------------------------------------------------------

FOUR = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; mul.f16x2 $0, $0, $3; mul.f16x2 $1, $1, $3; }"
)
"""Four E4M3 codes of two words at once, even and odd ones, times the scales of both words."""
SCALES = tl.constexpr(
    "{ .reg .b32 f; .reg .b16 l, h; mov.b32 {l, h}, $2; mov.b32 f, 0x58005800; "
    "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; mul.f16x2 $0, $0, f; mul.f16x2 $1, $1, f; }"
)
"""Four E4M3 codes as decoders.e4m3_scale makes float16 of them: times 2^7."""


@triton.jit
def _e4m3_scaled(words, scale, DTYPE: tl.constexpr):
    OUT: tl.constexpr = (tl.float16, tl.float16)
    return tl.inline_asm_elementwise(FOUR, "=&r,=&r,r,r", [words, scale], OUT, is_pure=True, pack=2)


@triton.jit
def _half_scale(codes, DTYPE: tl.constexpr):
    return tl.where(codes > LARGEST_SCALE, LARGEST_SCALE, codes).to(DTYPE)


@triton.jit
def _e4m3_scale(codes, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(SCALES, "=&r,=&r,r", [codes], tl.float16, is_pure=True, pack=4)


def quicker(format_name: str, section: Section) -> tuple[Section, float]:
    """The section, decoded by those instructions if they can, and what its values must still be multiplied by.

    E4M3 values with float32 scales become float16: latents are not as large as to leave its range, and saturate if they
    are; what is lost in a tile of tiny ones is less than its E4M3 values lack.
    """
    decoder = LATENTS[format_name].decoder
    if decoder.scale is e4m3_scale and section.DTYPE.value == tl.float16:
        return section._replace(DECODE_SCALE=_e4m3_scale), decoder.fold
    if section.PARTS.value == 2 and decoder.block and section.blocks.data.is_floating_point():
        half = section._replace(DECODE=_e4m3_scaled, DECODE_SCALE=_half_scale, DTYPE=tl.constexpr(tl.float16))
        return half, 1.0
    return section, decoder.fold


# ---- rows ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _slots(slots, first, stop, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Slots of a tile; -1 past its end."""
    n_N = first + gl.arange(0, N, layout=LAYOUT)
    return gl.load(slots + n_N, mask=n_N < stop, other=-1)


@gluon.jit
def _row(plane, slot_N, PAGE_SIZE: gl.constexpr, EACH: gl.constexpr):
    """Where each slot's row lies in a plane, in units of so many items, and whether there is one."""
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
def _at(
    plane, slot_N, PAGE_SIZE: gl.constexpr, WIDTH: gl.constexpr, SKIP: gl.constexpr, LAYOUT: gl.constexpr
):
    """Where WIDTH items of each slot's row lie, the first SKIP left out, and which are there."""
    item_W = SKIP + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    row_N, keep_N = _row(plane, slot_N, PAGE_SIZE, 1)
    at = (plane.data + row_N)[:, None] + item_W[None, :]
    return at, gl.expand_dims(keep_N, 1) & (item_W < plane.COUNT)[None, :]


@gluon.jit
def _loaded(section, index, FIRST: gl.constexpr, N: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr):
    """Words of N rows of a tile, two in an integer of 32 bits, as each would take as many registers; and codes of block
    scales where each thread needs them.
    """
    CODES: gl.constexpr = gl.SliceLayout(2, BLOCKS)
    slot_N = index.slice(FIRST, N).load(gl.SliceLayout(1, PAIRS))
    row_N, keep_N = _row(section.words, slot_N, section.PAGE_SIZE, 2)
    pair_W = gl.arange(0, section.words.WIDTH // 2, layout=gl.SliceLayout(0, PAIRS))
    keep = gl.expand_dims(keep_N, 1) & (pair_W < section.words.COUNT // 2)[None, :]
    data = section.words.data.to(gl.pointer_type(gl.int32), bitcast=True)
    words, codes = gl.load((data + row_N)[:, None] + pair_W[None, :], mask=keep, other=0), 0
    if section.EACH:
        slot_N = index.slice(FIRST, N).load(gl.SliceLayout(1, CODES))
        at, keep = _at(section.blocks, slot_N, section.PAGE_SIZE, section.blocks.WIDTH, 0, CODES)
        codes = gl.load(at, mask=keep, other=0)
    return words, codes


@gluon.jit
def _words(section, pairs, LAYOUT: gl.constexpr):
    """Words out of pairs."""
    both = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16))
    words = gl.reshape(both, [pairs.shape[0], pairs.shape[1] * 2])
    words = gl.convert_layout(words, LAYOUT, assert_trivial=True)
    return words.to(section.words.data.dtype.element_ty, bitcast=True)


@gluon.jit
def _decoded(section, words, codes, WORDS: gl.constexpr):
    wide = 0
    if section.EACH:
        scales = section.DECODE_SCALE(codes, section.DTYPE)
        EACH: gl.constexpr = words.shape[1] // scales.shape[1]
        spread = gl.expand_dims(scales, 2).broadcast_to([scales.shape[0], scales.shape[1], EACH])
        wide = gl.convert_layout(gl.reshape(spread, words.shape), WORDS, assert_trivial=True)
    return section.DECODE(words, wide, section.DTYPE)


@gluon.jit
def _unpack(section, loaded, pieces, stage, FIRST: gl.constexpr, WORDS: gl.constexpr):
    """Decodes rows of a tile into shared memory, part by part."""
    parts = _decoded(section, _words(section, loaded[0], WORDS), loaded[1], WORDS)
    for j in gl.static_range(len(parts)):
        pieces[j].index(stage).slice(FIRST, parts[j].shape[0], 0).store(parts[j])


@gluon.jit
def _copy(section, slot_N, pieces, stage, LAYOUT: gl.constexpr):
    """Begins to copy a tile of plain values."""
    WIDTH: gl.constexpr = pieces[0].shape[2]
    for j in gl.static_range(len(pieces)):
        at, keep = _at(section.words, slot_N, section.PAGE_SIZE, WIDTH, j * WIDTH, LAYOUT)
        async_copy.async_copy_global_to_shared(pieces[j].index(stage), at, mask=keep)


@gluon.jit
def _hide(biases, stage, slot_N):
    """What scores are added to: nobody's are -inf."""
    biases.index(stage).store(gl.where(slot_N >= 0, 0.0, float("-inf")))


# ---- the warps' loops ------------------------------------------------------------------------------------------------


@gluon.jit
def gather(
    latent, rope, pieces, rope_pieces, index, biases, full, empty, slots, start, stop, ROPE: gl.constexpr,
    N: gl.constexpr, WORDS: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr,
    ROPE_WORDS: gl.constexpr, ROPE_PAIRS: gl.constexpr, ROPE_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Fills tiles in turn, each when it is empty."""
    if latent.PARTS == 1:
        _gather_plain(
            latent, rope, pieces, rope_pieces, biases, full, empty, slots, start, stop, ROPE, N, WORDS, ROPE_WORDS
        )  # fmt: skip
    else:
        _gather_packed(
            latent, rope, pieces, rope_pieces, index, biases, full, empty, slots, start, stop, ROPE, N, WORDS,
            PAIRS, BLOCKS, ROPE_WORDS, ROPE_PAIRS, ROPE_BLOCKS,
        )  # fmt: skip


@gluon.jit
def _gather_plain(
    latent, rope, pieces, rope_pieces, biases, full, empty, slots, start, stop, ROPE: gl.constexpr,
    N: gl.constexpr, WORDS: gl.constexpr, ROPE_WORDS: gl.constexpr,
):  # fmt: skip
    slot_N = _slots(slots, start, stop, N, gl.SliceLayout(1, WORDS))
    for first in range(start, stop, N):
        turn = (first - start) // N
        stage = turn % 2
        ahead_N = _slots(slots, first + N, stop, N, gl.SliceLayout(1, WORDS))
        mbarrier.wait(empty.index(stage), (turn // 2 & 1) ^ 1)
        if ROPE != NO_ROPE:
            rope_N = _slots(slots, first, stop, N, gl.SliceLayout(1, ROPE_WORDS))
            _copy(rope, rope_N, rope_pieces, stage, ROPE_WORDS)
        _copy(latent, slot_N, pieces, stage, WORDS)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        _hide(biases, stage, slot_N)
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage))
        slot_N = ahead_N


@gluon.jit
def _gather_packed(
    latent, rope, pieces, rope_pieces, index, biases, full, empty, slots, start, stop, ROPE: gl.constexpr,
    N: gl.constexpr, WORDS: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr, ROPE_WORDS: gl.constexpr,
    ROPE_PAIRS: gl.constexpr, ROPE_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Loads of what is decoded are a tile ahead, and stand in registers, where they take no shared memory; slots are
    known ahead of them, few to a thread. The fence would wait for loads: they begin behind it. Plain rotary values are
    copied while the rest is decoded.
    """
    FEW: gl.constexpr = gl.BlockedLayout([N // 32], [32], [gl.num_warps()], [0])
    HALF: gl.constexpr = N // 2
    slot_N = _slots(slots, start, stop, N, FEW)
    index.store(slot_N)
    gl.thread_barrier()
    lower = _loaded(latent, index, 0, HALF, PAIRS, BLOCKS)
    upper = _loaded(latent, index, HALF, HALF, PAIRS, BLOCKS)
    rotary = upper
    if ROPE == ALIKE:
        rotary = _loaded(rope, index, 0, N, ROPE_PAIRS, ROPE_BLOCKS)
    ahead_N = _slots(slots, start + N, stop, N, FEW)
    for first in range(start, stop, N):
        turn = (first - start) // N
        stage = turn % 2
        mbarrier.wait(empty.index(stage), (turn // 2 & 1) ^ 1)
        _hide(biases, stage, slot_N)
        if ROPE == APART:
            rope_N = index.load(gl.SliceLayout(1, ROPE_WORDS))
            _copy(rope, rope_N, rope_pieces, stage, ROPE_WORDS)
            async_copy.commit_group()
        _unpack(latent, lower, pieces, stage, 0, WORDS)
        index.store(ahead_N)
        gl.thread_barrier()
        if ROPE == ALIKE:
            _unpack(rope, rotary, rope_pieces, stage, 0, ROPE_WORDS)
        _unpack(latent, upper, pieces, stage, HALF, WORDS)
        if ROPE == APART:
            async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage))
        lower = _loaded(latent, index, 0, HALF, PAIRS, BLOCKS)
        upper = _loaded(latent, index, HALF, HALF, PAIRS, BLOCKS)
        if ROPE == ALIKE:
            rotary = _loaded(rope, index, 0, N, ROPE_PAIRS, ROPE_BLOCKS)
        slot_N = ahead_N
        ahead_N = _slots(slots, first + 2 * N, stop, N, FEW)


def layouts(section: Section, warps: int) -> tuple:
    """Of words, of pairs of them, and of blocks x words."""
    words, blocks, _ = _of_words(section, warps)
    pairs = gl.BlockedLayout([1, 4], words.threads_per_warp, words.warps_per_cta, words.order)
    return words, pairs, blocks
