"""Plain matrices of a loaded model, quantised in place (online.py): what could not be quantised as it was read.

Shape suffixes: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from torch import nn

from nibble.kernels.quantized_linear.quantize import rounded
from nibble.models.experts import expert_matrices, round_experts, set_packed_experts
from nibble.models.linear import QuantizedLinear
from nibble.models.pack import NotPackedError, Packer, require_finite
from nibble.models.quantization import MatrixFormat, Quantization


def quantize_linears(model: nn.Module, quantization: Quantization, packer: Packer | None) -> None:
    """Quantise the plain linear layers of a loaded model, in place: to packed ones, or by the errors of the format.

    Args:
        model: on the device where it runs; layers that are packed already stay as they are.
        quantization: which layers, and how.
        packer: for packed layers, None where all are unpacked again; so are those that no kernels multiply.

    Raises:
        WeightError: a matrix has values that are not finite.
    """
    for name, layer in list(model.named_modules()):
        # Exactly this class: a subclass may compute something else.
        format = quantization.format_of(name) if type(layer) is nn.Linear else None
        if format is None or format.packed is None:
            continue
        weight_NK = layer.weight.detach()
        try:
            if packer is None:
                raise NotPackedError
            matrix = packer.quantize(name, weight_NK, format)
            model.set_submodule(name, QuantizedLinear(matrix, layer.bias))
        except NotPackedError:
            require_finite(name, weight_NK)
            layer.weight = nn.Parameter(
                rounded(weight_NK, format.packed, format.block_rows), requires_grad=False
            )


def quantize_experts(model: nn.Module, format: MatrixFormat, packer: Packer | None) -> None:
    """Quantise the plain experts of a loaded model, in place; see quantize_linears()."""
    for path, module in list(model.named_modules()):
        weights = {f"{path}.{name}": weight.detach() for name, weight in expert_matrices(module).items()}
        if not weights or format.packed is None:
            continue
        is_transposed = bool(module.is_transposed)
        try:
            if packer is None:
                raise NotPackedError
            packed = {
                name.rpartition(".")[2]: packer.quantize_experts(name, x, format, is_transposed=is_transposed)
                for name, x in weights.items()
            }
            set_packed_experts(module, packed)
        except NotPackedError:
            for name, weight_E in weights.items():
                require_finite(name, weight_E)
                round_experts(name, weight_E, format.packed, format.block_rows, is_transposed=is_transposed)
