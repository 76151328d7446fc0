"""`nibble bench serve`: what it hands to GuideLLM, which need not be installed here."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from nibble.cli import bench, command
from nibble.cli.main import app

Calls = list[list[str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Argument lists that a GuideLLM in our own make was called with."""
    calls: Calls = []
    package, cli = ModuleType("guidellm"), ModuleType("guidellm.cli")
    package.__spec__ = ModuleSpec("guidellm", None)
    cli.cli = SimpleNamespace(main=lambda arguments, prog_name: calls.append(arguments))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "guidellm", package)
    monkeypatch.setitem(sys.modules, "guidellm.cli", cli)
    monkeypatch.delenv("NIBBLE_API_KEY", raising=False)
    return calls


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """Addresses and headers that were asked for models; `demo` is served."""
    requests: list[tuple[str, dict[str, str]]] = []

    def get(url: str, headers: dict[str, str], timeout: float) -> httpx.Response:
        if url.endswith("/v1/cache"):  # of another server
            return httpx.Response(404, request=httpx.Request("GET", url))
        requests.append((url, headers))
        answer = {"data": [{"id": "demo"}]} if "empty" not in url else {"data": []}
        return httpx.Response(200, json=answer, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    return requests


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def options(arguments: list[str]) -> dict[str, Any]:
    """Values by flag; those of this command are JSON."""
    assert arguments[0] == "run"
    values = dict(zip(arguments[1::2], arguments[2::2], strict=False))
    return {flag: json.loads(value) if value.startswith("{") else value for flag, value in values.items()}


def test_defaults(calls: Calls, served: list[tuple[str, dict[str, str]]]) -> None:
    result = run("serve")
    assert result.exit_code == 0, result.output
    (arguments,) = calls
    assert arguments[-3:] == ["--override", "profile.streams", "1,4,16"]
    values = options(arguments[:-3])
    assert values.pop("--tokenizer")["model"].endswith("models/demo")
    assert values == {
        "--backend": {
            "kind": "openai_http", "target": "http://localhost:8000", "request_format": "/v1/completions", "api_key": None,
        },
        "--profile": {"kind": "concurrent", "streams": "1"},
        "--constraint": {"kind": "max_requests", "count": 100},
        "--data": {"kind": "synthetic_text", "prompt_tokens": 512, "output_tokens": 128},
        "--output": {"kind": "console"},
    }  # fmt: skip
    assert served == [("http://localhost:8000/v1/models", {})]


def test_own_options(calls: Calls, served: list[tuple[str, dict[str, str]]]) -> None:
    result = run(
        "serve",
        "gpu-7:80/v1/",
        "--rate",
        "2",
        "--chat",
        "--api-key",
        "k",
        "--json",
        "x.json",
        "--requests",
        "7",
    )
    assert result.exit_code == 0, result.output
    values = options(calls[0])
    assert values["--backend"] == {
        "kind": "openai_http", "target": "http://gpu-7:80", "request_format": "/v1/chat/completions", "api_key": "k",
    }  # fmt: skip
    assert values["--profile"] == {"kind": "constant", "rate": "2"} and values["--constraint"]["count"] == 7
    assert values["--output"] == {"kind": "json", "path": "x.json"} and "--override" not in values
    assert served == [("http://gpu-7:80/v1/models", {"Authorization": "Bearer k"})]


@pytest.mark.parametrize("url", [(), ("localhost:9",)])
def test_options_of_guidellm_pass_through_and_replace(
    calls: Calls, served: list[Any], url: tuple[str, ...]
) -> None:
    own = ("--profile", "kind=sweep", "--tokenizer=kind=hf_auto,model=m", "--label", "a=b")
    assert run("serve", *url, *own).exit_code == 0
    (arguments,) = calls
    assert arguments[1 : 1 + len(own)] == list(own)
    assert (
        arguments.count("--profile") == 1 and "--tokenizer" not in arguments and "--override" not in arguments
    )
    assert not served  # the tokenizer is known


def test_a_tokenizer_by_its_model(calls: Calls, served: list[Any]) -> None:
    assert run("serve", "--model", "hub/name").exit_code == 0
    assert options(calls[0][:-3])["--tokenizer"]["model"] == "hub/name" and not served


def test_servers_that_name_no_model(calls: Calls, served: list[Any]) -> None:
    result = run("serve", "http://empty")
    assert result.exit_code == command.USAGE and "give --model" in result.stderr


def test_a_server_that_is_not_there(calls: Calls) -> None:
    result = run("serve", "localhost:1")
    assert result.exit_code == command.FAILED and "http://localhost:1 does not answer" in result.stderr
    assert not calls


def test_without_guidellm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    result = run("serve")
    assert result.exit_code == command.USAGE and "pip install guidellm" in result.stderr


def test_servers_only(calls: Calls) -> None:
    result = run("kernels")
    assert result.exit_code == command.USAGE and "'kernels'" in result.stderr


def test_what_became_of_drafts_is_said(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [
        {"drafter": "lookup", "steps": 10, "drafted": 40, "accepted": 20},
        {"drafter": "lookup", "steps": 14, "drafted": 60, "accepted": 30},
    ]
    left = iter(counts)
    monkeypatch.setattr(bench, "_drafts_of", lambda url, key: next(left))
    result = run("serve", "--model", "demo")
    assert "drafts by lookup: 10 of 20 tokens accepted (50%), 3.50 tokens a verification" in result.stdout
