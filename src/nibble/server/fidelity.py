"""What the engine's error monitor says of the cache, in the words of /health."""

from __future__ import annotations

from collections.abc import Mapping


def fidelity_warning(stats: Mapping[str, float]) -> str | None:
    """Return the warning of /health while a layer is above its limit; None else."""
    if not stats.get("fidelity_alert"):
        return None
    limits, errors = fidelity_parts(stats, "limit"), fidelity_parts(stats, "error")
    # A limit may be infinite, and quotients of two such layers could not be compared.
    layer = max(errors, key=lambda layer: errors[layer] / min(limits[layer], 1e9))
    return (
        f"attention over the KV cache is off by {errors[layer]:.1%} of its norm in layer {layer}, where "
        f"{limits[layer]:.1%} is allowed; the engine's log and docs/serving.md say more"
    )


def fidelity_parts(stats: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the numbers `fidelity_NAME_PART`, by part."""
    prefix = f"fidelity_{name}_"
    return {key.removeprefix(prefix): value for key, value in stats.items() if key.startswith(prefix)}
