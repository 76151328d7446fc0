"""The load test against a server that is a function, at times that are made up: what is counted, drawn and computed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from nibble.cli import bench, exits
from nibble.errors import ConfigError, NibbleError
from nibble.evals import load as loads
from nibble.evals.load_report import LoadReport, Record, Spread, goals, plot, shares
from nibble.evals.load_stream import Events, settle, take
from nibble.evals.load_workloads import Ids, Load, Words, Workload, arrivals, lengths, sessions, warmups

VOCAB = 1000
RUN = loads.run


class Stream(httpx.AsyncByteStream):
    def __init__(self, parts: Callable[[], AsyncIterator[bytes]]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts():
            yield part


class FakeServer:
    """Answers with its number, word by word; a word a second, the first after two. Its clock moves only so.

    joint: words of one chunk. fails: what becomes of requests, by their number (from 0, probes left out).
    """

    def __init__(
        self, *, joint: int = 1, usage: bool = True, takes_ids: bool = True, vocab: bool = True
    ) -> None:
        self.now, self.bodies, self.probes = 0.0, list[dict[str, Any]](), list[dict[str, Any]]()
        self.joint, self.usage, self.takes_ids, self.vocab = joint, usage, takes_ids, vocab
        self.fails: dict[int, str] = {}
        self.open = self.most_open = 0
        self.headers: list[str | None] = []

    def clock(self) -> float:
        return self.now

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(
                200, json={"data": [{"id": "fake"} | ({"vocab_size": VOCAB} if self.vocab else {})]}
            )
        body = json.loads(request.content)
        self.headers.append(request.headers.get("authorization"))
        probe = body["max_tokens"] == 1
        number = len(self.bodies)
        (self.probes if probe else self.bodies).append(body)
        if isinstance(body.get("prompt"), list) and not self.takes_ids:
            return httpx.Response(400, json={"error": {"message": "texts, please"}})
        failure = None if probe else self.fails.get(number)
        if failure == "refuse":
            return httpx.Response(429, json={"error": {"message": "too many"}})
        if failure == "unreachable":
            raise httpx.ConnectError("nobody there")
        return httpx.Response(200, stream=Stream(lambda: self.said(body, number, failure)))

    async def said(self, body: dict[str, Any], number: int, failure: str | None) -> AsyncIterator[bytes]:
        chat, count = "messages" in body, body["max_tokens"]
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if chat:
                yield event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            self.now += 1
            for start in range(0, count, self.joint):
                await asyncio.sleep(0)
                words = min(self.joint, count - start)
                self.now += words
                text = f" {number:03}" * words
                yield event(choices=[{"delta": {"content": text}} if chat else {"text": text}])
                if failure == "error":
                    yield event(error={"message": "the engine died"})
                if failure == "lost":
                    raise httpx.ReadError("gone")
                if failure == "cut":
                    return
                if failure == "nonsense":
                    yield b"data: {\n\n"
                if failure == "hang":
                    await asyncio.sleep(3600)
            done = {"finish_reason": "length"}
            yield event(choices=[done | ({"delta": {}} if chat else {"text": ""})])
            if self.usage:
                asked = length(body)
                details = {"cached_tokens": asked // 4}
                yield event(
                    choices=[],
                    usage={
                        "prompt_tokens": asked,
                        "completion_tokens": count,
                        "prompt_tokens_details": details,
                    },
                )
            yield b"data: [DO"
            yield b"NE]\r\n\r\n"
        finally:
            self.open -= 1

    def run(self, load: Load | None = None, **workload: Any) -> LoadReport:
        asked = Workload(**{"requests": 4, "input_tokens": "8", "output_tokens": "5"} | workload)
        return asyncio.run(self.running(load or Load(warmup=0, max_concurrency=1), asked))

    async def running(self, load: Load, asked: Workload) -> LoadReport:
        transport = httpx.MockTransport(self)
        return await loads.run("fake:1/v1/", load, asked, transport=transport, clock=self.clock)


def event(**said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def length(body: dict[str, Any]) -> int:
    """A word is two tokens."""
    if "messages" in body:
        return 2 * sum(len(message["content"].split()) for message in body["messages"])
    return len(body["prompt"]) if isinstance(body["prompt"], list) else 2 * len(body["prompt"].split())


# One request


def test_counts_and_times_of_a_run() -> None:
    server = FakeServer()
    report = server.run(Load(warmup=3, max_concurrency=1, api_key="secret"))
    found = report.summary()
    assert (found["planned"], found["sent"], found["completed"], found["errors"]) == (4, 4, 4, {})
    assert (found["input_tokens"], found["output_tokens"], found["cached_share"]) == (32, 20, 0.25)
    assert found["seconds"] == 24 and found["most_open"] == 1
    assert found["output_tokens_per_s"] == pytest.approx(20 / 24)
    assert {name: found[f"{name}_ms"]["p50"] for name in ("ttft", "itl", "tpot", "e2e")} == {
        "ttft": 2000, "itl": 1000, "tpot": 1000, "e2e": 6000,
    }  # fmt: skip
    assert found["itl_ms"]["count"] == 16
    assert len(server.bodies) == 3 + 4  # warm-ups are not counted
    assert set(server.headers) == {"Bearer secret"} and "secret" not in report.as_json()
    assert server.bodies[-1]["stream_options"] == {"include_usage": True}
    assert all(record.finish == "length" for record in report.records)


def test_a_chunk_of_several_tokens_shares_its_time() -> None:
    report = FakeServer(joint=2).run(output_tokens="6", requests=1)
    (record,) = report.records
    assert len(record.marks) == 3 and record.itls() == [1.0] * 4  # chunks come two seconds apart
    assert record.tpot == pytest.approx(4 / 5)
    assert any("divided" in note for note in report.told())


def test_shares_follow_the_length_of_the_text() -> None:
    assert shares(10, [4, 36]) == [1, 9]
    assert shares(6, [0, 0, 0]) == [2, 2, 2]
    assert shares(2, [5, 5, 5]) == [1, 1, 1]
    assert shares(3, []) == []


def test_chats_do_not_count_a_greeting_nor_an_empty_end() -> None:
    report = FakeServer().run(Load(chat=True, warmup=0, max_concurrency=1))
    assert {len(record.marks) for record in report.records} == {5}
    assert {record.ttft for record in report.records} == {2.0}


def test_an_empty_end_counts_where_a_token_is_left_for_it() -> None:
    def record(tokens: int | None, end: str = "stop") -> Record:
        found = Record(0, 0, 0.0)
        for now, text, reason in ((1.0, "a", None), (2.0, "", None), (3.0, "", end)):
            take(found, now, {"choices": [{"text": text, "finish_reason": reason}]})
        found.output_tokens = tokens
        settle(found)
        return found

    assert [len(record(tokens).marks) for tokens in (None, 2, 3, 4)] == [2, 2, 3, 3]
    assert [len(record(tokens, "length").marks) for tokens in (2, 3, 4)] == [2, 3, 2]


def test_without_usage_chunks_are_tokens() -> None:
    report = FakeServer(usage=False).run()
    assert report.summary()["output_tokens"] == 20 and report.summary()["cached_share"] is None
    assert any("without usage" in note for note in report.told())


def test_events_however_they_are_cut() -> None:
    sent = b'event: x\r\ndata: {"a": 1}\r\n\r\ndata:[DONE]\n\n: comment\n\n'
    for size in (1, 2, 7, len(sent)):
        events = Events()
        found = [data for i in range(0, len(sent), size) for data in events.feed(sent[i : i + size])]
        assert found == [b'{"a": 1}', b"[DONE]"]


# Figures


def canned(*times: float, sent: float = 0.0) -> Record:
    return Record(0, 0, 0.0, sent, [(time, 1) for time in times], 10, len(times), 5, "length", None)


def test_percentiles_are_numpys() -> None:
    dice = Random(0)
    for count in (1, 2, 3, 10, 101):
        values = [dice.expovariate(1) for _ in range(count)]
        found = Spread.of(values)
        assert found
        expected = [np.mean(values), *np.percentile(values, [50, 90, 99]), max(values)]
        assert [found.mean, found.p50, found.p90, found.p99, found.max] == pytest.approx(expected)
    assert Spread.of([]) is None


def test_latencies_are_those_of_the_definitions() -> None:
    dice = Random(1)
    records = []
    for _ in range(20):
        sent = dice.random()
        records.append(canned(*sorted(sent + dice.random() for _ in range(dice.randrange(1, 9))), sent=sent))
    found = LoadReport("", "", 20, tuple(records), 2.0).latencies()
    times = [(record.sent, np.array([time for time, _ in record.marks])) for record in records]
    expected = {
        "ttft": [t[0] - sent for sent, t in times],
        "e2e": [t[-1] - sent for sent, t in times],
        "itl": np.concatenate([np.diff(t) for _, t in times]),
        "tpot": [np.diff(t).mean() for _, t in times if len(t) > 1],
    }
    for name, values in expected.items():
        spread = found[name]
        assert spread and spread.mean == pytest.approx(np.mean(values))
        assert spread.p99 == pytest.approx(np.percentile(values, 99))


def test_goodput() -> None:
    records = (canned(0.4, 0.44, 0.48), canned(0.6, 0.61), canned(0.1, 0.2, 0.21), Record(0, 0, 0.0))
    report = LoadReport("", "", 4, records, 2.0, goals("ttft:500, itl:50"))
    assert report.good() == 1  # the second is late, the third has a long gap, the fourth has not ended
    assert report.summary()["goodput_per_s"] == 0.5
    assert dict(report.figures())["goodput"].startswith("0.50 requests/s, 25.0%")
    assert LoadReport("", "", 4, records, 2.0, goals("e2e:1000")).good() == 3
    assert LoadReport("", "", 4, records, 2.0).summary()["goodput_per_s"] is None
    for wrong in ("ttft", "ttft:x", "speed:1"):
        with pytest.raises(ConfigError):
            goals(wrong)


def test_json_and_rows_of_nothing_at_all() -> None:
    report = LoadReport("", "", 3, (), 0.0)
    assert json.loads(report.as_json())["summary"]["ttft_ms"] is None
    assert [row[1:] for row in report.rows()] == [("-",) * 5] * 4
    assert dict(report.figures())["completed"] == "0 of 3 in 0.00 s"


def test_plot(tmp_path: Path) -> None:
    for report in (FakeServer(joint=2).run(), LoadReport("", "m", 0, (), 0.0)):
        plot(report, tmp_path / "load.svg")
        assert (tmp_path / "load.svg").stat().st_size > 1000
    with pytest.raises(ConfigError, match="plot"):
        plot(report, tmp_path / "load.nonsense")


# Failures


def test_failures_are_counted_by_kind_and_end_nothing() -> None:
    server = FakeServer()
    kinds = {
        "refuse": "http 429", "unreachable": "no connection", "error": "in the stream", "lost": "connection lost",
        "cut": "cut off", "nonsense": "not understood", "hang": "timeout",
    }  # fmt: skip
    server.fails = dict(enumerate([*kinds, "refuse"], start=1))
    report = server.run(Load(warmup=0, max_concurrency=1, timeout=0.3), requests=12)
    assert report.errors() == {"http 429": 2} | {kind: 1 for name, kind in kinds.items() if name != "refuse"}
    assert len(report.completed) == 4 and report.summary()["output_tokens"] == 20
    told = dict(report.figures())
    assert told["failed: http 429"] == "2" and told["completed"].startswith("4 of 12")
    assert any("too many" in note for note in report.told())
    assert report.as_dict()["requests"][1]["detail"] == "too many"


def test_a_warm_up_that_fails_is_told_of() -> None:
    server = FakeServer()
    server.fails = {0: "refuse", 1: "refuse"}
    report = server.run(Load(warmup=2, max_concurrency=1))
    assert len(report.completed) == 4 and report.notes == ("a warm-up request failed (http 429): too many",)


def test_a_failure_ends_its_conversation_only() -> None:
    server = FakeServer()
    server.fails = {0: "refuse"}
    report = server.run(requests=2, turns=3)
    assert report.planned == 6 and len(report.records) == 4 and len(report.completed) == 3


def test_interrupted_it_tells_what_is_known() -> None:
    server = FakeServer()
    server.fails = {2: "hang"}

    async def interrupt() -> LoadReport:
        asked = Workload(requests=5, input_tokens="8", output_tokens="5")
        task = asyncio.create_task(server.running(Load(warmup=0, max_concurrency=1), asked))
        while len(server.bodies) < 3 or not server.open:
            await asyncio.sleep(0)
        task.cancel()
        return await task

    report = asyncio.run(interrupt())
    assert report.interrupted and len(report.completed) == 2 and report.errors() == {"unfinished": 1}
    assert server.open == 0


def test_a_server_that_is_not_there() -> None:
    def nobody(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    run = loads.run("localhost:1", Load(), Workload(), transport=httpx.MockTransport(nobody))
    with pytest.raises(NibbleError, match="http://localhost:1 does not answer"):
        asyncio.run(run)
    nameless = loads.run(
        "x", Load(), Workload(), transport=httpx.MockTransport(lambda _: httpx.Response(404))
    )
    with pytest.raises(ConfigError, match="--model"):
        asyncio.run(nameless)


# Workloads


def test_lengths() -> None:
    assert list(lengths("n", "3-5")) == [3, 4, 5] and list(lengths("n", "7")) == [7]
    for wrong in ("0", "5-3", "a", "", "-3"):
        with pytest.raises(ConfigError):
            lengths("n", wrong)


def test_random_prompts_are_of_their_lengths_and_of_their_seed() -> None:
    def drawn(**changed: Any) -> list[Any]:
        asked = Workload(**{"requests": 50, "input_tokens": "4-9", "output_tokens": "2-3"} | changed)
        return [turn for (turn,) in sessions(asked, Ids(VOCAB))]

    found = drawn()
    assert {len(turn.prompt) for turn in found} == set(range(4, 10)) and {t.max_tokens for t in found} == {
        2,
        3,
    }
    assert all(0 <= token < VOCAB for turn in found for token in turn.prompt)
    assert drawn() == found and drawn(seed=1) != found
    assert drawn(requests=10) == found[:10]
    warm = [session[0].prompt for session in warmups(Workload(input_tokens="9"), Ids(VOCAB), 5)]
    assert not {tuple(prompt[:3]) for prompt in warm} & {tuple(turn.prompt[:3]) for turn in found}


@pytest.mark.parametrize("source", [Ids(VOCAB), Words(2.0)])
def test_prefixes_are_shared_evenly_and_what_follows_is_not(source: Any) -> None:
    asked = Workload(workload="prefix", requests=12, prefixes=3, prefix_tokens=40, input_tokens="10")
    prompts = [turn.prompt for (turn,) in sessions(asked, source)]
    parts = [prompt if isinstance(prompt, list) else prompt.split() for prompt in prompts]
    size = 40 if isinstance(source, Ids) else 20
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for part in parts:
        groups.setdefault(tuple(part[:size]), []).append(tuple(part[size:]))
    assert [len(group) for group in groups.values()] == [4, 4, 4]
    assert len({rest for group in groups.values() for rest in group}) == 12
    assert {len(part) for part in parts} == {size + size // 4}


def turns_of(server: FakeServer, chat: bool) -> Iterator[list[str]]:
    """What was sent in each conversation, turn by turn, as text."""
    found: dict[str, list[str]] = {}
    for body in server.bodies:
        said = [message["content"] for message in body["messages"]] if chat else [body["prompt"]]
        text = "|".join(said)
        found.setdefault(" ".join(text.replace("|", " ").split()[:3]), []).append(text)
    yield from found.values()


@pytest.mark.parametrize("chat", [False, True])
def test_conversations_grow_by_the_servers_own_answers(chat: bool) -> None:
    server = FakeServer()
    report = server.run(Load(chat=chat, warmup=0, max_concurrency=2), requests=3, turns=4)
    assert len(report.completed) == 12 and server.most_open <= 2
    conversations = list(turns_of(server, chat))
    assert [len(turns) for turns in conversations] == [4, 4, 4]
    for turns in conversations:
        numbers = [i for i, body in enumerate(server.bodies) if sent(body, chat) in turns]
        for (first, second), number in zip(pairwise(turns), numbers, strict=False):
            assert second.startswith(first)
            assert second[len(first) :].lstrip("|").startswith(f" {number:03}" * 5)


def sent(body: dict[str, Any], chat: bool) -> str:
    return "|".join(message["content"] for message in body["messages"]) if chat else str(body["prompt"])


def test_texts_where_ids_are_not_taken_or_no_vocabulary_is_known() -> None:
    for server, said in (
        (FakeServer(takes_ids=False), "texts, please"),
        (FakeServer(vocab=False), "vocab_size"),
    ):
        report = server.run()
        assert len(report.completed) == 4 and any(said in note for note in report.notes)
        assert all(len(body["prompt"].split()) == 4 for body in server.bodies)  # a word is two tokens
    server = FakeServer(vocab=False)
    server.run(vocab=VOCAB)
    assert all(len(body["prompt"]) == 8 and body["prompt"][0] < VOCAB for body in server.bodies)


def test_what_is_sent() -> None:
    server = FakeServer()
    load = Load(warmup=0, body='{"cache_salt": "x", "temperature": 0.3}')
    server.run(load, ignore_eos=True, temperature=0.7, seed=5, requests=2)
    assert [body["seed"] for body in server.bodies] == [5, 6]
    for body in server.bodies:
        assert (body["model"], body["ignore_eos"], body["temperature"]) == ("fake", True, 0.3)
        assert body["cache_salt"] == "x" and body["stream"] is True
    assert not any("ignore_eos" in body for body in server.probes)


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat += [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye"}]
    shared = [{"from": "human", "value": "One"}, {"from": "gpt", "value": "two"}]
    entries = ["a text", {"prompt": "p", "output_tokens": 3}, {"messages": chat}, {"conversations": shared}]
    path.write_text("\n".join(map(json.dumps, entries)) + "\n\n")

    def drawn(**changed: Any) -> dict[Any, Any]:
        asked = Workload(**{"workload": "file", "file": str(path), "output_tokens": "7"} | changed)
        return {session[0].prompt: session for session in sessions(asked, Words())}

    found = drawn()
    assert {prompt: len(session) for prompt, session in found.items()} == dict.fromkeys(
        ("a text", "p", "Be brief.\n\nHi", "One"), 1
    )
    assert found["p"][0].max_tokens == 3 and found["a text"][0].max_tokens == 7
    assert [turn.prompt for turn in drawn(turns=5)["Be brief.\n\nHi"]] == ["Be brief.\n\nHi", "Bye"]
    assert len(drawn(requests=2)) == 2
    report = FakeServer().run(workload="file", file=str(path), requests=9)
    assert len(report.completed) == 4 and any("4 prompts" in note for note in report.notes)
    path.write_text(json.dumps(entries))
    assert drawn() == found  # ShareGPT is published as one array
    for wrong in ('{"a": 1}', "{", "[1.5]", '{"messages": [3]}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="prompts"):
            drawn()
    path.write_text('{"prompt": [1, 2]}')
    with pytest.raises(ConfigError, match="token ids"):
        FakeServer().run(Load(chat=True), workload="file", file=str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        drawn(file=str(tmp_path / "none"))


def test_arrivals() -> None:
    assert arrivals(math.inf, True, 3, 0) == [0, 0, 0]
    assert arrivals(4, False, 3, 0) == [0, 0.25, 0.5]
    found = arrivals(4, True, 4000, 0)
    assert found == sorted(found) and found[0] == 0 and found[-1] == pytest.approx(1000, rel=0.05)
    assert found == arrivals(4, True, 4000, 0) and found != arrivals(4, True, 4000, 1)


def test_values_that_are_refused() -> None:
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (Workload, {"workload": "rnd"}), (Workload, {"workload": "file"}), (Workload, {"file": "x"}),
        (Workload, {"requests": 0}), (Workload, {"input_tokens": "x"}), (Workload, {"think": -1.0}),
        (Workload, {"vocab": 1}), (Load, {"rate": 0.0}), (Load, {"rate": math.nan}), (Load, {"max_concurrency": 0}),
        (Load, {"arrivals": "late"}), (Load, {"body": "[]"}), (Load, {"body": "{"}), (Load, {"goodput": "x:1"}),
        (Load, {"warmup": -1}),
    ]  # fmt: skip
    for kind, values in wrong:
        with pytest.raises(ConfigError):
            kind(**values)


# The command


def command(server: FakeServer, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    async def run(url: str, load: Load, workload: Workload, told: Any) -> LoadReport:
        transport = httpx.MockTransport(server)
        return await RUN(url, load, workload, told=told, transport=transport, clock=server.clock)

    monkeypatch.setattr(loads, "run", run)
    small = typer.Typer()
    small.command()(exits.command(bench.bench))
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(small, list(words))


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("serve", "http://fake", "--requests", "6", "--max-concurrency", "1", "--output-tokens", "5")
    to = tmp_path / "load.json"
    result = command(
        FakeServer(), monkeypatch, *words, "--goodput", "ttft:3000", "--json", str(to), "--rate", "inf"
    )
    assert result.exit_code == 0, result.output
    assert "6 of 6" in result.stdout and "100.0% of those sent" in result.stdout and "TTFT" in result.stdout
    data = json.loads(to.read_text())
    assert data["schema"] == "nibble-load-1" and len(data["requests"]) == 6
    assert data["asked"]["rate"] == "inf" and "api_key" not in data["asked"]
    assert data["requests"][0]["itl_ms"] == [1000.0] * 4
    printed = command(FakeServer(), monkeypatch, *words, "--json", "-", "--plot", str(tmp_path / "load.png"))
    assert json.loads(printed.stdout)["summary"]["completed"] == 6 and (tmp_path / "load.png").exists()


def test_the_command_where_nothing_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    server.fails = dict.fromkeys(range(99), "refuse")
    result = command(server, monkeypatch, "serve", "fake", "--requests", "2")
    assert result.exit_code == exits.FAILED and "failed: http 429" in result.stdout


def test_the_command_measures_servers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    assert command(server, monkeypatch, "train", "fake").exit_code == exits.USAGE
