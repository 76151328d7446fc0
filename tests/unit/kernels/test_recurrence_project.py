"""What recurrent layers read of the products that they begin with: by the definition, in Triton, and in decode steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_recurrence import tensors
from torch import Tensor

import exact_interpreter
from nibble.kernels import recurrence as op
from nibble.kernels.recurrence import Convolution, Projection, Runs, StateMetadata, decode, naive, project
from nibble.model_spec import RecurrentGroup

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="tests/gpu/test_recurrence_gpu.py has GPUs' arithmetic"
    ),
    pytest.mark.usefixtures("scalars_bound_loops", "exact_casts"),
]
HEADS, KEY_HEADS, ROWS, COLUMNS, TAPS = 4, 2, 12, 8, 4
KEYS, VALUES, SHARE = KEY_HEADS * COLUMNS, HEADS * ROWS, HEADS // KEY_HEADS
CHANNELS = 2 * KEYS + VALUES
GROUP = RecurrentGroup(
    "delta", "delta", (0,), HEADS, ROWS, COLUMNS, KEY_HEADS, False, conv_channels=CHANNELS, conv_taps=TAPS
)
Parts = tuple[Tensor, ...]
"""Inputs of queries, keys and values [T, heads, width], a and b [T, heads]."""


@pytest.fixture
def exact_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_interpreter.install(monkeypatch)


def interleaved(y_TW: Tensor) -> tuple[Parts, tuple[Runs, ...]]:
    """As Qwen3-Next has them: a head of keys with its values and z behind one another, then b's and a's."""
    wide = 2 * COLUMNS + 2 * SHARE * ROWS
    first, last = y_TW[:, : KEY_HEADS * wide], y_TW[:, KEY_HEADS * wide :]
    q, k, v, _ = first.unflatten(1, (KEY_HEADS, wide)).split(
        [COLUMNS, COLUMNS, SHARE * ROWS, SHARE * ROWS], 2
    )
    b, a = last.unflatten(1, (KEY_HEADS, 2 * SHARE)).chunk(2, 2)
    at = KEY_HEADS * wide
    runs = (
        *(Runs(i * COLUMNS, COLUMNS, wide) for i in (0, 1)), Runs(2 * COLUMNS, SHARE * ROWS, wide),
        Runs(at + SHARE, SHARE, 2 * SHARE), Runs(at, SHARE, 2 * SHARE),
    )  # fmt: skip
    return (q, k, v.reshape(len(y_TW), HEADS, ROWS), a.flatten(1), b.flatten(1)), runs


def in_order(y_TW: Tensor) -> tuple[Parts, tuple[Runs, ...]]:
    """As Qwen3.5 has them: one behind the other."""
    q, k, v, _, b, a = y_TW.split([KEYS, KEYS, VALUES, VALUES, HEADS, HEADS], 1)
    at = 2 * KEYS + 2 * VALUES
    starts = (0, KEYS), (KEYS, KEYS), (2 * KEYS, VALUES), (at + HEADS, HEADS), (at, HEADS)
    q, k, v = (x.unflatten(1, (n, -1)) for x, n in ((q, KEY_HEADS), (k, KEY_HEADS), (v, HEADS)))
    return (q, k, v, a, b), tuple(Runs(first, length, length) for first, length in starts)


LAYOUTS = {"interleaved": interleaved, "in order": in_order}


def layer(
    layout: str, dtype: torch.dtype, tokens: int, seed: int = 0
) -> tuple[Projection, Convolution, Parts]:
    """Return random products, a convolution, and what is in the products."""
    random = torch.Generator().manual_seed(seed)
    width = 2 * KEYS + 2 * VALUES + 2 * HEADS
    y_TW = (4 * torch.randn(tokens, width + 3, generator=random)).to(dtype)[:, :width]
    parts, runs = LAYOUTS[layout](y_TW)
    weight, bias = (torch.randn(CHANNELS, *more, generator=random).to(dtype) for more in ((TAPS,), ()))
    paces, offsets = (torch.randn(HEADS, generator=random).to(dtype) for _ in range(2))
    projection = Projection(y_TW, y_TW, y_TW, runs, paces, offsets)
    # Channels in another order than that of the product.
    places = KEYS + VALUES, 0, KEYS
    return projection, Convolution(y_TW, weight, bias, "silu", *places), parts


def expected_of(projection: Projection, conv: Convolution, parts: Parts) -> Parts:
    q, k, v, a, b = parts
    x_TC = torch.empty(len(a), CHANNELS, dtype=a.dtype)
    for at, part in zip((conv.q_at, conv.k_at, conv.v_at), (q, k, v), strict=True):
        x_TC[:, at : at + part[0].numel()] = part.flatten(1)
    log_decay = -projection.paces_H.float().exp() * F.softplus(a.float() + projection.offsets_H.float())
    return x_TC, log_decay, b.float().sigmoid()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compute", [naive.project, project.project], ids=["definition", "triton"])
def test_parts_are_found_where_they_are(layout: str, dtype: torch.dtype, compute: Any) -> None:
    projection, conv, parts = layer(layout, dtype, 5)
    actual = compute(projection, conv, op.layer_state(GROUP, 1, "fp32", dtype, 0, "cpu"))
    expected = expected_of(projection, conv, parts)
    assert torch.equal(actual[0], expected[0])
    for x, y in zip(actual[1:], expected[1:], strict=True):
        assert x.dtype == torch.float32
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-7)


def test_gates_are_right_far_from_zero() -> None:
    projection, conv, _ = layer("in order", torch.float32, 7)
    first = projection.runs[3].first
    far = torch.tensor([-80.0, -20.0, -9.0, 19.9, 20.1, 60.0, 0.0])
    projection.x_TW[:, first : first + HEADS] = far[:, None] - projection.offsets_H
    state = op.layer_state(GROUP, 1, "fp32", torch.float32, 0, "cpu")
    _, log_decay, _ = project.project(projection, conv, state)
    expected = -projection.paces_H.exp() * F.softplus(far.double()[:, None])
    assert torch.allclose(log_decay.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 1), (torch.float32, SHARE)], ids=str)
def test_a_decode_step_reads_products_in_the_same_launch(
    layout: str, dtype: torch.dtype, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit what three kernels compute, at the begin and over the end of a block, whatever states there are."""
    monkeypatch.setattr(op, "_has_kernels", lambda batch, x: isinstance(batch, StateMetadata))
    random = torch.Generator().manual_seed(0)
    group = dataclasses.replace(GROUP, key_heads=share * KEY_HEADS)  # a family may have repeated them
    states = [op.layer_state(group, 3, "int8", dtype, 0, "cpu") for _ in range(2)]
    for x, y in zip(*map(tensors, states), strict=True):
        x.copy_(-torch.rand(x.shape, generator=random))
        y.copy_(x)
    for token in (0, 1, 14, 15, 16):
        projection, conv, _ = layer(layout, dtype, 2, seed=token)
        conv = dataclasses.replace(conv, share=share)
        # A row of padding behind it.
        batch = StateMetadata(*(torch.tensor(n).int() for n in ((2, -1), (token, 0), (0, 1, 2))), 1)
        fused = op.projected_recurrence(projection, conv, states[0], batch, delta=True, unit=True)
        x_TC, *gates = project.project(projection, conv, states[1])
        own = dataclasses.replace(conv, x_TC=x_TC)
        apart = op.conv_recurrence(own, *gates, states[1], batch, delta=True, unit=True)
        assert fused.isfinite().all() and fused[0].any() and not fused[1].any()
        assert torch.equal(fused, apart), token
        for x, y in zip(*map(tensors, states), strict=True):
            assert torch.equal(x.float().nan_to_num(9.0), y.float().nan_to_num(9.0)), token


def test_other_steps_bring_channels_into_order_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_has_kernels", lambda batch, x: isinstance(batch, StateMetadata))
    fast = decode.projected_recurrence
    calls: list[int] = []
    monkeypatch.setattr(
        decode, "projected_recurrence", lambda *args, **options: calls.append(1) or fast(*args, **options)
    )
    projection, conv, _ = layer("interleaved", torch.float32, 3)
    batches = {
        "one token": StateMetadata(*(torch.tensor(n).int() for n in ((0,), (0,), (0, 1))), 1),
        "three tokens": StateMetadata(*(torch.tensor(n).int() for n in ((0,), (0,), (0, 3))), 3),
    }
    for batch in (*batches.values(), dataclasses.replace(batches["one token"], invariant=True)):
        states = [op.layer_state(GROUP, 1, "fp32", torch.float32, 0, "cpu") for _ in range(2)]
        actual = op.projected_recurrence(projection, conv, states[0], batch, delta=True, unit=True)
        host = batch.on_host()
        expected = op.projected_recurrence(projection, conv, states[1], host, delta=True, unit=True)
        assert torch.allclose(actual, expected, atol=1e-5)
    assert len(calls) == 1, "of the step of one token, whose results need not be invariant"


def test_heads_in_several_runs_are_brought_into_order_first() -> None:
    projection, _, _ = layer("in order", torch.float32, 1)
    state = op.layer_state(GROUP, 1, "fp32", torch.float32, 0, "cpu")
    assert decode.projects(projection, state)
    halves = Runs(0, COLUMNS // 2, COLUMNS)
    assert not decode.projects(dataclasses.replace(projection, runs=(halves, *projection.runs[1:])), state)
