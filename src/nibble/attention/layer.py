"""One attention layer of one step: write, (dequantize pages), attend. The only writer of the cache.

Attention sees what is stored: K and V are written first and read back from the pool.

Staging is to dequantise pages into a workspace, for a backend that cannot read the cache's format. It happens here
only, always declared by a route and priced by the plan (planner/explain.py). The workspace is made for the requests at
hand, never for the pool.

`nibble::attention` and `nibble::select` are the same as operators that a compiler of models calls and does not look
into. What a step stores and reads does not pass through the compiled model: the operator is given a number that is a
constant of that model, and finds there the StepContext that the model's owner has set. So there is no current step of
the process: any number of engines may run side by side.

Shape suffixes: T tokens, H query heads, D values of a head, K chosen tokens, N pages of a request, B requests, L tokens
of pages (N * page_size).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nibble import formats
from nibble.attention.chunks import cut_at_chunks
from nibble.attention.planner.plan import STAGED_PACKING, Plan, Route
from nibble.attention.planner.support import MAX_STAGED_TOKENS
from nibble.cache import layout as packings
from nibble.cache.hot_buffer import HotBuffers, PendingFetch
from nibble.cache.pool import KVView, PagedPool, StreamView
from nibble.errors import BackendError, NibbleError
from nibble.kernels import cdiv, indexer
from nibble.kernels.attention import merge_lse
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.offload import resident_slots
from nibble.kernels.types import AttentionBatch, AttentionMetadata, AttentionParams
from nibble.model_spec import INDEX, Phase


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


class AttentionObserver(Protocol):
    """Looks on while a step attends (engine/error_monitor.py). Must not write to what it is shown."""

    def observe(
        self,
        layer: int,
        q_THD: Tensor,
        streams: Mapping[str, Tensor],
        params: AttentionParams,
        out_THD: Tensor,
    ) -> None:
        """Compare a layer's query and streams, as the model gave them, with its output.

        Args:
            layer: the layer's index.
            q_THD: its query.
            streams: its new tokens.
            params: what it asked for.
            out_THD: what attention returned.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagePart:
    """Requests that are attended to together."""

    batch: AttentionBatch
    """The requests, over staged pages where their pages are dequantised first."""
    stored_BN: Tensor | None = None
    """Their pages in the pool, where those are dequantised."""


def cut_parts(batch: AttentionBatch, page_size: int, window: int | None) -> tuple[PagePart, ...]:
    """Cut a batch into parts whose padded pages hold at most MAX_STAGED_TOKENS; at least one request each.

    The layers of a step share the parts, and with them what backends prepare for each.

    Args:
        batch: the requests over their pages in the pool.
        page_size: tokens of a page.
        window: tokens that a query sees, if not all. Leading pages that no new token sees are left out.
    """
    batch = _within_window(batch, page_size, window)
    count, width = batch.page_table_BN.shape
    step = max(1, MAX_STAGED_TOKENS // max(width * page_size, 1))
    # Staged pages are numbered in the order in which they are dequantised.
    staged_BN = torch.arange(min(step, count) * width, dtype=torch.int32, device=batch.page_table_BN.device)
    staged_BN = staged_BN.view(-1, width)
    if step >= count:
        # Lengths stay where they are on the device: to send them again would make the host wait.
        return (PagePart(replace(batch, page_table_BN=staged_BN), batch.page_table_BN),)
    parts, start = [], batch.start
    for first in range(0, count, step):
        requests = slice(first, first + step)
        query_lens, seq_lens = batch.query_lens[requests], batch.seq_lens[requests]
        pages_BN = staged_BN[: len(query_lens)]
        part = AttentionBatch.from_lens(batch.phase, start, query_lens, seq_lens, pages_BN)
        parts.append(PagePart(part, batch.page_table_BN[requests]))
        start = part.stop
    return tuple(parts)


def _within_window(batch: AttentionBatch, page_size: int, window: int | None) -> AttentionBatch:
    """Return the batch without the leading pages that no new token sees."""
    if window is None:
        return batch
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    skipped = [max(0, stored - new - window + 1) // page_size for new, stored in lens]
    if not any(skipped):
        return batch
    # Masks look at distances only, so tokens may be counted from the first page that stays.
    seq_lens = [stored - skip * page_size for stored, skip in zip(batch.seq_lens, skipped, strict=True)]
    rows = [row[skip:] for row, skip in zip(batch.page_table_BN, skipped, strict=True)]
    page_table_BN = pad_sequence(rows, batch_first=True)[:, : cdiv(max(seq_lens), page_size)]
    return AttentionBatch.from_lens(batch.phase, batch.start, batch.query_lens, seq_lens, page_table_BN)


def dequantize_pages(view: KVView, part: PagePart, target: str) -> KVView:
    """Return a view of the part's pages in the plain format `target`.

    Args:
        view: the layer's pages in the pool.
        part: the requests, with their pages.
        target: the plain format.
    """
    assert part.stored_BN is not None
    codec, packing = formats.get(target), packings.get(STAGED_PACKING)
    streams: dict[str, StreamView] = {}
    for name, stored in view.streams.items():
        if name == INDEX:
            continue
        (plane,) = codec.planes(stored.stream)
        values_BLHD = stored.dequantize(part.stored_BN, plane.torch_dtype)
        pages = values_BLHD.flatten(0, 1).unflatten(0, (-1, view.page_size))
        streams[name] = StreamView(stored.stream, codec, packing, (pages,), stored.scale)
    return replace(view, streams=streams)


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
        outputs = []
        for i, part in enumerate(self.parts):
            rows = slice(part.batch.start, part.batch.stop)
            part_view = dequantize_pages(view, part, self._stage_to) if self._stage_to else view
            part_params = params
            if params.topk_indices_TK is not None:
                topk_indices_TK = params.topk_indices_TK[rows]
                if self._stage_to:  # staged pages are numbered anew
                    topk_slots_TK = _resident(topk_indices_TK, part.batch, view.page_size)
                part_params = replace(params, topk_indices_TK=topk_indices_TK, topk_slots_TK=topk_slots_TK)
            arguments = q_THD[rows], part_view, part.batch, part_params
            if i == len(self._states):
                self._states.append(self._prepare(*arguments))
            outputs.append(self._backend.forward(*arguments, self._states[i]))
        return _concatenate(outputs)

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
    states: StepStates = field(default_factory=StepStates, init=False)
    """What backends prepared for this step."""


def attention(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], params: AttentionParams
) -> Tensor:
    """Store the layer's new streams and attend over all that is stored.

    A layer that shares another's KV stores nothing, and reads its owner's pages.

    Args:
        ctx: the step.
        layer: the layer's index.
        q_THD: the query, padding rows included.
        streams: the new tokens' values [T, H, D] by stream.
        params: what the layer asks for.

    Returns:
        [T, H, Dv], zeros in padding rows.

    Raises:
        BackendError: a kernel failed.
    """
    owner, meta = ctx.plan.owner[layer], ctx.meta
    slot_mapping_T = meta.slot_mapping_T if meta.frame_slot_mapping_T is None else meta.frame_slot_mapping_T
    # Padding rows have no slot. They are the last rows, so they are cut off.
    if owner == layer:
        ctx.pool.write(layer, {name: x[: len(slot_mapping_T)] for name, x in streams.items()}, slot_mapping_T)
    # The newest tokens are read back too, so an answer depends neither on how its prompt was cut nor on
    # whether its prefix was cached.
    view = ctx.pool.view(owner)
    # Keys may be stored rotated, and then the query is rotated alike.
    rotated_THD = view.query(q_THD)
    outputs: list[Tensor] = []
    batches = ctx.states.batches(meta, view.page_size, ctx.plan.chunk(layer))
    for batch, topk_slots_TK in zip(batches, _lookup_topk_slots(ctx, layer, params), strict=True):
        route = ctx.plan.route(layer, batch.phase)
        prepared = ctx.states.lookup(route, ctx.backends, view.page_size, batch, params)
        try:
            outputs.append(prepared.attend(rotated_THD, view, params, topk_slots_TK))
        except (NibbleError, torch.OutOfMemoryError):  # the latter is explained where memory is known
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise BackendError(f"backend {route} failed in {batch.phase}: {reason}") from error
    padding = len(q_THD) - sum(map(len, outputs))
    if padding:
        # The model expects a row of output for each row of input.
        outputs.append(outputs[0].new_zeros(padding, *outputs[0].shape[1:]))
    out_THD = _concatenate(outputs)
    if ctx.observer is not None:
        ctx.observer.observe(layer, q_THD, streams, params, out_THD)
    return out_THD


def _concatenate(outputs: list[Tensor]) -> Tensor:
    """Return the rows of all outputs; a single one is not copied."""
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def select_topk(
    ctx: StepContext, layer: int, q_THD: Tensor, key_T1D: Tensor, weights_TH: Tensor, top_k: int
) -> Tensor:
    """Store the layer's new index keys, and choose the tokens that each query looks at.

    Args:
        ctx: the step.
        layer: the layer's index.
        q_THD: the indexer's query.
        key_T1D: its new keys.
        weights_TH: weights of its heads.
        top_k: tokens to choose.

    Returns:
        int32 [T, top_k], positions; PAD_INDEX behind the last.
    """
    slot_mapping_T = ctx.meta.slot_mapping_T
    ctx.pool.write(layer, {INDEX: key_T1D[: len(slot_mapping_T)]}, slot_mapping_T)
    keys = ctx.pool.view(layer).streams[INDEX].paged
    # Padding rows belong to no batch, and choose nothing.
    topk_indices_TK = torch.full((len(q_THD), top_k), PAD_INDEX, dtype=torch.int32, device=q_THD.device)
    fetches: list[PendingFetch] = []
    for batch in ctx.meta.batches:
        rows = slice(batch.start, batch.stop)
        longest = max(batch.seq_lens)
        topk_indices_TK[rows] = indexer.select_topk(
            keys, batch, q_THD[rows], weights_TH[rows], top_k, longest
        )
        # With a host tier the tokens of this batch are fetched while the next one chooses.
        fetches.append(_start_fetch(ctx, layer, batch, topk_indices_TK[rows]))
    ctx.pending[layer] = fetches
    return topk_indices_TK


def _start_fetch(
    ctx: StepContext, layer: int, batch: AttentionBatch, topk_indices_TK: Tensor
) -> PendingFetch:
    """Look up where chosen tokens lie, and start to fetch what is not on the device."""
    if ctx.tier is None:
        return PendingFetch(_resident(topk_indices_TK, batch, ctx.pool.layout.page_size))
    page_table_TN = page_table_by_token(batch)
    # Only decoding requests have hot buffers; the pages of others are on the device.
    if batch.phase is not Phase.DECODE:
        return ctx.tier.lookup_resident(topk_indices_TK, page_table_TN)
    assert batch.rows_B is not None
    return ctx.tier.prefetch(layer, topk_indices_TK, page_table_TN, batch.rows_B)


def _lookup_topk_slots(ctx: StepContext, layer: int, params: AttentionParams) -> Iterator[Tensor | None]:
    """Yield where the chosen tokens lie, batch by batch, each once all of them are on the device."""
    if params.topk_indices_TK is None:
        yield from [None] * len(ctx.meta.batches)
        return
    fetches = ctx.pending.get(params.index_layer)
    if fetches is None:  # no layer of this step chose them, so no other layer shares the choice
        fetches = [
            _start_fetch(ctx, layer, batch, params.topk_indices_TK[batch.start : batch.stop])
            for batch in ctx.meta.batches
        ]
    for fetch in fetches:
        if ctx.tier:
            ctx.tier.wait(layer, fetch)
        yield fetch.topk_slots_TK


def _resident(topk_indices_TK: Tensor, batch: AttentionBatch, page_size: int) -> Tensor:
    """Return the slots of chosen tokens whose pages are all on the device."""
    return resident_slots(topk_indices_TK, page_table_by_token(batch), None, page_size)


def page_table_by_token(batch: AttentionBatch) -> Tensor:
    """Return int32 [T, N]: the pages of each token's request."""
    total = batch.stop - batch.start
    if len(batch.query_lens) == total:
        return batch.page_table_BN
    counts_B = batch.cu_seqlens_q_B1.diff()
    return batch.page_table_BN.repeat_interleave(counts_B, 0, output_size=total)


# The operators

SEPARATOR = ","
_numbers = itertools.count()
# Weak: a compiled model knows the number alone, so a Step goes with its owner.
_steps: WeakValueDictionary[int, Step] = WeakValueDictionary()


class Step:
    """Where one owner of a compiled model sets the context of the step that it is about to run."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.context: StepContext | None = None
        _steps[self.number] = self


def attention_op(
    step: Step, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], width: int, params: AttentionParams
) -> Tensor:
    """Call attention() by way of the operator.

    Args:
        step: holds the context when the operator runs.
        layer: the layer's index.
        q_THD: the query, padding rows included.
        streams: the new tokens' values by stream.
        width: values of a head of the output.
        params: what the layer asks for.

    Returns:
        [T, H, width].
    """
    return torch.ops.nibble.attention(
        q_THD, list(streams.values()), SEPARATOR.join(streams), width, step.number, layer, params.scale, params.window,
        params.softcap, params.sinks_H, params.topk_indices_TK, params.index_layer,
    )  # fmt: skip


def select_topk_op(
    step: Step, layer: int, q_THD: Tensor, key_T1D: Tensor, weights_TH: Tensor, top_k: int
) -> Tensor:
    """Call select_topk() by way of the operator -> int32 [T, top_k].

    Args:
        step: holds the context when the operator runs.
        layer: the layer's index.
        q_THD: the indexer's query.
        key_T1D: its new keys.
        weights_TH: weights of its heads.
        top_k: tokens to choose.
    """
    return torch.ops.nibble.select(q_THD, key_T1D, weights_TH, step.number, layer, top_k)


def _context(step: int) -> StepContext:
    ctx = _steps[step].context
    assert ctx is not None, "the owner of a compiled model sets a context before it runs it"
    return ctx


def _attention(
    q: Tensor, streams: list[Tensor], names: str, width: int, step: int, layer: int, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None, topk_indices: Tensor | None, index_layer: int,
) -> Tensor:  # fmt: skip
    params = AttentionParams(scale, window, softcap, sinks, topk_indices, index_layer)
    streams_by_name = dict(zip(names.split(SEPARATOR), streams, strict=True))
    # contiguous, as the fake implementation promises
    return attention(_context(step), layer, q, streams_by_name, params).contiguous()


def _attention_fake(q: Tensor, streams: list[Tensor], names: str, width: int, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], width)


def _select(q: Tensor, key: Tensor, weights: Tensor, step: int, layer: int, top_k: int) -> Tensor:
    return select_topk(_context(step), layer, q, key, weights, top_k)


def _select_fake(q: Tensor, key: Tensor, weights: Tensor, step: int, layer: int, top_k: int) -> Tensor:
    return q.new_empty(q.shape[0], top_k, dtype=torch.int32)


_library = torch.library.Library("nibble", "FRAGMENT")  # what it defines lives as long as it does
_library.define(
    "attention(Tensor q, Tensor[] streams, str names, int width, int step, int layer, float scale, int? window, "
    "float? softcap, Tensor? sinks, Tensor? topk_indices, int index_layer) -> Tensor"
)
_library.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::attention", _attention_fake, lib=_library)
_library.define("select(Tensor q, Tensor key, Tensor weights, int step, int layer, int top_k) -> Tensor")
_library.impl("select", _select, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::select", _select_fake, lib=_library)
