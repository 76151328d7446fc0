"""Products with packed matrices by `humming-kernels` (vllm-project/humming, Apache-2.0), for any number of rows.

Its kernels are compiled by NVRTC when a model loads, and kept in the cache folder; their first launch waits for them.
For each shape and format there is a list of kernels by number of rows; a launch chooses one on the host, so it can be
captured in a CUDA graph. Weights are brought into its own layout first, on the GPU; that depends on whether activations
are FP8, and not on the number of rows. Which kernels there are, and how tensors are laid out, is what its
`HummingWeightSchema`, `HummingInputSchema`, `transform.py` and `kernel/humming.py` say (0.1.19).

FP8 by FP8 on Hopper takes float32 scales of activations (one, by token or by group), of weights by row, by group or by
block of the same group, and no groups below 32, so that it leaves out NVFP4. Sums of a group are promoted to float32;
without groups the tensor cores add up a whole row, in about 14 bits.

Shape suffixes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.hardware import cache_folder
from nibble.kernels import UNBOUNDED, ahead
from nibble.kernels.quantized_linear import cuda, schedules
from nibble.kernels.quantized_linear.matrix import KernelKey, PackedMatrix
from nibble.kernels.weight_formats import GROUP, Activations

T = TypeVar("T")
CACHE_VARIABLE, SERIAL_VARIABLE = "HUMMING_CACHE_DIR", "HUMMING_DISABLE_PARALLEL_BUILD"
WORKERS_VARIABLE = "HUMMING_MAX_PARALLEL_BUILD_WORKERS"
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
INPUT_MODES = {
    Activations.GROUP: "dynamic_group",
    Activations.TOKEN: "dynamic_token",
    Activations.TENSOR: "static_tensor",
}
"""Our names of how activations are quantised -> the library's."""
SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
RANGES = (8, 16, 32, 64, 128, 256, 512, 2048, 8192)
"""Numbers of rows; between two of them the kernel for the larger computes. The library itself has four times as many
kernels, each of which takes seconds to compile."""
LOCKS = 2048
"""int32 values with which programs of a product wait for one another, all zero between products."""
_kernels: dict[tuple[str, torch.device], Tensor | Future[Tensor]] = {}
"""By layout and device: what the library's launcher chooses a kernel by, int64 [4 * kernels] on the host."""
_compiling: dict[tuple[KernelKey, torch.device], Future[Tensor]] = {}
"""Kernels that no matrix needs yet."""
KEYS = 4
_pool = ThreadPoolExecutor(KEYS, "nibble-humming")
"""Each of its threads compiles for a key."""
WORKERS = min(max((os.cpu_count() or 1) // KEYS, 2), 4)
"""Kernels of a key that the library compiles at the same time, each in a process that takes 0.4 GiB."""
_importing = Lock()


def _uses_blocks(key: KernelKey) -> bool:
    """Return whether its kernels read a scale for each block, and not for each row of it."""
    return key.is_blocked and key.activations is Activations.GROUP


def _weight_schema(key: KernelKey) -> Any:
    from humming.schema import HummingWeightSchema

    format, blocks = key.format, _uses_blocks(key)
    second = "none"
    if format.has_global:
        second = "channel" if key.has_row_globals else "tensor"
    scales = DTYPES[format.scales] if format.scales else str(key.dtype).removeprefix("torch.")
    return HummingWeightSchema(
        b_dtype=DTYPES[format.codes],
        bs_dtype="float32" if blocks else scales,
        weight_scale_group_size=format.group,
        weight_scale_group_size_n=format.group if blocks else 0,
        weight_scale_type="block" if blocks else "group" if format.group else "channel",
        weight_scale_2_type=second,
        has_zero_point=format.has_zero,
    )


def _input_schema(key: KernelKey) -> Any:
    from humming.schema import HummingInputSchema

    if key.activations is Activations.NONE:
        return None
    return HummingInputSchema(
        a_dtype=DTYPES["e4m3"],
        input_scale_group_size=GROUP if key.activations is Activations.GROUP else 0,
        input_quant_mode=INPUT_MODES[key.activations],
    )


def layer_config(key: KernelKey, device: torch.device) -> Any:
    """Return what the library calls the kernels of a matrix by."""
    import_library()
    from humming.transform import prepare_layer_config

    rows, columns = key.shape
    return prepare_layer_config(
        rows, columns, _weight_schema(key), _input_schema(key), torch_dtype=key.dtype, device=device
    )


def _schedules(key: KernelKey, config: Any, device: torch.device, few: int) -> list[list[Any]]:
    """Return the kernels of a matrix: for more rows than the first number, up to the second, settings of a kernel.

    Up to `few` rows are multiplied elsewhere, so there is no kernel for them alone.
    """
    from humming.tune import get_heuristics_config

    measured = schedules.measured(key, config.sm_version)
    ranges: list[list[Any]] = []
    lasts = {last for last in (*RANGES, *measured) if last > few}
    for first, last in pairwise(sorted({0, *lasts})):
        settings = measured.get(last) or get_heuristics_config(config, shape_m=last, device=device)
        settings = {**settings, **schedules.COMMON.get(config.sm_version, {})}
        if ranges and ranges[-1][2] == settings:
            ranges[-1][1] = last
        else:
            ranges.append([first, last, settings])
    ranges[-1][1] = UNBOUNDED
    return ranges


@cache
def import_library() -> None:
    """Import the library, which reads its environment as it is imported; it compiles in parallel afterwards."""
    os.environ.setdefault(CACHE_VARIABLE, str(cache_folder() / "humming"))
    os.environ.setdefault(WORKERS_VARIABLE, str(WORKERS))
    with _importing:
        own = os.environ.get(SERIAL_VARIABLE)
        # Else importing starts two processes, which import torch and look for a compiler of C++.
        os.environ[SERIAL_VARIABLE] = "1"
        try:
            from humming import ops  # noqa: F401
            from humming.kernel.humming import HummingKernel  # noqa: F401
        finally:
            if own is None:
                del os.environ[SERIAL_VARIABLE]
            else:
                os.environ[SERIAL_VARIABLE] = own


def compile_ahead(keys: Iterable[KernelKey], device: torch.device) -> None:
    """Begin to compile the kernels of matrices that are still to come, in threads; their first launch waits for them.

    What is wrong with a kernel is raised where it is needed, and kernels that nothing needs cost nothing else.
    """
    for key in keys:
        if (key, device) not in _compiling:
            _compiling[key, device] = _pool.submit(_compile, key, device)


def _compile(key: KernelKey, device: torch.device) -> Tensor:
    """Compile the kernels of matrices of a key, and return what the library's launcher chooses one by."""
    config = layer_config(key, device)
    from humming.kernel.humming import HummingKernel

    kernels: Tensor = HummingKernel.prepare_kernels(
        config.to_str(), tuning_config=_schedules(key, config, device, _few(key, device)), device=device
    )
    return kernels


def _few(key: KernelKey, device: torch.device) -> int:
    """Return up to how many rows cuda.py multiplies in the library's place."""
    return cuda.FEW_TOKENS if cuda.serves_key(key, device) else 0


def compile_all(matrices: Iterable[PackedMatrix]) -> None:
    """Begin to compile the kernels of matrices, all at the same time, where that has not begun."""
    devices = {matrix.key: matrix.codes.device for matrix in matrices}
    layouts = {key: layer_config(key, device).to_str() for key, device in devices.items()}
    # Another model of the process may multiply by kernels that are there.
    missing = {key: device for key, device in devices.items()
               if not isinstance(_kernels.get((layouts[key], device)), Tensor)}  # fmt: skip
    for key, device in missing.items():
        compile_ahead([key], device)
    for key, device in missing.items():
        use(_compiling.pop((key, device)), layouts[key], device)


def rows_of(matrix: PackedMatrix) -> list[int]:
    """Return numbers of rows that call each kernel of a matrix in its layout; wait for these kernels."""
    # Each kernel is for more than its first number of rows, and up to its second.
    few, firsts = _few(matrix.key, matrix.codes.device), _kernels_of(matrix).view(-1, 4)[:, 0].tolist()
    return [max(first, few) + 1 for first in firsts]


def _kernels_of(matrix: PackedMatrix) -> Tensor:
    """Return what the launcher chooses a kernel of a matrix by; wait until all are compiled."""
    place = matrix.layout, matrix.codes.device
    kernels = _kernels[place]
    if isinstance(kernels, Future):
        kernels = _kernels[place] = explained(kernels.result)
    return kernels


def explained(call: Callable[[], T]) -> T:
    """Return what a call returns; raise BackendError for whatever else it raises but a lack of memory."""
    try:
        return call()
    except (BackendError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # of all kinds: this is foreign code, and a compiler
        raise BackendError(
            f"humming-kernels cannot multiply quantised weights here ({type(error).__name__}: "
            f"{str(error).strip()[:300]}); --quantized-weights unpacked serves them in the compute dtype"
        ) from error


def use(kernels: Tensor | Future[Tensor], layout: str, device: torch.device) -> None:
    """Let these kernels multiply matrices of a layout: for each its range of rows, its number, and processors."""
    _kernels[layout, device] = kernels


def prepare(matrix: PackedMatrix) -> tuple[PackedMatrix, Tensor]:
    """Return a matrix in the layout of its kernels, and the locks of its products."""
    from humming.transform import transform_humming_tensors

    scales, device = matrix.format.scales, matrix.codes.device
    config, scale = layer_config(matrix.key, device), matrix.scale
    if _uses_blocks(matrix.key):
        scale = scale[:: matrix.format.group].float()
    if scales == "e4m3" and bool((scale > LARGEST_E4M3).any()):
        raise BackendError("a block of weights has a negative scale, or one that is no number")
    tensors = {
        "weight": matrix.codes.contiguous(),
        "weight_scale": scale.view(SCALE_DTYPES[scales]) if scales else scale,
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


def quantized_linear(x_TK: Tensor, x_scale: Tensor | None, matrix: PackedMatrix, locks: Tensor) -> Tensor:
    """Compute x W^T -> [T, N], for a matrix that prepare() returned; scales of FP8 activations are [T, G] or [1]."""
    if ahead.is_rehearsal():
        return x_TK.new_zeros(len(x_TK), matrix.rows, dtype=matrix.dtype)
    from humming import ops

    scale, scales = matrix.scale, matrix.format.scales
    launch = partial(
        ops.launch_kernel,
        configs=_kernels_of(matrix),
        inputs=x_TK.contiguous(),
        weight=matrix.codes,
        weight_scale=scale.view(SCALE_DTYPES[scales]) if scales else scale,
        weight_scale_2=matrix.global_scale,
        input_scale=None if x_scale is None else x_scale.contiguous(),
        zero_point=matrix.zero,
        locks=locks,
    )
    y_TN: Tensor = explained(launch)
    return y_TN
