"""Where the adapter of the CUDA kernels leaves its output: in the step's rows, by the kernel where it can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.attention.backends.adapters.triton_cuda import Cuda

Q = torch.arange(24.0).view(3, 2, 4)
VIEW: Any = SimpleNamespace(streams={name: SimpleNamespace(paged=SimpleNamespace(heads=1)) for name in "kv"})


def leaving(q: Tensor, *rest: Any) -> Tensor:
    """A kernel that stores where it is told to."""
    out = rest[-1] if isinstance(rest[-1], Tensor) else torch.empty_like(q)
    return out.copy_(q + 1)


def adapter(columns: int, prompts: Any) -> Cuda:
    made = object.__new__(Cuda)
    made._kernels = SimpleNamespace(columns_of=lambda *_: columns, most_columns=lambda _: 8)
    made._prompts = SimpleNamespace(prefill_attention=prompts)
    made._decode = leaving
    made._wide = SimpleNamespace(forward=lambda q, *_: q + 1)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("columns", [4, 16], ids=["decodes", "too many rows"])
@pytest.mark.parametrize("state", [None, ()], ids=["few rows", "prompts"])
@pytest.mark.parametrize("prompts", [leaving, lambda q, *_: q + 1], ids=["told where", "elsewhere"])
def test_output_is_where_the_step_wants_it(columns: int, state: Any, prompts: Any) -> None:
    cuda, out = adapter(columns, prompts), torch.zeros(5, 2, 4)
    arguments: Any = (Q, VIEW, None, None, state)
    cuda.forward_into(*arguments, out[1:4])
    assert torch.equal(out[1:4], cuda.forward(*arguments)) and torch.equal(out[1:4], Q + 1)
    assert not out[[0, 4]].any()
