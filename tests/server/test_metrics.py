"""What the server counts, what Prometheus reads of it, and `nibble top`'s picture of that."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from typer.testing import CliRunner

import nibble
from conftest import FakeEngine  # type: ignore[attr-defined]
from nibble.cli import top
from nibble.cli.exits import command
from nibble.config import SamplingParams
from nibble.errors import ConfigError, NibbleError
from nibble.server.engine_client import Ask, EngineDiedError, State
from nibble.server.exchange import Exchange, Journal
from nibble.server.metrics import COUNTED, RUNNING, Meters

STATS = {
    "waiting": 3, "running": 5, "steps": 70, "decode_tokens": 200, "prompt_tokens": 90, "preemptions": 2,
    "preempted_tokens": 48, "finished": 9, "cache_total": 100, "cache_free": 30, "cache_held": 60,
    "cache_cached": 50, "cache_idle": 10, "cache_evicted": 7, "cache_lookup_tokens": 400, "cache_hit_tokens": 100,
}  # fmt: skip
TIER = {
    "tier_frames": 50, "tier_free": 10, "tier_idle": 5, "tier_hot": 16, "tier_spilled": 1, "tier_saved": 21,
    "tier_loaded": 12, "tier_dropped": 11,
}  # fmt: skip
WATCH = {
    "fidelity_samples": 7, "fidelity_alerts": 2, "fidelity_alert": 1, "fidelity_skipped_cached": 4,
    "fidelity_skipped_long": 1, "fidelity_error_0": 0.04, "fidelity_own_0": 0.05, "fidelity_limit_0": 0.105,
    "fidelity_error_12": 0.5, "fidelity_own_12": 0.1, "fidelity_limit_12": 0.205,
}  # fmt: skip
PLAN = {"model": "m", "groups": [{"scheme": "nvfp4"}], "bytes_per_token": 864, "ratio": 3.5556}
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
Samples = dict[tuple[str, ...], float]


class Clock:
    """Seconds, as a test has them pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def meters_of(engine: FakeEngine | None = None, clock: Clock | None = None) -> Meters:
    return Meters(engine or FakeEngine(), "m", clock or Clock())


def read(meters: Meters) -> Samples:
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
    timer = meters.request(7)
    for tokens, seconds in ((1, 0.5), (1, 0.2), (0, 9.0), (4, 0.4)):  # no tokens: text that was held back
        clock.now += seconds
        timer.piece(tokens)
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
    timer = meters.request(2, answers=2)
    for answer, reason in ((0, None), (1, None), (0, "stop"), (1, "length")):
        clock.now += 1.0
        timer.piece(1, answer, reason)
    found = read(meters)
    assert found["time_to_first_token_seconds_count",] == 1
    assert (found["inter_token_latency_seconds_count",], found["inter_token_latency_seconds_sum",]) == (2, 4)
    assert found["request_success_total", "length"] == 1 and found["request_success_total", "stop"] == 0
    assert found["e2e_request_latency_seconds_sum",] == 4


def test_a_request_without_tokens_has_no_latency_of_tokens() -> None:
    meters = meters_of()
    meters.request(3).piece(0, reason="stop")
    meters.request(5).end("abort")  # before its prompt was read
    found = read(meters)
    assert found["time_to_first_token_seconds_count",] == found["inter_token_latency_seconds_count",] == 0
    assert found["request_success_total", "stop"] == found["request_success_total", "abort"] == 1
    assert found["prompt_tokens_total",] == 3 and found["request_prompt_tokens_sum",] == 8


async def _all(engine: FakeEngine, meters: Meters, prompt: list[int], n: int, stop_after: int) -> int:
    ask, seen = Ask(prompt, SamplingParams(max_tokens=8, n=n)), 0
    pieces = meters.request(len(prompt), n).over(engine.generate(ask))
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
    engine.stats, engine.restarts = STATS | TIER, 2  # read when asked, and not before
    found = read(meters)
    assert found["num_requests_running",] == 5 and found["num_requests_waiting",] == 3
    assert found["kv_cache_usage_perc",] == 0.6
    pages = {key[1]: value for key, value in found.items() if key[0] == "kv_cache_pages"}
    assert pages == {"held": 60, "idle": 10, "free": 30}
    frames = {key[1]: value for key, value in found.items() if key[0] == "host_tier_frames"}
    assert frames == {"free": 10, "idle": 5, "hot": 16, "held": 19}
    for name, value in {
        "prefix_cache_queries": 400, "prefix_cache_hits": 100, "num_preemptions": 2, "engine_restarts": 2,
        "host_tier_saved_pages": 21, "host_tier_loaded_pages": 12, "host_tier_dropped_pages": 11,
        "host_tier_spilled_requests": 1, "prefill_tokens_computed": 90,
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
    assert not [key for key in found if key[0].startswith("host_tier")]


def test_all_that_is_read_of_the_engine_is_there() -> None:
    """The names are those of the scheduler's Metrics, the cache's and the host tier's."""
    from nibble.engine.llm import LLM
    from nibble.server.worker import numbers

    llm = LLM("demo-mla", hisparse="on", kv_memory="64MiB")
    llm.generate("def f(", max_tokens=2)
    there = numbers(llm)
    assert {row.key for row in (*RUNNING, *COUNTED)} - set(there) == {"tier_held"}, "which is worked out"
    assert set(STATS | TIER) == set(there), "what these tests feed is not what an engine says"


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

    app.add_middleware(Journal, sinks=[meters.exchanged])

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
        await Journal(app, [meters.exchanged])(scope, nothing, nothing)

    for path in ("/known", "/unknown", "/gone"):
        asyncio.run(ask(path))
    counted = {key[1:]: value for key, value in read(meters).items() if key[0] == "http_requests_total"}
    assert counted == {("GET", "/known", "401"): 1, ("GET", "other", "401"): 1, ("GET", "other", "499"): 1}


# The dashboard


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    engine = FakeEngine()
    meters, engine.stats = meters_of(engine), STATS | TIER | WATCH
    meters.exchanged(Exchange("1", "GET", "/health", {}))
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
    assert titles == ["Traffic", "Latency", "Cache", "Host tier", "Fidelity"]


# nibble top


def busy(clock: Clock, tier: bool = True) -> Meters:
    """Of a server that has answered one request of 10 tokens, one each 20 ms after 300 ms."""
    engine = FakeEngine()
    engine.stats = STATS | TIER if tier else STATS
    meters = meters_of(engine, clock)
    timer = meters.request(40)
    clock.now += 0.3
    timer.piece(1)
    for _ in range(9):
        clock.now += 0.02
        timer.piece(1)
    timer.end("stop")
    return meters


def scrape(meters: Meters, now: float) -> top.Scrape:
    return top.Scrape.of(meters.render()[0].decode(), now)


def words(figures: top.Figures, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(top.picture(figures, "http://here"))
    return capture.get()


def test_figures_of_what_is_new() -> None:
    clock = Clock()
    meters = busy(clock)
    first = scrape(meters, 10.0)
    for tokens in (1, 3):
        timer = meters.request(100)
        clock.now += 2.0
        timer.piece(tokens, reason="length")
    figures = top.figures_of([first, scrape(meters, 14.0)], PLAN)
    assert figures.prompt_tokens_per_s == 50 and figures.output_tokens_per_s == 1
    assert figures.requests_per_s == 0.5 and figures.ended == {"stop": 1, "length": 2, "abort": 0, "error": 0}
    assert figures.first_token.recent and 1 < (figures.first_token.p50 or 0) <= 2.5
    assert not figures.between_tokens.recent and 0.015 < (figures.between_tokens.p95 or 0) <= 0.025
    assert figures.hit_rate == 0.25 and not figures.hit_rate_recent
    assert figures.host_tier_pages["saved"] == 21 and figures.host_tier_frames["held"] == 19


def test_a_server_that_began_anew_has_no_negative_rates() -> None:
    clock = Clock()
    figures = top.figures_of([scrape(busy(clock), 1.0), scrape(meters_of(), 2.0)], {})
    assert figures.output_tokens_per_s == 0 and figures.between_tokens.p50 is None
    assert figures.hit_rate is None
    assert "prefix hits  -" in words(figures)


def test_the_picture() -> None:
    clock = Clock()
    looks = [scrape(meters_of(), 1.0), scrape(busy(clock), 2.0)]
    shown = words(top.figures_of(looks, PLAN))
    for expected in (
        "m at http://here: serving", "nvfp4, 864 bytes per token (3.56 x fewer than in 16 bits)",
        "running          5", "waiting          3", "output tokens/s  10.0", "prompt tokens/s  40.0", "1 stop",
        "60.0%", "60 held, 10 idle, 30 free", "25.0%", "preemptions  2", "21 saved, 12 loaded, 11 dropped",
        "10 free, 5 idle, 16 hot, 19 held", "spilled  1 requests",
    ):  # fmt: skip
        assert expected in shown, f"{expected!r} is not in\n{shown}"
    assert re.search(r"first token +\d+ ms", shown) and re.search(r"between tokens +\d+\.\d ms", shown)


def test_the_picture_fits_a_small_terminal() -> None:
    looks = [scrape(meters_of(), 1.0), scrape(busy(Clock()), 2.0)]
    lines = words(top.figures_of(looks, PLAN), width=80).splitlines()
    assert max(map(len, lines)) == 80 and len(lines) <= 20
    assert sum("between tokens" in line and " ms" in line for line in lines) == 1, "a row has been broken"


def test_the_picture_of_an_engine_that_is_not_there() -> None:
    engine = FakeEngine()
    meters, engine.state, engine.restarts = meters_of(engine), State.STARTING, 3
    look = scrape(meters, 1.0)
    shown = words(top.figures_of([look, look], {}))
    assert "the engine is not there, restarted 3 times" in shown and "none" in shown


def test_what_is_read_is_no_markup() -> None:
    text = 'nibble:request_success_total{finished_reason="[/bold]"} 2\n'
    look = top.Scrape.of(text, 1.0)
    assert "2 [/bold]" in words(top.figures_of([look, look], {"model": "[red]"}))


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ({1.0: 0, 2.0: 10, float("inf"): 10}, 0.5, 1.5),
        ({1.0: 5, 2.0: 10, float("inf"): 10}, 0.25, 0.5),
        ({1.0: 5, 2.0: 5, 4.0: 10, float("inf"): 10}, 0.75, 3.0),
        ({1.0: 0, 2.0: 0, float("inf"): 10}, 0.5, 2.0),
        ({1.0: 0, float("inf"): 0}, 0.5, None),
        ({}, 0.5, None),
    ],
)
def test_quantiles(counts: dict[float, float], share: float, value: float | None) -> None:
    assert top.quantile(counts, share) == value


@pytest.fixture
def canned() -> Iterator[str]:
    """A server whose answers never change, and that wants a key."""
    body, kind = busy(Clock()).render()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"/metrics": body, "/v1/plan": json.dumps(PLAN).encode(), "/else/metrics": b"up 1\n"}
            allowed = self.headers["Authorization"] == "Bearer sesame"
            said = found.get(self.path, b"") if allowed else b'{"error": {"message": "a key is needed"}}'
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    app = typer.Typer()
    app.command()(command(top.top))
    return lambda *args: CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, list(args))


def test_one_picture(canned: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(canned, "--once", "--interval", "0.05", "--api-key", "sesame")
    assert result.exit_code == 0, result.output
    assert f"m at http://{canned}: serving" in result.stdout and "running          5" in result.stdout
    monkeypatch.setenv("NIBBLE_API_KEY", "sesame")
    result = run(f"http://{canned}/", "--json", "--interval", "0.05")
    found = json.loads(result.stdout)
    assert found["running"] == 5 and found["first_token"]["p50"] and found["cache"].startswith("nvfp4")


@pytest.mark.parametrize(
    ("url", "key", "code", "said"),
    [
        ("{}", "wrong", 1, "/metrics says 401: a key is needed"),
        ("{}/else", "sesame", 1, "has no metrics of a nibble server"),
        ("127.0.0.1:1", "sesame", 1, "cannot reach http://127.0.0.1:1: "),
        ("ftp://here", "sesame", 2, "is not the address of a server"),
    ],
)
def test_what_cannot_be_watched(canned: str, run: Run, url: str, key: str, code: int, said: str) -> None:
    result = run(url.format(canned), "--once", "--api-key", key)
    assert result.exit_code == code and said in result.output


@pytest.mark.parametrize("url", ["http://", "http://[bad", "http://a b", "a:b", "http://user@here"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="localhost:8000"):
        top.Server(url, None)


def test_the_version_is_a_label() -> None:
    assert f'nibble:build_info{{version="{nibble.__version__}"}} 1.0' in meters_of().render()[0].decode()
