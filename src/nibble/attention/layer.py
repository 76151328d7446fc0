"""One attention layer of one step: write, (dequantize pages), attend. The only writer of the cache.

Attention sees what is stored: K and V are written first and read back from the pool, dequantised into a workspace where
a backend cannot read their format (staging.py). With an exact window (window.py) the newest tokens are written to exact
pages too, by the same call; a query reads those exactly and all others from the pool, and both parts are merged.

Shape suffixes: T tokens, H query heads, D values of a head, K chosen tokens, W near tokens, N pages of a request,
B requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nibble.attention.choices import layer_choice, lookup_topk_slots, resident
from nibble.attention.chunks import cut_at_chunks
from nibble.attention.observer import AttentionObserver
from nibble.attention.planner.plan import Plan, Route
from nibble.attention.recurrent import RecurrentStates
from nibble.attention.sinks import SinkParts, sink_params
from nibble.attention.staging import PagePart, cut_parts, dequantize_pages
from nibble.attention.window import (
    ExactCache,
    SplitChoice,
    WindowParts,
    far_params,
    near_params,
    split_choice,
)
from nibble.cache.hot_buffer import HotBuffers, PendingFetch
from nibble.cache.pool import KVView, PagedPool
from nibble.errors import BackendError, NibbleError
from nibble.kernels import near
from nibble.kernels.attention import merge_lse
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.types import AttentionBatch, AttentionMetadata, AttentionParams, Rope
from nibble.model_spec import Phase


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
        return _concatenate([self._backend.forward(*call) for call in calls])

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
        return _concatenate(outputs)

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


def attention(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], params: AttentionParams,
    out_THD: Tensor | None = None, rope: Rope | None = None,
) -> Tensor:  # fmt: skip
    """Store the layer's new streams and attend over all that is stored.

    A layer that shares another's KV stores nothing, and reads its owner's pages.

    Args:
        ctx: the step.
        layer: the layer's index.
        q_THD: the query, padding rows included.
        streams: the new tokens' values [T, H, D] by stream.
        params: what the layer asks for.
        out_THD: where to leave what is returned, if anywhere.
        rope: what is done to queries and keys first, where the model's own code does not.

    Returns:
        [T, H, Dv], zeros in padding rows.

    Raises:
        BackendError: a kernel failed.
    """
    # Padding rows have no slot. They are the last rows, so they are cut off.
    meta, count = ctx.meta, len(ctx.meta.slot_mapping_T)
    streams = {name: x[:count] for name, x in streams.items()}
    q_THD, streams = _store(ctx, layer, q_THD, streams, rope)
    # The newest tokens are read back too, so an answer depends neither on how its prompt was cut nor on
    # whether its prefix was cached.
    view = ctx.pool.view(ctx.plan.owner[layer])
    # Keys may be stored rotated, and then the query is rotated alike.
    queries = q_THD, view.query(q_THD)
    batches = ctx.states.batches(meta, view.page_size, ctx.plan.chunk(layer))
    if out_THD is None and (len(batches) > 1 or len(q_THD) > count):
        out_THD = q_THD.new_empty(*q_THD.shape[:2], view.output_dim)
    for batch, topk_slots_TK in zip(batches, lookup_topk_slots(ctx, layer, params), strict=True):
        try:
            out_THD = _attend(ctx, layer, batch, queries, streams, params, topk_slots_TK, out_THD)
        except (NibbleError, torch.OutOfMemoryError):  # the latter is explained where memory is known
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            route = ctx.plan.route(layer, batch.phase)
            raise BackendError(f"backend {route} failed in {batch.phase}: {reason}") from error
    assert out_THD is not None, "a step has a batch"
    if len(q_THD) > count:
        # The model expects a row of output for each row of input.
        out_THD[count:].zero_()
    if ctx.observer is not None:
        ctx.observer.observe(layer, q_THD, streams, params, out_THD)
    return out_THD


def _store(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], rope: Rope | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Store new tokens, and return queries and streams as attention takes them."""
    meta, is_owner = ctx.meta, ctx.plan.owner[layer] == layer
    slots_T = meta.slot_mapping_T if meta.frame_slot_mapping_T is None else meta.frame_slot_mapping_T
    if rope:
        assert is_owner, "keys that a layer shares are rotated where they are stored"
        keeps_keys = ctx.exact is not None or ctx.observer is not None
        return ctx.pool.write_rotated(
            layer, q_THD, streams, slots_T, meta.exact_slot_mapping_T, rope, keeps_keys=keeps_keys
        )
    if is_owner:
        ctx.pool.write(layer, streams, slots_T, meta.exact_slot_mapping_T)
    return q_THD, streams


def _attend(
    ctx: StepContext, layer: int, batch: AttentionBatch, queries: tuple[Tensor, Tensor],
    streams: Mapping[str, Tensor], params: AttentionParams, topk_slots_TK: Tensor | None, out_THD: Tensor | None,
) -> Tensor:  # fmt: skip
    """Leave a batch's output in its rows of `out_THD`, and return that; without, return the output.

    Args:
        ctx: the step.
        layer: the layer's index.
        batch: the requests.
        queries: of the whole step, as they are and for keys as they are stored.
        streams: the new tokens' values by stream.
        params: what the layer asks for.
        topk_slots_TK: where the tokens that this batch has chosen lie in the pool.
        out_THD: of the whole step.
    """
    (q_THD, stored_q_THD), rows = queries, slice(batch.start, batch.stop)
    if ctx.exact:
        windowed = _WindowedLayer(ctx, ctx.exact, layer, batch, params)
        streams_of = {name: x[rows] for name, x in streams.items()}
        output = windowed.attend(q_THD[rows], stored_q_THD[rows], streams_of, topk_slots_TK)
        if out_THD is None:
            return output
        out_THD[rows].copy_(output)
        return out_THD
    view, route = ctx.pool.view(ctx.plan.owner[layer]), ctx.plan.route(layer, batch.phase)
    prepared = ctx.states.lookup(route, ctx.backends, view.page_size, batch, params)
    if out_THD is None:
        return prepared.attend(stored_q_THD, view, params, topk_slots_TK)
    prepared.attend_into(stored_q_THD, view, params, topk_slots_TK, out_THD)
    return out_THD


@dataclass(frozen=True, slots=True)
class _WindowedLayer:
    """One layer's attention over a batch, of which near tokens are read exactly."""

    ctx: StepContext
    exact: ExactCache
    layer: int
    batch: AttentionBatch
    params: AttentionParams

    def attend(
        self,
        q_THD: Tensor,
        stored_q_THD: Tensor,
        streams: Mapping[str, Tensor],
        topk_slots_TK: Tensor | None,
    ) -> Tensor:
        """Return attention of the batch's rows.

        Args:
            q_THD: their queries.
            stored_q_THD: their queries for keys as they are stored.
            streams: their values by stream.
            topk_slots_TK: where the far tokens that they have chosen lie in the pool.
        """
        ctx, exact, params = self.ctx, self.exact, self.params
        parts, owner = ctx.states.window_parts(self.batch, exact), ctx.plan.owner[self.layer]
        sinks = parts.sinks if ctx.plan.has_sinks(self.layer) else None
        far, view, near_slots_TW = sinks.far if sinks else parts.far, ctx.pool.view(owner), None
        near_ask, far_ask = near_params(params, exact.tokens), far_params(params, exact.tokens)
        if params.topk_indices_TK is not None:
            choice = layer_choice(ctx, exact, self.layer, self.batch, params)
            near_slots_TW = resident(choice.near_TW, parts.near.batch, view.page_size)
            near_ask = replace(near_ask, topk_indices_TK=choice.near_TW)
            far_ask = replace(params, topk_indices_TK=choice.far_TK)
        far_mean_HD = view.k_mean_HD if far and far_ask else None
        has_kernel = near_slots_TW is None and near.serves(q_THD, self.batch, view.streams)
        if has_kernel and not self.batch.phase.decodes:
            part = None
            # Parts that are merged with sinks need all rows.
            far = far if sinks else parts.far_rows
            if far and far_ask:
                prepared = self._prepared(ctx.plan.route(self.layer, self.batch.phase), far, far_ask)
                part = prepared.attend_partially(stored_q_THD, view, far_ask)
            if sinks and sinks.sinks:
                part = self._with_sinks(q_THD, part, sinks, far_mean_HD)
            return near.near_prompt_attention(
                q_THD, streams, *exact.keys_values(owner), self.batch, near_ask, far_mean_HD, part
            )
        # What is merged with sinks is shifted afterwards, or its bits would depend on whether there is a far part.
        near_mean_HD = None if sinks else far_mean_HD
        if has_kernel:
            of_owner = exact.keys_values(owner)
            part = near.near_attention(q_THD, *of_owner, parts.near.batch, near_ask, near_mean_HD)
        else:
            pages = exact.view(owner, parts, streams)
            route = ctx.plan.near_route(self.layer, self.batch.phase)
            prepared = self._prepared(route, parts.near.batch, near_ask)
            part = prepared.attend_partially(q_THD, pages, near_ask, near_slots_TW)
            part = near.without_mean(part, q_THD, near_mean_HD, params.scale)
        if sinks and sinks.sinks:
            part = self._with_sinks(q_THD, part, sinks)
            part = near.without_mean(part, q_THD, far_mean_HD, params.scale)
        if far is None or far_ask is None:
            return part.values_THD.to(q_THD.dtype)
        route = ctx.plan.route(self.layer, self.batch.phase)
        prepared = self._prepared(route, far, far_ask)
        return prepared.attend_merged(stored_q_THD, view, far_ask, part, topk_slots_TK)

    def _with_sinks(
        self, q_THD: Tensor, part: PartialAttention | None, sinks: SinkParts, k_mean_HD: Tensor | None = None
    ) -> PartialAttention:
        """Return `part`, if there is one, merged with attention over sinks, less the mean if one is given."""
        merged = []
        for rows, batch in sinks.sinks:
            own = self._over_sinks(q_THD[rows], batch)
            own = near.without_mean(own, q_THD[rows], k_mean_HD, self.params.scale)
            if part is not None:
                theirs = PartialAttention(part.values_THD[rows], part.lse_HT[:, rows])
                own = merge_lse(theirs, own, torch.float32)
            merged.append(own)
        values, lse = zip(*merged, strict=True)
        return PartialAttention(_concatenate(list(values)), torch.cat(lse, 1))

    def _over_sinks(self, q_THD: Tensor, batch: AttentionBatch) -> PartialAttention:
        """Return attention over sinks, read as a decode step reads near tokens: each query is a request."""
        owner = self.ctx.plan.owner[self.layer]
        pages = self.exact.pool.view(owner)
        sink_ask = sink_params(self.params, self.exact.sinks)
        if near.serves(q_THD, batch, pages.streams):
            return near.near_attention(q_THD, *self.exact.keys_values(owner), batch, sink_ask)
        route = self.ctx.plan.near_route(self.layer, Phase.DECODE)
        return self._prepared(route, batch, sink_ask).attend_partially(q_THD, pages, sink_ask)

    def _prepared(self, route: Route, batch: AttentionBatch, params: AttentionParams) -> PreparedBatch:
        return self.ctx.states.lookup(route, self.ctx.backends, self.ctx.pool.layout.page_size, batch, params)


def _concatenate(outputs: list[Tensor]) -> Tensor:
    """Return the rows of all outputs; a single one is not copied."""
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
