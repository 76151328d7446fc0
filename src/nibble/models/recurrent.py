"""Recurrent layers of Transformers models, whose states are kept by the step.

A family's layer computes its convolution and its rule in functions of its module, which forward() calls by name.
Without a cache both take all tokens for one sequence that begins here. So forward() is made once more from its own
source, with these functions as arguments: the family's code runs around functions of Nibble, which know the layer and
the step, and nothing in its module changes. Lightning attention calls no such function, and gets a forward() that is
made of its own submodules.

What a family's function is given becomes one rule (kernels/recurrence): keys, queries, values, log decays and betas.

Shape suffixes: T tokens, C channels, W taps of a convolution, G heads of keys, K their values, H heads of the state,
V their values, N columns of a state of Mamba; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nibble.errors import ConfigError
from nibble.model_spec import Recurrence

Serve = Callable[[Recurrence, dict[str, Any], Mapping[str, Any]], Tensor]
"""(rule, its arguments, keywords that remain) -> the output, of the shape and dtype of the rule's `x`."""
ACTIVATIONS = (None, "silu", "swish")
"""What may follow a convolution: nothing, or SiLU by either name."""


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """One layer's call of a convolution or of a rule."""

    layer: int
    rule: Recurrence
    arguments: Mapping[str, Any]
    """As the functions of attention/recurrent.py take them by name; the output is like `x`."""


def conv(
    serve: Serve,
    x_1CT: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> Tensor:
    """Convolve each channel with its own taps, the last of which is for the present token -> [1, C, T]."""
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"a convolution is followed by {activation}, and Nibble computes one alone or with SiLU: this family "
            "cannot be served right"
        )
    x_TC = x_1CT[0].transpose(0, 1)
    arguments = {"x": x_TC, "weight": weight, "bias": bias, "activation": activation}
    return serve("conv", arguments, rest).transpose(0, 1)[None]


def delta_rule(
    serve: Serve, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    chunk_size: int | None = None, *, use_qk_l2norm_in_kernel: bool = False, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Apply the gated delta rule: query, key [1, T, G, K] and value [1, T, H, V] -> ([1, T, H, V], None).

    g: log decay [1, T, H], or [1, T, H, K] where each column has its own.
    """
    if not use_qk_l2norm_in_kernel:
        query = query * query.shape[-1] ** -0.5
    arguments = {
        "q": query[0].to(value.dtype),
        "k": key[0].to(value.dtype),
        "x": value[0],
        "log_decay": g[0].float(),
        "beta": beta[0].float(),
        "unit": use_qk_l2norm_in_kernel,
    }
    return serve("delta", arguments, rest)[None], None


def state_space(
    serve: Serve, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int | None = None, *,
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **rest: Any,
) -> Tensor:  # fmt: skip
    """Apply the rule of Mamba 2: x [1, T, H, V], dt [1, T, H], A [H], B and C [1, T, G, N] -> [1, T, H, V]."""
    x_THV, dt_TH = x[0], _step_size(dt[0], dt_bias, softplus=dt_softplus).clamp(*dt_limit)
    arguments = {"q": C[0], "k": B[0], "x": x_THV, "log_decay": dt_TH * A.float(), "beta": dt_TH}
    out_THV = serve("decay", arguments, rest)
    if D is not None:
        out_THV = (out_THV.float() + x_THV.float() * D.float()[:, None]).to(x.dtype)
    return out_THV[None]


def selective(
    serve: Serve, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, *, delta_softplus: bool = False, **rest: Any,
) -> Tensor:  # fmt: skip
    """Apply the rule of Mamba 1: x, dt and z [1, C, T], A [C, N], B and C [1, N, T] -> [1, C, T]."""
    x_TC, B_TN, C_TN = (tensor[0].transpose(0, 1) for tensor in (x, B, C))
    dt_TC = _step_size(dt[0].transpose(0, 1), delta_bias, softplus=delta_softplus)
    arguments = {"x": x_TC, "dt": dt_TC, "A": A.float(), "B": B_TN, "C": C_TN}
    out_TC = serve("selective", arguments, rest)
    if D is not None:
        out_TC = out_TC.float() + x_TC.float() * D.float()
    if z is not None:
        out_TC = out_TC.float() * F.silu(z[0].transpose(0, 1).float())
    return out_TC.to(x.dtype).transpose(0, 1)[None]


def _step_size(dt: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    """Return the step sizes in float32, of which Mamba computes decays and weights of inputs."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def lightning(serve: Serve, query: Tensor, key: Tensor, value: Tensor, slope: Tensor, **rest: Any) -> Tensor:
    """Decay by a constant of each head: query, key and value [1, T, H, D], slope [H] -> [1, T, H, D]."""
    beta_TH = value.new_ones(value.shape[1:3], dtype=torch.float32)
    log_decay_TH = -slope.float().expand_as(beta_TH)
    arguments = {"q": query[0], "k": key[0], "x": value[0], "log_decay": log_decay_TH, "beta": beta_TH}
    return serve("decay", arguments, rest)[None]


_LIGHTNING = "lightning"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": conv,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": state_space,
    "mamba_selective_scan": selective,
    _LIGHTNING: lightning,
}
"""What serves in the place of a family's function, by its name; what it is given first is a Serve."""
HARMLESS = frozenset({"use_mambapy", "use_associative_scan"})
"""Keywords by which families choose among implementations of one rule."""
_LIGHTNING_PARTS = frozenset({"slope_rate", "qkv_proj", "act_fn", "norm", "output_gate", "out_proj"})


def recurrent_modules(model: Any) -> Iterator[tuple[nn.Module, Callable[..., Any], tuple[str, ...]]]:
    """Yield each recurrent module with a forward() for it and the names of FUNCTIONS that this takes as keywords.

    Raises:
        ConfigError: its family's code cannot be read.
    """
    for module in model.modules():
        if all(hasattr(module, part) for part in _LIGHTNING_PARTS):
            yield module, _lightning_forward, (_LIGHTNING,)
        elif (own := _own_forward(_forward_of(module))) is not None:
            yield module, *own


def own_forwards(model: Any) -> dict[nn.Module, Callable[..., Any]]:
    """Return the forward() of each recurrent module as its family wrote it, in torch alone.

    Where flash-linear-attention, causal-conv1d or mamba-ssm are installed, families call their kernels instead, which
    are compiled at the first call and round in an order of their own.
    """
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for module, own, names in recurrent_modules(model):
        functions = {name: inspect.unwrap(own.__globals__[name]) for name in names if name != _LIGHTNING}
        if functions:
            forwards[module] = partial(own, module, **functions)
    return forwards


def _forward_of(module: Any) -> Any:
    """Return the function that the class of `module` has for forward(), without what decorates it."""
    return inspect.unwrap(type(module).forward)


@cache
def _own_forward(function: Any) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """Return a forward() that takes functions as arguments, and their names; None if it calls none of FUNCTIONS."""
    if not inspect.isfunction(function):
        return None
    names = tuple(name for name in FUNCTIONS if name in function.__code__.co_names)
    # A function of its module, and not a method of the same name.
    names = tuple(name for name in names if callable(function.__globals__.get(name)))
    return (_with_arguments(function, names), names) if names else None


def _with_arguments(function: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return `function` made from its source once more, with global names as keywords.

    It has the globals and the lines of the first, so compilers and tracebacks see the family's own code.
    """
    definition, code = _definition(function), function.__code__
    if code.co_freevars:
        raise ConfigError(
            f"{function.__qualname__} cannot be served: it is more than a function of its module"
        )
    # What decorates it was unwrapped, and annotations may name what exists for type checkers only.
    definition.decorator_list, definition.returns = [], None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    definition.args.kwonlyargs += [ast.arg(name) for name in names]
    definition.args.kw_defaults += [None] * len(names)
    tree = ast.fix_missing_locations(ast.Module([definition], type_ignores=[]))
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    scope: dict[str, Any] = {}
    exec(compile(tree, code.co_filename, "exec", dont_inherit=True), function.__globals__, scope)
    forward: Callable[..., Any] = scope[definition.name]
    forward.__qualname__ = function.__qualname__
    return forward


def _definition(function: Any) -> ast.FunctionDef:
    """Return the parsed source of a function, its first line being line 1."""
    try:
        statement = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise ConfigError(f"{function.__qualname__} cannot be served: its source cannot be read") from error
    if not isinstance(statement, ast.FunctionDef):
        raise ConfigError(f"{function.__qualname__} cannot be served: it is not written as a function")
    return statement


def silent_parents(model: Any, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the parents of `modules` whose forward() does not hand on the keywords of its call to them."""
    children = set(modules)
    return [
        parent
        for parent in model.modules()
        for name, child in parent.named_children()
        if child in children and not _hands_on(_forward_of(parent), name)
    ]


@cache
def _hands_on(forward: Any, child: str) -> bool:
    """Return whether a forward() calls a child with keywords of its own call."""
    calls = [node for node in ast.walk(_definition(forward)) if isinstance(node, ast.Call)]
    own = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == child]
    return any(keyword.arg is None for call in own for keyword in call.keywords)


def _lightning_forward(
    self: Any, hidden_states: Tensor, *_: Any, lightning: Callable[..., Tensor],
    position_embeddings: Any = None, attention_mask: None = None, past_key_values: None = None, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute lightning attention (MiniMax-01, arXiv:2501.08313, section 2.2) by the parts of its module.

    Its queries and keys are not rotated.
    """
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    query, key, value = qkv.unflatten(-1, (self.num_attention_heads, 3, -1)).unbind(-2)
    out = self.norm(lightning(query, key, value, self.slope_rate.flatten(), **rest).flatten(2))
    return self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * out), None
