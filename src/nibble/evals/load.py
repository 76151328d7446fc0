"""The load test: sends a workload to an OpenAI-compatible server, and notes when what came back.

Owns run() and Driver. Requests arrive when they are due, however slow the server is, unless the open ones are limited.
Nothing that a request meets stops the run: it becomes that request's error. Must not know how figures are made of
notes (load_report.py), prompts of settings (load_workloads.py) or notes of chunks (load_stream.py), and must not import
torch.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from nibble.errors import ConfigError, NibbleError
from nibble.evals.load_report import LoadReport, Record, goals
from nibble.evals.load_stream import Events, Failed, Talk, kind_of, message_of, settle, take
from nibble.evals.load_workloads import (
    Ids,
    Load,
    Prompt,
    Session,
    Source,
    Turn,
    Words,
    Workload,
    arrivals,
    sessions,
    warmups,
)

if TYPE_CHECKING:
    import httpx

INSTALL = "pip install 'nibble-llm[serve]'"
LAG_EVERY_S = 0.05
PROBE_WORDS = 200
Told = Callable[[int, int, int], None]
"""Hears how many requests have ended, of how many, and how many of them failed."""


@dataclass(frozen=True, slots=True)
class Target:
    """What answers."""

    url: str
    model: str
    vocab: int | None


async def run(
    url: str,
    load: Load,
    workload: Workload,
    *,
    told: Told = lambda *_: None,
    transport: Any = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadReport:
    """Measures. Being cancelled (Ctrl-C) while requests run ends it with what is known by then.

    Raises NibbleError where the server cannot be asked at all.
    """
    async with _client(url, load, transport) as client:
        target = await _target(client, url, load, workload)
        driver = Driver(client, target, load, workload, clock, told)
        source, notes = await driver.source()
        planned = sessions(workload, source)
        _check_shapes(load, workload, planned)
        notes += await driver.warm_up(warmups(workload, source, load.warmup))
        interrupted = await driver.drive(planned)
    if len(planned) < workload.requests:
        notes.append(f"the file has {len(planned):,} prompts, fewer than {workload.requests:,}")
    return LoadReport(
        target.url,
        target.model,
        sum(map(len, planned)),
        tuple(driver.records),
        max((record.end for record in driver.records), default=0.0),
        goals(load.goodput),
        tuple(driver.lags),
        tuple(notes),
        interrupted,
        _asked(load) | _asked(workload),
    )


def _asked(settings: Load | Workload) -> dict[str, Any]:
    """Settings as JSON takes them, without secrets."""
    found: dict[str, Any] = {}
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if entry.name != "api_key":
            found[entry.name] = str(value) if isinstance(value, Path) or value == math.inf else value
    return found


def _check_shapes(load: Load, workload: Workload, planned: list[Session]) -> None:
    """Only a file may have token ids where texts are needed. Raises ConfigError."""
    ids = any(isinstance(turn.prompt, list) for session in planned for turn in session)
    if ids and (load.chat or workload.turns > 1):
        raise ConfigError(
            "token ids can be asked of /v1/completions only, and in one turn: see --chat and --turns"
        )


@asynccontextmanager
async def _client(url: str, load: Load, transport: Any) -> AsyncIterator[httpx.AsyncClient]:
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(f"a load test needs httpx, which is not installed: {INSTALL}") from error
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Content-Type": "application/json"}
    if load.api_key:
        headers["Authorization"] = f"Bearer {load.api_key}"
    try:
        async with httpx.AsyncClient(
            base_url=_root(url),
            headers=headers,
            limits=limits,
            timeout=httpx.Timeout(None, connect=load.timeout),
            transport=transport,
        ) as client:
            yield client
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"cannot ask {url}: {error}") from None


def _root(url: str) -> str:
    """The server's address, with or without a scheme and /v1."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def _target(client: httpx.AsyncClient, url: str, load: Load, workload: Workload) -> Target:
    """Which model answers, of which vocabulary."""
    import httpx

    try:
        answer = await client.get("/v1/models", timeout=min(30.0, load.timeout))
        listed = answer.json()["data"] if answer.status_code == 200 else []
        status = f"status {answer.status_code}"
    except httpx.UnsupportedProtocol:
        raise
    except httpx.TransportError as error:
        raise NibbleError(f"{_root(url)} does not answer: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        listed, status = [], "an answer that cannot be read"
    entry: dict[str, Any] = next((entry for entry in listed if load.model in {None, entry.get("id")}), {})
    model = load.model or entry.get("id")
    if not model:
        raise ConfigError(f"{_root(url)}/v1/models names no model ({status}); give --model")
    meta = entry.get("meta") or {}
    vocab = workload.vocab or entry.get("vocab_size") or meta.get("vocab_size") or meta.get("n_vocab")
    return Target(_root(url), model, vocab)


class Driver:
    """Sends requests and keeps their records."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        target: Target,
        load: Load,
        workload: Workload,
        clock: Callable[[], float],
        told: Told,
    ) -> None:
        self.records: list[Record] = []
        self.lags: list[float] = []
        self._client, self._target, self._load, self._workload = client, target, load, workload
        self._clock, self._told, self._start = clock, told, clock()
        self._path = "/v1/chat/completions" if load.chat else "/v1/completions"
        self._room = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
        self._ended = self._failed = self._planned = 0

    # Before the measurement

    async def source(self) -> tuple[Source, list[str]]:
        """How prompts are drawn, found by asking: ids if they may be sent, or else words, counted once in tokens."""
        if self._workload.workload == "file":
            return Words(), []
        notes: list[str] = []
        if not (self._load.chat or self._workload.text or self._workload.turns > 1):
            if self._target.vocab is None:
                notes.append("prompts are texts: /v1/models does not say vocab_size, and there is no --vocab")
            else:
                ids = Ids(self._target.vocab)
                probe = await self._probe(ids.draw(Random("probe"), 4))
                if not (probe.error or "").startswith("http 4"):
                    return ids, notes
                notes.append(
                    f"prompts are texts: token ids were answered with {probe.error} ({probe.detail})"
                )
        probe = await self._probe(Words().draw(Random("probe"), PROBE_WORDS))
        if not probe.done or not probe.input_tokens:
            return Words(), [
                *notes,
                "words could not be counted in tokens: prompts have a word for each token",
            ]
        return Words(probe.input_tokens / PROBE_WORDS), notes

    async def _probe(self, prompt: Prompt) -> Record:
        record = Record(-1, 0, 0.0)
        await self._ask(record, Talk(self._load.chat).say(prompt), 1)
        return record

    async def warm_up(self, planned: list[Session]) -> list[str]:
        """Requests that are not recorded, all at once; what went wrong with them."""
        records = [Record(-1, 0, 0.0) for _ in planned]
        await asyncio.gather(
            *(
                self._ask(record, Talk(self._load.chat).say(turn.prompt), turn.max_tokens)
                for record, (turn,) in zip(records, planned, strict=True)
            )
        )
        return [f"a warm-up request failed ({r.error}): {r.detail}" for r in records if not r.done][:1]

    # The measurement

    async def drive(self, planned: list[Session]) -> bool:
        """Sends everything; whether it was interrupted."""
        load, self._planned = self._load, sum(map(len, planned))
        due = arrivals(load.rate, load.arrivals == "poisson", len(planned), self._workload.seed)
        self._start = self._clock()
        watch = asyncio.create_task(self._watch())
        tasks = [
            asyncio.create_task(self._session(i, *one))
            for i, one in enumerate(zip(due, planned, strict=True))
        ]
        try:
            await asyncio.gather(*tasks)
            return False
        except asyncio.CancelledError:
            return True
        finally:
            for task in (watch, *tasks):
                task.cancel()
            await asyncio.gather(watch, *tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """How late this very loop is: a client that has no time measures itself."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_EVERY_S)
            self.lags.append(max(0.0, time.perf_counter() - before - LAG_EVERY_S))

    async def _session(self, number: int, due: float, turns: Session) -> None:
        """One conversation: each turn after the answer to the one before; a failure ends it."""
        talk = Talk(self._load.chat)
        for index, turn in enumerate(turns):
            await asyncio.sleep(max(0.0, due - self._now()))
            async with self._room:
                record = Record(number, index, due, self._now())
                self.records.append(record)
                answer = await self._turn(record, talk, turn)
            self._ended += 1
            self._failed += not record.done
            self._told(self._ended, self._planned, self._failed)
            if not record.done:
                return
            talk.hear(answer)
            due = self._now() + self._workload.think

    async def _turn(self, record: Record, talk: Talk, turn: Turn) -> str:
        return await self._ask(record, talk.say(turn.prompt), turn.max_tokens)

    # One request

    def _now(self) -> float:
        return self._clock() - self._start

    async def _ask(self, record: Record, said: Mapping[str, Any], max_tokens: int) -> str:
        """Asks, notes what comes, and gives the answer's text. Whatever happens is the record's error."""
        body = json.dumps(self._body(record, said, max_tokens), ensure_ascii=False).encode()
        texts: list[str] = []
        try:
            async with asyncio.timeout(self._load.timeout):
                await self._stream(record, body, texts)
            record.error = None
        except Exception as error:
            record.error, record.detail = kind_of(error)
        return "".join(texts)

    def _body(self, record: Record, said: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
        asked = self._workload
        body = {
            "model": self._target.model,
            **said,
            "max_tokens": max_tokens,
            "temperature": asked.temperature,
        }
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if asked.temperature > 0:
            body["seed"] = asked.seed + max(0, record.session)
        if asked.ignore_eos and record.session >= 0:
            body["ignore_eos"] = True
        return body | self._load.extra

    async def _stream(self, record: Record, body: bytes, texts: list[str]) -> None:
        request = self._client.build_request("POST", self._path, content=body)
        events, ended = Events(), False
        record.sent = self._now()
        async with aclosing(await self._client.send(request, stream=True)) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                raise Failed(f"http {response.status_code}", message_of(said))
            async for raw in response.aiter_bytes():
                now = self._now()
                for data in events.feed(raw):
                    if data == b"[DONE]":
                        ended = True
                    elif data:
                        texts.append(take(record, now, json.loads(data)))
        if not (ended or record.finish):
            raise Failed("cut off", "the stream ended before the answer did")
        settle(record)
