"""Make a model with its pool ready to serve: test, compile, record, and check the memory. On a CPU only the test.

The start-up test: random tokens through the very pool, kernels and routes that will serve.

For each layer group a few requests are written, read and attended over in every phase that is planned, as a step of the
engine does it. What was stored is compared with the format's own arithmetic, and what attention answers with the torch
reference over the same pool. So a kernel that is wrong on this machine stops the start, and not an answer.

Shape suffixes: T tokens of a step, K selected tokens, H heads, D values of a head, N pages of a request, S slots and L
tokens of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

from nibble.attention.planner.memory import MIN_RESERVE_LEFT, MemoryPlan
from nibble.attention.planner.plan import cuda_graph_blocker, graph_sizes
from nibble.cache.manager import CacheManager
from nibble.config import Config
from nibble.engine.model_runner import CudaGraphs, Graphs, ModelRunner, live
from nibble.engine.request import Batch, Request, ScheduledRequest
from nibble.engine.selftest import self_test, tier_test
from nibble.errors import CapacityError
from nibble.hardware import format_bytes

FIRST_STEP = 24
"""Tokens of the step that compiles: as many as a usual step decodes, so that code is tuned for these."""


@dataclass
class StartupReport:
    """How a start went."""

    seconds: dict[str, float] = field(default_factory=dict)
    """What its parts took, by name, in order."""
    notes: list[str] = field(default_factory=list)
    """What users should know."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the time of a part."""
        start = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    @property
    def summary(self) -> str:
        """Return `12.3 s: weights 2.0, compile 9.1, ...`."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s: {parts}"


def warm_up(
    runner: ModelRunner,
    config: Config,
    budget: MemoryPlan,
    startup: StartupReport,
    max_tokens: int,
    *,
    test: bool = True,
) -> None:
    """Make a runner ready to serve.

    Args:
        runner: with its model, pool and page tables.
        config: whether to record graphs, and of how many requests.
        budget: the memory plan.
        startup: takes the times of the parts, and notes.
        max_tokens: of the longest request.
        test: whether to run the start-up test.

    Raises:
        BackendError: a kernel is wrong, or a step cannot be recorded.
        ConfigError: the model cannot be compiled.
        CapacityError: the memory does not suffice.
    """
    with explain_out_of_memory(budget):
        with startup.part("self-test"):
            if test:
                self_test(runner.plan, runner.pool, runner.backends)
                if runner.tier:
                    tier_test(runner.tier, runner.pool)
        if runner.device.type != "cuda":
            return
        with startup.part("compile"):
            _run_prompts(runner, (min(FIRST_STEP, max_tokens),))
        with startup.part("graphs"):
            _record(runner, config, budget, startup)
        # No step takes more memory, so a plan that is too tight fails here and not at a request.
        with startup.part("largest step"):
            _run_prompts(runner, _longest_prompts(runner, budget.step_tokens, max_tokens))
            # An error of the device shows only where it is waited for.
            torch.cuda.synchronize()
    check_memory(budget, torch.cuda.mem_get_info()[0])


def _record(runner: ModelRunner, config: Config, budget: MemoryPlan, startup: StartupReport) -> None:
    """Record decode steps, or run them over the same buffers where the config excludes graphs."""
    reason = cuda_graph_blocker(runner.plan)
    if reason is None and not runner.pool.is_capturable:
        reason = "decode steps run without CUDA graphs: writing these formats cannot be recorded"
    if reason is None:
        runner.record(
            Graphs(graph_sizes(budget.max_decodes), runner.device, CudaGraphs() if config.graphs else live)
        )
    elif config.graphs:
        startup.notes.append(reason)


def _run_prompts(runner: ModelRunner, lengths: Sequence[int]) -> None:
    """Run one step of prompts of these lengths, over pages that are free again afterwards."""
    manager = CacheManager(runner.pool.pages, runner.plan.page_size, prefix_cache=False)
    requests = [Request(f"warm-{i}", [0] * length) for i, length in enumerate(lengths)]
    for request in requests:
        request.lease = manager.open(request.token_ids, "")
        manager.reserve(request.lease, len(request.token_ids))
    runner.forward(
        Batch.from_scheduled(
            ScheduledRequest.next_chunk(request, len(request.token_ids)) for request in requests
        )
    )
    for request in requests:
        assert request.lease
        manager.release(request.lease)


def _longest_prompts(runner: ModelRunner, tokens: int, max_tokens: int) -> list[int]:
    """Return lengths of prompts that fill a step of `tokens` tokens, as far as requests and pages reach."""
    pages, size, lengths = runner.pool.pages, runner.plan.page_size, list[int]()
    while tokens and pages and len(lengths) < runner.tables.padding_row:
        length = min(tokens, max_tokens, pages * size)
        lengths.append(length)
        tokens, pages = tokens - length, pages - -(-length // size)
    return lengths


def check_memory(budget: MemoryPlan, free: int) -> None:
    """Raise CapacityError where more is in use than was planned, so that too little of the reserve is left."""
    if free < MIN_RESERVE_LEFT * budget.reserve:
        used = budget.memory - free - budget.pool
        raise CapacityError(
            f"{format_bytes(used)} of the GPU are in use beside the cache, where {format_bytes(budget.weights)} of "
            f"weights and {format_bytes(budget.workspace)} of workspace were planned, and {format_bytes(free)} are "
            f"left; {_advice(budget)}"
        )


@contextmanager
def explain_out_of_memory(budget: MemoryPlan) -> Iterator[None]:
    """Turn torch's error into a CapacityError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the GPU's memory does not suffice for the plan ({format_bytes(budget.weights)} of weights, "
            f"{format_bytes(budget.workspace)} of workspace, a pool of {format_bytes(budget.pool)}); {_advice(budget)}"
        ) from error


def _advice(budget: MemoryPlan) -> str:
    smaller = max(budget.pool - budget.reserve, budget.pool // 2)
    return (
        f"what would help: --kv-memory {smaller >> 20}MiB, a smaller --token-budget (now {budget.step_tokens}), "
        "or ending other programs on this GPU"
    )
