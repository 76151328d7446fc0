"""FP8 by FP8 with scales of blocks, on SM90: products of plain codes, where the checkpoint asks for FP8 activations.

Up to 64 tokens linear/sm90.py reads the weight once, for more it is torch's scaled product (cuBLASLt). Both add up 128
products in tensor cores, and such sums in float32. The library of humming.py takes 1.5 times as long as torch's for
thousands of tokens.

Shape suffixes: T tokens, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.kernels import SM90, gpu_of, import_problem
from nibble.kernels.quantized_linear.matrix import KernelKey, PackedMatrix
from nibble.kernels.weight_formats import GROUP, Activations

LAYOUT = "fp8 blocks"
"""Codes as bytes [N, K], and float32 scales of blocks [N / 128, K / 128]."""
FEW_SIZES = 8, 16, 32, 64
"""Tokens of the kernels of linear/sm90.py; it multiplies as many as the largest."""
INPUTS = 4 * GROUP
"""What inputs are a multiple of: rows of the scales of torch's product begin at multiples of 16 bytes."""
TOKENS = 16
"""What the tokens of torch's product are a multiple of."""
OLDEST_CUDA = 12, 9
"""Of torch, whose cuBLASLt has scales of blocks from there on."""


def serves_key(key: KernelKey, device: torch.device) -> bool:
    """Return whether matrices of a key are multiplied here, with inputs quantised by groups."""
    format = key.format
    return (
        device.type == "cuda"
        and key.activations is Activations.GROUP
        and key.is_blocked
        and (format.codes, format.group) == ("e4m3", GROUP)
        and not (format.has_zero or format.has_global or format.scales)
        and key.dtype == torch.bfloat16
        and not (key.shape[0] % GROUP or key.shape[1] % INPUTS)
        and _is_able(device)
    )


@cache
def _is_able(device: torch.device) -> bool:
    version = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return gpu_of(device).arch == SM90 and version >= OLDEST_CUDA and not import_problem("cuda.bindings")


def prepare(matrix: PackedMatrix) -> tuple[PackedMatrix, Tensor]:
    """Return a matrix in the layout of its kernels, and locks, which these do not need."""
    scale = matrix.scale[::GROUP].float().contiguous()
    codes_NK = matrix.codes.contiguous().view(torch.uint8)
    packed = replace(matrix, codes=codes_NK, scale=scale, layout=LAYOUT)
    return packed, scale.new_empty(0, dtype=torch.int32)


def compile_few(matrix: PackedMatrix) -> None:
    """Launch the kernels of a few tokens with a matrix in the layout NAIVE: a rehearsal compiles them so."""
    packed, _ = prepare(matrix)
    for tokens in FEW_SIZES:
        codes_TK = packed.codes.new_zeros(tokens, matrix.shape[1]).view(torch.float8_e4m3fn)
        linear(codes_TK, packed.scale.new_ones(matrix.shape[1] // GROUP, tokens).T, packed)


def linear(codes_TK: Tensor, scale_TG: Tensor, matrix: PackedMatrix) -> Tensor:
    """Compute x W^T -> [T, N] in the compute dtype.

    Args:
        codes_TK: E4M3.
        scale_TG: float32; those of a group lie one after the other.
        matrix: One that prepare() returned.

    Raises:
        BackendError: The driver refuses the launch.
    """
    if not scale_TG.T.is_contiguous():
        scale_TG = scale_TG.T.contiguous().T
    if len(codes_TK) <= FEW_SIZES[-1]:
        from nibble.kernels.linear import sm90

        return sm90.scaled_linear(codes_TK, scale_TG.T, matrix.codes, matrix.scale, matrix.dtype)
    tokens, missing = len(codes_TK), -len(codes_TK) % TOKENS
    if missing:
        codes_TK = F.pad(codes_TK.view(torch.uint8), (0, 0, 0, missing)).view(torch.float8_e4m3fn)
        scale_TG = F.pad(scale_TG.T, (0, missing)).T
    weight_NK = matrix.codes.view(torch.float8_e4m3fn)
    y_TN = torch._scaled_mm(codes_TK, weight_NK.T, scale_TG, matrix.scale.T, out_dtype=matrix.dtype)
    return y_TN[:tokens]
