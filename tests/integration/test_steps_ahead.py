"""Steps with drafts of a head that are launched before the step in front of them is read, on a CPU.

The device knows which drafts count and how far each request has come; the host takes the most that it may be. Answers
must be those without drafts, and a head must be told what it is told where the host knows all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_broken_steps import breaking
from test_draft_chain import MANY as PROMPTS
from test_draft_chain import late, served
from test_heads import engine, error, head_of, overheard
from test_speculative import DRAWN as LONG_DRAWN
from test_speculative import GREEDY as LONG
from test_speculative import answers, same

from heads import eagle3_reference, save_eagle3
from nibble import LLM, SamplingParams
from nibble.engine import engine as loop
from nibble.engine import in_flight
from nibble.engine.draft_head import DraftHead
from nibble.engine.draft_policy import DraftPolicy
from nibble.engine.draft_steps import DraftGraphs, WaitingStates
from nibble.engine.graphs import live
from nibble.engine.page_tables import PageTables
from nibble.engine.request import Delta, ScheduledRequest
from nibble.engine.sampler import Sampler
from nibble.engine.step_tokens import VerifyInputs
from nibble.errors import NibbleError
from nibble.kernels.step_inputs import naive
from nibble.kernels.transfer import HostInputs
from planning import PLAIN

pytestmark = pytest.mark.usefixtures("untimed", "recordable")

MANY = PROMPTS[:4]
GREEDY, DRAWN = ({**params, "max_tokens": 24} for params in (LONG, LONG_DRAWN))
Known = dict[tuple[int, ...], Any]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eagle3(tmp_path_factory.mktemp("head"), "raw")


@pytest.fixture
def plain(target: Path) -> Callable[..., LLM]:
    """Makes an engine that drafts nothing."""
    return lambda **options: engine(target, **{**PLAIN, "kv_format": "fp32", **options})


@pytest.fixture
def ahead(target: Path, head: Path) -> Callable[..., LLM]:
    """Makes one whose steps run ahead."""

    def make(drafts: int = 3, **options: Any) -> LLM:
        # A small pool: what stands in for the append of a GPU writes all of it.
        options = {"kv_memory": "4MiB", **options}
        return late(served(target, f"eagle3:{head}", live, drafts=drafts, **options), live, 1 + drafts)

    return make


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many requests steps have that are launched before the last is read."""
    counts, follow = list[int](), loop.follow_unread

    def count(*arguments: Any) -> Any:
        batch = follow(*arguments)
        counts.append(len(batch.scheduled))
        return batch

    loop.follow_unread = count
    try:
        yield counts
    finally:
        loop.follow_unread = follow


def known(prompts: Sequence[Sequence[int]], expected: Sequence[Any]) -> Known:
    return {tuple(prompt): one.token_ids for prompt, one in zip(prompts, expected, strict=True)}


def test_a_head_is_told_the_same(target: Path, head: Path, plain: Any, ahead: Any) -> None:
    """What it says behind tokens that only the device knew is what the published description says."""
    expected = answers(plain(), MANY[:3], **GREEDY)
    llm = ahead()
    with overheard(known(MANY[:3], expected)) as said:
        same(answers(llm, MANY[:3], **GREEDY), expected, 1e-4)
    assert said.num_ahead > 10
    assert error(said[-40:], eagle3_reference(target, head, "raw")) < 1e-4
    counts = llm.engine.speculation.counts
    assert 0.1 * counts.drafted < counts.accepted < counts.drafted


def test_the_device_knows_what_the_host_reads(
    plain: Any, ahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far each request has come, and by which tokens."""
    expected = answers(plain(), MANY, **GREEDY)
    llm, settle, starts = ahead(), ScheduledRequest.settle, list[int]()
    tables = llm.engine.runner.tables

    def check(self: ScheduledRequest, start: int) -> None:
        settle(self, start)
        row, request = tables.row_of(self.request.lease), self.request
        # By now the device has computed this step, too, and knows what that brings.
        assert start == tables.verified.stored_R[row] - tables.verified.counts_R[row]
        assert start == len(request.token_ids) - 1
        starts.append(start)

    monkeypatch.setattr(ScheduledRequest, "settle", check)
    with overheard(known(MANY, expected)):
        same(answers(llm, MANY, **GREEDY), expected, 1e-4)
    assert len(starts) > 20


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kv_format": "nvfp4"}, {"kv_format": "fp8", "drafts": 7}])
def test_caches_of_few_bits(options: dict[str, Any], plain: Any, ahead: Any) -> None:
    expected = answers(plain(kv_format=options["kv_format"]), MANY, **LONG)
    with overheard(known(MANY, expected)), counted() as counts:
        same(answers(ahead(**options), MANY, **LONG), expected, 1e-4)
    assert len(counts) > 2


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_requests_come_and_go(params: dict[str, Any], plain: Any, ahead: Any) -> None:
    """With fewer places than requests, which end at different times: by length, by a token, by a string, by min_tokens."""
    lengths = [SamplingParams(**{**params, "max_tokens": 9 + 8 * n}) for n in range(len(MANY))]
    answered = [out.completions[0] for out in plain().generate(MANY, lengths)]
    stops = [list(one.token_ids)[len(one.token_ids) // 2 :][:1] for one in answered]
    ends = [
        SamplingParams(
            **{**params, "max_tokens": 9 + 8 * n}, stop_token_ids=stops[n] if n % 2 else [], ignore_eos=True,
            min_tokens=4 * (n % 3),
        )
        for n in range(len(MANY))
    ]  # fmt: skip
    expected = [out.completions[0] for out in plain().generate(MANY, ends)]
    assert {one.finish_reason for one in expected} == {"stop", "length"}
    llm = ahead(max_running=3)
    with overheard(known(MANY, answered)), counted() as counts:
        for _ in range(2):
            same([out.completions[0] for out in llm.generate(MANY, ends)], expected, 1e-4)
    assert len(counts) > 3
    head_of(llm).manager.check_integrity()


def test_an_end_does_not_stop_the_others(plain: Any, ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody knew of, by a token or an abort: the next step runs ahead as well."""
    expected = answers(plain(), MANY, **LONG)
    params = [
        SamplingParams(
            **LONG, stop_token_ids=list(one.token_ids[12:13]) if n in {1, 2} else [], ignore_eos=True
        )
        for n, one in enumerate(expected)
    ]
    shorter = [out.completions[0] for out in plain().generate(MANY, params)]
    assert {len(one.token_ids) for one in shorter} > {LONG["max_tokens"]}
    waited, note = list[bool](), loop.Engine._note_launch

    def noted(self: Any, batch: Any, has_waited: bool, launched_at: float) -> None:
        if batch and all(item.phase.decodes for item in batch.scheduled):
            waited.append(has_waited)
        note(self, batch, has_waited, launched_at)

    monkeypatch.setattr(loop.Engine, "_note_launch", noted)
    llm = ahead()
    with overheard(known(MANY, expected)):
        same([out.completions[0] for out in llm.generate(MANY, params)], shorter, 1e-4)
    # The first one, those near the ends that are known, and none between.
    assert sum(waited[1:-6]) == 0 and len(waited) > 12, waited


@pytest.mark.slow
def test_no_more_steps_near_the_ends(plain: Any, ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step may bring less than the host takes it to, drafts are not cut short for that."""
    for prompts in (MANY[:1], MANY):
        expected, steps = answers(plain(), prompts, **GREEDY), list[int]()
        for runs_ahead in (True, False):
            with monkeypatch.context() as patch, overheard(known(prompts, expected)), counted() as counts:
                if not runs_ahead:
                    patch.setattr(loop, "can_run_ahead", lambda *_: False)
                llm = ahead(drafts=7)
                same(answers(llm, prompts, **GREEDY), expected, 1e-4)
            assert bool(counts) is runs_ahead
            steps.append(llm.engine.scheduler.metrics.steps)
        assert steps[0] <= steps[1] + 1, steps


@pytest.mark.slow
def test_few_pages(plain: Any, ahead: Any) -> None:
    """Requests are preempted and go on, as in the model's cache there are too few pages; then in the head's."""
    expected = answers(plain(), MANY, **GREEDY)
    for of_head, free in ((False, 12), (True, 0), (True, 6)):
        llm = ahead()
        manager = head_of(llm).manager if of_head else llm.engine.scheduler.manager
        held = manager.open([0], "held", private=True)
        manager.reserve(held, (manager.num_available_pages - free) * manager.page_size)
        with overheard(known(MANY, expected)), counted() as counts:
            same(answers(llm, MANY, **GREEDY), expected, 1e-4)
        assert counts or free == 0
        assert of_head or llm.engine.scheduler.metrics.preemptions


def test_a_head_of_a_short_context(plain: Any, ahead: Any) -> None:
    """Drafts are launched for as many steps for all requests, but end where the head does."""
    expected = answers(plain(), MANY, **GREEDY)
    llm = ahead()
    head, ends = head_of(llm), list[int]()
    head.max_context, reserve = 85, head.manager.reserve

    def noted(lease: Any, upto: int, *arguments: Any, **options: Any) -> None:
        ends.append(upto)
        reserve(lease, upto, *arguments, **options)

    head.manager.reserve = noted  # type: ignore[method-assign]
    with overheard(known(MANY, expected)), counted() as counts:
        same(answers(llm, MANY, **GREEDY), expected, 1e-4)
    assert counts and 70 < max(ends) <= 85
    assert max(len(one.token_ids) + len(prompt) for one, prompt in zip(expected, MANY, strict=True)) > 90
    head.manager.check_integrity()


def test_others_that_need_their_tokens(plain: Any, ahead: Any) -> None:
    """While one is there, steps wait for the last one."""
    params = [SamplingParams(**GREEDY), SamplingParams(**{**GREEDY, "max_tokens": 9}, repetition_penalty=1.3)]
    expected = [out.completions[0] for out in plain().generate(MANY[:2], params)]
    with overheard(known(MANY[:2], expected)), counted() as counts:
        same([out.completions[0] for out in ahead().generate(MANY[:2], params)], expected, 1e-4)
    assert set(counts) == {1}


def test_the_number_of_drafts_is_chosen(
    target: Path, head: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By likelihoods alone, with steps that go without any from time to time."""
    expected = answers(plain(), MANY, **GREEDY)
    turns = iter(range(10**6))
    monkeypatch.setattr(
        DraftPolicy, "choose", lambda self, requests, likely: 0 if next(turns) % 5 == 0 else max(likely)
    )
    llm = late(served(target, f"eagle3:{head}", live), live)
    speculation = llm.engine.speculation
    assert speculation
    speculation.overlaps = speculation.adapts = True
    with overheard(known(MANY, expected)), counted() as counts:
        same(answers(llm, MANY, **GREEDY), expected, 1e-4)
    assert speculation.chooses and len(counts) > 3


def test_rows_are_computed_while_the_step_before_runs(
    target: Path, head: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a recorded step of drafts has no room for, so that nobody waits for them."""
    params = {**GREEDY, "max_tokens": 60}
    expected = answers(plain(), PROMPTS, **params)
    turns, inside, stored = iter(range(10**6)), list[str](), list[tuple[str, int]]()
    monkeypatch.setattr(
        DraftPolicy, "choose", lambda self, requests, likely: max(likely) if next(turns) % 13 == 12 else 0
    )

    def entered(name: str) -> None:
        method = getattr(DraftHead, name)

        def run(*arguments: Any) -> Any:
            inside.append(name)
            try:
                return method(*arguments)
            finally:
                inside.pop()

        monkeypatch.setattr(DraftHead, name, run)

    entered("prepare")
    entered("propose")
    store = DraftHead._store

    def note(self: DraftHead, tracks: Any) -> None:
        chosen = list(tracks)
        stored.extend((inside[-1], len(chosen)) for _ in inside[-1:])
        store(self, chosen)

    monkeypatch.setattr(DraftHead, "_store", note)
    llm = late(served(target, f"eagle3:{head}", live, drafts=7), live)
    speculation = llm.engine.speculation
    assert speculation
    speculation.overlaps = speculation.adapts = True
    with overheard(known(PROMPTS, expected)):
        same(answers(llm, PROMPTS, **params), expected, 1e-4)
    prepared = [count for name, count in stored if name == "prepare"]
    assert sum(prepared) > 4 and not any(count for name, count in stored if name == "propose")


PLACES: dict[str, tuple[Any, str]] = {
    "asked": (DraftHead, "propose_ahead"),
    "first": (DraftGraphs, "replay_first"),
    "next": (DraftGraphs, "replay_next"),
    "sent": (HostInputs, "send"),
    "begun": (PageTables, "counts_behind"),
    "sampled": (Sampler, "launch"),
    "observed": (DraftHead, "_observe_ahead"),
    "accepted": (VerifyInputs, "accept"),
    "made": (loop, "follow_unread"),
    "settled": (DraftHead, "_settle"),
    "read": (DraftHead, "read"),
}


FEW = {"asked", "observed", "made"}
"""Once a step."""


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("place", "nth"),
    [*((place, 4 if place in FEW else 7) for place in PLACES), *(("read", n) for n in (8, 9, 10, 11))],
)
def test_a_step_that_breaks_off_harms_no_other(
    place: str,
    nth: int,
    after: bool,
    error: type[BaseException],
    plain: Any,
    ahead: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(**GREEDY)
    expected = answers(plain(), MANY, **GREEDY)
    owner, method = PLACES[place]
    llm = ahead()
    made, found, failed = llm.engine, [list[int]() for _ in MANY], set[int]()

    def take(number: int, piece: Delta) -> None:
        found[number] += piece.token_ids
        if piece.error:
            failed.add(number)

    with overheard(known(MANY, expected)), counted() as counts:
        planted, count = breaking(getattr(owner, method), nth, error, after=after)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, planted)
            for number, prompt in enumerate(MANY):
                made.submit(prompt, params, partial(take, number))
            for _ in range(500):
                with suppress(error):
                    made.step()
                if not made.busy:
                    break
        assert count[0] > nth and not made.busy and counts
        made.scheduler.check_integrity()
        head_of(llm).manager.check_integrity()
        for number, (own, one) in enumerate(zip(found, expected, strict=True)):
            assert own == list(one.token_ids)[: len(own)] and (
                number in failed or len(own) == len(one.token_ids)
            )
        same(answers(llm, MANY, **GREEDY), expected, 1e-4)
    assert head_of(llm).manager.stats.in_use <= 8 * len(MANY)


def test_aborts(plain: Any, ahead: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected = answers(plain(), MANY, **GREEDY)
    llm = ahead()
    made, pieces = llm.engine, [list[int]() for _ in MANY]
    with overheard(known(MANY, expected)), counted() as counts:
        tickets = [
            made.submit(prompt, SamplingParams(**GREEDY), lambda piece, own=own: own.extend(piece.token_ids))
            for prompt, own in zip(MANY, pieces, strict=True)
        ]
        for _ in range(500):
            made.step()
            if len(counts) % 3 == 2 and len(tickets) > 2:
                made.abort(tickets.pop())
            if not made.busy:
                break
    assert len(tickets) == 2 and not made.busy
    assert not [record for record in caplog.records if record.name == "nibble.drafts"]
    for own, one in zip(pieces, expected, strict=True):
        assert own == list(one.token_ids)[: len(own)]
    assert [own == list(one.token_ids) for own, one in zip(pieces[:2], expected[:2], strict=True)] == [
        True,
        True,
    ]
    made.scheduler.check_integrity()
    head_of(llm).manager.check_integrity()


def _one_more_counts(patch: pytest.MonkeyPatch) -> None:
    """The device takes a draft for right that is not."""
    accept = naive.accept

    def wrong(*arguments: Any) -> None:
        accept(*arguments)
        verified = arguments[5]
        verified.stored_R.add_(1)

    patch.setattr(naive, "accept", wrong)


def _the_first_token(patch: pytest.MonkeyPatch) -> None:
    """The next step begins with the first token of a run, not with its last."""
    accept = naive.accept

    def wrong(*arguments: Any) -> None:
        accept(*arguments)
        verified = arguments[5]
        verified.latest_R.copy_(verified.runs_RK[:, 0])

    patch.setattr(naive, "accept", wrong)


def _inputs_of_before(patch: pytest.MonkeyPatch) -> None:
    """A step takes the inputs that the last one had that waited."""
    patch.setattr(HostInputs, "send", lambda self, ints: None)


def _one_half(patch: pytest.MonkeyPatch) -> None:
    """All chains are drawn into the same memory."""
    patch.setattr(PageTables, "buffer_of", lambda self, unread: 0)


@pytest.mark.parametrize("plant", [_one_more_counts, _the_first_token, _inputs_of_before, _one_half])
def test_planted_errors_change_answers(
    plant: Any, plain: Any, ahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(plain(), MANY, **GREEDY)
    llm = ahead()
    plant(monkeypatch)
    with overheard(known(MANY, expected)), pytest.raises((AssertionError, NibbleError)):
        same(answers(llm, MANY, **GREEDY), expected, 1e-4)


def test_planted_positions_change_draws(plain: Any, ahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are drawn by the numbers of their places, which the host does not know."""
    expected = answers(plain(), MANY, **DRAWN)
    llm = ahead()
    sample = in_flight.Sampler.launch

    def wrong(self: Any, *arguments: Any) -> Any:
        if len(arguments) == 5 and arguments[4] is not None:
            arguments = *arguments[:4], arguments[4] + 1
        return sample(self, *arguments)

    monkeypatch.setattr(in_flight.Sampler, "launch", wrong)
    with overheard(known(MANY, expected)), pytest.raises(AssertionError):
        same(answers(llm, MANY, **DRAWN), expected, 1e-4)


@pytest.mark.parametrize("plant", ["places", "runs", "states"])
def test_what_a_head_is_told_wrongly_is_noticed(
    plant: str, target: Path, head: Path, plain: Any, ahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(plain(), MANY[:3], **GREEDY)
    llm = ahead()
    with monkeypatch.context() as patch:
        if plant == "places":
            store = WaitingStates.store

            def further(self: WaitingStates, places: Any, states: torch.Tensor) -> None:
                store(self, places + 1 if isinstance(places, torch.Tensor) else places, states)

            patch.setattr(WaitingStates, "store", further)
        elif plant == "runs":
            settle = naive.settle_inputs

            def other(*arguments: Any) -> None:
                verified = arguments[5]
                settle(
                    *arguments[:5],
                    naive.Verified(
                        *(getattr(verified, name) for name in _NAMES[:3]), verified.runs_RK.roll(1, 1)
                    ),
                )

            patch.setattr(naive, "settle_inputs", other)
        else:
            patch.setattr(DraftHead, "_observe_ahead", _settles_alone)
        with overheard(known(MANY[:3], expected)) as said:
            same(answers(llm, MANY[:3], **GREEDY), expected, 1e-4)
    assert error(said[-40:], eagle3_reference(target, head, "raw")) > 1e-3


_NAMES = ("latest_R", "stored_R", "counts_R", "runs_RK")


def _settles_alone(self: DraftHead, scheduled: Any, states: Any) -> None:
    """Hidden states are left out."""
    for item in scheduled:
        self._tracks[item.request].unsettled = item
