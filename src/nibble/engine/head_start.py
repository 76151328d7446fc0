"""What a head that drafts needs of the engine of its model, at the start.

Shape suffixes: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nibble.engine.calibration import start_tokens
from nibble.engine.engine import Engine
from nibble.engine.plan import EnginePlan
from nibble.engine.request import Batch, Request, ScheduledRequest
from nibble.engine.speculation_plan import head_layers
from nibble.models import taps
from nibble.models.equivalence import layer_list
from nibble.models.hub import split_head

CHUNK = 512
"""Most tokens of a step of the text that scales are measured on."""


def let_read(model: Any, engine_plan: EnginePlan) -> None:
    """Let a model's steps leave the hidden states that a head reads, where one drafts for it.

    Args:
        model: prepared to serve.
        engine_plan: of the model.

    Raises:
        ConfigError: the head is another model's.
    """
    draft = engine_plan.draft
    if draft is None or not split_head(draft.model)[0]:
        return
    layers = head_layers(draft, engine_plan.model_spec)
    taps.attach(model, *layer_list(model, engine_plan.model_spec), layers)


def calibration_prompt(head: Any, target: Engine, ids: Sequence[int]) -> list[int]:
    """Return the tokens that a head reads of a text, and give it the model's hidden states of that.

    Args:
        head: whose KV scales are to be measured.
        target: of the model that it drafts for.
        ids: the text.
    """
    count = min(len(ids), target.scheduler.limit, 1 + start_tokens(target.runner.device.type))
    request, manager = Request("calibration", ids[:count]), target.scheduler.manager
    request.lease, states = manager.open(request.token_ids, "", private=True), list[Tensor]()
    try:
        for start in range(0, count, CHUNK):
            item = ScheduledRequest.next_chunk(request, min(CHUNK, count - start))
            manager.reserve(request.lease, item.end)
            target.runner.forward(Batch((item,)))
            assert target.runner.hidden_states is not None
            with torch.inference_mode():
                states.append(head.combine(target.runner.hidden_states))
            manager.commit(request.lease, request.token_ids, item.end)
    finally:
        manager.release(request.lease)
    head.example_states = torch.cat(states)
    return list(ids[1:count])
