"""One attention layer of one step: write, (dequantize pages), attend. The only writer of the cache.

Attention sees what is stored: K and V are written first and read back from the pool, dequantised into a workspace where
a backend cannot read their format (staging.py). With an exact window (window.py) the newest tokens are written to exact
pages too, by the same call; a query reads those exactly and all others from the pool, and both parts are merged.

Shape suffixes: T tokens, H query heads, D values of a head, K chosen tokens, W near tokens, N pages of a request,
B requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nibble.attention.choices import layer_choice, lookup_topk_slots
from nibble.attention.planner.plan import Route
from nibble.attention.sinks import SinkParts, sink_params
from nibble.attention.step import PreparedBatch, StepContext, concatenate, resident
from nibble.attention.window import ExactCache, far_params, near_params
from nibble.errors import BackendError, NibbleError
from nibble.kernels import near
from nibble.kernels.append.naive import apply_rope_to_keys
from nibble.kernels.attention import merge_lse
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.types import AttentionBatch, AttentionParams, LogitRows, Rope
from nibble.model_spec import Phase


def attention(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], params: AttentionParams,
    out_THD: Tensor | None = None, rope: Rope | None = None, *, logits_only: bool = False,
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
        logits_only: whether only rows are read whose logits are computed.

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
    if logits_only and meta.logit_rows and params.topk_indices_TK is None and ctx.plan.chunk(layer) is None:
        if out_THD is None:
            out_THD = q_THD.new_empty(*q_THD.shape[:2], view.output_dim)
        return _attend_for_logits(ctx, layer, meta.logit_rows, q_THD, params, out_THD.zero_())
    # Keys may be stored behind a Hadamard rotation, and then the query takes it, too.
    queries = q_THD, view.query(q_THD)
    batches = ctx.states.batches(meta, view.page_size, ctx.plan.chunk(layer))
    if out_THD is None and (len(batches) > 1 or len(q_THD) > count):
        out_THD = q_THD.new_empty(*q_THD.shape[:2], view.output_dim)
    for batch, topk_slots_TK in zip(batches, lookup_topk_slots(ctx, layer, params), strict=True):
        with _explained(ctx, layer, batch):
            out_THD = _attend(ctx, layer, batch, queries, streams, params, topk_slots_TK, out_THD)
    assert out_THD is not None, "a step has a batch"
    if len(q_THD) > count:
        # The model expects a row of output for each row of input.
        out_THD[count:].zero_()
    if ctx.observer is not None:
        ctx.observer.observe(layer, q_THD, streams, params, out_THD)
    return out_THD


@contextmanager
def _explained(ctx: StepContext, layer: int, batch: AttentionBatch) -> Iterator[None]:
    """Say of a kernel's error which backend failed."""
    try:
        yield
    except (NibbleError, torch.OutOfMemoryError):  # the latter is explained where memory is known
        raise
    except Exception as error:
        route, reason = ctx.plan.route(layer, batch.phase), f"{type(error).__name__}: {error}"
        raise BackendError(f"backend {route} failed in {batch.phase}: {reason}") from error


def _attend_for_logits(
    ctx: StepContext, layer: int, rows: LogitRows, q_THD: Tensor, params: AttentionParams, out_THD: Tensor
) -> Tensor:
    """Leave the output of rows whose logits are computed in `out_THD`, and return that."""
    if batch := rows.batch:
        q_SHD = q_THD.index_select(0, rows.rows_S)
        queries = q_SHD, ctx.pool.view(ctx.plan.owner[layer]).query(q_SHD)
        with _explained(ctx, layer, batch):
            # What a request that decodes sees is stored, its new token too.
            output = _attend(ctx, layer, batch, queries, {}, params, None, None)
        out_THD.index_copy_(0, rows.rows_S, output)
    return out_THD


def _store(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], rope: Rope | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Store new tokens, and return queries and streams as attention takes them."""
    meta, is_owner = ctx.meta, ctx.plan.owner[layer] == layer
    slots_T = meta.slot_mapping_T if meta.frame_slot_mapping_T is None else meta.frame_slot_mapping_T
    if rope:
        assert is_owner, "keys that a layer shares are rotated where they are stored"
        has_window, k_THD = ctx.exact is not None, streams["k"]
        q_THD, streams = ctx.pool.write_with_rope(
            layer, q_THD, streams, slots_T, meta.exact_slot_mapping_T, rope, keeps_keys=has_window
        )
        if ctx.observer and not has_window:
            # By the book: a kernel that keeps keys would be compiled for it while requests are served.
            streams = {**streams, "k": apply_rope_to_keys(k_THD, rope)}
        return q_THD, streams
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
        queries: of all rows that batches count, as they are and for keys as they are stored.
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
        return PartialAttention(concatenate(list(values)), torch.cat(lse, 1))

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
