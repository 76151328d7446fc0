"""Which pages lie on the device, and in which frames, while the host tier holds the rest: plain numbers.

With a host tier a page is a number whose latents lie in a frame of the device, on the host, or in both. A page that a
lease needs stays in its frame. A page without users keeps its frame until another page wants one; then it is evicted,
and must be read from the host or loaded again. An evicted page is saved first, unless it was saved before. A decoding
lease may give up its pages for a hot buffer: some frames of its own that keep the tokens it looks at (hot_buffer.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nibble.errors import OutOfFrames

NOT_RESIDENT = -1
"""In place of a frame: the page is not on the device."""
Copy = tuple[int, int]
"""A page and a frame."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies and page table changes that must happen before the next step, in the order of the fields."""

    saves: tuple[Copy, ...]
    """Pages to save from frames that other pages get."""
    loads: tuple[Copy, ...]
    """Pages to load into their frames."""
    places: tuple[Copy, ...]
    """The frame of each page that moved."""
    freed: bool
    """Whether any frame has another page than before."""


@dataclass(slots=True)
class TierStats:
    """Counts of frames and, over the tier's life, of pages and leases."""

    frames: int
    free: int = 0
    idle: int = 0
    """Frames of pages without users."""
    hot: int = 0
    """Frames of hot buffers."""
    spilled: int = 0
    """Leases that got a hot buffer."""
    saved: int = 0
    """Pages saved to the host."""
    loaded: int = 0
    """Pages loaded back."""
    dropped: int = 0
    """Pages evicted from the device."""


class Residency:
    """The books of `pages` pages over fewer frames.

    Args:
        pages: pages of the pool.
        frames: frames on the device.
        hot: frames of one hot buffer.
    """

    def __init__(self, pages: int, frames: int, hot: int) -> None:
        assert min(pages, frames, hot) > 0, f"{pages} pages, {frames} frames, {hot} of a hot buffer"
        self.num_frames, self.frames_per_hot_buffer = frames, hot
        self._frame = [NOT_RESIDENT] * pages
        self._users = [0] * pages
        self._saved = bytearray(pages)
        self._free = list(range(frames - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the first is evicted first
        self._stats = TierStats(frames)
        self.num_releases = 0  # goes up whenever frames may have become free
        self._saves: list[Copy] = []
        self._loads: dict[int, int] = {}
        self._moved: dict[int, int] = {}
        self._reused = False

    @property
    def num_available(self) -> int:
        """Return the frames that can be allocated now: free ones, and those of pages without users."""
        return len(self._free) + len(self._idle)

    @property
    def stats(self) -> TierStats:
        """Return the current counts."""
        return replace(self._stats, free=len(self._free), idle=len(self._idle))

    def cost(self, pages: Iterable[int]) -> int:
        """Return by how much `num_available` falls once these pages have another user."""
        return sum(not self._users[page] for page in pages)

    def num_users(self, page: int) -> int:
        """Return how many leases need `page`."""
        return self._users[page]

    def allocate(self, pages: Sequence[int]) -> None:
        """Give frames to new `pages`, which have one user and are about to be written. Raises OutOfFrames."""
        self.check_room(len(pages))
        for page in pages:
            assert self._frame[page] == NOT_RESIDENT and not self._users[page], f"page {page} is not new"
            self._users[page] = 1
            self._place(page)

    def retain(self, pages: Sequence[int]) -> None:
        """Add a user to each of `pages`; those that only the host holds are loaded. Raises OutOfFrames."""
        self.check_room(self.cost(pages))
        # Mark all pages first, so that none of them is evicted to make room for another.
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        for page in pages:
            if self._frame[page] == NOT_RESIDENT:
                self._place(page)
                self._loads[page] = self._frame[page]
                self._stats.loaded += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from each of `pages`; of those without users, the first is evicted first."""
        self.num_releases += 1
        for page in pages:
            assert self._users[page] > 0, f"page {page} has no user"
            self._users[page] -= 1
            if not self._users[page]:
                self._idle[page] = None

    def evict(self, pages: Iterable[int]) -> None:
        """Evict those of `pages` that have no users, at once."""
        for page in pages:
            if page in self._idle:
                # To the front of the queue, where _evict_oldest() takes it.
                self._idle.move_to_end(page, last=False)
                self._free.append(self._evict_oldest())

    def free(self, page: int) -> None:
        """Forget what `page` held: it is free in the allocator."""
        assert not self._users[page], f"page {page} is free, but has users"
        # The number will stand for other tokens, which the host does not hold.
        self._saved[page] = False
        self.num_releases += 1
        if self._frame[page] != NOT_RESIDENT:
            del self._idle[page]
            self._free.append(self._vacate(page))

    def allocate_hot_buffer(self) -> list[int]:
        """Return the frames of a new hot buffer. Raises OutOfFrames."""
        self.check_room(self.frames_per_hot_buffer)
        self._stats.hot += self.frames_per_hot_buffer
        self._stats.spilled += 1
        return [self._take_frame() for _ in range(self.frames_per_hot_buffer)]

    def release_hot_buffer(self, frames: Sequence[int]) -> None:
        """Free the frames of a hot buffer."""
        self.num_releases += 1
        self._stats.hot -= len(frames)
        self._free += frames

    def unsaved(self, pages: Iterable[int]) -> list[Copy]:
        """Return those of `pages` on the device that the host does not hold yet, with their frames."""
        return [(p, self._frame[p]) for p in pages if not self._saved[p] and self._frame[p] != NOT_RESIDENT]

    def mark_saved(self, copies: Sequence[Copy]) -> None:
        """Record that these copies to the host are launched: no frame is written before they end."""
        for page, _ in copies:
            self._saved[page] = True
        self._stats.saved += len(copies)

    def take_moves(self) -> Moves:
        """Return the moves that were not applied yet: the same again, and more, until mark_applied()."""
        return Moves(tuple(self._saves), tuple(self._loads.items()), tuple(self._moved.items()), self._reused)

    def mark_saves_launched(self) -> None:
        """Record that the saves of take_moves() are launched: their frames may be written from now on."""
        self._saves.clear()

    def mark_applied(self) -> None:
        """Record that the device has applied all moves."""
        self._loads.clear()
        self._moved.clear()
        self._reused = False

    def check_integrity(self, needed: Iterable[Sequence[int]], hot: Iterable[Sequence[int]]) -> None:
        """Assert that a recount agrees with the books.

        Args:
            needed: pages that each lease needs on the device.
            hot: frames of each hot buffer.
        """
        counts = [0] * len(self._users)
        for page in (page for pages in needed for page in pages):
            counts[page] += 1
        assert counts == self._users, "users of pages are off"
        resident = {page: frame for page, frame in enumerate(self._frame) if frame != NOT_RESIDENT}
        assert set(self._idle) == {page for page in resident if not counts[page]}, "idle pages are off"
        in_use = [frame for frame, n in zip(self._frame, counts, strict=True) if n]
        assert NOT_RESIDENT not in in_use, "needed, not here"
        buffers = [frame for frames in hot for frame in frames]
        assert len(buffers) == self._stats.hot, f"{len(buffers)} hot frames, in the books {self._stats.hot}"
        # Every frame is exactly one of these: free, a page's, or a hot buffer's.
        frames = sorted([*self._free, *resident.values(), *buffers])
        assert frames == list(range(self.num_frames)), "frames are off"

    def check_room(self, needed: int) -> None:
        """Raise OutOfFrames unless `needed` frames can be allocated."""
        if needed > self.num_available:
            raise OutOfFrames(
                f"{needed} frames are needed, {self.num_available} of {self.num_frames} can be had"
            )

    def _place(self, page: int) -> None:
        self._frame[page] = self._moved[page] = self._take_frame()

    def _take_frame(self) -> int:
        """Return a free frame, or evict a page for one."""
        return self._free.pop() if self._free else self._evict_oldest()

    def _evict_oldest(self) -> int:
        """Evict the page that has been without users for longest and return its frame; the page is saved first."""
        page, _ = self._idle.popitem(last=False)
        if not self._saved[page]:
            # Nothing is copied now: the next step saves this frame before anything writes it.
            self._saves.append((page, self._frame[page]))
            self._saved[page] = True
            self._stats.saved += 1
        self._stats.dropped += 1
        return self._vacate(page)

    def _vacate(self, page: int) -> int:
        frame = self._frame[page]
        self._frame[page] = self._moved[page] = NOT_RESIDENT
        self._loads.pop(page, None)  # a load that was planned and is not needed any more
        self._reused = True
        return frame
