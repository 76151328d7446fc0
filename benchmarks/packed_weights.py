"""Random weights as checkpoints quantise them, packed: rounded to nearest, with the usual choice of scales.

Shape suffixes: E experts, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibble.kernels.experts.matrices import PackedExperts
from nibble.kernels.quantized_linear.matrix import KernelKey, PackedMatrix
from nibble.kernels.quantized_linear.naive import pack_words
from nibble.kernels.quantized_linear.quantize import quantize as quantized
from nibble.kernels.weight_formats import Activations, WeightFormat, parts_of

CT = "compressed-tensors"


@dataclass(frozen=True)
class Kind:
    """A format, and the `quantization_config` of a checkpoint in it."""

    format: WeightFormat
    config: dict[str, Any]
    activations: Activations = Activations.NONE

    def key(self, shape: tuple[int, int]) -> KernelKey:
        """Of the kernels of a matrix of quantize(), in bfloat16."""
        is_blocked = self.format.codes == "e4m3" and self.format.group > 0
        return KernelKey(self.format, shape, torch.bfloat16, False, self.activations, is_blocked)


def _ct(format: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"], "format": format, "weights": weights, "input_activations": activations
    }  # fmt: skip
    return {"quant_method": CT, "format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _int4(symmetric: bool) -> dict[str, Any]:
    settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    return _ct("pack-quantized", symmetric=symmetric, **settings)


_FP8_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_FP8_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_FP8_ROWS = _ct("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)
KINDS = {
    "int4": Kind(WeightFormat("uint4", 128), _int4(True)),
    "int4z": Kind(WeightFormat("uint4", 128, has_zero=True), _int4(False)),
    "fp8": Kind(WeightFormat("e4m3", 128), _FP8_BLOCKS),
    "fp8a8": Kind(
        WeightFormat("e4m3", 128), {**_FP8_BLOCKS, "activation_scheme": "dynamic"}, Activations.GROUP
    ),
    "fp8row": Kind(WeightFormat("e4m3"), _FP8_ROWS),
    "fp8rowa8": Kind(
        WeightFormat("e4m3"),
        _ct(
            "float-quantized",
            activations=_FP8_TOKENS,
            num_bits=8,
            type="float",
            strategy="channel",
            symmetric=True,
        ),
        Activations.TOKEN,
    ),
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
    """The matrix in a format, its compute dtype that of the weight. FP8's groups are those of blocks of 128 x 128."""
    if format.has_zero:
        return _with_zeros(weight_NK, format)
    block_rows = format.group if format.codes == "e4m3" and format.group else 1
    return quantized(weight_NK, format, weight_NK.dtype, block_rows)


ROOT_MEAN_SQUARE = {"e4m3": 1.0, "e2m1": 2.93, "uint4": 4.64}
"""Of random_experts()'s codes."""


def random_experts(
    format: WeightFormat, shape: tuple[int, int, int], dtype: torch.dtype, device: str, std: float
) -> PackedExperts:
    """Matrices [E, N, K] that never were plain: random codes, and scales that make their deviation about `std`."""
    experts, rows, columns = shape
    words = (experts, rows, columns // parts_of(format))
    if format.codes == "e4m3":
        codes = torch.empty(*words, dtype=torch.int16, device=device)
        for words_NW in codes:
            words_NW.copy_(
                torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn).view(torch.int16)
            )
    else:
        codes = torch.randint(-(1 << 15), 1 << 15, words, dtype=torch.int16, device=device)
    factor, groups = std / ROOT_MEAN_SQUARE[format.codes], (experts, format.groups(columns), rows)
    # Half and all of it: scales that differ show where one is another's.
    halved = torch.randint(2, groups, device=device)
    global_scale = None
    if format.scales == "e8m0":
        exponent = round(torch.tensor(factor).log2().item()) + 127
        scale = (exponent - halved).to(torch.uint8)
    elif format.scales == "e4m3":
        scale = (1.0 - 0.5 * halved).to(torch.float8_e4m3fn).view(torch.uint8)
        global_scale = torch.full((experts, rows), factor, device=device)
    else:
        scale = (factor * (1.0 - 0.5 * halved)).to(dtype)
    return PackedExperts(format, codes, scale, dtype, global_scale=global_scale)


def _with_zeros(weight_NK: Tensor, format: WeightFormat) -> PackedMatrix:
    """Integers from the smallest value of a group to the largest."""
    top, dtype = (1 << format.bits) - 1, weight_NK.dtype
    x_NGk = weight_NK.float().unflatten(1, (format.groups(weight_NK.shape[1]), -1))
    low_NG, high_NG = x_NGk.amin(-1), x_NGk.amax(-1)
    scale_NG = ((high_NG - low_NG).clamp(min=1e-9) / top).to(dtype).float()
    zero_NG = (-low_NG / scale_NG).round().clamp(0, top)
    codes_NK = (x_NGk / scale_NG[..., None] + zero_NG[..., None]).round().clamp(0, top).flatten(1).int()
    codes, zero = pack_words(codes_NK, format.bits, 1), pack_words(zero_NG.int(), format.bits, 0)
    return PackedMatrix(format, codes, scale_NG.to(dtype), dtype, zero=zero)
