"""Quantised matrices of a checkpoint as they are kept on a device, where kernels multiply them so.

Codes keep their bits; they are brought into the order of kernels/weight_formats.py, and scales are written out by rows.
What cannot be kept is unpacked as ever (unpack.py), which also reports what does not fit together: a matrix with
act-order or smoothed inputs, one in a shape or format that no kernels multiply, or scales beyond the compute dtype.

While a model loads, a placeholder stands for each matrix that is kept: a tensor of its shape with a single value. The
loader renames tensors and puts them into modules; where a placeholder has gone shows which module its matrix is of.
Where a file has experts one by one, the loader puts them together (torch.stack), and gates with others (torch.cat): so
are their matrices then. A loader that does anything else gets plain values that are no numbers, and its matrices belong
to no module, so they are read once more, and unpacked.

Shape suffixes: N outputs, K inputs, G groups of inputs; E experts, B blocks of 32 inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nibble.errors import WeightError
from nibble.kernels.experts.matrices import PackedExperts, joined, packed_experts
from nibble.kernels.quantized_linear.matrix import KernelKey, PackedMatrix
from nibble.kernels.quantized_linear.naive import pack_words, unpack_words
from nibble.kernels.quantized_linear.quantize import quantize
from nibble.kernels.weight_formats import WORD, Activations, WeightFormat, experts_unserved, unserved
from nibble.models.activations import FULL, activations_of
from nibble.models.experts import expert_matrices, single_matrices
from nibble.models.matrix_parts import Parts
from nibble.models.quantization import MatrixFormat, parse
from nibble.models.shards import Split, packed_part

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the outputs of a word lie in AWQ's GEMM layout, by output."""
GPTQ_V2 = "gptq_v2"
"""GPTQ's `checkpoint_format` in which zero points are stored as they are; in the first they are one less."""
INPUT_SCALES = ("input_scale", "activation_scale")
"""What checkpoints call the scale of a matrix's inputs."""
LARGEST_ERROR = 2**-8
"""Of a scale in the compute dtype, relative; BF16 rounds by half of it, and a scale beyond its range is further off."""
_PLAIN = re.compile(r"\.kv_b_proj\.weight$")
"""Names of matrices that are always unpacked: MLA takes this one apart."""
_EXPERT = re.compile(r"(^|\.)experts\.")
"""Names of experts' matrices."""


class NotPackedError(Exception):
    """A matrix cannot be kept packed, and is unpacked."""


class MatrixMaker:
    """Makes packed matrices of what a file has of them."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        unserved: Callable[[WeightFormat, int, int, str], str],
        activations: str = FULL,
    ) -> None:
        """Make matrices for a device.

        Args:
            device: Where they are kept.
            dtype: The compute dtype.
            unserved: Why kernels do not multiply a matrix, by format, outputs, inputs and compute dtype.
            activations: What becomes of their inputs (activations.py).
        """
        self.device, self.dtype, self.activations = device, dtype, activations
        self._unserved = unserved

    def matrix(
        self,
        kind: str,
        codes: Tensor,
        scale: Tensor,
        *,
        scales: str = "",
        zero_NG: Tensor | None = None,
        global_scale: Tensor | None = None,
        rounded: torch.dtype = torch.float32,
    ) -> PackedMatrix:
        """Return a matrix; raise NotPackedError where no kernels multiply it.

        Args:
            kind: Of its codes.
            codes: int32 [N, words].
            scale: [N, G].
            scales: Their format, where it is not the compute dtype.
            zero_NG: Zero points as integers.
            global_scale: float32 [1].
            rounded: 16 bits in which its library has dequantised values.
        """
        bits, groups = WeightFormat(kind).bits, scale.shape[1]
        if zero_NG is not None and (zero_NG == 1 << (bits - 1)).all():
            zero_NG = None
        rows, columns = codes.shape[0], codes.shape[1] * WORD // bits
        _require(
            scale.shape[0] == rows
            and columns % groups == 0
            and (zero_NG is None or zero_NG.shape == scale.shape)
        )
        group = columns // groups if groups > 1 else 0
        format = WeightFormat(kind, group, scales, zero_NG is not None, global_scale is not None)
        _require(not self._unserved(format, rows, columns, str(self.dtype).removeprefix("torch.")))
        zero = None
        if zero_NG is not None:
            _require(int(zero_NG.min()) >= 0 and int(zero_NG.max()) < 1 << bits)
            zero = pack_words(zero_NG, bits, 0)
        scale = scale.contiguous().view(torch.uint8) if scales else self._cast(scale)
        # In 16 bits kernels round as they do.
        rounded = rounded if self.dtype == torch.float32 else torch.float32
        return PackedMatrix(format, codes.contiguous(), scale, self.dtype, rounded, zero, global_scale)

    def require_served(self, matrix: PackedMatrix) -> None:
        """Raise NotPackedError where no kernels multiply a matrix."""
        rows, columns = matrix.shape
        _require(not self._unserved(matrix.format, rows, columns, str(self.dtype).removeprefix("torch.")))

    def with_activations(
        self, matrix: PackedMatrix, stored: MatrixFormat | None, parts: Parts
    ) -> PackedMatrix:
        """Return a matrix with how its inputs are quantised, where they are.

        Args:
            matrix: Of FP8.
            stored: Its format by the checkpoint's config, which says how; None where that does not name it.
            parts: Its tensors in the checkpoint, with the scale of its inputs if that is fixed.

        Raises:
            WeightError: That scale is missing, or is none.
        """
        activations = activations_of(self.activations, stored.activations if stored else None, matrix.format)
        if activations is Activations.TENSOR:
            return replace(matrix, activations=activations, input_scale=_input_scale(parts).to(self.device))
        return replace(matrix, activations=activations)

    def _cast(self, scale: Tensor) -> Tensor:
        """Return scales in the compute dtype."""
        exact = scale.float()
        cast = exact.to(self.dtype)
        error = (cast.float() - exact).abs()
        _require(bool((error <= LARGEST_ERROR * exact.abs()).all()))  # which NaN is not
        return cast.contiguous()


Reader = Callable[[Parts, MatrixMaker], PackedMatrix | PackedExperts]
"""Reads a matrix in one spelling, or those of all experts; raises NotPackedError."""
Packed = TypeVar("Packed", PackedMatrix, PackedExperts)


class Packer:
    """The packed matrices of a model that loads."""

    def __init__(
        self, device: str, dtype: torch.dtype, activations: str = FULL, *, linears: bool = True
    ) -> None:
        """Pack the matrices of a model.

        Args:
            device: Where they are kept.
            dtype: The compute dtype.
            activations: What becomes of the inputs of packed linear layers (activations.py).
            linears: Whether these are packed, and not experts alone.
        """
        self.device, self.dtype, self.linears = torch.device(device), dtype, linears
        self.activations = activations
        self.plain: set[str] = set()
        """Names of matrices that are unpacked although they could be kept."""
        self._of_linears = MatrixMaker(self.device, dtype, unserved, activations)
        self._of_experts = MatrixMaker(self.device, dtype, lambda f, _, k, name: experts_unserved(f, k, name))
        self._entries: dict[int, _Entry] = {}
        """By the address of their placeholder, which is kept so that no other tensor gets it."""
        self._placed: set[int] = set()
        """Placeholders whose matrices modules have."""
        self._lock = Lock()

    def placeholder(self, parts: Parts, read: Reader, *, is_transposed: bool = False) -> Tensor | None:
        """Keep a matrix, and return what stands for it as the model loads; None where it cannot be kept.

        Args:
            parts: Its tensors in the checkpoint.
            read: Makes it of them.
            is_transposed: Whether matrices of all experts have inputs before outputs.
        """
        is_expert = bool(_EXPERT.search(parts.name))
        if parts.name in self.plain or _PLAIN.search(parts.name) or not (is_expert or self.linears):
            return None
        try:
            packed = read(parts, self._of_experts if is_expert else self._of_linears)
        except NotPackedError:
            return None
        if isinstance(packed, PackedExperts):
            experts, outputs, inputs = packed.shape
            shape = (experts, inputs, outputs) if is_transposed else packed.shape
            return self._keep(_Entry((parts.name,), packed), shape)
        place = self._keep(_Entry((parts.name,), packed), packed.shape)
        return _ExpertPlaceholder.of(place, self) if is_expert else place

    def _keep(self, entry: _Entry, shape: Sequence[int]) -> Tensor:
        """Return a new placeholder."""
        # Not a number, so that whatever should use it shows.
        entry.single = torch.full((1,), torch.nan, dtype=self.dtype, device=self.device)
        with self._lock:
            self._entries[entry.single.untyped_storage().data_ptr()] = entry
        return entry.single.expand(shape)

    def put_together(
        self, parts: Sequence[Tensor], join: Callable[[list[Any]], PackedExperts | None]
    ) -> Tensor | None:
        """Replace placeholders by one for what `join` makes of their matrices; None where that is nothing."""
        with self._lock:
            places = [part.untyped_storage().data_ptr() for part in parts]
            entries = [self._entries.get(place) for place in places]
            matrices = [entry.packed for entry in entries if entry]
            joint = join(matrices) if len(matrices) == len(entries) else None
            if joint is None:
                return None
            for place in places:
                del self._entries[place]
        names = tuple(name for entry in entries if entry for name in entry.names)
        return self._keep(_Entry(names, joint), joint.shape)

    def matrices(self, model: nn.Module) -> Iterator[tuple[str, nn.Linear, PackedMatrix]]:
        """Yield the linear layers of a loaded model that have a placeholder, by name, with their matrices."""
        for name, module in list(model.named_modules()):
            # Exactly this class: a subclass may compute something else.
            if type(module) is nn.Linear and (matrix := self._packed(module.weight, PackedMatrix)):
                # Layers may share a matrix.
                self._placed.add(module.weight.untyped_storage().data_ptr())
                yield name, module, matrix

    def experts(self, model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, PackedExperts]]]:
        """Yield the experts of a loaded model that have placeholders for all of their matrices, with these by name."""
        for module in list(model.modules()):
            weights = expert_matrices(module)
            entries = {name: self._packed(weight, PackedExperts) for name, weight in weights.items()}
            packed = {name: experts for name, experts in entries.items() if experts}
            if packed and len(packed) == len(weights):
                self._placed.update(weight.untyped_storage().data_ptr() for weight in weights.values())
                yield module, packed

    def _packed(self, weight: Tensor, kind: type[Packed]) -> Packed | None:
        """Return what a parameter is the placeholder of."""
        if weight.is_meta:
            return None
        entry = self._entries.get(weight.untyped_storage().data_ptr())
        return entry.packed if entry and isinstance(entry.packed, kind) else None

    def forget(self) -> set[str]:
        """Let go of matrices that no module has, and return their names: they must be unpacked."""
        others = (entry for place, entry in self._entries.items() if place not in self._placed)
        names = {name for entry in others for name in entry.names}
        self._entries.clear()
        self._placed.clear()
        return names

    def quantize(self, name: str, weight_NK: Tensor, format: MatrixFormat) -> PackedMatrix:
        """Return a plain matrix, quantised; raise NotPackedError where no kernels multiply it."""
        packed, dtype = format.packed, str(self.dtype).removeprefix("torch.")
        is_expert = bool(_EXPERT.search(name))
        _require(packed is not None and weight_NK.dim() == 2 and (is_expert or self.linears))
        assert packed
        rows, columns = weight_NK.shape
        _require(
            not (
                experts_unserved(packed, columns, dtype)
                if is_expert
                else unserved(packed, rows, columns, dtype)
            )
        )
        weight_NK = weight_NK.to(self.device)
        require_finite(name, weight_NK)
        matrix = quantize(weight_NK, packed, self.dtype, format.block_rows)
        if is_expert:
            return matrix
        return replace(matrix, activations=activations_of(self.activations, None, matrix.format))

    def quantize_experts(
        self, name: str, weight_E: Tensor, format: MatrixFormat, *, is_transposed: bool
    ) -> PackedExperts:
        """Return the plain matrices of all experts, quantised; raise NotPackedError where no kernels multiply them.

        Args:
            name: Of the parameter, with `experts` in it.
            weight_E: [E, N, K], or [E, K, N] if is_transposed.
            format: What to quantise to.
            is_transposed: Whether inputs come before outputs.
        """
        _require(weight_E.dim() == 3)
        singles = single_matrices(name, weight_E, is_transposed=is_transposed)
        parts = [packed_experts([self.quantize(name, x_NK, format) for x_NK in x_ENK]) for x_ENK in singles]
        experts = joined([part for part in parts if part]) if all(parts) else None
        _require(experts is not None)
        assert experts
        return experts

    def expected_key(self, stored: MatrixFormat, *shapes: tuple[int, int]) -> KernelKey | None:
        """Return what kernels will be chosen by for a matrix, or several merged ones; None where they are unpacked.

        Args:
            stored: Their format.
            shapes: [N, K] of each, with the same K.
        """
        format, columns, dtype = stored.packed, shapes[0][1], str(self.dtype).removeprefix("torch.")
        if format is None or any(unserved(format, *shape, dtype) for shape in shapes):
            return None
        # A single group is the whole row.
        format = replace(format, group=0) if format.group == columns else format
        return KernelKey(
            format,
            (sum(rows for rows, _ in shapes), columns),
            self.dtype,
            False,  # merged ones have the same global scale in most checkpoints
            activations_of(self.activations, stored.activations, format),
            format.group > 0 and stored.block_rows % format.group == 0,
        )


@dataclass
class _Entry:
    """A matrix that is kept, or those of all experts."""

    names: tuple[str, ...]
    packed: PackedMatrix | PackedExperts
    single: Tensor | None = None
    """The value that its placeholder has everywhere."""


class _ExpertPlaceholder(Tensor):
    """The placeholder of one expert's matrix, or of some of all experts, that the loader puts together."""

    packer: Packer

    @staticmethod
    def of(place: Tensor, packer: Packer) -> _ExpertPlaceholder:
        placeholder: _ExpertPlaceholder = place.as_subclass(_ExpertPlaceholder)
        placeholder.packer = packer
        return placeholder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to:
            # It has the compute dtype, and stands for what is where it shall be.
            return args[0]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        join = _JOINTS.get((func, dim)) if func in (torch.stack, torch.cat) and isinstance(dim, int) else None
        if join and args and all(isinstance(part, cls) for part in args[0]):
            packer = args[0][0].packer
            if (place := packer.put_together(args[0], join)) is not None:
                return cls.of(place, packer)
        # Anything else is of plain tensors: views have the same address, and what is computed is not a number.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            # A parameter is of the type of its tensor.
            if func in (Tensor.detach, Tensor.requires_grad_):
                return result.as_subclass(cls)
            return result.as_subclass(Tensor) if isinstance(result, cls) else result


_JOINTS: dict[tuple[Any, int], Callable[[list[Any]], PackedExperts | None]] = {
    (torch.stack, 0): packed_experts,
    (torch.cat, 1): joined,
}
"""What a loader does with experts, and what that makes of their matrices."""


def _require(holds: bool) -> None:
    if not holds:
        raise NotPackedError


def _rounding(scale: Tensor) -> torch.dtype:
    """Return what libraries round dequantised values to: the dtype of scales of 16 bits."""
    return scale.dtype if scale.dtype in (torch.bfloat16, torch.float16) else torch.float32


def _as_int32(codes: Tensor) -> Tensor:
    """Return bytes [N, B] as int32 words [N, B / 4]."""
    _require(codes.shape[1] % 4 == 0)
    return codes.contiguous().view(torch.int32)


def small_floats(parts: Parts, maker: MatrixMaker) -> PackedMatrix:
    """FP8 and INT8."""
    codes = parts["weight"].to(maker.device)
    scale = parts.get("weight_scale_inv", "weight_scale")
    zero = parts.get("weight_zero_point")
    _require(scale is not None and (zero is None or not zero.any()))
    assert scale is not None
    rounded, kind = _rounding(scale), "e4m3"
    if codes.dtype == torch.int8:
        # Half of the range is added, which turns the sign.
        kind, codes = "uint8", codes.view(torch.uint8) ^ 128
    rows, columns = codes.shape
    scale = scale.to(maker.device)
    if scale.dtype == torch.uint8:
        _require(scale.dim() == 2 and scale.shape[0] == rows)
        return maker.matrix(kind, _as_int32(codes), scale, scales="e8m0")
    is_blocked = scale.dim() > 1 and scale.shape[0] < rows
    scale = _by_rows(scale.float(), rows, columns, parts)
    matrix = maker.matrix(kind, _as_int32(codes), scale, rounded=rounded)
    if kind == "uint8":
        return matrix
    matrix = replace(matrix, block_rows=parts.block[0] if is_blocked else 1)
    if maker.activations == FULL:
        return matrix
    return maker.with_activations(matrix, _stored_format(parts), parts)


def _stored_format(parts: Parts) -> MatrixFormat | None:
    """Return the format of a matrix as the checkpoint's config has it."""
    quantization = parse(parts.config)
    return quantization.format_of(parts.name.removesuffix(".weight")) if quantization else None


def _input_scale(parts: Parts) -> Tensor:
    """Return the scale of a matrix's inputs, float32 [1]."""
    stored = parts.get(*INPUT_SCALES)
    # The first name stands in the error.
    scale = (parts[INPUT_SCALES[0]] if stored is None else stored).float().view(-1)
    parts.check(len(scale) == 1, f"{len(scale)} scales of inputs")
    parts.check(bool(scale.isfinite() & (scale > 0)), f"the scale of inputs is {scale.item():g}")
    return scale


def _by_rows(scale: Tensor, rows: int, columns: int, parts: Parts) -> Tensor:
    """Return scales of the matrix, of rows, of groups or of blocks -> [N, G]."""
    if scale.numel() == 1:
        return scale.view(1, 1).expand(rows, 1)
    if scale.dim() == 4:  # ModelOpt's blocks: [N, 1, K, 1]
        scale = scale[:, 0, :, 0]
    if scale.dim() == 1:
        scale = scale[:, None]
    height, width = parts.block
    if scale.shape[0] == rows and height > 1:
        return scale
    _require(columns % width == 0 and tuple(scale.shape) == (-(-rows // height), columns // width))
    return scale.repeat_interleave(height, 0)[:rows]


def modelopt_nvfp4(parts: Parts, maker: MatrixMaker) -> PackedMatrix:
    """Bytes with two E2M1 values each, and two scales."""
    _require(parts.get("pre_quant_scale") is None)
    codes, scale, second = (
        parts[end].to(maker.device) for end in ("weight", "weight_scale", "weight_scale_2")
    )
    _require(scale.dtype == torch.float8_e4m3fn and second.numel() == 1)
    return maker.matrix("e2m1", _as_int32(codes), scale, scales="e4m3", global_scale=second.float().view(1))


def packed_floats(parts: Parts, maker: MatrixMaker) -> PackedMatrix:
    """NVFP4 and MXFP4 by compressed-tensors, which divides by NVFP4's global scale."""
    codes, scale = (parts[end].to(maker.device) for end in ("weight_packed", "weight_scale"))
    if scale.dtype == torch.uint8:
        return maker.matrix("e2m1", _as_int32(codes), scale, scales="e8m0")
    divisor = parts["weight_global_scale"].to(maker.device).float()
    _require(scale.dtype == torch.float8_e4m3fn and divisor.numel() == 1)
    return maker.matrix(
        "e2m1",
        _as_int32(codes),
        scale,
        scales="e4m3",
        global_scale=1 / divisor.view(1),
        rounded=torch.bfloat16,
    )


def packed_integers(parts: Parts, maker: MatrixMaker) -> PackedMatrix:
    """Words along inputs, and zero points in words along outputs; both with half of their range added."""
    codes, (rows, columns) = parts["weight_packed"].to(maker.device), parts["weight_shape"].tolist()
    bits = columns and codes.shape[1] * WORD / columns
    _require(bits in (4, 8) and codes.shape[0] == rows)
    scale, zero = parts["weight_scale"].to(maker.device), parts.get("weight_zero_point")
    _require(scale.dim() == 2 and _is_in_order(parts.get("weight_g_idx"), scale.shape[1], columns))
    zero_NG = None
    if zero is not None:
        zero = zero.to(maker.device)
        is_packed = zero.dtype == torch.int32
        zero_NG = unpack_words(zero, int(bits), 0)[:rows] if is_packed else zero.int() + (1 << int(bits - 1))
    return maker.matrix(f"uint{int(bits)}", codes, scale, zero_NG=zero_NG, rounded=_rounding(scale))


def _is_in_order(index_K: Tensor | None, groups: int, columns: int) -> bool:
    """Return whether groups are of inputs that follow one another."""
    if index_K is None or not (index_K >= 0).all():
        return True
    return columns % groups == 0 and torch.equal(index_K.long(), torch.arange(columns) // (columns // groups))


def gptq(parts: Parts, maker: MatrixMaker) -> PackedMatrix:
    """Words along inputs; zero points in words along outputs, in the first format one less than they are."""
    bits = int(parts.config.get("bits") or 4)
    _require(bits in (4, 8))
    codes, scale_GN, zero = (parts[end].to(maker.device) for end in ("qweight", "scales", "qzeros"))
    columns = codes.shape[0] * WORD // bits
    _require(_is_in_order(parts.get("g_idx"), scale_GN.shape[0], columns))
    zero_GN = unpack_words(zero, bits, 1)
    if parts.config.get("checkpoint_format") != GPTQ_V2:
        zero_GN = zero_GN + 1
    return maker.matrix(f"uint{bits}", codes.T, scale_GN.T, zero_NG=zero_GN.T, rounded=_rounding(scale_GN))


def awq(parts: Parts, maker: MatrixMaker) -> PackedMatrix:
    """Words along outputs, in an order of their own."""
    scale_GN = parts["scales"].to(maker.device)
    x_KN, zero_GN = (
        unpack_words(parts[end].to(maker.device), 4, 1)
        .unflatten(1, (-1, len(AWQ_ORDER)))[..., list(AWQ_ORDER)]
        .flatten(1)
        for end in ("qweight", "qzeros")
    )
    _require(x_KN.shape[0] * 4 % WORD == 0)
    codes = pack_words(x_KN.T, 4, 1)
    return maker.matrix("uint4", codes, scale_GN.T, zero_NG=zero_GN.T, rounded=_rounding(scale_GN))


def signed_integers(parts: Parts, maker: MatrixMaker) -> PackedMatrix:
    """W4AFP8's experts: two's complement of 4 bits, of which half of the range is added by turning the sign."""
    codes, scale = (parts[end].to(maker.device) for end in ("weight", "weight_scale_inv"))
    codes = codes.view(torch.uint8) ^ 0x88
    group = int(parts.config.get("group_size") or 128)
    _require(scale.dim() == 2 and 2 * codes.shape[1] == scale.shape[1] * group)
    return maker.matrix("uint4", _as_int32(codes), scale, rounded=_rounding(scale))


def experts_mxfp4(parts: Parts, maker: MatrixMaker) -> PackedExperts:
    """Experts of gpt-oss, one after the other."""
    blocks_ENB16, scales_ENB = parts["_blocks"], parts["_scales"]
    _require(scales_ENB.shape == blocks_ENB16.shape[:3])
    matrices = (
        maker.matrix(
            "e2m1", _as_int32(blocks.to(maker.device).flatten(1)), scales.to(maker.device), scales="e8m0"
        )
        for blocks, scales in zip(blocks_ENB16, scales_ENB, strict=True)
    )
    experts = packed_experts(list(matrices))
    if experts is None:
        raise NotPackedError
    return experts


def part_of(read: Reader, split: Split, parts: Parts, maker: MatrixMaker) -> PackedMatrix | PackedExperts:
    """Return a rank's part of a matrix, which is read as a whole."""
    matrix = read(parts, maker)
    _require(isinstance(matrix, PackedMatrix))
    assert isinstance(matrix, PackedMatrix)
    part = packed_part(matrix, split, parts.name)
    maker.require_served(part)
    return part


def plain(format: MatrixFormat, packer: Packer, parts: Parts, _: MatrixMaker) -> PackedMatrix:
    """A matrix that is quantised as it is read (online.py)."""
    return packer.quantize(parts.name, parts["weight"], format)


def plain_experts(
    format: MatrixFormat, packer: Packer, is_transposed: bool, parts: Parts, _: MatrixMaker
) -> PackedExperts:
    """Matrices of all experts in one tensor that are quantised as they are read (online.py)."""
    (weight_E,) = (parts[end] for end in parts.stored)
    return packer.quantize_experts(parts.name, weight_E, format, is_transposed=is_transposed)


def require_finite(name: str, weight: Tensor) -> None:
    """Raise WeightError for a matrix with infinities or NaN, which no code means."""
    if not weight.isfinite().all():
        raise WeightError(f"{name} cannot be quantised: it has values that are not finite; download it again")
