"""Prompts' recurrences in CUDA C++ on a GPU, against naive.py on the same tensors: every format, rule and kind of decay.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu/test_recurrence_prompt_gpu.py

Slots hold NaN wherever nothing is to be read. An assertion says of a case how far all that was written is off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nibble.kernels import gpu_of
from nibble.kernels.recurrence import prompt as kernels
from nibble.kernels.recurrence.types import StateMetadata
from nibble.kernels.state_formats import FORMATS
from prompts import Case, Prompt, difference, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OUTPUT = {"fp32": 0.004, "bf16": 0.005, "int8": 0.01, "fp8": 0.025}
MATRICES = {"fp32": 0.003, "bf16": 0.006, "int8": 0.013, "fp8": 0.035}
FAR_CODES = {"fp32": 0, "bf16": 0, "int8": 0.001, "fp8": 0.006}
MIXED = Case(
    lengths=(1, 15, 16, 17, 100, 1000),
    starts=(0, 3, 16, 21, 5, 37),
    heads=4,
    key_heads=2,
    rows=128,
    columns=128,
)
MANY = tuple(1 + 89 * (i % 11 == 3) + i % 3 for i in range(90))
CASES = (
    *(
        dataclasses.replace(
            MIXED, format=format, delta=delta, by_column=by_column, key_heads=4 if by_column else 2
        )
        for format in FORMATS
        for by_column in (False, True)
        for delta in (True, False)
    ),
    Case("int8", lengths=(300,), starts=(0,), heads=32, key_heads=16, rows=128, columns=128),
    # Four warps of a block, and requests that begin and end everywhere.
    Case("fp8", lengths=MANY, starts=tuple(7 * i % 50 for i in range(90)), heads=16, key_heads=4, rows=64, columns=64),
    Case("fp32", lengths=MANY, starts=tuple(5 * i % 50 for i in range(90)), heads=8, rows=128, columns=128),
    Case("bf16", delta=False, heads=8, rows=64, columns=128, lengths=(500, 33), starts=(0, 47), beta=torch.float32),
    Case("int8", lengths=(70, 20, 64), starts=(9, 30, 0), padding=(1,), heads=3, key_heads=3, rows=80, columns=48,
         drafts=20, beta=None, strided=True),
    Case("fp32", lengths=(200, 8), starts=(15, 1), heads=6, key_heads=2, rows=16, columns=16, pace=3.0),
    Case("bf16", by_column=True, lengths=(200, 8), starts=(15, 1), heads=2, key_heads=2, rows=32, columns=112, pace=3.0),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    """Compile what all cases launch, on all cores."""
    from nibble.kernels.nvrtc import cubin

    folder, gpu, jobs = Path(kernels.__file__).parent, gpu_of(torch.device("cuda")), set()
    for case in CASES:
        rate = 0 if case.beta is None else kernels.RATES[case.beta]
        shape = kernels.Shape(case.columns, case.format, case.delta, case.by_column, rate)
        warps = kernels.warps_of(case.rows, case.heads, len(case.lengths), gpu.processors)
        share = kernels.heads_of(case.heads, case.key_heads)
        first = "scan_columns" if case.by_column else "scan_prepare"
        jobs |= {
            (first, tuple(shape.prepare_macros(share).items())),
            ("scan", tuple(shape.scan_macros(warps).items())),
        }
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda job: cubin(folder / f"{job[0]}.cu", gpu.arch, dict(job[1])), jobs))
    yield


def run(step: Prompt) -> Tensor:
    return kernels.recurrence(*step.inputs, step.state, step.metadata, delta=step.case.delta)


def check(case: Case, before: Prompt, ours: Prompt, o_THV: Tensor) -> None:
    theirs = before.copy()
    apart = difference(before, ours, o_THV, theirs, theirs.expected())
    text = f"{case}: {apart}"
    assert apart.strays == 0, text
    assert apart.output <= OUTPUT[case.format] and apart.matrices <= MATRICES[case.format], text
    assert apart.keys == 0 and apart.decays <= 1e-6 and apart.updates <= OUTPUT[case.format], text
    assert apart.far_codes <= FAR_CODES[case.format], text


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_the_definition(case: Case) -> None:
    before = prompt(case, "cuda")
    assert kernels.serves(*before.inputs, before.state, before.metadata)
    ours, again = before.copy(), before.copy()
    o_THV = run(ours)
    torch.cuda.synchronize()
    check(case, before, ours, o_THV)
    # What no wait has ordered shows as a difference between runs.
    for _ in range(5):
        assert torch.equal(run(again), o_THV)
        again = before.copy()


@pytest.mark.parametrize("format", FORMATS)
def test_chunks_are_one_prompt(format: str) -> None:
    tokens, cuts = 700, (0, 37, 160, 500, 700)
    case = Case(format, lengths=(tokens,), starts=(0,), heads=4, key_heads=2, rows=128, columns=128)
    once = prompt(case, "cuda", spare_rows=0)
    cut, whole_THV, parts = once.copy(), run(once), []
    for start, stop in pairwise(cuts):
        inputs = tuple(x if x is None else x[start:stop] for x in cut.inputs)
        lists = ([start], [0, stop - start])
        tensors = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in lists)
        metadata = StateMetadata(cut.metadata.slots_B, *tensors, stop - start)
        parts.append(run(dataclasses.replace(cut, inputs=inputs, metadata=metadata)))
    error = float((torch.cat(parts).float() - whole_THV.float()).norm() / whole_THV.float().norm())
    assert 0 < error <= OUTPUT[format], f"{format}: {error:.2g}"


@pytest.mark.parametrize("by_column", [False, True])
def test_a_recorded_step_serves_other_lengths(by_column: bool) -> None:
    case = Case(
        "int8", by_column=by_column, lengths=(100, 60, 90), starts=(0, 20, 33), heads=4, key_heads=4, rows=128,
        columns=128,
    )  # fmt: skip
    step = prompt(case, "cuda")
    run(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_THV = run(step)
    for seed, (lengths, starts, padding) in enumerate(
        (((100, 60, 90), (0, 20, 33), ()), ((1, 200, 49), (17, 0, 48), ()), ((70, 7, 64), (3, 31, 0), (1,)))
    ):
        other = dataclasses.replace(case, lengths=lengths, starts=starts, padding=padding)
        before = prompt(other, "cuda", seed, spare_rows=len(o_THV) - sum(lengths))
        for mine, theirs in (
            *zip(step.inputs, before.inputs, strict=True),
            *zip(step.state.planes, before.state.planes, strict=True),
            *((getattr(step.state, name), getattr(before.state, name)) for name in ("keys_SPGK", "updates_SPHV", "decays")),
            *((getattr(step.metadata, name), getattr(before.metadata, name)) for name in ("slots_B", "starts_B", "cu_seqlens_B1")),
        ):  # fmt: skip
            assert mine is not None and theirs is not None
            mine.copy_(theirs)
        o_THV.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(other, before, dataclasses.replace(before, state=step.state), o_THV)


def test_what_is_not_served() -> None:
    step = prompt(MIXED, "cuda")
    changes = (
        {"max_length": kernels.MIN_TOKENS - 1},
        {"settled_B": step.metadata.starts_B},
        {"invariant": True},
    )
    for change in changes:
        metadata = dataclasses.replace(step.metadata, **change)
        assert not kernels.serves(*step.inputs, step.state, metadata), change
    q, *others = step.inputs
    assert not kernels.serves(q.half(), *others, step.state, step.metadata)
