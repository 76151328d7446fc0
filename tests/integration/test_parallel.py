"""A model that is divided among processes: the real ones, over gloo, and what becomes of an engine whose rank fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble import LLM, ConfigError, NibbleError, ScaleError
from nibble.engine import ranks as ranks_of_engine
from nibble.engine.ranks import Ranks
from nibble.errors import RankError
from nibble.kernels.collectives.processes import GlooCollectives
from tiny import save_tiny

OPTIONS: dict[str, Any] = {"max_context": 256, "kv_memory": "1MiB", "token_budget": 16, "max_running": 4}
PROMPT = list(range(5, 75))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("divided"))


@pytest.fixture(scope="module")
def divided(path: Path) -> Iterator[LLM]:
    """An engine of two processes."""
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        (pid,) = ranks_of(llm).pids.values()
        yield llm
    assert ended(pid), "a process is left"


def ranks_of(llm: LLM) -> Ranks:
    assert llm.engine.ranks is not None
    return llm.engine.ranks


def ended(pid: int) -> bool:
    """Whether a process is gone; one that was killed may take a moment."""
    until = time.monotonic() + 120
    while (exists := Path(f"/proc/{pid}").exists()) and time.monotonic() < until:
        time.sleep(0.01)
    return not exists


def test_two_processes_answer_as_one(path: Path, divided: LLM) -> None:
    one = LLM(str(path), kv_format="fp32", **OPTIONS)
    assert float((divided.logits(PROMPT) - one.logits(PROMPT)).abs().max()) < 1e-4
    prompts = [PROMPT[: 9 * i] for i in range(1, 7)]
    answers = [
        [
            output.completions[0].token_ids
            for output in llm.generate(prompts, max_tokens=8, temperature=0, ignore_eos=True)
        ]
        for llm in (divided, one)
    ]
    assert answers[0] == answers[1]
    assert isinstance(ranks_of(divided).here.group, GlooCollectives)  # type: ignore[union-attr]


def test_scales_are_measured_on_all_heads(path: Path, divided: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 8
    with LLM(str(path), kv_format="fp32", **OPTIONS) as one:
        expected = one.measure_scales([text])
    with pytest.raises(ScaleError, match="at least 64 tokens of text"):
        divided.measure_scales(["short"])
    scales = divided.measure_scales([text])
    for layer, entry in expected.layers.items():
        own = scales.layers[layer]
        assert {name: scale.value for name, scale in own.streams.items()} == pytest.approx(
            {name: scale.value for name, scale in entry.streams.items()}
        )
        assert torch.allclose(torch.tensor(own.k_mean), torch.tensor(entry.k_mean), atol=1e-6)
    # The ranks are where rank 0 is.
    assert divided.generate(PROMPT, max_tokens=1).completions[0].finish_reason == "length"


def test_the_plan_is_of_one_rank_and_says_so(divided: LLM) -> None:
    spec = divided._engine_plan.model_spec
    assert (spec.tp, spec.groups[0].q_heads, spec.groups[0].streams[0].heads) == (2, 2, 1)
    assert "each layer is divided among 2 GPUs" in str(divided.plan)


@pytest.mark.slow
def test_a_killed_rank_ends_all_requests_with_the_reason(path: Path) -> None:
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        streams = [llm.stream(PROMPT[:n], max_tokens=100, ignore_eos=True) for n in (5, 20, 40)]
        for stream in streams:
            next(stream)
        (pid,) = ranks_of(llm).pids.values()
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(NibbleError, match="rank 1 of 2 was killed by signal 9"):
                for _ in stream:
                    pass
        with pytest.raises(RankError, match="rank 1 of 2 was killed"):
            llm.generate(PROMPT, max_tokens=1)
        assert ended(pid)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        (pid,) = ranks_of(llm).pids.values()
        monkeypatch.setattr(ranks_of_engine, "FROZEN_S", 1.0)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(NibbleError, match="rank 1 of 2 is stopped, as by SIGSTOP"):
                llm.generate(PROMPT, max_tokens=4)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert ended(pid)


def test_a_long_step_is_no_hang(divided: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(divided)
    here = ranks.here
    assert here
    all_gather, calls = here.group.all_gather, list[int]()

    def slow(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            until = time.monotonic() + 120
            while not taken_up() and time.monotonic() < until:
                time.sleep(0.01)
            with monkeypatch.context() as now:
                # The others wait for this rank, and any wait to take the step up would be too long.
                now.setattr(ranks_of_engine, "HANG_S", 0.0)
                time.sleep(0.5)
        return all_gather(x)

    def taken_up() -> bool:
        count = ranks_of_engine.COUNT.unpack_from(ranks._map, ranks_of_engine.COUNT.size)
        return int(count[0]) == ranks._num_sent

    monkeypatch.setattr(here.group, "all_gather", slow)
    assert divided.generate(PROMPT, max_tokens=2).completions[0].finish_reason == "length"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal; what runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_middle_of_a_step_waits_for_its_end(
    divided: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = divided.generate(PROMPT, **options).completions[0].token_ids
    here = ranks_of(divided).here
    assert here
    all_gather, calls = here.group.all_gather, list[int]()

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 7:
            signal.raise_signal(signal.SIGINT)
        return all_gather(x)

    monkeypatch.setattr(here.group, "all_gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        divided.generate(PROMPT, **options)
    assert len(calls) > 7
    # The ranks are where rank 0 is.
    assert divided.generate(PROMPT, **options).completions[0].token_ids == expected


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_a_step_that_is_left_midway_is_the_last_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        here = ranks_of(llm).here
        assert here

        def interrupted(_: torch.Tensor) -> torch.Tensor:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError

        monkeypatch.setattr(here.group, "all_gather", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, max_tokens=1)
        with pytest.raises(RankError, match="rank 0 of 2 was interrupted in a step"):
            llm.generate(PROMPT, max_tokens=1)


def test_ranks_find_one_another_within_the_host(divided: LLM) -> None:
    assert listening() == {"0100007F"}, "127.0.0.1, and nothing else"


def listening() -> set[str]:
    """Return the addresses at which this process listens, as the system writes them."""
    own = {f"socket:[{link.stat().st_ino}]" for link in Path("/proc/self/fd").iterdir() if link.is_socket()}
    tables = (Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    sockets = [line.split() for table in tables for line in table]
    return {one[1].partition(":")[0] for one in sockets if one[3] == "0A" and f"socket:[{one[9]}]" in own}


@pytest.mark.slow
def test_a_start_that_fails_in_a_rank_says_which_and_why(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import sys\nfrom nibble.engine import build, rank\n"
        "def load(*_, **__): raise MemoryError('no room for the weights')\n"
        "build.load = load\nrank.run(sys.argv[1:])\n"
    )
    monkeypatch.setattr(ranks_of_engine, "PROGRAM", (sys.executable, str(program)))
    with pytest.raises(RankError, match=r"rank 1 of 2 failed \(MemoryError: no room for the weights\)"):
        LLM(str(path), tp=2, kv_format="nvfp4", **OPTIONS)


def test_a_rank_that_ends_before_it_connects_is_not_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_of_engine, "PROGRAM", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(RankError, match="rank 1 of 2 ended with code 3, of which it said nothing"):
        LLM(str(path), tp=2, kv_format="fp32", **OPTIONS)


@pytest.mark.slow
def test_a_rank_without_memory_in_a_step_says_so(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import sys\nfrom nibble.engine import rank\nown, steps = rank.Follower.compute, []\n"
        "def compute(self, numbers):\n"
        "    steps.append(1)\n"
        "    if numbers.num_tokens == 13: raise MemoryError('no room for 13 tokens')\n"
        "    own(self, numbers)\n"
        "rank.Follower.compute = compute\nrank.run(sys.argv[1:])\n"
    )
    monkeypatch.setattr(ranks_of_engine, "PROGRAM", (sys.executable, str(program)))
    with LLM(str(path), tp=2, kv_format="fp32", **OPTIONS) as llm:
        assert llm.generate(PROMPT[:12], max_tokens=2).completions[0].finish_reason == "length"
        with pytest.raises(NibbleError, match=r"rank 1 of 2 failed \(MemoryError: no room for 13 tokens\)"):
            llm.generate(PROMPT[20:33], max_tokens=2)
        (pid,) = ranks_of(llm).pids.values()
        assert ended(pid)


@pytest.mark.slow
def test_what_rank_0_fails_in_is_no_matter_of_its_connections(
    divided: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever words an error has: a rank that lives is not the reason."""
    error = RuntimeError("connection to the store of NCCL timed out")
    assert ranks_of(divided).explained(error) is error
    failure = ranks_of(divided)._end_of
    monkeypatch.setattr(ranks_of_engine, "memory_kills", lambda: ranks_of(divided)._memory_kills + 1)
    with subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) as process:
        process.wait()
    assert (
        failure(process) == "was killed by signal 9; memory was short, and the system killed a process for it"
    )


def test_what_every_rank_refuses_is_said_as_on_one_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        # By then another rank has said so, too, and has ended.
        time.sleep(0.5)
        raise ConfigError("a layer cannot be joined")

    ranks = list[Ranks]()
    own = Ranks.start

    def start(self: Ranks, message: Any) -> Any:
        ranks.append(self)
        here = own(self, message)
        self._fail("rank 1 of 2 failed (ConfigError: a layer cannot be joined)")
        return here

    monkeypatch.setattr(Ranks, "start", start)
    monkeypatch.setattr("nibble.engine.build.join", refuse)
    with pytest.raises(ConfigError, match="a layer cannot be joined"):
        LLM(str(path), tp=2, kv_format="fp32", **OPTIONS)
    assert all(ended(pid) for pid in ranks[0].pids.values())


@pytest.mark.slow
def test_an_engine_that_nobody_has_any_more_leaves_no_process(path: Path) -> None:
    llm = LLM(str(path), tp=2, kv_format="fp32", **OPTIONS)
    (pid,) = ranks_of(llm).pids.values()
    del llm
    gc.collect()
    assert ended(pid)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp": 3}, "cannot be divided among 3 GPUs; the nearest number that works is --tp 2"),
        ({"tp": 8}, "the nearest number that works is --tp 4"),
        ({"tp": 2, "watch_fidelity": 0.5}, "--watch-fidelity with --tp 2 is not served"),
        ({"tp": 2, "compile_cache": True}, "--compile-cache with --tp 2 is not served"),
        ({"tp": 2, "speculative": "mtp"}, "--speculative lookup and draft:PATH work"),
        ({"tp": 2, "kv_format": "nvfp4", "require_quality": "kl=1"}, "has no certificate that counts"),
        ({"tp": 0}, "tp must be at least 1"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_starts(
    path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(path), **{"kv_format": "fp32", **OPTIONS, **options})


def test_torch_is_left_as_it_was() -> None:
    assert not torch.distributed.is_initialized()
