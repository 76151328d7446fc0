"""CUDA C++ source to a loaded kernel: NVRTC, and a cache of its output on disk.

Owns cubin() and Kernel. Sources may include the headers beside them. Needs the package cuda-bindings, which finds NVRTC
among the packages that torch brings. Compiling needs no GPU; loading does. Must not know what a kernel computes.

The cache is kernels/ in Nibble's cache folder (hardware.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from nibble.errors import BackendError
from nibble.hardware import cache_folder

CUBINS = "kernels"
ELF = b"\x7fELF"


@cache
def trouble() -> str | None:
    """Why nothing can be compiled for this machine's GPU, or at all; None if it can."""
    try:
        known = archs()
    except Exception as error:  # the loader's errors are of many kinds
        return f"NVRTC, which cannot be loaded ({type(error).__name__}: {error})"
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if (major or minor) and 10 * major + minor not in known:
        return f"an NVRTC that knows SM{major}{minor}; the one found ends at SM{max(known)}"
    return None


def archs() -> tuple[int, ...]:
    """Compute capabilities that NVRTC compiles for, as 90 for 9.0."""
    return tuple(_checked(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs"))


def cubin(source: Path, arch: int | str, macros: Mapping[str, str | int]) -> bytes:
    """Machine code of a source file for compute capability `arch` (90 is 9.0; 90a has what 9.0 alone has, as wgmma).
    Raises BackendError with NVRTC's log.
    """
    text, headers = source.read_text(encoding="utf-8"), _headers()
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", *(f"-D{k}={v}" for k, v in macros.items())]
    version = _checked(nvrtc.nvrtcVersion(), "nvrtcVersion")
    key = hashlib.sha256(repr((text, headers, options, version)).encode()).hexdigest()
    kept = cache_folder() / CUBINS / f"{source.stem}-sm{arch}-{key[:24]}.cubin"
    if kept.exists() and (found := kept.read_bytes()).startswith(ELF):
        return found
    code = _compile(text, source.name, headers, options)
    _keep(kept, code)
    return code


def _headers() -> dict[str, str]:
    """What sources may include: name -> text."""
    folder = Path(__file__).with_name("codecs")
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.cuh"))}


def _compile(text: str, name: str, headers: Mapping[str, str], options: list[str]) -> bytes:
    names, texts = ([part.encode() for part in parts] for parts in (headers, headers.values()))
    program = _checked(
        nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), texts, names), "nvrtcCreateProgram"
    )
    try:
        flags = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BackendError(
                f"NVRTC cannot compile {name} with {' '.join(options)}: {log.decode().strip()}"
            )
        code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        _checked(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _keep(path: Path, code: bytes) -> None:
    """Writes to the cache, all or nothing; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_bytes(code)
            whole.replace(path)
    except OSError:
        pass


class Kernel:
    """A kernel of a cubin, on the current device. shared: most dynamic shared memory that a launch will ask for."""

    def __init__(self, code: bytes, name: str, shared: int) -> None:
        torch.cuda.current_stream()  # makes torch's context current
        self._module = _checked(driver.cuModuleLoadData(code), "cuModuleLoadData")
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()), name)
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, most, shared), f"{shared} bytes of shared memory")

    def launch(
        self, grid: int, threads: int, shared: int, types: tuple[Any, ...], values: tuple[Any, ...]
    ) -> None:
        """Queues a launch on torch's current stream. types: a ctypes type for each of `values`."""
        stream = torch.cuda.current_stream().cuda_stream
        _checked(
            driver.cuLaunchKernel(
                self._function, grid, 1, 1, threads, 1, 1, shared, stream, (values, types), 0
            ),
            "cuLaunchKernel",
        )


POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


def _checked(returned: tuple[Any, ...], what: str) -> Any:
    """What a binding returned beside its status; raises BackendError where that is an error."""
    status, *rest = returned
    if status.value:
        raise BackendError(f"CUDA: {what} failed: {status.name}")
    return rest[0] if len(rest) == 1 else tuple(rest)
