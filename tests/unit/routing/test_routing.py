"""Who serves a request: the decision by facts alone, and the facts from events."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nibble.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, page_hashes, root_hash
from nibble.routing.router import DEFAULT, MAX_PAGES, ReplicaFacts, Router, choose

SIZE = 4
PROMPT = list(range(40))


def stored(tokens: list[int], salt: str = "", namespace: str = "n") -> BlockStored:
    """All full pages of `tokens` as one event."""
    names = list(page_hashes(root_hash(f"{namespace}/{salt}"), [*tokens, 0], SIZE))
    return BlockStored(names, None, tokens[: len(names) * SIZE], SIZE, None, "GPU", None)


def router_of(*keys: str) -> Router[str]:
    router = Router[str]()
    for key in keys:
        router.add(key, "n", SIZE)
    return router


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([{}, {"cached_tokens": 100}], 1),
        ([{"cached_tokens": 100, "queued_tokens": 400}, {}], 1),  # it waits longer than it saves
        ([{"cached_tokens": 300, "queued_tokens": 100}, {}], 0),
        ([{"running": 3}, {"running": 2}], 1),
        ([{"recent_work": 10.0}, {}], 1),  # among equals
        ([{"cached_tokens": 900, "recent_work": 2000.0}, {}], 0),  # too little to leave the pages for
        ([{"cached_tokens": 900, "recent_work": 90_000.0}, {"recent_work": 20_000.0}], 1),
        ([{}, {}, {}], 0),
    ],
)
def test_choices(facts: list[dict[str, float]], expected: int) -> None:
    assert choose([ReplicaFacts(**fact) for fact in facts], 1000) == expected  # type: ignore[arg-type]


def test_a_busier_replica_is_never_preferred_to_an_equal_one() -> None:
    for name in ("queued_tokens", "running", "recent_work"):
        for less, more in pairwise((0, 1, 100, 10_000, 1_000_000)):
            facts = [ReplicaFacts(cached_tokens=64, **{name: amount}) for amount in (more, less)]
            assert choose(facts, 100) == 1, name


def test_the_tree_is_what_events_say() -> None:
    router = router_of("a", "b")
    event = stored(PROMPT)
    router.update("a", [event])
    router.update("nobody", [event])
    assert (
        router.facts([*PROMPT, 1])["a"].cached_tokens == 40
        and router.facts([*PROMPT, 1])["b"].cached_tokens == 0
    )
    assert router.facts(PROMPT)["a"].cached_tokens == 36, "the last token is always computed"
    assert router.facts([9, *PROMPT])["a"].cached_tokens == 0
    assert router.facts([*PROMPT, 1], salt="other")["a"].cached_tokens == 0
    router.update("a", [BlockRemoved(event.block_hashes[7:], "GPU")])
    assert router.facts(PROMPT)["a"].cached_tokens == 28
    router.update("a", [AllBlocksCleared(), stored(PROMPT[:8], "s")])
    assert router.facts(PROMPT)["a"].cached_tokens == 0 and router.facts(PROMPT, "s")["a"].cached_tokens == 8


def test_schemes_and_scales_keep_replicas_apart() -> None:
    router = router_of("a")
    router.add("b", "other scales", SIZE)
    for key in ("a", "b"):
        router.update(key, [stored(PROMPT)])
    assert router.facts(PROMPT)["a"].cached_tokens == 36 and router.facts(PROMPT)["b"].cached_tokens == 0


def test_a_prompt_that_is_on_its_way_counts_as_cached() -> None:
    prompt = [i % 97 for i in range(4000)]
    router = router_of("a", "b")
    first = router.route(prompt)
    second = router.route([*prompt, 5])
    assert second.replica == first.replica and second.cached_tokens == 3996
    # Its prompt is computed, and no event says that anything was kept.
    router.start(first)
    router.start(second)
    router.start(second)
    assert router.facts(prompt)[first.replica].cached_tokens == 0


def test_load_goes_up_and_down() -> None:
    router = router_of("a", "b")
    routes = [router.route([number] * 50, answers=2) for number in range(10)]
    assert sorted(route.replica for route in routes) == ["a"] * 5 + ["b"] * 5
    assert all(fact.running == 10 and fact.queued_tokens == 250 for fact in router.facts([0]).values())
    for route in routes:
        router.start(route)
    assert all(fact.queued_tokens == 0 for fact in router.facts([0]).values())
    for route in routes:
        router.end(route, 20)
        router.end(route)
    facts = router.facts([0])
    assert all(fact.running == 0 for fact in facts.values())
    # 50 prompt tokens and 20 of answers, give or take what was forgotten.
    assert facts["a"].recent_work == pytest.approx(5 * (50 + 20 * DEFAULT.answer), rel=0.1)


def test_a_replica_that_was_started_again_knows_nothing() -> None:
    router = router_of("a", "b")
    router.update("a", [stored(PROMPT)])
    before = router.route(PROMPT, among=["a"])
    router.remove("a")
    assert {router.route(PROMPT).replica for _ in range(5)} == {"b"}
    router.add("a", "n", SIZE)
    assert router.num_pages("a") == 0 and router.facts(PROMPT)["a"] == ReplicaFacts(
        recent_work=router.facts(PROMPT)["b"].recent_work
    )
    # What its past life was given ends without a trace in this one.
    router.end(before, 5)
    assert router.facts(PROMPT)["a"].running == 0 and router.facts(PROMPT)["a"].queued_tokens == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.routing.router.MAX_PAGES", 64)
    router = router_of("a")
    for number in range(100):
        router.update("a", [stored([number] * 40)])
        assert router.num_pages("a") <= 64 < MAX_PAGES
    routes = [router.route([number] * 40) for number in range(100)]
    for route in routes:
        router.end(route)
    assert not router._replicas["a"].expected and not any(route.pages for route in routes)
