"""Two engines behind one server: one is killed under load, and only its own requests notice."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

import nibble.server.replicas as replicas_module
from conftest import free_port, running, wait_ready  # type: ignore[attr-defined]
from nibble import hardware, threads
from nibble.cache.events import BlockStored
from nibble.config import Config, SamplingParams
from nibble.errors import ConfigError
from nibble.hardware import MACHINE_SHARE
from nibble.routing.subscriber import Subscriber
from nibble.server.engine_client import PROCESS_ENDED, EngineDiedError, State
from nibble.server.replicas import ReplicaClient, environments, merge_stats
from nibble.server.settings import Settings
from nibble.server.worker import GenerationRequest, Ready

OPTIONS = ("--kv-format", "nvfp4", "--kv-memory", "64MiB", "--max-running", "32")
TOKENS, ENOUGH = 60, 2000
"""Those that are compared, and those that are asked for, so that no answer ends before an engine is killed."""
TEXT = "import os\nimport sys\n\n\ndef main(path: str) -> None:\n    for name in os.listdir(path):\n"
PROMPTS = [f"# file {i % 8}\n{TEXT}" + "        print(name)\n" * (i % 5) for i in range(32)]


class Stream(threading.Thread):
    """A client that reads one answer. may_leave: it goes away with TOKENS tokens, once this is set."""

    def __init__(
        self, url: str, prompt: str, max_tokens: int, may_leave: threading.Event | None = None
    ) -> None:
        super().__init__()
        self.url, self.text, self.error, self.pieces = url, "", "", 0
        self.may_leave = may_leave or threading.Event()
        self.body = {
            "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0,
        }  # fmt: skip
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=300) as response:
            for line in response.iter_lines():
                self.take(line.removeprefix("data: "))
                if self.pieces > TOKENS and self.may_leave.is_set():
                    return

    def take(self, line: str) -> None:
        if not line or line == "[DONE]":
            return
        event: Mapping[str, Any] = json.loads(line)
        self.error = self.error or event.get("error", {}).get("message", "")
        self.pieces += 1
        self.text += "".join(choice["text"] for choice in event.get("choices", ()))


def complete(url: str, prompt: str, max_tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return str(httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()["choices"][0]["text"])


def engines(log: Path) -> dict[int, int]:
    """The newest process of each replica, from the log."""
    starts = re.findall(r"engine starts .*pid=(\d+) replica=(\d)", log.read_text())
    return {int(replica): int(pid) for pid, replica in starts}


def health(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/health", timeout=120).json())


def requests_of(replica: Mapping[str, Any]) -> int:
    return int(replica["running"] + replica["waiting"])


def until(holds: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_replica_takes_only_its_own_requests(tmp_path: Path, server: str) -> None:
    port, replay, log = free_port(2), free_port(2), tmp_path / "log"
    events = ("--kv-events", f"tcp://*:{port}", "--kv-events-replay", f"tcp://*:{replay}")
    with running(*OPTIONS, "--dp", "2", *events, log=log) as url, ExitStack() as stack:
        followers = [
            Subscriber(f"tcp://127.0.0.1:{port + i}", f"tcp://127.0.0.1:{replay + i}") for i in range(2)
        ]
        for follower in followers:
            stack.callback(follower.close)
        may_leave = threading.Event()
        streams = [Stream(url, prompt, ENOUGH, may_leave) for prompt in PROMPTS]
        until(lambda: all(stream.pieces > 2 for stream in streams))
        until(lambda: sum(map(requests_of, health(url)["replicas"])) == len(streams))
        shares = list(map(requests_of, health(url)["replicas"]))
        os.kill(engines(log)[0], signal.SIGKILL)
        # Those of the other engine are read on until the dead one's have ended.
        until(lambda: sum(not stream.is_alive() for stream in streams) == shares[0])
        may_leave.set()
        for stream in streams:
            stream.join(300)
        lost = [stream for stream in streams if stream.error]
        assert 0 < len(lost) == shares[0] < len(streams)
        assert all(stream.error.startswith(PROCESS_ENDED) for stream in lost)
        # The others, and the other half of those that were killed, say what one engine says.
        reference = {prompt: complete(server, prompt, TOKENS) for prompt in dict.fromkeys(PROMPTS[:4])}
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            if prompt in reference:
                whole = reference[prompt]
                assert stream.text.startswith(whole) or (stream.error and whole.startswith(stream.text))
        until(lambda: all(replica["status"] == "ready" for replica in health(url)["replicas"]))
        assert [replica["restarts"] for replica in health(url)["replicas"]] == [1, 0]
        wait_ready(url)
        # It serves again, and so does all that tells of it.
        again = [Stream(url, prompt, 5) for prompt in PROMPTS[:16]]
        for stream in again:
            stream.join(300)
        assert not any(stream.error for stream in again)
        until(lambda: health(url)["open"] == 0)
        check_views(url)
        check_events(followers, url)


def check_views(url: str) -> None:
    """Of what is shown, all has both replicas."""
    until(
        lambda: all(
            one["requests"]["finished"] > 0 for one in httpx.get(f"{url}/v1/cache").json()["replicas"]
        )
    )
    cache = httpx.get(f"{url}/v1/cache").json()
    first, second = cache["replicas"]
    assert cache["pages"]["total"] == first["pages"]["total"] + second["pages"]["total"] > 0
    metrics = httpx.get(f"{url}/metrics").text
    restarts = re.findall(r'nibble:engine_restarts_total\{model_name="demo",replica="(\d)"\} (\S+)', metrics)
    assert restarts == [("0", "1.0"), ("1", "0.0")]
    assert metrics.count("# TYPE nibble:engine_up gauge") == 1
    assert httpx.get(f"{url}/v1/plan").json()["replicas"] == 2
    assert httpx.post(f"{url}/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}, timeout=300).status_code in (200, 400)  # fmt: skip


def check_events(followers: list[Subscriber], url: str) -> None:
    """Subscribers know as many pages as the engines say that they have; one of them was killed meanwhile."""
    pages = [set[int](), set[int]()]

    def agree() -> bool:
        for known, follower in zip(pages, followers, strict=True):
            for event in follower.poll(50):
                if isinstance(event, BlockStored):
                    known.update(event.block_hashes)
                elif hasattr(event, "block_hashes"):
                    known.difference_update(event.block_hashes)
                else:
                    known.clear()
        views = [one["pages"] for one in httpx.get(f"{url}/v1/cache").json()["replicas"]]
        return all(
            view["idle"] + view["shared"] == len(known) > 0 for view, known in zip(views, pages, strict=True)
        )

    until(agree)
    assert httpx.post(f"{url}/reset_prefix_cache").status_code == 200
    until(lambda: not any(agree() or known for known in pages) or not any(pages))


def test_gpus_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "visible_gpus", lambda: ["4", "5", "MIG-a", "7"])
    devices = [one["CUDA_VISIBLE_DEVICES"] for one in environments("auto", 4)]
    assert devices == ["4", "5", "MIG-a", "7"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments("cuda", 2, gpus_each=2)] == ["4,5", "MIG-a,7"]
    assert environments("cpu", 3) == [{MACHINE_SHARE: "3"}] * 3
    with pytest.raises(
        ConfigError, match=r"8 replicas need 8 GPUs, a GPU each, and 4 can be seen .*--replicas 4"
    ):
        environments("auto", 8)
    with pytest.raises(ConfigError, match=r"need 6 GPUs, 3 GPUs each, and 4 can be seen .*--replicas 1"):
        environments("auto", 2, gpus_each=3)
    monkeypatch.setattr(replicas_module, "visible_gpus", lambda: [])
    assert environments("auto", 2) == [{MACHINE_SHARE: "2"}] * 2
    with pytest.raises(ConfigError, match=r"0 can be seen .*: use --device cpu"):
        environments("cuda", 2)


def test_gpus_are_seen_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 2
            return 0

    monkeypatch.setattr(hardware, "_driver", Driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert hardware.visible_gpus() == ["0", "1"]
    # An entry that the driver does not know ends the list.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-ab,99")
    assert hardware.visible_gpus() == ["5", "GPU-ab"]
    monkeypatch.setattr(hardware, "_driver", lambda: None)
    assert hardware.visible_gpus() == []


def test_a_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cpus = hardware.cpu().memory, threads.usable_cpus()
    monkeypatch.setenv(MACHINE_SHARE, "2")
    assert hardware.cpu().memory == whole // 2 and threads.usable_cpus() == max(1, cpus // 2)


def test_whether_it_serves() -> None:
    async def states() -> None:
        client = ReplicaClient(Config(model="demo"), [{}, {}, {}])
        first, second, third = client.replicas
        assert client.state is State.STARTING and client.ready is None and client.stats == {}
        first.state = State.READY
        assert client.state is State.STARTING, "not all have started"
        client._has_started = True
        assert client.state is State.READY
        for replica, limit in ((first, 100), (second, 90)):
            replica.ready = Ready(limit, 50, {"page_size": 16}, namespace="n", page_size=16)
        assert client.ready and client.ready.max_context == 90 and client.ready.about["replicas"] == 3
        with pytest.raises(EngineDiedError, match="the engines are"):
            client._route(GenerationRequest([1], SamplingParams()))  # it serves, but is not known to
        first.on_state(State.READY)
        second.on_state(State.READY)
        assert client._route(GenerationRequest([1], SamplingParams()))[0] is first, (
            "the second does not serve"
        )
        first.on_state(State.STARTING)
        first.state = second.state = third.state = State.DEAD
        assert client.state is State.DEAD and not set(client.router.replicas) - {1}
        await client.stop()

    asyncio.run(states())


def test_counts_add_up() -> None:
    parts = [
        {"time": 5.0, "running": 2.0, "fidelity_error_0": 0.1, "cache_total": 10.0},
        {"time": 4.0, "running": 1.0, "fidelity_error_0": 0.3, "cache_total": 10.0},
    ]
    assert merge_stats(parts) == {"time": 5.0, "running": 3.0, "fidelity_error_0": 0.3, "cache_total": 20.0}
    assert merge_stats([{}, {}]) == {}
    # A watch counts its alerts; that it is in one, and what it cannot see, are facts.
    watch = {"fidelity_alert": 1.0, "fidelity_alerts": 2.0, "fidelity_uncovered_layers": 6.0}
    assert merge_stats([watch, {**watch, "fidelity_alert": 0.0}]) == {**watch, "fidelity_alerts": 4.0}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"kv_events": "5557"}, "kv_events is an endpoint of ZeroMQ"),
        ({"kv_events": "inproc://events"}, "kv_events is an endpoint of ZeroMQ"),
        ({"kv_events_topic": "kv"}, "need kv_events"),
        ({"replicas": 2, "kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5558"}, "overlap"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings(**options)
