"""Values of two parameters, paired so that each is tested, without the product of both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any


def rotated(firsts: Sequence[Any], seconds: Sequence[Any], count: int = 1) -> list[tuple[Any, Any]]:
    """The first of `firsts` with all `seconds`, and each other with so many of them, in turn."""
    turns = cycle(seconds)
    return [(firsts[0], each) for each in seconds] + [
        (first, next(turns)) for first in firsts[1:] for _ in range(count)
    ]
