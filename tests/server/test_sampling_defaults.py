"""Sampling defaults of the model in the server: a request's own fields win, and clients can see them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from conftest import FakeEngine, FakeTokens, running
from nibble import SamplingParams
from nibble.models.generation_config import SamplingDefaults
from nibble.server import worker as wire
from nibble.server.app import make_app
from nibble.server.settings import Settings
from tiny import save_tiny, set_generation_config

DEFAULTS = SamplingDefaults({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, "generation_config.json")


def test_they_travel_with_the_engines_message() -> None:
    event = wire.Ready(64, 256, {}, DEFAULTS)
    again = wire.decode_event(wire.encode(event))
    assert again == event and isinstance(again, wire.Ready)
    assert isinstance(again.sampling_defaults.values["top_k"], int)


def test_what_a_request_leaves_out_is_the_models_own() -> None:
    engine = FakeEngine()
    engine.ready = wire.Ready(64, 256, {}, DEFAULTS)
    app = make_app(engine, FakeTokens(), "m", Settings())  # type: ignore[arg-type]

    async def run() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            (entry,) = (await client.get("/v1/models")).json()["data"]
            assert entry["default_sampling_params"] == DEFAULTS.values
            for fields in (
                {},
                {"temperature": None},
                {"temperature": 0, "top_k": -1},
                {"top_p": 0.5, "min_p": 0.1},
            ):
                text = {"model": "m", "prompt": "hello", **fields}
                chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
                for path, body in (("completions", text), ("chat/completions", chat)):
                    assert (await client.post(f"/v1/{path}", json=body)).status_code == 200

    asyncio.run(run())
    own = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    expected = [
        own,
        own,
        SamplingParams(temperature=0.0, top_p=0.95),
        SamplingParams(temperature=0.6, top_p=0.5, top_k=20, min_p=0.1),
    ]
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = [[getattr(request.params, name) for name in names] for request in engine.requests]
    assert found == [[getattr(params, name) for name in names] for params in expected for _ in range(2)]


@pytest.mark.slow
def test_a_real_server(tmp_path: Path) -> None:
    folder = set_generation_config(save_tiny(tmp_path), temperature=0.5, top_k=1)
    with running("--kv-memory", "4MiB", "--max-running", "4", model=str(folder)) as url:
        (entry,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert entry["default_sampling_params"] == {"temperature": 0.5, "top_k": 1}
        body = {"model": folder.name, "prompt": "hello", "max_tokens": 12}

        def answer(**fields: float) -> str:
            return str(
                httpx.post(f"{url}/v1/completions", json={**body, **fields}).json()["choices"][0]["text"]
            )

        # Of one token nothing is left to draw.
        assert answer() == answer() == answer(temperature=0) != answer(top_k=0, temperature=2, seed=1)
