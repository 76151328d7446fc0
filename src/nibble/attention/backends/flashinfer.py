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
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nibble.attention.backends.vendor import (
    ALL,
    HALVES,
    PLAIN,
    import_package,
    outdated,
    row,
    without_cuda,
)
from nibble.attention.planner.support import NEVER, PROMPT, WITH, BackendInfo, Phase, Support
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
    lack = outdated(DISTRIBUTION, OLDEST) or without_cuda()
    if lack or _compiles():
        return lack
    return f"its kernels compiled, which takes nvcc or the package {_CACHE}, and neither is here"


_CACHE = "flashinfer_jit_cache"


def _compiles() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return not import_problem(_CACHE) or bool(shutil.which("nvcc")) or Path(home, "bin/nvcc").exists()


GPUS = frozenset({80, 86, 89, 90, 100, 103, 120, 121})
ONE = frozenset({Phase.DECODE})
MORE = ALL - ONE
VERIFY = frozenset({Phase.VERIFY})
RACE = "benchmarks/backends.py on one H200"
TILED = frozenset({1, 2, 4, 8, 16, 32, 64, 128})
EXTENDS = "benchmarks/extend.py on one H200, fa3: 8K new on 32K in 9.12 ms, 2K in 0.100 ms"
UNRECORDED = "its plan is made on the host, so decode steps run without CUDA graphs"
FP8 = {"fp8_e4m3", "fp8_e5m2"}


def _heads(
    phase: frozenset[Phase],
    formats: set[str],
    dtypes: Iterable[str],
    prefer: int,
    cites: str,
    dims: Iterable[int] = (64, 128, 256),
    staged: int | None = None,
    **more: Iterable[int],
) -> Support:
    facts: dict[str, Any] = {"packing": {"nhd", "hnd"}, "arch": GPUS, "sinks": NEVER}
    return row(
        "mha", phase=phase, format=formats, dim=dims, dtype=dtypes, prefer=prefer, staged=staged,
        held=WORKSPACE + PLANS, cites=cites, **facts | more,
    )  # fmt: skip


def _latents(
    phase: frozenset[Phase],
    facts: Mapping[str, Iterable[int]],
    fmt: str,
    dtype: str,
    prefer: int,
    staged: int | None,
    cites: str,
) -> Support:
    given: dict[str, Any] = {"arch": GPUS, "group": TILED}
    return row(
        "mla", phase=phase, format={fmt}, dtype={dtype}, prefer=prefer, staged=staged, held=WORKSPACE + PLANS,
        cites=f"flashinfer/mla: {cites}", **given | dict(facts),
    )  # fmt: skip


HOPPER: Mapping[str, Iterable[int]] = {"arch": {90}}
FIRST, NEXT = frozenset({Phase.PREFILL}), frozenset({Phase.EXTEND})
CAPPED_WINDOWS: Mapping[str, Iterable[int]] = {"window": WITH, "softcap": WITH}
PROMPT_ROWS: tuple[tuple[frozenset[Phase], Mapping[str, Iterable[int]], int, int | None, str], ...] = (
    (NEXT, {}, 30, None, EXTENDS),
    (
        NEXT,
        {**HOPPER, "softcap": WITH},
        30,
        25,
        f"{RACE}: over staged pages, triton 1.2 x, with windows 1.07 x",
    ),
    (FIRST, {"window": NEVER}, 30, None, EXTENDS),
    (FIRST, {**HOPPER, "window": NEVER, "softcap": WITH}, 30, 25, f"{RACE}: over staged pages, triton 1.1 x"),
    (FIRST, {"window": WITH, "softcap": NEVER}, 30, None, EXTENDS),
    (FIRST, {"arch": GPUS - {90}, **CAPPED_WINDOWS}, 30, None, EXTENDS),
    (FIRST, {**HOPPER, **CAPPED_WINDOWS}, 18, None, f"{RACE}: 8K in 1.15 ms, triton 1.04"),
)
"""Of heads: phases, of what beyond what all take, prefer, the same over staged pages."""
LATENT_ROWS: tuple[tuple[frozenset[Phase], Mapping[str, Iterable[int]], int, int | None, str], ...] = (
    (PROMPT, {}, 28, None, f"any page size; {RACE}: 1.1 to 1.2 x fa3, triton 1.7 x"),
    (PROMPT, HOPPER, 28, 25, f"{RACE}: over staged pages 1.1 to 1.4 x fa3, triton 1.2 to 1.6 x"),
    (VERIFY, {}, 5, None, f"{RACE}: 16 heads, 2.4 x flashmla, triton 1.5 x"),
    (VERIFY, {**HOPPER, "group": {64, 128}}, 25, None, f"{RACE}: 128 heads, 1.4 x flashmla, triton 2 x"),
    (
        ONE,
        {},
        12,
        None,
        f"attention alone as fast as FlashMLA on one H200; {UNRECORDED}, 5 ms a step before it",
    ),
)
"""Phases, of what beyond what all take, prefer, the same over staged pages."""


BACKEND = BackendInfo(
    name="flashinfer",
    summary="FlashInfer's FA2 and FA3 templates; its NVFP4 reader also runs outside Blackwell",
    adapter="nibble.attention.backends.adapters.flashinfer:FlashInfer",
    packages=(PACKAGE,),
    install=INSTALL,
    versions=VERSIONS,
    unavailable_reason=unavailable_reason,
    support=(
        *(
            _heads(phase, {fmt}, {dtype}, prefer, cites, staged=staged, **facts)
            for phase, facts, prefer, staged, cites in PROMPT_ROWS
            for fmt, dtype in PLAIN
        ),
        *(
            _heads(VERIFY, {fmt}, {dtype}, 15, f"{RACE}: 1.1 x fa3, 2.2 x with 1 KV head; triton 1.1 x")
            for fmt, dtype in PLAIN
        ),
        *(
            _heads(ONE, {fmt}, {dtype}, 15, f"{RACE}: 64 x 8K in 0.532 ms, fa3 0.491; {UNRECORDED}")
            for fmt, dtype in PLAIN
        ),
        _heads(
            MORE, FP8, HALVES, 12, f"flashinfer/prefill.py: fa2 reads both; {RACE}: 2.4 x sdpa, triton 1.6 x"
        ),
        _heads(ONE, FP8, HALVES, 12, f"{RACE}: 64 x 8K in 0.460 ms, cuda 0.262; {UNRECORDED}"),
        _heads(
            ALL,
            {"nvfp4"},
            HALVES,
            10,
            f"{RACE}: 64 x 8K in 0.706 ms, cuda 0.160; wrong over heads of 64",
            (128, 256),
        ),
        *(
            _latents(phase, facts, fmt, dtype, prefer, staged, cites)
            for phase, facts, prefer, staged, cites in LATENT_ROWS
            for fmt, dtype in PLAIN
        ),
    ),
)
