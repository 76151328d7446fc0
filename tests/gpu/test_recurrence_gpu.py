"""Kernels of recurrent layers on a GPU, of published models' shapes: the definition, every cut, recorded steps, copies.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from nibble.kernels import recurrence as op
from nibble.kernels.recurrence import LayerState, StateBatch, StateMetadata
from nibble.kernels.recurrence.types import ones_behind
from nibble.kernels.state_formats import BLOCK, FORMATS
from nibble.model_spec import Recurrence, RecurrentGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE, SLOTS = "cuda", 12
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}
"""Of a token's outputs, against the definition; half precision rounds updates, which may fall to the other side."""
COARSE = {"int8": 1.5, "fp8": 3.0}
"""Of the fast kernels these limits are so much wider, where a value of a state that falls to the other side counts more."""
ONE_CODE = {"int8": 4e-4, "fp8": 2e-3}
"""By which one value of a state that falls to the other side moves a token's outputs: no limit is below it."""
Rows = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """A layer, and what its tokens may be."""

    rule: Recurrence
    heads: int
    rows: int
    columns: int
    key_heads: int
    key_decay: bool = False
    channels: int = 0
    pace: float = 20.0
    """By which log decays are divided; a small one forgets within a block."""

    def state(self, format: str, dtype: torch.dtype = torch.bfloat16, drafts: int = 0) -> LayerState:
        group = RecurrentGroup(
            self.rule, self.rule, (0,), self.heads, self.rows, self.columns, self.key_heads, self.key_decay,
            self.channels, 4 if self.channels else 0,
        )  # fmt: skip
        state = op.layer_state(group, SLOTS, format, dtype, drafts, DEVICE)
        for x in tensors(state):  # nothing that was not stored is read
            x.copy_(
                torch.full_like(x, 77) if x.dtype == torch.int8 else torch.full_like(x.float(), torch.nan)
            )
        return state

    def inputs(self, tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Rows:
        values = functools.partial(
            torch.randn, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE
        )
        if self.rule == "conv":
            return (values(tokens, self.channels).to(dtype),)
        if self.rule == "selective":
            dt = softplus(values(tokens, self.rows) - 3)
            x, b, c = values(tokens, self.rows), values(tokens, self.columns), values(tokens, self.columns)
            return x.to(dtype), dt, b.to(dtype), c.to(dtype)
        q, k = (normalize(values(tokens, self.key_heads, self.columns), dim=-1).to(dtype) for _ in "qk")
        pace = values(tokens, self.heads, self.columns) if self.key_decay else values(tokens, self.heads)
        rows = (q, k, values(tokens, self.heads, self.rows).to(dtype), -softplus(pace) / self.pace)
        return (*rows, torch.sigmoid(values(tokens, self.heads)))

    def run(self, rows: Rows, state: LayerState, batch: StateBatch | StateMetadata) -> Tensor:
        if self.rule == "conv":
            return op.causal_conv(
                rows[0], *(x.to(rows[0].dtype) for x in taps(self.channels)), "silu", state, batch
            )
        if self.rule == "selective":
            x, dt, b, c = rows
            return op.selective(x, dt, paces(self.rows, self.columns), b, c, state, batch)
        return op.recurrence(*rows, state, batch, delta=self.rule == "delta")


@functools.cache
def taps(channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(7)
    return torch.randn(channels, 4, device=DEVICE, generator=generator) / 2, torch.linspace(
        -1, 1, channels, device=DEVICE
    )


@functools.cache
def paces(rows: int, columns: int) -> Tensor:
    return -torch.arange(1, columns + 1, device=DEVICE).float().expand(rows, columns).contiguous() / 4


LAYERS = {
    "Qwen3-Next": Layer("delta", 32, 128, 128, 16),
    "KDA": Layer("delta", 32, 128, 128, 32, key_decay=True),
    "KDA that forgets": Layer("delta", 4, 128, 128, 4, key_decay=True, pace=0.1),
    "Mamba 2": Layer("decay", 64, 64, 128, 8),
    "lightning": Layer("decay", 16, 128, 128, 16),
    "long rows": Layer("decay", 24, 64, 256, 1),
    "odd": Layer("delta", 6, 80, 96, 3),
    "Mamba 1": Layer("selective", 1, 8192, 16, 1),
    "convolution": Layer("conv", 0, 0, 0, 0, channels=8192),
}
QWEN = LAYERS["Qwen3-Next"]
CASES = [
    *(("Qwen3-Next", format, torch.bfloat16) for format in FORMATS), ("KDA", "int8", torch.bfloat16),
    ("KDA that forgets", "fp32", torch.bfloat16), ("Mamba 2", "fp32", torch.bfloat16),
    ("lightning", "fp8", torch.bfloat16), ("long rows", "bf16", torch.bfloat16),
    ("long rows", "fp32", torch.float16), ("long rows", "int8", torch.float32), ("odd", "int8", torch.float16),
    ("odd", "fp32", torch.float32), ("Mamba 1", "fp32", torch.bfloat16), ("Mamba 1", "int8", torch.bfloat16),
    ("convolution", "fp32", torch.bfloat16), ("convolution", "fp32", torch.float32),
]  # fmt: skip
cases = pytest.mark.parametrize(
    ("name", "format", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch.")
)


def tensors(state: LayerState) -> list[Tensor]:
    return [*state.planes, state.keys_SPGK, state.updates_SPHV, state.decays, state.inputs_SPC]


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def metadata(
    batch: StateBatch, *, padding: int = 0, drafts: bool = False, invariant: bool = False
) -> StateMetadata:
    """Return a batch in tensors; with padding, so many requests of a row each without a slot are behind it."""
    ends = list(accumulate((*batch.lengths, *[1] * padding), initial=0))
    more = (ints(batch.settled), ints(batch.states_at)) if drafts else (None, None)
    slots, starts = (*batch.slots, *[-1] * padding), (*batch.starts, *[0] * padding)
    return StateMetadata(ints(slots), ints(starts), ints(ends), max(batch.lengths), *more, invariant)


def batch_of(slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> StateBatch:
    at = tuple(start // BLOCK * BLOCK for start in starts)
    return StateBatch(tuple(slots), tuple(starts), tuple(lengths), at, tuple(lengths))


def error(outputs: Tensor, expected: Tensor) -> float:
    """Return how far outputs are from the expected ones, of a token at most."""
    distance, size = (
        x.double().flatten(1).norm(dim=1) for x in (outputs.double() - expected.double(), expected)
    )
    return float((distance / size.mean()).max())


@cases
@pytest.mark.parametrize("invariant", [False, True])
def test_steps_of_all_kinds_are_the_definition(
    name: str, format: str, dtype: torch.dtype, invariant: bool
) -> None:
    """Prompts, chunks beside decodes, and decodes over two multiples of BLOCK, with padding."""
    layer = LAYERS[name]
    limit = max(LIMITS[dtype] * (1 if invariant else COARSE.get(format, 1)), ONE_CODE.get(format, 0.0))
    states = layer.state(format, dtype), layer.state(format, dtype)
    slots, starts, worst = (3, 0, 7), [0, 0, 0], 0.0
    for step, lengths in enumerate(((70, 33, 5), (1, 30, 1), *[(1, 1, 1)] * 20)):
        batch = batch_of(slots, starts, lengths)
        rows = layer.inputs(sum(lengths) + 2, dtype, step)
        for x in rows:
            x[-2:] = torch.nan
        expected = layer.run(rows, states[1], batch)
        actual = layer.run(
            rows, states[0], metadata(batch, padding=2 * (max(lengths) == 1), invariant=invariant)
        )
        assert actual.dtype == dtype and not actual[-2:].any()
        worst = max(worst, error(actual[:-2], expected[:-2]))
        starts = [start + n for start, n in zip(starts, lengths, strict=True)]
    print(f"{name}, {format}, {dtype}, {'invariant' if invariant else 'fast'}: error {worst:.1e}")
    assert worst < limit
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert all((x[others].isnan() if x.is_floating_point() and x.itemsize > 1 else x[others].float().nan_to_num(77) == 77).all() for x in tensors(states[0]))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "format", "share"),
    [*(("Qwen3-Next", format, 1) for format in FORMATS), ("Qwen3-Next", "int8", 2), ("KDA", "int8", 1)],
)
def test_decode_steps_convolve_in_one_launch(name: str, format: str, share: int) -> None:
    """Against the definition of both, and of queries and keys of length 1, over two multiples of BLOCK."""
    layer, dtype = LAYERS[name], torch.bfloat16
    queries, values = layer.key_heads // share * layer.columns, layer.heads * layer.rows
    channels = 2 * queries + values
    weight, bias = (x.to(dtype) for x in taps(channels))
    group = RecurrentGroup(
        "joined", layer.rule, (0,), layer.heads, layer.rows, layer.columns, layer.key_heads, layer.key_decay,
        channels, 4,
    )  # fmt: skip
    states = [op.layer_state(group, SLOTS, format, dtype, 0, DEVICE) for _ in range(2)]
    starts, worst = [0, 7, 15], 0.0
    for state in states:  # what came before, of the same bytes
        generator = torch.Generator(DEVICE).manual_seed(1)
        state.inputs_SPC.copy_(torch.randn(state.inputs_SPC.shape, device=DEVICE, generator=generator))
        state.keys_SPGK.zero_(), state.updates_SPHV.zero_(), state.decays.zero_()
    for step in range(34):
        _, _, _, *gates = layer.inputs(5, dtype, step)
        generator = torch.Generator(DEVICE).manual_seed(step)
        x_TC = torch.randn(5, channels, device=DEVICE, generator=generator).to(dtype)
        batch = batch_of((3, 0, 7), starts, (1, 1, 1))
        conv = op.Convolution(x_TC, weight, bias, "silu", 0, queries, 2 * queries, share)
        decay, beta = gates if len(gates) > 1 else (*gates, None)
        run = functools.partial(op.conv_recurrence, conv, decay, beta, delta=layer.rule == "delta", unit=True)
        actual, expected = run(states[0], metadata(batch, padding=2)), run(states[1], batch)
        assert not actual[3:].any()
        worst = max(worst, error(actual[:3], expected[:3]))
        assert torch.equal(states[0].inputs_SPC, states[1].inputs_SPC)
        starts = [start + 1 for start in starts]
    print(f"joined, {name}, {format}: error {worst:.1e}")
    # Outputs of the convolution, and queries and keys, are rounded on the way.
    assert worst < 2 * LIMITS[dtype] * COARSE.get(format, 1)


@pytest.mark.parametrize(("format", "share"), [("fp32", 1), ("int8", 1), ("int8", 2)])
def test_decode_steps_read_products_in_one_launch(format: str, share: int) -> None:
    """Against the definition, in the order of Qwen3-Next's products; then a prompt, for which a kernel reorders them."""
    layer, dtype = LAYERS["Qwen3-Next"], torch.bfloat16
    key_heads, (heads, dim) = layer.key_heads // share, (layer.heads, layer.rows)
    queries, values, each = key_heads * layer.columns, heads * dim, heads // key_heads
    channels, wide = 2 * queries + values, 2 * (layer.columns + each * dim)
    weight, bias = (x.to(dtype) for x in taps(channels))
    group = RecurrentGroup(
        "projected", layer.rule, (0,), heads, dim, layer.columns, layer.key_heads, False, channels, 4
    )
    states = [op.layer_state(group, SLOTS, format, dtype, 0, DEVICE) for _ in range(2)]
    at = key_heads * wide
    runs = (
        op.Runs(0, layer.columns, wide), op.Runs(layer.columns, layer.columns, wide),
        op.Runs(2 * layer.columns, each * dim, wide), op.Runs(at + each, each, 2 * each), op.Runs(at, each, 2 * each),
    )  # fmt: skip
    paces, offsets = (torch.linspace(first, 1, heads, device=DEVICE).to(dtype) for first in (-3, -1))
    starts, worst = [0, 7, 15], 0.0
    for state in states:  # what came before, of the same bytes
        generator = torch.Generator(DEVICE).manual_seed(1)
        state.inputs_SPC.copy_(torch.randn(state.inputs_SPC.shape, device=DEVICE, generator=generator))
        state.keys_SPGK.zero_(), state.updates_SPHV.zero_(), state.decays.zero_()
    for step, lengths in enumerate([*[(1, 1, 1)] * 34, (20, 1, 100)]):
        generator = torch.Generator(DEVICE).manual_seed(step)
        count = sum(lengths)
        y_TW = torch.randn(count + 2, at + 2 * heads, device=DEVICE, generator=generator).to(dtype)
        projection = op.Projection(y_TW, y_TW, y_TW, runs, paces, offsets)
        conv = op.Convolution(y_TW, weight, bias, "silu", 0, queries, 2 * queries, share)
        batch = batch_of((3, 0, 7), starts, lengths)
        run = functools.partial(op.projected_recurrence, projection, conv, delta=True, unit=True)
        actual = run(states[0], metadata(batch, padding=2 * (max(lengths) == 1)))
        expected = run(states[1], batch)
        assert not actual[count:].any()
        worst = max(worst, error(actual[:count], expected[:count]))
        assert torch.equal(states[0].inputs_SPC, states[1].inputs_SPC)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    print(f"projected, {format}: error {worst:.1e}")
    assert worst < 2 * LIMITS[dtype] * COARSE.get(format, 1)


@pytest.mark.parametrize("name", ["Qwen3-Next", "KDA", "Mamba 2", "convolution"])
def test_decodes_beside_a_prompt_are_computed_apart(name: str) -> None:
    layer, dtype, format = LAYERS[name], torch.bfloat16, "int8"
    states = layer.state(format, dtype), layer.state(format, dtype)
    slots, lengths, starts = tuple(range(10)), (300, *[1] * 9), [0] * 10
    before = batch_of(slots, starts, (3, *range(10, 19)))
    for state, how in ((states[0], metadata(before)), (states[1], before)):
        layer.run(layer.inputs(sum(before.lengths), dtype, 0), state, how)
    batch = batch_of(slots, before.lengths, lengths)
    rows = layer.inputs(sum(lengths), dtype, 1)
    ones, others = ones_behind(lengths)
    step = replace(metadata(batch), num_ones=ones, num_rows=others)
    assert step.parts() is not None
    off = error(layer.run(rows, states[0], step), layer.run(rows, states[1], batch))
    assert off < LIMITS[dtype] * COARSE.get(format, 1)


CUTS = ((50,) * 3, (7, 9, 1, 16, 1, 1, 40, 64, 11), (15, *[1] * 20, 115), (149, 1))


@cases
def test_every_cut_and_company_has_the_same_bits(name: str, format: str, dtype: torch.dtype) -> None:
    layer, outputs = LAYERS[name], []
    rows, other = layer.inputs(150, dtype), layer.inputs(150, dtype, 1)
    for cut in ((150,), *CUTS):
        for company in (0, 1):
            state, start, parts = layer.state(format, dtype), 0, []
            for length in cut:
                # The other request comes first, and begins anew in each step.
                lengths = (min(length, 3), length) if company else (length,)
                batch = batch_of((5, 2)[-len(lengths) :], (0, start)[-len(lengths) :], lengths)
                now = tuple(torch.cat((y[: lengths[0]], x[start : start + length])) if company else x[start : start + length] for x, y in zip(rows, other, strict=True))  # fmt: skip
                parts.append(layer.run(now, state, metadata(batch, invariant=True))[-length:])
                start += length
            outputs.append(torch.cat(parts))
    assert outputs[0].isfinite().all()
    assert [torch.equal(outputs[0], x) for x in outputs[1:]] == [True] * (len(outputs) - 1)


@pytest.mark.parametrize("name", ["Qwen3-Next", "KDA", "Mamba 1", "convolution"])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_recorded_step_serves_other_requests(name: str, invariant: bool) -> None:
    """Only what tensors hold changes between replays: slots, positions, padding, inputs."""
    layer, requests = LAYERS[name], 8
    state = layer.state("int8")
    begin = batch_of(range(requests), range(9, 9 + requests), [1] * requests)
    prompt = batch_of(range(requests), [0] * requests, begin.starts)
    layer.run(layer.inputs(sum(begin.starts), seed=9), state, metadata(prompt))
    live, rows = metadata(begin, invariant=invariant), layer.inputs(requests)
    kept = [x.clone() for x in tensors(state)]
    layer.run(rows, state, live)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = layer.run(rows, state, live)
    for x, y in zip(tensors(state), kept, strict=True):
        x.copy_(y)
    twin = replace(state, **{f: getattr(state, f).clone() for f in ("keys_SPGK", "updates_SPHV", "decays", "inputs_SPC")}, planes=tuple(x.clone() for x in state.planes))  # fmt: skip
    starts = list(begin.starts)
    for step in range(20):
        order = torch.randperm(requests, generator=torch.Generator().manual_seed(step)).tolist()
        active = order[: requests - step % 3]
        now = batch_of(active, [starts[slot] for slot in active], [1] * len(active))
        new = metadata(now, padding=requests - len(active), invariant=invariant)
        for x, y in zip((live.slots_B, live.starts_B, live.cu_seqlens_B1), (new.slots_B, new.starts_B, new.cu_seqlens_B1), strict=True):  # fmt: skip
            x.copy_(y)
        for x, y in zip(rows, layer.inputs(requests, seed=100 + step), strict=True):
            x.copy_(y)
        outputs.fill_(torch.nan)
        graph.replay()
        assert torch.equal(outputs, layer.run(rows, twin, new)), step
        assert outputs[: len(active)].any() and not outputs[len(active) :].any()
        for slot in active:
            starts[slot] += 1
    for x, y in zip(tensors(state), tensors(twin), strict=True):
        assert torch.equal(x[:requests].float().nan_to_num(7), y[:requests].float().nan_to_num(7))


@pytest.mark.parametrize("name", ["Qwen3-Next", "KDA", "Mamba 2", "Mamba 1", "convolution"])
def test_rejected_drafts_leave_no_trace(name: str) -> None:
    layer, drafts, total = LAYERS[name], 4, 60
    rows = layer.inputs(total)
    whole = layer.run(rows, layer.state("int8"), metadata(batch_of((1,), (0,), (total,)), invariant=True))
    for accepted in range(drafts + 1):
        state, start, at = layer.state("int8", drafts=drafts), 0, 0
        first = batch_of((1,), (0,), (6,))
        parts = [layer.run(tuple(x[:6] for x in rows), state, metadata(first))]
        start = 6
        while start + accepted < total:
            wrong = tuple(torch.full_like(x[: drafts - accepted], torch.nan) for x in rows)
            now = tuple(
                torch.cat((x[start : start + 1 + accepted], y)) for x, y in zip(rows, wrong, strict=True)
            )
            batch = StateBatch((1,), (start,), (1 + drafts,), (at,), (1,))
            parts.append(layer.run(now, state, metadata(batch, drafts=True))[: 1 + accepted])
            at, start = batch.next_states_at[0], start + 1 + accepted
        assert torch.equal(torch.cat(parts), whole[:start]), accepted


@pytest.mark.parametrize("pairs", [[(0, 3)], [(0, 3), (3, 5), (5, 1)], [(1, 2), (2, 1)], [(4, 4), (0, 7)]])
def test_slots_are_read_before_they_are_written(pairs: list[tuple[int, int]]) -> None:
    layers = [layer.state(format, drafts=3) for layer in LAYERS.values() for format in ("fp32", "int8")]
    for layer in layers:
        for x in tensors(layer):
            x.copy_(torch.randint(-9, 9, x.shape, device=DEVICE))
    before = [[x.clone() for x in tensors(layer)] for layer in layers]
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    op.copy_slots(layers, sources, targets)
    for layer, olds in zip(layers, before, strict=True):
        for x, old in zip(tensors(layer), olds, strict=True):
            expected = old.float()
            expected[targets] = old.float()[sources]
            assert torch.equal(x.float(), expected)


def in_float64(rows: Rows, layer: Layer) -> Tensor:
    """Return the recurrence token by token, for inputs as they are."""
    q, k, v, decay, beta = (x.double() for x in rows)
    q, k = (x.repeat_interleave(layer.heads // layer.key_heads, dim=1) for x in (q, k))
    matrix, outputs = v.new_zeros(layer.heads, layer.rows, layer.columns), []
    for token in range(len(v)):
        matrix = matrix * decay[token].exp().reshape(layer.heads, 1, -1)
        seen = (matrix * k[token, :, None]).sum(-1) if layer.rule == "delta" else 0
        matrix = matrix + (beta[token, :, None] * (v[token] - seen))[..., None] * k[token, :, None]
        outputs.append((matrix * q[token, :, None]).sum(-1))
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("name", "dtype", "limit"),
    [("Qwen3-Next", torch.bfloat16, 5e-3), ("KDA", torch.bfloat16, 5e-3), ("Mamba 2", torch.bfloat16, 5e-3), ("odd", torch.float32, 2e-5)],
)  # fmt: skip
def test_errors_against_float64(name: str, dtype: torch.dtype, limit: float) -> None:
    """Of fp32 states: all tokens, in a prompt by the rule of any cut, and as decodes."""
    layer, tokens = LAYERS[name], 48
    rows = layer.inputs(tokens, dtype)
    expected, run = in_float64(rows, layer), layer.run
    whole = run(rows, layer.state("fp32", dtype), metadata(batch_of((1,), (0,), (tokens,)), invariant=True))
    state = layer.state("fp32", dtype)
    ones: Callable[[int], Tensor] = lambda at: run(tuple(x[at : at + 1] for x in rows), state, metadata(batch_of((1,), (at,), (1,))))  # noqa: E731  # fmt: skip
    decodes = torch.cat([ones(at) for at in range(tokens)])
    relative = [float((x.double() - expected).norm() / expected.norm()) for x in (whole, decodes)]
    print(f"{name}, {dtype}: error {relative[0]:.1e} of a prompt, {relative[1]:.1e} of decodes")
    assert max(relative) < limit
