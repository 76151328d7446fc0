"""What attention has in one step: the context that layers are called with, and what backends prepare for it.

A backend's adapter prepares a batch once a step and kind of layer, and is called for each layer. The context is an
argument of the model's call, never a global.

Shape suffixes: T tokens, H query heads, D values of a head, K chosen tokens, B requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nibble.attention.chunks import cut_at_chunks
from nibble.attention.observer import AttentionObserver
from nibble.attention.planner.plan import Plan, Route
from nibble.attention.recurrent import RecurrentStates
from nibble.attention.staging import PagePart, cut_parts, dequantize_pages
from nibble.attention.window import ExactCache, SplitChoice, WindowParts, split_choice
from nibble.cache.hot_buffer import HotBuffers, PendingFetch
from nibble.cache.pool import KVView, PagedPool
from nibble.kernels.attention import merge_lse
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.offload import resident_slots
from nibble.kernels.types import AttentionBatch, AttentionMetadata, AttentionParams


class AttentionBackend:
    """A backend's adapter: `prepare` once a step and kind of layer, `forward` once a layer.

    It remembers nothing of a step between calls; what a step needs is in the state that `prepare` returns, and goes
    with the step. In a backend that CUDA graphs may hold (`BackendInfo.graphs`), both read the lengths of DECODE from
    the device alone: a recorded step prepares while it is recorded, and a replay repeats that.
    """

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Hashable:
        """Return what layers must have in common to share a state; None where all layers of a batch share one.

        Args:
            q_THD: the batch's rows. Only their shape, dtype and device may be read.
            view: the layer's pages. Only their layout may be read.
            batch: the requests.
            params: what the layer asks for. The values of its tensors may not be read.
        """
        return None

    def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Any:
        """Return what `forward` needs for all layers of this kind. The arguments are those of `kind`."""
        return None

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any
    ) -> Tensor:
        """Attend over the stored tokens -> [T, H, Dv] in the query's dtype. Must not write to its arguments.

        Args:
            q_THD: the batch's rows.
            view: the layer's pages.
            batch: the requests.
            params: what the layer asks for.
            state: what `prepare` returned for this batch and kind of layer.
        """
        raise NotImplementedError

    def forward_into(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any,
        out_THD: Tensor,
    ) -> None:  # fmt: skip
        """Attend as `forward` does, and leave the output in `out_THD`. The other arguments are those of `forward`."""
        out_THD.copy_(self.forward(q_THD, view, batch, params, state))

    def forward_partial(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any
    ) -> PartialAttention:
        """Attend as `forward` does, and return the log-sum-exp too, so that attention over other keys can be merged.

        Rows with `Support.lse` promise it. A request may have more queries than stored tokens: the first of them see
        none. Values are float32, or in the query's dtype. The arguments are those of `forward`.
        """
        raise NotImplementedError

    def forward_merged(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any,
        other: PartialAttention,
    ) -> Tensor:  # fmt: skip
        """Attend as `forward` does, over these keys and over those of `other`.

        Args:
            q_THD: the batch's rows.
            view: the layer's pages.
            batch: the requests.
            params: what the layer asks for. Sinks count once: here or in `other`.
            state: what `prepare` returned for this batch and kind of layer.
            other: attention of the same rows over other keys.
        """
        own = self.forward_partial(q_THD, view, batch, params, state)
        return merge_lse(own, other, q_THD.dtype).values_THD

    def attend(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        """Prepare and run one layer, for callers that have no step.

        Args:
            q_THD: the batch's rows.
            view: the layer's pages.
            batch: the requests.
            params: what the layer asks for.
        """
        return self.forward(q_THD, view, batch, params, self.prepare(q_THD, view, batch, params))


class PreparedBatch:
    """A batch as one kind of layer attends over it: its parts, and what the backend prepared for each."""

    def __init__(
        self,
        backend: AttentionBackend,
        stage_to: str | None,
        batch: AttentionBatch,
        page_size: int,
        window: int | None,
        shared: dict[Hashable, Any] | None = None,
    ) -> None:
        """Cut the batch, where its pages are dequantised first.

        Args:
            backend: the adapter.
            stage_to: the format that pages are dequantised into first, if any.
            batch: the requests.
            page_size: tokens of a page.
            window: tokens that a query sees, if not all.
            shared: what other layers of the step cut and prepared. None for callers that have no step.
        """
        self._backend = backend
        self._stage_to = stage_to
        self._shared = {} if shared is None else shared
        self.parts = (PagePart(batch),)
        if stage_to:
            # Layers with the same window share the cut, whatever their backends.
            if (batch, window) not in self._shared:
                self._shared[batch, window] = cut_parts(batch, page_size, window)
            self.parts = self._shared[batch, window]
        # Of each part, from the first layer that reaches it.
        self._states: list[Any] = []

    def attend(
        self, q_THD: Tensor, view: KVView, params: AttentionParams, topk_slots_TK: Tensor | None = None
    ) -> Tensor:
        """Return the output of the batch's rows [T, H, Dv].

        Args:
            q_THD: the rows of the whole step.
            view: the layer's pages in the pool.
            params: what the layer asks for.
            topk_slots_TK: where the tokens that this batch has chosen lie in the pool.
        """
        calls = self._calls(q_THD, view, params, topk_slots_TK)
        return concatenate([self._backend.forward(*call) for call in calls])

    def attend_into(
        self,
        q_THD: Tensor,
        view: KVView,
        params: AttentionParams,
        topk_slots_TK: Tensor | None,
        out_THD: Tensor,
    ) -> None:
        """Leave the output of the batch's rows in those of `out_THD`, which has all rows of the step; see attend()."""
        for call in self._calls(q_THD, view, params, topk_slots_TK):
            rows = slice(call[2].start, call[2].stop)
            self._backend.forward_into(*call, out_THD[rows])

    def attend_partially(
        self, q_THD: Tensor, view: KVView, params: AttentionParams, topk_slots_TK: Tensor | None = None
    ) -> PartialAttention:
        """Return the same, to be merged with attention over other keys.

        Args:
            q_THD: the rows of the whole step.
            view: the layer's pages.
            params: what the layer asks for.
            topk_slots_TK: where the tokens that this batch has chosen lie in the pool.
        """
        calls = self._calls(q_THD, view, params, topk_slots_TK)
        outputs = [self._backend.forward_partial(*call) for call in calls]
        if len(outputs) == 1:
            return outputs[0]
        values, lse = zip(*outputs, strict=True)
        return PartialAttention(torch.cat(values), torch.cat(lse, 1))

    def attend_merged(
        self,
        q_THD: Tensor,
        view: KVView,
        params: AttentionParams,
        other: PartialAttention,
        topk_slots_TK: Tensor | None = None,
    ) -> Tensor:
        """Return attention over these keys and those of `other` [T, H, Dv].

        Args:
            q_THD: the batch's rows.
            view: the layer's pages.
            params: what the layer asks for.
            other: attention of the same rows over other keys.
            topk_slots_TK: where the tokens that this batch has chosen lie in the pool.
        """
        outputs = []
        for part, call in zip(self.parts, self._calls(q_THD, view, params, topk_slots_TK), strict=True):
            rows = slice(part.batch.start, part.batch.stop)
            theirs = PartialAttention(other.values_THD[rows], other.lse_HT[:, rows])
            outputs.append(self._backend.forward_merged(*call, theirs))
        return concatenate(outputs)

    def _calls(
        self, q_THD: Tensor, view: KVView, params: AttentionParams, topk_slots_TK: Tensor | None
    ) -> Iterator[tuple[Tensor, KVView, AttentionBatch, AttentionParams, Any]]:
        """Yield the backend's arguments for each part."""
        for i, part in enumerate(self.parts):
            rows = slice(part.batch.start, part.batch.stop)
            part_view = dequantize_pages(view, part, self._stage_to) if self._stage_to else view
            part_params = params
            if params.topk_indices_TK is not None:
                topk_indices_TK = params.topk_indices_TK[rows]
                if self._stage_to:  # staged pages are numbered anew
                    topk_slots_TK = resident(topk_indices_TK, part.batch, view.page_size)
                part_params = replace(params, topk_indices_TK=topk_indices_TK, topk_slots_TK=topk_slots_TK)
            arguments = q_THD[rows], part_view, part.batch, part_params
            if i == len(self._states):
                self._states.append(self._prepare(*arguments))
            yield *arguments, self._states[i]

    def _prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Any:
        """Return the state of this kind of layer, which layers of another group may have prepared."""
        key = self._backend, batch, self._backend.kind(q_THD, view, batch, params)
        if key not in self._shared:
            self._shared[key] = self._backend.prepare(q_THD, view, batch, params)
        return self._shared[key]


class StepStates:
    """What was prepared for one step, for its layers to share; dropped with the step's context."""

    def __init__(self) -> None:
        self._batches: dict[Hashable, PreparedBatch] = {}
        # Apart, as the batches refer to it. A circle of references would outlive the step.
        self._shared: dict[Hashable, Any] = {}
        self._cut: dict[int, tuple[AttentionBatch, ...]] = {}
        self._windows: dict[AttentionBatch, WindowParts] = {}
        self._choices: dict[tuple[int, AttentionBatch], SplitChoice] = {}

    def batches(
        self, meta: AttentionMetadata, page_size: int, chunk: int | None
    ) -> tuple[AttentionBatch, ...]:
        """Return the requests as layers attend over them; those with chunks of one size share them.

        Args:
            meta: of the step.
            page_size: tokens of a page.
            chunk: tokens of a chunk, None for layers without.
        """
        if chunk is None:
            return meta.batches
        if chunk not in self._cut:
            self._cut[chunk] = tuple(cut_at_chunks(batch, page_size, chunk) for batch in meta.batches)
        return self._cut[chunk]

    def split_choice(
        self, layer: int, batch: AttentionBatch, topk_indices_TK: Tensor, exact: ExactCache
    ) -> SplitChoice:
        """Return the far and the near part of what a layer's queries have chosen, for all layers that share it.

        Args:
            layer: the layer that has chosen.
            batch: the requests.
            topk_indices_TK: chosen tokens of their rows.
            exact: the exact window and its pages.
        """
        if (layer, batch) not in self._choices:
            base_B = self.window_parts(batch, exact).near.base_B
            self._choices[layer, batch] = split_choice(topk_indices_TK, batch, base_B, exact.tokens)
        return self._choices[layer, batch]

    def window_parts(self, batch: AttentionBatch, exact: ExactCache) -> WindowParts:
        """Return the far and the near part of a batch, which all layers share.

        Args:
            batch: the requests.
            exact: the exact window and its pages.
        """
        if batch not in self._windows:
            self._windows[batch] = WindowParts(batch, exact)
        return self._windows[batch]

    def lookup(
        self,
        route: Route,
        backends: Mapping[str, AttentionBackend],
        page_size: int,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> PreparedBatch:
        """Return the batch as the layers of a route attend over it. Each layer looks it up, so it is one dict get.

        Args:
            route: of the layer's group, in the batch's phase. It must outlive the step.
            backends: the adapters by name.
            page_size: tokens of a page.
            batch: the requests.
            params: what the layer asks for.
        """
        # A route's hash would be that of all of its facts.
        key = id(route), batch, params.scale, params.window, params.softcap
        prepared = self._batches.get(key)
        if prepared is None:
            backend = backends[route.backend]
            prepared = PreparedBatch(backend, route.stage_to, batch, page_size, params.window, self._shared)
            self._batches[key] = prepared
        return prepared


@dataclass(frozen=True, slots=True)
class StepContext:
    """All that attention needs in one step. An argument of the model call, never a global."""

    plan: Plan
    pool: PagedPool
    backends: Mapping[str, AttentionBackend]
    meta: AttentionMetadata
    tier: HotBuffers | None = None
    """Where the pool's pages are, if not all on the device."""
    pending: dict[int, list[PendingFetch]] = field(default_factory=dict)
    """By layer, batch after batch: where chosen tokens lie, or will once they are fetched."""
    observer: AttentionObserver | None = None
    exact: ExactCache | None = None
    """Where the newest tokens are kept in the compute dtype, if they are."""
    recurrent: RecurrentStates | None = None
    """Of models with recurrent layers."""
    cut: Callable[[Any], Tensor] | None = None
    """Gets the operators' calls (operators.Seam) in place of attention, while a step is recorded piecewise."""
    states: StepStates = field(default_factory=StepStates, init=False)
    """What backends prepared for this step."""


def concatenate(outputs: list[Tensor]) -> Tensor:
    """Return the rows of all outputs; a single one is not copied."""
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def resident(topk_indices_TK: Tensor, batch: AttentionBatch, page_size: int) -> Tensor:
    """Return the slots of chosen tokens whose pages are all on the device."""
    return resident_slots(topk_indices_TK, batch.page_table_TN, None, page_size)
