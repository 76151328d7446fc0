"""Compile kernels ahead: a rehearsal launches none, and threads compile at the same time what it would have launched.

A step needs dozens of kernels, each of which takes seconds to compile. One after the other, as they are launched, that
is most of a first start; but the compilers, NVRTC and most of Triton's, let go of Python's lock, and what does not goes
to other processes, where there are any (ahead_worker.py). So the start goes through its steps twice. In a rehearsal a
launch of Triton or of nvrtc.Kernel does nothing on the device; its kernel, if it is a new one, is given to a pool of
threads. What kernels would have written is zero, so that numbers of experts or of tokens that other operators read are
in range. The step itself then waits for kernels that are not ready yet, and for no others.

What goes wrong in a thread is raised where the kernel is needed. A version of Triton that is built otherwise compiles
nothing ahead. It loads no torch before a rehearsal.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

from nibble.kernels import triton_present

T = TypeVar("T")
MOST_THREADS = 16
_COMPILE = ("self", "key", "signature", "device", "constexprs", "options", "attrs", "warmup")
"""Parameters of Triton's JITFunction._do_compile, from 3.5 to 3.9, which compiles what is not in its dictionary."""
_RUN = ("self", "args", "grid", "warmup", "kwargs")
"""Parameters of JITFunction.run, which launches."""
_lock = threading.Lock()
_rehearsing = threading.Lock()
_compiling: dict[Hashable, Future[Any]] = {}
"""What is compiled in threads, until somebody takes it."""
_threads: set[int] = set()
"""The thread that rehearses."""


def is_rehearsal() -> bool:
    """Return whether this thread's launches do nothing."""
    return bool(_threads) and threading.get_ident() in _threads


@functools.cache
def _pool() -> ThreadPoolExecutor:
    # One core is left for the thread that traces the model meanwhile.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(max(cores - 1, 1), MOST_THREADS), "nibble-ahead")


def submit(key: Hashable, compile: Callable[[], T]) -> Future[T]:
    """Compile in a thread, once for a key."""
    with _lock:
        if key not in _compiling:
            _compiling[key] = _pool().submit(compile)
        return _compiling[key]


def num_unfinished() -> int:
    """Return how many kernels are still being compiled."""
    with _lock:
        return sum(not future.done() for future in _compiling.values())


def finish() -> None:
    """Wait for all that is compiled, and forget it: who needs it has it in a cache."""
    with _lock:
        futures = list(_compiling.values())
    wait(futures)
    with _lock:
        _compiling.clear()


@contextmanager
def abandoned_on_error() -> Iterator[None]:
    """Compile no further kernels where the body raises: the process would wait for them at its end."""
    try:
        yield
    except BaseException:
        with _lock:
            for future in _compiling.values():
                future.cancel()
            _compiling.clear()
        raise


@contextmanager
def rehearsal() -> Iterator[None]:
    """Let launches of this thread do nothing but compile their kernels in the background. One thread at a time."""
    with _rehearsing, ExitStack() as patches:
        for patch in (*_zeroed_memory(), *_triton_patches()):
            patches.enter_context(patch)
        _threads.add(threading.get_ident())
        try:
            yield
        finally:
            _threads.clear()


def _zeroed_memory() -> Iterator[Any]:
    """Yield patches by which tensors without values are zero: no kernel writes them now, and others may read them."""
    import torch

    def zeroed(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def call(*arguments: Any, **options: Any) -> Any:
            x = make(*arguments, **options)
            return x.zero_() if is_rehearsal() else x

        return call

    for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty",))):
        for name in names:
            yield mock.patch.object(owner, name, zeroed(getattr(owner, name)))


# ---- Triton ----------------------------------------------------------------------------------------------------------


def _triton_patches() -> Iterator[Any]:
    """Yield what lets launches of Triton's kernels compile alone."""
    if not triton_present():
        return
    from triton.runtime.jit import JITFunction

    if not _watch_triton():
        # What cannot be compiled ahead is not launched either: the step compiles it.
        yield mock.patch.object(JITFunction, "run", _unless_rehearsal(JITFunction.run, lambda *_, **__: None))
        return
    own = JITFunction.run

    def compile_only(self: Any, *arguments: Any, **options: Any) -> Any:
        return own(self, *arguments, **{**options, "warmup": True})

    yield mock.patch.object(JITFunction, "run", _unless_rehearsal(own, compile_only))


def _unless_rehearsal(own: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def run(*arguments: Any, **options: Any) -> Any:
        return (other if is_rehearsal() else own)(*arguments, **options)

    return run


@functools.cache
def _watch_triton() -> bool:
    """Let Triton compile in threads in a rehearsal, and later take what they compile; return whether that works."""
    from triton.runtime.jit import JITFunction

    own = getattr(JITFunction, "_do_compile", None)
    if own is None or _parameters(own) != _COMPILE or _parameters(JITFunction.run) != _RUN:
        return False

    @functools.wraps(own)
    def do_compile(self: Any, key: Any, signature: Any, device: Any, *others: Any, **options: Any) -> Any:
        compile = functools.partial(own, self, key, signature, device, *others, **options)
        place = (self, device, key)
        if is_rehearsal():
            submit(
                place,
                functools.partial(_compile_beside, compile, self, signature, device, *others, **options),
            )
            return None  # by which run() knows that there is nothing to launch
        with _lock:
            future = _compiling.pop(place, None)
        # What failed in a thread fails here, too, where it can be told.
        return compile() if future is None or future.cancelled() or future.exception() else future.result()

    setattr(JITFunction, "_do_compile", do_compile)  # noqa: B010 (mypy knows it as a method)
    return True


def _compile_beside(
    compile: Callable[[], T],
    function: Any,
    signature: Any,
    device: Any,
    constants: Any,
    options: Any,
    attributes: Any,
    warmup: Any,
) -> T:
    """Compile a kernel in another process, where there is one, and take it from disk; else in this thread."""
    from nibble.kernels import ahead_worker

    target = function.device_caches[device][2]
    ahead_worker.compile_elsewhere(function, signature, constants, attributes, target, options.__dict__)
    return compile()


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
