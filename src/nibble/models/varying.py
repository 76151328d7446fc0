"""Types of models whose last bits depend on the batch on a CPU, where --deterministic replaces nothing."""

from __future__ import annotations

from nibble.errors import ConfigError
from nibble.hardware import Hardware
from nibble.model_spec import ModelSpec

VARYING = frozenset({
    "dbrx", "deepseek_v4", "hy_v4", "jetmoe", "kolibri1", "llama4_text", "longcat_flash", "muse_spark_text", "step3p5",
})  # fmt: skip
"""By the type of their language model: gates of gathered or mixed values, experts of their own code. docs/families.md
says so of them; tests/integration/test_all_families.py finds out."""


def require_invariant(model_spec: ModelSpec, hardware: Hardware) -> None:
    """Raise ConfigError where answers of a model are known to depend on the batch, although attention does not."""
    if hardware.is_cpu and model_spec.family in VARYING:
        raise ConfigError(
            f"--deterministic: on a CPU the last bits of {model_spec.family} depend on how a prompt is cut, by its "
            "gates or its experts (docs/families.md); leave --deterministic out, or serve it on a GPU"
        )
