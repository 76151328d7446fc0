"""Kernels: a folder for each operation.

In it, __init__.py has the operation's signature and chooses between implementations, naive.py defines it in torch, and
triton.py, gluon_sm90.py and cuda.py with *.cu files are fast. CONTRIBUTING.md says how one is added.

Here is what they share on the host: which packages can be imported, and sizes of grids, tiles and GPUs. It loads no
torch.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MISSING = "is missing"


def import_problem(package: str) -> str | None:
    """Return why a package, dotted or not, cannot be imported; None where it can.

    To look for a dotted name is to import its parents, which may do anything.
    """
    try:
        present = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError as error:
        missing = error.name and f"{package}.".startswith(f"{error.name}.")
        return MISSING if missing else _broken(error)
    except (Exception, SystemExit) as error:
        return _broken(error)
    return None if present else MISSING


def _broken(error: BaseException) -> str:
    return f"is broken ({type(error).__name__}: {error})"


@functools.cache
def triton_present() -> bool:
    """Return whether the implementations in Triton can be imported here."""
    return import_problem("triton") is None


SM90 = 90
"""Compute capability of Hopper, which has kernels of its own (gluon_sm90.py)."""
HEAD_DIMS = (64, 128, 256)
"""Values of a head that decode attention in CUDA C++ serves (attention/decode.cu, decode_fixed.cu)."""
MMA_ROWS = 16
"""Rows of the smallest tile of the tensor cores."""
MIN_REQUESTS = 32
"""Requests that a kernel is compiled for at least, of those that share out keys, so that small batches have the same.
Larger batches of prompts are cut (BackendInfo.compiled_requests): their steps are not recorded, and would wait for a
compiler."""
UNBOUNDED = 1 << 30
"""In the place of a bound on stored tokens, or on shared memory, that is not known."""
ALIGNED = 4
"""Lists begin at multiples of so many int32, 16 bytes. Triton compiles a kernel anew for pointers off that grid."""
FIXED_SPLIT = 1024
"""Keys of a split that is the same in every batch; a multiple of every tile of keys."""
SPREAD_TOKENS = 256
"""Query tokens up to which programs share such splits, for which float32 parts of all are kept."""
PREFILL_WORKSPACE = 32768
"""Tokens that prefill attention dequantises at a time, but for what else their pages hold."""


# Triton's own cdiv and next_power_of_2 also work inside kernels, but outside they take a hundred times as long. A
# decode step calls several of them before each launch.
def cdiv(n: int, size: int) -> int:
    """Return how many parts of `size` make up n; the last may be smaller."""
    # Floor division of the negated number rounds up, in integers alone.
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is n or more; n is positive."""
    # Of n - 1, so that a power of two stays what it is.
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU's sizes."""

    arch: int
    """Compute capability, 90 for SM90; 0 without a GPU."""
    processors: int
    memory: int
    """Bytes of shared memory that a program may have."""


@functools.cache
def gpu_of(device: torch.device) -> GPU:
    """Return a device's sizes; those of one processor where Triton interprets kernels on the CPU."""
    if device.type != "cuda":
        return GPU(0, 1, UNBOUNDED)
    from torch.cuda import get_device_properties

    properties = get_device_properties(device)
    # Older stubs do not know this attribute.
    memory = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009
    return GPU(10 * properties.major + properties.minor, properties.multi_processor_count, memory)
