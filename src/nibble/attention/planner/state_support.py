"""Where recurrent states are computed, and where that was verified: facts about kernels/recurrence, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nibble.attention.planner.evidence import LedgerEntry
from nibble.attention.planner.support import GPUS, BackendInfo
from nibble.hardware import Hardware
from nibble.model_spec import ModelSpec, Phase, RecurrentGroup

LEDGER_NAME = "recurrence"
"""The backend of entries in the ledger that are about recurrent states; their kind is the rule."""
NO_FORMAT = "none"
"""The format of layers that keep inputs of a convolution alone."""
PHASES = (Phase.PREFILL, Phase.EXTEND, Phase.DECODE)
"""What is verified: prompts, chunks that are cut anywhere, and decode steps."""
KERNELS = "triton"
"""The package, and the backend, that serve where these kernels do."""


def refusal(model: ModelSpec, hardware: Hardware, backends: Mapping[str, BackendInfo]) -> str:
    """Return why a machine cannot compute a model's recurrent states; empty where it can."""
    if not model.states or hardware.is_cpu:
        return ""
    what = f"{model.family} has layers that keep a recurrent state"
    if hardware.arch not in GPUS:
        oldest = min(GPUS)
        return f"{what}, whose kernels run on GPUs from SM{oldest} on, and this one has SM{hardware.arch}: --device cpu"
    info = backends.get(KERNELS)
    if info and info.missing:
        return f"{what}, whose kernels on a GPU need {info.missing}; or --device cpu"
    return ""


def untested(
    states: Sequence[RecurrentGroup], format: str, hardware: Hardware, ledger: Iterable[LedgerEntry]
) -> dict[str, str]:
    """Return the rules that were never verified on such a GPU in a format of states, and the phases."""
    if hardware.is_cpu:  # where the definition itself serves
        return {}
    verified = {entry.key for entry in ledger if entry.backend == LEDGER_NAME}
    missing = {
        group.rule: [
            str(phase) for phase in PHASES if key(group, phase, format, hardware.arch) not in verified
        ]
        for group in states
    }
    return {rule: ", ".join(phases) for rule, phases in missing.items() if phases}


def key(group: RecurrentGroup, phase: Phase, format: str, arch: int) -> tuple[str, str, str, str, int]:
    """Return what the ledger calls layers in a phase. A convolution alone has no format."""
    return LEDGER_NAME, str(phase), group.rule, format if group.values else NO_FORMAT, arch
