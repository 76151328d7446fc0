"""What the system says of processes, asked about real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nibble import processes

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


def becomes(holds: Callable[[], bool]) -> bool:
    """Whether something comes about that the system does, which may take it a moment."""
    for _ in range(2000):
        if holds():
            return True
        time.sleep(0.01)
    return False


def test_a_process_that_is_stopped_and_a_group_that_ends() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        assert not processes.is_stopped(process.pid) and processes.group_lives(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        assert becomes(lambda: processes.is_stopped(process.pid))
        assert processes.group_lives(process.pid), "it is stopped, and has not ended"
        processes.kill_group(process.pid)
        # Before its parent asks how it ended.
        assert becomes(lambda: not processes.group_lives(process.pid))
        assert processes.ending(process.wait()) == "was killed by signal 9"
    processes.kill_group(process.pid)
    assert not processes.is_stopped(process.pid) and not processes.group_lives(process.pid)


def test_how_a_process_ended() -> None:
    code = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False).returncode
    assert processes.ending(code) == "ended with code 3"


def test_processes_that_died_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, stat = tmp_path / "memory.events", tmp_path / "vmstat"
    monkeypatch.setattr(processes, "KILL_COUNTS", (str(events), str(stat)))
    assert processes.memory_kills() == 0
    events.write_text("low 0\noom 5\noom_kill 2\noom_group_kill 1\n")
    assert processes.memory_kills() == 2
    stat.write_text("nr_free_pages 7\noom_kill 3\n")
    assert processes.memory_kills() == 5
