"""CachePlan: what is decided of a cache, before its memory is divided. engine/plan.py decides it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nibble.attention.planner.defaults import BEST, Defaults
from nibble.attention.planner.evidence import NO_RANKINGS, Rankings
from nibble.attention.planner.plan import Plan
from nibble.config import Config
from nibble.hardware import Hardware
from nibble.model_spec import ModelSpec
from nibble.models.activations import FULL
from nibble.models.quantization import Weights


@dataclass(frozen=True)
class CachePlan:
    """What is decided of a cache: for which model, on which machine, with which routes and layout."""

    config: Config
    hardware: Hardware
    model_spec: ModelSpec
    plan: Plan
    here: bool = True
    """Whether it is for this machine, with the packages that are installed."""
    declared: bool = False
    """Whether `auto` may choose backends that this version knows but cannot run."""
    defaults: Defaults = BEST
    """What an exact window and transforms that are left to Nibble may become."""
    times: Rankings = NO_RANKINGS
    """Times of this machine that `auto` follows."""
    preface: tuple[str, ...] = ()
    """Notes that are not of the routes."""
    weights: Weights | None = None
    """What becomes of weights that are quantised."""
    activations: str = FULL
    """What becomes of the inputs of packed weights (models/activations.py)."""

    @property
    def warning(self) -> str:
        """Why times that were measured on this machine are not used."""
        return self.times.warning

    @property
    def settled(self) -> Defaults:
        """What became of `defaults`, for who looks at the same plan again."""
        return replace(self.defaults, window=self.plan.window)
