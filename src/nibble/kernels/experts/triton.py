"""Products of a few tokens with their experts in Triton: each expert that is chosen is read once, and no other.

A program takes some outputs of one expert and all tokens, of which those count that chose it: what it finds in the list
of choices by itself. So nothing is sorted beforehand, and the host need not know who chose what. Programs are told by
number which expert is theirs: of all, or, where there are much fewer choices than experts, of those that are chosen.

Shape suffixes: M tokens, padded; K choices of a token, S of all tokens, both padded; N outputs; I inputs. Names in
capitals are constants of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import GPU, MMA_ROWS, cdiv, gpu_of, next_power_of_2

ROWS = (MMA_ROWS, 64)
"""Tokens of a tile: few sizes, so that few kernels are compiled."""
MAX_LISTED = 128
"""Choices up to which a program finds out by itself which expert is the n-th that is chosen."""
STEP_BYTES, STAGES = 1 << 14, 4
"""Bytes of weights that a program loads at a time, and how many times ahead: two programs of a processor have room."""


@triton.jit
def _take_expert(experts, choices, number, EXPERTS: tl.constexpr, S: tl.constexpr):
    """Return expert number `number` of those that are chosen, EXPERTS if there are not so many."""
    s_S = tl.arange(0, S)
    chosen_S = tl.load(experts + s_S, mask=s_S < choices, other=EXPERTS).to(tl.int32)
    same = chosen_S[:, None] == chosen_S[None, :]
    first_S = (tl.min(tl.where(same, s_S[None, :], S), 1) == s_S) & (chosen_S < EXPERTS)
    is_it_S = first_S & (tl.cumsum(first_S.to(tl.int32)) == number + 1)
    return tl.min(tl.where(is_it_S, chosen_S, EXPERTS))


@triton.jit(do_not_specialize=["tokens"])
def few_kernel(
    x, experts, weight, bias, out, places, tokens, x_stride, weight_stride_E, weight_stride_N, weight_stride_I,
    bias_stride, EXPERTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TOP_K: tl.constexpr,
    EACH: tl.constexpr, SINGLE: tl.constexpr, DISTINCT: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BI: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens of one expert with BN rows of its matrix. Grid: outputs / BN, experts.

    EACH: whether each choice has a row of x, and not each token. SINGLE: there is one token, and a program takes the
    expert of one of its choices. DISTINCT: a program takes the n-th of all chosen experts. places: which row of the
    output each choice has is written there.
    """
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
    live_M = choice_M > 0
    if tl.max(choice_M) == 0:
        return
    row_M = m_M * TOP_K + choice_M - 1
    # --- product: the weight is on the left, where its rows fill a tile
    n, i = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BI)
    weight += expert.to(tl.int64) * weight_stride_E
    weight_at = weight + n[:, None].to(tl.int64) * weight_stride_N + i[None, :].to(tl.int64) * weight_stride_I
    x_at = x + (row_M if EACH else m_M).to(tl.int64)[None, :] * x_stride + i[:, None]
    sum_NM = tl.zeros((BN, M), tl.float32)
    for start in tl.range(0, INPUTS, BI, num_stages=STAGES):
        keep_I = start + i < INPUTS
        # It is read once, and must not push x out of the cache.
        weight_NI = tl.load(
            weight_at, mask=(n < OUTPUTS)[:, None] & keep_I[None, :], other=0.0, eviction_policy="evict_first"
        )
        x_IM = tl.load(x_at + start, mask=keep_I[:, None] & live_M[None, :], other=0.0)
        sum_NM = tl.dot(weight_NI, x_IM, sum_NM, input_precision="ieee")
        weight_at += BI * weight_stride_I
    # --- store
    if bias is not None:
        sum_NM += tl.load(bias + expert * bias_stride + n, mask=n < OUTPUTS, other=0.0)[:, None].to(
            tl.float32
        )
    y_NM, keep_NM = sum_NM.to(out.dtype.element_ty), (n < OUTPUTS)[:, None] & live_M[None, :]
    for k in tl.static_range(TOP_K):
        chose_M = tl.load(experts + m_M * TOP_K + k, mask=live_M, other=EXPERTS) == expert
        out_at = out + (m_M * TOP_K + k).to(tl.int64)[None, :] * OUTPUTS + n[:, None]
        tl.store(out_at, y_NM, mask=keep_NM & chose_M[None, :])


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


def few_product(
    x: Tensor, experts_TK: Tensor, weight_ENI: Tensor, bias_EN: Tensor | None, *, places_S: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Multiply the row of each choice with the matrix of its expert, as naive.product defines it, in one launch.

    Args:
        x: [T, I] or [S, I].
        experts_TK: The experts that tokens chose; rows of E and more hold anything. Where a token chose one twice, both
            rows of x must be the same.
        weight_ENI: Matrices, with any strides.
        bias_EN: Added to each row, if there is one.
        places_S: Int64: it receives which row of the result each choice has.
        tile: Another tile than the fastest.
    """
    (tokens, top_k), (experts, outputs, inputs) = experts_TK.shape, weight_ENI.shape
    choices = tokens * top_k
    out_SN = x.new_empty(choices, outputs)
    if not choices:
        return out_SN
    rows, columns = next(rows for rows in ROWS if rows >= tokens), next_power_of_2(top_k)
    item, gpu = weight_ENI.itemsize, gpu_of(x.device)
    tile = tile or tile_of(min(choices, experts), rows, outputs, inputs, item, gpu)
    single, distinct = tokens == 1, choices < experts and rows * columns <= MAX_LISTED
    x = x if x.stride(1) == 1 else x.contiguous()
    few_kernel[(cdiv(outputs, tile.outputs), choices if single or distinct else experts)](
        x, experts_TK.contiguous(), weight_ENI, bias_EN, out_SN, places_S, tokens, x.stride(0), *weight_ENI.stride(),
        0 if bias_EN is None else bias_EN.stride(0), experts, outputs, inputs, top_k, len(x) != tokens, single,
        distinct, rows, columns, tile.outputs, tile.inputs, tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out_SN
