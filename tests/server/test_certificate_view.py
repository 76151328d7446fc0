"""What was measured of a cache, as clients, the page and the log have it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import FakeEngine, FakeTokens, running
from nibble.config import Config
from nibble.engine.certificate import Certificate
from nibble.evals.certify import certify
from nibble.evals.report import Sizes
from nibble.server import worker as wire
from nibble.server.app import make_app
from nibble.server.settings import Settings
from tiny import save_tiny

SUMMARY: dict[str, Any] = {
    "line": "certified 2026-11-23 on NVIDIA H200 (SM90): KL 0.004, ...", "scheme": "nvfp4", "date": "2026-11-23",
    "device": "NVIDIA H200 (SM90)", "yardstick": "bf16", "kl": 0.004, "kl_p99": 0.05, "perplexity_ratio": 1.003,
    "top1": 0.98, "recall": {"1024": 1.0, "8192": 0.97}, "yardstick_recall": {"1024": 1.0, "8192": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("certificate", [SUMMARY, None])
def test_models_have_it(certificate: dict[str, Any] | None) -> None:
    engine = FakeEngine()
    event = wire.decode_event(wire.encode(wire.Ready(64, 256, {"certificate": certificate})))
    assert isinstance(event, wire.Ready)
    engine.ready = event
    app = make_app(engine, FakeTokens(), "m", Settings(served_model_name=("m", "n")))  # type: ignore[arg-type]

    async def run() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            entries = (await client.get("/v1/models")).json()["data"]
            assert [entry["certificate"] for entry in entries] == [certificate] * 2
            assert (await client.get("/v1/models/n")).json()["certificate"] == certificate

    asyncio.run(run())


@pytest.fixture
def certified(tmp_path: Path) -> Certificate:
    folder = save_tiny(tmp_path / "model", num_hidden_layers=1, max_position_embeddings=512)
    (folder / "heldout.txt").write_text("some words to score, " * 20)
    sizes = Sizes(tokens=80, recall_cases=0, attention_tokens=0)
    return certify(Config(model=str(folder), kv_format="mxfp4", device="cpu"), sizes)


@pytest.mark.slow
def test_a_real_server(certified: Certificate, tmp_path: Path) -> None:
    assert certified.path
    model, log, kl = certified.path.parents[1], tmp_path / "log", certified.figures.kl
    options = ("--kv-format", "mxfp4", "--kv-memory", "4MiB", "--require-quality", f"kl={kl * 2:.9f}")
    with running(*options, model=str(model), log=log) as url:
        (entry,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert entry["certificate"] == certified.summary()
        assert httpx.get(f"{url}/v1/plan").json()["certificate"]["kl"] == kl
    assert certified.line in log.read_text()
    certified.path.write_text(
        replace(certified, subject=replace(certified.subject, weights="0" * 16)).as_json()
    )
    with (
        pytest.raises(AssertionError, match="ended with code 2"),
        running(*options, model=str(model), log=log),
    ):
        pytest.fail("it serves")
    assert "it is of other weights" in log.read_text()
