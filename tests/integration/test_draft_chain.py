"""Recorded steps of heads, on a CPU: a tape in place of CUDA graphs repeats them over the same memory.

All drafts of a request are computed before the first is read. They must be those of drafts that go step by step, and
what the published descriptions say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_heads import FORMATS, Said, drafters, engine, error, head_of, overheard
from test_speculative import DRAWN, GREEDY, PROMPTS, answers, same
from test_verify_graphs import recorded
from torch import Tensor

from heads import Reference, eagle3_reference, mtp_reference, save_eagle3, save_mtp
from nibble import LLM, SamplingParams
from nibble.attention.planner.plan import graph_sizes
from nibble.attention.planner.verify_memory import verify_sizes
from nibble.engine import draft_steps
from nibble.engine.draft_head import DraftHead
from nibble.engine.draft_steps import DraftGraphs, WaitingStates
from nibble.engine.draft_tracks import HeadRows
from nibble.engine.graphs import live
from nibble.engine.page_tables import PageTables
from planning import PLAIN
from tape import record
from toys import graph_backend

pytestmark = pytest.mark.usefixtures("untimed", "recordable")

KINDS = ("glm4_moe", "qwen3_next", "mimo")
REQUESTS, ROOM = 6, 32
MANY = [*PROMPTS, PROMPTS[0][:40] + PROMPTS[2], PROMPTS[2][:9]]
Proposals = list[tuple[tuple[int, ...], list[int]]]


@pytest.fixture(scope="module")
def eagles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_eagle3(tmp_path_factory.mktemp(name), name) for name in FORMATS}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_mtp(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def named(own: dict[str, Path], target: Path, eagles: dict[str, Path]) -> dict[str, tuple[Path, str, Any]]:
    """Of each head its model, how it is asked for, and what it should say."""
    return {
        name: (*facts, lambda name=name: reference_of(name, own, target, eagles))
        for name, facts in drafters(own, target, eagles).items()
    }


def reference_of(name: str, own: dict[str, Path], target: Path, eagles: dict[str, Path]) -> Reference:
    return eagle3_reference(target, eagles[name], name) if name in eagles else mtp_reference(own[name], name)


def served(model: Path, drafter: str, how: Any = None, *, drafts: int = 3, **options: Any) -> LLM:
    """An engine whose head drafts by recorded steps, or step by step where `how` is None."""
    llm = engine(
        model, speculative=f"{drafter},kv_format=fp32", speculative_tokens=str(drafts),
        **{**PLAIN, "kv_format": "fp32", "max_running": REQUESTS, "token_budget": 48, **options},
    )  # fmt: skip
    if how:
        runner = head_of(llm).runner
        graph_backend.make_recordable(runner.pool)
        forward: Any = runner.run
        sizes = graph_sizes(REQUESTS), runner.device, how, verify_sizes(REQUESTS, 1 + drafts, ROOM)
        forward.record(runner, DraftGraphs(*sizes, forward))
    return llm


@contextmanager
def replays(llm: LLM) -> Iterator[list[Any]]:
    graphs, sizes = head_of(llm).graphs, list[Any]()
    assert graphs
    replay = graphs.replay
    graphs.replay = lambda size: (sizes.append(size), replay(size))  # type: ignore[assignment, func-returns-value]
    yield sizes
    del graphs.replay


@contextmanager
def proposals() -> Iterator[Proposals]:
    """What a head proposes behind which tokens."""
    noted, propose = Proposals(), DraftHead.propose

    def note(self: DraftHead, tasks: Sequence[Any]) -> list[list[int]]:
        proposed = propose(self, tasks)
        noted.extend(
            (tuple(task.request.token_ids), drafts) for task, drafts in zip(tasks, proposed, strict=True)
        )
        return proposed

    DraftHead.propose = note  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        DraftHead.propose = propose  # type: ignore[method-assign]


@contextmanager
def stored(llm: LLM) -> Iterator[list[list[int]]]:
    """Note the rows of each request in steps of a head that nobody reads."""
    head, steps = head_of(llm), list[list[int]]()
    run = head._run

    def note(rows: Sequence[HeadRows]) -> Any:
        if not any(one.samples for one in rows):
            steps.append([one.count for one in rows])
        return run(rows)

    head._run = note  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        head._run = run  # type: ignore[method-assign]


def told(
    llm: LLM, prompts: Sequence[list[int]], how: Any, model: Path, drafter: str
) -> tuple[Said, list[Any]]:
    """What a head says in recorded steps where answers are known, so that any part of a draft counts."""
    expected = answers(llm, prompts, **GREEDY)
    known = {tuple(prompt): one.token_ids for prompt, one in zip(prompts, expected, strict=True)}
    chained = served(model, drafter, how)
    with overheard(known) as said, replays(chained) as sizes:
        for _ in range(2):
            same(answers(chained, prompts, **GREEDY), expected, 1e-4)
        answers(chained, [prompts[0] + list(expected[0].token_ids)[:20]], **{**GREEDY, "max_tokens": 2})
    head = head_of(chained)
    head.manager.check_integrity()
    assert head.manager.stats.hit_tokens > 64
    counts = chained.engine.speculation.counts  # type: ignore[union-attr]
    assert 0.1 * counts.drafted < counts.accepted < counts.drafted
    return said, sizes


@pytest.mark.parametrize(
    ("name", "how"),
    # A tape does not hold what experts do on a CPU.
    [
        ("raw", record),
        *(pytest.param(name, record, marks=pytest.mark.slow) for name in (*FORMATS[1:], "mimo")),
        *(pytest.param(name, live, marks=pytest.mark.slow) for name in ("raw", *KINDS[:2])),
    ],
)
def test_chains_say_what_they_should(name: str, how: Any, named: dict[str, Any]) -> None:
    model, drafter, reference = named[name]
    said, sizes = told(engine(model, **PLAIN, kv_format="fp32"), MANY, how, model, drafter)
    assert {len(drafts) for _, drafts, _ in said} == {0, 1, 2}
    # Of one request and of several, padded to more; few new rows of each and many.
    assert {2, 4, 8} <= set(sizes) and {(4, 4), (8, 4)} <= set(sizes)
    limit = 1e-3 if name == "qwen3_next" else 1e-4
    assert error([*said[:6], *said[20:400:37], *said[-3:]], reference()) < limit


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [GREEDY, DRAWN, {**DRAWN, "top_k": 20, "n": 2, "min_tokens": 9}],
    ids=["greedy", "drawn", "filtered"],
)
@pytest.mark.parametrize("name", ["raw", "mimo"])
def test_chains_propose_what_steps_do(name: str, params: dict[str, Any], named: dict[str, Any]) -> None:
    model, drafter, _ = named[name]
    found = []
    for how in (None, record):
        llm = served(model, drafter, how)
        with proposals() as noted:
            # The second time prefixes are found.
            for _ in range(2):
                completions = answers(llm, MANY, **{**params, "max_tokens": 20})
        found.append((sorted(noted), [one.token_ids for one in completions]))
    assert found[0] == found[1]
    assert sum(len(drafts) for _, drafts in found[0][0]) > 100


@pytest.mark.slow
def test_what_needs_tokens_goes_step_by_step(named: dict[str, Any]) -> None:
    model, drafter, _ = named["raw"]
    plain, llm = engine(model, **PLAIN, kv_format="fp32"), served(model, drafter, record)
    for params in ({"repetition_penalty": 1.3}, {"grammar": "regex:[0-9]{12,20}"}, {"presence_penalty": 0.5}):
        with replays(llm) as sizes:
            same(answers(llm, PROMPTS, **GREEDY, **params), answers(plain, PROMPTS, **GREEDY, **params), 1e-4)
        assert not any(isinstance(size, int) for size in sizes)
    head_of(llm).manager.check_integrity()


def test_rows_are_stored_while_nobody_drafts(named: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of many steps wait for a recorded step, and drafts go on from there."""
    model, drafter, reference = named["raw"]
    llm = served(model, drafter, record)
    speculation = llm.engine.speculation
    assert speculation
    propose, count = speculation.propose, [0]

    def seldom(*arguments: Any) -> Any:
        count[0] += 1
        return propose(*arguments) if count[0] % 11 == 0 else {}

    monkeypatch.setattr(speculation, "propose", seldom)
    with overheard() as said, replays(llm) as sizes:
        answers(llm, PROMPTS[:3], **{**GREEDY, "max_tokens": 70})
    firsts = [size for size in sizes if isinstance(size, tuple)]
    assert len(firsts) > count[0] // 4, "rows are stored by recorded steps"
    assert {len(drafts) for _, drafts, _ in said} == {0, 1, 2}
    assert error(said[:30:4], reference()) < 1e-4


def test_rows_of_many_requests_are_stored_several_at_a_time(
    named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody drafts, where no recorded step has room for as many rows of each: all of them together."""
    model, drafter, reference = named["raw"]
    llm = served(model, drafter, record, drafts=7)
    graphs, speculation = head_of(llm).graphs, llm.engine.speculation
    assert graphs and speculation and graphs.length(len(MANY)) < graphs.longest
    propose, count, before = speculation.propose, [0], list[list[int]]()
    with overheard() as said, stored(llm) as rows:

        def late(*arguments: Any) -> Any:
            count[0] += 1
            if count[0] == 10:
                rows.clear()  # of the prompts
            before.extend(rows if count[0] == 50 else [])
            return propose(*arguments) if count[0] >= 50 else {}

        monkeypatch.setattr(speculation, "propose", late)
        answers(llm, MANY, **{**GREEDY, "max_tokens": 60})
    assert {count for step in before for count in step} <= set(range(graphs.longest // 2, graphs.longest + 1))
    assert 0 < len(before) < 40 * len(MANY) / graphs.longest and len(MANY) in map(len, before)
    assert error(said[:30:4], reference()) < 1e-4


@pytest.mark.slow
def test_too_few_pages_and_short_contexts(named: dict[str, Any]) -> None:
    model, drafter, _ = named["raw"]
    expected = answers(engine(model, **PLAIN, kv_format="fp32"), PROMPTS, **GREEDY)
    for free in (0, 3):
        llm = served(model, drafter, record)
        allocator = head_of(llm).manager._allocator
        allocator.allocate(allocator.num_free - free)
        same(answers(llm, PROMPTS, **GREEDY), expected, 1e-4)
    llm = served(model, drafter, record)
    head = head_of(llm)
    head.max_context = 90
    with proposals() as noted:
        same(answers(llm, PROMPTS, **GREEDY), expected, 1e-4)
    assert max(len(tokens) + len(drafts) for tokens, drafts in noted if drafts) <= 90
    assert any(len(tokens) > 90 for tokens, _ in noted)
    head.manager.check_integrity()


def _wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row reads the hidden state that waits before its own."""
    at = WaitingStates.at
    monkeypatch.setattr(WaitingStates, "at", lambda self, slots, positions: at(self, slots, positions - 1))


def _wrong_request(monkeypatch: pytest.MonkeyPatch) -> None:
    at = WaitingStates.at
    monkeypatch.setattr(
        WaitingStates, "at", lambda self, slots, positions: at(self, slots.roll(1), positions)
    )


def _same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft reads the hidden state of the first one again."""
    store = DraftGraphs.store_logits

    def keep(self: DraftGraphs, logits: Tensor, states: Tensor) -> None:
        before = None if self.states is None or self.first else self.states[: len(states)].clone()  # type: ignore[attr-defined]
        store(self, logits, states if before is None else before)

    def first(self: DraftGraphs, *arguments: Any) -> None:
        self.first = True  # type: ignore[attr-defined]
        begin(self, *arguments)
        self.first = False  # type: ignore[attr-defined]

    begin = DraftGraphs.begin
    monkeypatch.setattr(DraftGraphs, "begin", first)
    monkeypatch.setattr(DraftGraphs, "store_logits", keep)


def _next_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of drafts lie one position too far."""
    begin = DraftGraphs.begin

    def further(self: DraftGraphs, *arguments: Any) -> None:
        begin(self, *arguments)
        self.inputs[1] += self.inputs[1] >= 0

    monkeypatch.setattr(DraftGraphs, "begin", further)


def _standing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts have the same position."""
    follow = DraftGraphs.follow

    def stay(self: DraftGraphs, runner: Any, size: int, graphs: Any) -> None:
        before = self.inputs[1].clone()
        follow(self, runner, size, graphs)
        self.inputs[1].copy_(before)

    monkeypatch.setattr(DraftGraphs, "follow", stay)


def _earlier_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row before the last one is drawn from."""
    rows = DraftGraphs.logit_rows
    monkeypatch.setattr(DraftGraphs, "logit_rows", lambda self, *arguments: rows(self, *arguments) - 1)


PLANTED = [_wrong_row, _wrong_request, _same_state, _next_position, _standing, _earlier_logits]


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("name", ["raw", "mimo"])
def test_planted_errors_are_noticed(
    name: str, plant: Any, named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafter, reference = named[name]
    plant(monkeypatch)
    llm = served(model, drafter, record)
    with overheard() as said:
        answers(llm, PROMPTS[:3], **{**GREEDY, "max_tokens": 12})
    assert error(said[:24], reference()) > 1e-3


def test_a_token_that_is_not_mapped_is_noticed(
    named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafter, _ = named["raw"]
    found = []
    for how in (None, record):
        if how:
            draw = draft_steps.topk.draw_likeliest

            def unmapped(x_SV: Tensor, _: Tensor, *drawn: Tensor, draw: Any = draw) -> None:
                draw(x_SV, None, *drawn)

            monkeypatch.setattr(draft_steps.topk, "draw_likeliest", unmapped)
        with proposals() as noted:
            answers(served(model, drafter, how), PROMPTS[:2], **{**GREEDY, "max_tokens": 8})
        found.append(sorted(noted))
    assert found[0] != found[1]


def late(llm: LLM, how: Any = None, tokens: int = 4) -> LLM:
    """Its steps verify drafts before the host has read them, as on a GPU; recorded ones, too."""
    head_of(llm).tables = llm.engine.runner.tables
    if how:
        graph_backend.make_recordable(llm.engine.runner.pool)
        recorded(llm, how, tokens)
    return llm


Answered = dict[str, tuple[list[Any], dict[tuple[int, ...], Any]]]
KINDS_OF_ANSWERS = {"greedy": GREEDY, "drawn": DRAWN}


@pytest.fixture(scope="module")
def answered(target: Path) -> Answered:
    """What is answered without drafts, and that by prompt, so that a head can be told."""
    plain = engine(target, **PLAIN, kv_format="fp32")
    every = {name: answers(plain, MANY, **params) for name, params in KINDS_OF_ANSWERS.items()}
    return {
        name: (expected, {tuple(prompt): one.token_ids for prompt, one in zip(MANY, expected, strict=True)})
        for name, expected in every.items()
    }


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS_OF_ANSWERS)
@pytest.mark.parametrize("how", [None, record, live], ids=["eager", "recorded", "live"])
def test_drafts_are_verified_before_they_are_read(
    how: Any, kind: str, named: dict[str, Any], answered: Answered
) -> None:
    model, drafter, _ = named["raw"]
    params, (expected, known) = KINDS_OF_ANSWERS[kind], answered[kind]
    llm = late(served(model, drafter, record), how)
    with overheard(known) as said, proposals() as noted:
        for _ in range(2):
            same(answers(llm, MANY, **params), expected, 1e-4)
    # Where the model's steps are recorded, too, most are launched before the last one is read.
    assert (said.num_ahead > 50) == (how is not None)
    assert all(max(drafts) < 0 for _, drafts in noted if drafts) and len(noted) + said.num_ahead > 50
    counts = llm.engine.speculation.counts  # type: ignore[union-attr]
    assert 0.1 * counts.drafted < counts.accepted < counts.drafted
    head_of(llm).manager.check_integrity()


@pytest.mark.slow
def test_as_many_drafts_count_whoever_reads_them_first(named: dict[str, Any], answered: Answered) -> None:
    model, drafter, _ = named["raw"]
    _, known = answered["greedy"]
    found = []
    for llm in (served(model, drafter, record), late(served(model, drafter, record))):
        with overheard(known):
            answers(llm, MANY, **GREEDY)
        head, speculation = head_of(llm), llm.engine.speculation
        assert speculation
        found.append((speculation.counts, (head.trust, head._share)))
    assert found[0][0] == found[1][0]
    # Of those that the host knows first some are left out behind the last that can be of use.
    assert found[0][1] == pytest.approx(found[1][1], rel=0.05)


def test_an_answer_ends_within_drafts_that_were_not_read(named: dict[str, Any], answered: Answered) -> None:
    model, drafter, _ = named["raw"]
    expected, known = answered["greedy"]
    stop = {"stop_token_ids": [one.token_ids[9] for one in expected], "ignore_eos": True}
    short = answers(engine(model, **PLAIN, kv_format="fp32"), MANY, **GREEDY, **stop)
    assert any(len(one.token_ids) < len(other.token_ids) for one, other in zip(short, expected, strict=True))
    with overheard(known):
        same(answers(late(served(model, drafter, record)), MANY, **GREEDY, **stop), short, 1e-4)


@pytest.mark.slow
def test_requests_that_need_tokens_beside_others(named: dict[str, Any]) -> None:
    """Some drafts of a step are read, others are not."""
    model, drafter, _ = named["raw"]
    params = [SamplingParams(**GREEDY, repetition_penalty=1.0 + 0.3 * (n % 2)) for n in range(len(MANY))]
    plain, llm = engine(model, **PLAIN, kv_format="fp32"), late(served(model, drafter, record))
    expected = [output.completions[0] for output in plain.generate(MANY, params)]
    with proposals() as noted:
        same([output.completions[0] for output in llm.generate(MANY, params)], expected, 1e-4)
    assert {max(drafts) < 0 for _, drafts in noted if drafts} == {True, False}


@pytest.mark.slow
def test_an_abort_while_drafts_are_verified(
    named: dict[str, Any], answered: Answered, caplog: pytest.LogCaptureFixture
) -> None:
    model, drafter, _ = named["raw"]
    expected, known = answered["greedy"]
    llm = late(served(model, drafter, record), record)
    made, pieces = llm.engine, [list[int]() for _ in MANY]
    with overheard(known):
        tickets = [
            made.submit(prompt, SamplingParams(**GREEDY), lambda piece, own=own: own.extend(piece.token_ids))
            for prompt, own in zip(MANY, pieces, strict=True)
        ]
        while not (made._in_flight and made._in_flight[-1].has_drafts and pieces[0]):
            made.step()
        made.abort([ticket[0] for ticket in tickets[::3]])
        while made.busy:
            made.step()
    assert not [record for record in caplog.records if record.name == "nibble.drafts"]
    for number, (own, one) in enumerate(zip(pieces, expected, strict=True)):
        assert own == list(one.token_ids) or (number % 3 == 0 and own == list(one.token_ids)[: len(own)])
    head_of(llm).manager.check_integrity()


def _other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the drafts of the request beside."""
    unread = PageTables.unread
    monkeypatch.setattr(PageTables, "unread", lambda self, place, column: unread(self, place, column ^ 1))


def _other_place(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = PageTables.unread
    monkeypatch.setattr(PageTables, "unread", lambda self, place, column: unread(self, place ^ 1, column))


def _nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drawn goes to the host alone."""
    keep = DraftGraphs.keep
    monkeypatch.setattr(DraftGraphs, "keep", lambda self, buffer, step, drafts: keep(self, buffer, step))


@pytest.mark.slow
@pytest.mark.parametrize("plant", [_other_request, _other_place, _nothing_new])
def test_other_drafts_than_the_host_reads_are_noticed(
    plant: Any, named: dict[str, Any], answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafter, _ = named["raw"]
    expected, known = answered["greedy"]
    plant(monkeypatch)
    llm = late(served(model, drafter, record))
    with overheard(known), pytest.raises(AssertionError):
        same(answers(llm, MANY, **GREEDY), expected, 1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")  # of products that are packed, on a CPU alone
def test_heads_compile(named: dict[str, Any]) -> None:
    """As on a GPU, where the graph that is traced serves steps of all sizes."""
    from torch._dynamo.utils import counters

    from nibble.models.forward import compiled

    for name in ("raw", "mimo"):
        torch._dynamo.reset()
        counters.clear()
        model, drafter, reference = named[name]
        llm = served(model, drafter)
        forward: Any = head_of(llm).runner.run
        forward._run = compiled(forward.head, "aot_eager")
        with overheard() as said:
            answers(llm, PROMPTS[:3], **{**GREEDY, "max_tokens": 6})
        assert len(said) > 12 and error(said[:12], reference()) < 1e-4
        assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)
