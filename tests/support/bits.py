"""Two runs of a model, bit by bit: logits of answers, which module's output differs first; and runs with preemption."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nibble import LLM
from nibble.engine.request import Batch

ANSWER = 8
"""Tokens of an answer."""
Trace = list[tuple[str, Tensor]]
"""Names of modules, in the order in which they finished, and the rows that they returned [T, ...]."""


@contextmanager
def traced(model: nn.Module) -> Iterator[Trace]:
    """Notes the outputs of all modules of a model that runs as it is written: compiled code calls no hooks."""
    trace: Trace = []

    def note(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            # [1, T, ...] is Transformers' batch.
            trace.append(
                (name, (first[0] if first.dim() > 2 and len(first) == 1 else first).detach().clone())
            )

    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def first_difference(one: Trace, other: Trace, rows: slice, other_rows: slice) -> str:
    """Says which module is the first whose rows differ between two runs, and by how much; empty if none does.

    rows: of the first run, which are other_rows of the second.
    """
    later = dict(other)
    for name, a in one:
        b = later.get(name)
        if b is None or ".experts." in name or sum(entry == name for entry, _ in (*one, *other)) != 2:
            continue  # in experts rows have another order each time
        if len(a) < rows.stop or len(b) < other_rows.stop:
            continue  # of chosen rows alone, as logits are
        x, y = a[rows], b[other_rows]
        if x.shape == y.shape and not torch.equal(x, y):
            far = float((x.float() - y.float()).abs().max())
            count = int((x != y).flatten(1).any(1).sum())
            return f"{name} is the first to differ: in {count} of {len(x)} rows, by {far:.3g} at most"
    return ""


def preempting(llm: LLM) -> LLM:
    """Takes the last request's pages away every third step, as if there were too few."""
    scheduler, steps = llm.engine.scheduler, itertools.count(1)
    schedule = scheduler.schedule

    def spy(*drafts: Any) -> Batch | None:
        if next(steps) % 3 == 0 and len(scheduler.running) > 1:
            scheduler._preempt(scheduler.running[-1])
        return schedule(*drafts)

    scheduler.schedule = spy  # type: ignore[method-assign]
    return llm


@contextmanager
def recorded(llm: LLM) -> Iterator[dict[str, list[Tensor]]]:
    """Logits of every sampled token, by request, in order."""
    seen: dict[str, list[Tensor]] = defaultdict(list)
    forward = llm.engine.runner.forward

    def spy(batch: Batch, **options: Any) -> Tensor:
        logits = forward(batch, **options)
        names = [item.request.id for item in batch.scheduled if item.samples_token]
        for name, row in zip(names, logits, strict=False):
            seen[name].append(row.clone())
        return logits

    llm.engine.runner.forward = spy  # type: ignore[method-assign]
    yield seen
    llm.engine.runner.forward = forward  # type: ignore[method-assign]


def answer(llm: LLM, prompts: list[list[int]], target: int = 0, count: int = ANSWER, **params: Any) -> Tensor:
    """Logits [count, V] of prompts[target], answered together with the others."""
    with recorded(llm) as seen:
        llm.generate(prompts, max_tokens=count, ignore_eos=True, progress=False, **params)
    name = sorted(seen, key=lambda name: int(name.split("-")[0]))[target]
    # A preempted request samples some tokens twice; with the same bits that is the same answer.
    rows = torch.stack(seen[name]).unique_consecutive(dim=0)
    assert len(rows) >= count
    return rows[:count]


def differs(found: Tensor, expected: Tensor) -> str:
    rows = (found != expected).any(1).nonzero()[:, 0].tolist()
    far = float((found.float() - expected.float()).abs().max())
    return f"logits of answer tokens {rows} differ, by {far:.3g} at most" if rows else ""


@contextmanager
def limited(llm: LLM, tokens: int) -> Iterator[None]:
    scheduler = llm.engine.scheduler
    before = scheduler.token_budget, scheduler.chunk
    scheduler.token_budget = scheduler.chunk = tokens
    yield
    scheduler.token_budget, scheduler.chunk = before
