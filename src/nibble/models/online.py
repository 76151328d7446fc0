"""Matrices that are quantised as a checkpoint loads (`--weights`): which, in what format, and the plan. No torch.

Formats are those of published checkpoints, and so are the matrices: all linear layers in the decoder's layers but
routers and other gates, indexers of sparse attention, and MLA's `kv_b_proj`; and experts whose matrices kernels/experts
may multiply. Embeddings, norms and the output layer are no linear layers of a layer. Experts that a family computes by
code of its own stay as they are.

Sources: llm-compressor's examples and ModelOpt's default configs (what they leave out), DeepSeek V3's
`quantization_config` (blocks of FP8), OCP's MX formats, NVIDIA's NVFP4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from nibble.errors import ConfigError
from nibble.hardware import Hardware, format_bytes
from nibble.kernels.weight_formats import FULL_DTYPE, Activations, WeightFormat
from nibble.model_spec import ONLINE, StoredWeights
from nibble.models import activations
from nibble.models.quantization import (
    FP8_BLOCK,
    FULL,
    HEADS,
    MXFP4,
    NVFP4,
    Handling,
    MatrixFormat,
    Quantization,
    Rule,
    Weights,
    multiplier,
    quantization_entry,
)
from nibble.models.weight_bytes import ALWAYS_PLAIN, Parameter, packed_bytes, stored_bytes

FORMATS = {
    "fp8": FP8_BLOCK,
    "int4": MatrixFormat("int4", 4, 128, 2, packed=WeightFormat("uint4", 128)),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
}
"""By the names that `--weights` takes."""
IN_LAYERS = r"re:.*\.\d+\."
"""Names of modules in numbered layers."""
_PLACE = re.compile(r"\.(\d+\..*)$")
_OF_EXPERT = re.compile(r"(\d+)\.(?:.*\.)?experts\.\d+\.[^.]+")
EXPERTS = "experts"
PLAIN = (
    "gate", "router", "shared_expert_gate", "indexer", ALWAYS_PLAIN.strip("."), *HEADS,
)  # fmt: skip
"""Parts of names of modules that are not quantised."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which matrices of a checkpoint are quantised as they are read, by their names there.

    A guess, as a family may name modules otherwise than its checkpoints. What seems to be one of these and is none is
    read again, and what does not is quantised once the model is loaded.
    """

    format: MatrixFormat
    linears: frozenset[str]
    """Places of linear layers."""
    layers: frozenset[int]
    """Numbers of layers with experts."""
    experts: Mapping[str, bool]
    """Places of parameters with a matrix of each expert, and whether these have inputs before outputs."""

    def is_matrix(self, module: str) -> bool:
        """Return whether a module has a matrix that is quantised."""
        match = _OF_EXPERT.fullmatch(place(module))
        return place(module) in self.linears or (match is not None and int(match[1]) in self.layers)


def quantization_to(weights: str) -> Quantization:
    """Return which linear layers `--weights` quantises, and how. Experts have the same format."""
    return Quantization(ONLINE, (Rule((IN_LAYERS,), FORMATS[weights]),), (*PLAIN, EXPERTS))


def place(name: str) -> str:
    """Return what tells a module of a layer from others, whatever prefix it has in a checkpoint: `3.mlp.up_proj`."""
    match = _PLACE.search(name)
    return match[1] if match else ""


def layer_of(place: str) -> int:
    """Return the number of the layer that a place is in."""
    return int(place.partition(".")[0])


def outline(weights: str, parameters: Iterable[Parameter], dtype: str, config: object) -> StoredWeights:
    """Return what a model takes whose linear layers and experts are quantised.

    Args:
        weights: A key of FORMATS.
        parameters: Of the model.
        dtype: The compute dtype.
        config: The model's, as models/refusals.py reads it.

    Raises:
        ConfigError: The checkpoint is quantised already, or nothing of the model would be.
    """
    if entry := quantization_entry(config):
        raise ConfigError(
            f"--weights {weights} quantises BF16 and FP16 checkpoints, and this one is quantised already, by "
            f"{entry.get('quant_method')}; leave it out, or name the checkpoint that this one was made of"
        )
    quantization, all_parameters = quantization_to(weights), list(parameters)
    if not any(x.is_experts or (x.is_linear and quantization.format_of(x.module)) for x in all_parameters):
        raise ConfigError(
            f"--weights {weights} quantises linear layers of a decoder, and this model has none; leave it out"
        )
    experts = [x for x in all_parameters if x.is_experts]
    others = [x for x in all_parameters if not x.is_experts]
    of_experts = replace(quantization, ignored=())
    modules = {x.module for x in experts}
    plain_experts = [x for x in others if EXPERTS in x.module.split(".") and x.module not in modules]
    full = 4 if dtype == FULL_DTYPE else FULL
    packed = packed_bytes(of_experts, experts, dtype)
    return StoredWeights(
        ONLINE,
        quantization.kind,
        stored_bytes(quantization, others) + stored_bytes(of_experts, experts),
        packed_bytes(quantization, others, dtype) + packed,
        full * sum(prod(x.shape) for x in others) + packed,
        experts=full * sum(prod(x.shape) for x in plain_experts if len(x.shape) > 1),
        has_fp8=activations.outline([(FORMATS[weights].packed, Activations.NONE)])[1],
    )


def notes(weights: Weights, dtype: str, hardware: Hardware) -> Iterator[str]:
    """Yield what is to be known of weights that are quantised as they load.

    Args:
        weights: From plan_weights().
        dtype: The compute dtype.
        hardware: The machine.
    """
    stored = weights.stored
    title, other = (
        f"weights quantised to {stored.title} as they load",
        f"{format_bytes(weights.full)} in {dtype}",
    )
    if weights.handling is Handling.PACKED:
        by = multiplier(weights, hardware)
        yield f"{title}: {format_bytes(weights.bytes)}, multiplied as they are packed {by}; {other}"
    elif weights.handling is Handling.EXPERTS:
        yield (
            f"{title}: {format_bytes(weights.bytes)}, experts multiplied as they are packed, and others unpacked again "
            f"({weights.why}); {other}"
        )
    else:
        why = f" ({weights.why})" if weights.why else ""
        yield f"{title}, and unpacked again here{why}: errors of {stored.title}, and {other}, as without"
    if stored.experts:
        yield f"--weights {stored.kind} leaves experts as they are: {format_bytes(stored.experts)}"
