"""How a step runs a model: as Transformers wrote it, or compiled. Both take tensors and a StepContext, and give logits.

Owns Forward, plain() and compiled(). Must not know of requests, nor of what attention does with the context.

Shape suffixes: T tokens of the step (a leading 1 is Transformers' batch), S rows whose logits are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from nibble.attention.layer import StepContext
from nibble.attention.op import Step
from nibble.errors import ConfigError
from nibble.hardware import cache_folder
from nibble.models.adapt import mask_for
from nibble.models.hook import CONTEXT
from nibble.models.quiet import first_line

Forward = Callable[[Tensor, Tensor, Tensor, StepContext], Tensor]
"""(ids [1, T], positions [1, T], rows [S], context) -> logits [S, V]."""

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def plain(model: nn.Module) -> Forward:
    """Runs the model line by line."""

    def forward(ids: Tensor, positions: Tensor, rows_S: Tensor, ctx: StepContext) -> Tensor:
        return _logits(model, ids, positions, rows_S, ctx)

    return forward


def compiled(model: nn.Module, backend: str = "inductor") -> Forward:
    """Runs the model compiled, once for any number of tokens but one: 0 and 1 would be compiled for themselves.

    Compiling happens in the first call, whose tokens and rows should differ in number: sizes that are equal there are
    taken to be always equal. Raises ConfigError where the model cannot be compiled.
    """
    step = Step()
    # torch watches what custom operators return, and under its watch no backend could map or compile by itself
    torch._functorch.config.check_custom_op_aliasing = False
    run: Any = torch.compile(_own(_logits), fullgraph=True, backend=backend, options=_options(model, backend))
    known = False

    def forward(ids: Tensor, positions: Tensor, rows_S: Tensor, ctx: StepContext) -> Tensor:
        nonlocal known
        step.context = ctx
        ids, positions, rows_S = map(_alone, (ids, positions, rows_S))
        if known:
            return run(model, ids, positions, rows_S, step)
        logits = _first(run, model, ids, positions, rows_S, step)
        known = True
        return logits

    return forward


def _options(model: nn.Module, backend: str) -> dict[str, Any] | None:
    """What the compiler is told. On a GPU: small kernels that do not wait for one another, as the norms and rotations
    of queries and keys, become one launch. A decode step of an 8B model has hundreds."""
    on_gpu = backend == "inductor" and next(model.parameters()).is_cuda
    return {"combo_kernels": True} if on_gpu else None


def _first(run: Any, model: nn.Module, ids: Tensor, positions: Tensor, rows_S: Tensor, step: Step) -> Tensor:
    """The call that compiles: it says which sizes vary, and in words what went wrong."""
    # Importing torch._dynamo fills the variable with a default in /tmp; only another value is the user's.
    if os.environ.get(CACHE_VARIABLE, default_cache_dir()) == default_cache_dir():
        os.environ[CACHE_VARIABLE] = str(cache_folder() / "inductor")
    for tensor, dim in ((ids, 1), (positions, 1), (rows_S, 0)):
        torch._dynamo.mark_dynamic(tensor, dim)
    try:
        return run(model, ids, positions, rows_S, step)
    except TorchDynamoException as error:  # a compiler may stumble over anything in a foreign model
        raise ConfigError(
            f"torch.compile cannot compile this model ({type(error).__name__}: {first_line(error)}); "
            "serve it with --no-compile"
        ) from error


def _alone(x: Tensor) -> Tensor:
    """A tensor that does not begin in the middle of another: where it begins is a size too, to a compiler."""
    return x.clone() if x.storage_offset() else x


def _logits(model: Any, ids: Tensor, positions: Tensor, rows_S: Tensor, ctx: StepContext | Step) -> Tensor:
    found: Tensor = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask_for(model, ids),
        use_cache=False,
        logits_to_keep=rows_S,
        **{CONTEXT: ctx},
    ).logits[0]
    return found


def _own(function: Any) -> Any:
    """A copy with a code object of its own, by which torch keeps what it compiled: one engine's are no other's."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
