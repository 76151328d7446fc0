"""A front's view of engines elsewhere, and the replica at the other end: over a handle that behaves as Serve's does."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.config import Config, SamplingParams
from nibble.engine.request import Delta
from nibble.errors import RequestError
from nibble.ray.client import ClusterClient, as_text, as_tokens
from nibble.ray.engine import Engine
from nibble.server.engine_client import PROCESS_ENDED, EngineDiedError, GenerationRequest, Piece, State
from nibble.server.settings import Settings
from nibble.server.worker import Ready

REQUEST = GenerationRequest(
    [1, 2, 3], SamplingParams(max_tokens=3, seed=1, stop=("x",)), salt="s", priority=2
)
READY = Ready(64, 100, {"meaning": "m", "routes": []})


async def settled() -> None:
    """Let tasks go on, as far as they do without waiting for time to pass."""
    for _ in range(100):
        await asyncio.sleep(0)


class ReplicaDied(Exception):
    pass


class Local:
    """An engine in this process: answers with three tokens, or as it is told."""

    def __init__(self) -> None:
        self.state, self.ready, self.stats = State.READY, READY, {"running": 1.0, "time": 5.0}
        self.seen: list[GenerationRequest] = []
        self.closed = 0
        self.resets = 0
        self.error: Exception | None = None
        self.fails_at = 8
        self.supervisor: asyncio.Task[None] = asyncio.get_running_loop().create_task(asyncio.Event().wait())  # type: ignore[arg-type]

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.state = State.DEAD

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Piece]]:
        self.seen.append(request)
        try:
            for token in (7, 8, 9):
                if self.error and token == self.fails_at:
                    raise self.error
                await asyncio.sleep(0)
                finish: Any = "length" if token == 9 else None
                yield [Piece(Delta(0, f"t{token}", (token,), finish), 2, ((0.0, 1),), started=1e9)]
        finally:
            self.closed += 1


class Handle:
    """A DeploymentHandle over engines. plan: what happens to each call of generate(), in turn."""

    def __init__(self, engines: list[Engine], plan: list[str] | None = None) -> None:
        self.engines, self.plan, self.sent = engines, plan or [], []
        self.cancelled = 0

    def options(self, **options: Any) -> Any:
        if method := options.get("method_name"):
            return SimpleNamespace(remote=getattr(self.engines[0], method))
        return SimpleNamespace(generate=SimpleNamespace(remote=self._generate))

    def broadcast(self, method: str) -> Any:
        async def results(**_: Any) -> list[Any]:
            return await asyncio.gather(
                *(getattr(one, method)() for one in self.engines), return_exceptions=True
            )

        return SimpleNamespace(results_async=results)

    def _generate(self, request: Any) -> Any:
        # Arguments travel pickled.
        self.sent.append(request)
        happens = self.plan.pop(0) if self.plan else "answer"
        return Stream(self, self.engines[0].generate(pickle.loads(pickle.dumps(request))), happens)


class Stream:
    def __init__(self, handle: Handle, source: AsyncGenerator[bytes], happens: str) -> None:
        self._handle, self._source, self._happens = handle, source, happens

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes:
        if self._happens == "dies at once":
            raise ReplicaDied
        try:
            return await anext(self._source)
        finally:
            if self._happens == "dies later":
                self._happens = "dies at once"
            if self._happens == "ends early":
                self._source = _nothing()

    def cancel(self) -> None:
        self._handle.cancelled += 1
        asyncio.get_running_loop().create_task(self._source.aclose())


async def _nothing() -> AsyncGenerator[bytes]:
    return
    yield b""


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def setup(plan: list[str] | None = None, **options: Any) -> tuple[ClusterClient, Local, Handle]:
    local = Local()
    engine = Engine(Config(model="demo"), Settings(), new_client=lambda *_, **__: local, end=lambda _: None)
    handle = Handle([engine], plan)
    return ClusterClient(handle, (ReplicaDied,), **options), local, handle


async def answer(client: ClusterClient, request: GenerationRequest = REQUEST) -> list[Piece]:
    return [piece async for pieces in client.generate(request) for piece in pieces]


def test_an_answer_crosses_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client, local, _ = setup()
        pieces = await answer(client)
        assert [piece.delta for piece in pieces] == [
            Delta(0, "t7", (7,)), Delta(0, "t8", (8,)), Delta(0, "t9", (9,), "length")
        ]  # fmt: skip
        assert {piece.cached for piece in pieces} == {2}
        assert local.seen == [REQUEST]
        # The engine's clock is another host's: only what it waited crosses.
        assert all(piece.started and piece.started != 1e9 for piece in pieces)

    run(main)


def test_text_for_ray_s_router_is_tokens_again_at_the_engine() -> None:
    async def main() -> None:
        client, local, handle = setup(as_text=True)
        await answer(client)
        assert isinstance(handle.sent[0].prompt, str)
        assert len(handle.sent[0].prompt) == 3
        assert local.seen == [REQUEST]

    run(main)
    largest = replace(REQUEST, prompt=[0, 1_000_000])
    assert as_tokens(as_text(largest)) == largest


def test_a_request_is_sent_again_whose_answer_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.ray.client.PAUSE_S", 0.001)

    async def main() -> None:
        client, _, handle = setup(["dies at once", "dies at once"])
        assert len(await answer(client)) == 3
        assert len(handle.sent) == 3

    run(main)


def test_a_request_is_not_sent_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.ray.client.PAUSE_S", 0.001)

    async def main() -> None:
        client, _, handle = setup(["dies at once"] * 99)
        with pytest.raises(EngineDiedError, match="the rest of the answer is lost"):
            await answer(client)
        assert 2 <= len(handle.sent) <= 10

    run(main)


def test_a_request_that_ends_engines_is_not_shown_to_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.ray.client.PAUSE_S", 0.001)

    async def main() -> None:
        client, local, handle = setup()
        local.error, local.fails_at = EngineDiedError(f"{PROCESS_ENDED} (a cause)"), 7
        with pytest.raises(EngineDiedError, match="a cause"):
            await answer(client)
        assert len(handle.sent) == 2

    run(main)


@pytest.mark.parametrize("death", ["dies later", "ends early"])
def test_an_answer_that_had_begun_ends_with_an_error(death: str) -> None:
    async def main() -> None:
        client, _, handle = setup([death])
        seen = []
        with pytest.raises(EngineDiedError, match="the rest of the answer is lost"):
            async for pieces in client.generate(REQUEST):
                seen += pieces
        assert len(seen) == 1
        assert len(handle.sent) == 1

    run(main)


def test_errors_of_the_engine_cross_with_their_status() -> None:
    async def main() -> None:
        client, local, _ = setup()
        local.error = RequestError("too long", 413, "large")
        with pytest.raises(RequestError, match="too long") as caught:
            await answer(client)
        assert (caught.value.status, caught.value.code) == (413, "large")
        local.error = EngineDiedError("gone", "OutOfPages")
        with pytest.raises(EngineDiedError, match="gone") as died:
            await answer(client)
        assert died.value.kind == "OutOfPages"

    run(main)


def test_a_client_that_goes_ends_the_request_at_the_engine() -> None:
    async def main() -> None:
        client, local, handle = setup()
        stream = client.generate(REQUEST)
        await anext(stream)
        await stream.aclose()
        await settled()
        assert handle.cancelled == 1
        assert local.closed == 1
        # One that is complete is not cancelled.
        await answer(client)
        assert handle.cancelled == 1

    run(main)


def test_the_router_is_told_of_first_and_last_tokens() -> None:
    notes: list[Any] = []

    async def main() -> None:
        client, _, _ = setup(
            on_start=lambda request: notes.append(request is REQUEST),
            on_finish=lambda request, tokens: notes.append((request is REQUEST, tokens)),
        )
        await answer(client)

    run(main)
    assert notes == [True, (True, 3)]


def test_the_state_follows_the_engines() -> None:
    async def main() -> None:
        client, local, handle = setup()
        assert (client.state, client.ready) == (State.STARTING, None)
        watching = asyncio.create_task(client.watch())
        await client.changed.wait()
        await settled()
        assert (client.state, client.num_engines) == (State.READY, 1)
        assert client.ready is not None
        assert client.ready.max_context == 64
        assert client.stats == local.stats
        watching.cancel()
        # Serve exchanges engines for others one after the other; the shorter context holds until the last is gone.
        (newer,) = setup()[2].engines
        newer._client.ready = Ready(32, 100, {"meaning": "m", "routes": []})
        handle.engines.append(newer)
        await client._poll()
        assert client.ready.max_context == 32
        newer._client.ready = Ready(128, 100, {"meaning": "m", "routes": []})
        handle.engines.pop(0)
        await client._poll()
        assert client.ready.max_context == 128
        handle.engines = []
        await client._poll()
        assert (client.state, dict(client.stats)) == (State.STARTING, {})

    run(main)


def test_all_engines_forget_their_prefixes_or_it_is_an_error() -> None:
    async def main() -> None:
        client, local, handle = setup()
        await client.reset_prefix_cache()
        assert local.resets == 1

        handle.engines = []
        with pytest.raises(EngineDiedError, match="not all engines"):
            await client.reset_prefix_cache()

    run(main)


def test_a_replica_ends_after_its_engine_and_is_unhealthy_before() -> None:
    codes: list[int] = []

    async def main() -> None:
        local = Local()
        engine = Engine(Config(model="demo"), Settings(), new_client=lambda *_, **__: local, end=codes.append)
        await engine.start()
        await engine.check_health()
        local.state = State.DEAD
        with pytest.raises(EngineDiedError, match="dead"):
            await engine.check_health()
        local.supervisor.cancel()
        for _ in range(6000):
            await asyncio.sleep(0.02)
            if codes:
                break

    run(main)
    assert codes == [1]


def test_to_stop_a_replica_leaves_its_supervisor_to_end_by_itself() -> None:
    codes: list[int] = []

    async def main() -> None:
        local = Local()
        engine = Engine(Config(model="demo"), Settings(), new_client=lambda *_, **__: local, end=codes.append)
        await engine.start()
        await asyncio.sleep(0)
        await engine.stop()
        await settled()
        assert not local.supervisor.cancelled()

    run(main)
    assert codes == []
