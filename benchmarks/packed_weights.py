"""Random weights as checkpoints quantise them, packed: rounded to nearest, with the usual choice of scales.

Shape suffixes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibble.kernels.quantized_linear.matrix import PackedMatrix
from nibble.kernels.quantized_linear.naive import E2M1, E8M0_BIAS, pack_words
from nibble.kernels.weight_formats import WeightFormat

CT = "compressed-tensors"
E2M1_MAX, E4M3_MAX = 6.0, 448.0
ROWS = 4096
"""Rows that are quantised at a time."""


@dataclass(frozen=True)
class Kind:
    """A format, and the `quantization_config` of a checkpoint in it."""

    format: WeightFormat
    config: dict[str, Any]


def _ct(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": format, "weights": weights}
    return {"quant_method": CT, "format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _int4(symmetric: bool) -> dict[str, Any]:
    settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    return _ct("pack-quantized", symmetric=symmetric, **settings)


_FP8_ROWS = _ct("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)
KINDS = {
    "int4": Kind(WeightFormat("uint4", 128), _int4(True)),
    "int4z": Kind(WeightFormat("uint4", 128, has_zero=True), _int4(False)),
    "fp8": Kind(WeightFormat("e4m3", 128), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8row": Kind(WeightFormat("e4m3"), _FP8_ROWS),
    "nvfp4": Kind(
        WeightFormat("e2m1", 16, "e4m3", has_global=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
    "mxfp4": Kind(
        WeightFormat("e2m1", 32, "e8m0"), _ct("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)
    ),
}
"""By the names that benchmarks take."""


def quantize(weight_NK: Tensor, format: WeightFormat) -> PackedMatrix:
    """The matrix in a format, its compute dtype that of the weight."""
    global_scale = None
    if format.has_global:
        global_scale = (weight_NK.abs().amax().float() / (E2M1_MAX * E4M3_MAX)).view(1)
    parts = [_quantize(part, format, global_scale) for part in weight_NK.split(ROWS)]
    codes, scale, zero = (
        torch.cat(column) if column[0] is not None else None for column in zip(*parts, strict=True)
    )
    assert codes is not None and scale is not None
    scale = scale if format.scales else scale.to(weight_NK.dtype)
    return PackedMatrix(format, codes, scale, weight_NK.dtype, zero=zero, global_scale=global_scale)


def _quantize(
    weight_NK: Tensor, format: WeightFormat, global_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    columns = weight_NK.shape[1]
    x_NGk = weight_NK.float().unflatten(1, (format.groups(columns), -1))
    low_NG, high_NG = x_NGk.amin(-1), x_NGk.amax(-1)
    amax_NG = torch.maximum(high_NG, -low_NG).clamp(min=1e-9)
    if format.codes.startswith("uint"):
        top = (1 << format.bits) - 1
        if format.has_zero:
            scale_NG = ((high_NG - low_NG) / top).to(weight_NK.dtype).float()
            zero_NG = (-low_NG / scale_NG).round().clamp(0, top)
        else:
            scale_NG = (amax_NG / (top // 2)).to(weight_NK.dtype).float()
            zero_NG = torch.full_like(scale_NG, (top + 1) // 2)
        codes_NK = (x_NGk / scale_NG[..., None] + zero_NG[..., None]).round().clamp(0, top).flatten(1).int()
        zero = pack_words(zero_NG.int(), format.bits, 0) if format.has_zero else None
        return pack_words(codes_NK, format.bits, 1), scale_NG, zero
    if format.codes == "e4m3":
        scale_NG = (amax_NG / E4M3_MAX).to(weight_NK.dtype).float()
        codes = (x_NGk / scale_NG[..., None]).clamp(-E4M3_MAX, E4M3_MAX).flatten(1).to(torch.float8_e4m3fn)
        return codes.view(torch.int32), scale_NG, None
    if global_scale is not None:
        bytes_NG = (amax_NG / E2M1_MAX / global_scale).to(torch.float8_e4m3fn)
        scale_NG, stored = bytes_NG.float() * global_scale, bytes_NG.view(torch.uint8)
    else:
        exponent_NG = (amax_NG / E2M1_MAX).log2().ceil()
        scale_NG, stored = exponent_NG.exp2(), (exponent_NG + E8M0_BIAS).to(torch.uint8)
    scaled_NK = (x_NGk / scale_NG.clamp(min=1e-30)[..., None]).flatten(1)
    grid = torch.tensor(E2M1[:8], device=weight_NK.device)
    codes_NK = torch.bucketize(scaled_NK.abs(), (grid[1:] + grid[:-1]) / 2, out_int32=True) + 8 * (
        scaled_NK < 0
    )
    return pack_words(codes_NK, 4, 1), stored, None
