"""Compile kernels of Triton in processes of torch's compiler, into Triton's cache folder.

A third of what Triton takes for a kernel holds Python's lock, so that threads that compile dozens of them hold up the
one that traces the model. Torch has processes for kernels of its own, started as a compiled model begins to load
(models/compile_cache.py); until that is traced they have nothing to do. What they cannot compile, a thread does.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from typing import Any

PATIENCE_S = 30.0
"""How long a thread waits for a process, before it compiles the kernel itself."""


class _Pickler(pickle.Pickler):
    """Writes kernels, and functions that they are given as constants, by their names."""

    def reducer_override(self, value: Any) -> Any:
        from triton.runtime.jit import JITFunction

        if isinstance(value, JITFunction):
            return function_of, (value.fn.__module__, value.fn.__qualname__, value.cache_key)
        return NotImplemented


def function_of(module: str, name: str, cache_key: str) -> Any:
    """Return a function of Triton by its name; raise LookupError where its source, or that of one it calls, differs."""
    function = getattr(importlib.import_module(module), name)
    if function.cache_key != cache_key:
        raise LookupError(f"{module}.{name} has other source")
    return function


def compile_elsewhere(
    function: Any, signature: Any, constants: Any, attributes: Any, target: Any, options: Any
) -> bool:
    """Let a process compile a kernel into the cache folder, and wait for it; return whether one did.

    Args:
        function: of triton.jit, a global of its module.
        signature: types of its arguments, and so on: what Triton makes an ASTSource of.
        constants: values of constants, by their places.
        attributes: of arguments.
        target: the GPU.
        options: of the backend, as a dictionary.
    """
    if (pool := _processes()) is None:
        return False
    data = io.BytesIO()
    try:
        _Pickler(data).dump((function, signature, constants, attributes, target, options))
        return bool(pool.submit(compile_pickled, data.getvalue()).result(PATIENCE_S))
    except Exception:  # of all kinds, here and there: the thread then compiles it, and tells what is wrong
        return False


def compile_pickled(data: bytes) -> bool:
    """Compile a kernel in this process, whose result is the file in Triton's cache folder."""
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    function, signature, constants, attributes, target, options = pickle.loads(data)
    triton_compile(ASTSource(function, signature, constants, attributes), target=target, options=options)
    return True


def _processes() -> Any:
    """Return torch's processes, where they were started; None where there are none."""
    module = sys.modules.get("torch._inductor.async_compile")
    processes = getattr(getattr(module, "AsyncCompile", None), "process_pool", None)
    if not processes or not hasattr(processes, "cache_info") or not processes.cache_info().currsize:
        return None
    pool = processes()
    # Others that torch may have are forked from this process, after it has begun to use the GPU.
    return pool if type(pool).__name__ == "SubprocPool" else None
