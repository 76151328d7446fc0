"""A stand-in for a CUDA graph: records what a function does to tensors, and repeats it over the same memory.

Whatever Python decided while it was recorded stays as it was, as in a graph: a number read from a list, a branch, a shape.
To wait for the device is refused, as a graph refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = frozenset(
    {
        "item",
        "_local_scalar_dense",
        "is_nonzero",
        "nonzero",
        "equal",
        "masked_select",
        "unique",
        "_unique2",
        "allclose",
    }
)


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        picked = any(isinstance(x, Tensor) and x.dtype is torch.bool for x in tree_leaves(args[1:]))
        if func.overloadpacket.__name__ in WAITS or (picked and "index" in func.overloadpacket.__name__):
            raise RuntimeError(f"{func} waits for the device")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, out in self.calls:
                for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def record(run: Callable[[], None]) -> Callable[[], None]:
    """As engine/model_runner.py records: once to warm up, once to record."""
    run()
    with Tape() as tape:
        run()
    return tape.replay
