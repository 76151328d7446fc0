"""Kernels of recurrent layers in Triton's interpreter against the definition, and bit by bit among their own cuts."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from test_recurrence import BIAS, CASES, WEIGHT, A, Case, Rows, error, spoil, tensors
from torch import Tensor

import exact_interpreter
import nibble
from nibble.kernels import GPU
from nibble.kernels import recurrence as op
from nibble.kernels.recurrence import (
    LayerState,
    StateBatch,
    StateMetadata,
    conv,
    copies,
    decode,
    mamba,
    naive,
    tiles,
    types,
)
from nibble.kernels.recurrence import triton as any_cut
from nibble.kernels.state_formats import BLOCK, FORMATS
from pairs import rotated

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="tests/gpu/test_recurrence_gpu.py has GPUs' arithmetic"
    ),
    pytest.mark.usefixtures("scalars_bound_loops", "exact_casts"),
]
TOKENS = 37
CUT = (5, 9, 1, 1, 17, 4)
"""Begins and ends within blocks, fills one by a single token, and goes over a whole one."""
MATRICES = (
    "delta, shared keys",
    "delta, column decay",
    "decay, shared keys",
    "column decay",
    "decay, no beta",
)
EXACT, ROUNDED, HALF = 1e-5, 2e-3, 6e-3
"""Limits of errors: in float32 alone; where a rounded value of a matrix may fall to the other side; in bfloat16."""


@pytest.fixture
def exact_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_interpreter.install(monkeypatch)


def metadata(batch: StateBatch, *, drafts: bool = False, padding: bool = False) -> StateMetadata:
    """Return a batch as tensors; with padding, a request without a slot that has a row of its own is behind it."""
    slots, starts, lengths, at, settled = (
        (*values, filler)
        for values, filler in (
            (batch.slots, -1), (batch.starts, 40), (batch.lengths, 1), (batch.states_at, 32), (batch.settled, 1),
        )
    ) if padding else (batch.slots, batch.starts, batch.lengths, batch.states_at, batch.settled)  # fmt: skip
    ints = functools.partial(torch.tensor, dtype=torch.int32)
    more = (ints(settled), ints(at)) if drafts else (None, None)
    ends = list(accumulate(lengths, initial=0))
    return StateMetadata(ints(slots), ints(starts), ints(ends), max(lengths, default=0), *more)


def run(case: Case, rows: Rows, state: LayerState, batch: StateMetadata, *, fast: bool = False) -> Tensor:
    """Compute a step by kernels."""
    rule = case.group.rule
    if rule == "conv":
        return conv.causal_conv(rows[0], *(x.to(rows[0].dtype) for x in (WEIGHT, BIAS)), "silu", state, batch)
    if rule == "selective":
        x, dt, b, c = rows
        return mamba.selective(x, dt, A, b, c, state, batch)
    q, k, v, decay, *beta = rows
    kernels = decode if fast else any_cut
    return kernels.recurrence(q, k, v, decay, beta[0] if beta else None, state, batch, delta=rule == "delta")


def steps(batches: Sequence[int], slot: int = 1, begin: int = 0) -> Iterator[StateBatch]:
    """Yield the steps of one request."""
    for start, stop in zip(
        accumulate(batches, initial=begin), accumulate(batches[1:], initial=begin + batches[0]), strict=False
    ):
        yield StateBatch((slot,), (start,), (stop - start,), (start // BLOCK * BLOCK,), (stop - start,))


def serve(case: Case, rows: Rows, state: LayerState, cut: Sequence[int], *, fast: bool = False) -> Tensor:
    """Serve a request alone -> its outputs."""
    outputs = []
    for batch in steps(cut):
        now = tuple(x[batch.starts[0] : batch.starts[0] + batch.lengths[0]] for x in rows)
        outputs.append(run(case, now, state, metadata(batch), fast=fast and batch.lengths == (1,)))
    return torch.cat(outputs)


def rows_of(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0, tokens: int = TOKENS) -> Rows:
    wide = {"delta": {3, 4}, "decay": {3, 4}, "selective": {1}}.get(case.group.rule, set())
    return tuple(x[:tokens] if n in wide else x[:tokens].to(dtype) for n, x in enumerate(case.rows(seed)))


def defined(case: Case, rows: Rows, format: str, dtype: torch.dtype) -> tuple[Tensor, LayerState]:
    """Return what naive.py computes, and its state."""
    state = case.state(format, 0, dtype)
    count = len(rows[0])
    return case.step(rows, state, StateBatch((1,), (0,), (count,), (0,), (count,))), state


def cases(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=list(names))


def limit(format: str, dtype: torch.dtype) -> float:
    return HALF if dtype == torch.bfloat16 else EXACT if format == "fp32" else ROUNDED


def assert_near(actual: Tensor, expected: Tensor, limit: float) -> None:
    assert actual.dtype == expected.dtype and actual.isfinite().all()
    assert error(actual.float(), expected.float()) < limit


# ---- the definition, in every cut ------------------------------------------------------------------------------------


STORED = (*((name, torch.bfloat16) for name in FORMATS), ("fp32", torch.float32), ("int8", torch.float32))
"""Formats of matrices with types of rows."""


def stored_in(
    names: Sequence[str], stored: Sequence[tuple[str, torch.dtype]], count: int
) -> pytest.MarkDecorator:
    """Parametrise by cases, and formats and types in turn."""
    values = [
        pytest.param(CASES[name], format, dtype, id=f"{name}-{format}-{dtype}")
        for name, (format, dtype) in rotated(names, stored, count)
    ]
    return pytest.mark.parametrize(("case", "format", "dtype"), values)


@pytest.mark.slow
@stored_in((*MATRICES, "selective"), STORED, 3)
@pytest.mark.sample(8)
def test_every_cut_has_the_bits_of_one_step(case: Case, format: str, dtype: torch.dtype) -> None:
    rows = rows_of(case, dtype)
    expected, _ = defined(case, rows, format, dtype)
    outputs, states = [], []
    for cut in ((TOKENS,), CUT):
        state = case.state(format, 0, dtype)
        spoil(state)  # nothing that was not stored is read
        outputs.append(serve(case, rows, state, cut))
        states.append([x[1] for x in tensors(state)])
    assert_near(outputs[0], expected, limit(format, dtype))
    assert torch.equal(*outputs)
    for x, y in zip(*states, strict=True):
        # Places of the incomplete block; what lies in others may be of any block before.
        places = TOKENS % BLOCK if len(x) == BLOCK else len(x)
        assert torch.equal(x[:places].float(), y[:places].float())


@stored_in(
    (*MATRICES, "delta, no beta"),
    (("fp32", torch.bfloat16), ("fp8", torch.bfloat16), ("int8", torch.float32), ("bf16", torch.float32)),
    2,
)
@pytest.mark.sample(6)
def test_decodes(case: Case, format: str, dtype: torch.dtype) -> None:
    """By the kernel that reads a matrix once: before a matrix is there, when a block is filled, and behind it."""
    rows = rows_of(case, dtype, tokens=19)
    expected, other = defined(case, rows, format, dtype)
    state = case.state(format, 0, dtype)
    spoil(state)
    outputs = serve(case, rows, state, (1, 1, 12, 1, 1, 1, 1, 1), fast=True)
    assert_near(outputs, expected, limit(format, dtype))
    planes = [plane[1].float() for plane in state.planes]
    assert all(
        torch.allclose(x, y[1].float(), rtol=0.02, atol=1.01)
        for x, y in zip(planes, other.planes, strict=True)
    )


@pytest.mark.slow
@cases("delta, shared keys", "decay, no beta", "selective", "convolution")
def test_rows_that_pad_a_request_belong_to_no_state(case: Case) -> None:
    """As in a recorded step with drafts: before each request's own rows, and of one request there is nothing else."""
    width, starts, new = 8, (13, 30, 16), (8, 3, 1)  # one fills a block by its first token
    before, alone, beside = (case.state("fp32", 0, torch.float32) for _ in range(3))
    spoil(before)
    for slot, start in enumerate(starts):
        rows = rows_of(case, tokens=start, seed=slot)
        run(case, rows, before, metadata(StateBatch((slot,), (0,), (start,), (0,), (start,))))
    outputs = list[Tensor]()
    for state in (alone, beside):
        for x, y in zip(tensors(state), tensors(before), strict=True):
            x.copy_(y)
    ints = functools.partial(torch.tensor, dtype=torch.int32)
    padded = list[Rows]()
    for slot, (start, count) in enumerate(zip(starts, new, strict=True)):
        all_rows = rows_of(case, seed=slot)
        own = tuple(x[start : start + count] for x in all_rows)
        batch = StateBatch((slot,), (start,), (count,), (start // BLOCK * BLOCK,), (1,))
        outputs.append(run(case, own, alone, metadata(batch, drafts=True)))
        padded.append(tuple(torch.cat((x[:1].expand(width - count, *x.shape[1:]), x)) for x in own))
    padded.append(tuple(torch.ones_like(x) for x in padded[0]))
    slots, at, settled = (-1, 0, -1, 1, -1, 2, -1, -1), (0, 13, 0, 30, 0, 16, 0, 0), (0, 1, 0, 1, 0, 1, 0, 0)
    ends = (0, 0, 8, 13, 16, 23, 24, 32, 32)
    batch = StateMetadata(ints(slots), ints(at), ints(ends), width, ints(settled))
    found = run(case, tuple(map(torch.cat, zip(*padded, strict=True))), beside, batch)
    for place, (count, expected) in enumerate(zip(new, outputs, strict=True)):
        assert_near(found[(place + 1) * width - count : (place + 1) * width], expected, EXACT)
    assert (found[13 - 5 : 13] == 0).all() and (found[24:] == 0).all()
    for x, y in zip(tensors(alone), tensors(beside), strict=True):
        assert torch.allclose(x.float(), y.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("rows", "columns"), [(24, 28), (64, 64), (40, 96)])
def test_sizes(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import test_recurrence

    monkeypatch.setattr(test_recurrence, "ROWS", rows)
    monkeypatch.setattr(test_recurrence, "COLUMNS", columns)
    case = test_recurrence.matrix_case("delta", heads=2, key_heads=1)
    inputs = rows_of(case, tokens=18)
    expected, _ = defined(case, inputs, "int8", torch.float32)
    for cut, fast in (((18,), False), ((14, 1, 1, 1, 1), True)):
        state = case.state("int8", 0, torch.float32)
        assert_near(serve(case, inputs, state, cut, fast=fast), expected, EXACT)


@cases("convolution")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolutions(case: Case, dtype: torch.dtype) -> None:
    rows = rows_of(case, dtype, tokens=100)
    expected, other = defined(case, rows, "fp32", dtype)
    outputs = []
    for cut in ((100,), (1, 1, 3, 2, 1, 1, 40, 1, 50)):
        state = case.state("fp32", 0, dtype)
        spoil(state)
        outputs.append(serve(case, rows, state, cut))
        assert torch.equal(state.inputs_SPC[1], other.inputs_SPC[1])
    assert_near(outputs[0], expected, limit("fp32", dtype))
    assert torch.equal(*outputs)


def test_a_convolution_of_a_transposed_view_without_bias_and_activation() -> None:
    case, x = CASES["convolution"], rows_of(CASES["convolution"])[0].T.contiguous().T
    batch = next(steps((TOKENS,)))
    actual = conv.causal_conv(x, WEIGHT, None, None, case.state(), metadata(batch))
    assert_near(actual, op.causal_conv(x, WEIGHT, None, None, case.state(), batch), 1e-5)


# ---- company, padding and drafts -------------------------------------------------------------------------------------


@pytest.mark.slow
@cases("delta, shared keys", "column decay", "selective", "convolution")
def test_company_changes_no_bit(case: Case) -> None:
    """Requests of other lengths, one behind another, padding behind them, and NaN in rows of no request."""
    lengths, state, kept = (3, 20, 0, 1), case.state("int8"), case.state("int8")
    spoil(state)
    rows = [rows_of(case, seed=seed) for seed in range(4)]
    first = (14, 3, 2, 15)
    for slot, start in enumerate(first):
        for target in (state, kept):
            before = StateBatch((slot,), (0,), (start,), (0,), (start,))
            run(case, tuple(x[:start] for x in rows[slot]), target, metadata(before))
    batch = StateBatch((0, 1, 2, 3), first, lengths, (0, 0, 0, 0), lengths)
    now = [tuple(x[start : start + n] for x in r) for r, start, n in zip(rows, first, lengths, strict=True)]
    padding = tuple(torch.full_like(x[:4], torch.nan) for x in rows[0])
    together = tuple(torch.cat(columns) for columns in zip(*now, padding, strict=True))
    outputs = run(case, together, state, metadata(batch, padding=True))
    assert not outputs[sum(lengths) :].any()
    for slot, part in enumerate(outputs[: sum(lengths)].split(lengths)):
        if not lengths[slot]:
            continue
        alone = StateBatch((slot,), (first[slot],), (lengths[slot],), (0,), (lengths[slot],))
        assert torch.equal(run(case, now[slot], kept, metadata(alone)), part)
    # Slots 4 and 5 have no request.
    assert all(x[4:].isnan().all() or (x[4:] == 77).all() for x in tensors(state) if x.numel())


@cases("delta, shared keys", "column decay", "selective", "convolution")
def test_decodes_of_padding(case: Case) -> None:
    """A step of decodes that is recorded for more requests than there are."""
    rows, state = rows_of(case), case.state("int8")
    run(case, tuple(x[:15] for x in rows), state, metadata(next(steps((15,)))))
    spoilt = [x.clone() for x in tensors(state)]
    now = tuple(torch.cat((x[15:16], torch.full_like(x[:2], torch.nan))) for x in rows)
    batch = StateMetadata(*(torch.tensor(x, dtype=torch.int32) for x in ((1, -1), (15, 0), (0, 1, 2))), 1)
    for fast in (False, True):
        for x, y in zip(tensors(state), spoilt, strict=True):
            x.copy_(y)
        outputs = run(case, now, state, batch, fast=fast)
        assert outputs[0].isfinite().all() and outputs[0].any() and not outputs[1:].any()
        assert all(
            torch.equal(x[[0, 2, 3, 4, 5]], y[[0, 2, 3, 4, 5]])
            for x, y in zip(tensors(state), spoilt, strict=True)
        )


@pytest.mark.slow
@cases("delta, shared keys", "decay, shared keys", "delta, column decay", "selective", "convolution")
@pytest.mark.sample(6)
@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered")  # of wrong drafts
def test_rejected_drafts_leave_no_trace(case: Case, accepted: int) -> None:
    """Over a multiple of BLOCK, wrong ones being NaN; the matrix is brought forward when they are known."""
    drafts, begin = 4, BLOCK - 2
    rows, state = rows_of(case, tokens=begin + 12), case.state("int8", drafts)
    expected = run(case, rows, case.state("int8", drafts), metadata(next(steps((begin + 12,)))))
    spoil(state)
    run(case, tuple(x[:begin] for x in rows), state, metadata(next(steps((begin,)))))
    wrong = tuple(torch.full_like(x[: drafts - accepted], torch.nan) for x in rows)
    now = tuple(torch.cat((x[begin : begin + 1 + accepted], y)) for x, y in zip(rows, wrong, strict=True))
    batch = StateBatch((1,), (begin,), (1 + drafts,), (0,), (1,))
    outputs = run(case, now, state, metadata(batch, drafts=True))
    assert torch.equal(outputs[: 1 + accepted], expected[begin : begin + 1 + accepted])
    start = begin + 1 + accepted
    for count in (1, 5):
        batch = StateBatch((1,), (start,), (count,), (0 if count == 1 else start // BLOCK * BLOCK,), (count,))
        outputs = run(
            case, tuple(x[start : start + count] for x in rows), state, metadata(batch, drafts=True)
        )
        assert torch.equal(outputs, expected[start : start + count]), count
        start += count


# ---- slots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 3)],
        [(0, 3), (0, 5)],
        [(0, 3), (3, 5), (5, 1)],
        [(1, 2), (2, 1)],
        [(4, 4)],
        [(0, 1), (1, 0), (2, 3)],
        [],
    ],
)
def test_slots_are_read_before_they_are_written(pairs: list[tuple[int, int]]) -> None:
    layers = [case.state(format, 3) for case in CASES.values() for format in ("fp32", "int8")]
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for x in tensors(layer):
            x.copy_(torch.randint(-9, 9, x.shape, generator=generator))
    before = [[x.clone() for x in tensors(layer)] for layer in layers]
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    copies.copy_slots(layers, sources, targets)
    for layer, olds in zip(layers, before, strict=True):
        for x, old in zip(tensors(layer), olds, strict=True):
            expected = old.clone()
            expected[targets] = old[sources]
            assert torch.equal(x.float(), expected.float())


# ---- the operation ---------------------------------------------------------------------------------------------------


@cases("delta, shared keys", "selective", "convolution")
def test_on_a_cpu_the_definition_reads_the_tensors(case: Case) -> None:
    rows, batch = rows_of(case), next(steps((TOKENS,)))
    states = case.state(), case.state()
    expected = case.step(rows, states[0], batch)
    actual = case.step(rows, states[1], metadata(batch))  # type: ignore[arg-type]
    assert torch.equal(actual, expected)
    assert all(torch.equal(x, y) for x, y in zip(*map(tensors, states), strict=True))
    with pytest.raises(ValueError, match="37 rows"):
        case.step(rows, states[1], metadata(StateBatch((1,), (37,), (38,), (32,), (38,))))  # type: ignore[arg-type]


def test_steps_of_decodes_have_kernels_of_their_own() -> None:
    rows = rows_of(CASES["delta"], tokens=1)
    q, k, v, decay, beta = rows
    batch = metadata(StateBatch((0,), (3,), (1,), (0,), (1,)))
    choose = functools.partial(op._matrix_rule, (q, k, v, decay, beta), CASES["delta"].state())
    assert choose(batch) is decode
    for other in (
        dataclasses.replace(batch, invariant=True),
        dataclasses.replace(batch, max_length=2),
        dataclasses.replace(batch, states_at_B=batch.starts_B),
        dataclasses.replace(batch, settled_B=batch.starts_B),
    ):
        assert choose(other) is any_cut


@pytest.mark.parametrize(
    ("name", "dtype", "share"),
    [
        ("delta, shared keys", torch.bfloat16, 1),
        ("delta, column decay", torch.float32, 1),
        ("delta", torch.bfloat16, 3),
        ("decay, no beta", torch.bfloat16, 1),
    ],
)
def test_a_decode_step_convolves_in_the_same_launch(
    name: str, dtype: torch.dtype, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit what two kernels compute, at the begin and over the end of a block, whatever states there are."""
    monkeypatch.setattr(op, "_has_kernels", lambda batch, x: isinstance(batch, StateMetadata))
    case = CASES[name]
    group, delta = case.group, case.group.rule == "delta"
    own = group.key_heads // share
    queries, values = own * group.columns, group.heads * group.rows
    channels = 2 * queries + values
    group = dataclasses.replace(group, conv_channels=channels, conv_taps=4)
    random = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(channels, *more, generator=random).to(dtype) for more in ((4,), ()))
    states = [op.layer_state(group, 3, "int8", dtype, 0, "cpu") for _ in range(2)]
    for x, y in zip(*map(tensors, states), strict=True):
        x.copy_(-torch.rand(x.shape, generator=random))
        y.copy_(x)
    decays, *betas = rows_of(case)[3:]
    shapes = ((own, group.columns), (own, group.columns), (group.heads, group.rows))
    places = (queries + values, 0, queries)  # of queries, keys, values
    for token in (0, 1, 14, 15, 16):
        x_TC = torch.randn(2, channels + 5, generator=random)[:, :channels].to(dtype)
        gates = decays[token : token + 2], betas[0][token : token + 2] if betas else None
        # A row of padding behind it.
        batch = StateMetadata(*(torch.tensor(n).int() for n in ((2, -1), (token, 0), (0, 1, 2))), 1)
        joined = op.conv_recurrence(
            op.Convolution(x_TC, weight, bias, "silu", *places, share), *gates, states[0], batch, delta=delta, unit=delta
        )  # fmt: skip
        y_TC = conv.causal_conv(x_TC, weight, bias, "silu", states[1], batch)
        q, k, v = (
            y_TC[:, at : at + n * d].unflatten(1, (n, d)) for at, (n, d) in zip(places, shapes, strict=True)
        )
        q, k = (x.repeat_interleave(share, 1) for x in (q, k))
        apart = decode.recurrence(q, k, v, *gates, states[1], batch, delta=delta, unit=delta)
        assert joined.isfinite().all() and joined[0].any() and not joined[1].any()
        assert torch.equal(joined, apart), token
        for x, y in zip(*map(tensors, states), strict=True):
            assert torch.equal(x.float().nan_to_num(9.0), y.float().nan_to_num(9.0)), token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_and_keys_are_normalised_as_by_the_definition(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(70, 90, generator=random).to(dtype)[:, :84].unflatten(1, (3, 28)) for _ in "qk")
    for actual, expected in zip(tiles.unit_rows(q, k), naive.unit_rows(q, k), strict=True):
        assert actual.dtype == dtype
        assert error(actual.float(), expected.float()) < (1e-6 if dtype == torch.float32 else 4e-3)
    # In the kernel of decode steps, too.
    case = CASES["delta, shared keys"]
    q, k, *others = rows_of(case, dtype, tokens=1)
    batch = StateBatch((1,), (0,), (1,), (0,), (1,))
    states = [case.state(dtype=dtype) for _ in range(2)]
    expected = op.recurrence(3 * q, k / 5, *others, states[0], batch, delta=True, unit=True)
    actual = decode.recurrence(3 * q, k / 5, *others, states[1], metadata(batch), delta=True, unit=True)
    assert_near(actual, expected, limit("fp32", dtype))


@cases("delta, shared keys", "delta, column decay", "decay, no beta", "convolution")
def test_decodes_beside_prompts_are_computed_apart(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same slots and answers as by the definition, and in a step that is cut as the host knows it."""
    monkeypatch.setattr(op, "_has_kernels", lambda batch, x: isinstance(batch, StateMetadata))
    monkeypatch.setattr(types, "MIN_ONES", 2)
    calls: list[int] = []
    fast = decode.recurrence
    monkeypatch.setattr(
        decode, "recurrence", lambda *args, **options: calls.append(len(args[6].slots_B)) or fast(*args, **options)
    )  # fmt: skip
    lengths, first = (5, 20, 1, 1, 1), (14, 3, 15, 0, 31)
    states, rows = [case.state(), case.state()], [rows_of(case, seed=seed) for seed in range(5)]
    for slot, start in enumerate(first):
        before = StateBatch((slot,), (0,), (start,), (0,), (start,))
        for state in states:
            if start:
                case.step(tuple(x[:start] for x in rows[slot]), state, before)
    at = tuple(start // BLOCK * BLOCK for start in first)
    batch = StateBatch((0, 1, 2, 3, 4), first, lengths, at, lengths)
    now = [tuple(x[start : start + n] for x in r) for r, start, n in zip(rows, first, lengths, strict=True)]
    together = tuple(torch.cat(columns) for columns in zip(*now, strict=True))
    expected = case.step(together, states[0], batch)
    ones, others = types.ones_behind(lengths)
    assert (ones, others) == (3, 25)
    step = dataclasses.replace(metadata(batch), num_ones=ones, num_rows=others)
    actual = case.step(together, states[1], step)  # type: ignore[arg-type]
    assert calls == ([] if case.group.rule == "conv" else [3])
    assert_near(actual, expected, EXACT)
    for x, y in zip(*map(tensors, states), strict=True):
        if x.numel():
            assert error(x[:5].float(), y[:5].float()) < EXACT
    assert dataclasses.replace(step, invariant=True).parts() is None
    assert dataclasses.replace(step, num_ones=5, num_rows=0).parts() is None


@pytest.mark.parametrize(
    ("rows", "columns", "itemsize", "matrices", "expected"),
    [
        (128, 128, 4, 32, decode.Tile(16, 4)),
        (128, 128, 4, 2048, decode.Tile(32, 4)),
        (128, 128, 1, 2048, decode.Tile(128, 4, 255)),
        (128, 128, 1, 64, decode.Tile(32, 4)),
        (64, 128, 4, 8192, decode.Tile(32, 4)),
        (64, 256, 4, 8192, decode.Tile(16, 4)),
    ],
)
def test_tiles(rows: int, columns: int, itemsize: int, matrices: int, expected: decode.Tile) -> None:
    assert decode.tile_of(rows, columns, itemsize, matrices, GPU(90, 132, 232448)) == expected


# ---- compiled --------------------------------------------------------------------------------------------------------


COMPILED = """
import re, subprocess, tempfile, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nibble.kernels import GPU
from nibble.kernels.recurrence import conv, copies, decode, mamba, project, tiles
from nibble.kernels.recurrence import triton as any_cut

CODES = {"fp32": ("fp32", 4, 0.0), "bf16": ("bf16", 2, 0.0), "fp8": ("fp8e4nv", 1, 448.0), "int8": ("i8", 1, 127.0)}
INTS = dict.fromkeys(("slots", "starts", "cu_seqlens", "states_at", "settled"), "i32")

def compiled(kernel, types, fixed, warps, stages=3, **more):
    types = {n: t for n, t in {**types, **INTS}.items() if n not in fixed}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in fixed else "*" + types[n] if n in types else "i32" for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if n not in fixed and n not in ("rows", "requests", "columns", "N")}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in fixed.items()}, aligned)
    options = dict(num_warps=warps, num_stages=stages, launch_pdl=True, **more)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return kernel.asm["ptx"] + registers(kernel.asm["cubin"])

def registers(cubin):
    # Bytes of the stack, which is where registers go that there are too few of.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return " ".join(re.findall(r"STACK:[0-9]+", text))

def matrix(format, dtype, heads, key_heads, rows, columns, by_column, delta, kernel, convolved=False, projected=False):
    code, itemsize, max_code = CODES[format]
    half = dict.fromkeys(("q", "k", "v", "keys", "out"), dtype)
    full = dict.fromkeys(("log_decay", "beta", "sums", "weights", "scales", "decays"), "fp32")
    types = {**half, **full, "codes": code, "updates": "fp32" if format == "fp32" else dtype}
    fixed = dict(H=heads, G=key_heads, V=rows, K=columns, P=16, MAX_CODE=max_code, COLUMNS=by_column, DELTA=delta, PDL=True)
    if not max_code:
        fixed |= dict(scales=None, scales_stride_S=0)
    if kernel == "decode":
        width = triton.next_power_of_2(columns)
        tile = decode.tile_of(rows, width, itemsize, 64 * heads, GPU(90, 132, 232448))
        piece, key_piece = min(width, 128 // itemsize), min(width, 64)
        line = 128 // itemsize
        if convolved:
            types |= dict.fromkeys(("x", "inputs", "weight"), dtype)
            fixed |= dict(q=None, k=None, v=None, bias=None, q_stride_T=0, k_stride_T=0, v_stride_T=0, TAPS=4, PLACES=4,
                          SILU=1, Q_AT=0, K_AT=key_heads * columns, V_AT=2 * key_heads * columns, SHARE=1)
        else:
            ints = ("x_stride_T", "inputs_stride_S", "weight_stride_C", "weight_stride_W", "channels", "TAPS", "PLACES",
                    "SILU", "Q_AT", "K_AT", "V_AT", "SHARE")
            fixed |= dict.fromkeys(("x", "inputs", "weight", "bias")) | dict.fromkeys(ints, 0)
        gates = dict.fromkeys(("a", "b", "paces", "offsets"), dtype)
        runs = ((0, 128, 768), (128, 128, 768), (256, 256, 768), (12290, 2, 4), (12288, 2, 4))  # as Qwen3-Next has them
        fixed |= dict(zip(project.RUN_CONSTANTS, (n for run in runs for n in run)), GATES=projected)
        if projected:
            types |= gates
            fixed |= dict(log_decay=None, beta=None, log_decay_stride_T=0, beta_stride_T=0)
        else:
            fixed |= dict.fromkeys(gates) | dict(a_stride_T=0, b_stride_T=0)
        fixed |= dict(UNIT=convolved, EPSILON=1e-6, SCALE=columns**-0.5)
        fixed |= dict(VW=tile.rows, C=width // piece, W=piece, D=width // key_piece, E=key_piece,
                      LINES=tile.rows * columns // line, LINE_VALUES=line)
        return compiled(decode.decode_kernel, types, fixed, tile.warps, maxnreg=tile.maxnreg)
    fixed |= dict(states_at=None, settled=None, VW=any_cut.ROWS, KW=triton.next_power_of_2(columns), FULL=dtype == "fp32")
    if kernel == "weights":
        fixed = {n: v for n, v in fixed.items() if n in any_cut.weights_kernel.arg_names}
        return compiled(any_cut.weights_kernel, types, fixed, 4, 1)
    return compiled(any_cut.recurrence_kernel, types, fixed | dict(ONE=kernel == "one"), 4, 1)
"""


def compile_for_sm90(code: str) -> list[list[str]]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED + code],
        cwd=Path(nibble.__file__).parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return [line.split() for line in run.stdout.splitlines()]


@pytest.mark.slow
def test_decodes_load_whole_lines_and_ask_for_the_matrix_before_they_wait() -> None:
    """Compiled as for a GPU, which none is needed for."""
    lines = compile_for_sm90("""
for format, convolved in [(name, False) for name in CODES] + [("int8", True), ("fp32", True), ("int8", 2), ("fp32", 2)]:
    ptx = matrix(format, "bf16", 32, 16, 128, 128, False, True, "decode", bool(convolved), convolved == 2)
    early, rest = ptx.split("griddepcontrol.wait")
    stack = re.search(r"STACK:([0-9]+)", rest)[1]
    print(early.count("prefetch.global.L2"), early.count("st.global"), rest.count("ld.global.v4.b32"),
          rest.count("ld.global"), "local" in ptx, stack)
""")
    assert len(lines) == len(FORMATS) + 4
    for prefetches, stores, vectors, loads, *spills in lines:
        assert prefetches == "1" and stores == "0" and int(vectors) >= 4
        # A word or two beside the matrix may lie in memory of the thread.
        assert spills[0] == "False" and int(spills[1]) <= 8
        # No thread convolves what others do.
        assert int(loads) < 128


@pytest.mark.slow
def test_the_rule_of_any_cut_compiles_for_tensor_cores() -> None:
    lines = compile_for_sm90("""
for args in (("fp32", "bf16", 32, 16, 128, 128, False, True, "any"), ("int8", "bf16", 4, 4, 128, 128, True, True, "one"),
             ("fp8", "bf16", 64, 8, 64, 128, False, False, "one"), ("fp32", "bf16", 32, 16, 128, 128, False, True, "weights"),
             ("bf16", "bf16", 32, 32, 128, 128, True, True, "weights")):
    ptx = matrix(*args)
    print(args[-1], ptx.count("wgmma.mma_async"), ptx.count("mma.sync"))
""")
    assert len(lines) == 5
    assert all(int(wide) > 0 for name, wide, _ in lines if name != "weights")


@pytest.mark.slow
def test_other_kernels_compile() -> None:
    lines = compile_for_sm90("""
for rows, width, warps in ((1, conv.FEW_CHANNELS, 1), (conv.TOKENS, conv.CHANNELS, 4)):
    types = dict.fromkeys(("x", "weight", "bias", "inputs", "out"), "bf16")
    ptx = compiled(conv.conv_kernel, types, dict(x_stride_C=1, weight_stride_W=1, W=4, P=4, SILU=True, R=rows, C=width, PDL=True), warps)
    print("conv", "local" in ptx)
for format in CODES:
    code, _, max_code = CODES[format]
    half, full = dict.fromkeys(("x", "keys", "queries", "kept_keys", "updates", "out"), "bf16"), dict.fromkeys(("dt", "a", "scales", "paces"), "fp32")
    fixed = dict(states_at=None, settled=None, K=16, P=16, KW=16, C=mamba.CHANNELS, MAX_CODE=max_code, ONE=format == "fp8", PDL=True)
    if not max_code:
        fixed |= dict(scales=None, scales_stride_S=0)
    print("selective", "local" in compiled(mamba.selective_kernel, {**half, **full, "codes": code}, fixed, 4))
fixed = dict(settled=None, P=16, X=1024, PDL=True)
halves = dict.fromkeys(("x", "a", "b", "paces", "offsets", "out"), "bf16")
runs = dict.fromkeys(project.RUN_CONSTANTS, 64)
fixed_runs = dict(Q_AT=0, K_AT=2048, V_AT=4096, KEYS=2048, HEADS=32, C=project.CHANNELS, H=32, PDL=True, **runs)
print("project", "local" in compiled(project.project_kernel, {**halves, "log_decay": "fp32", "beta": "fp32"}, fixed_runs, 4))
print("store", "local" in compiled(tiles.store_kernel, {"rows": "bf16", "stored": "bf16"}, fixed, 4))
ptx = compiled(copies.copy_kernel, {"table": "i64", "pairs": "i64"}, dict(UNIT=triton.language.int64, I=copies.ITEMS), 8)
print("copy", not re.search(r"ld.global\\S*b64", ptx))
""")
    assert len(lines) == 9 and all(bad == "False" for _, bad in lines)
