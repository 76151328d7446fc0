"""The log: a line for each request, ids that clients may choose, turns in the engine's life, and both formats."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_app import CHAT, TEXT, with_app

from conftest import FakeEngine, running  # type: ignore[attr-defined]
from nibble.attention.planner import evidence
from nibble.errors import ConfigError
from nibble.hardware import probe
from nibble.server.logging import LineFormatter, as_json, as_text, plan_summary
from nibble.server.settings import Settings

SECRET = "hello"  # what TEXT and CHAT ask


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [{"level": r.levelname, **r.facts} for r in caplog.records if r.getMessage() == "request"]  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def listen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nibble.server")


def test_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        named = {"x-request-id": "job-7/3"}
        response = await client.post("/v1/chat/completions", json={**CHAT, "n": 2}, headers=named)
        assert response.headers["x-request-id"] == "job-7/3" and response.json()["id"] == "chatcmpl-job-7/3"
        response = await client.post("/v1/completions", json={**TEXT, "stream": True, "max_tokens": 3})
        assert f"cmpl-{response.headers['x-request-id']}" in response.text
        await client.post("/v1/completions", json={**TEXT, "model": "no"})
        await client.get("/health")

    with_app(test)
    chat, text, refused, health = lines(caplog)
    assert chat["id"] == "job-7/3" and chat["model"] == "m" and chat["status"] == 200
    counts = ("prompt_tokens", "cached_tokens", "output_tokens", "finish")
    assert [chat[name] for name in counts] == [5, 2, 10, "length"]
    assert [text[name] for name in counts] == [5, 2, 3, "length"]
    for line in (chat, text):
        assert 0 <= line["queue_s"] <= line["total_s"] and 0 <= line["ttft_s"] <= line["total_s"]
    assert (refused["status"], refused["path"], "model" in refused) == (404, "/v1/completions", False)
    assert health["level"] == "DEBUG" and {chat["level"], refused["level"]} == {"INFO"}
    assert SECRET not in str([record.__dict__ for record in caplog.records])


def test_what_was_asked_is_logged_where_that_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        await client.post("/v1/completions", json={**TEXT, "max_tokens": 2})

    with_app(test, log_requests=True)
    (line,) = lines(caplog)
    assert line["request"] == {**TEXT, "max_tokens": 2}


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'a"b', "a\tb", "\u00e9"])
def test_ids_that_are_no_plain_words_are_replaced(given: str) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        headers = [(b"x-request-id", given.encode("latin-1"))]
        found = (await client.get("/health", headers=headers)).headers["x-request-id"]
        assert len(found) == 32 and found.isalnum()

    with_app(test)


def test_refusals_before_the_routes_have_a_line_and_an_id(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        assert "x-request-id" in (await client.post("/v1/completions", json=TEXT)).headers

    with_app(test, api_key="right")
    assert [line["status"] for line in lines(caplog)] == [401]


@pytest.mark.parametrize(("stream", "finish"), [(True, "error"), (False, "error")])
def test_how_an_answer_was_lost(caplog: pytest.LogCaptureFixture, stream: bool, finish: str) -> None:
    engine = FakeEngine()
    engine.dies_after = 2

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        await client.post("/v1/completions", json={**TEXT, "stream": stream})

    with_app(test, engine)
    (line,) = lines(caplog)
    assert (line["status"], line["finish"], line["output_tokens"]) == (200 if stream else 503, finish, 2)


def record(event: str, **facts: Any) -> logging.LogRecord:
    made = logging.LogRecord("nibble.server", logging.INFO, "", 0, event, None, None)
    made.created, made.msecs, made.facts = 0.25, 250.0, facts
    return made


def test_formats() -> None:
    told = record(
        "request", id="a", path="/x\nforged ERROR", total_s=0.5, finish=None, request={"prompt": "é"}
    )
    assert LineFormatter(as_text).format(told) == (
        '1970-01-01T00:00:00.250Z info request id=a path="/x\\nforged ERROR" total_s=0.5 finish=null '
        'request="{\\"prompt\\": \\"é\\"}"'
    )
    found = json.loads(LineFormatter(as_json).format(told))
    assert found == {
        "time": "1970-01-01T00:00:00.250Z", "level": "info", "event": "request", "id": "a",
        "path": "/x\nforged ERROR", "total_s": 0.5, "finish": None, "request": {"prompt": "é"},
    }  # fmt: skip


def test_an_exception_is_told() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    for line in (as_text, as_json):
        handler.setFormatter(LineFormatter(line))
        try:
            raise ValueError("what went wrong")
        except ValueError as error:
            failed = record("a request failed")
            failed.exc_info = (type(error), error, error.__traceback__)
        handler.emit(failed)
    text = stream.getvalue()
    assert text.count("ValueError: what went wrong") == 2
    assert "what went wrong" in json.loads(text.splitlines()[-1])["exception"]


def test_an_unknown_format() -> None:
    with pytest.raises(ConfigError, match="json"):
        Settings(log_format="jsn")


def test_a_plan_that_says_little() -> None:
    assert plan_summary({})["kv_format"] == ""


@pytest.mark.slow
def test_what_the_process_of_the_engine_logs_has_the_same_format() -> None:
    """The fidelity watch warns from there."""
    code = """
import io, logging, sys
from nibble.engine import llm
from nibble.server import worker

def watched(**config):
    logging.getLogger("nibble.fidelity").warning("over its limit")
    raise OSError("enough")

llm.LLM, sys.stdin = watched, io.StringIO("{}")
worker.main("ipc://" + sys.argv[1], "json")
"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, f"{folder}/socket"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    (line,) = done.stderr.splitlines()
    assert (json.loads(line)["level"], json.loads(line)["event"]) == ("warning", "over its limit")


@pytest.mark.slow
def test_a_server_logs_json_from_start_to_end(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What users should know of the start, as that times of this machine are not used, is told too."""
    monkeypatch.setenv(evidence.TUNED_FOLDER, str(tmp_path))
    evidence.tuned_path(probe()).write_text("{")
    with running("--kv-format", "nvfp4", "--kv-memory", "64MiB", "--log-format", "json") as url:
        asked = {"model": "demo", "prompt": "import os", "max_tokens": 4, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=asked, timeout=300).raise_for_status()
    said = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    # Whether other programs are busy is not for a test to say.
    said = [line for line in said if not line.get("note", "").startswith("this machine is busy")]
    assert [line["part"] for line in said if line["event"] == "start"][:2] == ["plan", "weights"]
    said = [line for line in said if line["event"] != "start"]
    assert [line["event"] for line in said] == [
        "engine starts", "engine ready", "sampling defaults", "engine note", "serving", "request", "draining", "drained", "engine ended"
    ]  # fmt: skip
    ready, noted, request = said[1], said[3], said[5]
    assert noted["level"] == "warning" and "are not used" in noted["note"]
    assert (
        ready["kv_format"] == "nvfp4+kmean+rot"
        and "the newest 64 tokens" in ready["scheme"]
        and ready["decode"]
        and ready["cache_tokens"] > 0
    )
    assert (
        request["output_tokens"] == 4 and 0 <= request["queue_s"] <= request["ttft_s"] <= request["total_s"]
    )
