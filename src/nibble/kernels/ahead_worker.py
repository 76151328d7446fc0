"""Compile kernels of Triton in processes of torch's compiler, into Triton's cache folder.

Triton parses a kernel under Python's lock (0.1 to 0.3 s each, one core of a CPU, torch 2.11, 2026-11-28), so that
threads that compile dozens of them hold up the one that traces the model. Torch has processes for kernels of its own,
started as a compiled model begins to load (models/compile_cache.py); until that is traced they have nothing to do. What
they cannot compile, a thread does; once one fails or is late, threads do all. They are shared: a compiler that crashed
would end torch's own jobs of that time.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from threading import Event
from typing import Any

PATIENCE_S = 20.0
"""How long a thread waits for a process, before it compiles the kernel itself."""
_has_failed = Event()


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
        function: of triton.jit or gluon.jit, a global of its module.
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
        _Pickler(data).dump((function.ASTSource, function, signature, constants, attributes, target, options))
        return bool(pool.submit(compile_pickled, data.getvalue()).result(PATIENCE_S))
    except Exception:  # of all kinds, here and there: the thread then compiles it, and tells what is wrong
        _has_failed.set()
        return False


def compile_pickled(data: bytes) -> bool:
    """Compile a kernel in this process, whose result is the file in Triton's cache folder."""
    from triton.compiler import compile as triton_compile

    # Triton's own source, or Gluon's, which have one name on disk.
    source, function, signature, constants, attributes, target, options = pickle.loads(data)
    triton_compile(source(function, signature, constants, attributes), target=target, options=options)
    return True


def _processes() -> Any:
    """Return torch's processes; None where they were not started, are not ready, or one has failed."""
    module = sys.modules.get("torch._inductor.async_compile")
    compiler: Any = getattr(module, "AsyncCompile", None)
    if _has_failed.is_set() or not hasattr(getattr(compiler, "process_pool", None), "cache_info"):
        return None
    if not compiler.process_pool.cache_info().currsize or not compiler.use_process_pool():
        return None
    pool = compiler.process_pool()
    # Others that torch may have are forked from this process, after it has begun to use the GPU.
    return pool if type(pool).__name__ == "SubprocPool" else None
