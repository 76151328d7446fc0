"""Activations in FP8: what a checkpoint asks for, and what serving does (`--activations`). No torch.

Packed FP8 weights are multiplied by inputs that are quantised as the checkpoint's makers did. Inputs of other matrices,
of unpacked ones and of experts stay in the compute dtype, whatever the checkpoint asks.

Sources: Transformers' FineGrainedFP8Config and AutoFP8 (`activation_scheme`), compressed-tensors' `input_activations`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nibble.config import ACTIVATIONS
from nibble.errors import ConfigError
from nibble.hardware import Hardware
from nibble.kernels.weight_formats import (
    FP8_ARCH,
    GROUP,
    Activations,
    WeightFormat,
    activations_unserved,
)
from nibble.model_spec import StoredWeights

AUTO, FULL, FP8 = ACTIVATIONS
"""What --activations takes: as the checkpoint asks, in the compute dtype, or in FP8 wherever weights are."""
TITLES = {
    Activations.GROUP: f"a scale for each token and {GROUP} inputs",
    Activations.TOKEN: "a scale for each token",
    Activations.TENSOR: "the checkpoint's own scales",
}


def of_scheme(config: Mapping[str, Any]) -> Activations:
    """Return what fine-grained FP8, AutoFP8 or W4AFP8 asks for."""
    if config.get("activation_scheme", "dynamic") == "static":
        return Activations.TENSOR
    return Activations.GROUP if config.get("weight_block_size") else Activations.TOKEN


def of_group(entry: Mapping[str, Any] | None) -> Activations:
    """Return what compressed-tensors' and ModelOpt's `input_activations` ask for; NONE for other than FP8."""
    if not entry or entry.get("type") != "float" or int(entry.get("num_bits") or 0) != 8:
        return Activations.NONE
    if not entry.get("dynamic"):
        return Activations.TENSOR
    size = entry.get("group_size") or 0
    if entry.get("strategy") == "group":
        return Activations.GROUP if size == GROUP else Activations.NONE
    return Activations.TOKEN


def activations_of(choice: str, request: Activations | None, format: WeightFormat) -> Activations:
    """Return how the inputs of a packed matrix are quantised.

    Args:
        choice: AUTO, FULL or FP8, as decide() returned it.
        request: What the checkpoint asks for; None where there is none, or it does not name the matrix.
        format: Of the matrix. A group as wide as the row is the row.
    """
    if choice == FULL or format.codes != "e4m3":
        return Activations.NONE
    kind = request or (_finest(format) if choice == FP8 else Activations.NONE)
    if kind is Activations.GROUP and not format.group:
        kind = Activations.TOKEN
    return Activations.NONE if activations_unserved(format, kind) else kind


def _finest(format: WeightFormat) -> Activations:
    return Activations.GROUP if format.group else Activations.TOKEN


def outline(formats: Sequence[tuple[WeightFormat | None, Activations]]) -> tuple[str, bool]:
    """Return what matrices of these formats ask for, in words, and whether any of them is multiplied by FP8.

    Args:
        formats: Of packed matrices, and what the checkpoint asks for with each.
    """
    served = [
        request
        for format, request in formats
        if format and not activations_unserved(format, request or _finest(format))
    ]
    return "; ".join(dict.fromkeys(TITLES[request] for request in served if request)), bool(served)


def decide(choice: str, stored: StoredWeights | None, unpacked: str, hardware: Hardware) -> tuple[str, str]:
    """Decide what becomes of the inputs of packed matrices.

    Args:
        choice: What --activations says.
        stored: Quantised weights; None where there are none.
        unpacked: Why matrices do not stay packed; empty where they do.
        hardware: The machine.

    Returns:
        AUTO, FULL or FP8 for the loader, and why it is FULL where the checkpoint asks for FP8.

    Raises:
        ConfigError: FP8 is requested and cannot be served.
    """
    why = _blocker(stored, unpacked, hardware)
    if choice == FP8 and why:
        raise ConfigError(f"--activations fp8 cannot be served: {why}; leave it out")
    asks = bool(stored and stored.activations)
    if choice == FULL or why or (choice == AUTO and not asks):
        return FULL, (why or "--activations bf16") if asks else ""
    return choice, ""


def _blocker(stored: StoredWeights | None, unpacked: str, hardware: Hardware) -> str:
    if stored is None:
        return "the weights are not quantised (--weights fp8 does so as they load)"
    if not stored.has_fp8:
        return (
            f"FP8 activations are multiplied by FP8 weights with scales of blocks, rows or matrices, and these are "
            f"{stored.title}"
        )
    if unpacked:
        return unpacked
    if not hardware.is_cpu and hardware.arch < FP8_ARCH:
        return f"SM{hardware.arch} multiplies no FP8, which begins with SM{FP8_ARCH}"
    return ""


def notes(choice: str, why: str, stored: StoredWeights) -> Iterator[str]:
    """Yield what is to be known of activations: from decide(), where weights are quantised."""
    if choice == FULL:
        if why:
            yield f"activations are not quantised, though the checkpoint asks for FP8: {why}"
    elif stored.activations:
        yield f"activations of packed layers in FP8, as the checkpoint asks: {stored.activations}"
    else:
        yield (
            "activations of packed layers in FP8, which the checkpoint does not ask for: a scale for each token"
            + (f", or token and {GROUP} inputs where weights are in blocks")
        )
