"""Go through a start before it happens, so that its kernels are compiled at the same time (kernels/ahead.py).

Layers that are alike launch the same kernels, so a rehearsal goes through the first ones alone, up to one of each kind.

What was rehearsed once is on disk, in Triton's folder and in that of NVRTC's code. So a mark is left in the cache
folder, by all that decides which kernels there are; a start that finds it goes without.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

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
    first: Callable[[], AbstractContextManager[None]] = nullcontext
    with suppress(Exception):  # a model that is built otherwise goes through all of its layers
        first = _first_of_each_kind(runner)
    with ahead.rehearsal(), runner.eager(), torch.inference_mode():
        for number, part in enumerate(parts):
            began = perf_counter()
            # A family's code may count on all of its layers.
            for layers in dict.fromkeys((first, nullcontext)):
                try:
                    with layers():
                        part()
                    break
                except Exception as error:  # of all kinds, as nothing is computed
                    kind = "" if layers is nullcontext else " with its first layers"
                    log.info(
                        "part %d of the rehearsal%s fails (%s: %s)", number, kind, type(error).__name__, error
                    )
            log.info("part %d of the rehearsal took %.2f s", number, perf_counter() - began)
    # As it is written, a model takes more memory than compiled.
    torch.cuda.empty_cache()


def _first_of_each_kind(runner: ModelRunner) -> Callable[[], AbstractContextManager[None]]:
    """Return what lets a model have its first layers alone, up to one of each kind, in a body."""
    owners = _owners_of_layers(runner.model)
    # Hidden states of layers that a head reads would be missing.
    if len(owners) != 1 or runner.has_taps:
        return nullcontext
    ((parent, name),) = owners
    layers: nn.ModuleList = getattr(parent, name)
    kinds = [(_structure(layer), _role(runner, i)) for i, layer in enumerate(layers)]
    few = layers[: 1 + max(kinds.index(kind) for kind in kinds)]

    @contextmanager
    def first() -> Iterator[None]:
        setattr(parent, name, few)
        try:
            yield
        finally:
            setattr(parent, name, layers)

    return first


def _owners_of_layers(model: Any) -> list[tuple[nn.Module, str]]:
    """Return who has lists of as many modules as a model has layers, and under which names."""
    total = model.config.get_text_config().num_hidden_layers
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and 0 < len(child) == total
    ]


def _structure(layer: nn.Module) -> tuple[Hashable, ...]:
    """Return what a layer's modules and tensors are."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (
        *((name, type(module)) for name, module in layer.named_modules()),
        *((name, tuple(x.shape), x.dtype) for name, x in tensors),
    )


def _role(runner: ModelRunner, layer: int) -> tuple[Hashable, ...]:
    """Return what attends for a layer, and what it stores."""
    plan = runner.plan
    groups = tuple(i for i, group in enumerate(plan.groups) if layer in group.layers)
    stored = tuple(replace(one, layer=0) for one in plan.layout.layers if one.layer == layer)
    return groups, stored


def rehearse_graphs(
    runner: ModelRunner, sizes: Iterable[int], verify_sizes: Sequence[tuple[int, int]]
) -> None:
    """Go through steps that will be recorded: decode steps of powers of two and the largest, those with drafts."""
    sizes = sorted(sizes)
    powers = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]

    def run_once(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    graphs = Graphs(powers, runner.device, run_once, verify_sizes)
    graphs.record(runner._decode, runner._verify)
    graphs.compile_accept(runner.tables)


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
