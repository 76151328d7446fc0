"""A model whose rows do not depend on one another: what is replaced in its arithmetic on a GPU, and what is refused.

A model is a graph of torch's operators. Each of them is here one of these:

- products (PRODUCTS): replaced by kernels/invariant, whose sums have one order for any number of rows;
- choices among a row's values (`topk`): replaced by a stable sort, since torch's kernel breaks ties by the batch;
- sums within a row (REDUCTIONS: norms, softmax, weights of experts): compiled, they are code that is generated once
  for all numbers of rows, with a block of fixed size; run as written, they are replaced too, as torch's own kernels
  share a row among more threads where there are few rows;
- element by element, or moved about (POINTWISE and MOVES): a row's values are its own;
- Nibble's own, which keep the promise themselves;
- anything else: refused by name. An operator that nobody looked at, one of a quantisation package for instance, or one
  that adds with atomics, would break the promise without a sign.

Shape suffixes: M rows, K values of the input, N of the output; R values that are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import moe

from nibble.errors import ConfigError
from nibble.kernels import invariant

aten = torch.ops.aten
Replacement = Callable[..., Any]


# ---- what is replaced ------------------------------------------------------------------------------------------------


def _mm(x_MK: Tensor, weight_KN: Tensor) -> Tensor:
    return invariant.mm(x_MK, weight_KN)


def _addmm(bias: Tensor, x_MK: Tensor, weight_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == alpha == 1 and bias.dim() == 1:
        return invariant.mm(x_MK, weight_KN, bias)
    return beta * bias + alpha * invariant.mm(x_MK, weight_KN)


def _baddbmm(base: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    # Without a beta the base is not read, even where it is NaN.
    product = alpha * invariant.bmm(x, weight)
    return product + beta * base if beta else product


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor | None = None, *rest: Any, **options: Any) -> Tensor:
    if offs is None or weight.dim() != 3 or any(value is not None for value in (*rest, *options.values())):
        raise ConfigError(
            "this model multiplies experts in a way that --deterministic does not know; leave it out"
        )
    return invariant.grouped_mm(x, weight, offs.int())


def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    values, indices = aten.sort.stable(x, stable=True, dim=dim, descending=largest)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


PRODUCTS: dict[Any, Replacement] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: invariant.bmm,
    aten.baddbmm.default: _baddbmm,
    aten._grouped_mm.default: _grouped_mm,
    # Importing moe registers it; it would wait for the device.
    getattr(torch.ops, moe.__name__.partition(".")[0]).grouped_mm_fallback.default: _grouped_mm,
    aten.topk.default: _topk,
}
"""What is replaced, compiled or not."""


def _sum(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum over some dimensions, all of a row's own."""
    dims = sorted(d % x.dim() for d in (dim or range(x.dim())))
    others = [d for d in range(x.dim()) if d not in dims]
    rows_MR = x.permute(*others, *dims).reshape(prod(x.shape[d] for d in others), -1)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d in others]
    return invariant.row_sums(rows_MR).view(shape).to(dtype or x.dtype)


def _mean(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    total = _sum(x, dim, keepdim, dtype=torch.float32)
    return (total / (x.numel() // max(total.numel(), 1))).to(dtype or x.dtype)


SUMS: dict[Any, Replacement] = {aten.sum.dim_IntList: _sum, aten.mean.dim: _mean}
"""What is replaced beside PRODUCTS where the model runs as written."""


# ---- what is allowed -------------------------------------------------------------------------------------------------


def _overloads(names: str) -> frozenset[Any]:
    """Return all overloads of torch's operators of these names, those that this version has."""
    packets = [getattr(aten, name) for name in names.split() if hasattr(aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


EXACT = _overloads("amax amin max min argmax argmin any all sort argsort histc bincount")
"""They round nothing, so that their order does not matter; counts are of whole numbers."""
REDUCTIONS = _overloads(
    "sum mean _softmax _log_softmax logsumexp var_mean var native_layer_norm native_group_norm _fused_rms_norm "
    "linalg_vector_norm cumsum prod"
)
"""Sums within a row."""
MOVES = _overloads(
    "view _unsafe_view reshape _reshape_alias permute transpose t unsqueeze squeeze expand slice select split "
    "split_with_sizes unbind narrow as_strided unfold diagonal alias detach lift_fresh lift_fresh_copy view_as_complex "
    "view_as_real real imag cat stack clone copy copy_ _to_copy repeat constant_pad_nd roll flip tril triu "
    "index index_select gather embedding take _unsafe_index slice_scatter select_scatter scatter scatter_ index_put "
    "index_put_ _unsafe_index_put index_copy index_copy_ index_fill fill fill_ zero_ masked_fill masked_fill_ where "
    "full full_like empty empty_like empty_strided empty_permuted new_empty new_empty_strided new_full new_zeros "
    "new_ones zeros zeros_like ones ones_like arange scalar_tensor sym_size sym_stride sym_numel sym_storage_offset "
    "_assert_async _assert_scalar _assert_tensor_metadata"
)
"""They copy values, or none."""
OWN = ("nibble", "prims", "inductor")
"""Namespaces of Nibble's operators, and of those that the compiler makes of torch's."""


def _is_accumulating(args: Sequence[Any], kwargs: dict[str, Any], op: Any) -> bool:
    """Whether writes to one place are added up, in an order that nobody knows."""
    if "reduce" in op._overloadname:
        return True
    if "index_put" in op._opname:
        return bool(kwargs.get("accumulate", len(args) > 3 and args[3]))
    return False


@cache
def is_invariant(op: Any, compiled: bool) -> bool:
    """Return whether a row of an operator's result depends on that row alone, bit for bit.

    Args:
        op: The overload of an operator.
        compiled: Whether code is generated for it.
    """
    if not isinstance(op, OpOverload):  # arithmetic with sizes, on the host
        return not isinstance(op, torch._ops.HigherOrderOperator)
    if op.namespace in OWN or torch.Tag.pointwise in op.tags or op in MOVES or op in EXACT:
        return True
    return compiled and op in REDUCTIONS


def refuse(op: Any) -> ConfigError:
    """Return the error that says which operator cannot be part of a deterministic model."""
    return ConfigError(
        f"--deterministic: this model runs {op}, of which nobody has shown that a row's result does not depend on the "
        "other rows; serve it without --deterministic"
    )


# ---- compiled --------------------------------------------------------------------------------------------------------

CODE_OPTIONS: dict[str, Any] = {
    "deterministic": True,  # no block sizes by measurement: another start would choose others
    "batch_invariant": True,
    "shape_padding": False,
    "split_reductions": False,
    "combo_kernels": True,
}


def check_graph(graph: fx.Graph) -> None:
    """Raise ConfigError where a graph holds an operator that is not invariant."""
    for node in graph.nodes:
        if node.op == "call_function":
            op = node.target
            if not is_invariant(op, True) or (
                isinstance(op, OpOverload) and _is_accumulating(node.args, node.kwargs, op)
            ):
                raise refuse(op)


def backend(module: fx.GraphModule, inputs: Sequence[Any], *, generate: bool = True) -> Any:
    """Compile a graph with all products replaced; torch.compile calls it.

    Args:
        module: The graph.
        inputs: Examples of its arguments.
        generate: Whether code is generated. Else the graph is interpreted, as tests on a CPU do.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def compile_checked(graph: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        check_graph(graph.graph)
        return compile_fx_inner(graph, examples, **options) if generate else _boxed(graph)

    options = config.get_config_copy()  # older versions have fewer of them
    # A cache of torch's knows graphs by what they were before products were replaced.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return compile_fx(
            module,
            inputs,
            inner_compile=compile_checked,
            config_patches={name: value for name, value in CODE_OPTIONS.items() if name in options},
            decompositions={**select_decomp_table(), **PRODUCTS},
        )


def _boxed(graph: fx.GraphModule) -> Any:
    from torch._functorch import aot_autograd

    return aot_autograd.make_boxed_func(graph.forward)  # type: ignore[attr-defined]


# ---- as written ------------------------------------------------------------------------------------------------------


class InvariantMode(TorchDispatchMode):
    """Replaces operators as they are called, and refuses those that are not invariant."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call what stands for `func`."""
        kwargs = kwargs or {}
        replacement = PRODUCTS.get(func) or (SUMS.get(func) if _rounds(args) else None)
        if replacement:
            return replacement(*args, **kwargs)
        if is_invariant(func, False) and not _is_accumulating(args, kwargs, func):
            return func(*args, **kwargs)
        if func in REDUCTIONS and not _rounds(args):
            return func(*args, **kwargs)
        return self._decompose(func, args, kwargs)

    def _decompose(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call what `func` is made of, each part by this mode again."""
        from torch._decomp import decomposition_table

        with self:
            if made_of := decomposition_table.get(func):
                return made_of(*args, **kwargs)
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise refuse(func)
        return result


def _rounds(args: Sequence[Any]) -> bool:
    """Whether an operator's first argument is of numbers whose sums are rounded."""
    return bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()


interpreted = partial(backend, generate=False)
"""backend() without code."""
