"""A front without Ray: the routes of `nibble serve`, at the root and under a prefix as Serve mounts it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from nibble.config import Config
from nibble.errors import ConfigError
from nibble.ray.front import Front, check
from nibble.server.app import make_app
from nibble.server.settings import Settings
from unit.cluster.test_ray_client import setup


def front(**settings: Any) -> Front:
    client, local, _ = setup()
    client.ready, client.state = local.ready, local.state
    return Front(Config(model="demo"), Settings(**settings), client)


async def get(app: Any, path: str, prefix: str = "", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app, root_path=prefix)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        return await client.get(path, headers=headers)


def test_the_routes_are_those_of_nibble_serve() -> None:
    async def main() -> None:
        client, _, _ = setup()
        plain = make_app(client, None, "demo", Settings())
        assert [route.path for route in front().app.routes] == [route.path for route in plain.routes]

    asyncio.run(main())


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_paths_under_a_prefix_and_what_needs_no_key(prefix: str) -> None:
    async def main() -> None:
        app = front(api_key="KEY").app
        assert (await get(app, f"{prefix}/health", prefix)).status_code == 200
        assert (await get(app, f"{prefix}/v1/models", prefix)).status_code == 401
        answer = await get(app, f"{prefix}/v1/models", prefix, authorization="Bearer KEY")
        assert [one["id"] for one in answer.json()["data"]] == ["demo"]
        assert (await get(app, f"{prefix}/nothing", prefix, authorization="Bearer KEY")).status_code == 404
        refused = await get(app, f"{prefix}/v1/messages", prefix)
        assert refused.json()["type"] == "error"  # in Anthropic's shape

    asyncio.run(main())


def test_the_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_API_KEY", "SECRET")

    async def main() -> None:
        app = front().app
        assert (await get(app, "/v1/models")).status_code == 401
        assert (await get(app, "/v1/models", authorization="Bearer SECRET")).status_code == 200

    asyncio.run(main())


def test_an_answer_goes_through_all_of_it() -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(front().app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 3}
            whole = (await client.post("/v1/completions", json=body)).json()
            assert whole["choices"][0]["text"] == "t7t8t9"
            assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
            streamed = await client.post("/v1/completions", json={**body, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")

    asyncio.run(main())


def test_unknown_names_are_refused_before_anything_is_deployed() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        check(Config(model="demo"), Settings(tool_format="nonsense"))
    with pytest.raises(ConfigError, match="prefix_cache: false turns off"):
        check(Config(model="demo", prefix_cache=False), Settings(kv_events="tcp://*:5557"))
