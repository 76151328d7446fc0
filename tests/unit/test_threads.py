"""How many threads torch gets: by the model's size, the CPUs that may be used, and what other programs take of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nibble import LLM, threads
from nibble.errors import ConfigError
from nibble.threads import BYTES_PER_THREAD, LoadMeter, busy_seconds, idle_threads, useful_threads

LARGE = 100 * BYTES_PER_THREAD
STAT = """cpu  100 0 50 900 0 0 0 0 0 0
cpu0 60 10 30 400 7 1 2 3 5 0
cpu1 40 0 20 500 0 0 0 0 0 0
intr 12345""".splitlines()


class FixedMeter(LoadMeter):
    """Says what it is told to; `asked` has what it was asked."""

    def __init__(self, others: float | None) -> None:
        self.load, self.asked = others, list[bool]()

    def others(self, *, wait: bool) -> float | None:
        self.asked.append(wait)
        return self.load


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of 8 CPUs, whose environment names no number; torch's is put back."""
    before = torch.get_num_threads()
    for name in threads.USER_COUNTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "usable_cpus", lambda: 8)
    yield monkeypatch
    torch.set_num_threads(before)


def test_small_models_have_work_for_one_thread() -> None:
    assert useful_threads(47 << 20) == 1  # the demo
    assert useful_threads(2 << 30) == 33


@pytest.mark.parametrize(
    ("count", "cpus", "others", "expected"),
    [(8, 8, 0.0, 8), (8, 8, 0.2, 8), (8, 8, 1.0, 7), (8, 8, 3.4, 4), (8, 8, 9.0, 1), (2, 8, 3.0, 2), (8, 8, None, 8)],
)  # fmt: skip
def test_busy_cpus_get_no_thread(count: int, cpus: int, others: float | None, expected: int) -> None:
    assert idle_threads(count, cpus, others) == expected


def test_the_quota_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_affinity", lambda: set(range(16)))
    files = {"/sys/fs/cgroup/cpu.max": ["250000 100000"]}
    monkeypatch.setattr(threads, "read_lines", lambda path: files.get(path, []))
    assert threads.usable_cpus() == 2
    files["/sys/fs/cgroup/cpu.max"] = ["max 100000"]
    assert threads.usable_cpus() == 16
    files.clear()
    files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = ["50000"]
    files["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = ["100000"]
    assert threads.usable_cpus() == 1
    files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = ["-1"]
    assert threads.usable_cpus() == 16


def test_busy_time_is_that_of_the_cpus_that_may_be_used() -> None:
    tick = os.sysconf("SC_CLK_TCK")
    assert busy_seconds(STAT, {0, 1}) == (106 + 60) / tick
    assert busy_seconds(STAT, {0}) == 106 / tick
    assert busy_seconds([], {0}) is None


def test_a_meter_leaves_out_what_this_process_did(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([threads._Sample(0.0, 10.0, 3.0), threads._Sample(10.0, 28.0, 11.0)])
    monkeypatch.setattr(threads, "_sample", lambda: next(samples))
    monkeypatch.setattr("time.monotonic", lambda: 10.0)
    assert LoadMeter().others(wait=False) == pytest.approx(1.0)  # of 18 s of work 8 were its own, in 10 s


@pytest.mark.parametrize(
    ("requested", "weights", "others", "expected", "says"),
    [
        (None, LARGE, 0.1, 8, ""),
        (None, LARGE, 3.0, 5, "computing with 5 threads"),
        (None, 1, 3.0, 1, ""),
        (None, 1, 7.9, 1, "other programs take 7.9 of the 8 CPUs that may be used; computing with 1 thread"),
        (6, 1, 0.0, 6, ""),
        (6, 1, 5.0, 6, "computing with 6 threads; --threads 3 would be faster"),
        (None, LARGE, None, 8, ""),
    ],
)
def test_the_number_and_the_warning(
    machine: pytest.MonkeyPatch, requested: int | None, weights: int, others: float | None, expected: int, says: str
) -> None:  # fmt: skip
    warning = threads.apply(requested, weights, FixedMeter(others))
    assert torch.get_num_threads() == expected
    assert warning.endswith(says) if says else warning == ""


def test_only_a_choice_waits_for_a_measurement(machine: pytest.MonkeyPatch) -> None:
    meter = FixedMeter(None)
    threads.apply(None, LARGE, meter)
    threads.apply(3, LARGE, meter)
    threads.apply(None, 1, meter)
    assert meter.asked == [True, False, False]


def test_the_environment_s_number_stays(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    assert "computing with 3 threads" in threads.apply(None, 1, FixedMeter(7.0))
    assert torch.get_num_threads() == 3


@pytest.mark.slow
def test_answers_do_not_depend_on_the_number(machine: pytest.MonkeyPatch, tiny: Path) -> None:
    prompt = list(range(32, 122))
    logits = []
    for count, budget in ((1, 512), (2, 512), (2, 7)):
        llm = LLM(str(tiny), kv_format="mxfp4", threads=count, token_budget=budget, kv_memory="4MiB")
        assert torch.get_num_threads() == count
        logits.append(llm.logits(prompt))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_a_tiny_model_takes_one_thread(machine: pytest.MonkeyPatch, tiny: Path) -> None:
    LLM(str(tiny), kv_memory="4MiB")
    assert torch.get_num_threads() == 1
    with pytest.raises(ConfigError, match="threads must be at least 1, not 0"):
        LLM(str(tiny), threads=0)


@pytest.mark.parametrize(("given", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")])  # fmt: skip
def test_waiting_threads_sleep_soon(given: dict[str, str], expected: str) -> None:
    """The engine's package sets it before torch is there; what users set stays."""
    code = "import sys, os, nibble.engine; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name not in threads.SPIN_LIMITS} | given
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [expected, "False"]


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("GenuineIntel", "sse avx2", "AUTO,STRICT"),
        ("GenuineIntel", "avx2 avx512f", None),
        ("AuthenticAMD", "avx2", None),
        ("GenuineIntel", "sse", None),
    ],
)
def test_products_in_a_strict_order_where_mkl_would_choose_another(
    vendor: str, flags: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"vendor_id : {vendor}", f"flags\t\t: fpu {flags}"]
    monkeypatch.setattr(threads, "read_lines", lambda path: lines)
    monkeypatch.setattr(os, "environ", {})
    threads.fix_products()
    assert os.environ.get("MKL_CBWR") == expected
    monkeypatch.setattr(os, "environ", {"MKL_CBWR": "COMPATIBLE"})
    threads.fix_products()
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"
