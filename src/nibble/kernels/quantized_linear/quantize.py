"""Matrices as they are kept packed (kernels/weight_formats.py), of plain ones: rounded to nearest, by block.

A scale follows from the values of its block alone (of NVFP4, and a global scale of the matrix):

    fp8     scale = amax / 448, of blocks of 128 x 128        DeepSeek V3, `weight_scale_inv`
    int4    scale = amax / 7.5, of 128 inputs                 compressed-tensors, symmetric: from -8 to 7
    nvfp4   E4M3 scales under global = amax / (6 * 448)       formats/nvfp4.py
    mxfp4   E8M0 scales                                       formats/mx.py

Scales of FP8 and INT4 are rounded to the compute dtype first, and codes are the nearest under the rounded ones. Those
of 4-bit floats are chosen as a cache chooses them: of a few around amax's, the one with the least squared error.

Shape suffixes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble import formats
from nibble.formats.base import E2M1_MAX
from nibble.kernels.quantized_linear.matrix import PackedMatrix
from nibble.kernels.quantized_linear.naive import dequantize, pack_words
from nibble.kernels.weight_formats import E4M3_MAX, WORD, WeightFormat

E2M1_FORMATS = {"e4m3": "nvfp4", "e8m0": "mxfp4"}
"""Names of formats by that of their scales."""
ENCODER = "sweep"
"""How block scales of 4-bit floats are chosen (formats/base.py, ENCODERS)."""
ROWS = 4096
"""Outputs that are quantised at a time."""


def quantize(
    weight_NK: Tensor, format: WeightFormat, dtype: torch.dtype, block_rows: int = 1
) -> PackedMatrix:
    """Return a matrix of finite values in a format, on its device.

    Args:
        weight_NK: [N, K], whole groups of inputs.
        format: Without zero points.
        dtype: The compute dtype.
        block_rows: Outputs that share a scale; ROWS is a multiple of it.
    """
    format = replace(format, group=0) if format.group == weight_NK.shape[1] else format
    global_scale = _global_scale(weight_NK) if format.has_global else None
    parts = [
        _quantize(part.float().contiguous(), format, dtype, block_rows, global_scale)
        for part in weight_NK.split(ROWS)
    ]
    codes, scale = (torch.cat(column) for column in zip(*parts, strict=True))
    return PackedMatrix(format, codes, scale, dtype, global_scale=global_scale, block_rows=block_rows)


def rounded(weight_NK: Tensor, format: WeightFormat, block_rows: int = 1) -> Tensor:
    """Return the values of a matrix [N, K] in a format, in its own dtype; the last group of a row may be shorter."""
    columns = weight_NK.shape[1]
    padded = F.pad(weight_NK, (0, -columns % (format.group or WORD // format.bits)))
    matrix = quantize(padded, format, weight_NK.dtype, block_rows)
    starts = range(0, matrix.rows, ROWS)
    parts = [dequantize(matrix, n, min(n + ROWS, matrix.rows))[:, :columns] for n in starts]
    return torch.cat([part.to(weight_NK.dtype) for part in parts])


def _global_scale(weight_NK: Tensor) -> Tensor:
    amax = weight_NK.abs().amax().float().view(1)
    return torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), 1.0)


def _quantize(
    x_NK: Tensor, format: WeightFormat, dtype: torch.dtype, block_rows: int, global_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes as int32 words, and scales."""
    if format.codes == "e2m1":
        return _small_floats(x_NK, format, global_scale)
    x_NGk = x_NK.unflatten(1, (format.groups(x_NK.shape[1]), -1))
    amax_NG = _by_blocks(x_NGk.abs().amax(-1), block_rows)
    largest = E4M3_MAX if format.codes == "e4m3" else (1 << (format.bits - 1)) - 0.5
    scale_NG = (amax_NG / largest).to(dtype)
    # Of zeros, or of what is zero in the compute dtype.
    scale_NG = scale_NG.masked_fill(scale_NG == 0, 1.0)
    scaled_NK = (x_NGk / scale_NG.float()[..., None]).flatten(1)
    if format.codes == "e4m3":
        codes = scaled_NK.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return codes.view(torch.int32), scale_NG
    half = 1 << (format.bits - 1)
    return pack_words((scaled_NK.round() + half).clamp(0, 2 * half - 1), format.bits, 1), scale_NG


def _by_blocks(amax_NG: Tensor, block_rows: int) -> Tensor:
    """Return for each row the largest of its block."""
    if block_rows == 1:
        return amax_NG
    rows = len(amax_NG)
    blocks = F.pad(amax_NG, (0, 0, 0, -rows % block_rows)).unflatten(0, (-1, block_rows)).amax(1)
    return blocks.repeat_interleave(block_rows, 0)[:rows]


def _small_floats(x_NK: Tensor, format: WeightFormat, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    definition = formats.get(E2M1_FORMATS[format.scales]).encoded_by(ENCODER)
    scale = x_NK.new_ones(()) if global_scale is None else global_scale
    # One head of K values.
    codes, scale_N1G = definition.encode(x_NK[:, None], scale)
    return codes[:, 0].contiguous().view(torch.int32), scale_N1G[:, 0].contiguous().view(torch.uint8)
