"""Go through a start before it happens, so that its kernels are compiled at the same time (kernels/ahead.py).

What was rehearsed once is on disk, in Triton's folder and in that of NVRTC's code. So a mark is left in the cache
folder, by all that decides which kernels there are; a start that finds it goes without.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

import nibble
from nibble import files
from nibble.attention.planner.memory import MemoryPlan
from nibble.engine.graphs import Graphs
from nibble.engine.model_runner import ModelRunner
from nibble.hardware import cache_folder
from nibble.kernels import ahead
from nibble.models import compile_cache

FOLDER = "rehearsed"
SOURCES = ("*.py", "*.cu", "*.cuh")
"""Files of kernels."""
log = logging.getLogger("nibble.compile")


def rehearse(runner: ModelRunner, parts: Iterable[Callable[[], None]]) -> None:
    """Go through parts of a start without launching kernels; these are compiled in threads when this returns.

    Args:
        runner: runs the model as it is written meanwhile.
        parts: what the start will do, on this thread. One that fails is left out: the start itself will tell.
    """
    with ahead.rehearsal(), runner.eager(), torch.inference_mode():
        for part in parts:
            try:
                part()
            except Exception as error:  # of all kinds, as nothing is computed
                log.info("a part of the rehearsal fails (%s: %s)", type(error).__name__, error)
    # As it is written, a model takes more memory than compiled.
    torch.cuda.empty_cache()


def rehearse_graphs(
    runner: ModelRunner, sizes: Iterable[int], verify_sizes: Sequence[tuple[int, int]]
) -> None:
    """Go through steps that will be recorded: decode steps of powers of two and the largest, those with drafts."""
    sizes = sorted(sizes)
    powers = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]

    def run_once(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    Graphs(powers, runner.device, run_once, verify_sizes).record(runner._decode, runner._verify)


def mark_of(runner: ModelRunner, budget: MemoryPlan, *others: Hashable) -> Path:
    """Return the file that says that a start like this one was rehearsed. others: what else decides its parts."""
    digest = hashlib.sha256(repr(facts_of(runner, budget, *others)).encode())
    folder = Path(ahead.__file__).parent
    for path in sorted(path for pattern in SOURCES for path in folder.rglob(pattern)):
        digest.update(path.read_bytes())
    return cache_folder() / FOLDER / digest.hexdigest()[:32]


def facts_of(runner: ModelRunner, budget: MemoryPlan, *others: Hashable) -> tuple[Hashable, ...]:
    """Return what decides which kernels a start compiles, beside their source; the same in each process."""
    plan = runner.plan
    routes = tuple((route.phase.value, str(route)) for route in plan.routes)
    sizes = plan.page_size, budget.max_decodes, budget.step_tokens, tuple(budget.verify_sizes)
    model = compile_cache.path_of(runner.model, {}).name
    return model, plan.fingerprint, routes, sizes, others, nibble.__version__


def leave_mark(path: Path) -> None:
    """Say that a start was rehearsed. A cache folder that cannot be written costs time, nothing else."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, "")
