"""The engine's process: killed under load, gone clients, and a server that is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import free_port, running, wait_ready  # type: ignore[attr-defined]

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {
    "model": "demo", "prompt": "import os\n", "max_tokens": 2000, "ignore_eos": True, "stream": True
}  # fmt: skip
SMALL = ("--kv-format", "nvfp4", "--kv-memory", "64MiB", "--max-running", "16")


def engine_of(server: int) -> int:
    """The process of a server's engine."""
    found = subprocess.run(["pgrep", "-P", str(server)], capture_output=True, text=True, check=False)
    (pid,) = found.stdout.split()
    return int(pid)


def reading(
    url: str, told: list[str], asked: dict[str, Any] = LONG, begun: threading.Event | None = None
) -> threading.Thread:
    """A client that reads an answer. begun: set when its first piece is there."""

    def read() -> None:
        said = list[str]()
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=300) as response:
                for text in response.iter_text():
                    said.append(text)
                    if begun:
                        begun.set()
                told.append("".join(said))
        except httpx.TransportError as error:
            told.append(f"transport: {error}")

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def opened(url: str) -> int:
    return int(httpx.get(f"{url}/health").json()["open"])


def until(holds: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def test_an_engine_that_is_killed_is_started_again() -> None:
    with running(*SMALL) as url:
        told: list[str] = []
        threads = [reading(url, told) for _ in range(6)]
        until(lambda: opened(url) == 6)
        os.kill(engine_of(url.pid), signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "requests did not end"
        assert len(told) == 6 and all("process ended" in text for text in told)
        # one that had no piece yet has a status to say it with, a stream has its last event
        assert all(text.startswith("{") or text.endswith("[DONE]\n\n") for text in told)
        wait_ready(url)
        body = httpx.post(
            f"{url}/v1/completions", json={**LONG, "stream": False, "max_tokens": 5}, timeout=300
        )
        assert body.status_code == 200 and httpx.get(f"{url}/health").json()["restarts"] == 1
        assert opened(url) == 0


def test_clients_that_go_away_free_their_pages() -> None:
    with running(*SMALL) as url:
        for stream in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                asked = {**LONG, "stream": stream}
                with httpx.stream(
                    "POST", f"{url}/v1/completions", json=asked, timeout=httpx.Timeout(120, read=0.3)
                ) as r:
                    for _ in r.iter_text():
                        time.sleep(0.01)
                        if stream:
                            raise httpx.ReadTimeout("enough")
            until(lambda: opened(url) == 0)
        answer = httpx.post(
            f"{url}/v1/completions", json={**LONG, "stream": False, "max_tokens": 5}, timeout=300
        )
        assert answer.status_code == 200


def test_ctrl_c_lets_requests_end_first() -> None:
    """It reaches the whole group of processes; the engine is not for it to end."""
    with running(*SMALL) as url:
        told: list[str] = []
        asked, begun = {**LONG, "max_tokens": 200}, threading.Event()
        thread = reading(url, told, asked, begun)
        assert begun.wait(300)
        os.killpg(os.getpgid(url.pid), signal.SIGINT)
        thread.join(300)
        assert told and '{"error"' not in told[0] and told[0].endswith("[DONE]\n\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end_while_it_starts(number: int) -> None:
    command = [sys.executable, "-m", "nibble", "serve", "demo", *SMALL, "--port", str(free_port())]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr
        while "engine starts" not in process.stderr.readline():
            assert process.poll() is None
        engine = engine_of(process.pid)
        process.send_signal(number)
        assert process.wait(120) == 0
        assert "serving" not in process.stderr.read() and not Path(f"/proc/{engine}").exists()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--kv-layers", "0=fp9"), 2, "unknown KV format 'fp9'"),
        (("--decode-backend", "fa33"), 2, "unknown attention backend 'fa33': did you mean 'fa3'?"),
        (("--decode-backend", "fa3"), 3, "what works: nibble serve demo"),
    ],
)
def test_a_start_that_fails_says_why(options: tuple[str, ...], code: int, says: str) -> None:
    """What no model is needed for is refused by the server itself, before an engine could; the rest by the engine."""
    command = [sys.executable, "-m", "nibble", "serve", "demo", "--device", "cpu", *options]
    command += ["--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code and says in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    assert ("engine ended code=1" in done.stderr) == (
        code == 3
    )  # the engine itself refused, or was not waited for


def test_what_an_engine_has_is_not_walked_through_while_it_serves() -> None:
    """A collection of all its objects would hold up all answers."""
    code = """
import gc, io, sys
from types import SimpleNamespace
from nibble.engine import llm
from nibble.server import worker

llm.LLM = lambda **config: SimpleNamespace(engine=SimpleNamespace(grammars=None, ranks=None))
worker.Worker = lambda *_: SimpleNamespace(run=lambda: print(gc.get_freeze_count(), len(gc.get_objects())))
sys.stdin = io.StringIO("{}")
worker.main("ipc://" + sys.argv[1], "text")
"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, f"{folder}/socket"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    num_frozen, num_others = map(int, done.stdout.split())
    assert num_frozen > 10_000 > num_others


def test_a_server_waits_for_neither_torch_nor_transformers_before_it_starts_its_engine() -> None:
    code = (
        "import sys, nibble.server.run, nibble.models.hub as hub; hub.locate('demo');"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PARENT = """
import json, pathlib, subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-m", "nibble.server.worker", sys.argv[1], "text"], stdin=subprocess.PIPE,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
engine.stdin.write(json.dumps({"model": "demo"}).encode())
engine.stdin.close()
print(engine.pid, flush=True)
maps = pathlib.Path(f"/proc/{engine.pid}/maps")
while engine.poll() is None and "libtorch" not in maps.read_text():  # it is loaded when the engine is being made
    time.sleep(0.05)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_an_engine_whose_server_dies_while_it_loads_ends_too(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PARENT, f"ipc://{tmp_path}/s"], capture_output=True, text=True, check=True
    )
    pid = int(found.stdout)
    try:
        until(lambda: not lives(pid))
    finally:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)
