"""The device side of a host tier: latents of all pages on the host, hot buffers of requests, and copies between both.

The scheduler decides moves (residency.py). The device applies them at the start of a step, in stream order, so a
running step is not disturbed. Full pages are saved during steps on a stream of their own, for which the device waits
only before frames change hands. Within a step nothing waits for the host: kernels find the tokens that are missing and
fetch them (kernels/offload/) on another stream, while the step goes on until it needs them.

Host memory holds the device's format or a smaller one. A token is one record there, whatever the packing of the
device's pool, so that fetching it is one read. Kernels read and write this memory in place.

Shape suffixes: T query tokens, K tokens that each looks at, N pages of a request, P pages in all, R rows of the tables
of requests, F frames of a hot buffer, B slots of it, M slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nibble.cache import layout as packings
from nibble.cache.layout import CacheLayout
from nibble.cache.lease import Lease
from nibble.cache.pool import PagedPool, StreamView
from nibble.cache.residency import Copy, Moves, Residency
from nibble.cache.scales import KVScales
from nibble.errors import CapacityError
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.offload import HotBuffer, HotLookup, copy_tokens, host_memory, lookup_hot, resident_slots
from nibble.kernels.types import Paged
from nibble.model_spec import INDEX, LATENT

SAVE_PROGRAMS = 16
"""Programs that save pages during a step. Few: the link to the host is slow, and the step needs the processors."""


def host_latents(layout: CacheLayout, pages: int, scales: KVScales, device: torch.device) -> dict[int, Paged]:
    """Allocate host memory for the latents of every stored layer, and return it as kernels read it.

    Args:
        layout: the host's layout, latents only.
        pages: pages of the pool.
        scales: global scales of the formats.
        device: the device that reads and writes the memory.

    Raises:
        CapacityError: the host has too little memory.
    """
    packing, latents = packings.get(layout.packing), {}
    # Kernels of a GPU read and write this memory in place, which ordinary memory does not allow.
    empty = torch.empty if device.type == "cpu" else host_memory.empty
    for layer in layout.layers:
        # A latent is the only stream here, because index keys stay on the device.
        (entry,) = layer.streams
        codec, stream = entry.codec, entry.stream
        scale = scales.scale(layer.layer, stream.name, layer.transforms, codec)
        try:
            planes = packing.allocate(codec.planes(stream), pages, layout.page_size, device, empty)
        except RuntimeError as error:  # torch raises no OutOfMemoryError for host memory
            raise CapacityError(
                f"the host has no memory for {pages} pages of the cache ({error}); a smaller --hisparse "
                "host_memory=... would help"
            ) from error
        value = torch.tensor(scale, dtype=torch.float32, device=device)
        latents[layer.layer] = StreamView(stream, codec, packing, planes, value).paged
    return latents


@dataclass(frozen=True, slots=True)
class StepUpdates:
    """Changes that the device applies before a step. The slices say where their numbers lie in the step's one copy."""

    moves: Moves
    hot_frames: Mapping[int, list[int]]
    """Frames of the hot buffers that changed, by table row."""
    saves: tuple[slice, slice]
    """Pages and frames to save."""
    loads: tuple[slice, slice]
    """Pages and frames to load."""
    places: tuple[slice, slice]
    """Pages and their new frames."""
    rows: slice
    """Table rows whose hot buffers changed."""
    buffers: slice
    """The frames of those rows."""


@dataclass(frozen=True, slots=True)
class PendingFetch:
    """Slots of the tokens that queries look at, readable after wait()."""

    topk_slots_TK: Tensor
    layer: int | None = None
    """The layer whose latents are being fetched; None if nothing has to be fetched."""
    lookup: HotLookup | None = None
    """The copies."""
    ready: torch.cuda.Event | None = None
    """Recorded after the copies, if another stream makes them."""


class HotBuffers:
    """Page frames, hot buffers and copies of one engine.

    Args:
        residency: the scheduler's books; of a rank that does what another says, empty ones.
        host: latents on the host, by layer.
        pool: latents on the device.
        rows: rows of the tables of requests; the last is padding.
    """

    def __init__(self, residency: Residency, host: Mapping[int, Paged], pool: PagedPool, rows: int) -> None:
        self.residency = residency
        self.page_size, self.device = pool.layout.page_size, pool.device
        self.stores = {layer: (view.streams[LATENT].paged, host[layer]) for layer, view in pool.views.items()}
        # Layers that select tokens, for themselves and for layers that share their selection.
        index_layers = [layer for layer, view in pool.views.items() if INDEX in view.streams]
        self.frames_P = self._full(pool.pages)
        size = residency.frames_per_hot_buffer * self.page_size
        self._buffers_RF = self._full(rows, residency.frames_per_hot_buffer)
        self._tokens = self._full(len(index_layers), rows, size)
        self._fresh = torch.arange(size, dtype=torch.int32, device=self.device)
        # Any order serves an empty buffer: all of its slots are equally old.
        self._order = self._fresh.repeat(len(index_layers), rows, 1)
        self._counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        self._hot = {
            layer: HotBuffer(self.frames_P, self._buffers_RF, self._tokens[i], self._order[i], self._counts)
            for i, layer in enumerate(index_layers)
        }
        self._frames_on_device: dict[int, list[int]] = {}
        on_gpu = self.device.type == "cuda"
        self._save_stream = torch.cuda.Stream() if on_gpu else None
        self._fetch_stream = torch.cuda.Stream() if on_gpu else None

    def _full(self, *shape: int) -> Tensor:
        return torch.full(shape, PAD_INDEX, dtype=torch.int32, device=self.device)

    def round_trip(self, layer: int, source: int, target: int) -> None:
        """Copy frame `source` of a layer to the host's first page, and from there into frame `target`.

        Args:
            layer: a stored layer.
            source: frame that is read.
            target: frame that is written.
        """
        device, host = self.stores[layer]
        host_page, source_slots, target_slots = (
            self._slots(torch.tensor([number], device=self.device)) for number in (0, source, target)
        )
        copy_tokens(device, source_slots, host, host_page)
        copy_tokens(host, host_page, device, target_slots)

    # --- before a step

    def take_updates(self, add: Callable[[Iterable[int]], slice], leases: Mapping[int, Lease]) -> StepUpdates:
        """Return what the device must apply before the next step.

        The same updates are returned again if apply_updates() is never reached.

        Args:
            add: appends numbers to the step's one copy to the device and returns where they lie.
            leases: leases of the step by table row.
        """
        moves = self.residency.take_moves()
        changed = {
            row: lease.hot_frames
            for row, lease in leases.items()
            # Identity, not equality: a later lease may get the same frames, in which other tokens lie.
            if self._frames_on_device.get(row) is not lease.hot_frames
        }
        no_frames = [PAD_INDEX] * self.residency.frames_per_hot_buffer
        return StepUpdates(
            moves,
            changed,
            _add_copies(add, moves.saves),
            _add_copies(add, moves.loads),
            _add_copies(add, moves.places),
            add(changed),
            add(frame for frames in changed.values() for frame in (frames or no_frames)),
        )

    def apply_updates(self, sent: Tensor, updates: StepUpdates) -> None:
        """Apply `updates`, in stream order.

        Args:
            sent: int64, the step's numbers on the device.
            updates: from take_updates().
        """
        # A frame that changes hands may still be read by a save of an earlier step.
        if updates.moves.freed and self._save_stream:
            torch.cuda.current_stream().wait_stream(self._save_stream)
        # A step that raised midway may have left copies running.
        if self._fetch_stream:
            torch.cuda.current_stream().wait_stream(self._fetch_stream)
        saved, loaded, (pages, frames) = (
            (sent[pages], sent[frames]) for pages, frames in (updates.saves, updates.loads, updates.places)
        )
        # Saves before loads: a load may overwrite the frame of a page that is saved here.
        self._save(*saved)
        # Marked at once: if what follows raises, the saves must not run again on frames with other contents.
        self.residency.mark_saves_launched()
        self._load(*loaded)
        if len(pages):
            self.frames_P.index_copy_(0, pages, frames.int())
        rows = sent[updates.rows]
        if len(rows):
            self._buffers_RF.index_copy_(0, rows, sent[updates.buffers].int().view(len(rows), -1))
            # A buffer with new frames holds no token yet.
            self._tokens.index_fill_(1, rows, PAD_INDEX)
            self._order.index_copy_(1, rows, self._fresh.expand(len(self._order), len(rows), -1))
        # Marked last, so that a step that raised before this point gets the same updates again.
        self._frames_on_device.update(updates.hot_frames)
        self.residency.mark_applied()

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
        """Return all slots of pages or frames, one after the other."""
        within = torch.arange(self.page_size, device=pages_M.device)
        return (pages_M[:, None] * self.page_size + within).flatten()

    # --- within a step

    def frame_slots(self, slot_mapping_T: Tensor) -> Tensor:
        """Return the slots of the frames that hold these slots of pages; PAD_INDEX where there is none."""
        # Negative slots must not index the table; the last line masks their result.
        frame_T = self.frames_P[(slot_mapping_T // self.page_size).clamp(min=0)].long()
        frame_slot_mapping_T = frame_T * self.page_size + slot_mapping_T % self.page_size
        return torch.where((slot_mapping_T < 0) | (frame_T < 0), PAD_INDEX, frame_slot_mapping_T)

    def lookup_resident(self, topk_indices_TK: Tensor, page_table_TN: Tensor) -> PendingFetch:
        """Return the slots of selected tokens whose pages are all on the device.

        Args:
            topk_indices_TK: int32 positions.
            page_table_TN: int32 pages of each token's request.
        """
        return PendingFetch(resident_slots(topk_indices_TK, page_table_TN, self.frames_P, self.page_size))

    def prefetch(
        self, layer: int, topk_indices_TK: Tensor, page_table_TN: Tensor, rows_T: Tensor
    ) -> PendingFetch:
        """Make room for the tokens that decoding requests selected in `layer`, and start to fetch missing ones.

        Args:
            layer: a layer that selects tokens.
            topk_indices_TK: int32 positions.
            page_table_TN: int32 pages of each request.
            rows_T: int64 table rows of the requests.
        """
        if self._fetch_stream is None:
            return self._lookup(layer, topk_indices_TK, page_table_TN, rows_T)
        # The lookup reads the selection, which the step's own stream computes.
        self._fetch_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._fetch_stream):
            fetch, ready = self._lookup(layer, topk_indices_TK, page_table_TN, rows_T), torch.cuda.Event()
            ready.record()
        return replace(fetch, ready=ready)

    def _lookup(
        self, layer: int, topk_indices_TK: Tensor, page_table_TN: Tensor, rows_T: Tensor
    ) -> PendingFetch:
        lookup = lookup_hot(topk_indices_TK, rows_T, page_table_TN, self._hot[layer])
        self.fetch(layer, lookup)
        return PendingFetch(lookup.topk_slots_TK, layer, lookup)

    def wait(self, layer: int, fetch: PendingFetch) -> None:
        """Let `layer` read what `fetch` brings; a layer that shares another's selection makes copies of its own."""
        if fetch.ready:
            torch.cuda.current_stream().wait_event(fetch.ready)
        if fetch.lookup and layer != fetch.layer:
            self.fetch(layer, fetch.lookup)

    def fetch(self, layer: int, lookup: HotLookup) -> None:
        """Copy the tokens that `lookup` misses to the device, for stored layer `layer`."""
        device, host = self.stores[layer]
        copy_tokens(host, lookup.from_M, device, lookup.to_M, lookup.count)

    # --- after a step

    def invalidate(self, rows: Iterable[int]) -> None:
        """Drop the hot-buffer contents of `rows` before the next step: the last one raised midway."""
        for row in rows:
            self._frames_on_device.pop(row, None)

    def backup(
        self, leases: Iterable[tuple[Lease, int]], save: Callable[[Sequence[Copy]], None] | None = None
    ) -> None:
        """Save full pages during the step that was launched last.

        A lease that fits into a hot buffer is never offloaded, so nothing of it is saved.

        Args:
            leases: leases of that step, with the tokens that each has stored after it whatever becomes of drafts.
            save: launches the copies; if None, save() of this device alone.
        """
        copies: dict[int, int] = {}
        offers: list[tuple[Lease, int]] = []
        for lease, num_tokens in leases:
            full = num_tokens // self.page_size
            if full > self.residency.frames_per_hot_buffer and full > lease.num_saved:
                copies.update(self.residency.unsaved(lease.pages[lease.num_saved : full]))
                offers.append((lease, full))
        if copies:
            saved = tuple(copies.items())
            (save or self.save)(saved)
            self.residency.mark_saved(saved)
        # Marked after the launch: if it raised, the same pages are offered again.
        for lease, full in offers:
            lease.num_saved = full

    def save(self, copies: Sequence[Copy]) -> None:
        """Save these pages from their frames, beside the step that was launched last."""
        numbers = torch.tensor(copies, dtype=torch.int64)
        if self._save_stream is None:
            self._save(numbers[:, 0], numbers[:, 1])
        else:
            # From pinned memory: a copy from pageable memory would make the host wait.
            numbers = numbers.pin_memory().to(self.device, non_blocking=True)
            # The step that was launched last still writes these pages.
            self._save_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._save_stream):
                # The allocator must not reuse this memory while the save stream reads it.
                numbers.record_stream(self._save_stream)
                self._save(numbers[:, 0], numbers[:, 1], programs=SAVE_PROGRAMS)

    # --- statistics

    @property
    def lookup_counts(self) -> dict[str, int]:
        """Return the selected tokens of decoding requests so far: in resident pages, in hot buffers, and fetched.

        Waits for the device.
        """
        return dict(zip(("resident", "hits", "misses"), self._counts.tolist(), strict=True))

    @property
    def summary(self) -> str:
        """Return one line for people."""
        stats, counts = self.residency.stats, self.lookup_counts
        total = max(sum(counts.values()), 1)
        resident, hot, fetched = (f"{counts[name] / total:.1%}" for name in ("resident", "hits", "misses"))
        return (
            f"host tier: {stats.spilled} requests spilled, {stats.saved} pages saved, {stats.loaded} loaded back; "
            f"of the tokens that answers looked at {resident} lay in pages, {hot} were hot, {fetched} were fetched"
        )


def _add_copies(add: Callable[[Iterable[int]], slice], copies: Sequence[Copy]) -> tuple[slice, slice]:
    return add(page for page, _ in copies), add(frame for _, frame in copies)
