"""Launches of Triton's kernels that do not look at each argument again: never of code for another kind of argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nibble.kernels import ahead
from nibble.kernels.launches import Launches, kind_of


class Compiled:
    packed_metadata = ()

    def __init__(self, launched: list[str], name: str) -> None:
        self.launched, self.name = launched, name

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launched.append(f"{self.name} {grid} {arguments[-1]}")


class Kernel:
    """As triton.jit makes one: it compiles at a launch."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.count = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Compiled:
            self.count += 1
            self.launched.append(f"compile {options}")
            return Compiled(self.launched, f"code {self.count}")

        return launch


X = torch.zeros(64)


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (X, X[16:], True),
        (X, X[1:], False),
        (X, X.double(), False),
        (X, None, False),
        (1, 2, False),
        (3, 5, True),
        (16, 5, False),
        (16, 48, True),
        (3, 1 << 32, False),
        (0.5, 0.25, True),
        ((3,), (5,), False),
        ((True, None), (True, None), True),
    ],
)
def test_code_is_launched_again_for_arguments_of_the_same_kind(first: Any, second: Any, alike: bool) -> None:
    assert (kind_of(first) == kind_of(second)) == alike
    kernel, launches = Kernel(), Launches()
    launches(kernel, (1, 2, 3), (first,), (first, "a"), num_warps=4)
    launches(kernel, (4, 5, 6), (second,), (second, "b"), num_warps=4)
    again = "code 1 (4, 5, 6) b" if alike else "compile {'num_warps': 4}"
    assert kernel.launched == ["compile {'num_warps': 4}", again]


def test_a_rehearsal_keeps_nothing_and_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, launches = Kernel(), Launches()
    launches(kernel, (1, 1, 1), (), ("a",))
    monkeypatch.setattr(ahead, "is_rehearsal", lambda: True)
    launches(kernel, (1, 1, 1), (), ("b",))
    launches(kernel, (1, 1, 1), (1,), ("c",))
    assert kernel.count == 3, "Triton's own launch, which the rehearsal has replaced"
    monkeypatch.undo()
    launches(kernel, (1, 1, 1), (1,), ("d",))
    assert kernel.count == 4
