"""Tiny random hybrid models, and a driver that runs them step by step over pages and states, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from nibble import formats
from nibble.attention import backends
from nibble.attention.planner.plan import GroupPlan, Plan, Route
from nibble.attention.recurrent import RecurrentStates
from nibble.attention.step import StepContext
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import NONE
from nibble.kernels.recurrence import BLOCK, LayerState, StateBatch, layer_state
from nibble.kernels.types import AttentionBatch, AttentionMetadata
from nibble.model_spec import ModelSpec, Phase
from nibble.models import hook
from nibble.models.forward import Forward, plain
from nibble.models.hub import quiet
from nibble.models.observe import observe

BACKEND = "torch_ref"
PAGE = 16
SLOTS = 3


def adapted(model: Any) -> Any:
    """A copy of a model, as Nibble serves it."""
    copy = deepcopy(model)
    with quiet():
        copy.set_attn_implementation(hook.NAME)
    return hook.adapt(copy).eval()


class Driver:
    """Runs requests over pools in float32; each has the pages and the slot of its number."""

    def __init__(
        self, model: nn.Module, model_spec: ModelSpec, run: Callable[[nn.Module], Forward] = plain
    ) -> None:
        name, owner = formats.plain("float32").name, model_spec.owner
        self.pages = -(-model_spec.max_context // PAGE)
        stored = [
            LayerLayout(layer, tuple(StreamLayout(stream, name) for stream in group.streams))
            for group in model_spec.groups
            for layer in group.layers
            if owner[layer] == layer
        ]
        layout = CacheLayout(tuple(sorted(stored, key=lambda entry: entry.layer)), PAGE, "nhd")
        self.pool = PagedPool(layout, self.pages * SLOTS, NONE, "cpu")
        self.adapters = {BACKEND: backends.create(backends.get(BACKEND))}
        support = backends.get(BACKEND).support[0]
        routes = tuple(Route(phase, BACKEND, support) for phase in Phase)
        self.plan = Plan(
            layout,
            tuple(GroupPlan(group, group.layers, name, routes) for group in model_spec.groups),
            owner,
            "float32",
        )
        self.layers: Mapping[int, LayerState] = {
            layer: layer_state(group, SLOTS, "fp32", torch.float32, 0, "cpu")
            for group in model_spec.states
            for layer in group.layers
        }
        self.run = run(model)
        self.computed = [0] * SLOTS

    def step(self, tokens: Mapping[int, list[int]], padding: int = 0) -> Tensor:
        """Compute the next tokens of some requests -> their logits [T, V]."""
        requests = sorted(tokens)
        starts, lengths = [self.computed[r] for r in requests], [len(tokens[r]) for r in requests]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        tables = torch.tensor(
            [[*range(r * self.pages, (r + 1) * self.pages)] for r in requests], dtype=torch.int32
        )
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        rows = torch.repeat_interleave(torch.tensor(requests), torch.tensor(lengths))
        slot_mapping = rows * self.pages * PAGE + positions
        batch = AttentionBatch.from_lens(Phase.EXTEND, 0, tuple(lengths), tuple(ends), tables)
        states_at = tuple(start // BLOCK * BLOCK for start in starts)
        states = StateBatch(tuple(requests), tuple(starts), tuple(lengths), states_at, tuple(lengths))
        ctx = StepContext(
            self.plan, self.pool, self.adapters, AttentionMetadata(slot_mapping, (batch,)),
            recurrent=RecurrentStates(self.layers, states),
        )  # fmt: skip
        ids = [token for r in requests for token in tokens[r]] + [0] * padding
        positions = torch.cat((positions, torch.zeros(padding, dtype=torch.int64)))
        with torch.inference_mode():
            logits = self.run(torch.tensor([ids]), positions[None], torch.arange(len(ids) - padding), ctx)
        for request, end in zip(requests, ends, strict=True):
            self.computed[request] = end
        return logits

    def logits(self, prompt: list[int], chunk: int, request: int = 0) -> Tensor:
        """Compute a prompt in chunks -> [T, V]."""
        self.computed[request] = 0
        return torch.cat([self.step({request: prompt[i : i + chunk]}) for i in range(0, len(prompt), chunk)])


def spec_of(config: Any) -> ModelSpec:
    return observe(deepcopy(config), config.model_type, "float32", None)
