"""What the server counts, and what Prometheus reads of it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

import nibble
from conftest import FakeEngine  # type: ignore[attr-defined]
from nibble.cache.states import StateStats
from nibble.config import SamplingParams
from nibble.errors import NibbleError
from nibble.server import worker as wire
from nibble.server.engine_client import EngineDiedError, GenerationRequest, State
from nibble.server.metrics import COUNTERS, GAUGES, Metrics
from nibble.server.tracing import HttpLog, RequestLogMiddleware

STATS = {
    "waiting": 3, "running": 5, "steps": 70, "decode_tokens": 200, "prompt_tokens": 90, "preemptions": 2,
    "preempted_tokens": 48, "finished": 9, "cache_total": 100, "cache_free": 30, "cache_in_use": 60,
    "cache_cached": 50, "cache_idle": 10, "cache_evicted": 7, "cache_lookup_tokens": 400, "cache_hit_tokens": 100,
}  # fmt: skip
TIER = {
    "tier_frames": 50, "tier_free": 10, "tier_idle": 5, "tier_hot": 16, "tier_spilled": 1, "tier_saved": 21,
    "tier_loaded": 12, "tier_dropped": 11,
}  # fmt: skip
WINDOW = {
    "window_total": 40, "window_free": 12, "window_in_use": 20, "window_idle": 8, "window_attached": 11,
    "window_evicted": 3, "window_snapshot_hits": 6, "window_snapshot_misses": 2, "window_replayed_tokens": 96,
}  # fmt: skip
STATES = {
    "states_total": 9, "states_free": 2, "states_in_use": 4, "states_idle": 3, "states_attached": 5,
    "states_evicted": 2, "states_snapshot_hits": 7, "states_snapshot_misses": 1, "states_replayed_tokens": 48,
}  # fmt: skip
DRAFTS = {
    "drafts_steps": 4, "drafts_drafted": 20, "drafts_accepted": 9, "drafts_accepted_at_0": 4, "drafts_accepted_at_1": 5,
}  # fmt: skip
WATCH = {
    "fidelity_samples": 7, "fidelity_alerts": 2, "fidelity_alert": 1, "fidelity_skipped_cached": 4,
    "fidelity_skipped_long": 1, "fidelity_error_0": 0.04, "fidelity_own_0": 0.05, "fidelity_limit_0": 0.105,
    "fidelity_error_12": 0.5, "fidelity_own_12": 0.1, "fidelity_limit_12": 0.205,
}  # fmt: skip
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
Samples = dict[tuple[str, ...], float]


class Clock:
    """Seconds, as a test has them pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def meters_of(engine: FakeEngine | None = None, clock: Clock | None = None) -> Metrics:
    return Metrics(engine or FakeEngine(), "m", clock or Clock())


def read(meters: Metrics) -> Samples:
    """Samples by name without `nibble:`, and values of labels other than the model's."""
    text, kind = meters.render()
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("nibble:") and "version" not in labels:
                assert labels.pop("model_name") == "m"
                assert family.documentation and not sample.name.endswith("_created")
            found[(sample.name.removeprefix("nibble:"), *labels.values())] = sample.value
    return found


# Requests


def test_a_request_is_timed() -> None:
    clock = Clock()
    meters = meters_of(clock=clock)
    timer = meters.start_request(7)
    for tokens, seconds in ((1, 0.5), (1, 0.2), (0, 9.0), (4, 0.4)):  # no tokens: text that was held back
        clock.now += seconds
        timer.add_tokens(tokens)
    clock.now += 0.4
    timer.end("stop")
    timer.end("abort")
    found = read(meters)
    assert found["time_to_first_token_seconds_count",] == 1
    assert found["time_to_first_token_seconds_sum",] == pytest.approx(0.5)
    assert found["inter_token_latency_seconds_count",] == 5
    assert found["inter_token_latency_seconds_sum",] == pytest.approx(0.2 + 9.4)
    assert found["inter_token_latency_seconds_bucket", "0.3"] == 1
    assert found["inter_token_latency_seconds_bucket", "2.5"] == 5
    assert found["request_time_per_output_token_seconds_sum",] == pytest.approx(9.6 / 5)
    assert found["e2e_request_latency_seconds_sum",] == pytest.approx(10.5)
    assert found["request_prompt_tokens_sum",] == found["prompt_tokens_total",] == 7
    assert found["request_generation_tokens_sum",] == found["generation_tokens_total",] == 6
    ended = {key[1]: value for key, value in found.items() if key[0] == "request_success_total"}
    assert ended == {"stop": 1, "length": 0, "abort": 0, "error": 0}


def test_answers_of_a_request_are_timed_apart() -> None:
    clock = Clock()
    meters = meters_of(clock=clock)
    timer = meters.start_request(2, num_answers=2)
    for answer, reason in ((0, None), (1, None), (0, "stop"), (1, "length")):
        clock.now += 1.0
        timer.add_tokens(1, answer, reason)
    found = read(meters)
    assert found["time_to_first_token_seconds_count",] == 1
    assert (found["inter_token_latency_seconds_count",], found["inter_token_latency_seconds_sum",]) == (2, 4)
    assert found["request_success_total", "length"] == 1 and found["request_success_total", "stop"] == 0
    assert found["e2e_request_latency_seconds_sum",] == 4


def test_a_request_without_tokens_has_no_latency_of_tokens() -> None:
    meters = meters_of()
    meters.start_request(3).add_tokens(0, reason="stop")
    meters.start_request(5).end("abort")  # before its prompt was read
    found = read(meters)
    assert found["time_to_first_token_seconds_count",] == found["inter_token_latency_seconds_count",] == 0
    assert found["request_success_total", "stop"] == found["request_success_total", "abort"] == 1
    assert found["prompt_tokens_total",] == 3 and found["request_prompt_tokens_sum",] == 8


async def _all(engine: FakeEngine, meters: Metrics, prompt: list[int], n: int, stop_after: int) -> int:
    ask, seen = GenerationRequest(prompt, SamplingParams(max_tokens=8, n=n, temperature=0)), 0
    pieces = meters.start_request(len(prompt), n).observe(engine.generate(ask))
    try:
        async for _ in pieces:
            seen += 1
            if seen == stop_after:
                break
    finally:
        await pieces.aclose()
    return seen


@pytest.mark.parametrize(
    ("n", "stop_after", "dies_after", "reason", "tokens"),
    [
        (1, 99, None, "length", 3),
        (2, 99, None, "length", 6),
        (1, 3, None, "length", 3),  # nobody asked whether there was more
        (2, 4, None, "abort", 4),
        (1, 99, 2, "error", 2),
    ],
)
def test_pieces_go_through_and_are_timed(
    n: int, stop_after: int, dies_after: int | None, reason: str, tokens: int
) -> None:
    engine = FakeEngine()
    meters, engine.dies_after = meters_of(engine), dies_after
    run = _all(engine, meters, [65, 66, 67], n, stop_after)
    if dies_after is None:
        assert asyncio.run(run) == tokens
    else:
        with pytest.raises(EngineDiedError):
            asyncio.run(run)
    found = read(meters)
    assert engine.open == 0, "the engine's pieces were not closed"
    assert found["request_success_total", reason] == found["e2e_request_latency_seconds_count",] == 1
    assert found["generation_tokens_total",] == tokens and found["prompt_tokens_total",] == 3


def test_a_refused_request_leaves_nothing() -> None:
    meters = meters_of()
    with pytest.raises(NibbleError, match="too long"):
        asyncio.run(_all(FakeEngine(), meters, [1] * 99, 1, 99))
    found = read(meters)
    assert found["e2e_request_latency_seconds_count",] == found["prompt_tokens_total",] == 0
    assert sum(value for key, value in found.items() if key[0] == "request_success_total") == 0


# The engine's numbers


def test_numbers_of_the_engine() -> None:
    engine = FakeEngine()
    meters = meters_of(engine)
    engine.stats, engine.restarts = STATS | TIER | WINDOW | STATES, 2  # read when asked, and not before
    found = read(meters)
    assert found["num_requests_running",] == 5 and found["num_requests_waiting",] == 3
    assert found["kv_cache_usage_perc",] == 0.6
    pages = {key[1]: value for key, value in found.items() if key[0] == "kv_cache_pages"}
    assert pages == {"held": 60, "idle": 10, "free": 30}
    frames = {key[1]: value for key, value in found.items() if key[0] == "host_tier_frames"}
    assert frames == {"free": 10, "idle": 5, "hot": 16, "held": 19}
    exact = {key[1]: value for key, value in found.items() if key[0] == "kv_window_pages"}
    assert exact == {"held": 20, "idle": 8, "free": 12} and found["kv_window_snapshot_pages",] == 11
    slots = {key[1]: value for key, value in found.items() if key[0] == "recurrent_state_slots"}
    assert slots == {"held": 4, "idle": 3, "free": 2} and found["recurrent_state_snapshots",] == 5
    for name, value in {
        "prefix_cache_queries": 400, "prefix_cache_hits": 100, "num_preemptions": 2, "engine_restarts": 2,
        "host_tier_saved_pages": 21, "host_tier_loaded_pages": 12, "host_tier_dropped_pages": 11,
        "host_tier_spilled_requests": 1, "prefill_tokens_computed": 90, "kv_window_snapshot_hits": 6,
        "kv_window_snapshot_misses": 2, "kv_window_replayed_tokens": 96, "kv_window_evicted_pages": 3,
        "recurrent_state_hits": 7, "recurrent_state_misses": 1, "recurrent_state_replayed_tokens": 48,
        "recurrent_state_evicted_slots": 2,
    }.items():  # fmt: skip
        assert found[f"{name}_total",] == value
    assert found["engine_up",] == 1


def test_numbers_of_an_engine_that_is_not_there() -> None:
    engine = FakeEngine()
    meters, engine.state = meters_of(engine), State.STARTING
    found = read(meters)
    assert found["engine_up",] == 0 and found["prefix_cache_hits_total",] == 0
    engine.stats = STATS
    found = read(meters)
    assert ("num_requests_running",) not in found, "how things stood when it died is not how they stand"
    assert found["prefix_cache_hits_total",] == 100
    assert not [key for key in found if key[0].startswith(("host_tier", "kv_window", "recurrent_state"))]


def test_all_that_is_read_of_the_engine_is_there() -> None:
    """The names are those of the scheduler's Metrics, the cache's, the exact window's and the host tier's; and of
    recurrent states, which this model has not."""
    from nibble.engine.llm import LLM
    from nibble.server.worker import engine_stats

    llm = LLM("demo-mla", kv_format="nvfp4_ds_mla", kv_window=64, hisparse="on", kv_memory="64MiB")
    llm.generate("def f(", max_tokens=2)
    there = engine_stats(llm) | {f"states_{entry.name}": 0.0 for entry in fields(StateStats)}
    assert {row.key for row in (*GAUGES, *COUNTERS)} - set(there) == {"tier_held"}, "which is worked out"
    assert set(STATS | TIER | WINDOW | STATES) == set(there), (
        "what these tests feed is not what an engine says"
    )


# HTTP


def test_exchanges_are_counted_by_route() -> None:
    meters = meters_of()
    app = FastAPI()

    @app.get("/models/{name:path}")
    async def model(name: str) -> str:
        if name == "bad":
            raise ValueError
        return name

    @app.post("/tokenize")
    async def tokenize() -> None: ...

    app.add_middleware(RequestLogMiddleware, sinks=[meters.count_http])

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in ("/models/a", "/models/b/c", "/models/bad", "/nothing/1", "/nothing/2"):
                await client.get(path)
            await client.post("/tokenize")
            await client.request("BREW", "/tokenize")

    asyncio.run(ask())
    counted = {key[1:]: value for key, value in read(meters).items() if key[0] == "http_requests_total"}
    assert counted == {
        ("GET", "/models/{name:path}", "200"): 2, ("GET", "/models/{name:path}", "500"): 1,
        ("GET", "other", "404"): 2, ("POST", "/tokenize", "200"): 1, ("other", "/tokenize", "405"): 1,
    }  # fmt: skip


def test_what_is_refused_before_its_route_is_counted_by_its_path() -> None:
    meters = meters_of()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = FastAPI()
        scope["app"].get("/known")(lambda: None)
        if scope["path"] != "/gone":
            await send({"type": "http.response.start", "status": 401, "headers": []})

    async def ask(path: str) -> None:
        async def nothing(*_: Any) -> Any: ...

        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        await RequestLogMiddleware(app, [meters.count_http])(scope, nothing, nothing)

    for path in ("/known", "/unknown", "/gone"):
        asyncio.run(ask(path))
    counted = {key[1:]: value for key, value in read(meters).items() if key[0] == "http_requests_total"}
    assert counted == {("GET", "/known", "401"): 1, ("GET", "other", "401"): 1, ("GET", "other", "499"): 1}


# The dashboard


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    engine = FakeEngine()
    meters, engine.stats = meters_of(engine), STATS | TIER | WINDOW | WATCH
    meters.count_http(HttpLog("1", "GET", "/health", {}))
    there = {key[0] for key in read(meters)}
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"nibble:(\w+)", target["expr"])
    }
    assert len(asked) > 20 and asked <= there, asked - there
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    titles = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert titles == ["Traffic", "Latency", "Cache", "Exact window", "Host tier", "Fidelity"]


def test_the_version_is_a_label() -> None:
    assert f'nibble:build_info{{version="{nibble.__version__}"}} 1.0' in meters_of().render()[0].decode()


def test_drafts_by_drafter_and_position() -> None:
    engine = FakeEngine()
    engine.stats = {**DRAFTS}
    engine.ready = wire.Ready(64, 256, {"drafter": "lookup"})
    found = read(meters_of(engine))
    assert found["spec_decode_num_drafts_total", "lookup"] == 4
    assert found["spec_decode_num_draft_tokens_total", "lookup"] == 20
    assert found["spec_decode_num_accepted_tokens_total", "lookup"] == 9
    assert found["spec_decode_num_accepted_tokens_per_pos_total", "lookup", "1"] == 5
    assert not any("spec_decode" in name for name, *_ in read(meters_of()))
