"""HotTier: the device's side of a host tier. Where pages lie, hot buffers of requests, and the copies between both.

What the books decide (residency.py) is told to the device at the beginning of a step, in stream order, so a step that
is under way is not disturbed. Full pages are saved beside the steps, on a stream of their own, for which the device
waits only before frames change hands. Inside a step nothing waits for the host: which tokens are missing is found, and
brought, by kernels (kernels/offload) on another stream, beside what the step does until it needs them.
Owns HotTier, News and Coming. Must not know of requests, models or backends.

Shape suffixes: T query tokens, K tokens that each looks at, N pages of a request, P pages in all, R rows of the tables
of requests, F frames of a hot buffer, B slots of it, M slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nibble.cache.manager import Lease
from nibble.cache.offload.host_pool import HostPool
from nibble.cache.offload.residency import Copy, Moves, Residency
from nibble.cache.pool import PagedPool
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.offload import HotBuffer, HotLookup, copy_tokens, lookup_hot, resident_slots
from nibble.model_spec import LATENT

BESIDE = 16
"""Programs that save pages beside a step: few, as the link to the host is slow, and the step needs the rest."""


@dataclass(frozen=True, slots=True)
class StepUpdates:
    """What a step must do before it begins, and where its numbers lie among those that were sent. leases: hot buffers
    of rows that have another than before."""

    moves: Moves
    leases: Mapping[int, list[int]]
    saves: tuple[slice, slice]
    loads: tuple[slice, slice]
    places: tuple[slice, slice]
    rows: slice
    buffers: slice


@dataclass(frozen=True, slots=True)
class PendingFetch:
    """topk_slots_TK: where chosen tokens lie, once they are there. layer: whose latents are on their way; found: what is
    copied; ready: since when, if that is another stream's doing. No layer where nothing has to come.
    """

    topk_slots_TK: Tensor
    layer: int | None = None
    found: HotLookup | None = None
    ready: torch.cuda.Event | None = None


class HotBuffers:
    """residency: the books. choosers: layers that choose tokens, for themselves and those that share their choice.

    stores: latents of each stored layer on the device, and on the host. rows: of the tables of requests; the
    last is nobody's.
    """

    def __init__(
        self, residency: Residency, host: HostPool, pool: PagedPool, index_layers: Sequence[int], rows: int
    ) -> None:
        self.residency = residency
        self.page_size, self.device = pool.layout.page_size, pool.device
        self.stores = {
            layer: (view.streams[LATENT].paged, host.paged(layer)) for layer, view in pool.views.items()
        }
        self.frames_P = self._full(pool.pages)
        size = residency.hot * self.page_size
        self._buffers_RF = self._full(rows, residency.hot)
        self._held = self._full(len(index_layers), rows, size)
        self._fresh = torch.arange(size, dtype=torch.int32, device=self.device)
        self._order = self._fresh.repeat(len(index_layers), rows, 1)
        self._counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        self._hot = {
            layer: HotBuffer(self._buffers_RF, self._held[i], self._order[i], self._counts)
            for i, layer in enumerate(index_layers)
        }
        self._told: dict[int, list[int]] = {}
        on_gpu = self.device.type == "cuda"
        self._beside = torch.cuda.Stream() if on_gpu else None
        self._fetching = torch.cuda.Stream() if on_gpu else None
        self._pending: deque[tuple[torch.cuda.Event, int]] = deque()

    def _full(self, *shape: int) -> Tensor:
        return torch.full(shape, PAD_INDEX, dtype=torch.int32, device=self.device)

    def round_trip(self, layer: int, source: int, target: int) -> None:
        """What frame `source` holds of a layer goes to the host, into its first page, and back into frame `target`."""
        device, host = self.stores[layer]
        page, there, back = (
            self._slots(torch.tensor([number], device=self.device)) for number in (0, source, target)
        )
        copy_tokens(device, there, host, page)
        copy_tokens(host, page, device, back)

    # Before a step

    def take_updates(self, add: Callable[[Iterable[int]], slice], leases: Mapping[int, Lease]) -> StepUpdates:
        """What the device has not been told; its numbers are handed to `add`. leases: of the step, by row. Said again
        if it does not come to settle()."""
        moves = self.residency.take_moves()
        changed = {row: lease.hot for row, lease in leases.items() if self._told.get(row) is not lease.hot}
        none = [PAD_INDEX] * self.residency.hot
        return StepUpdates(
            moves,
            changed,
            _both(add, moves.saves),
            _both(add, moves.loads),
            _both(add, moves.places),
            add(changed),
            add(frame for frames in changed.values() for frame in (frames or none)),
        )

    def apply_updates(self, sent: Tensor, news: StepUpdates) -> None:
        """Does what the news say. sent: the numbers, on the device."""
        if news.moves.freed and self._beside:
            torch.cuda.current_stream().wait_stream(self._beside)
        if self._fetching:  # a step that broke off may have left it at work
            torch.cuda.current_stream().wait_stream(self._fetching)
        saved, loaded, (pages, frames) = (
            (sent[pages], sent[frames]) for pages, frames in (news.saves, news.loads, news.places)
        )
        self._save(*saved)
        self.residency.saves_done()
        self._load(*loaded)
        if len(pages):
            self.frames_P.index_copy_(0, pages, frames.int())
        rows = sent[news.rows]
        if len(rows):
            self._buffers_RF.index_copy_(0, rows, sent[news.buffers].int().view(len(rows), -1))
            self._held.index_fill_(1, rows, PAD_INDEX)
            self._order.index_copy_(1, rows, self._fresh.expand(len(self._order), len(rows), -1))
        self._told.update(news.leases)
        self.residency.done()

    def _save(self, pages: Tensor, frames: Tensor, programs: int | None = None) -> None:
        if len(pages):
            from_M, to_M = self._slots(frames), self._slots(pages)
            for device, host in self.stores.values():
                copy_tokens(device, from_M, host, to_M, programs=programs)

    def _load(self, pages: Tensor, frames: Tensor) -> None:
        if len(pages):
            from_M, to_M = self._slots(pages), self._slots(frames)
            for device, host in self.stores.values():
                copy_tokens(host, from_M, device, to_M)

    def _slots(self, pages_M: Tensor) -> Tensor:
        """All slots of pages."""
        within = torch.arange(self.page_size, device=pages_M.device)
        return (pages_M[:, None] * self.page_size + within).flatten()

    # In a step

    def place(self, slot_mapping_T: Tensor) -> Tensor:
        """Slots of pages -> slots of their frames; negative ones stay."""
        frame_T = self.frames_P[(slot_mapping_T // self.page_size).clamp(min=0)].long()
        frame_slot_mapping_T = frame_T * self.page_size + slot_mapping_T % self.page_size
        return torch.where((slot_mapping_T < 0) | (frame_T < 0), PAD_INDEX, frame_slot_mapping_T)

    def resident(self, topk_indices_TK: Tensor, page_table_TN: Tensor) -> PendingFetch:
        """Where chosen tokens lie whose pages are all on the device."""
        return PendingFetch(resident_slots(topk_indices_TK, page_table_TN, self.frames_P, self.page_size))

    def prefetch(
        self, layer: int, topk_indices_TK: Tensor, page_table_TN: Tensor, rows_T: Tensor
    ) -> PendingFetch:
        """Finds room for what decoding requests have chosen in `layer`, and begins to copy what is not there.

        rows_T: of the requests. finish() comes before anything is read.
        """
        if self._fetching is None:
            return self._brought(layer, topk_indices_TK, page_table_TN, rows_T)
        self._fetching.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._fetching):
            coming, ready = self._brought(layer, topk_indices_TK, page_table_TN, rows_T), torch.cuda.Event()
            ready.record()
        return replace(coming, ready=ready)

    def _brought(
        self, layer: int, topk_indices_TK: Tensor, page_table_TN: Tensor, rows_T: Tensor
    ) -> PendingFetch:
        hot = self._hot[layer]
        found = lookup_hot(topk_indices_TK, rows_T, page_table_TN, self.frames_P, hot, self.page_size)
        self.fetch(layer, found)
        return PendingFetch(found.topk_slots_TK, layer, found)

    def wait(self, layer: int, coming: PendingFetch) -> None:
        """From now on `layer` may read what was to come; one that shares another's choice has its own copies made."""
        if coming.ready:
            torch.cuda.current_stream().wait_event(coming.ready)
        if coming.found and layer != coming.layer:
            self.fetch(layer, coming.found)

    def fetch(self, layer: int, found: HotLookup) -> None:
        """Brings to the device what `found` misses of stored layer `layer`."""
        device, host = self.stores[layer]
        copy_tokens(host, found.from_M, device, found.to_M, found.count)

    # After a step

    def invalidate(self, rows: Iterable[int]) -> None:
        """A step of these rows broke off: what their hot buffers hold is not known, and is forgotten in the next."""
        for row in rows:
            self._told.pop(row, None)

    def backup(self, leases: Iterable[tuple[Lease, int]]) -> None:
        """Saves full pages beside the step that was launched last, of leases that may come to need it.

        leases: of that step, with the tokens that each has stored after it. A lease that fits into a hot buffer is
        never spilled, and nothing of it is saved.
        """
        self._forget_finished()
        copies: dict[int, int] = {}
        offers: list[tuple[Lease, int]] = []
        for lease, stored in leases:
            full = stored // self.page_size
            if full > self.residency.hot and full > lease.num_saved:
                copies.update(self.residency.to_save(lease.pages[lease.num_saved : full]))
                offers.append((lease, full))
        if copies:
            self._save_beside(tuple(copies.items()))
        for lease, full in offers:
            lease.num_saved = full

    def _save_beside(self, copies: Sequence[Copy]) -> None:
        numbers = torch.tensor(copies, dtype=torch.int64)
        if self._beside is None:
            self._save(numbers[:, 0], numbers[:, 1])
        else:
            numbers = numbers.pin_memory().to(self.device, non_blocking=True)
            self._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._beside):
                numbers.record_stream(self._beside)
                self._save(numbers[:, 0], numbers[:, 1], programs=BESIDE)
                event = torch.cuda.Event()
                event.record()
            self._pending.append((event, len(copies)))
        self.residency.saved(copies)

    def _forget_finished(self) -> None:
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()

    # How it goes

    @property
    def lag(self) -> int:
        """Pages that are being saved."""
        self._forget_finished()
        return sum(count for _, count in self._pending)

    @property
    def lookup_counts(self) -> dict[str, int]:
        """Chosen tokens of decoding requests so far: found in their pages, found hot, and fetched. Waits for the
        device."""
        return dict(zip(("resident", "hits", "misses"), self._counts.tolist(), strict=True))

    @property
    def summary(self) -> str:
        """How it goes, for people."""
        stats, looked = self.residency.stats, self.lookup_counts
        total = max(sum(looked.values()), 1)
        resident, hot, fetched = (f"{looked[name] / total:.1%}" for name in ("resident", "hits", "misses"))
        return (
            f"host tier: {stats.spilled} requests spilled, {stats.saved} pages saved, {stats.loaded} loaded back; "
            f"of the tokens that answers looked at {resident} lay in pages, {hot} were hot, {fetched} were fetched"
        )


def _both(add: Callable[[Iterable[int]], slice], copies: Sequence[Copy]) -> tuple[slice, slice]:
    return add(page for page, _ in copies), add(frame for _, frame in copies)
