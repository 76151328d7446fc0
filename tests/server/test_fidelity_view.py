"""What a server tells of its fidelity watch: metrics by layer, a warning in /health, and a real one from end to end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from test_metrics import STATS, WATCH, meters_of, read

from conftest import FakeEngine, FakeTokens, running  # type: ignore[attr-defined]
from nibble.server import worker as wire
from nibble.server.app import make_app
from nibble.server.engine_client import State
from nibble.server.fidelity import fidelity_warning
from nibble.server.settings import Settings

ABOUT: dict[str, Any] = {
    "groups": [{"layers": [0, 1], "scheme": "fp8_e4m3"}, {"layers": [12], "scheme": "nvfp4"}]
}


def watched(**changes: float) -> FakeEngine:
    engine = FakeEngine()
    engine.ready = wire.Ready(64, 256, ABOUT)
    engine.stats = {**STATS, **WATCH, **changes}
    return engine


def told(found: Any) -> dict[tuple[str, ...], float]:
    return {key: value for key, value in found.items() if key[0].startswith("kv_fidelity")}


def test_metrics_have_layers_and_schemes() -> None:
    assert told(read(meters_of(watched()))) == {
        ("kv_fidelity_samples_total",): 7, ("kv_fidelity_alerts_total",): 2, ("kv_fidelity_alert",): 1,
        ("kv_fidelity_skipped_total", "cached"): 4, ("kv_fidelity_skipped_total", "long"): 1,
        ("kv_fidelity_error", "0", "fp8_e4m3"): 0.04, ("kv_fidelity_own", "0", "fp8_e4m3"): 0.05,
        ("kv_fidelity_limit", "0", "fp8_e4m3"): 0.105, ("kv_fidelity_error", "12", "nvfp4"): 0.5,
        ("kv_fidelity_own", "12", "nvfp4"): 0.1, ("kv_fidelity_limit", "12", "nvfp4"): 0.205,
    }  # fmt: skip


def test_layers_with_states_are_named_as_not_covered() -> None:
    engine = watched(fidelity_uncovered_layers=6.0)
    assert told(read(meters_of(engine)))["kv_fidelity_uncovered_layers",] == 6


def test_there_are_none_without_a_watch_and_gauges_only_while_it_serves() -> None:
    engine = watched()
    engine.stats = STATS
    assert not told(read(meters_of(engine)))
    gone = watched()
    gone.state = State.DEAD
    assert {key[0] for key in told(read(meters_of(gone)))} == {
        f"kv_fidelity_{name}_total" for name in ("samples", "alerts", "skipped")
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fidelity_alert": 0.0}, None),
        ({}, "off by 50.0% of its norm in layer 12, where 20.5% is allowed"),
        (
            {"fidelity_error_0": float("inf"), "fidelity_limit_0": float("inf")},
            "off by inf% of its norm in layer 0",
        ),
    ],
)
def test_a_warning_leaves_the_server_ready(changes: dict[str, float], words: str | None) -> None:
    engine = watched(**changes)
    assert (fidelity_warning(engine.stats) is None) is (words is None)

    async def ask() -> httpx.Response:
        app = make_app(engine, FakeTokens(), "m", Settings())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.get("/health")

    answer = asyncio.run(ask())
    assert answer.status_code == 200 and answer.json()["status"] == "ready"
    if words is None:
        assert "warning" not in answer.json()
    else:
        assert words in answer.json()["warning"]


@pytest.mark.slow
def test_a_real_server_tells() -> None:
    options = ("--kv-format", "nvfp4", "--kv-memory", "64MiB", "--max-running", "8", "--watch-fidelity", "1")
    with running(*options, "--fidelity-alert", "0.0001") as url:
        asked = {
            "model": "demo",
            # Longer than the exact window, which has no error to tell of.
            "prompt": "def fibonacci(n):\n    if n < 2" * 8,
            "max_tokens": 8,
            "ignore_eos": True,
        }
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=300).status_code == 200
        end = time.monotonic() + 300
        while "warning" not in (health := httpx.get(f"{url}/health").json()) and time.monotonic() < end:
            time.sleep(0.2)
        assert health["status"] == "ready" and "0.0% is allowed" in health["warning"]
        text = httpx.get(f"{url}/metrics").text
        assert 'nibble:kv_fidelity_samples_total{model_name="demo"} 1.0' in text
        assert 'nibble:kv_fidelity_error{layer="2",model_name="demo",scheme="nvfp4+kmean+rot"} 0.' in text
