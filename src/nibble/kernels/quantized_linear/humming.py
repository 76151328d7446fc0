"""Products with packed matrices by `humming-kernels` (vllm-project/humming, Apache-2.0), for any number of rows.

Its kernels are compiled by NVRTC when a model loads, and kept in the cache folder. For each shape and format there is
a list of kernels by number of rows; a launch chooses one on the host, so it can be captured in a CUDA graph. Weights
are brought into its own layout first, on the GPU. Which kernels there are, and how tensors are laid out, is what its
`HummingWeightSchema`, `transform.py` and `kernel/humming.py` say (0.1.19).

Shape suffixes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.hardware import cache_folder
from nibble.kernels import UNBOUNDED
from nibble.kernels.quantized_linear import cuda
from nibble.kernels.quantized_linear.matrix import PackedMatrix

CACHE_VARIABLE = "HUMMING_CACHE_DIR"
DTYPES = {
    "uint4": "uint4",
    "uint8": "uint8",
    "e2m1": "float4e2m1",
    "e4m3": "float8e4m3",
    "e8m0": "float8e8m0",
}
"""Our names of codes and scales -> the library's."""
LARGEST_E4M3 = 0x7E
"""The byte of 448: those above are negative, or no numbers."""
SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
RANGES = (8, 16, 32, 48, 64, 96, 128, 256, 512, 2048, 8192)
"""Numbers of rows; between two of them the kernel for the larger computes. The library itself has three times as many
kernels, each of which takes seconds to compile."""
LOCKS = 2048
"""int32 values with which programs of a product wait for one another, all zero between products."""
_kernels: dict[tuple[str, torch.device], Tensor] = {}
"""By layout and device: what the library's launcher chooses a kernel by, int64 [4 * kernels] on the host."""


def _schema(matrix: PackedMatrix) -> Any:
    from humming.schema import HummingWeightSchema

    format = matrix.format
    second = "none"
    if matrix.global_scale is not None:
        second = "tensor" if len(matrix.global_scale) == 1 else "channel"
    return HummingWeightSchema(
        b_dtype=DTYPES[format.codes],
        bs_dtype=DTYPES[format.scales] if format.scales else str(matrix.dtype).removeprefix("torch."),
        weight_scale_group_size=format.group,
        weight_scale_type="group" if format.group else "channel",
        weight_scale_2_type=second,
        has_zero_point=format.has_zero,
    )


def _config(matrix: PackedMatrix) -> Any:
    from humming.transform import prepare_layer_config

    rows, columns = matrix.shape
    return prepare_layer_config(
        rows, columns, _schema(matrix), torch_dtype=matrix.dtype, device=matrix.codes.device
    )


def _schedules(config: Any, device: torch.device, few: int) -> list[list[Any]]:
    """Return the kernels of a matrix: for more rows than the first number, up to the second, settings of a kernel.

    Up to `few` rows are not multiplied here.
    """
    from humming.tune import get_heuristics_config

    schedules: list[list[Any]] = []
    for first, last in pairwise((0, *(last for last in RANGES if last > few))):
        settings = get_heuristics_config(config, shape_m=last, device=device)
        if schedules and schedules[-1][2] == settings:
            schedules[-1][1] = last
        else:
            schedules.append([first, last, settings])
    schedules[-1][1] = UNBOUNDED
    return schedules


def compile_all(matrices: Iterable[PackedMatrix]) -> dict[tuple[object, ...], list[int]]:
    """Compile the kernels of matrices, all at the same time; return for each key numbers of rows that call each."""
    os.environ.setdefault(CACHE_VARIABLE, str(cache_folder() / "humming"))
    # Else each process that imports it starts another, which looks for a compiler of C++.
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    from humming.kernel.humming import HummingKernel

    by_key = {matrix.key: matrix for matrix in matrices}
    configs = {key: _config(matrix) for key, matrix in by_key.items()}

    def compile(key: tuple[object, ...]) -> Tensor:
        config, device = configs[key], by_key[key].codes.device
        few = cuda.FEW_TOKENS if cuda.serves(by_key[key]) else 0
        kernels: Tensor = HummingKernel.prepare_kernels(
            config.to_str(), tuning_config=_schedules(config, device, few), device=device
        )
        return kernels

    if not by_key:
        return {}
    with ThreadPoolExecutor(len(by_key)) as pool:
        kernels = dict(zip(by_key, pool.map(compile, by_key), strict=True))
    for key, table in kernels.items():
        _kernels[configs[key].to_str(), by_key[key].codes.device] = table
    # Each kernel is for more than its first number of rows, and up to its second.
    return {key: [first + 1 for first in table.view(-1, 4)[:, 0].tolist()] for key, table in kernels.items()}


def prepare(matrix: PackedMatrix) -> tuple[PackedMatrix, Tensor]:
    """Return a matrix in the layout of its kernels, which are compiled, and the locks of its products."""
    from humming.transform import transform_humming_tensors

    config, scales, device = _config(matrix), matrix.format.scales, matrix.codes.device
    if scales == "e4m3" and bool((matrix.scale > LARGEST_E4M3).any()):
        raise BackendError("a block of weights has a negative scale, or one that is no number")
    tensors = {
        "weight": matrix.codes.contiguous(),
        "weight_scale": matrix.scale.view(SCALE_DTYPES[scales]) if scales else matrix.scale,
        "zero_point": matrix.zero,
        "weight_scale_2": matrix.global_scale,
    }
    if matrix.global_scale is not None and len(matrix.global_scale) > 1:
        tensors["weight_scale_2"] = matrix.global_scale.to(matrix.dtype)
    outputs = transform_humming_tensors(config, {k: x for k, x in tensors.items() if x is not None})
    scale = outputs["weight_scale"]
    packed = replace(
        matrix,
        codes=outputs["weight"],
        scale=scale.view(torch.uint8) if scales else scale,
        zero=outputs.get("zero_point"),
        global_scale=outputs.get("weight_scale_2"),
        layout=config.to_str(),
    )
    return packed, torch.zeros(LOCKS, dtype=torch.int32, device=device)


def quantized_linear(x_TK: Tensor, matrix: PackedMatrix, locks: Tensor) -> Tensor:
    """Compute x W^T -> [T, N], for a matrix that prepare() returned."""
    from humming import ops

    scale, scales = matrix.scale, matrix.format.scales
    y_TN: Tensor = ops.launch_kernel(
        configs=_kernels[matrix.layout, matrix.codes.device],
        inputs=x_TK.contiguous(),
        weight=matrix.codes,
        weight_scale=scale.view(SCALE_DTYPES[scales]) if scales else scale,
        weight_scale_2=matrix.global_scale,
        zero_point=matrix.zero,
        locks=locks,
    )
    return y_TN
