"""Ranks on other hosts, which are other processes of this one: answers, ends on either side, and who is let in."""

from __future__ import annotations

import os
import signal
import subprocess
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


def test_two_hosts_answer_as_one(path: Path, host: RankHost) -> None:
    with LLM(str(path), tp=2, kv_format="nvfp4", **OPTIONS) as llm:
        (rank,) = ranks_here()
        assert llm.engine.ranks and rank not in llm.engine.ranks.pids.values()
        divided = answers(llm)
    until_none_is_left()
    os.environ.pop(VARIABLE)
    with LLM(str(path), tp=2, kv_format="nvfp4", **OPTIONS) as llm:
        assert answers(llm) == divided


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


def test_a_host_that_goes_away_ends_the_engine(path: Path, host: RankHost) -> None:
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        host.close()
        with pytest.raises(NibbleError, match="rank 1 of 2 failed"):
            for _ in range(100):
                answers(llm)


def test_an_engine_that_dies_leaves_no_rank_elsewhere(path: Path, host: RankHost) -> None:
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        assert llm.engine.ranks and len(ranks_here()) == 1
        (stand_in,) = llm.engine.ranks.pids.values()
        os.kill(stand_in, signal.SIGKILL)
        until_none_is_left()
        with pytest.raises(NibbleError, match="rank 1 of 2 was killed by signal 9"):
            for _ in range(100):
                answers(llm)


def test_nobody_without_the_key_starts_anything(
    path: Path, host: RankHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch, host.port, "guessed")
    with pytest.raises(RankError, match="rank 1 of 2 failed"):
        LLM(str(path), tp=2, kv_format="fp32", **OPTIONS)
    assert not ranks_here()
    tell(monkeypatch, host.port)
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
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
