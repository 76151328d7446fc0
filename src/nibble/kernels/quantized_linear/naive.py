"""The definition of products with packed matrices, in torch and float32, and of activations in FP8.

Activations are E4M3 codes of x / scale, rounded to nearest, with scale = amax / 448 of a token, or of a token and 128
inputs, or the scale of a checkpoint, beyond whose range they are clipped.

Shape suffixes: T tokens, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels.quantized_linear.matrix import PackedMatrix
from nibble.kernels.weight_formats import BITS, E4M3_MAX, GROUP, WORD, Activations

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127
ROWS = 4096
"""Outputs that are unpacked at a time."""
TINY = 1e-10
"""The least amax of activations, so that zeros have a scale."""


def unpack_words(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Return the unsigned integers that int32 words hold along a dimension, the first in the lowest bits -> int32."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=packed.device)
    packed = packed.unsqueeze(dim + 1)
    shape = [1] * packed.dim()
    shape[dim + 1] = len(shifts)
    return ((packed >> shifts.view(shape)) & ((1 << bits) - 1)).flatten(dim, dim + 1)


def pack_words(values: Tensor, bits: int, dim: int) -> Tensor:
    """Return int32 words with unsigned integers along a dimension, the first in the lowest bits."""
    packed = torch.zeros_like(values.unflatten(dim, (-1, WORD // bits)).select(dim + 1, 0), dtype=torch.int32)
    for i, part in enumerate(values.int().unflatten(dim, (-1, WORD // bits)).unbind(dim + 1)):
        packed |= part << (i * bits)
    return packed


def dequantize(matrix: PackedMatrix, first: int = 0, stop: int | None = None) -> Tensor:
    """Return rows [first, stop) of a matrix -> float32 [N, K], with its library's rounding."""
    format, rows = matrix.format, slice(first, matrix.rows if stop is None else stop)
    x_NK = _values(matrix.codes[rows], format.codes)
    if format.codes.startswith("uint"):
        zero_NG = matrix.zero
        if zero_NG is None:
            x_NK = x_NK - (1 << (format.bits - 1))
        else:
            zero_NG = unpack_words(zero_NG, format.bits, 0)[rows].float()
            x_NK = _by_group(x_NK, zero_NG, torch.sub)
    x_NK = _by_group(x_NK, _scales(matrix.scale[rows], format.scales), torch.mul)
    if matrix.global_scale is not None:
        scale = matrix.global_scale.float()
        x_NK = x_NK * (scale[rows, None] if len(scale) > 1 else scale)
    return x_NK.to(matrix.rounded).float()


def _values(codes: Tensor, kind: str) -> Tensor:
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    integers = unpack_words(codes, BITS[kind], 1)
    return torch.tensor(E2M1, device=codes.device)[integers] if kind == "e2m1" else integers.float()


def _scales(scale_NG: Tensor, kind: str) -> Tensor:
    if kind == "e8m0":
        return torch.exp2(scale_NG.float() - E8M0_BIAS)
    return (scale_NG.view(torch.float8_e4m3fn) if kind == "e4m3" else scale_NG).float()


def _by_group(x_NK: Tensor, values_NG: Tensor, apply: object) -> Tensor:
    groups = x_NK.unflatten(1, (values_NG.shape[1], -1))
    return apply(groups, values_NG[..., None]).flatten(1)  # type: ignore[operator]


def quantize_activations(
    x: Tensor, activations: Activations, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise inputs of a product to FP8.

    Args:
        x: [..., K], with whole groups of inputs.
        activations: How; not NONE.
        input_scale: float32 [1], for TENSOR.

    Returns:
        Codes, E4M3 [..., K], and float32 scales: [..., G] of groups, [..., 1] of tokens, or input_scale.
    """
    if activations is not Activations.TENSOR:
        return quantize_groups(x, GROUP if activations is Activations.GROUP else x.shape[-1])
    assert input_scale is not None
    return _codes(x.float() / input_scale), input_scale


def quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes of inputs [..., K], and the scale of each group of so many [..., G]."""
    groups = x.float().unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1).clamp(min=TINY)
    # A GPU multiplies by the inverse of a number, which may be off in the last place.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    return _codes((groups / scale.unsqueeze(-1)).flatten(-2)), scale


def _codes(scaled: Tensor) -> Tensor:
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantized_linear(x: Tensor, matrix: PackedMatrix, x_scale: Tensor | None = None) -> Tensor:
    """Compute x W^T -> [T, N].

    Args:
        x: [T, K], or codes of quantize_activations().
        matrix: W.
        x_scale: Of codes, [T, G] or [1].

    Returns:
        In the dtype of x; of codes in the compute dtype.
    """
    x_TK, dtype = x.float(), x.dtype
    if x_scale is not None:
        x_TK, dtype = _by_group(x_TK, x_scale.reshape(-1, x_scale.shape[-1]), torch.mul), matrix.dtype
    starts = range(0, matrix.rows, ROWS)
    parts = [x_TK @ dequantize(matrix, n, min(n + ROWS, matrix.rows)).T for n in starts]
    return torch.cat(parts, 1).to(dtype)
