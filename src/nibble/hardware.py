"""The machine: its capability and memory, the table of GPUs that plans may name, and the cache folder.

torch is imported only by the functions that need it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from nibble.errors import ConfigError, unknown

GIB = 1 << 30
CPU_ARCH = 0
"""The `arch` of a machine without a CUDA GPU."""
MACHINE_SHARE = "NIBBLE_MACHINE_SHARE"
"""Variable of the environment: among how many processes like this one the machine's memory and CPUs are divided."""


def format_bytes(size: int) -> str:
    """Return bytes for people: `1.50 GiB`, `12.0 MiB`, `0.2 MiB`."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, with the memory of the machine around it."""

    name: str
    arch: int
    """Compute capability as an integer (90 = SM90), 0 for a CPU."""
    memory: int
    """Bytes for weights and cache."""
    host: int | None = None
    """Free bytes of the machine around it, None where that is not known."""

    @property
    def is_cpu(self) -> bool:
        """Whether there is no CUDA GPU."""
        return self.arch == CPU_ARCH

    @property
    def device(self) -> str:
        """The torch device type."""
        return "cpu" if self.is_cpu else "cuda"

    def __str__(self) -> str:
        where = "CPU" if self.is_cpu else f"{self.name} (SM{self.arch})"
        return f"{where}, {self.memory / GIB:.0f} GiB"


_TABLE = (
    ("a100", 80, 80), ("a100-40gb", 80, 40), ("a10", 86, 24), ("rtx3090", 86, 24), ("a40", 86, 48),
    ("l4", 89, 24), ("l40s", 89, 48), ("rtx4090", 89, 24),
    ("h100", 90, 80), ("h200", 90, 141), ("gh200", 90, 96),
    ("b200", 100, 180), ("gb200", 100, 186), ("b300", 103, 268),
    ("rtx5090", 120, 32), ("rtx-pro-6000", 120, 96), ("dgx-spark", 121, 119),
)  # fmt: skip
GPUS = {name: Hardware(name, arch, gib * GIB) for name, arch, gib in _TABLE}
"""GPUs by name, with compute capability and nominal memory (vendor datasheets)."""


ARCHS = tuple(sorted({arch for _, arch, _ in _TABLE}))
"""Compute capabilities that rows of backends name."""
_OTHER_MAKERS = {
    "AMD": r"mi\d+\w*|gfx\w+|rocm|amd|hip|(radeon|rx)[ -]?\w*",
    "Apple": r"m\d+([ -]?(pro|max|ultra))?|mps|metal|apple",
    "Intel": r"xpu|gaudi\d*|hpu|arc[ -]?\w*|max[ -]?1\d{3}|intel",
    "Google": r"tpu\w*|v\d[ep]?",
    "Huawei": r"npu|ascend\w*|910\w*",
}
"""Names of other makers' chips, as regular expressions."""


def lookup_gpu(name: str) -> Hardware:
    """Return the hardware called `name`: a key of GPUS, `cpu`, or `sm90`-style with 80 GiB; raise ConfigError."""
    key = name.strip().lower()
    if key == "cpu":
        return cpu()
    if key in GPUS:
        return GPUS[key]
    # A GPU that is not in the table, by its capability alone.
    if match := re.fullmatch(r"sm_?(\d+)a?", key):
        return _by_capability(name, int(match[1]))
    for maker, pattern in _OTHER_MAKERS.items():
        if re.fullmatch(pattern, key):
            raise ConfigError(
                f"{name} is a chip of {maker}, and those are not served: the kernels are for NVIDIA GPUs from SM80 on, "
                "and for CPUs (--gpu cpu)"
            )
    raise ConfigError(unknown("GPU", name, [*GPUS, "cpu", "sm<NN>"]))


def _by_capability(name: str, arch: int) -> Hardware:
    if arch not in ARCHS:
        served = ", ".join(f"SM{arch}" for arch in ARCHS)
        raise ConfigError(f"{name} is not served: there are kernels for {served}, and for CPUs (--gpu cpu)")
    return Hardware(f"sm{arch}", arch, 80 * GIB)


def cpu() -> Hardware:
    """Return this machine's CPU, with the memory that this process may use: physical, or a container's limit."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = min(physical, _cgroup("memory.max") or physical)
    return Hardware("cpu", CPU_ARCH, memory // machine_share(), _free())


def machine_share() -> int:
    """Return among how many processes like this one the machine is divided: replicas of one server, 1 else."""
    return max(1, int(os.environ.get(MACHINE_SHARE) or 1))


def _free() -> int | None:
    """Return the memory that programs of this machine can still have; a container may take less than it has."""
    kib = next((x.split()[1] for x in read_lines("/proc/meminfo") if x.startswith("MemAvailable:")), None)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    free = None if limit is None or used is None else max(limit - used, 0)
    sizes = [size for size in (1024 * int(kib) if kib else None, free) if size is not None]
    return min(sizes) // machine_share() if sizes else None


def _cgroup(name: str) -> int | None:
    """Return a number of the control group (cgroup v2) that this process is in, None where there is none."""
    text = "".join(read_lines(f"/sys/fs/cgroup/{name}"))
    return int(text) if text.isdigit() else None


def read_lines(path: str) -> list[str]:
    """Return the lines of a file of the system, none where it cannot be read."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def probe(device: str = "auto") -> Hardware:
    """Return the hardware of this machine. `device`: `auto` (a CUDA GPU where there is one), `cpu` or `cuda`."""
    if device not in {"auto", "cpu", "cuda"}:
        raise ConfigError(unknown("device", device, ["auto", "cpu", "cuda"]))
    if device == "cpu" or (device == "auto" and not may_have_gpu()):
        return cpu()
    import torch

    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        return Hardware(gpu.name, 10 * gpu.major + gpu.minor, gpu.total_memory, _free())
    if device == "cuda":
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA GPU; use --device cpu")
    return cpu()


def may_have_gpu() -> bool:
    """Whether torch may see a CUDA GPU. Without a driver it cannot, and importing it takes seconds."""
    # Nothing is saved then, and torch knows better.
    if "torch" in sys.modules:
        return True
    return _driver() is not None


def _driver() -> ctypes.CDLL | None:
    """Return NVIDIA's driver, None where there is none."""
    try:
        # torch itself loads the driver like this; without it there is no device to see.
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def visible_gpus() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES may name, in its order, for each GPU that this process sees; without torch."""
    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(count.value))) if listed is None else listed.split(",")
    # What follows the first name that the driver does not know is not seen.
    return [name.strip() for name in names[: count.value]]


def processor() -> str:
    """Return the name of this machine's CPU."""
    lines = (line for line in read_lines("/proc/cpuinfo") if line.startswith("model name"))
    names = (line.partition(":")[2].strip() for line in lines)
    return next(names, "") or platform.processor() or platform.machine()


def cuda_version() -> str | None:
    """Return the CUDA toolkit that torch was built with; None for a CPU build."""
    import torch

    return torch.version.cuda


def cache_folder() -> Path:
    """Return $NIBBLE_CACHE, or nibble/ in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    if folder := os.environ.get("NIBBLE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nibble"
