"""Torch and Triton keep what they compile where the next start finds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from torch._inductor.runtime import compile_tasks

from nibble.kernels import ahead
from nibble.models import compile_cache
from nibble.models.compile_cache import ASSEMBLER_VARIABLE


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[None]:
    """Without the variables, and with a torch that brings an assembler of its own, as its CUDA builds do."""
    for folder in ("torch/bin", "torch/_inductor/bin"):  # where torch 2.11 looks for it, and 2.13
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "ptxas").touch(0o755)
    source = tmp_path / "torch/_inductor/runtime/compile_tasks.py"
    names = (ASSEMBLER_VARIABLE, compile_cache.CACHE_VARIABLE, compile_cache.TRITON_VARIABLE)
    others = {name: value for name, value in os.environ.items() if name not in names}
    with (
        mock.patch.object(compile_tasks, "__file__", str(source)),
        mock.patch.dict(os.environ, {**others, "NIBBLE_CACHE": str(tmp_path / "cache")}, clear=True),
    ):
        yield


def test_kernels_are_assembled_by_one_program(tmp_path: Path) -> None:
    """Its version is in a kernel's name on disk, and a process asks for it once."""
    triton = pytest.importorskip("triton")
    choose = compile_tasks._set_triton_ptxas_path.__wrapped__
    before = triton.knobs.nvidia.ptxas.path
    compile_cache.use_cache_folder()
    choose()
    assert triton.knobs.nvidia.ptxas.path == before
    del os.environ[ASSEMBLER_VARIABLE]
    choose()
    assert os.environ[ASSEMBLER_VARIABLE].startswith(str(tmp_path)), (
        "inductor chooses none: nothing is needed"
    )


def test_what_the_user_has_chosen_stays(tmp_path: Path) -> None:
    names = (ASSEMBLER_VARIABLE, compile_cache.CACHE_VARIABLE, compile_cache.TRITON_VARIABLE)
    os.environ.update(chosen := {name: str(tmp_path / name) for name in names})
    compile_cache.use_cache_folder()
    assert {name: os.environ[name] for name in names} == chosen


def test_what_names_kernels_is_computed_meanwhile() -> None:
    key = pytest.importorskip("triton.runtime.cache").triton_key
    key.cache_clear()
    compile_cache.begin(compiles=False, keep=True)
    ahead.finish()
    assert key.cache_info().currsize == 1
