"""Residency: which pages lie on the device, and in which frames, while the host tier holds the rest.

With a host tier (host.py) a page of the books (manager.py) is a number whose latents lie in a frame of the device, on
the host, or in both. A page that a lease needs stays in its frame; one that nobody needs keeps it until another page
wants one, and is then dropped: read it from the host, or load it again. What is dropped is saved first, unless it was
saved before. A lease that decodes may give its pages up for a hot buffer, some frames of its own, in which the tokens
that it looks at are kept (hot.py). Owns Residency and Moves, plain numbers. Must not know of torch, requests, or what a
page holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nibble.errors import OutOfFrames

NOWHERE = -1
"""In the place of a frame: the page is not on the device."""
Copy = tuple[int, int]
"""A page, and a frame."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What must happen before the next step, in this order: pages saved from frames that others get, pages loaded into
    frames; and where pages lie then. freed: whether any frame has another page than before."""

    saves: tuple[Copy, ...]
    loads: tuple[Copy, ...]
    places: tuple[Copy, ...]
    freed: bool


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts of frames (free; idle: of pages that nobody needs; hot: of hot buffers), and, over the tier's life, of
    pages: saved to the host, loaded back, and dropped from the device. spilled: leases that got a hot buffer."""

    frames: int
    free: int
    idle: int
    hot: int
    spilled: int
    saved: int
    loaded: int
    dropped: int


class Residency:
    """`pages` pages over `frames` frames. hot: frames of a hot buffer."""

    def __init__(self, pages: int, frames: int, hot: int) -> None:
        assert min(pages, frames, hot) > 0, f"{pages} pages, {frames} frames, {hot} of a hot buffer"
        self.frames, self.hot = frames, hot
        self._frame = [NOWHERE] * pages
        self._needs = [0] * pages
        self._saved = bytearray(pages)
        self._free = list(range(frames - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the first is dropped first
        self._hot_frames = self._spilled = self._saves_made = self._loads_made = self._drops = 0
        self.changes = 0  # goes up whenever frames may have come free
        self._saves: list[Copy] = []
        self._loads: dict[int, int] = {}
        self._moved: dict[int, int] = {}
        self._reused = False

    @property
    def available(self) -> int:
        """Frames that can be had now: free, or of pages that nobody needs."""
        return len(self._free) + len(self._idle)

    @property
    def stats(self) -> TierStats:
        """How things stand."""
        return TierStats(
            self.frames, len(self._free), len(self._idle), self._hot_frames, self._spilled,
            self._saves_made, self._loads_made, self._drops,
        )  # fmt: skip

    def frame(self, page: int) -> int:
        """Where `page` lies, or NOWHERE."""
        return self._frame[page]

    def cost(self, pages: Iterable[int]) -> int:
        """By how much `available` falls once these pages are needed."""
        return sum(not self._needs[page] for page in pages)

    def needs(self, page: int) -> int:
        """How many leases need `page`."""
        return self._needs[page]

    def enter(self, pages: Sequence[int]) -> None:
        """Frames for pages that are new, and needed: they are about to be written."""
        self.check_room(len(pages))
        for page in pages:
            assert self._frame[page] == NOWHERE and not self._needs[page], f"page {page} is not new"
            self._needs[page] = 1
            self._put(page)

    def need(self, pages: Sequence[int]) -> None:
        """One more lease needs `pages`; those that are on the host alone are loaded."""
        self.check_room(self.cost(pages))
        for page in pages:  # first all that are here, lest one is dropped to make room for another
            self._needs[page] += 1
            self._idle.pop(page, None)
        for page in pages:
            if self._frame[page] == NOWHERE:
                self._put(page)
                self._loads[page] = self._frame[page]
                self._loads_made += 1

    def release(self, pages: Iterable[int]) -> None:
        """One lease less needs `pages`; of those that nobody needs then, the first is dropped first."""
        self.changes += 1
        for page in pages:
            assert self._needs[page] > 0, f"nobody needs page {page}"
            self._needs[page] -= 1
            if not self._needs[page]:
                self._idle[page] = None

    def drop(self, pages: Iterable[int]) -> None:
        """Takes those of `pages` that nobody needs off the device, at once."""
        for page in pages:
            if page in self._idle:
                self._idle.move_to_end(page, last=False)
                self._free.append(self._dropped())

    def forget(self, page: int) -> None:
        """`page` is free in the books: what it held is gone."""
        assert not self._needs[page], f"page {page} is free, but needed"
        self._saved[page] = False
        self.changes += 1
        if self._frame[page] != NOWHERE:
            del self._idle[page]
            self._free.append(self._vacate(page))

    def take(self) -> list[int]:
        """The frames of a hot buffer."""
        self.check_room(self.hot)
        self._hot_frames += self.hot
        self._spilled += 1
        return [self._any_frame() for _ in range(self.hot)]

    def give_back(self, frames: Sequence[int]) -> None:
        """Takes the frames of a hot buffer back."""
        self.changes += 1
        self._hot_frames -= len(frames)
        self._free += frames

    def to_save(self, pages: Iterable[int]) -> list[Copy]:
        """Those of `pages` that the host does not hold yet."""
        return [(p, self._frame[p]) for p in pages if not self._saved[p] and self._frame[p] != NOWHERE]

    def saved(self, copies: Sequence[Copy]) -> None:
        """These copies to the host are under way: no frame is written before they are done."""
        for page, _ in copies:
            self._saved[page] = True
        self._saves_made += len(copies)

    def take_moves(self) -> Moves:
        """What the device has not been told yet: the same again, and more, until it is done()."""
        return Moves(tuple(self._saves), tuple(self._loads.items()), tuple(self._moved.items()), self._reused)

    def saves_done(self) -> None:
        """What the news said of saves is under way: frames may be written from now on, and must not be saved again."""
        self._saves.clear()

    def done(self) -> None:
        """The device has been told all news."""
        self._loads.clear()
        self._moved.clear()
        self._reused = False

    def check(self, needed: Iterable[Sequence[int]], hot: Iterable[Sequence[int]]) -> None:
        """Asserts that the books say what a recount finds: pages that each lease needs, frames of hot buffers."""
        counts = [0] * len(self._needs)
        for page in (page for pages in needed for page in pages):
            counts[page] += 1
        assert counts == self._needs, "needs of pages are off"
        resident = {page: frame for page, frame in enumerate(self._frame) if frame != NOWHERE}
        assert set(self._idle) == {page for page in resident if not counts[page]}, "idle pages are off"
        assert all(frame != NOWHERE for frame, n in zip(self._frame, counts, strict=True) if n), (
            "needed, not here"
        )
        buffers = [frame for frames in hot for frame in frames]
        assert len(buffers) == self._hot_frames, f"{len(buffers)} hot frames, in the books {self._hot_frames}"
        assert sorted([*self._free, *resident.values(), *buffers]) == list(range(self.frames)), (
            "frames are off"
        )

    def check_room(self, needed: int) -> None:
        """Raises OutOfFrames where fewer frames can be had."""
        if needed > self.available:
            raise OutOfFrames(f"{needed} frames are needed, {self.available} of {self.frames} can be had")

    def _put(self, page: int) -> None:
        self._frame[page] = self._moved[page] = self._any_frame()

    def _any_frame(self) -> int:
        """A free frame, or that of a page that nobody needs."""
        return self._free.pop() if self._free else self._dropped()

    def _dropped(self) -> int:
        """The frame of the page that nobody has needed for longest, which is saved first."""
        page, _ = self._idle.popitem(last=False)
        if not self._saved[page]:
            self._saves.append((page, self._frame[page]))
            self._saved[page] = True
            self._saves_made += 1
        self._drops += 1
        return self._vacate(page)

    def _vacate(self, page: int) -> int:
        frame = self._frame[page]
        self._frame[page] = self._moved[page] = NOWHERE
        self._loads.pop(page, None)  # it was to be loaded, and is not wanted any more
        self._reused = True
        return frame
