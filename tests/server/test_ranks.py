"""A server whose model is divided among two processes: one of them is killed under load."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from test_process import LONG, engine_of, opened, reading, until

from conftest import running, wait_ready  # type: ignore[attr-defined]

pytestmark = pytest.mark.slow

STREAMS = 16


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return list(map(int, found.stdout.split()))


def test_a_rank_that_is_killed_ends_all_requests_at_once_and_the_server_is_ready_again() -> None:
    options = ("--kv-format", "bf16", "--kv-memory", "64MiB", "--max-running", "16", "--tp", "2")
    with running(*options) as url:
        told: list[str] = []
        threads = [reading(url, told) for _ in range(STREAMS)]
        until(lambda: opened(url) == STREAMS)
        engine = engine_of(url.pid)
        (rank,) = children(engine)
        os.kill(rank, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "requests did not end"
        assert len(told) == STREAMS and all("rank 1 of 2 was killed by signal 9" in text for text in told)
        wait_ready(url)
        assert not Path(f"/proc/{engine}").exists() and not Path(f"/proc/{rank}").exists()
        body = httpx.post(
            f"{url}/v1/completions", json={**LONG, "stream": False, "max_tokens": 5}, timeout=300
        )
        assert body.status_code == 200 and httpx.get(f"{url}/health").json()["restarts"] == 1
