"""Shared experts of a model on a GPU, computed in the same launches as those that a token chooses.

A shared expert is one that all tokens have, behind a gate of its own: the sigmoid of one logit. In a decode step its
three products are small, and each is a launch that takes longer than reading its weights. So its matrices are put
behind those of the others, its gate behind the router's rows, and it is one more choice of each token.

Which blocks are such is observed: names say where matrices are, and the block's own code what it computes of random
tokens. A block that computes anything else stays as it is.

Shape suffixes: T tokens, I inputs, E experts, N outputs, K experts of a token.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nibble.kernels import router
from nibble.kernels.experts.gate import SILU

PARTS = frozenset({"gate", "experts", "shared_expert", "shared_expert_gate"})
"""Modules of a block, as Qwen's families name them."""
TOKENS = (3, 96)
"""Of trials: of few and of many tokens, which are computed by other kernels."""
TOLERANCE = 0.02
"""Largest difference of half of the tokens, norm over norm: with bfloat16's logits a router has ties, and a token that
has one may get another expert."""


def join_shared_experts(model: nn.Module) -> int:
    """Compute shared experts with the others, in place, where kernels compute routers and experts; return how many."""
    count = 0
    for block in model.modules():
        if _has_matrices(block):
            count += _join(block)
    return count


def _has_matrices(block: Any) -> bool:
    """Return whether a block has the parts, kernels for its router and experts, and matrices that fit together."""
    if {name for name, _ in block.named_children()} != PARTS or block._parameters:
        return False
    own, shared = block.experts, block.shared_expert
    up, down = (getattr(own, name, None) for name in ("gate_up_proj", "down_proj"))
    parts = _shared_weights(block)
    if not isinstance(up, nn.Parameter) or not isinstance(down, nn.Parameter) or parts is None:
        return False
    gate = getattr(own, "nibble_gate", None)
    is_normalized = getattr(block.gate, "is_normalized", None)
    gate_NI, up_NI, down_IN, row_1I = parts
    return (
        gate is not None
        and gate[0] == SILU
        and is_normalized is not None
        and getattr(block.gate, "bias", None) is None
        and not own.is_transposed
        and not own.has_bias
        and type(getattr(shared, "act_fn", None)) is type(own.act_fn)
        and up.shape[1:] == (2 * len(gate_NI), gate_NI.shape[1])
        and up_NI.shape == gate_NI.shape
        and down.shape[1:] == down_IN.shape
        and block.gate.weight.shape == (len(up), row_1I.shape[1])
        and len(row_1I) == 1
        and {x.dtype for x in (*parts, up, down, block.gate.weight)} == {up.dtype}
    )


def _shared_weights(block: Any) -> tuple[Tensor, ...] | None:
    """Return the plain weights of the shared expert and its gate, if it has no others."""
    shared = block.shared_expert
    layers = [getattr(shared, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    layers.append(block.shared_expert_gate)
    weights = [layer._parameters.get("weight") for layer in layers if isinstance(layer, nn.Module)]
    is_plain = all(isinstance(w, Tensor) and w.dim() == 2 for w in weights) and len(weights) == len(layers)
    if not is_plain or any(getattr(layer, "bias", None) is not None for layer in layers):
        return None
    return tuple(weight.detach() for weight in weights if weight is not None)


@torch.no_grad()
def _join(block: Any) -> bool:
    """Join a block's shared expert, unless that computes something else, or there is no memory for it."""
    weights = _shared_weights(block)
    assert weights is not None
    gate_NI, up_NI, down_IN, row_1I = weights
    own, before = block.experts, (block.experts.gate_up_proj, block.experts.down_proj, block.gate.weight)
    try:
        expected = [_output(block, tokens) for tokens in TOKENS]
        joined = [
            torch.cat((before[0], torch.cat((gate_NI, up_NI))[None])),
            torch.cat((before[1], down_IN[None])),
            torch.cat((before[2], row_1I)),
        ]
        own.gate_up_proj, own.down_proj, block.joined_router = (
            nn.Parameter(x, requires_grad=False) for x in joined
        )
        block.forward = MethodType(_forward, block)
        is_same = all(
            _is_near(_output(block, tokens), y_TI) for tokens, y_TI in zip(TOKENS, expected, strict=True)
        )
    except Exception:  # of all kinds: this is foreign code, or there is no memory
        is_same = False
    if is_same:
        # The router keeps its name and weight, as a view.
        block.gate.weight = nn.Parameter(block.joined_router[:-1], requires_grad=False)
        del block.shared_expert, block.shared_expert_gate
    else:
        own.gate_up_proj, own.down_proj = before[:2]
        block.__dict__.pop("forward", None)
        block._parameters.pop("joined_router", None)
    return is_same


def _output(block: Any, tokens: int) -> Tensor:
    """Return what a block computes of random tokens [T, I]."""
    weight = block.gate.weight
    generator = torch.Generator().manual_seed(tokens)
    y: Tensor = block(torch.randn(1, tokens, weight.shape[1], generator=generator).to(weight))
    return y[0].float()


def _is_near(y_TI: Tensor, expected_TI: Tensor) -> bool:
    error_T = (y_TI - expected_TI).norm(dim=-1) / expected_TI.norm(dim=-1)
    return bool(error_T.median() <= TOLERANCE)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    x_TI = hidden_states.reshape(-1, hidden_states.shape[-1])
    is_normalized = self.gate.is_normalized
    _, weights_TK, experts_TK = router.route(
        x_TI, self.joined_router, None, self.gate.top_k, is_normalized=is_normalized, has_shared=True
    )
    # By way of the module: whoever looks at what experts get, as the comparison at load does, finds it there.
    y_TI: Tensor = self.experts(x_TI, experts_TK, weights_TK)
    return y_TI.reshape(hidden_states.shape)
