"""Attention error by layer: how far a scheme moves each layer's attention output, on the very same inputs.

So an error is of one layer alone, not of all layers before it.

Shape suffixes: T tokens, H query heads, G KV heads, D values of a head; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nibble.attention.layer import StepContext
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.support import Phase
from nibble.cache.pool import PagedPool
from nibble.cache.scales import KVScales
from nibble.engine.build import adapters
from nibble.kernels.types import AttentionBatch, AttentionMetadata
from nibble.models import hook
from nibble.models.hook import attention_mask_for

Side = tuple[Plan, KVScales]
"""A scheme on trial: its plan and scales."""


class Shadow(hook.Observer):
    """Attends as the yardstick does, and notes what each scheme would have answered."""

    def __init__(
        self, yardstick: Side, schemes: Mapping[str, Side], tokens: int, device: torch.device
    ) -> None:
        super().__init__()
        self._baseline = _context(*yardstick, tokens, device)
        self._schemes = {name: _context(*side, tokens, device) for name, side in schemes.items()}
        self.errors: dict[str, dict[int, float]] = {name: {} for name in schemes}

    def observe(self, call: hook.Call) -> Tensor:
        """A call's query [1, H, T, D] and streams [1, G, T, D] -> the yardstick's output [1, T, H, Dv]."""
        expected = hook.attend(self._baseline, call)
        for name, context in self._schemes.items():
            output = hook.attend(context, call)
            self.errors[name][call.layer] = relative_error(output, expected)
        # The model goes on with the yardstick's answer, so no layer's input has the error of one before it.
        return expected[None]


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Return ||output - expected|| / ||expected||, over all tokens and heads."""
    return float((output.double() - expected.double()).norm() / expected.double().norm())


def _context(plan: Plan, scales: KVScales, tokens: int, device: torch.device) -> StepContext:
    """A step that computes one whole prompt, on pages in order, so that slot t holds token t."""
    pages = -(-tokens // plan.page_size)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    segment = AttentionBatch.from_lens(Phase.PREFILL, 0, (tokens,), (tokens,), table)
    meta = AttentionMetadata(torch.arange(tokens, device=device), (segment,))
    return StepContext(plan, PagedPool(plan.layout, pages, scales, device), adapters(plan), meta)


@torch.inference_mode()
def attention_errors(
    model: nn.Module, ids: Sequence[int], yardstick: Side, schemes: Mapping[str, Side]
) -> dict[str, tuple[float, ...]]:
    """Return the relative error ||o - o_ref|| / ||o_ref|| of each layer's attention output, by scheme.

    Args:
        model: with Nibble's attention.
        ids: the prompt.
        yardstick: the plan and scales that the others are compared with.
        schemes: plan and scales by name.
    """
    device = next(model.parameters()).device
    shadow = Shadow(yardstick, schemes, len(ids), device)
    positions = torch.arange(len(ids), device=device)[None]
    tokens = torch.tensor([list(ids)], device=device)
    last = torch.tensor([len(ids) - 1], device=device)
    model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=attention_mask_for(model, tokens),
        use_cache=False,
        # Nobody reads the logits, so only one row of them is computed.
        logits_to_keep=last,
        **{hook.CONTEXT: shadow},
    )
    return {
        name: tuple(error for _, error in sorted(errors.items())) for name, errors in shadow.errors.items()
    }
