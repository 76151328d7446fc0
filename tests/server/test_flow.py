"""Pieces on their way from the engine's process to a stream: joined, stamped, merged and ended in time."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import zmq

from conftest import FakeEngine  # type: ignore[attr-defined]
from nibble.config import Config, SamplingParams
from nibble.engine.request import Delta
from nibble.server import worker as wire
from nibble.server.engine_client import (
    EngineDiedError,
    GenerationRequest,
    OutputQueue,
    Piece,
    ProcessClient,
    State,
)
from nibble.server.metrics import Metrics
from nibble.server.streaming import Events, merge_streams


def piece(text: str, at: float, index: int = 0, reason: Any = None) -> Piece:
    return Piece(Delta(index, text, (len(text),), reason), 0, ((at, 1),))


def test_what_was_not_fetched_is_joined_and_keeps_its_times() -> None:
    async def run() -> list[Piece]:
        mailbox = OutputQueue()
        for one in (piece("a", 1.0), piece("x", 1.0, 1), piece("bc", 2.0), piece("def", 4.0, reason="stop")):
            mailbox.put(one)
        return await mailbox.get()

    first, second = asyncio.run(run())
    assert (first.delta.text, first.delta.token_ids, first.delta.finish_reason) == (
        "abcdef",
        (1, 2, 3),
        "stop",
    )
    assert first.marks == ((1.0, 1), (2.0, 1), (4.0, 1)) and second.delta.text == "x"


def test_a_slow_reader_does_not_make_the_engine_look_slow() -> None:
    now = [10.0]
    meters = Metrics(FakeEngine(), "m", lambda: now[0])

    async def source() -> AsyncGenerator[list[Piece]]:
        now[0] = 99.0  # when somebody gets round to reading
        yield [Piece(Delta(0, "abc", (1, 2, 3), "stop"), 0, ((10.5, 1), (10.7, 1), (11.0, 1)), 10.2)]

    async def run() -> None:
        async for _ in meters.start_request(4).observe(source()):
            pass

    asyncio.run(run())
    sums = dict(line.split(" ") for line in meters.render()[0].decode().splitlines() if "_sum" in line)
    for name, value in {
        "time_to_first_token": 0.5, "inter_token_latency": 0.5, "e2e_request_latency": 1.0,
        "request_queue_time": 0.2, "request_prefill_time": 0.3, "request_decode_time": 0.5,
        "request_inference_time": 0.8,
    }.items():  # fmt: skip
        assert float(sums[f'nibble:{name}_seconds_sum{{model_name="m"}}']) == pytest.approx(value)


def test_the_client_stamps_what_it_hears() -> None:
    async def run() -> list[Piece]:
        client = ProcessClient(Config(model="demo"))
        client.state = State.READY
        said: list[Any] = []

        async def say(order: Any) -> None:
            said.append(order)

        client._send = say  # type: ignore[method-assign]
        pieces = client.generate(GenerationRequest([1], SamplingParams(n=2)))
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        (order,) = said
        items = [(order.id, 4, 2.5, Delta(0, "a", (5,))), (order.id, 4, 2.5, Delta(1, "b", (6, 7)))]
        await client._handle(wire.decode_event(wire.encode(wire.Pieces(items))))
        found = await waiting
        await pieces.aclose()
        assert isinstance(said[-1], wire.Abort)
        await client.stop()
        return found

    first, second = asyncio.run(run())  # what one step added comes together
    assert (first.cached, first.started) == (4, 2.5)
    assert first.marks[0][1] == 1 and second.marks[0][1] == 2 and first.marks[0][0] == second.marks[0][0]


def test_requests_end_as_the_engine_says_why_and_not_once_its_process_has_ended() -> None:
    async def run() -> None:
        client = ProcessClient(Config(model="demo", tp=2))
        client.state, client._has_served = State.READY, True

        async def say(_: Any) -> None:
            pass

        client._send = say  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(anext(client.generate(GenerationRequest([1], SamplingParams()))))
        await asyncio.sleep(0)
        await client._handle(wire.Failed("rank 1 of 2 was killed by signal 9", "RankError"))
        with pytest.raises(EngineDiedError, match=r"is lost \(rank 1 of 2 was killed by signal 9\)"):
            await waiting
        assert client.state is State.STARTING, "which is what /health says"
        await client.stop()

    asyncio.run(run())


def test_an_engine_that_is_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.server.engine_client.LOOK_S", 0.01)
    monkeypatch.setattr("nibble.server.engine_client.FROZEN_S", 0.05)

    async def run() -> None:
        client = ProcessClient(Config(model="demo", tp=2))
        process = await asyncio.create_subprocess_exec("sleep", "60")
        process.send_signal(signal.SIGSTOP)
        await client._guard(process)
        assert await process.wait() == -signal.SIGKILL
        assert client._cause.startswith("rank 0 of 2, the engine's own process, is stopped")
        await client.stop()

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("timeout", [None, 30.0])
def test_sources_are_merged(count: int, timeout: float | None) -> None:
    engine = FakeEngine()

    async def run() -> dict[int, str]:
        asks = [GenerationRequest([65 + i] * 3, SamplingParams()) for i in range(count)]
        deadline = timeout and asyncio.get_running_loop().time() + timeout
        texts = dict.fromkeys(range(count), "")
        async for which, pieces in merge_streams([engine.generate(ask) for ask in asks], deadline):
            texts[which] += "".join(piece.delta.text for piece in pieces)
        return texts

    assert asyncio.run(run()) == {i: chr(65 + i) * 3 for i in range(count)}
    assert engine.open == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_deadline_holds_while_nothing_comes(count: int) -> None:
    engine = FakeEngine()
    engine.pause = 60.0

    async def run() -> None:
        sources = [engine.generate(GenerationRequest([65], SamplingParams())) for _ in range(count)]
        async for _ in merge_streams(sources, asyncio.get_running_loop().time() + 0.01):
            pass

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert engine.open == 0 and engine.aborted == count


def test_events_are_json_and_go_together() -> None:
    events = Events({"id": "x", "model": 'a"b'})
    said = events.encode([{"index": 0, "text": "naïve \u2028\n", "logprobs": None}, {"index": 1, "text": ""}])
    lines = said.decode().split("\n\n")
    assert lines.pop() == "" and len(lines) == 2
    first, second = (json.loads(line.removeprefix("data: ")) for line in lines)
    assert first == {
        "id": "x", "model": 'a"b', "choices": [{"index": 0, "text": "naïve \u2028\n", "logprobs": None}]
    }  # fmt: skip
    assert second["choices"][0]["index"] == 1 and events.encode([]) == b""


class DyingEngine(ProcessClient):
    """Its process serves, and ends, each time."""

    lives = 0

    async def _run(self, generation: int) -> bool:
        self.lives += 1
        await self._set_state(State.READY)
        await asyncio.sleep(0)
        return True


def test_an_engine_that_waits_to_be_started_again_is_not_when_the_server_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nibble.server.engine_client.FIRST_PAUSE_S", 3600.0)

    async def run() -> None:
        client = DyingEngine(Config(model="demo"))
        await client.start()
        while client.state is not State.STARTING:
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await client.stop()
        assert (client.lives, client.state) == (1, State.DEAD)

    asyncio.run(run())


def test_a_request_to_an_engine_that_has_just_died_ends_at_once() -> None:
    """The socket has nobody at its other end, and the server has not heard of it."""

    async def run() -> None:
        client = ProcessClient(Config(model="demo"))
        client.state = State.READY
        socket = client._socket = client._context.socket(zmq.PAIR)
        socket.bind("inproc://nobody")
        with pytest.raises(EngineDiedError, match="process ended"):
            async with asyncio.timeout(20):
                await anext(client.generate(GenerationRequest([1], SamplingParams())))
        socket.close()
        assert client.state is State.STARTING, "the server knows of it from now on"
        client.state = State.READY
        with pytest.raises(EngineDiedError, match="process ended"):
            await anext(client.generate(GenerationRequest([1], SamplingParams())))
        await client.stop()

    asyncio.run(run())


def test_a_process_that_cannot_be_understood_is_ended() -> None:
    """Else its requests would wait for ever."""

    async def run() -> list[bool]:
        killed = []

        class Socket:
            async def recv(self) -> bytes:
                return b"no message"

        class Process:
            returncode = None

            def kill(self) -> None:
                killed.append(True)

        client = ProcessClient(Config(model="demo"))
        socket: Any = Socket()
        process: Any = Process()
        await client._listen(socket, process)
        await client.stop()
        return killed

    assert asyncio.run(run()) == [True]
