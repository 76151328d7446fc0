"""Kernels that are compiled ahead: a rehearsal launches nothing, and what it compiled is not compiled again.

Triton compiles for a GPU that is not here; a driver stands in for the one that this takes.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nibble.errors import BackendError
from nibble.kernels import ahead, ahead_worker

HERE = Path(__file__)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed here"
)

COMPILED = """
import json, sys, threading, time
from collections import Counter
from unittest import mock
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from nibble.kernels import ahead
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.attention.triton import merge_kernel, merge_lse

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0

driver.set_active(Driver())
seen = Counter()

def note(*, src, cache_hit, **others):
    where = "here" if threading.current_thread() is threading.main_thread() else "ahead"
    seen[f"{'found' if cache_hit else 'compiled'} {where}"] += 1

triton.knobs.compilation.listener = note

def merge(heads):
    part = PartialAttention(torch.zeros(4, heads, 64), torch.zeros(heads, 4))
    return merge_lse(part, part, torch.float32)

own = JITFunction.run, torch.empty, torch.Tensor.new_empty
with ahead.rehearsal():
    for heads in (2, 4, 2):
        merge(heads)
    assert (merge(2).values_THD == 0).all()
assert own == (JITFunction.run, torch.empty, torch.Tensor.new_empty)
# The step itself: it takes what is compiled, waits for what is not, and compiles the rest. There is no GPU to launch on.
with mock.patch.object(JITFunction, "run", lambda self, *args, **kwargs: own[0](self, *args, **{**kwargs, "warmup": True})):
    for heads in (2, 4, 8, 8):
        merge(heads)
ahead.finish()
# What fails in a thread fails where it is needed.
def fail(*_, **__):
    raise ValueError("cannot be compiled")
merge_kernel.compile = fail
with ahead.rehearsal():
    merge(16)
try:
    with mock.patch.object(JITFunction, "run", lambda self, *args, **kwargs: own[0](self, *args, **{**kwargs, "warmup": True})):
        merge(16)
except ValueError as error:
    seen[str(error)] += 1
print(json.dumps(seen))
"""


def run_program(program: str, cache: Path, **variables: str) -> str:
    """What a program prints in a process of its own, where Triton compiles."""
    hidden = ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@needs_triton
def test_triton_compiles_in_threads_once_and_a_second_start_not_at_all(tmp_path: Path) -> None:
    for kind in ("compiled", "found"):
        expected = f'{{"{kind} ahead": 2, "{kind} here": 1, "cannot be compiled": 1}}'
        assert run_program(COMPILED, tmp_path) == expected


BESIDE = (
    COMPILED.split("# What fails in a thread", maxsplit=1)[0].replace(
        "seen = Counter()",
        """seen = Counter()
from torch._inductor.async_compile import AsyncCompile
AsyncCompile.process_pool()
while not AsyncCompile.use_process_pool():
    time.sleep(0.05)
""",
    )
    + """
print(json.dumps(seen))
AsyncCompile.process_pool().shutdown()
"""
)


@pytest.mark.slow
@needs_triton
def test_processes_of_torchs_compiler_compile_where_there_are_any(tmp_path: Path) -> None:
    # What a process has compiled is found on disk.
    printed = run_program(BESIDE, tmp_path, TORCHINDUCTOR_COMPILE_THREADS="2")
    assert printed == '{"found ahead": 2, "compiled here": 1}'


@needs_triton
def test_a_kernel_brings_its_kind_of_source() -> None:
    """Triton's and Gluon's have one name on disk, so the wrong one would be found there."""
    pytest.importorskip("triton.experimental.gluon")
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    for source in (ASTSource, GluonASTSource):
        data = io.BytesIO()
        ahead_worker._Pickler(data).dump(source)
        assert pickle.loads(data.getvalue()) is source


def test_a_kernel_of_other_source_is_not_compiled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    module, kernel = ModuleType("kernels_of_a_test"), SimpleNamespace(cache_key="its source")
    monkeypatch.setattr(module, "kernel", kernel, raising=False)
    monkeypatch.setitem(sys.modules, "kernels_of_a_test", module)
    assert ahead_worker.function_of("kernels_of_a_test", "kernel", "its source") is kernel
    with pytest.raises(LookupError, match="other source"):
        ahead_worker.function_of("kernels_of_a_test", "kernel", "another")


def test_threads_compile_once_a_process_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = list[bytes]()

    class SubprocPool:
        def submit(self, _: Any, data: bytes) -> Future[bool]:
            jobs.append(data)
            future = Future[bool]()
            future.set_exception(RuntimeError("the process has ended"))
            return future

    pool = lru_cache(SubprocPool)
    compiler = SimpleNamespace(process_pool=pool, use_process_pool=lambda: is_ready)
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", SimpleNamespace(AsyncCompile=compiler))
    monkeypatch.setattr(ahead_worker, "_has_failed", threading.Event())
    kernel, is_ready = SimpleNamespace(ASTSource=dict), True

    def compiles() -> bool:
        return ahead_worker.compile_elsewhere(kernel, {}, {}, {}, None, {})

    assert not compiles() and not jobs, "they were not started"
    pool()
    is_ready = False
    assert not compiles() and not jobs, "they are not ready"
    is_ready = True
    assert not compiles() and len(jobs) == 1
    assert not compiles() and len(jobs) == 1, "it has failed"


def test_memory_is_zero_in_a_rehearsal_of_this_thread() -> None:
    found = dict[str, Any]()

    def elsewhere() -> None:
        found["rehearses"] = ahead.is_rehearsal()

    with ahead.rehearsal():
        assert ahead.is_rehearsal()
        assert not torch.empty(1000, dtype=torch.int64).any()
        x = torch.ones(3)
        assert not x.new_empty(50, dtype=torch.int32).any() and not torch.empty_like(x).any()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not found["rehearses"] and not ahead.is_rehearsal()


def test_an_error_ends_the_rehearsal() -> None:
    with pytest.raises(ValueError), ahead.rehearsal():
        raise ValueError
    assert not ahead.is_rehearsal()
    with ahead.rehearsal():
        assert ahead.is_rehearsal()


def test_an_error_of_the_start_abandons_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, begin, compiled = ThreadPoolExecutor(1), threading.Event(), list[int]()
    monkeypatch.setattr(ahead, "_pool", lambda: pool)

    def compile(number: int) -> None:
        begin.wait()
        compiled.append(number)

    with pytest.raises(BackendError), ahead.abandoned_on_error():
        futures = [ahead.submit(number, partial(compile, number)) for number in range(3)]
        assert ahead.num_unfinished() == 3
        raise BackendError("a kernel is wrong")
    begin.set()
    pool.shutdown()
    assert compiled in ([], [0]) and futures[2].cancelled() and not ahead.num_unfinished()


def test_machine_code_comes_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("nibble.kernels.nvrtc", reason="cuda-bindings is not installed")
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path))
    source, threads, loaded = tmp_path / "twice.cu", list[str](), list[bytes]()
    source.write_text('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }')
    own = nvrtc._compile

    def compile(*arguments: Any) -> bytes:
        threads.append(threading.current_thread().name)
        code: bytes = own(*arguments)
        return code

    monkeypatch.setattr(nvrtc, "_compile", compile)
    monkeypatch.setattr(nvrtc.Kernel, "_load", lambda self, code: loaded.append(code))
    with ahead.rehearsal():
        codes = [nvrtc.code_of(source, 90, {"FACTOR": factor}) for factor in (2, 3, 2)]
        kernel, broken = (
            nvrtc.Kernel(code, "twice", 0) for code in (codes[0], nvrtc.code_of(source, 90, {}))
        )
        kernel.launch(1, 32, 0, (), ())
        assert not loaded
    assert all(isinstance(code, Future) for code in codes) and codes[0] is codes[2]
    with pytest.raises(BackendError, match="FACTOR"):
        broken.launch(1, 32, 0, (), ())
    assert codes[1].result().startswith(nvrtc.ELF)
    ahead.finish()
    assert len(threads) == 3 and all(name.startswith("nibble-ahead") for name in threads)
    # From disk, as a second start takes it.
    assert nvrtc.code_of(source, 90, {"FACTOR": 2}) == codes[0].result() and len(threads) == 3
