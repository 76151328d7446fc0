"""Products of tokens with their experts in Triton, gates between them, and weighted sums behind them.

A few tokens: each expert that is chosen is read once, and no other.

A program takes some outputs of one expert and all tokens, of which those count that chose it: what it finds in the list
of choices by itself. So nothing is sorted beforehand, and the host need not know who chose what. Programs are told by
number which expert is theirs: of all, or, where there are much fewer choices than experts, of those that are chosen.

Matrices that are packed (matrices.py) are unpacked in registers, on the way to the tensor cores. Scales in the compute
dtype multiply sums of a group's products, other scales weights: both are exact. The tokens that chose an expert are
brought together in a narrow tile, as wide ones would take longer to multiply than codes to read. Many tokens come
sorted by their experts, and each tile of them reads the matrix anew, from the cache: a copy of all experts in bfloat16
would be written and read once, six times the bytes of FP8, for whatever number of tokens, and must have room.

Shape suffixes: M tokens, padded; K choices of a token, S of all tokens, both padded; N outputs; I inputs. Names in
capitals are constants of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import GPU, MMA_ROWS, cdiv, gpu_of, next_power_of_2
from nibble.kernels.codecs.small_floats import HAS_PTX, TWO_120
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.experts.decode import NVFP4_REST, factors, unpack
from nibble.kernels.experts.gate import SILU, Gate
from nibble.kernels.experts.matrices import PackedExperts
from nibble.kernels.weight_formats import parts_of, run_of

ROWS = (MMA_ROWS, 64)
"""Tokens of a tile: few sizes, so that few kernels are compiled."""
MAX_LISTED = 128
"""Choices up to which a program finds out by itself which expert is the n-th that is chosen."""
STEP_BYTES, STAGES = 1 << 14, 4
"""Bytes of weights that a program loads at a time, and how many times ahead: two programs of a processor have room."""
PACKED_BITS, PACKED_STAGES = 1024, 6
"""Bits of a row of packed matrices that a program loads at a time, and how many times ahead at most."""
SPARED = 16 << 10
"""Bytes of shared memory that loads leave for what else a program needs."""
SPREAD = 2
"""Times the mean number of an expert's tokens that a tile has room for."""
MANY_ROWS, MANY_OUTPUTS = (64, 128), 128
"""Tokens and outputs of a tile where there are many."""
GATE_BLOCK, COMBINE_BLOCK = 1024, 512
"""Outputs of a program at most."""


@triton.jit
def _take_expert(experts, choices, number, EXPERTS: tl.constexpr, S: tl.constexpr):
    """Return expert number `number` of those that are chosen, EXPERTS if there are not so many."""
    s_S = tl.arange(0, S)
    chosen_S = tl.load(experts + s_S, mask=s_S < choices, other=EXPERTS).to(tl.int32)
    same = chosen_S[:, None] == chosen_S[None, :]
    first_S = (tl.min(tl.where(same, s_S[None, :], S), 1) == s_S) & (chosen_S < EXPERTS)
    is_it_S = first_S & (tl.cumsum(first_S.to(tl.int32)) == number + 1)
    return tl.min(tl.where(is_it_S, chosen_S, EXPERTS))


@triton.jit
def _plain_product(
    weight, stride_N, stride_I, x, row_M, x_stride, live_M, n, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BI: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile of outputs in float32, [N, M]; the weight is on the left, where it fills a tile."""
    i = tl.arange(0, BI)
    weight_at = weight + n[:, None].to(tl.int64) * stride_N + i[None, :].to(tl.int64) * stride_I
    x_at = x + row_M.to(tl.int64)[None, :] * x_stride + i[:, None]
    sum_NM = tl.zeros((n.shape[0], row_M.shape[0]), tl.float32)
    for start in tl.range(0, INPUTS, BI, num_stages=STAGES):
        keep_I = start + i < INPUTS
        # It is read once, and must not push x out of the cache.
        weight_NI = tl.load(
            weight_at, mask=(n < OUTPUTS)[:, None] & keep_I[None, :], other=0.0, eviction_policy="evict_first"
        )
        x_IM = tl.load(x_at + start, mask=keep_I[:, None] & live_M[None, :], other=0.0)
        sum_NM = tl.dot(weight_NI, x_IM, sum_NM, input_precision="ieee")
        weight_at += BI * stride_I
    return sum_NM


@triton.jit
def _wait_for_products(sum_NM):
    """Return sums in float32 as they are, when the products that they are the result of have ended.

    SM90's products read unpacked weights from registers while the program goes on. Triton lets a loop's last product
    run into the next step, and that writes these registers before it waits, with pointers at times: PTX does not say
    what is multiplied then. No instruction is made here, but before a use that is no product Triton waits. (PTX ISA,
    "wgmma.wait_group"; triton-lang/triton, issue 9433)
    """
    if HAS_PTX:
        sum_NM = tl.inline_asm_elementwise("", "=f,0", [sum_NM], tl.float32, is_pure=False, pack=1)
    return sum_NM


@triton.jit
def _packed_product(
    codes, scale, global_scale, expert, x, row_M, x_stride, live_M, n, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, PARTS: tl.constexpr,
    RUN: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile of outputs in float32, [N, M], of matrices that are packed.

    Each of a word's codes has a tile of its own, and so have the inputs that it is multiplied with. Scales in the
    compute dtype multiply the sums of a step, which is no more than a group.
    """
    M: tl.constexpr = row_M.shape[0]
    BW: tl.constexpr = BI // PARTS
    WIDTH: tl.constexpr = INPUTS // PARTS
    GROUPS: tl.constexpr = INPUTS // GROUP if GROUP else 1
    EVEN: tl.constexpr = INPUTS % BI == 0
    w = tl.arange(0, BW)
    # Masks are computed at each step, which takes as long as unpacking; most shapes need none.
    keep_N = n < OUTPUTS if OUTPUTS % BN else tl.full((BN,), 1, tl.int1)
    codes_at = codes + expert.to(tl.int64) * (OUTPUTS * WIDTH) + n[:, None] * WIDTH + w[None, :]
    scale_N = scale + expert.to(tl.int64) * (GROUPS * OUTPUTS) + n
    i_W = w // RUN * (RUN * PARTS) + w % RUN
    x_at = x + row_M.to(tl.int64)[None, :] * x_stride + i_W[:, None]
    sum_NM = tl.zeros((BN, M), tl.float32)
    if SCALES == "":
        factor_NW = tl.full((BN, BW), TWO_120, tl.bfloat16)
        next_N = tl.load(scale_N, mask=keep_N, other=0.0)
    for start in tl.range(0, INPUTS, BI, num_stages=STAGES):
        keep_NW = keep_N[:, None] if EVEN else keep_N[:, None] & (start // PARTS + w < WIDTH)[None, :]
        codes_NW = tl.load(codes_at + start // PARTS, mask=keep_NW, other=0, eviction_policy="evict_first")
        # --- unpack
        if SCALES != "":
            GROUP_WIDTH: tl.constexpr = GROUP // PARTS
            STEP_GROUPS: tl.constexpr = BI // GROUP
            g = start // GROUP + tl.arange(0, STEP_GROUPS)
            keep_GN = keep_N[None, :] if EVEN else keep_N[None, :] & (g < GROUPS)[:, None]
            scale_GN = tl.load(scale_N[None, :] + g[:, None] * OUTPUTS, mask=keep_GN, other=0)
            factor_NG = tl.trans(factors(scale_GN, CODES, SCALES))
            factor_NGW = tl.broadcast_to(factor_NG[:, :, None], (BN, STEP_GROUPS, GROUP_WIDTH))
            factor_NW = tl.reshape(factor_NGW, (BN, BW))
        parts = unpack(codes_NW, factor_NW, CODES, x.dtype.element_ty)
        # --- multiply
        part_NM = sum_NM
        if SCALES == "" and GROUP > 0:
            part_NM = tl.zeros((BN, M), tl.float32)
        for part in tl.static_range(PARTS):
            at_W = start + part * RUN + i_W
            keep_WM = live_M[None, :] if EVEN else live_M[None, :] & (at_W < INPUTS)[:, None]
            x_WM = tl.load(x_at + start + part * RUN, mask=keep_WM, other=0.0)
            part_NM = tl.dot(parts[part], x_WM, part_NM, input_precision="ieee")
        # --- scale
        if SCALES == "" and GROUP > 0:
            sum_NM += part_NM * next_N.to(tl.float32)[:, None]
            # One step ahead: it is not read by a product, so nothing else loads it ahead.
            next_at = (start + BI) // GROUP + tl.zeros((BN,), tl.int32)
            next_N = tl.load(scale_N + next_at * OUTPUTS, mask=keep_N & (next_at < GROUPS), other=0.0)
        else:
            sum_NM = _wait_for_products(part_NM)
    if SCALES == "" and GROUP == 0:
        sum_NM *= next_N.to(tl.float32)[:, None]
    if SCALES == "e4m3":
        at = global_scale + expert.to(tl.int64) * OUTPUTS + n
        sum_NM *= tl.load(at, mask=keep_N, other=0.0)[:, None] * 2.0**NVFP4_REST
    return sum_NM


@triton.jit
def _select(live_M, first, C: tl.constexpr):
    """Return which are the C live ones from number `first` on, and how many of these there are."""
    rank_M = tl.cumsum(live_M.to(tl.int32)) - 1 - first
    m_M, c_C = tl.arange(0, live_M.shape[0]), tl.arange(0, C)
    is_it_CM = live_M[None, :] & (rank_M[None, :] == c_C[:, None])
    return tl.sum(tl.where(is_it_CM, m_M[None, :], 0), 1), c_C < tl.sum(live_M.to(tl.int32)) - first


@triton.jit(do_not_specialize=["tokens"])
def few_kernel(
    x, experts, weight, scale, global_scale, bias, out, places, tokens, x_stride, weight_stride_E, weight_stride_N,
    weight_stride_I, bias_stride, EXPERTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    TOP_K: tl.constexpr, EACH: tl.constexpr, SINGLE: tl.constexpr, DISTINCT: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, STAGES: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens of one expert with BN rows of its matrix. Grid: outputs / BN, experts.

    EACH: whether each choice has a row of x, and not each token. SINGLE: there is one token, and a program takes the
    expert of one of its choices. DISTINCT: a program takes the n-th of all chosen experts. places: which row of the
    output each choice has is written there. BM: tokens that are multiplied at a time. CODES: empty for a plain weight.
    """
    wait_for_inputs(PDL)
    # --- which expert
    expert = tl.program_id(1)
    if places is not None:  # noqa: SIM102 (decided when it is compiled)
        if tl.program_id(0) + expert == 0:
            s_S = tl.arange(0, M * K)
            tl.store(places + s_S, s_S.to(tl.int64), mask=s_S < tokens * TOP_K)
    if SINGLE:
        expert = tl.load(experts + expert).to(tl.int32)
    elif DISTINCT:
        expert = _take_expert(experts, tokens * TOP_K, expert, EXPERTS, M * K)
    if expert >= EXPERTS:
        return
    # --- which tokens, and their choices
    m_M, k_K = tl.arange(0, M), tl.arange(0, K)
    keep_MK = (m_M < tokens)[:, None] & (k_K < TOP_K)[None, :]
    chosen_MK = tl.load(experts + m_M[:, None] * TOP_K + k_K[None, :], mask=keep_MK, other=EXPERTS)
    # Where a token chose it twice, one of both rows is computed: they are the same.
    choice_M = tl.max(tl.where(chosen_MK == expert, k_K[None, :] + 1, 0), 1)
    if tl.max(choice_M) == 0:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    # A single turn is no loop.
    stop = tl.sum((choice_M > 0).to(tl.int32)) if BM < M else 1
    for first in range(0, stop, BM):
        m, live, choice = m_M, choice_M > 0, choice_M
        if BM < M:
            m, live = _select(choice_M > 0, first, BM)
            choice_at = experts + m[:, None] * TOP_K + k_K[None, :]
            mine = tl.load(choice_at, mask=(k_K < TOP_K)[None, :], other=EXPERTS)
            choice = tl.max(tl.where(mine == expert, k_K[None, :] + 1, 0), 1)
        # --- product
        row = m * TOP_K + choice - 1 if EACH else m
        if CODES == "":
            weight_E = weight + expert.to(tl.int64) * weight_stride_E
            sum_NM = _plain_product(
                weight_E,
                weight_stride_N,
                weight_stride_I,
                x,
                row,
                x_stride,
                live,
                n,
                OUTPUTS,
                INPUTS,
                BI,
                STAGES,
            )
        else:
            sum_NM = _packed_product(
                weight, scale, global_scale, expert, x, row, x_stride, live, n, OUTPUTS, INPUTS, CODES, GROUP,
                SCALES, PARTS, RUN, BN, BI, STAGES,
            )  # fmt: skip
        # --- store
        if bias is not None:
            bias_N = tl.load(bias + expert * bias_stride + n, mask=n < OUTPUTS, other=0.0)
            sum_NM += bias_N[:, None].to(tl.float32)
        y_NM, keep_NM = sum_NM.to(out.dtype.element_ty), (n < OUTPUTS)[:, None] & live[None, :]
        for k in tl.static_range(TOP_K):
            chose = tl.load(experts + m * TOP_K + k, mask=live, other=EXPERTS) == expert
            out_at = out + (m * TOP_K + k).to(tl.int64)[None, :] * OUTPUTS + n[:, None]
            tl.store(out_at, y_NM, mask=keep_NM & chose[None, :])


@triton.jit
def many_kernel(
    x, order, ends, codes, scale, global_scale, bias, out, x_stride, bias_stride, EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BI: tl.constexpr, STAGES: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows, which are sorted by their experts, with BN rows of a packed matrix.

    Tiles begin anew with each expert. Grid: outputs / BN, and as many tiles of rows as there may be. order: choices as
    they are sorted, where x has the rows of tokens; None where it has sorted rows.
    """
    wait_for_inputs(PDL)
    # --- which expert and rows
    tile, e_E = tl.program_id(1), tl.arange(0, E)
    end_E = tl.load(ends + e_E, mask=e_E < EXPERTS, other=0)
    start_E = tl.load(ends + e_E - 1, mask=(e_E > 0) & (e_E < EXPERTS), other=0)
    tiles_E = tl.where(e_E < EXPERTS, tl.cdiv(end_E - start_E, BM), 0)
    stop_E = tl.cumsum(tiles_E)
    expert = tl.sum((stop_E <= tile).to(tl.int32))
    if expert >= EXPERTS:
        return
    is_mine_E = e_E == expert
    start, end = tl.sum(tl.where(is_mine_E, start_E, 0)), tl.sum(tl.where(is_mine_E, end_E, 0))
    s_M = start + (tile - tl.sum(tl.where(is_mine_E, stop_E - tiles_E, 0))) * BM + tl.arange(0, BM)
    live_M, n = s_M < end, tl.program_id(0) * BN + tl.arange(0, BN)
    row_M = s_M
    if order is not None:
        row_M = tl.load(order + s_M, mask=live_M, other=0) // TOP_K
    # --- product
    sum_NM = _packed_product(
        codes, scale, global_scale, expert, x, row_M, x_stride, live_M, n, OUTPUTS, INPUTS, CODES,
        GROUP, SCALES, PARTS, RUN, BN, BI, STAGES,
    )  # fmt: skip
    # --- store
    if bias is not None:
        bias_N = tl.load(bias + expert * bias_stride + n, mask=n < OUTPUTS, other=0.0)
        sum_NM += bias_N[:, None].to(tl.float32)
    out_MN = out + s_M.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    y_MN = tl.trans(sum_NM.to(out.dtype.element_ty))
    tl.store(out_MN, y_MN, mask=live_M[:, None] & (n < OUTPUTS)[None, :])


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program is tiled."""

    outputs: int
    inputs: int
    """Of a step."""
    warps: int = 4
    stages: int = STAGES


def tile_of(matrices: int, rows: int, outputs: int, inputs: int, item: int, gpu: GPU) -> Tile:
    """Choose the tile: as many outputs as leave three programs to every two processors.

    Args:
        matrices: Experts that are read, at most.
        rows: Tokens of a tile.
        outputs: Of an expert.
        inputs: Of an expert.
        item: Bytes of a weight.
        gpu: Sizes of the GPU.
    """
    width = next((n for n in (64, 32) if 2 * matrices * cdiv(outputs, n) >= 3 * gpu.processors), 16)
    step = min(STEP_BYTES // (width * item), 256, max(next_power_of_2(inputs), MMA_ROWS))
    fitting = (n for n in range(STAGES, 1, -1) if n * step * (width + rows) * item <= gpu.memory)
    return Tile(width, step, stages=next(fitting, 1))


def packed_tile(experts: PackedExperts, matrices: int, rows: int, gpu: GPU) -> Tile:
    """Choose the tile of packed matrices for few tokens; two programs share a processor's memory.

    Args:
        experts: The matrices.
        matrices: Experts that are read, at most.
        rows: Tokens of a tile.
        gpu: Sizes of the GPU.
    """
    _, outputs, inputs = experts.shape
    width = tile_of(matrices, rows, outputs, inputs, 1, gpu).outputs
    step = _step(experts, PACKED_BITS)
    return Tile(width, step, stages=_stages(experts, width, rows, step, gpu.memory // 2))


def many_tile(experts: PackedExperts, rows: int, gpu: GPU) -> Tile:
    """Choose the tile of packed matrices for many tokens, `rows` of them in a program."""
    step = _step(experts, PACKED_BITS // 2)
    return Tile(MANY_OUTPUTS, step, 8, _stages(experts, MANY_OUTPUTS, rows, step, gpu.memory - SPARED))


def _step(experts: PackedExperts, bits: int) -> int:
    """Return the inputs of a step that has so many bits of a row: where scales multiply sums, those of a group."""
    format = experts.format
    step = format.group if format.group and not format.scales else bits // format.bits
    # Of a narrow matrix the smallest that the tensor cores take.
    return max(min(step, next_power_of_2(experts.shape[2])), MMA_ROWS * parts_of(format))


def _stages(experts: PackedExperts, outputs: int, rows: int, step: int, memory: int) -> int:
    loaded = step * (outputs * experts.format.bits // 8 + 2 * rows)
    return next((n for n in range(PACKED_STAGES, 1, -1) if n * loaded <= memory), 1)


def _format_of(experts: PackedExperts) -> tuple[object, ...]:
    """Return what kernels are told of a format."""
    format = experts.format
    return format.codes, format.group, format.scales, parts_of(format), run_of(format)


def few_product(
    x: Tensor, experts_TK: Tensor, weight_ENI: Tensor | PackedExperts, bias_EN: Tensor | None, *,
    places_S: Tensor | None = None, tile: Tile | None = None, together: int = 0,
) -> Tensor:  # fmt: skip
    """Multiply the row of each choice with the matrix of its expert, as naive.product defines it, in one launch.

    Args:
        x: [T, I] or [S, I].
        experts_TK: The experts that tokens chose; rows of E and more hold anything. Where a token chose one twice, both
            rows of x must be the same.
        weight_ENI: Matrices, with any strides, or packed.
        bias_EN: Added to each row, if there is one.
        places_S: Int64: it receives which row of the result each choice has.
        tile: Another tile than the fastest.
        together: How many tokens of an expert are multiplied at a time; 0 for the fastest.
    """
    (tokens, top_k), (experts, outputs, inputs) = experts_TK.shape, weight_ENI.shape
    choices = tokens * top_k
    out_SN = x.new_empty(choices, outputs)
    if not choices:
        return out_SN
    rows, columns = next(rows for rows in ROWS if rows >= tokens), next_power_of_2(top_k)
    gpu, matrices = gpu_of(x.device), min(choices, experts)
    if isinstance(weight_ENI, PackedExperts):
        together = together or min(rows, max(MMA_ROWS, next_power_of_2(cdiv(choices * SPREAD, experts))))
        tile = tile or packed_tile(weight_ENI, matrices, together, gpu)
        tensors: tuple[Tensor | None, ...] = weight_ENI.codes, weight_ENI.scale, weight_ENI.global_scale
        strides: tuple[int, ...] = (0, 0, 0)
        format = _format_of(weight_ENI)
    else:
        together = rows
        tile = tile or tile_of(matrices, rows, outputs, inputs, weight_ENI.itemsize, gpu)
        tensors, strides, format = (weight_ENI, None, None), weight_ENI.stride(), ("", 0, "", 1, 1)
    single, distinct = tokens == 1, choices < experts and rows * columns <= MAX_LISTED
    x, options = x if x.stride(1) == 1 else x.contiguous(), launch_options(gpu)
    few_kernel[(cdiv(outputs, tile.outputs), choices if single or distinct else experts)](
        x, experts_TK.contiguous(), *tensors, bias_EN, out_SN, places_S, tokens, x.stride(0), *strides,
        0 if bias_EN is None else bias_EN.stride(0), experts, outputs, inputs, top_k, len(x) != tokens, single,
        distinct, rows, columns, together, tile.outputs, tile.inputs, tile.stages, *format,
        bool(options), num_warps=tile.warps, **options,
    )  # fmt: skip
    return out_SN


def many_product(
    x: Tensor, order_S: Tensor | None, top_k: int, ends_E: Tensor, experts: PackedExperts, bias_EN: Tensor | None
) -> Tensor:  # fmt: skip
    """Multiply rows that are sorted by their experts with packed matrices -> [S, N]; rows of no expert hold anything.

    Args:
        x: Sorted rows [S, I], or, with an order, those of tokens [T, I].
        order_S: Choices in their order.
        top_k: Choices of a token.
        ends_E: Int32, behind which row each expert's rows end.
        experts: The matrices.
        bias_EN: Added to each row, if there is one.
    """
    rows = len(x) if order_S is None else len(order_S)
    count, outputs, inputs = experts.shape
    out_SN, x = x.new_empty(rows, outputs), x if x.stride(1) == 1 else x.contiguous()
    gpu = gpu_of(x.device)
    # Of experts with few tokens each, and where memory is small, narrow ones.
    is_wide = rows >= MANY_ROWS[1] * count and many_tile(experts, MANY_ROWS[1], gpu).stages > 1
    together = MANY_ROWS[is_wide]
    tile = many_tile(experts, together, gpu)
    # Each expert's last tile has room.
    tiles, options = cdiv(rows, together) + min(count, rows), launch_options(gpu)
    many_kernel[(cdiv(outputs, tile.outputs), tiles)](
        x, order_S, ends_E, experts.codes, experts.scale, experts.global_scale, bias_EN, out_SN, x.stride(0),
        0 if bias_EN is None else bias_EN.stride(0), count, outputs, inputs, top_k, next_power_of_2(count), together,
        tile.outputs, tile.inputs, tile.stages, *_format_of(experts), bool(options), num_warps=tile.warps,
        **options,
    )  # fmt: skip
    return out_SN


@triton.jit
def gate_kernel(y, out, outputs, limit, factor, IS_SILU: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """Compute B outputs of a row. Grid: rows, outputs / B."""
    wait_for_inputs(PDL)
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    y_at, keep = y + row * 2 * outputs, n < outputs
    if IS_SILU:
        a = tl.load(y_at + n, mask=keep, other=0.0).to(tl.float32)
        b = tl.load(y_at + outputs + n, mask=keep, other=0.0).to(tl.float32)
        joined = a * tl.sigmoid(a) * b
    else:
        # Comparisons let NaN through.
        a = tl.load(y_at + 2 * n, mask=keep, other=0.0).to(tl.float32)
        b = tl.load(y_at + 2 * n + 1, mask=keep, other=0.0).to(tl.float32)
        a = tl.where(a > limit, limit, a)
        b = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b))
        joined = a * tl.sigmoid(factor * a) * (b + 1)
    tl.store(out + row * outputs + n, joined.to(out.dtype.element_ty), mask=keep)


def gated(y_SN: Tensor, gate: Gate) -> Tensor:
    """Return what a gate leaves of contiguous outputs [S, 2 N] -> [S, N]."""
    rows, outputs = len(y_SN), y_SN.shape[1] // 2
    out_SN = y_SN.new_empty(rows, outputs)
    if rows:
        options, block = launch_options(gpu_of(y_SN.device)), min(GATE_BLOCK, next_power_of_2(outputs))
        gate_kernel[(rows, cdiv(outputs, block))](
            y_SN, out_SN, outputs, gate.limit, gate.factor, gate.kind == SILU, block, bool(options), **options
        )
    return out_SN


@triton.jit
def combine_kernel(y, places, chosen, weights, out, outputs, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
                   B: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Weight and sum up B outputs of a token's rows, in order. Grid: tokens, outputs / B."""
    wait_for_inputs(PDL)
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    sum_B = tl.zeros((B,), tl.float32)
    for k in tl.static_range(TOP_K):
        choice = token * TOP_K + k
        row = choice
        if places is not None:
            row = tl.load(places + choice)
        # Rows of no expert hold anything.
        is_there = tl.load(chosen + choice) < EXPERTS
        y_B = tl.load(y + row * outputs + n, mask=n < tl.where(is_there, outputs, 0), other=0.0).to(
            tl.float32
        )
        weight = tl.load(weights + choice).to(tl.float32)
        sum_B += tl.where(is_there, weight, 0.0) * y_B
    tl.store(out + token * outputs + n, sum_B.to(out.dtype.element_ty), mask=n < outputs)


def combined(
    y_SN: Tensor, places_S: Tensor | None, experts_TK: Tensor, weights_TK: Tensor, experts: int
) -> Tensor:
    """Return the weighted sums of tokens' rows, as naive.combined() defines them."""
    (tokens, top_k), outputs = experts_TK.shape, y_SN.shape[1]
    out_TN = y_SN.new_empty(tokens, outputs)
    if tokens:
        options, block = launch_options(gpu_of(y_SN.device)), min(COMBINE_BLOCK, next_power_of_2(outputs))
        combine_kernel[(tokens, cdiv(outputs, block))](
            y_SN, places_S, experts_TK.contiguous(), weights_TK.contiguous(), out_TN, outputs, experts, top_k, block,
            bool(options), **options,
        )  # fmt: skip
    return out_TN
