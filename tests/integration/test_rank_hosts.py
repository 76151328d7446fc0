"""Ranks on other hosts, which are other processes of this one: answers, ends on either side, and who is let in."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nibble import LLM, ConfigError
from nibble.engine.rank_hosts import VARIABLE, RankHost, RankHosts
from nibble.errors import NibbleError, RankError
from tiny import save_tiny

OPTIONS: dict[str, Any] = {"max_context": 256, "kv_memory": "1MiB", "token_budget": 16, "max_running": 4}
PROMPTS = [list(range(5, 5 + 9 * i)) for i in range(1, 5)]
KEY = "only for this test"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("hosts"))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankHost]:
    """Another host, of which engines of this process are told."""
    host = RankHost("127.0.0.1", KEY)
    tell(monkeypatch, host.port)
    yield host
    host.close()


def tell(monkeypatch: pytest.MonkeyPatch, port: int, key: str = KEY) -> None:
    hosts = RankHosts(("127.0.0.1", "127.0.0.1"), (port,), key)
    monkeypatch.setenv(VARIABLE, hosts.as_environment()[VARIABLE])


def answers(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, max_tokens=8, temperature=0, ignore_eos=True)
    return [tuple(output.completions[0].token_ids) for output in outputs]


def ranks_here() -> list[int]:
    """Processes that this one, as a RankHost, has started."""
    command = ["pgrep", "-P", str(os.getpid()), "-f", "nibble.engine.rank "]
    return list(map(int, subprocess.run(command, check=False, capture_output=True).stdout.split()))


def until_none_is_left() -> None:
    until = time.monotonic() + 60
    while ranks_here() and time.monotonic() < until:
        time.sleep(0.05)
    assert not ranks_here(), "a process is left"


@pytest.mark.slow
def test_two_hosts_answer_as_one(path: Path, host: RankHost, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(path), tp=2, kv_format="nvfp4", **OPTIONS) as llm:
        (rank,) = ranks_here()
        assert llm.engine.ranks and rank not in llm.engine.ranks.pids.values()
        divided = answers(llm)
    until_none_is_left()
    monkeypatch.delenv(VARIABLE)
    with LLM(str(path), tp=2, kv_format="nvfp4", **OPTIONS) as llm:
        assert answers(llm) == divided


@pytest.mark.slow
def test_a_rank_that_is_killed_elsewhere_ends_the_engine_with_the_reason(path: Path, host: RankHost) -> None:
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        (rank,) = ranks_here()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(
            NibbleError, match=r"rank 1 of 2 failed \(on host 127.0.0.1: its process was killed by signal 9\)"
        ):
            for _ in range(100):
                answers(llm)
    until_none_is_left()


@pytest.mark.slow
def test_a_host_that_goes_away_ends_the_engine(path: Path, host: RankHost) -> None:
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        host.close()
        with pytest.raises(NibbleError, match="rank 1 of 2 failed"):
            for _ in range(100):
                answers(llm)


@pytest.mark.slow
def test_a_stand_in_that_is_killed_ends_the_rank_too(path: Path, host: RankHost) -> None:
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        assert llm.engine.ranks and len(ranks_here()) == 1
        (stand_in,) = llm.engine.ranks.pids.values()
        os.kill(stand_in, signal.SIGKILL)
        until_none_is_left()
        with pytest.raises(NibbleError, match="rank 1 of 2 was killed by signal 9"):
            for _ in range(100):
                answers(llm)


ENGINE = """
import sys, time
from nibble import LLM
llm = LLM(sys.argv[1], tp=2, kv_format="fp32", max_context=256, kv_memory="1MiB", token_budget=16, max_running=4)
print("serves", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_nothing(path: Path, host: RankHost) -> None:
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(path)], stdout=subprocess.PIPE)
    assert engine.stdout and engine.stdout.readline() == b"serves\n"
    found = subprocess.run(["pgrep", "-P", str(engine.pid)], check=False, capture_output=True)
    (stand_in,) = map(int, found.stdout.split())
    assert len(ranks_here()) == 1
    engine.kill()
    engine.wait()
    until_none_is_left()
    until = time.monotonic() + 60
    while Path(f"/proc/{stand_in}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{stand_in}").exists()
    engine.stdout.close()


@pytest.mark.slow
def test_several_ranks_of_a_host(path: Path, host: RankHost, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(path), tp=4, kv_format="fp32", **OPTIONS) as llm:
        assert len(ranks_here()) == 3 and llm.engine.ranks, "one of the first host, and two of the other"
        assert {place.host for place in llm.engine.ranks.places} == {0, 1}
        divided = answers(llm)
    monkeypatch.delenv(VARIABLE)
    with LLM(str(path), kv_format="fp32", **OPTIONS) as llm:
        assert answers(llm) == divided


@pytest.mark.slow
def test_nobody_without_the_key_starts_anything(
    path: Path, host: RankHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch, host.port, "guessed")
    with pytest.raises(RankError, match="rank 1 of 2 failed"):
        LLM(str(path), tp=2, kv_format="fp32", **OPTIONS)
    assert not ranks_here()
    tell(monkeypatch, host.port)
    # Who says nothing keeps nobody waiting, nor does who says anything else.
    silent, other = (socket.create_connection(("127.0.0.1", host.port)) for _ in range(2))
    other.sendall(b"GET / HTTP/1.1\r\n\r\n")
    other.close()
    with silent, LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        assert answers(llm)


def test_a_host_that_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = RankHost("127.0.0.1", KEY)
    tell(monkeypatch, host.port)
    host.close()
    with pytest.raises(RankError, match=r"rank 1 of 2 failed \(on host 127.0.0.1: .*refused"):
        LLM(str(path), tp=2, kv_format="fp32", **OPTIONS)


def test_hosts_have_as_many_ranks_each() -> None:
    hosts = RankHosts(("a", "b"), (7,), KEY)
    with pytest.raises(ConfigError, match="--tp 3 cannot be divided among 2 hosts"):
        hosts.places(3)
    assert [(place.address, place.index) for place in hosts.places(4)] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1),
    ]  # fmt: skip
    assert set(hosts.programs(4)) == {2, 3} and hosts.address_of(3, 4) == ("b", 7)
