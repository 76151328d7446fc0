"""Steps that a start runs, so that requests wait for nothing that is compiled, and none takes more memory than these.

With data-parallel attention each rank runs them with requests of its own, as each compiles for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from nibble.cache.manager import CacheManager
from nibble.cache.states import StateSlots
from nibble.engine.model_runner import ModelRunner
from nibble.engine.request import Batch, Request, ScheduledRequest
from nibble.kernels import ahead, cdiv, topk
from nibble.model_spec import Phase

FIRST_STEP = 24
"""Tokens of the step that compiles: as many as a usual step decodes, so that code is tuned for these."""
CHUNKS = (1, 3, 5, 17, 40, 80)
"""New tokens of steps that compile kernels for short prompts: of few rows for any number of heads, of some, of many."""
DRAFTS = (1, 3, 7)
"""Draft tokens of steps that compile kernels for them."""


def _manager(runner: ModelRunner, rank: int = 0) -> CacheManager:
    """Return the books of a cache that nobody uses yet."""
    slots = StateSlots(runner.states.num_slots, runner.states.num_slots) if runner.states else None
    manager = CacheManager(runner.pool.pages, runner.plan.page_size, prefix_cache=False, states=slots)
    manager.rank = rank
    return manager


def managers_of(runner: ModelRunner) -> list[CacheManager]:
    """Return books of all ranks that have requests of their own; one where all have the same.

    What a rank compiles must not depend on its having none.
    """
    return [_manager(runner, rank) for rank in range(max(len(runner.books), 1))]


@contextmanager
def _leases(manager: CacheManager, *requests: Request) -> Iterator[None]:
    """Open leases of requests, and close them in any case.

    A rehearsal goes on where a step fails, and each lease that is left open has a row of the page tables.
    """
    try:
        for request in requests:
            request.lease = manager.open(request.token_ids, "")
        yield
    finally:
        for lease in tuple(manager.leases):
            manager.release(lease)


def run_prompts(runner: ModelRunner, lengths: Sequence[int], managers: Sequence[CacheManager] = ()) -> None:
    """Run one step of prompts of these lengths, over pages that are free again afterwards.

    Args:
        runner: of the model.
        lengths: of the prompts.
        managers: of ranks that have as many each; none: the first rank alone has any.
    """
    chunks = list[ScheduledRequest]()
    with ExitStack() as opened:
        for manager in managers or [_manager(runner)]:
            requests = [Request(f"warm-{i}", [0] * length) for i, length in enumerate(lengths)]
            opened.enter_context(_leases(manager, *requests))
            for request in requests:
                manager.reserve(request.lease, len(request.token_ids))
                chunks.append(ScheduledRequest.next_chunk(request, len(request.token_ids)))
        logits_SV = runner.forward(Batch.from_scheduled(chunks))
        # As the sampler does, with penalties or without.
        for x_SV in (logits_SV, logits_SV.float()):
            topk.likeliest(x_SV)


def run_chunks(runner: ModelRunner, step_tokens: int, max_tokens: int) -> None:
    """Run a few new tokens after few and after many, so that fewer requests wait for what such steps compile.

    Without pieces: some steps are computed kernel by kernel while requests are served.
    """
    pieces, runner.pieces = runner.pieces, None
    most = min(max_tokens, runner.pool.pages * runner.plan.page_size)
    firsts = FIRST_STEP, min(step_tokens, most - sum(CHUNKS))
    for manager, first in itertools.product(managers_of(runner), firsts):
        counts = [first, *(min(count, step_tokens) for count in CHUNKS)]
        request = Request("warm", [0] * sum(counts))
        if first <= 0 or request.num_tokens > most:
            continue
        with _leases(manager, request):
            manager.reserve(request.lease, request.num_tokens)
            for count in counts:
                request.in_flight = ScheduledRequest.next_chunk(request, count)
                # In a rehearsal nothing is read of what many tokens would write.
                if count <= max(FIRST_STEP, *CHUNKS) or not ahead.is_rehearsal():
                    runner.forward(Batch.from_scheduled([request.in_flight]))
    runner.pieces = pieces


def run_drafts(runner: ModelRunner, max_tokens: int, most: int) -> None:
    """Verify a few tokens and several, up to the most, so that fewer requests wait for what such steps compile.

    Without a record: steps that have tokens of prompts too are computed so.
    """
    room = min(max_tokens, runner.pool.pages * runner.plan.page_size) - FIRST_STEP - 1
    if room < most:
        return
    graphs, pieces = runner.graphs, runner.pieces
    runner.graphs = runner.pieces = None
    for manager in managers_of(runner):
        _verify_drafts(runner, manager, most)
    runner.graphs, runner.pieces = graphs, pieces


def _verify_drafts(runner: ModelRunner, manager: CacheManager, most: int) -> None:
    request = Request("warm", [0] * (FIRST_STEP + 1))
    with _leases(manager, request):
        most = min(most, manager.draft_room(request.lease, FIRST_STEP))
        manager.reserve(request.lease, FIRST_STEP + 1 + most)
        runner.forward(Batch.from_scheduled([ScheduledRequest.next_chunk(request, FIRST_STEP)]))
        for count in sorted({min(count, most) for count in (*DRAFTS, most)}):
            item = ScheduledRequest(
                request, FIRST_STEP, 1 + count, Phase.VERIFY, True, write_from=FIRST_STEP, drafts=(0,) * count
            )
            runner.forward(Batch((item,)))


def run_longest(runner: ModelRunner, step_tokens: int, max_tokens: int) -> None:
    """Run a step of so many tokens, as far as requests and pages reach; of each rank that has requests of its own."""
    for manager in managers_of(runner):
        run_prompts(runner, longest_prompts(runner, step_tokens, max_tokens), [manager])


def longest_prompts(runner: ModelRunner, tokens: int, max_tokens: int) -> list[int]:
    """Return lengths of prompts that fill a step of `tokens` tokens, as far as requests and pages reach."""
    pages, size, lengths = runner.pool.pages, runner.plan.page_size, list[int]()
    most = min(
        runner.tables.padding_row, runner.states.num_slots if runner.states else runner.tables.padding_row
    )
    while tokens and pages and len(lengths) < most:
        length = min(tokens, max_tokens, pages * size)
        lengths.append(length)
        tokens, pages = tokens - length, pages - cdiv(length, size)
    return lengths
