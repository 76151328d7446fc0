"""What the compiler would refuse in Triton kernels, and the interpreter, which runs them on a CPU, lets pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nibble

SOURCE = Path(nibble.__file__).parent.parent

LOOK = """
import importlib, pkgutil
from triton.runtime.jit import JITCallable
import nibble.kernels as package

found = 0
for entry in pkgutil.walk_packages(package.__path__, 'nibble.kernels.'):
    module = importlib.import_module(entry.name)
    for name, kernel in vars(module).items():
        if isinstance(kernel, JITCallable):
            found += 1
            try:
                kernel.cache_key
            except RuntimeError as error:
                print(f"{entry.name}.{name}: {error}")
print(found, "kernels")
"""
"""A kernel's key is made of every name that it and what it calls refer to: others than compiled ones are refused."""


def test_kernels_call_nothing_that_only_the_host_knows() -> None:
    compiled = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=SOURCE, env=compiled, check=True, capture_output=True, text=True
    )
    *refused, count = run.stdout.splitlines()
    assert not refused
    assert int(count.split()[0]) > 100, "the kernels were not found"
