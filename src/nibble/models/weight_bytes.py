"""Bytes of a model's weights: as a checkpoint stores them, and as a device keeps them packed. No torch.

They follow from how matrices are quantised (quantization.py) and from shapes; where the weights are in a local folder,
from the headers of its safetensors files.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from nibble.errors import WeightError
from nibble.kernels.weight_formats import FULL_DTYPE, bytes_kept, expert_bytes, experts_unserved
from nibble.models.hub import weight_files
from nibble.models.quantization import FULL, Quantization

ALWAYS_PLAIN = ".kv_b_proj"
"""The end of the name of MLA's matrix that is taken apart, and so unpacked."""
EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")
"""Matrices of an expert, as checkpoints name them one by one and Transformers keeps them together."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model."""

    module: str
    shape: tuple[int, ...]
    is_linear: bool
    """Whether it is the matrix of a linear layer."""
    is_experts: bool = False
    """Whether it has matrices of experts that may be kept packed (models/experts.py)."""
    is_transposed: bool = False
    """Whether these have inputs before outputs."""

    @property
    def matrix_names(self) -> tuple[str, ...]:
        """Modules of a checkpoint whose matrices it has; none where it is no matrix of a linear layer or of experts."""
        if self.is_linear:
            return (self.module,)
        if len(self.shape) == 3 and "experts" in self.module.split("."):
            return tuple(f"{self.module}.0.{name}" for name in EXPERT_MATRICES)
        return ()


def stored_bytes(quantization: Quantization, parameters: Iterable[Parameter]) -> int:
    """Return the bytes of all parameters: quantised ones with their scales, the others in 16 bits."""
    return sum(_parameter_bytes(quantization, parameter) for parameter in parameters)


def packed_bytes(
    quantization: Quantization, parameters: Iterable[Parameter], dtype: str, *, linears: bool = True
) -> int:
    """Return the bytes of all parameters on a device that keeps matrices packed.

    Args:
        quantization: How the checkpoint has them.
        parameters: Of the model.
        dtype: The compute dtype, that of all other parameters.
        linears: Whether linear layers are packed, and not experts alone.
    """
    full = 4 if dtype == FULL_DTYPE else FULL
    sizes = [
        (parameter, _packed_size(quantization, parameter, dtype) if linears or parameter.is_experts else None)
        for parameter in parameters
    ]
    # Experts are packed where all of their matrices can be.
    plain = {parameter.module for parameter, size in sizes if parameter.is_experts and size is None}
    return sum(
        prod(parameter.shape) * full if size is None or parameter.module in plain else size
        for parameter, size in sizes
    )


def _packed_size(quantization: Quantization, parameter: Parameter, dtype: str) -> int | None:
    """Return the bytes of a matrix that is kept packed, None for others; models/pack.py keeps the same ones."""
    if not (parameter.is_linear or parameter.is_experts) or parameter.module.endswith(ALWAYS_PLAIN):
        return None
    formats = {quantization.format_of(name) for name in parameter.matrix_names}
    stored = formats.pop() if len(formats) == 1 else None
    if stored is None or stored.packed is None:
        return None
    *experts, rows, columns = parameter.shape
    if parameter.is_transposed:
        rows, columns = columns, rows
    format = stored.packed
    # A single group is the whole row.
    format = replace(format, group=0) if format.group == columns else format
    if not parameter.is_experts:
        return bytes_kept(format, rows, columns, dtype)
    if experts_unserved(format, columns, dtype):
        return None
    return expert_bytes(format, experts[0], rows, columns, dtype)


def _parameter_bytes(quantization: Quantization, parameter: Parameter) -> int:
    formats = [quantization.format_of(name) for name in parameter.matrix_names]
    stored = next(filter(None, formats), None)
    if stored is None:
        return prod(parameter.shape) * FULL
    *experts, rows, columns = parameter.shape
    return prod(experts) * stored.size(rows, columns)


_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OTHER_PARTS = re.compile(r"(?:^|\.)(?:mtp|vision|visual|audio|multi_modal_projector)")
"""Names of tensors of other parts than the language model."""


def folder_bytes(folder: Path, layers: int) -> int | None:
    """Return the bytes of the language model's tensors in a folder's safetensors files; None where there are none.

    Args:
        folder: Of a checkpoint.
        layers: Of the model; layers beyond them predict further tokens, and are not loaded.

    Raises:
        WeightError: A file is broken or cut short.
    """
    files = weight_files(folder)
    if not files or any(not file.exists() for file in files):
        return None
    headers = (entry for file in files for entry in _header(file).items())
    return sum(
        _SIZES.get(x["dtype"], 1) * prod(x["shape"]) for name, x in headers if _is_loaded(name, layers)
    )


def _header(file: Path) -> Mapping[str, Any]:
    """Return a file's tensors: dtype and shape by name."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise WeightError(
            f"the weight file {file} is broken or cut short ({error}); download it again"
        ) from error
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _is_loaded(name: str, layers: int) -> bool:
    layer = _LAYER.search(name)
    return not _OTHER_PARTS.search(name) and (layer is None or int(layer[1]) < layers)
