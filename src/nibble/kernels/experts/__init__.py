"""experts: products of tokens with the matrices of the experts that they chose, for any number of tokens.

A few tokens go to a kernel that reads each chosen expert once (triton.py, or cuda.py for packed matrices); more are
sorted by their experts, and multiplied by torch's grouped product, or, in other dtypes than bfloat16, by
kernels/invariant. Rows come back in an order that up() chooses, so that nothing is moved between both products; nothing
waits for the device. Matrices that are kept packed (matrices.py) have kernels of their own for both; without a GPU the
definition multiplies.

layer() is both products with what stands between and behind them, where the gate is one that kernels know (gate.py): a
few tokens take two launches or three. routed_layer() has the router in front, too: a single token's kernels read logits
and gated outputs while they are written, so that none waits for the one in front to end. In first_row_only() both
compute the first token alone, whatever rows of padding are behind it.

Shape suffixes: T tokens, K chosen experts of a token, S = T * K rows, one for each choice; E experts, N outputs, I
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from nibble.kernels import invariant, router, triton_present
from nibble.kernels.experts import cuda, naive
from nibble.kernels.experts.gate import Gate
from nibble.kernels.experts.gate import gated as naive_gated
from nibble.kernels.experts.matrices import PackedExperts
from nibble.kernels.weight_formats import WeightFormat

MAX_TOKENS = 64
"""Tokens up to which chosen experts are read once each; the largest tile of triton.py (ROWS) has as many."""

_is_first_only = ContextVar("_is_first_only", default=False)


@contextmanager
def first_row_only(is_padded: bool = True) -> Iterator[None]:
    """Let layer() and routed_layer() compute the first token meanwhile, and give what it gets to all rows.

    A compiled model has no code for a single row, so a step of one request has a row of padding, which would choose
    experts of its own. What is recorded in here stays so.

    Args:
        is_padded: Whether all rows but the first are padding; else all are computed.
    """
    before = _is_first_only.set(is_padded)
    try:
        yield
    finally:
        _is_first_only.reset(before)


class Packed(Protocol):
    """Packed matrices, or a module that has them."""

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None

    @property
    def facts(self) -> tuple[Any, ...]:
        """See PackedExperts."""


def up(
    x_TI: Tensor,
    experts_TK: Tensor,
    weight_ENI: Tensor | Packed,
    bias_EN: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Multiply each token with the matrices of its experts.

    Args:
        x_TI: Tokens.
        experts_TK: Their experts. Rows of E and more, which are none, hold anything.
        weight_ENI: Matrices, with any strides, or packed.
        bias_EN: Added to each row, if there is one.

    Returns:
        [S, N] in the dtype of x, in some order, and int64 [S]: which row each choice has.
    """
    operators, weight = _operators(weight_ENI)
    y_SN, places_S = operators[0](x_TI, experts_TK, bias_EN, *weight)
    return y_SN, places_S


def down(
    x_SI: Tensor,
    experts_TK: Tensor,
    weight_ENI: Tensor | Packed,
    bias_EN: Tensor | None,
) -> Tensor:
    """Multiply each row, in the order of up(), with the matrix of its expert -> [S, N] in the same order."""
    operators, weight = _operators(weight_ENI)
    y_SN: Tensor = operators[1](x_SI, experts_TK, bias_EN, *weight)
    return y_SN


def layer(
    x_TI: Tensor, experts_TK: Tensor, weights_TK: Tensor, up: tuple[Tensor | Packed, Tensor | None],
    down: tuple[Tensor | Packed, Tensor | None], gate: Gate,
) -> Tensor:  # fmt: skip
    """Compute a layer of experts.

    Args:
        x_TI: Tokens.
        experts_TK: Their experts. E and more are none.
        weights_TK: What their experts' outputs are multiplied with, before these are summed up.
        up: First matrices [E, 2 N, I], and biases.
        down: Second matrices [E, I, N], and biases.
        gate: What becomes of the outputs of the first.

    Returns:
        [T, I] in the dtype of x.
    """
    y_TI: Tensor = torch.ops.nibble.experts_layer(x_TI, experts_TK, weights_TK, *_operands(up, down, gate))
    return y_TI


def routed_layer(
    x_TI: Tensor, router: tuple[Tensor, Tensor | None], up: tuple[Tensor | Packed, Tensor | None],
    down: tuple[Tensor | Packed, Tensor | None], gate: Gate, *, top_k: int, is_normalized: bool,
    has_shared: bool = False,
) -> Tensor:  # fmt: skip
    """Compute a layer of experts for the choices of a router.

    Args:
        x_TI: Tokens.
        router: The router's matrix and bias.
        up: See layer(), as for down and gate.
        down: See there.
        gate: See there.
        top_k: See kernels/router, as for what follows.
        is_normalized: See there.
        has_shared: See there.

    Returns:
        [T, I] in the dtype of x.
    """
    y_TI: Tensor = torch.ops.nibble.experts_routed_layer(
        x_TI, *router, top_k, is_normalized, has_shared, *_operands(up, down, gate)
    )
    return y_TI


def _operands(
    up: tuple[Tensor | Packed, Tensor | None], down: tuple[Tensor | Packed, Tensor | None], gate: Gate
) -> tuple[Any, ...]:
    """Return what operators are given of matrices and a gate."""
    matrices = [part for weight, bias in (up, down) for part in (*_parts(weight), bias)]
    return (*matrices, *(_facts(weight) for weight, _ in (up, down)), gate.kind, gate.limit, gate.factor)


def _parts(weight: Tensor | Packed) -> tuple[Tensor | None, ...]:
    return (
        (weight, None, None)
        if isinstance(weight, Tensor)
        else (weight.codes, weight.scale, weight.global_scale)
    )


def _facts(weight: Tensor | Packed) -> str:
    return "" if isinstance(weight, Tensor) else ",".join(map(str, weight.facts))


def _operators(weight: Tensor | Packed) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    """Return the operators of both products, and what they are given of a weight."""
    ops = torch.ops.nibble
    if isinstance(weight, Tensor):
        return (ops.experts_up, ops.experts_down), (weight,)
    tensors = weight.codes, weight.scale, weight.global_scale
    return (ops.packed_experts_up, ops.packed_experts_down), (*tensors, *weight.facts)


def _up(
    x: Tensor, experts: Tensor, bias: Tensor | None, weight: Tensor | PackedExperts
) -> tuple[Tensor, Tensor]:
    if _is_few(x, experts, weight):
        places_S = torch.empty(experts.numel(), dtype=torch.int64, device=x.device)
        return _few(x, experts, weight, bias, places_S), places_S
    order_S, ends_E = naive.order(experts, weight.shape[0])
    places_S = torch.empty_like(order_S)
    places_S[order_S] = torch.arange(len(order_S), device=x.device)
    if isinstance(weight, PackedExperts):
        return _many_packed(x, order_S, experts.shape[1], ends_E, weight, bias), places_S
    return _grouped(x[order_S // experts.shape[1]], experts, order_S, ends_E, weight, bias), places_S


def _down(x: Tensor, experts: Tensor, bias: Tensor | None, weight: Tensor | PackedExperts) -> Tensor:
    if _is_few(x, experts, weight):
        return _few(x, experts, weight, bias)
    order_S, ends_E = naive.order(experts, weight.shape[0])
    if isinstance(weight, PackedExperts):
        return _many_packed(x, None, 1, ends_E, weight, bias)
    return _grouped(x, experts, order_S, ends_E, weight, bias)


def _layer(
    x: Tensor, experts: Tensor, weights: Tensor, up: Tensor | PackedExperts, up_bias: Tensor | None,
    down: Tensor | PackedExperts, down_bias: Tensor | None, gate: Gate, *, copies: int = 1,
) -> Tensor:  # fmt: skip
    first, second = (cuda.matrices_of(weight, len(experts)) for weight in (up, down))
    if first and second and _is_few(x, experts, up) and cuda.serves(x, _choices(experts), first, up_bias):
        y_SN = cuda.few_product(x, experts, first, up_bias, gate=gate)
        if cuda.serves(y_SN, _choices(experts), second, down_bias):
            if cuda.combines(_choices(experts), x):
                return cuda.few_product(y_SN, experts, second, down_bias, weights_TK=weights, copies=copies)
            y_SN = cuda.few_product(y_SN, experts, second, down_bias)
            return _combined(y_SN, None, experts, weights, second.shape[0])
        return _combined(
            _down(y_SN, experts, down_bias, down),
            None,
            experts,
            weights,
            second.shape[0],
        )
    y_SN, places_S = _up(x, experts, up_bias, up)
    y_SN = _down(_gated(y_SN, gate), experts, down_bias, down)
    return _combined(y_SN, places_S, experts, weights, down.shape[0])


def _routed_layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, choice: tuple[int, bool, bool], up: Tensor | PackedExperts,
    up_bias: Tensor | None, down: Tensor | PackedExperts, down_bias: Tensor | None, gate: Gate, *, copies: int = 1,
) -> Tensor:  # fmt: skip
    first, second = (cuda.matrices_of(matrices, len(x)) for matrices in (up, down))
    shape = len(x), choice[0] + choice[2]
    if (
        first
        and second
        and cuda.routes(x, weight, shape, first, second)
        and cuda.serves(x, shape, first, up_bias)
        and cuda.serves(x.expand(shape[1], -1), shape, second, down_bias)
    ):
        weights = x.new_empty(shape)
        experts = torch.empty(shape, dtype=torch.int64, device=x.device)
        # Each launch is just behind the one whose values it reads.
        routing = cuda.Routing(router.cuda.logits_of_token(x, weight, bias), *choice[1:], weights)
        y_SN = cuda.few_product(x, experts, first, up_bias, gate=gate, routing=routing)
        return cuda.few_product(
            y_SN, experts, second, down_bias, weights_TK=weights, is_routed=True, copies=copies
        )
    _, weights, experts = torch.ops.nibble.route(x, weight, bias, *choice)
    return _layer(x, experts, weights, up, up_bias, down, down_bias, gate, copies=copies)


def _choices(experts: Tensor) -> tuple[int, int]:
    tokens, top_k = experts.shape
    return tokens, top_k


def _gated(y_SN: Tensor, gate: Gate) -> Tensor:
    if not _has_kernels(y_SN):
        return naive_gated(y_SN, gate)
    from nibble.kernels.experts import triton as fast

    return fast.gated(y_SN, gate)


def _combined(y_SN: Tensor, places_S: Tensor | None, experts: Tensor, weights: Tensor, count: int) -> Tensor:
    if not _has_kernels(y_SN):
        return naive.combined(y_SN, places_S, experts, weights, count)
    from nibble.kernels.experts import triton as fast

    return fast.combined(y_SN, places_S, experts, weights, count)


def _is_few(x: Tensor, experts: Tensor, weight: Tensor | PackedExperts) -> bool:
    """Return whether rows stay in the order of choices; by the definition of packed matrices they always do."""
    return len(experts) <= MAX_TOKENS or (isinstance(weight, PackedExperts) and not _has_kernels(x))


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and triton_present()


def _many_packed(
    x: Tensor,
    order_S: Tensor | None,
    top_k: int,
    ends_E: Tensor,
    weight: PackedExperts,
    bias: Tensor | None,
) -> Tensor:
    from nibble.kernels.experts.triton import many_product

    return many_product(x, order_S, top_k, ends_E, weight, bias)


def _few(
    x: Tensor, experts: Tensor, weight: Tensor | PackedExperts, bias: Tensor | None, places_S: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Multiply rows in the order of choices."""
    if isinstance(weight, PackedExperts) and cuda.serves(x, _choices(experts), weight, bias):
        return cuda.few_product(x, experts, weight, bias, places_S=places_S)
    if _has_kernels(x):
        from nibble.kernels.experts.triton import few_product

        return few_product(x, experts, weight, bias, places_S=places_S)
    if places_S is not None:
        torch.arange(len(places_S), out=places_S)
    return naive.product(x, experts, weight, bias)


def _grouped(
    x: Tensor,
    experts: Tensor,
    order_S: Tensor,
    ends_E: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Multiply rows that are sorted by their experts."""
    matrices = weight.transpose(1, 2)
    # torch's product wants rows of whole 16 bytes.
    if x.is_cuda and x.dtype == torch.bfloat16 and not any(n % 8 for n in weight.shape[1:]):
        y = torch.nn.functional.grouped_mm(x, matrices, offs=ends_E)
    else:
        y = invariant.grouped_mm(x, matrices, ends_E)
    # Rows of no expert hold anything.
    return y if bias is None else y + bias[experts.flatten()[order_S].clamp(max=len(bias) - 1)]


def _packed(
    codes: Tensor, scale: Tensor, global_scale: Tensor | None, kind: str, group: int, scales: str, dtype: str,
    rounded: str,
) -> PackedExperts:  # fmt: skip
    format = WeightFormat(kind, group, scales, has_global=global_scale is not None)
    return PackedExperts(
        format,
        codes,
        scale,
        getattr(torch, dtype),
        getattr(torch, rounded),
        global_scale,
    )


def _packed_up(x: Tensor, experts: Tensor, bias: Tensor | None, *weight: Any) -> tuple[Tensor, Tensor]:
    return _up(x, experts, bias, _packed(*weight))


def _packed_down(x: Tensor, experts: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    return _down(x, experts, bias, _packed(*weight))


def _experts_layer(x: Tensor, experts: Tensor, weights: Tensor, *operands: Any) -> Tensor:
    rows, copies = _rows(x)
    y = _layer(x[:rows], experts[:rows], weights[:rows], *_layer_arguments(operands), copies=copies)
    return _repeated(y, len(x))


def _experts_routed_layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, is_normalized: bool, has_shared: bool, *operands: Any
) -> Tensor:  # fmt: skip
    choice, (rows, copies) = (top_k, is_normalized, has_shared), _rows(x)
    y = _routed_layer(x[:rows], weight, bias, choice, *_layer_arguments(operands), copies=copies)
    return _repeated(y, len(x))


def _rows(x: Tensor) -> tuple[int, int]:
    """Return how many rows are computed, and how many copies of a single one a kernel may write."""
    is_first_only = _is_first_only.get() and len(x) > 1
    return (1, len(x)) if is_first_only else (len(x), 1)


def _repeated(y: Tensor, rows: int) -> Tensor:
    return y if len(y) == rows else y.expand(rows, -1).contiguous()


def _layer_arguments(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return matrices, biases and gate of _operands()."""
    up, down = _joined(operands[:3], operands[8]), _joined(operands[4:7], operands[9])
    return up, operands[3], down, operands[7], Gate(*operands[10:])


def _joined(parts: tuple[Any, ...], facts: str) -> Tensor | PackedExperts:
    if not facts:
        weight: Tensor = parts[0]
        return weight
    codes, scale, global_scale = parts
    kind, group, scales, dtype, rounded = facts.split(",")
    return _packed(codes, scale, global_scale, kind, int(group), scales, dtype, rounded)


def _layer_shape(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape)


def _up_shape(x: Tensor, experts: Tensor, bias: Tensor | None, *weight: Any) -> tuple[Tensor, Tensor]:
    return _down_shape(x, experts, bias, *weight), experts.new_empty(experts.numel(), dtype=torch.int64)


def _down_shape(x: Tensor, experts: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    # Of plain and of packed matrices the second dimension is that of outputs.
    return x.new_empty(experts.numel(), weight[0].shape[1])


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_ARGUMENTS = "Tensor x, Tensor experts, Tensor? bias, Tensor weight"
_FORMAT = "str kind, int group, str scales, str dtype, str rounded"
_PACKED_ARGUMENTS = f"{_ARGUMENTS}, Tensor scale, Tensor? global_scale, {_FORMAT}"
_MATRICES = ", ".join(
    f"Tensor {name}, Tensor? {name}_scale, Tensor? {name}_global, Tensor? {name}_bias"
    for name in ("up", "down")
)
_MATRICES = f"{_MATRICES}, str up_facts, str down_facts, str gate, float limit, float factor"
_LAYER_ARGUMENTS = f"Tensor x, Tensor experts, Tensor weights, {_MATRICES}"
_ROUTER = "Tensor router, Tensor? router_bias, int top_k, bool is_normalized, bool has_shared"
for _name, _arguments, _result, _implement, _shape in (
    ("experts_up", _ARGUMENTS, "(Tensor, Tensor)", _up, _up_shape),
    ("experts_down", _ARGUMENTS, "Tensor", _down, _down_shape),
    ("packed_experts_up", _PACKED_ARGUMENTS, "(Tensor, Tensor)", _packed_up, _up_shape),
    ("packed_experts_down", _PACKED_ARGUMENTS, "Tensor", _packed_down, _down_shape),
    ("experts_layer", _LAYER_ARGUMENTS, "Tensor", _experts_layer, _layer_shape),
    (
        "experts_routed_layer",
        f"Tensor x, {_ROUTER}, {_MATRICES}",
        "Tensor",
        _experts_routed_layer,
        _layer_shape,
    ),
):
    _library.define(f"{_name}({_arguments}) -> {_result}")
    _library.impl(_name, _implement, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nibble::{_name}", _shape, lib=_library)
