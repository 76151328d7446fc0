"""What the system says of processes: whether one is stopped, whether a group of them lives, what memory they died of.

Where there is no /proc, nothing is known, and nothing is concluded from that.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from nibble.hardware import read_lines

STOPPED, ENDED = "T", "ZX"
"""Letters of states: by a signal (a debugger's is `t`), and ended though its parent has not asked yet how."""
KILL_COUNTS = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, and computes nothing until it is continued."""
    return _state_and_group(f"/proc/{pid}/stat")[0] == STOPPED


def group_lives(group: int) -> bool:
    """Return whether a process of a group is left that has not ended."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    # One that has ended stays in the group until its parent asks for it, which may be never.
    stats = [_state_and_group(str(path)) for path in Path("/proc").glob("[0-9]*/stat")]
    return not stats or any(own == group and state not in ENDED for state, own in stats)


def kill_group(group: int) -> None:
    """Kill what is left of a group of processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def memory_kills() -> int:
    """Return how many processes of this control group, or machine, the system has killed for want of memory."""
    return sum(_kills(path) for path in KILL_COUNTS)


def ending(code: int) -> str:
    """Return how a process ended that has this exit status."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _kills(path: str) -> int:
    fields = [line.split() for line in read_lines(path)]
    return sum(int(field[1]) for field in fields if len(field) == 2 and field[0] == "oom_kill")


def _state_and_group(path: str) -> tuple[str, int]:
    """Return the letter of a process's state and its group; see proc(5)."""
    lines = read_lines(path)
    # A name may have spaces and brackets.
    fields = lines[0].rpartition(")")[2].split() if lines else []
    return (fields[0], int(fields[2])) if len(fields) > 2 else ("", 0)
