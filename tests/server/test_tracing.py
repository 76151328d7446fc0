"""Spans of requests, in OpenTelemetry's own memory, and the collector that a server sends them to."""

from __future__ import annotations

import asyncio
import builtins
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from test_app import CHAT, TEXT

from conftest import FakeEngine, FakeTokens, running  # type: ignore[attr-defined]
from nibble.errors import ConfigError
from nibble.server.app import make_app
from nibble.server.settings import Settings
from nibble.server.tracing import INSTALL, Tracer, tracer_to

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARTS = ["queue", "prefill", "decode"]


def spans_of(
    *asked: tuple[str, dict[str, Any], dict[str, str]], engine: FakeEngine | None = None
) -> Sequence[ReadableSpan]:
    """What requests leave behind: path, body and headers of each."""
    memory, engine = InMemorySpanExporter(), engine or FakeEngine()
    tracer = Tracer(SimpleSpanProcessor(memory))

    async def run() -> None:
        app = make_app(engine, FakeTokens(), "m", Settings(max_queue=3), sinks=[tracer])
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path, body, headers in asked:
                await client.post(path, json=body, headers=headers)
            await client.get("/health")

    asyncio.run(run())
    tracer.close()
    return memory.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
def test_the_spans_of_a_request(stream: bool) -> None:
    body = {**CHAT, "stream": stream, "temperature": 0.5, "max_completion_tokens": 9, "n": 2, "priority": -1}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "job-1"}
    *parts, span = spans_of(("/v1/chat/completions", body, headers))
    assert (span.name, span.kind, span.status.status_code) == ("chat m", SpanKind.SERVER, StatusCode.UNSET)
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    found = dict(span.attributes)
    assert 0 < found.pop("gen_ai.latency.time_to_first_token") < 60
    assert found == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "nibble", "gen_ai.request.model": "m",
        "gen_ai.response.model": "m", "gen_ai.response.id": "chatcmpl-job-1", "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9, "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("length", "length"), "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 10, "gen_ai.usage.cache_read.input_tokens": 2,
        "http.request.method": "POST", "http.response.status_code": 200, "url.path": "/v1/chat/completions",
        "nibble.request.id": "job-1", "nibble.request.priority": -1,
    }  # fmt: skip
    assert [part.name for part in parts] == PARTS
    assert all(part.parent.span_id == span.context.span_id for part in parts)
    times = [time for part in parts for time in (part.start_time, part.end_time)]
    assert times == sorted(times) and span.start_time <= times[0] and times[-1] <= span.end_time
    assert "hello" not in str([one.to_json() for one in (*parts, span)]), "no text is told"


def test_every_prompt_has_its_parts() -> None:
    *parts, span = spans_of(("/v1/completions", {"model": "m", "prompt": ["ab", "cde"]}, {}))
    assert [part.name for part in parts] == PARTS * 2 and span.name == "text_completion m"
    assert [part.attributes["gen_ai.usage.input_tokens"] for part in parts] == [2] * 3 + [3] * 3
    assert span.parent is None


def test_a_malformed_parent_is_none() -> None:
    *_, span = spans_of(("/v1/completions", TEXT, {"traceparent": "00-zz-1-01"}))
    assert span.parent is None


def test_requests_that_fail() -> None:
    engine = FakeEngine()
    engine.dies_after = 2
    for stream in (False, True):
        *parts, span = spans_of(("/v1/completions", {**TEXT, "stream": stream}, {}), engine=engine)
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)
        assert span.attributes.get("error.type") == (None if stream else "503")
        assert [part.name for part in parts] == PARTS
    long, full = ({"model": "m", "prompt": "x" * 70}, {"model": "m", "prompt": ["x"] * 4})
    for body, queued in ((long, 0), (full, 4)):
        *parts, span = spans_of(("/v1/completions", body, {}))
        assert span.attributes["error.type"] == "400" and span.status.status_code is StatusCode.UNSET
        assert [part.name for part in parts] == ["queue"] * queued


def test_without_opentelemetry_it_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError("No module named 'opentelemetry'")
        return imported(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError) as error:
        tracer_to("http://localhost:1")
    assert INSTALL in str(error.value)


def test_an_address_that_is_none_is_refused_at_the_start() -> None:
    command = [sys.executable, "-m", "nibble", "serve", "demo", "--otlp-traces-endpoint", "localhost:4317"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and "http://localhost:4318/v1/traces" in done.stderr.replace("\n", " ")


@pytest.mark.slow
def test_a_server_sends_spans_to_a_collector() -> None:
    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        options = ("--kv-format", "nvfp4", "--kv-memory", "64MiB", "--otlp-traces-endpoint", endpoint)
        with running(*options) as url:
            asked = {"model": "demo", "prompt": "import os", "max_tokens": 4, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=asked, timeout=300).raise_for_status()
        collector.shutdown()
        thread.join()
    said = b"".join(got)
    for word in (b"text_completion demo", b"prefill", b"gen_ai.usage.output_tokens", b"service.name"):
        assert word in said, "spans are sent at the latest when the server ends"
