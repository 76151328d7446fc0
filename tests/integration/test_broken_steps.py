"""Steps that break off midway, by an error or an interrupt: they harm no other request, and none that comes later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from divided import tokens
from nibble import LLM, SamplingParams
from nibble.cache.manager import CacheManager
from nibble.cache.state_pool import StatePool
from nibble.engine.model_runner import ModelRunner
from nibble.engine.page_tables import PageTables
from nibble.engine.request import Delta
from nibble.engine.sampler import Sampler
from nibble.engine.scheduler import Scheduler
from tiny import QWEN3_NEXT, save_tiny

ANSWER = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0)
LONG = tokens(150, seed=1, vocabulary=300)
PROMPTS = [LONG, LONG[:128], LONG[:70] + LONG[90:130], LONG[100:130]]
"""Some begin alike, so that states are copied from snapshots."""
PLACES = {
    "tables": (PageTables, "apply_updates"),
    "states": (StatePool, "copy"),
    "computed": (ModelRunner, "_step"),
    "sampled": (Sampler, "launch"),
    "stored": (ModelRunner, "store_sampled"),
}
BOOKS = {"added": (Scheduler, "add_tokens"), "booked": (CacheManager, "commit")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "dense": save_tiny(tmp_path_factory.mktemp("dense")),
        "hybrid": save_tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_next", **QWEN3_NEXT),
    }


@contextmanager
def engine(path: Path, *, overlap: bool = False) -> Iterator[LLM]:
    options: dict[str, Any] = {"kv_scales": "one", "kv_window": 16}
    with LLM(str(path), kv_memory="16MiB", max_context=256, token_budget=80, **options) as llm:
        llm.engine.overlap = overlap
        yield llm


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[tuple[int, ...]]]:
    found = {}
    for name, path in models.items():
        with engine(path) as llm:
            found[name] = [answer(llm, prompt) for prompt in PROMPTS]
    return found


def answer(llm: LLM, prompt: list[int]) -> tuple[int, ...]:
    return llm.generate(prompt, ANSWER).completions[0].token_ids


def breaking(
    inner: Callable[..., Any], nth: int, error: type[BaseException], *, after: bool
) -> tuple[Callable[..., Any], list[int]]:
    """A function that raises in its nth call, before or after what it does; and its count of calls.

    A call to copy nothing is none.
    """
    count = [0]

    def planted(*args: Any, **kwargs: Any) -> Any:
        count[0] += args[-1] != []
        is_next = count[0] == nth
        if is_next:
            count[0] += 1
        if is_next and not after:
            raise error("planted")
        result = inner(*args, **kwargs)
        if is_next:
            raise error("planted")
        return result

    return planted, count


@pytest.mark.slow
@pytest.mark.sample(24)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("name", "place", "overlap"),
    [
        (name, place, overlap)
        for name in ("dense", "hybrid")
        for place in PLACES
        for overlap in (False, True)
        # A dense model has no states, and without overlap the host stores what was sampled.
        if (name, place) != ("dense", "states") and (overlap or place != "stored")
    ],
)
def test_a_step_that_breaks_off_harms_no_other(
    name: str, place: str, overlap: bool, after: bool, error: type[BaseException],
    models: dict[str, Path], expected: dict[str, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    owner, method = PLACES[place]
    for nth in (1, 4):
        with engine(models[name], overlap=overlap) as llm:
            answer(llm, PROMPTS[0])
            found: list[list[int]] = [[] for _ in PROMPTS]
            failed: set[int] = set()

            def take(number: int, piece: Delta, found: Any = found, failed: Any = failed) -> None:
                found[number] += piece.token_ids
                if piece.error:
                    failed.add(number)

            planted, count = breaking(getattr(owner, method), nth, error, after=after)
            with monkeypatch.context() as patch:
                patch.setattr(owner, method, planted)
                for number, prompt in enumerate(PROMPTS):
                    llm.engine.submit(prompt, ANSWER, partial(take, number))
                while llm.engine.busy:
                    with suppress(KeyboardInterrupt):
                        llm.engine.step()
            assert count[0] > nth or (place == "states" and nth > 1), "nothing was planted"
            llm.engine.scheduler.check_integrity()
            for number, answered in enumerate(found):
                assert number in failed or tuple(answered) == expected[name][number], (nth, number)
            if count[0] > nth:
                goes_on = error is KeyboardInterrupt and name == "dense" and place != "stored"
                assert bool(failed) is not goes_on
            # Also those that go on from what the broken step may have left.
            assert [answer(llm, prompt) for prompt in PROMPTS] == expected[name], (nth, "later ones are hurt")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", BOOKS)
def test_books_that_break_off_end_their_requests(
    place: str, overlap: bool, after: bool, models: dict[str, Path],
    expected: dict[str, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where nobody knows what was written down of a step, its requests end, and all later ones are served."""
    owner, method = BOOKS[place]
    with engine(models["dense"], overlap=overlap) as llm:
        pieces = list[Delta]()
        planted, _ = breaking(getattr(owner, method), 4, KeyboardInterrupt, after=after)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, planted)
            llm.engine.submit(PROMPTS[0], ANSWER, pieces.append)
            with pytest.raises(KeyboardInterrupt):
                while llm.engine.busy:
                    llm.engine.step()
        while llm.engine.busy:
            llm.engine.step()
        assert pieces[-1].error and "KeyboardInterrupt" in pieces[-1].error
        llm.engine.scheduler.check_integrity()
        assert [answer(llm, prompt) for prompt in PROMPTS] == expected["dense"]
