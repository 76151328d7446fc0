"""How a model is divided among ranks. It loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

EXPERTS, ATTENTION = "expert parallelism", "data-parallel attention"


class Options(Protocol):
    """What a Config says of it."""

    @property
    def tp(self) -> int:
        """Return the number of ranks."""
        ...

    @property
    def expert_parallel(self) -> bool:
        """Return whether experts are divided by number."""
        ...

    @property
    def attention_dp(self) -> bool:
        """Return whether requests are divided among ranks for attention."""
        ...


@dataclass(frozen=True, slots=True)
class Ways:
    """The number of ranks, and what is divided in another way than by the heads and widths of each layer."""

    size: int
    expert_parallel: bool = False
    """A rank has some experts whole, and not a part of each."""
    attention_dp: bool = False
    """A rank attends for some requests with all heads, and keeps their pages alone."""

    @classmethod
    def of(cls, config: Options) -> Ways:
        """Return what a Config asks for."""
        return cls(config.tp, config.expert_parallel, config.attention_dp)

    @property
    def names(self) -> tuple[str, ...]:
        """Return what is divided in another way, in words."""
        pairs = (EXPERTS, self.expert_parallel), (ATTENTION, self.attention_dp)
        return tuple(name for name, is_on in pairs if is_on)


ONE_GPU = Ways(1)
