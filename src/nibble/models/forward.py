"""Run a model for one step, as Transformers wrote it or compiled: tensors and a StepContext in, logits out.

Shape suffixes: T tokens of the step (a leading 1 is Transformers' batch), S rows whose logits are asked for.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from nibble.attention.operators import Step
from nibble.attention.step import StepContext
from nibble.errors import ConfigError, NibbleError
from nibble.garbage import pause_gc
from nibble.models import compile_cache, graph_passes
from nibble.models.hook import CONTEXT, attention_mask_for
from nibble.models.hub import first_line
from nibble.models.invariant import InvariantMode
from nibble.models.parallel_rows import ROWS, Rows
from nibble.models.taps import TAPS, Taps

Backend = Callable[..., Any]
Forward = Callable[..., Any]
"""(ids [1, T], positions [1, T], rows [S], context) -> logits [S, V]; of a model that a head drafts for (taps.py)
those, and hidden states [T, X]. A head (head_model.py) is given hidden states [T, H] behind these, and leaves its own
[S, H] beside its logits."""


def plain(model: nn.Module) -> Forward:
    """Return a forward function that runs the model eagerly."""
    return partial(_logits, model)


def plain_invariant(model: nn.Module) -> Forward:
    """Return a forward function that runs the model eagerly, with rows that do not depend on one another.

    Raises:
        ConfigError: at the first call, if the model runs an operator of which that is not known.
    """
    step = Step()

    def forward(ids: Tensor, positions: Tensor, rows_S: Tensor, ctx: StepContext) -> Tensor:
        # Attention is one operator here, inside which nothing is replaced: its kernels keep the promise.
        step.context = ctx
        with InvariantMode():  # type: ignore[no-untyped-call]
            return _logits(model, ids, positions, rows_S, step)

    return forward


def compiled(model: nn.Module, backend: str | Backend = "inductor", *, keep: bool = False) -> Forward:
    """Return a forward function that compiles the model at its first call, for any number of tokens but one.

    torch.compile specialises on sizes 0 and 1. The first call should have different numbers of tokens and rows: equal
    sizes there are taken to be always equal.

    Args:
        model: the model.
        backend: of torch.compile; models/invariant.py has one for rows that do not depend on one another.
        keep: whether inductor's code is taken from the cache folder, or kept there (compile_cache.py).

    Raises:
        ConfigError: at the first call, if the model cannot be compiled.
    """
    # One object for all calls: a new context at each step would make torch compile again.
    step = Step()
    # torch checks the outputs of custom operators for aliases, and under that check no backend could vmap or compile.
    torch._functorch.config.check_custom_op_aliasing = False
    # Products in float32 are those that must be, as of routers; users cannot do anything about it.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    options = inductor_options(model) if backend == "inductor" else {}
    function = _with_own_code(_logits)
    run: Any = torch.compile(function, fullgraph=True, backend=backend, options=options or None)
    # Both are set by the first call; code of other backends cannot be kept.
    artifact: Any = None
    is_compiled = False

    def forward(
        ids: Tensor, positions: Tensor, rows_S: Tensor, ctx: StepContext, *states_TH: Tensor
    ) -> Tensor:
        nonlocal artifact, is_compiled
        step.context = ctx
        arguments = (
            model,
            *map(_without_offset, (ids, positions, rows_S)),
            step,
            *map(_without_offset, states_TH),
        )
        if not is_compiled:
            compile_cache.use_cache_folder()
            with pause_gc(), torch._dynamo.config.patch(_WITHOUT_GC):
                artifact = _load_or_compile(function, arguments, options) if keep else None
                logits, artifact = _first_call(artifact, run, arguments)
            is_compiled = True
            return logits
        if not artifact:
            return run(*arguments)
        return artifact(*arguments) if artifact.guard_check(*arguments) else _compile_call(run, arguments)

    return forward


def inductor_options(model: nn.Module) -> dict[str, Any]:
    """Return the options that a model on a GPU is compiled with."""
    if not next(model.parameters()).is_cuda:
        return {}
    # Independent small kernels, such as norms of queries and keys, become one launch.
    return {"combo_kernels": True, **_early_launches(), **graph_passes.options(model)}


def _early_launches() -> dict[str, bool]:
    """Return the option by which inductor's kernels start while those in front of them end, where it is safe."""
    with pause_gc():
        from torch._inductor.codegen.triton import TritonKernel  # and with it all that makes code

    option = "triton.enable_pdl"
    if option not in torch._inductor.config.get_config_copy() or not hasattr(TritonKernel, _BEFORE_ACCESS):
        return {}
    own = getattr(TritonKernel, _BEFORE_ACCESS)
    if not hasattr(own, "__wrapped__"):
        setattr(TritonKernel, _BEFORE_ACCESS, _always_waiting(own))
    return {option: True}


_BEFORE_ACCESS = "_handle_pdl_before_access"
"""Where inductor decides whether a kernel waits before it reads or writes (torch/_inductor/codegen/triton.py)."""


def _always_waiting(decide: Callable[..., None]) -> Callable[..., None]:
    """Return the same, but every kernel waits.

    Inductor lets one go ahead that has nothing to do with the kernel just in front of it. Then that one's wait does not
    count for those behind it, and a buffer may be written that the kernel in front, or one before, still reads.
    """

    from torch._inductor.virtualized import V

    @functools.wraps(decide)
    def always(self: Any, *arguments: Any, **options: Any) -> None:
        # Where no kernel is known to be in front, it waits.
        scheduler = V.graph.scheduler
        if scheduler is None:
            return decide(self, *arguments, **options)
        previous, scheduler.previous_node = getattr(scheduler, "previous_node", None), None
        try:
            return decide(self, *arguments, **options)
        finally:
            scheduler.previous_node = previous

    return always


def _load_or_compile(function: FunctionType, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return code from the cache, or compile it into the cache; None where that is not possible."""
    path = compile_cache.path_of(arguments[0], options)
    if (loaded := compile_cache.load(path, function, arguments)) is not None:
        return loaded
    _mark_dynamic(arguments)
    return compile_cache.compile_into(path, function, arguments, options)


# Dynamo collects garbage by itself when it is done, which takes a second or more of a large model's start.
_WITHOUT_GC = {"run_gc_after_compile": False} if hasattr(torch._dynamo.config, "run_gc_after_compile") else {}


def _first_call(artifact: Any, run: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, Any]:
    """Return the logits of a first call, and the artifact if that computed them; else the call compiles."""
    if artifact:
        try:
            return artifact(*arguments), artifact
        except (NibbleError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of all kinds: another process may have written it
            compile_cache.log.info("compiled code fails (%s: %s)", type(error).__name__, error)
    return _compile_call(run, arguments), None


def _mark_dynamic(arguments: Sequence[Any]) -> None:
    """Mark the sizes that vary."""
    model, ids, positions, rows_S, _, *states_TH = arguments
    rows: Rows | None = getattr(model, ROWS, None)
    of_all = (rows.marks if rows else None) or ()
    for tensor, dim in ((ids, 1), (positions, 1), (rows_S, 0), *((x, 0) for x in (*states_TH, *of_all))):
        torch._dynamo.mark_dynamic(tensor, dim)


def _compile_call(run: Any, arguments: tuple[Any, ...]) -> Tensor:
    """Make a call that compiles: mark the sizes that vary, and explain what went wrong."""
    _mark_dynamic(arguments)
    try:
        return run(*arguments)
    except TorchDynamoException as error:  # anything in a foreign model may not compile
        # What a backend raises comes wrapped; an operator that --deterministic refuses is no failure to compile.
        if isinstance(inner := getattr(error, "inner_exception", None), ConfigError):
            raise inner from None
        raise ConfigError(
            f"torch.compile cannot compile this model ({type(error).__name__}: {first_line(error)}); "
            "serve it with --no-compile"
        ) from error


def _without_offset(x: Tensor) -> Tensor:
    """Return a tensor without a storage offset: the compiler would specialise on it."""
    return x.clone() if x.storage_offset() else x


def _logits(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    rows_S: Tensor,
    ctx: StepContext | Step,
    *states_TH: Tensor,
) -> Any:
    states = {"hidden_states": states_TH[0][None]} if states_TH else {}
    out = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=attention_mask_for(model, ids, ctx),
        # Keys and values go to Nibble's pages, so a cache of Transformers would be a second copy.
        use_cache=False,
        # A row of logits is as wide as the vocabulary, so only rows that are sampled are computed.
        logits_to_keep=rows_S,
        **states,
        **{CONTEXT: ctx},
    )
    if states_TH:
        return out.logits[0], out.hidden_states[0][0]
    taps: Taps | None = getattr(model, TAPS, None)
    return (out.logits[0], taps.take()) if taps else out.logits[0]


def _with_own_code(function: Any) -> Any:
    """Return a copy with its own code object: torch keys compiled code by it, and engines must not share."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
