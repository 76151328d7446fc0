"""Gates of recurrent layers on a CPU: a token's have the same bits however many tokens a step has.

torch computes sigmoid, softplus and silu by vectors of values, and what is left over at the end one by one, which
rounds otherwise. A layer of fewer heads than a vector has values would so decay, and learn, a little differently in a
prompt and in a decode step. Here each token's values fill whole vectors, the rest of which is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

VECTORS = 32
"""A row of a multiple of so many values is computed by whole vectors: two of AVX-512, four of AVX2."""
ROUNDED = frozenset({torch.Tensor.sigmoid, torch.sigmoid, F.sigmoid, F.softplus, F.logsigmoid, F.silu})
"""Functions of single values that torch computes by other means at the end of a tensor. exp is not one of them."""


class _WholeVectors(TorchFunctionMode):
    """Computes ROUNDED of rows as if they filled vectors."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in ROUNDED or not args or not _has_odd_rows(args[0]):
            return func(*args, **kwargs)
        x, *rest = args
        size = x.shape[-1]
        padded: Tensor = func(F.pad(x, (0, -size % VECTORS)), *rest, **kwargs)
        return padded[..., :size]


def _has_odd_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cpu and x.dim() > 0 and bool(x.shape[-1] % VECTORS)


def whole_vectors() -> AbstractContextManager[Any]:
    """Return a context in which a row's gates do not depend on how many rows there are."""
    return nullcontext() if torch.compiler.is_compiling() else _WholeVectors()
