"""flashinfer: FlashInfer's FA2 and FA3 templates over paged KV, dense MHA and absorbed MLA.

Over NVFP4 the library does not split long contexts on SM120. No sinks: the templates that have them are other wrappers.
What the package needs of a machine stands here, for all backends that call it.

The MLA kernels cut a request's queries, heads and all, into tiles of 64 or 128 rows. A token whose heads are in two
tiles may lose its last key, and the package refuses to plan that, so the number of heads must divide a tile; and a plan
has room for 16384 tiles, which a step of 16384 tokens of 128 heads fills.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

from nibble.attention.backends.vendor import LATENT_FACTS, import_package, outdated, plain_rows, without_cuda
from nibble.attention.planner.support import ALL, GPUS, HALF_DTYPES, NEVER, BackendInfo, Origin, Support
from nibble.kernels import import_problem

PACKAGE, DISTRIBUTION = "flashinfer", "flashinfer-python"
OLDEST = "0.7.2"
INSTALL = "pip install 'flashinfer-python>=0.7.2', beside nvcc (the CUDA toolkit) or a flashinfer-jit-cache to match"
VERSIONS = "0.7.2"
WORKSPACE = 512 << 20
"""Results of split contexts, for all wrappers: they run one after the other."""
PLANS = 128 << 20
"""What wrappers keep of their plans: 8 MiB each, of up to four phases, a few kinds of layers, and COPIES of each."""
COPIES = 2
"""Wrappers of one kind: a step may be planned while the one before runs."""


def import_flashinfer(name: str = PACKAGE) -> ModuleType:
    """The package or a module of it, or a BackendError that says why it cannot be imported."""
    return import_package(name, INSTALL)


def unavailable_reason() -> str | None:
    """What the package needs and this machine lacks: a version, a CUDA build of torch, or something that compiles."""
    reason = outdated(DISTRIBUTION, OLDEST) or without_cuda()
    # Kernels are compiled at their first use, unless a package brings them compiled.
    if reason or _compiles():
        return reason
    return f"its kernels compiled, which takes nvcc or the package {_CACHE}, and neither is here"


_CACHE = "flashinfer_jit_cache"


def _compiles() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return not import_problem(_CACHE) or bool(shutil.which("nvcc")) or Path(home, "bin/nvcc").exists()


FP8 = frozenset({"fp8_e4m3", "fp8_e5m2"})
HEADS: dict[str, Any] = {
    "phase": ALL, "kind": {"mha"}, "packing": {"nhd", "hnd"}, "arch": GPUS, "sinks": NEVER,
    "workspace_bytes": WORKSPACE + PLANS,
}  # fmt: skip

BACKEND = BackendInfo(
    name="flashinfer",
    summary="FlashInfer's FA2 and FA3 templates; its NVFP4 reader also runs outside Blackwell",
    origin=Origin.VENDOR,
    adapter="nibble.attention.backends.adapters.flashinfer:FlashInfer",
    packages=(PACKAGE,),
    install=INSTALL,
    versions=VERSIONS,
    unavailable_reason=unavailable_reason,
    support=(
        *plain_rows(**HEADS, dim={64, 128, 256}, source="flashinfer/prefill.py, decode.py"),
        Support(
            **HEADS, format=FP8, dim={64, 128, 256}, dtype=HALF_DTYPES, source="flashinfer/prefill.py: fa2 reads both"
        ),
        Support(
            **HEADS, format={"nvfp4"}, dim={128, 256}, dtype=HALF_DTYPES,
            source="flashinfer/prefill.py; wrong over heads of 64",
        ),
        *plain_rows(
            **LATENT_FACTS, phase=ALL, arch=GPUS, group={1, 2, 4, 8, 16, 32, 64, 128},
            workspace_bytes=WORKSPACE + PLANS, source="flashinfer/mla: any page size, heads that divide a tile",
        ),
    ),
)  # fmt: skip
