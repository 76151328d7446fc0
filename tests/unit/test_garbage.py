"""Garbage collection is paused while many objects are made that stay, and afterwards as it was before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nibble
from nibble.garbage import freeze_gc, pause_gc


@pytest.fixture(autouse=True)
def collected() -> Iterator[list[int]]:
    """The generations that are collected in a test."""
    generations = list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.unfreeze()  # what conftest.py has frozen
    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)
    gc.enable()
    gc.unfreeze()


def make_many() -> list[list[int]]:
    return [[] for _ in range(10 * gc.get_threshold()[0])]


def test_nothing_is_collected_meanwhile_nor_at_once(collected: list[int]) -> None:
    make_many()
    assert collected, "without a pause"
    collected.clear()
    with pause_gc():
        kept = make_many()
    assert not collected and kept
    # The young are old now: the next collection of the youngest finds those that are made after it alone.
    assert gc.get_count()[0] < len(kept)
    assert len(gc.get_objects(generation=0)) < len(kept)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(RuntimeError), pause_gc():
        with pause_gc():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer pause goes on"
        raise RuntimeError
    assert gc.isenabled() is enabled


def test_what_the_host_has_frozen_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with pause_gc():
        pass
    # Some of them may have ended meanwhile; unfreeze() would leave none.
    assert gc.get_freeze_count() > count / 2 > 0


def test_what_serves_is_not_walked_through() -> None:
    kept = make_many()
    freeze_gc()
    made = [kept]
    assert len(gc.get_objects()) < len(kept) < gc.get_freeze_count()
    assert any(one is made for one in gc.get_objects()), "newer objects are collected as ever"


def test_public_names_are_imported_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home_of_llm.py").write_text("import gc\nLLM = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(nibble._HOME, "LLM", "home_of_llm")
    freezes = list[None]()
    monkeypatch.setattr(gc, "freeze", lambda: freezes.append(None))
    try:
        assert nibble.__getattr__("LLM") is False and gc.isenabled()
        assert nibble.__getattr__("LLM") is False and len(freezes) == 1, (
            "what is imported already makes nothing"
        )
    finally:
        sys.modules.pop("home_of_llm", None)
