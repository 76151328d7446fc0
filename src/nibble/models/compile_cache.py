"""Compiled models on disk: a start takes what an earlier one compiled, and neither traces nor compiles the model.

torch's own caches spare generated code alone: a model of many layers is traced at every start. A file here has all that
comes of compiling (torch.compile(...).aot_compile(), torch/_dynamo/aot_compile.py): the traced call, its guards and the
code of its kernels. Its name is a digest of what guards do not see; then torch's versions and guards, and the source of
each function that was traced, have to fit, or the file is written anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.package import SourceInfo
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import nibble
from nibble import bytecode, files
from nibble.config import parse_bytes
from nibble.errors import ConfigError
from nibble.hardware import cache_folder
from nibble.kernels import ahead, triton_present

FOLDER = "compiled"
CACHE_VARIABLE, TRITON_VARIABLE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
ASSEMBLER_VARIABLE, ASSEMBLER = "TRITON_PTXAS_PATH", "backends/nvidia/bin/ptxas"
"""The program that Triton assembles kernels with, unless the variable names another, and where it has one."""
LIMIT_VARIABLE, LIMIT = "NIBBLE_CACHE_LIMIT", "32GiB"
KEEP_S = 24 * 3600.0
"""What was used a day ago may be read again by a process that still runs."""
CACHES = {
    FOLDER: 1,
    bytecode.FOLDER: 1,
    "inductor": 2,
    "triton": 1,
    "kernels": 1,
    "humming": 1,
    "rehearsed": 1,
}
"""Folders of compiled code in the cache folder, and how deep their entries lie."""
PACKAGES = ("torch", "transformers", "triton")
COMPILING = (
    "models/*.py",
    "attention/operators.py",
    "kernels/collectives/__init__.py",
    "kernels/experts/__init__.py",
    "kernels/experts/gate.py",
    "kernels/gated/__init__.py",
    "kernels/linear/__init__.py",
    "kernels/norm/__init__.py",
    "kernels/quantized_linear/__init__.py",
    "kernels/recurrence/types.py",
    "kernels/router/__init__.py",
    "kernels/topk/__init__.py",
)
"""Files of Nibble that decide what is compiled, beyond what torch traces."""
UNSAVED = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
"""Guards on the identity of objects, which no other process has."""
GLOBAL_STATE = "GLOBAL_STATE"
"""The guard on torch's settings, among them the number of threads of a CPU, which code of a GPU has nothing to do with:
a start with another share of a machine's CPUs would compile anew. What matters of them is in a file's name."""
log = logging.getLogger("nibble.compile")


def use_cache_folder() -> None:
    """Let torch and Triton keep what they compile in Nibble's cache folder, unless the user has chosen another.

    Both assemble kernels by Triton's program then. Inductor would set the variable to torch's, and a kernel's name on
    disk has the version that its process has asked for first: torch's in processes that compile alone, Triton's in the
    engine's own. So no start would find the kernels of the one before.
    """
    # Importing torch._dynamo fills torch's variable with a default in /tmp; only another value is the user's.
    if os.environ.get(CACHE_VARIABLE, default_cache_dir()) == default_cache_dir():
        os.environ[CACHE_VARIABLE] = str(cache_folder() / "inductor")
    # Triton's own default is in the home folder, which a container may lose while it keeps the cache folder.
    os.environ.setdefault(TRITON_VARIABLE, str(cache_folder() / "triton"))
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        if (assembler := Path(folder, ASSEMBLER)).is_file():
            os.environ.setdefault(ASSEMBLER_VARIABLE, str(assembler))


def begin(compiles: bool, keep: bool) -> None:
    """Prepare this process for code that is compiled: use_cache_folder(), and warm_compiler() for models."""
    use_cache_folder()
    if triton_present():
        from torch._inductor.runtime.triton_compat import triton_key

        # The first kernel that is looked up on disk would wait for it: it reads all of Triton.
        ahead.submit(triton_key, triton_key)
    if compiles:
        warm_compiler(keep)


def limit_cache_folder() -> None:
    """Delete compiled code that was not used for the longest time, where there is more than $NIBBLE_CACHE_LIMIT."""
    folder = cache_folder()
    try:
        limit = parse_bytes(os.environ.get(LIMIT_VARIABLE) or LIMIT)
        entries = [path for cache, depth in CACHES.items() for path in folder.glob(cache + "/*" * depth)]
        # Two that start at the same time would count what the other deletes.
        with files.exclusive_lock(folder):
            files.remove_unused(entries, limit, KEEP_S)
    except (OSError, ConfigError) as error:
        log.info("the cache folder is not limited: %s", error)


def warm_compiler(keep: bool) -> None:
    """Import torch's compiler, and begin to start the processes in which it compiles kernels, which takes seconds.

    What it compiles before they are ready it compiles in this one, kernel after kernel. Where there are compiled models
    on disk, this one is probably among them, and needs none.

    Args:
        keep: whether models are taken from disk.
    """
    if keep and any((cache_folder() / FOLDER).glob("*.bin")):
        return
    import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor import async_compile

    # A version of torch may start them by itself.
    if start := getattr(async_compile, "maybe_warm_pool", None):
        start()


def load(path: Path, function: FunctionType, arguments: tuple[Any, ...]) -> Any:
    """Return the compiled function in a file; None where there is none that serves.

    Args:
        path: from path_of().
        function: what was compiled.
        arguments: of a call. Marks on them (torch._dynamo.mark_dynamic) would tell them from those of later calls.

    Returns:
        A function with guard_check(*arguments), which says whether it serves them.
    """
    try:
        with path.open("rb") as file:
            loaded: Any = torch.compiler.load_compiled_function(file, f_globals=function.__globals__)
        # From here on the caller checks guards.
        loaded.disable_guard_check()
        if not _is_current(loaded.source_info().inlined_sources):
            log.info("%s was compiled from other source", path)
        elif not loaded.guard_check(*arguments):
            log.info("%s was compiled from another model", path)
        else:
            return loaded
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a file may be that was cut off, or written by something else
        log.info("%s cannot be read (%s: %s)", path, type(error).__name__, error)
    return None


def compile_into(
    path: Path, function: FunctionType, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Compile a function by inductor and keep it in a file.

    Args:
        path: from path_of().
        function: takes the model first.
        arguments: of a call. Sizes that vary are marked (torch._dynamo.mark_dynamic).
        options: of inductor.

    Returns:
        As load() does; None where torch cannot make such a function of this model.
    """
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiler = torch.compile(
            function, fullgraph=True, options={**options, "guard_filter_fn": _serializable_guards}
        )
    try:
        with _sources_once():
            compiled: Any = compiler.aot_compile((arguments, {}))  # type: ignore[attr-defined]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what torch cannot trace here is explained when it is compiled by a call
        # It costs a first start twice the time, and the next ones too.
        log.warning("this model cannot be compiled ahead (%s: %s)", type(error).__name__, error)
        return None
    # Code that cannot be written costs the next start time, nothing else.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, type(compiled).serialize(compiled).serialized_data)
    except Exception as error:  # of all kinds: it is pickled
        log.info("compiled code of this model cannot be kept (%s: %s)", type(error).__name__, error)
    compiled.disable_guard_check()
    return compiled


@contextmanager
def _sources_once() -> Iterator[None]:
    """Let torch look for the source of a traced function once, and not for each call: all layers call the same ones."""
    if not hasattr(SourceInfo, "add_code"):  # a version of torch that keeps it otherwise
        yield
        return
    own, infos = SourceInfo.add_code, dict[int, tuple[SourceInfo, set[tuple[str, CodeType]]]]()

    def add_code(self: SourceInfo, code: CodeType) -> None:
        # Code is compared without its file, and families have parts of one another.
        key, (_, added) = (code.co_filename, code), infos.setdefault(id(self), (self, set()))
        if key not in added:
            added.add(key)
            own(self, code)

    with mock.patch.object(SourceInfo, "add_code", add_code):
        yield


def _is_current(sources: Sequence[Any]) -> bool:
    """Return whether the modules whose functions were traced have the same source now."""
    contents = {source.module: source.content for source in sources}
    return all(
        inspect.getsource(importlib.import_module(name)) == content for name, content in contents.items()
    )


def _serializable_guards(entries: Sequence[Any]) -> list[bool]:
    """Return which guards are kept: all but those on globals, whose source is compared, on settings and identities."""
    unsaved = UNSAVED | {GLOBAL_STATE}
    return [
        not (entry.is_global or unsaved.intersection((entry.guard_type, *(entry.derived_guard_types or ()))))
        for entry in entries
    ]


def path_of(model: nn.Module, options: Mapping[str, Any]) -> Path:
    """Return the file of a model that inductor compiles with these options."""
    digest = hashlib.sha256()
    for part in _facts(model, options):
        digest.update(f"{len(part)} {part}".encode())
    return cache_folder() / FOLDER / f"{digest.hexdigest()[:32]}.bin"


def _facts(model: nn.Module, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what decides the code of a model: versions, the GPU, settings, its config and its functions."""
    yield platform.python_version()
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield f"{package} {metadata.version(package)}"
    device = next(model.parameters()).device
    yield device.type
    if device.type == "cuda":
        yield f"{torch.version.cuda} {torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    yield repr(_state(device.type))
    yield repr(sorted(options.items()))
    for settings in (torch._inductor.config, torch._functorch.config):
        yield settings.get_hash().hex()
    config = model.config.to_dict()  # type: ignore[operator,union-attr]
    # Where a checkpoint lies does not matter.
    yield repr(sorted((name, repr(value)) for name, value in config.items() if name != "_name_or_path"))
    for name, tensor in model.named_parameters():
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}"
    for name, module in model.named_modules():
        # torch guards no hooks, and some leave hidden states (models/taps.py).
        hooks = [_hook(hook) for hook in module._forward_hooks.values()]
        yield f"{name} {_name(type(module))} {_functions(module)} {hooks}"
    for path in sources():
        yield path.read_text(encoding="utf-8")


def sources() -> list[Path]:
    """Return the files of Nibble that decide what is compiled."""
    folder = Path(nibble.__file__).parent
    return [path for pattern in COMPILING for path in sorted(folder.glob(pattern))]


def _state(device: str) -> dict[str, object]:
    """Return torch's settings that decide what is traced and compiled for a type of device."""
    products = torch.backends.cuda.matmul
    return {
        "autocast": torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "products": (
            # Its older name, allow_tf32, cannot be read where the user has set this one.
            getattr(products, "fp32_precision", None),
            products.allow_bf16_reduced_precision_reduction,
            products.allow_fp16_reduced_precision_reduction,
        ),
        # Loops of C++ are cut for it.
        "threads": torch.get_num_threads() if device == "cpu" else None,
    }


def _functions(owner: object, depth: int = 2) -> list[str]:
    """Return the names of functions that are attributes of an object, and of objects of Nibble's in it."""
    names = list[str]()
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, nn.Module):
            continue
        if isinstance(value, Callable) and hasattr(value, "__qualname__"):  # type: ignore[arg-type]
            names.append(f"{name}={_name(value)}")
        elif depth and type(value).__module__.startswith(nibble.__name__) and hasattr(value, "__dict__"):
            names.append(f"{name}={_name(type(value))} {_functions(value, depth - 1)}")
    return names


def _hook(hook: Any) -> str:
    """Return the name of a hook, and the numbers that it is called with where it is a partial function."""
    function, values = hook, list[int]()
    if isinstance(hook, functools.partial):
        function, values = hook.func, [value for value in hook.args if isinstance(value, int)]
    return f"{_name(function if hasattr(function, '__qualname__') else type(function))} {values}"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
