"""CUDA C++ source to a loaded kernel: compilation by NVRTC, a cache of machine code on disk, and launches.

Needs the package cuda-bindings, which finds NVRTC among the packages that torch brings. Compiling needs no GPU;
loading does. The cache is the folder kernels/ in Nibble's cache folder (hardware.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from nibble.errors import BackendError
from nibble.hardware import cache_folder
from nibble.kernels import ahead

CUBINS = "kernels"
ELF = b"\x7fELF"
POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


@cache
def unavailable_reason() -> str | None:
    """Return what is missing to compile for this machine's GPU, or at all; None if nothing is."""
    try:
        supported = archs()
    except Exception as error:  # the loader's errors are of many kinds
        return f"NVRTC, which cannot be loaded ({type(error).__name__}: {error})"
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if (major or minor) and 10 * major + minor not in supported:
        return f"an NVRTC that knows SM{major}{minor}; the one found ends at SM{max(supported)}"
    return None


def archs() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC compiles for, as 90 for 9.0."""
    return tuple(check(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs"))


def code_of(source: Path, arch: int | str, macros: Mapping[str, str | int]) -> bytes | Future[bytes]:
    """Return a source file's machine code for a Kernel; in a rehearsal it is compiled in a thread."""
    if not ahead.is_rehearsal():
        return cubin(source, arch, macros)
    place = (source, arch, tuple(sorted(macros.items())))
    return ahead.submit(place, partial(cubin, source, arch, dict(macros)))


def cubin(source: Path, arch: int | str, macros: Mapping[str, str | int]) -> bytes:
    """Compile a source file to machine code, or read it from the cache.

    Args:
        source: A file .cu. It may include headers .cuh beside it and of codecs/.
        arch: A compute capability; 90 is 9.0, and 90a has what 9.0 alone has, as wgmma.
        macros: Name -> value of the macros to define.

    Returns:
        An ELF file.

    Raises:
        BackendError: NVRTC refuses the source. The message has its log.
    """
    text, headers = source.read_text(encoding="utf-8"), _headers(source.parent)
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", *(f"-D{k}={v}" for k, v in macros.items())]
    version = check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    # The key covers all that decides the machine code, the compiler's version included.
    key = hashlib.sha256(repr((text, headers, options, version)).encode()).hexdigest()
    path = cache_folder() / CUBINS / f"{source.stem}-sm{arch}-{key[:24]}.cubin"
    # A file that was cut off, by a full disk for example, is compiled anew.
    if path.exists() and (code := path.read_bytes()).startswith(ELF):
        return code
    code = _compile(text, source.name, headers, options)
    _store(path, code)
    return code


def _headers(folder: Path) -> dict[str, str]:
    """Return what the sources of a folder may include: name -> text."""
    paths = [*Path(__file__).with_name("codecs").glob("*.cuh"), *folder.glob("*.cuh")]
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(paths)}


def _compile(text: str, name: str, headers: Mapping[str, str], options: list[str]) -> bytes:
    names, texts = ([part.encode() for part in parts] for parts in (headers, headers.values()))
    program = check(
        nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), texts, names), "nvrtcCreateProgram"
    )
    try:
        flags = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            # The bindings write into the bytes that they are given.
            log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BackendError(
                f"NVRTC cannot compile {name} with {' '.join(options)}: {log.decode().strip()}"
            )
        code = b" " * check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        check(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _store(path: Path, code: bytes) -> None:
    """Write a file of the cache, all or nothing. A cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because replace() is atomic only within one file system.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            complete = Path(folder) / path.name
            complete.write_bytes(code)
            complete.replace(path)
    except OSError:
        pass


class Kernel:
    """A kernel of a cubin, loaded on the current device; code that is still compiled, at its first launch."""

    def __init__(
        self, code: bytes | Future[bytes], name: str, shared: int, *, prefers_shared: bool = False
    ) -> None:
        """Load the kernel.

        Args:
            code: The machine code, from code_of().
            name: The kernel's symbol.
            shared: The most bytes of dynamic shared memory that a launch will request.
            prefers_shared: Whether multiprocessors that run the kernel have all the shared memory that they can, even
                if it needs less: one cannot take blocks that need more until those that run on it end.

        Raises:
            BackendError: The driver refuses the code, or that much shared memory.
        """
        self._code, self._name, self._shared, self._prefers_shared = code, name, shared, prefers_shared
        self._function: Any = None
        if isinstance(code, bytes):
            self._load(code)

    def _load(self, code: bytes) -> None:
        torch.cuda.current_stream()  # makes torch's context current
        self._module = check(driver.cuModuleLoadData(code), "cuModuleLoadData")
        function = check(driver.cuModuleGetFunction(self._module, self._name.encode()), self._name)
        # A kernel must request more than 48 KiB of dynamic shared memory before its launch.
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        what = f"{self._shared} bytes of shared memory"
        check(driver.cuFuncSetAttribute(function, attribute, self._shared), what)
        if self._prefers_shared:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            check(driver.cuFuncSetAttribute(function, attribute, 100), "a preference for shared memory")
        self._function = function

    def launch(
        self,
        grid: int,
        threads: int,
        shared: int,
        types: tuple[Any, ...],
        values: tuple[Any, ...],
        *,
        starts_early: bool = False,
    ) -> None:
        """Queue a launch on torch's current stream.

        Args:
            grid: Blocks.
            threads: Threads of a block.
            shared: Bytes of dynamic shared memory of a block.
            types: A ctypes type for each of `values`.
            values: The kernel's arguments.
            starts_early: The kernel may start before the one in front of it ends, for which it waits by itself
                (griddepcontrol.wait, from SM90 on).

        Raises:
            BackendError: The driver refuses the launch, or the code did not compile.
        """
        if ahead.is_rehearsal():
            return
        if self._function is None:
            self._load(self._code if isinstance(self._code, bytes) else self._code.result())
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        # As torch.cuda.current_stream() does, which takes ten times as long.
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        config.sharedMemBytes, config.hStream = shared, stream
        if starts_early:
            config.attrs, config.numAttrs = [_starts_early()], 1
        check(driver.cuLaunchKernelEx(config, self._function, (values, types), 0), "cuLaunchKernelEx")


@cache
def _starts_early() -> driver.CUlaunchAttribute:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def check(result: tuple[Any, ...], call: str) -> Any:
    """Return what a binding returned beside its status; raise BackendError if that is an error."""
    status, *values = result
    if status.value:
        raise BackendError(f"CUDA: {call} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
