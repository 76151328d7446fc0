"""How many threads a CPU computes with, how long those that wait spin, and in which order products are added up.

An operation on several threads ends with the slowest of them. Where another program has one of the cores, that thread
waits for a time slice, which is milliseconds in each of the hundreds of operations of a step, and meanwhile the others
spin. So a model gets as many threads as it has work for, and no more than there are idle CPUs.

Answers do not depend on the number. torch is imported only where it is told the number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from nibble.hardware import machine_share, read_lines

BYTES_PER_THREAD = 64 << 20
"""Weights that keep one thread busy for a step: below that, threads wait for one another longer than they compute."""
SPIN_LIMITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
"""Of GNU's OpenMP, which PyTorch's wheels bring, in rounds (it takes 1000 itself where it knows of too few CPUs, and
300,000 otherwise); of LLVM's and Intel's in milliseconds (200 otherwise)."""
USER_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
NOISE = 0.25
"""CPUs that a machine's own housekeeping may take without counting as busy."""
MIN_INTERVAL_S = 0.25
"""Over which the load is measured: the kernel counts in hundredths of a second."""


def fix_products() -> None:
    """Let MKL add up a row of a product in the same order whatever the number of rows, where it can.

    On Intel's CPUs without AVX-512 it would not, and an answer would depend on its prompt's chunks in the last bits.
    With AVX-512 it does for the numbers of rows that Nibble gives it, and its strict mode is slower. It has effect
    before the first product.
    """
    lines = read_lines("/proc/cpuinfo")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    if "avx2" in flags and "avx512f" not in flags and any("GenuineIntel" in line for line in lines):
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def limit_spinning() -> None:
    """Let threads that wait sleep soon, unless the environment says otherwise; has effect before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in SPIN_LIMITS.items():
            os.environ.setdefault(name, value)


def usable_cpus() -> int:
    """Return the CPUs that this process may use: its affinity, within its control group's quota, shared by replicas."""
    count = len(_affinity())
    quota = _quota()
    return max(1, (count if quota is None else max(1, min(count, int(quota)))) // machine_share())


def useful_threads(weights: int) -> int:
    """Return how many threads a model of so many bytes has work for."""
    return 1 + weights // BYTES_PER_THREAD


def idle_threads(threads: int, cpus: int, others: float | None) -> int:
    """Return as many of `threads` as there are idle CPUs for, one at least.

    Args:
        threads: that have work.
        cpus: that may be used.
        others: CPUs that other programs keep busy, None where that is not known.
    """
    return max(1, min(threads, int(cpus - (others or 0.0) + NOISE)))


@dataclass(frozen=True, slots=True)
class _Sample:
    """Seconds so far: of the clock, of all work on this process's CPUs, and of this process's."""

    clock: float
    busy: float | None
    own: float


class LoadMeter:
    """Measures what other programs take of this process's CPUs, from its creation on."""

    def __init__(self) -> None:
        self._start = _sample()

    def others(self, *, wait: bool) -> float | None:
        """Return the CPUs that other programs kept busy; None where the system does not say, or it is too early to.

        wait: a fraction of a second, where it is too early.
        """
        early = MIN_INTERVAL_S - (time.monotonic() - self._start.clock)
        if self._start.busy is None or (early > 0 and not wait):
            return None
        time.sleep(max(early, 0.0))
        end = _sample()
        if end.busy is None:
            return None
        seconds = end.busy - self._start.busy - (end.own - self._start.own)
        return max(0.0, seconds / (end.clock - self._start.clock))


def apply(requested: int | None, weights: int, meter: LoadMeter) -> str:
    """Set the threads of torch, and return a warning where the machine is too busy for a good speed, else "".

    Args:
        requested: the number that the user named, None to choose.
        weights: bytes of the model's weights.
        meter: begun some time ago.
    """
    import torch

    cpus = usable_cpus()
    if requested is None and any(map(os.environ.get, USER_COUNTS)):
        requested = torch.get_num_threads()
    threads = requested or min(cpus, useful_threads(weights))
    others = meter.others(wait=requested is None and threads > 1)
    if others is not None:
        # The parts of the other replicas are not this process's to lose.
        others = max(0.0, others - cpus * (machine_share() - 1))
    idle = idle_threads(threads, cpus, others)
    torch.set_num_threads(requested or idle)
    if others is None or cpus - others + NOISE >= threads:
        return ""
    return _warning(requested or idle, idle, f"{others:.1f} of the {cpus} CPUs that may be used")


def _warning(threads: int, idle: int, share: str) -> str:
    number = "1 thread" if threads == 1 else f"{threads} threads"
    hint = f"; --threads {idle} would be faster" if threads > idle else ""
    return f"this machine is busy, and answers come slower: other programs take {share}; computing with {number}{hint}"


def _affinity() -> set[int]:
    # Systems other than Linux have none.
    affinity = getattr(os, "sched_getaffinity", None)
    return affinity(0) if affinity else set(range(os.cpu_count() or 1))


def _quota() -> float | None:
    """Return the CPUs that the control group allows (cgroup v2 or v1), None for any number."""
    fields = "".join(read_lines("/sys/fs/cgroup/cpu.max")).split()
    if not fields:
        fields = [
            "".join(read_lines(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us")) for name in ("quota", "period")
        ]
    if not all(field.isdigit() for field in fields) or len(fields) != 2 or not int(fields[1]):
        return None
    return int(fields[0]) / int(fields[1])


def _sample() -> _Sample:
    return _Sample(time.monotonic(), busy_seconds(read_lines("/proc/stat"), _affinity()), time.process_time())


def busy_seconds(stat: Iterable[str], cpus: set[int]) -> float | None:
    """Return the seconds that some CPUs were busy, None where none of them is listed. stat: lines of /proc/stat."""
    ticks = [
        # user, nice, system; idle and iowait are left out; irq, softirq, steal. Guests count as user already.
        sum(map(int, fields[1:4] + fields[6:9]))
        for fields in map(str.split, stat)
        if fields and fields[0][:3] == "cpu" and fields[0][3:].isdigit() and int(fields[0][3:]) in cpus
    ]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
