"""What all tests share: one thread for torch (tests run side by side), fixed Hypothesis, tiny models on disk.

Tests run on the CPU, whatever the machine has, and Triton's kernels in its interpreter; NIBBLE_TEST_GPU=1 lets the
conformance suite, and the kernels' tests, see a GPU.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["NIBBLE_CERTIFICATES"] = "/nowhere/certificates"
os.environ["NIBBLE_TUNED"] = "/nowhere/tuned"  # what this machine's user measured is no business of tests
if os.environ.get("NIBBLE_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from nibble import threads
from nibble.attention.planner.evidence import LedgerEntry, update_ledger
from nibble.errors import PLAN, set_caller
from nibble.models import observations

settings.register_profile(
    "nibble", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nibble")
torch.set_num_threads(1)
set_caller(PLAN)  # as the command line has them, where most tests come from


def pytest_collection_finish() -> None:
    """Kernels are in modules of tests by now, or in none."""
    freeze()
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        import fast_interpreter

        fast_interpreter.install()


def freeze() -> None:
    """Keep what there is out of garbage collection: an LLM that is closed looks through all the rest each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # at its end the interpreter takes modules apart


@pytest.fixture(scope="module", autouse=True)
def modules_stay() -> None:
    """What the tests of modules before made others import, and compile, is as long-lived."""
    # Not at the end of a module: its last test still has what it was given.
    freeze()


@pytest.fixture(scope="session", autouse=True)
def observations_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests observe of their models is not kept for this machine's user."""
    observations.FOLDER = str(tmp_path_factory.mktemp("observed"))


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """Engines that a test did not close go with it, if it took its time: they are few objects, and many bytes."""
    start = perf_counter()
    yield
    if perf_counter() - start > 1:
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def no_other_programs() -> None:
    """What else this machine does is no business of tests: it would be a warning of some starts."""
    threads._sample = lambda: threads._Sample(0.0, None, 0.0)


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """A server that a test begins to start in this process lets loggers write to what is standard error then."""
    logger = logging.getLogger("nibble")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-shaped checkpoint with a byte-level tokenizer."""
    from tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def scalars_bound_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since NumPy 2.4 an array of one element is no number, which Triton 3.6's interpreter takes it for."""
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: object) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy rounds a row of a product by its place among others, on some processors; the interpreter's tl.dot is one.

    In float64 that is far below what float32 keeps.
    """
    from triton.runtime import interpreter

    dot, np = interpreter.InterpreterBuilder.create_dot, interpreter.np

    def precise(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if {x.data.dtype.kind for x in (a, b)} != {"f"}:  # bytes of formats that NumPy has not
            return dot(self, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", precise)


# The ledger: tests of conformance say what they are about; what no test of a combination disproves goes into it, written
# once, at the end, by the process that hears of all. A run that was cut short disproves, and confirms nothing.

from conformance_report import PROPERTY  # noqa: E402

_heard: dict[bool, list[LedgerEntry]] = {True: [], False: []}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ledger", type=Path, help="write what conformed on this machine to a ledger (docs/ledger.json)"
    )
    parser.addoption(
        "--every-case", action="store_true", help="run all cases of tests that are marked sample(n)"
    )
    parser.addoption(
        "--record-durations",
        type=Path,
        help="write the seconds of each test file, and of tests that should be marked slow, to a JSON file",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked sample(n), and has more cases, run n that lie evenly among them.

    On a GPU, and for a ledger, all of them: what a row says is about every one.
    """
    options = config.option
    if options.every_case or options.ledger or os.environ.get("NIBBLE_TEST_GPU") == "1":
        return
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault((item.location[0], item.nodeid.partition("[")[0]), []).append(item)
    left_out = set[pytest.Item]()
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("sample")
        count = min(marker.args[0], len(of_test)) if marker else 0
        left_out |= {*of_test} - {of_test[len(of_test) * place // count] for place in range(count)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


FEW_SECONDS = 4
"""A test that takes longer should be marked slow, unless a newcomer needs it, so that the others end soon anywhere."""
_durations: dict[str, float] = {}
_unmarked: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.partition("::")[0]
    _durations[file] = _durations.get(file, 0.0) + report.duration
    if report.duration > FEW_SECONDS and "slow" not in report.keywords:
        _unmarked[report.nodeid] = report.duration
    if report.when == "call" and not report.skipped:
        entries = [
            LedgerEntry(**json.loads(value)) for name, value in report.user_properties if name == PROPERTY
        ]
        _heard[report.passed] += entries


def _descending(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(s, 1) for name, s in sorted(seconds.items(), key=lambda entry: -entry[1])}


def pytest_runtest_logfinish() -> None:
    """After a kernel's illegal access every test of a process fails: with -n, another process takes its place."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except torch.AcceleratorError:
            os._exit(1)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    durations = session.config.getoption("--record-durations")
    if durations and not hasattr(session.config, "workerinput"):
        durations.parent.mkdir(parents=True, exist_ok=True)
        recorded = {"files": _descending(_durations), "not marked slow": _descending(_unmarked)}
        durations.write_text(json.dumps(recorded, indent=1) + "\n")
    path = session.config.getoption("--ledger")
    if path and not hasattr(session.config, "workerinput"):
        whole = exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
        update_ledger(path, _heard[True] if whole else (), _heard[False])
