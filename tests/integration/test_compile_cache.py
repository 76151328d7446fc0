"""Compiled models on disk: a second process takes what a first one compiled, and a file that does not fit is not used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nibble.errors import BackendError
from nibble.models import compile_cache, forward, taps
from nibble.models.compile_cache import CACHE_VARIABLE, TRITON_VARIABLE
from tiny import save_tiny

pytestmark = pytest.mark.slow

SERVE = """
import json, sys, threading
from functools import partial
from torch._dynamo.utils import counters
from nibble.attention.operators import Step
from nibble.models.forward import compiled
from test_compile import answers, served

engines_before = [Step() for _ in range(int(sys.argv[2]))]
llm = served(sys.argv[1], partial(compiled, keep=True))
# As kernels have it that a step's context leads to.
llm.engine.runner.pool.lock = threading.RLock()
found = answers(llm)
print(json.dumps([found, counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]]))
"""


def start(model: Path, cache: Path, engines_before: int = 0) -> tuple[list[Any], int, int]:
    """What a process of its own answers, how many graphs it traced, and how many it compiled or looked for."""
    environment = {
        name: os.environ[name] for name in os.environ if name not in (CACHE_VARIABLE, TRITON_VARIABLE)
    }
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(model), str(engines_before)],
        env=environment | {"NIBBLE_CACHE": str(cache), "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *paths])},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, graphs, compilations = json.loads(done.stdout.splitlines()[-1])
    return found, graphs, compilations


def test_a_second_start_neither_traces_nor_compiles(tmp_path: Path) -> None:
    """Whatever its engine's number, and wherever the checkpoint lies."""
    model, cache = save_tiny(tmp_path / "one", "llama"), tmp_path / "cache"
    expected, graphs, compilations = start(model, cache)
    assert (graphs, compilations) == (1, 1)
    (file,) = (cache / compile_cache.FOLDER).iterdir()
    content = file.read_bytes()
    moved = model.rename(tmp_path / "other")
    assert start(moved, cache, engines_before=2) == (expected, 0, 0)
    assert file.read_bytes() == content
    # A start that died, or a full disk.
    file.write_bytes(content[: len(content) // 2])
    found, graphs, _ = start(moved, cache)
    assert (found, graphs) == (expected, 1)
    assert [path.name for path in file.parent.iterdir()] == [file.name] and len(file.read_bytes()) > len(
        content
    ) // 2
    assert start(moved, cache) == (expected, 0, 0)


class Toy(nn.Module):
    def __init__(
        self, scale: float = 2.0, width: int = 4, function: Callable[..., Tensor] = torch.relu
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
        self.scale, self.function = scale, function
        self.config = SimpleNamespace(to_dict=lambda: {"_name_or_path": str(id(self)), "width": width})


def scaled(model: Toy, x: Tensor) -> Tensor:
    return model.function(x[:, None] * model.weight) * model.scale


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a Toy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIBBLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        x = torch.randn(5)
        torch._dynamo.mark_dynamic(x, 0)
        path = compile_cache.path_of(Toy(), {})
        run = compile_cache.compile_into(path, scaled, (Toy(), x), {})
        assert torch.equal(run(Toy(), x), scaled(Toy(), x))
        return path


def test_what_was_compiled_serves_all_sizes(kept: Path) -> None:
    run = compile_cache.load(kept, scaled, (Toy(), torch.randn(7)))
    for tokens in (2, 3, 100):
        x = torch.randn(tokens)
        assert run.guard_check(Toy(), x) and torch.equal(run(Toy(), x), scaled(Toy(), x))
    assert not run.guard_check(Toy(), torch.randn(1)), "torch specialises on it"


def test_another_share_of_the_cpus_is_served(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU threads are not in the name either; the code of a CPU computes the same with any number."""
    threads, x = torch.get_num_threads(), torch.randn(7)
    torch.set_num_threads(threads + 1)
    try:
        run = compile_cache.load(kept, scaled, (Toy(), x))
        assert run and run.guard_check(Toy(), x) and torch.equal(run(Toy(), x), scaled(Toy(), x))
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert compile_cache._state("cuda")["threads"] is None


@pytest.mark.parametrize(
    "other", [Toy(scale=3.0), Toy(width=5), Toy().double()], ids=["constant", "shape", "dtype"]
)
def test_another_model_is_not_served(kept: Path, other: Toy) -> None:
    assert compile_cache.load(kept, scaled, (other, torch.randn(7))) is None


def test_other_source_is_not_served(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    getsource = compile_cache.inspect.getsource
    monkeypatch.setattr(compile_cache.inspect, "getsource", lambda module: getsource(module) + "# changed\n")
    assert compile_cache.load(kept, scaled, (Toy(), torch.randn(7))) is None


def test_kept_code_that_fails_is_compiled_anew(tmp_path: Path) -> None:
    def fail(*_: object) -> Tensor:
        raise error

    x = torch.randn(1, 3)
    arguments = Toy(), x, x, x, None
    error: Exception = RuntimeError("no such kernel")
    logits, artifact = forward._first_call(fail, lambda *_: x, arguments)
    assert logits is x and artifact is None
    # What would fail again is not tried again.
    error = BackendError("a step cannot be computed")
    with pytest.raises(BackendError):
        forward._first_call(fail, lambda *_: x, arguments)


def test_code_that_cannot_be_written_serves_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("cannot pickle")

    x, path = torch.randn(5), tmp_path / "kept.bin"
    torch._dynamo.mark_dynamic(x, 0)
    monkeypatch.setattr(compile_cache.files, "write_atomic", fail)
    run = compile_cache.compile_into(path, scaled, (Toy(), x), {})
    assert torch.equal(run(Toy(), x), scaled(Toy(), x)) and not path.exists()


@pytest.mark.parametrize("content", [b"", b"half", b"\x80\x04."])
def test_a_broken_file_is_not_served(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.bin"
    path.write_bytes(content)
    assert compile_cache.load(path, scaled, (Toy(), torch.randn(7))) is None
    assert compile_cache.load(tmp_path / "none.bin", scaled, (Toy(), torch.randn(7))) is None


def test_what_guards_do_not_see_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile_cache.path_of(Toy(), {})
    assert compile_cache.path_of(Toy(), {}) == path, "where a checkpoint lies does not matter"
    others = [
        compile_cache.path_of(Toy(function=torch.tanh), {}),
        compile_cache.path_of(Toy(), {"combo_kernels": True}),
        compile_cache.path_of(Toy().double(), {}),
    ]
    with torch._inductor.config.patch(max_autotune=True):
        others.append(compile_cache.path_of(Toy(), {}))
    with torch.autocast("cpu", torch.bfloat16):
        others.append(compile_cache.path_of(Toy(), {}))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        others.append(compile_cache.path_of(Toy(), {}))
    monkeypatch.setattr(compile_cache.metadata, "version", lambda package: "0")
    others.append(compile_cache.path_of(Toy(), {}))
    assert len({path, *others}) == 1 + len(others)


def test_where_hidden_states_are_left_is_in_the_name() -> None:
    def path(layers: Sequence[int] | None) -> Path:
        model: Any = nn.ModuleDict({"layers": nn.ModuleList([Toy() for _ in range(3)])})
        inner: Any = nn.ModuleDict({"model": model})
        inner.config = Toy().config
        if layers != ():
            taps.attach(inner, "model.layers", model.layers, layers)
        return compile_cache.path_of(inner, {})

    tapped: list[Sequence[int] | None] = [(), None, (1,), (2,), (1, 3), (3, 1)]
    assert len(set(map(path, tapped))) == len(tapped)
    assert path((1, 3)) == path((1, 3))


def test_the_cache_folder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path))
    paths = {
        name: tmp_path / name
        for name in (
            "triton/A/k.cubin",
            "inductor/fxgraph/ab/f",
            "kernels/x.cubin",
            "tuned/h100.json",
            "observed/m",
        )
    }
    for age, path in enumerate(paths.values()):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(1 << 16))
        for part in (path, path.parent):
            os.utime(part, (1000 + age, 1000 + age))
    monkeypatch.setenv(compile_cache.LIMIT_VARIABLE, "80KiB")
    compile_cache.limit_cache_folder()
    # The oldest are gone; what was measured is no cache.
    assert [name for name, path in paths.items() if path.exists()] == [*paths][2:]
    monkeypatch.setenv(compile_cache.LIMIT_VARIABLE, "many")
    compile_cache.limit_cache_folder()
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path / "none"))
    compile_cache.limit_cache_folder()
