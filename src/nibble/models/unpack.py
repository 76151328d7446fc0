"""Quantised matrices of a checkpoint as plain ones, each unpacked when it is read; or kept packed (pack.py).

A checkpoint names what belongs to a matrix after its module, and what is there says how it is stored:

    weight          FP8 or INT8, with weight_scale or weight_scale_inv: of the matrix, of rows, of blocks
    weight          bytes with two signed integers each, and weight_scale_inv: experts in W4AFP8
    weight          bytes with two E2M1 values each, weight_scale and weight_scale_2: ModelOpt's NVFP4
    weight_packed   compressed-tensors': words of integers, or bytes of E2M1 (NVFP4, MXFP4)
    qweight         GPTQ's and AWQ's words of integers, with inputs before outputs
    *_blocks        gpt-oss' experts in MXFP4

Sources: compressed-tensors `compressors/`, ModelOpt `torch/export/quant_utils.py` and `torch/quantization/qtensor/`,
Transformers `integrations/finegrained_fp8.py` and `integrations/mxfp4.py`, GPTQModel `nn_modules/qlinear/`, AutoAWQ
`awq/utils/packing_utils.py`, SGLang and vLLM `quantization/w4afp8.py`.

Shape suffixes: N outputs, K inputs, G groups of inputs; E experts, B blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nibble.errors import ConfigError, WeightError
from nibble.kernels.quantized_linear.naive import E2M1, E8M0_BIAS, unpack_words
from nibble.kernels.quantized_linear.quantize import rounded
from nibble.models import online, pack
from nibble.models.experts import round_experts
from nibble.models.hub import first_line, weight_files
from nibble.models.matrix_parts import Parts
from nibble.models.online import Choice
from nibble.models.pack import AWQ_ORDER, GPTQ_V2, Packer, Reader
from nibble.models.placement import PlacedSlice, place, release
from nibble.models.quantization import W4AFP8
from nibble.models.shards import PartOfWhole, Split

WORD, HALF_BLOCK = 32, 16

_FOR_ACTIVATIONS = frozenset({"input_scale", "input_zero_point", "input_global_scale", "activation_scale"})
"""Of inputs that other engines quantise too. Here they are left as they are, which is only more exact."""
_SIDE_TENSORS = frozenset({
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_g_idx",
    "weight_shape", "pre_quant_scale", "qzeros", "scales", "g_idx", *_FOR_ACTIVATIONS,
})  # fmt: skip
"""What belongs to a matrix."""


class _Slice:
    """A matrix that is computed where it is read, with what Transformers' loader asks of safetensors' slices."""

    def __init__(
        self, parts: Parts, spelling: _Spelling, lock: Lock, device: torch.device, packer: Packer | None
    ) -> None:
        self._parts, self._spelling, self._lock = parts, spelling, lock
        self._device, self._packer = device, packer
        self._split: Split | None = None

    def part(self, split: Split) -> _Slice:
        """Return a rank's part of it; what is quantised together is read as a whole."""
        parts = self._parts
        if self._spelling.codes == "_blocks":
            # Outputs before blocks of inputs, the other way round than as values.
            if split.dim:
                split = (
                    Split(1, split.parts)
                    if split.dim == 2
                    else Split(2, split.scaled(2 * HALF_BLOCK, parts.name).parts)
                )
            stored = {end: PartOfWhole(x, split) for end, x in parts.stored.items()}
            parts = replace(parts, stored=stored)
        result = _Slice(parts, self._spelling, self._lock, self._device, self._packer)
        result._split = None if self._spelling.codes == "_blocks" else split
        return result

    def __getitem__(self, index: Any) -> Tensor:
        # The loader reads with several threads, and what is computed on the way is several times the matrix.
        with self._lock:
            try:
                x = self._placeholder() if index is ... else None
                x = place(self._values()[index] if x is None else x, self._device)
                release((part[...] for part in self._parts.stored.values()), self._device)
                return x
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise WeightError(
                    f"the quantised matrix {self._parts.name} cannot be unpacked: {first_line(error)}"
                ) from error

    def _values(self) -> Tensor:
        x = self._spelling.unpack(self._parts)
        return x if self._split is None else self._split.of(x).clone()

    def _placeholder(self) -> Tensor | None:
        read, split = self._spelling.pack, self._split
        if read and split:
            read = partial(pack.part_of, read, split)
        if self._packer is None or read is None:
            return None
        return self._packer.placeholder(self._parts, read, is_transposed=self._spelling.is_transposed)


def unpacked(
    folder: Path,
    config: Mapping[str, Any],
    device: torch.device,
    stack: ExitStack,
    packer: Packer | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's tensors by name: quantised matrices unpacked when they are read, the others as they are.

    Args:
        folder: With safetensors files.
        config: Its `quantization_config`.
        device: Where they shall be.
        stack: Keeps the files open.
        packer: Keeps matrices that stay packed, and gives placeholders for them.

    Raises:
        WeightError: A matrix lacks something. Others are raised when a matrix is read.
    """
    files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(folder)]
    owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (it is no dict)
    plain, lock = dict[str, Any](), Lock()
    modules: dict[str, dict[str, Any]] = {}
    for name, file in owner.items():
        module, end = _split(name)
        # As slices, because threads must not share a file.
        modules.setdefault(module, {})[end] = file.get_slice(name)
    for module, stored in modules.items():
        dtypes = {end: tensor.get_dtype() for end, tensor in stored.items()}
        spelling = _spelling(dtypes, config)
        for end, tensor in stored.items():
            if spelling is None or (end != spelling.codes and end not in _SIDE_TENSORS and end != "_scales"):
                plain[_join(module, end)] = PlacedSlice(tensor, device)
        if spelling:
            name = _join(module, "" if spelling.codes == "_blocks" else "weight")
            parts = Parts(name, stored, config, device)
            plain[name] = _Slice(parts, spelling, lock, device, packer)
    if not owner:
        raise WeightError(f"{folder} has no *.safetensors, from which alone quantised weights are read")
    if owner.keys() == plain.keys():
        raise WeightError(
            f"{folder} declares weights quantised by {config.get('quant_method')}, and holds no quantised matrix; its "
            "config.json or its weight files are another checkpoint's"
        )
    return plain


def quantized(
    folder: Path,
    choice: Choice,
    stack: ExitStack,
    packer: Packer | None,
    device: torch.device,
    whole: torch.dtype | None,
    places: set[str],
) -> dict[str, Any]:
    """Return an unquantised checkpoint's tensors by name: chosen matrices quantised when they are read, and kept.

    Args:
        folder: With safetensors files.
        choice: Which matrices.
        stack: Keeps the files open.
        packer: Keeps matrices, and gives placeholders for them.
        device: Where they shall be.
        whole: The compute dtype, where those that are not kept are rounded to the format as they are read; None: they
            are read as they are.
        places: Takes those of the modules that are quantised so (online.place()).

    Raises:
        ConfigError: A rank needs a part of what is packed as one.
    """
    lock, tensors = Lock(), dict[str, Any]()
    for path in weight_files(folder):
        file = stack.enter_context(safe_open(path, "pt"))
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            stored, spelling = file.get_slice(name), _plain_spelling(name, choice, packer, device, whole)
            module, end = _split(name)
            parts = Parts(name, {end: stored}, {})
            places |= {online.place(module)} if spelling else set()
            tensors[name] = (
                _Slice(parts, spelling, lock, device, packer) if spelling else PlacedSlice(stored, device)
            )
    return tensors


def _plain_spelling(
    name: str, choice: Choice, packer: Packer | None, device: torch.device, whole: torch.dtype | None
) -> _Spelling | None:
    """Return how a plain tensor is quantised, None where it is not; see quantized()."""
    module, end = _split(name)
    is_transposed = choice.experts.get(online.place(name))
    is_matrix = end == "weight" and choice.is_matrix(module)
    if not is_matrix and is_transposed is None:
        return None
    if packer and whole and not is_matrix:
        raise ConfigError(
            f"--weights with --tp is not served for {name}: experts that lie in one tensor are not divided once they "
            "are quantised; unpack them (--quantized-weights unpacked), or name a checkpoint that is quantised already"
        )

    def values(parts: Parts) -> Tensor:
        # What turned out to be no matrix of the model is none of those that are rounded.
        if whole is None or (packer and parts.name in packer.plain):
            return parts[end]
        return _as_quantized(
            parts.name, parts[end].to(device, whole), choice, is_transposed=bool(is_transposed)
        )

    if packer is None:
        return _Spelling(end, values, None, bool(is_transposed))
    if is_matrix:
        return _Spelling(end, values, partial(pack.plain, choice.format, packer))
    read = partial(pack.plain_experts, choice.format, packer, bool(is_transposed))
    return _Spelling(end, values, read, bool(is_transposed))


def _as_quantized(name: str, weight: Tensor, choice: Choice, *, is_transposed: bool) -> Tensor:
    """Return a matrix, or those of all experts, with the errors of a format."""
    format = choice.format
    assert format.packed
    pack.require_finite(name, weight)
    if weight.dim() == 2:
        return rounded(weight, format.packed, format.block_rows)
    weight_E = weight.clone()
    round_experts(name, weight_E, format.packed, format.block_rows, is_transposed=is_transposed)
    return weight_E


def _split(name: str) -> tuple[str, str]:
    """Return the module of a tensor and the end of its name; of gpt-oss' experts the parameter."""
    for end in ("_blocks", "_scales"):
        if name.endswith(end):
            return name.removesuffix(end), end
    module, _, end = name.rpartition(".")
    return module, end


def _join(module: str, end: str) -> str:
    return module + end if end.startswith("_") or not end else f"{module}.{end}" if module else end


# ---- values ----------------------------------------------------------------------------------------------------------


def _e2m1(packed: Tensor) -> Tensor:
    """Return the values of bytes that hold two each, the first in the lower half -> float32, twice as many columns."""
    table = torch.tensor(E2M1, dtype=torch.float32)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[codes.int()]


def _e8m0(exponents: Tensor) -> Tensor:
    return torch.exp2(exponents.float() - E8M0_BIAS)


def _scaled(x_NK: Tensor, scale: Tensor, parts: Parts) -> Tensor:
    """Multiply by a scale of the matrix, of rows, of groups of a row, or of blocks."""
    return _rounded(x_NK * _spread(x_NK, scale.float(), parts), scale)


def _rounded(x_NK: Tensor, scale: Tensor) -> Tensor:
    """Return values in the dtype of their scale, where that is one of 16 bits, in which libraries multiply too."""
    return x_NK.to(scale.dtype) if scale.dtype in (torch.bfloat16, torch.float16) else x_NK


def _spread(x_NK: Tensor, scale: Tensor, parts: Parts) -> Tensor:
    """Return the scale of each value, in a shape that broadcasts."""
    if scale.numel() == 1:
        return scale.view(())
    if scale.dim() == 4:  # ModelOpt's blocks: [N, 1, K, 1]
        scale = scale[:, 0, :, 0]
    if scale.dim() == 1:
        scale = scale[:, None]
    (rows, columns), (row_scales, groups) = x_NK.shape, scale.shape
    height, width = parts.block
    if row_scales == rows and height > 1:
        parts.check(columns % groups == 0, f"{groups} scales for {columns} inputs")
        return scale.repeat_interleave(columns // groups, 1)
    fits = (row_scales, groups) == (-(-rows // height), -(-columns // width))
    parts.check(
        fits, f"{row_scales} x {groups} scales for {rows} x {columns} values in blocks of {height} x {width}"
    )
    return scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


# ---- spellings -------------------------------------------------------------------------------------------------------


def _small_floats(parts: Parts) -> Tensor:
    """FP8 and INT8."""
    x_NK = parts["weight"].float()
    if (zero := parts.get("weight_zero_point")) is not None and zero.any():
        x_NK = x_NK - (zero if zero.dim() else zero[None]).float().view(-1, 1)
    scale = parts.get("weight_scale_inv")
    scale = parts["weight_scale"] if scale is None else scale
    return _scaled(x_NK, _e8m0(scale) if scale.dtype == torch.uint8 else scale, parts)


def _signed_integers(parts: Parts) -> Tensor:
    """W4AFP8's experts: two's complement of 4 bits, the first in the lower half, in groups of a row."""
    codes, scale_NG = parts["weight"].view(torch.uint8), parts["weight_scale_inv"]
    x_NK = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()
    group = int(parts.config.get("group_size") or 128)
    parts.check(
        x_NK.shape[1] == scale_NG.shape[1] * group, f"{scale_NG.shape[1]} scales for {x_NK.shape[1]} inputs"
    )
    return _by_group((x_NK ^ 8) - 8, scale_NG, None, None, parts)


def _modelopt_nvfp4(parts: Parts) -> Tensor:
    x_NK = _scaled(_e2m1(parts["weight"]), parts["weight_scale"], parts) * parts["weight_scale_2"].float()
    smoothed = parts.get("pre_quant_scale")  # inputs are multiplied by it
    return x_NK if smoothed is None else x_NK * smoothed.float()


def _packed_floats(parts: Parts) -> Tensor:
    """NVFP4 and MXFP4 by compressed-tensors, which divides by NVFP4's global scale."""
    x_NK, scale = _e2m1(parts["weight_packed"]), parts["weight_scale"]
    if scale.dtype == torch.uint8:
        return _scaled(x_NK, _e8m0(scale), parts)
    # Its library computes this dtype, whatever the model's.
    return _scaled(x_NK, scale.float() / parts["weight_global_scale"].float(), parts).bfloat16()


def _packed_integers(parts: Parts) -> Tensor:
    """Words along inputs, and zero points in words along outputs; both with half of their range added."""
    codes, (rows, columns) = parts["weight_packed"], parts["weight_shape"].tolist()
    bits = _bits_of(columns, codes.shape[1], parts)
    half = 1 << (bits - 1)
    x_NK = unpack_words(codes, bits, 1)[:, :columns] - half
    zero = parts.get("weight_zero_point")
    scale, index_K = parts["weight_scale"], parts.get("weight_g_idx")
    parts.check(x_NK.shape[0] == rows, f"{x_NK.shape[0]} rows for {rows}")
    if zero is not None:
        zero = (unpack_words(zero, bits, 0)[:rows] - half) if zero.dtype == torch.int32 else zero.int()
    return _by_group(x_NK, scale, zero, index_K, parts)


def _gptq(parts: Parts) -> Tensor:
    """Words along inputs; zero points in words along outputs, in the first format one less than they are."""
    codes, scale_GN = parts["qweight"], parts["scales"]
    index_K = parts.get("g_idx")
    bits = int(parts.config.get("bits") or 4)
    parts.check(bits in (2, 4, 8), f"{bits} bits do not fill words")
    x_KN, zero_GN = unpack_words(codes, bits, 0), unpack_words(parts["qzeros"], bits, 1)
    if parts.config.get("checkpoint_format") != GPTQ_V2:
        zero_GN = zero_GN + 1
    return _by_group(x_KN.T, scale_GN.T, zero_GN.T, index_K, parts)


def _awq(parts: Parts) -> Tensor:
    """Words along outputs, in an order of their own."""
    bits = int(parts.config.get("bits") or parts.config.get("w_bit") or 4)
    version = str(parts.config.get("version") or "gemm").lower()
    parts.check(
        bits == 4 and version == "gemm", f"{bits} bits in the {version!r} layout, where 4 in 'gemm' are known"
    )
    x_KN, zero_GN = (
        unpack_words(parts[end], bits, 1).unflatten(1, (-1, len(AWQ_ORDER)))[..., list(AWQ_ORDER)].flatten(1)
        for end in ("qweight", "qzeros")
    )
    return _by_group(x_KN.T, parts["scales"].T, zero_GN.T, None, parts)


def _experts_mxfp4(parts: Parts) -> Tensor:
    """Experts of gpt-oss -> [E, K, N]."""
    blocks_ENB16, scales_ENB = parts["_blocks"], parts["_scales"]
    (experts, outputs, blocks, half), scale_shape = blocks_ENB16.shape, tuple(scales_ENB.shape)
    parts.check(scale_shape == (experts, outputs, blocks), f"{scale_shape} scales")
    # Values of two bits times powers of two are exact in BF16.
    # On the device at once: a layer's experts are four times as large as in the file.
    x_EKN = torch.empty(experts, blocks * 2 * half, outputs, dtype=torch.bfloat16, device=parts.device)
    for x_KN, blocks_NB16, scales_NB in zip(x_EKN, blocks_ENB16, scales_ENB, strict=True):
        x_KN.copy_((_e2m1(blocks_NB16) * _e8m0(scales_NB)[..., None]).flatten(1).T)
    return x_EKN


def _bits_of(values: int, count: int, parts: Parts) -> int:
    """Return the bits of each of `values` that lie in so many words."""
    sizes = [bits for bits in (2, 4, 8) if -(-values * bits // WORD) == count]
    parts.check(bool(sizes), f"{values} values in {count} words")
    return sizes[0]


def _by_group(
    x_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, index_K: Tensor | None, parts: Parts
) -> Tensor:
    """Return (x - zero) * scale, where each input is of a group: one after the other, or as an index says."""
    columns, groups = x_NK.shape[1], scale_NG.shape[1]
    if index_K is None or not (index_K >= 0).all():
        parts.check(columns % groups == 0, f"{groups} groups of {columns} inputs")
        index_K = torch.arange(columns) // (columns // groups)
    fits = len(index_K) == columns and int(index_K.max()) < groups and scale_NG.shape[0] == x_NK.shape[0]
    parts.check(fits, f"scales {tuple(scale_NG.shape)} for {tuple(x_NK.shape)} values")
    index_K = index_K.long()
    x_NK = x_NK.float()
    if zero_NG is not None:
        parts.check(zero_NG.shape == scale_NG.shape, f"zero points {tuple(zero_NG.shape)}")
        x_NK = x_NK - zero_NG.float()[:, index_K]
    return _rounded(x_NK * scale_NG.float()[:, index_K], scale_NG)


@dataclass(frozen=True, slots=True)
class _Spelling:
    codes: str
    """The end of the name of the tensor that holds a matrix's codes."""
    unpack: Callable[[Parts], Tensor]
    pack: Reader | None = None
    """Reads it as it is kept on a device, where it can be."""
    is_transposed: bool = False
    """Whether it is a matrix of each expert, with inputs before outputs."""


def _spelling(dtypes: Mapping[str, str], config: Mapping[str, Any]) -> _Spelling | None:
    """Return how a module's matrix is stored, None where it is not quantised.

    Args:
        dtypes: Of its tensors, by the end of their names, as safetensors writes them.
        config: The checkpoint's `quantization_config`.
    """
    spelling = None
    if "_blocks" in dtypes:
        spelling = _Spelling("_blocks", _experts_mxfp4, pack.experts_mxfp4, is_transposed=True)
    elif "qweight" in dtypes:
        is_awq = config.get("quant_method") == "awq"
        spelling = _Spelling("qweight", *((_awq, pack.awq) if is_awq else (_gptq, pack.gptq)))
    elif "weight_packed" in dtypes:
        is_words = dtypes["weight_packed"] == "I32"
        integers, floats = (_packed_integers, pack.packed_integers), (_packed_floats, pack.packed_floats)
        spelling = _Spelling("weight_packed", *(integers if is_words else floats))
    elif dtypes.get("weight") == "I8" and config.get("quant_method") == W4AFP8:
        spelling = _Spelling("weight", _signed_integers, pack.signed_integers)
    elif dtypes.get("weight") in {"F8_E4M3", "I8"}:
        spelling = _Spelling("weight", _small_floats, pack.small_floats)
    elif dtypes.get("weight") == "U8":
        spelling = _Spelling("weight", _modelopt_nvfp4, pack.modelopt_nvfp4)
    return spelling
