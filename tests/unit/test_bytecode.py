"""Bytecode is kept in the cache folder where an installation has none, and nowhere else."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

import nibble
from nibble import bytecode
from nibble.bytecode import FOLDER

IMPORT = """
import json, os, sys
from importlib.machinery import SourceFileLoader

compiled = []
own = SourceFileLoader.source_to_code
def note(self, data, path, **others):
    compiled.append(os.path.basename(path))
    return own(self, data, path, **others)

def state():
    return sys.pycache_prefix, sys.dont_write_bytecode, os.environ.get("PYTHONPYCACHEPREFIX")

from nibble.bytecode import keep_bytecode
before = state()
with keep_bytecode():
    SourceFileLoader.source_to_code = note
    import torch
    os.environ["OTHER"] = "set in the body"
    with keep_bytecode():
        inside = state()
    assert inside == state()
assert state() == before and os.environ["OTHER"]
one, other = keep_bytecode(), keep_bytecode()  # as of two threads
one.__enter__()
other.__enter__()
one.__exit__(None, None, None)
assert state() == inside
other.__exit__(None, None, None)
assert state() == before
print(json.dumps({"value": torch.VALUE, "compiled": compiled, "inside": inside}))
"""


def installed(folder: Path, value: int = 1) -> Path:
    """A package in the place of the large one, whose files have the same time and size at all versions."""
    source = folder / "torch" / "__init__.py"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(f"VALUE = {value}\n")
    for old in folder.glob("*.dist-info"):
        old.rmdir()
    (folder / f"torch-{value}.dist-info").mkdir()
    os.utime(source, (1_000_000_000, 1_000_000_000))
    return source


def imported(site: Path, cache: Path, **variables: str) -> dict[str, Any]:
    """What a process finds that imports the package."""
    own = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env=environment
        | {
            "PYTHONPATH": os.pathsep.join([str(site), str(Path(nibble.__file__).parents[1])]),
            "NIBBLE_CACHE": str(cache),
        }
        | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    installed(tmp_path / "site")
    return tmp_path / "site", tmp_path / "cache"


def test_a_second_process_compiles_no_source(places: tuple[Path, Path]) -> None:
    site, cache = places
    first, second = (imported(site, cache, PYTHONDONTWRITEBYTECODE="1") for _ in range(2))
    assert (first["compiled"], second["compiled"]) == (["__init__.py"], []) and second["value"] == 1
    folder, writes_none, variable = first["inside"]
    assert Path(folder).parent == cache / FOLDER and folder == variable and not writes_none
    assert not list(site.rglob("__pycache__"))
    # A process that is started meanwhile reads it, and adds to it.
    assert imported(site, cache, PYTHONPYCACHEPREFIX=folder, PYTHONDONTWRITEBYTECODE="1") == second


def test_another_version_is_compiled(places: tuple[Path, Path]) -> None:
    """Images may give all files one time, and these have the same size."""
    site, cache = places
    for value in (1, 2, 1):
        installed(site, value)
        assert imported(site, cache, PYTHONDONTWRITEBYTECODE="1")["value"] == value


def test_bytecode_beside_the_source_serves(places: tuple[Path, Path]) -> None:
    site, cache = places
    source = installed(site)
    for mode in py_compile.PycInvalidationMode:
        py_compile.compile(str(source), doraise=True, invalidation_mode=mode)
        found = imported(site, cache, PYTHONDONTWRITEBYTECODE="1")
        assert not found["compiled"] and found["inside"] == [None, True, None]
    py_compile.compile(str(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    os.utime(source, (1_000_000_001, 1_000_000_001))
    assert imported(site, cache, PYTHONDONTWRITEBYTECODE="1")["compiled"], "it is another source's"
    assert not imported(site, cache, PYTHONDONTWRITEBYTECODE="1")["compiled"]


def test_python_leaves_it_beside_the_source_where_it_may(places: tuple[Path, Path]) -> None:
    site, cache = places
    assert imported(site, cache)["inside"] == [None, False, None]
    assert list(site.rglob("*.pyc")) and not (cache / FOLDER).exists()


def test_a_folder_that_the_user_has_chosen_stays(places: tuple[Path, Path], tmp_path: Path) -> None:
    site, cache = places
    chosen = str(tmp_path / "chosen")
    found = imported(site, cache, PYTHONPYCACHEPREFIX=chosen, PYTHONDONTWRITEBYTECODE="1")
    assert found["inside"] == [chosen, True, chosen] and not (cache / FOLDER).exists()


def test_a_cache_folder_that_cannot_be_written_is_no_error(places: tuple[Path, Path], tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for _ in range(2):
        assert imported(places[0], file / "cache", PYTHONDONTWRITEBYTECODE="1")["compiled"] == ["__init__.py"]


def test_a_new_folder_is_filled_by_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not where there are few CPUs; as imports look for it."""
    package = tmp_path / "models" / "site" / "a_large_package"
    for name in ("__init__", "part", "tests/unwanted", "models/unwanted", "inner/__init__"):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("VALUE = 1\n")
    (package / "broken.py").write_text("VALUE = (\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(bytecode, "COMPILED_AHEAD", (package.name, "json.decoder", "not_installed"))
    folder = tmp_path / "new" / "folder"
    monkeypatch.setattr(bytecode, "usable_cpus", lambda: bytecode.FEWEST_CPUS - 1)
    assert bytecode._compile_ahead(str(folder)) is None and not folder.exists()
    monkeypatch.setattr(bytecode, "usable_cpus", lambda: bytecode.FEWEST_CPUS)
    process = bytecode._compile_ahead(str(folder))
    assert process is not None
    process.wait(60)
    assert bytecode._compile_ahead(str(folder)) is None, "an earlier start has"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "pycache_prefix", str(folder))
        expected = {
            cache_from_source(str(package / f"{name}.py")) for name in ("__init__", "part", "inner/__init__")
        }
    assert {str(path) for path in folder.rglob("*.pyc")} == expected


def test_a_folder_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytecode, "usable_cpus", lambda: 64)
    (tmp_path / "file").touch()
    assert bytecode._compile_ahead(str(tmp_path / "file" / "folder")) is None
    monkeypatch.setattr(bytecode, "COMPILED_AHEAD", ())
    assert bytecode._compile_ahead(str(tmp_path / "folder")) is None


def test_what_still_compiles_ends_with_its_processes() -> None:
    sleep = "import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{sleep}']); print(1, flush=True); {sleep}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout and process.stdout.readline()
    bytecode._stop(process)
    assert process.poll() is not None
    # Its child had the pipe, too.
    assert process.stdout.read() == b""
    process.stdout.close()
    bytecode._stop(process)
    bytecode._stop(None)
