"""Recurrent layers against float64, token by token, and bit by bit among their own cuts, companies and formats."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from nibble.kernels import recurrence as op
from nibble.kernels.recurrence import BLOCK, LayerState, StateBatch, naive
from nibble.kernels.recurrence.pieces import Piece, pieces
from nibble.kernels.state_formats import FORMATS
from nibble.model_spec import Recurrence, RecurrentGroup

TOKENS = 100
CUTS = (1, 7, 16, 33, 64, TOKENS)
TOLERANCE = 1e-5
ROWS, COLUMNS, CHANNELS, TAPS = 24, 28, 20, 4
PLACES_OF_DRAFTS = 21

Rows = tuple[Tensor, ...]
"""What a layer is given, a row for each token."""


@dataclass(frozen=True)
class Case:
    """A layer: the inputs of its tokens, one step of it, and the recurrence in float64."""

    group: RecurrentGroup
    rows: Callable[[int], Rows]
    """Inputs for a seed."""
    step: Callable[[Rows, LayerState, StateBatch], Tensor]
    reference: Callable[[Rows], Tensor]

    def state(self, format: str = "fp32", drafts: int = 0, dtype: torch.dtype = torch.float32) -> LayerState:
        return op.layer_state(self.group, 6, format, dtype, drafts, "cpu")


def random_rows(seed: int, heads: int, key_heads: int, key_decay: bool, with_beta: bool) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    values = functools.partial(torch.randn, generator=generator)
    q, k = (normalize(values(TOKENS, key_heads, COLUMNS), dim=-1) for _ in range(2))
    pace = values(TOKENS, heads, COLUMNS) if key_decay else values(TOKENS, heads)
    rows = (q, k, values(TOKENS, heads, ROWS), -softplus(pace) / 20)
    return (*rows, torch.sigmoid(values(TOKENS, heads))) if with_beta else rows


def run_matrix(rows: Rows, state: LayerState, batch: StateBatch, *, delta: bool) -> Tensor:
    q, k, v, decay, *beta = rows
    return op.recurrence(q, k, v, decay, beta[0] if beta else None, state, batch, delta=delta)


def matrix_reference(rows: Rows, *, delta: bool) -> Tensor:
    q, k, v, decay, *others = (x.double() for x in rows)
    heads = v.shape[1]
    q, k = (x[:, [head * x.shape[1] // heads for head in range(heads)]] for x in (q, k))
    beta = others[0] if others else torch.ones(v.shape[:2], dtype=torch.float64)
    matrix, outputs = v.new_zeros(heads, v.shape[2], k.shape[2]), []
    for token in range(len(v)):
        matrix = matrix * decay[token].exp().reshape(heads, 1, -1)
        seen = (matrix * k[token, :, None]).sum(-1) if delta else 0
        update = beta[token, :, None] * (v[token] - seen)
        matrix = matrix + update[..., None] * k[token, :, None]
        outputs.append((matrix * q[token, :, None]).sum(-1))
    return torch.stack(outputs)


def matrix_case(
    rule: Recurrence, heads: int = 3, key_heads: int = 3, key_decay: bool = False, with_beta: bool = True
) -> Case:
    group = RecurrentGroup(rule, rule, (0,), heads, ROWS, COLUMNS, key_heads, key_decay)
    return Case(
        group,
        functools.partial(
            random_rows, heads=heads, key_heads=key_heads, key_decay=key_decay, with_beta=with_beta
        ),
        functools.partial(run_matrix, delta=rule == "delta"),
        functools.partial(matrix_reference, delta=rule == "delta"),
    )


A = -torch.arange(1, COLUMNS + 1).float().expand(CHANNELS, COLUMNS).contiguous() / 4
WEIGHT = torch.randn(CHANNELS, TAPS, generator=torch.Generator().manual_seed(1))
BIAS = torch.linspace(-1, 1, CHANNELS)


def selective_rows(seed: int) -> Rows:
    values = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    dt = softplus(values(TOKENS, CHANNELS) - 3)
    return values(TOKENS, CHANNELS), dt, values(TOKENS, COLUMNS), values(TOKENS, COLUMNS)


def run_selective(rows: Rows, state: LayerState, batch: StateBatch) -> Tensor:
    x, dt, b, c = rows
    return op.selective(x, dt, A, b, c, state, batch)


def selective_reference(rows: Rows) -> Tensor:
    matrix, outputs = torch.zeros(CHANNELS, COLUMNS, dtype=torch.float64), []
    for x, dt, b, c in zip(*(rows.double() for rows in rows), strict=True):
        matrix = matrix * (A.double() * dt[:, None]).exp() + (dt * x)[:, None] * b
        outputs.append((matrix * c).sum(-1))
    return torch.stack(outputs)


def conv_rows(seed: int) -> Rows:
    return (torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed)),)


def run_conv(rows: Rows, state: LayerState, batch: StateBatch) -> Tensor:
    return op.causal_conv(rows[0], WEIGHT.to(rows[0].dtype), BIAS.to(rows[0].dtype), "silu", state, batch)


def conv_reference(rows: Rows) -> Tensor:
    x = torch.nn.functional.pad(rows[0].double().t(), (TAPS - 1, 0))
    y = torch.nn.functional.conv1d(x, WEIGHT.double()[:, None], BIAS.double(), groups=CHANNELS)
    return torch.nn.functional.silu(y).t()


CASES = {
    "delta": matrix_case("delta"),
    "delta, column decay": matrix_case("delta", key_decay=True),
    "delta, shared keys": matrix_case("delta", heads=4, key_heads=2),
    "delta, no beta": matrix_case("delta", with_beta=False),
    "decay": matrix_case("decay"),
    "column decay": matrix_case("decay", key_decay=True),
    "decay, shared keys": matrix_case("decay", heads=4, key_heads=1),
    "decay, no beta": matrix_case("decay", with_beta=False),
    "selective": Case(
        RecurrentGroup("mamba", "selective", (0,), 1, CHANNELS, COLUMNS, 1),
        selective_rows, run_selective, selective_reference,
    ),
    "convolution": Case(
        RecurrentGroup("conv", "conv", (0,), conv_channels=CHANNELS, conv_taps=TAPS),
        conv_rows, run_conv, conv_reference,
    ),
}  # fmt: skip
FEW = {name: CASES[name] for name in ("delta, shared keys", "column decay", "selective", "convolution")}


def cases(chosen: dict[str, Case] = CASES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(chosen.values()), ids=list(chosen))


@dataclass
class Request:
    """A request as it is served: its tokens' inputs, how far it is, and where its state is."""

    case: Case
    rows: Rows
    slot: int
    start: int = 0
    state_at: int = 0

    def next(self, count: int) -> Rows:
        return tuple(x[self.start : self.start + count] for x in self.rows)


def step(
    requests: Sequence[Request], inputs: Sequence[Rows], state: LayerState, settled: Sequence[int]
) -> list[Tensor]:
    """Serve one step, and return each request's outputs."""
    lengths = tuple(len(rows[0]) for rows in inputs)
    starts, states_at = (tuple(getattr(r, name) for r in requests) for name in ("start", "state_at"))
    batch = StateBatch(tuple(r.slot for r in requests), starts, lengths, states_at, tuple(settled))
    together = tuple(torch.cat(columns) for columns in zip(*inputs, strict=True))
    outputs = requests[0].case.step(together, state, batch)
    for request, state_at, count in zip(requests, batch.next_states_at, settled, strict=True):
        request.start, request.state_at = request.start + count, state_at
    return list(outputs.split(lengths))


def serve(request: Request, state: LayerState, cut: int, tokens: int = TOKENS) -> Tensor:
    """Serve a request alone, up to a position -> its new outputs."""
    outputs = []
    while request.start < tokens:
        rows = request.next(min(cut, tokens - request.start))
        outputs += step([request], [rows], state, [len(rows[0])])
    return torch.cat(outputs)


@functools.cache
def whole(name: str, seed: int, format: str = "fp32") -> Tensor:
    """Return the outputs of a request that is served in one step."""
    case = CASES[name]
    return serve(Request(case, case.rows(seed), 0), case.state(format), TOKENS)


def name_of(case: Case) -> str:
    return next(name for name, other in CASES.items() if other is case)


def error(outputs: Tensor, reference: Tensor) -> float:
    """Return how far outputs are from those in float64, of a token at most."""
    distance, size = ((x.double()).flatten(1).norm(dim=1) for x in (outputs - reference, reference))
    return float((distance / size.mean()).max())


@cases()
@pytest.mark.parametrize("cut", [1, 33, TOKENS])
def test_the_rule_is_the_recurrence(case: Case, cut: int) -> None:
    rows = case.rows(0)
    assert error(serve(Request(case, rows, 2), case.state(), cut), case.reference(rows)) < TOLERANCE


@cases()
@pytest.mark.parametrize("format", FORMATS)
def test_every_cut_has_the_same_bits(case: Case, format: str) -> None:
    for cut in CUTS:
        outputs = serve(Request(case, case.rows(0), 1), case.state(format), cut)
        assert torch.equal(outputs, whole(name_of(case), 0, format)), cut


@cases(FEW)
@pytest.mark.parametrize("inputs", [torch.bfloat16, torch.float32], ids=str)
def test_cuts_in_bf16(case: Case, inputs: torch.dtype) -> None:
    """Of what is kept in bf16, the rounded values are read at once, and decays are in float32."""
    wide = {3} if case.group.rule in {"delta", "decay"} else {1} if case.group.rule == "selective" else set()
    rows = tuple(x if n in wide else x.to(inputs) for n, x in enumerate(case.rows(0)))
    first, *others = (
        serve(Request(case, rows, 1), case.state("bf16", dtype=torch.bfloat16), cut)
        for cut in (TOKENS, 1, 7, 33)
    )
    assert all(torch.equal(first, other) for other in others)
    assert first.dtype == inputs and TOLERANCE < error(first, case.reference(rows)) < 2e-2


def traffic(
    case: Case, requests: list[Request], state: LayerState, drafts: int, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Serve requests in a random order, some at a time, with drafts of which some are wrong -> slot, true outputs.

    Wrong drafts of an odd seed are NaN.
    """
    wrong_scale = torch.nan if seed % 2 else 1
    chance = random.Random(seed)
    wrong = tuple(x * wrong_scale for x in case.rows(99))
    while left := [r for r in requests if r.start < TOKENS]:
        now = chance.sample(left, chance.randint(1, len(left)))
        inputs, settled, accepted = [], [], []
        for request in now:
            remaining = TOKENS - request.start
            count = min(chance.choice((1, 1, 2, 15, 16, 17, 40)), remaining)
            right = chance.randint(0, min(drafts, remaining - count))
            bad = chance.randint(0, drafts - right)
            true = request.next(count + right)
            inputs.append(tuple(torch.cat((x, y[:bad])) for x, y in zip(true, wrong, strict=True)))
            settled.append(count)
            accepted.append(right)
        for request, outputs, count, right in zip(
            now, step(now, inputs, state, settled), settled, accepted, strict=True
        ):
            request.start += right
            yield request.slot, outputs[: count + right]


@cases()
@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("drafts", [0, 3, PLACES_OF_DRAFTS])
def test_company_and_rejected_drafts_leave_no_trace(case: Case, format: str, drafts: int) -> None:
    """Requests at other offsets, in other orders, with drafts before and behind multiples of BLOCK."""
    for seed in range(2):
        requests = [Request(case, case.rows(slot), slot) for slot in (0, 1, 2, 3, 5)]
        outputs: dict[int, list[Tensor]] = {r.slot: [] for r in requests}
        for slot, rows in traffic(case, requests, case.state(format, drafts), drafts, seed):
            outputs[slot].append(rows)
        for slot, rows in outputs.items():
            assert torch.equal(torch.cat(rows), whole(name_of(case), slot, format)), (seed, slot)


@cases(FEW)
def test_drafts_across_a_multiple_of_the_block(case: Case) -> None:
    """The matrix that a rejected draft entered is not stored, and an accepted one's is made up for."""
    for accepted in range(5):
        state = case.state("int8", 4)
        request = Request(case, case.rows(0), 0)
        serve(request, state, 7, BLOCK - 2)
        true, wrong = request.next(1 + accepted), tuple(x[: 4 - accepted] for x in case.rows(9))
        inputs = tuple(torch.cat(pair) for pair in zip(true, wrong, strict=True))
        (outputs,) = step([request], [inputs], state, [1])
        assert request.state_at == 0
        expected = whole(name_of(case), 0, "int8")
        assert torch.equal(outputs[: 1 + accepted], expected[BLOCK - 2 : BLOCK - 1 + accepted])
        request.start += accepted
        assert torch.equal(serve(request, state, 1), expected[BLOCK - 1 + accepted :])


@cases()
def test_threads_change_no_bits(case: Case) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        assert torch.equal(
            serve(Request(case, case.rows(0), 0), case.state(), TOKENS), whole(name_of(case), 0)
        )
    finally:
        torch.set_num_threads(threads)


def tensors(state: LayerState) -> list[Tensor]:
    return [*state.planes, state.keys_SPGK, state.updates_SPHV, state.decays, state.inputs_SPC]


def spoil(state: LayerState) -> None:
    for tensor in tensors(state):
        tensor.copy_(torch.full(tensor.shape, torch.nan if tensor.dtype.is_floating_point else 77))


@cases()
@pytest.mark.parametrize("format", FORMATS)
def test_what_was_in_a_slot_does_not_matter(case: Case, format: str) -> None:
    for cut in (1, 33):
        state = case.state(format, 3)
        spoil(state)
        assert torch.equal(serve(Request(case, case.rows(0), 4), state, cut), whole(name_of(case), 0, format))


@cases(FEW)
def test_a_step_leaves_other_slots_and_padding_alone(case: Case) -> None:
    state = case.state()
    spoil(state)
    before = [tensor.clone() for tensor in tensors(state)]
    rows = tuple(torch.cat((x[:40], torch.full_like(x[:5], torch.nan))) for x in case.rows(0))
    outputs = case.step(rows, state, StateBatch((4,), (0,), (40,), (0,), (40,)))
    assert torch.equal(outputs[:40], whole(name_of(case), 0)[:40]) and not outputs[40:].any()
    others = [0, 1, 2, 3, 5]
    assert all(
        torch.equal(x[others].isnan(), y[others].isnan()) for x, y in zip(tensors(state), before, strict=True)
    )


@cases(FEW)
def test_an_empty_step(case: Case) -> None:
    rows = tuple(x[:3] for x in case.rows(0))
    assert not case.step(rows, case.state(), StateBatch((), (), (), (), ())).any()
    state, request = case.state(), Request(case, case.rows(0), 0)
    first = serve(request, state, 7, 21)
    step([request], [request.next(0)], state, [0])
    assert torch.equal(torch.cat((first, serve(request, state, 7))), whole(name_of(case), 0))


@cases()
@pytest.mark.parametrize("format", ["fp32", "fp8"])
def test_a_copied_slot_goes_on_as_two_requests(case: Case, format: str) -> None:
    state, first, second = case.state(format), case.rows(0), case.rows(1)
    branch = tuple(torch.cat((x[:37], y[37:])) for x, y in zip(first, second, strict=True))
    request, other = Request(case, first, 0), Request(case, branch, 3, 37, 32)
    serve(request, state, 7, 37)
    op.copy_slots([state], [0, 0], [3, 2])
    spoil_slot = [tensor[2].clone() for tensor in tensors(state)]
    ends = serve(request, state, 16), serve(other, state, 5)
    alone = serve(Request(case, branch, 0), case.state(format), TOKENS)
    assert torch.equal(ends[0], whole(name_of(case), 0, format)[37:]) and torch.equal(ends[1], alone[37:])
    assert all(torch.equal(x[2].float(), y.float()) for x, y in zip(tensors(state), spoil_slot, strict=True))


# --- errors that the comparisons must see


def scaled_state(state: LayerState, request: Request) -> None:
    state.planes[0].mul_(1.001)


def shifted_tail(state: LayerState, request: Request) -> None:
    for tensor in (state.keys_SPGK, state.inputs_SPC):
        tensor.copy_(tensor.roll(1, 1))


def late_state(state: LayerState, request: Request) -> None:
    request.state_at -= BLOCK


@cases({name: case for name, case in CASES.items() if name != "convolution"})
@pytest.mark.parametrize("plant", [scaled_state, shifted_tail, late_state])
def test_planted_errors_are_seen(case: Case, plant: Callable[[LayerState, Request], None]) -> None:
    state, request = case.state("fp32", BLOCK), Request(case, case.rows(0), 0)
    serve(request, state, 7, 37)
    plant(state, request)
    rest, expected = serve(request, state, 7), case.reference(request.rows)[37:]
    assert error(rest, expected) > TOLERANCE and not torch.equal(rest, whole(name_of(case), 0)[37:])


def test_a_shifted_convolution_is_seen() -> None:
    case = CASES["convolution"]
    state, request = case.state(), Request(case, case.rows(0), 0)
    serve(request, state, 7, 37)
    shifted_tail(state, request)
    assert error(serve(request, state, 7), case.reference(request.rows)[37:]) > TOLERANCE


@cases({name: case for name, case in CASES.items() if name != "convolution"})
@pytest.mark.parametrize("field", ["live_NJ11", "kept_NR"])
def test_a_wrong_block_boundary_is_seen(case: Case, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token before a step is not read, or tokens are stored one place too far."""

    def shifted(batch: StateBatch, places: int, device: torch.device) -> tuple[Piece, ...]:
        return tuple(
            dataclasses.replace(
                piece,
                **{
                    "live_NJ11": {"live_NJ11": piece.live_NJ11.roll(-1, 1)},
                    "kept_NR": {"kept_NR": (piece.kept_NR + 1) % places},
                }[field],
            )
            for piece in pieces(batch, places, device)
        )

    monkeypatch.setattr(naive, "pieces", shifted)
    outputs = serve(Request(case, case.rows(0), 0), case.state(), 7)
    assert error(outputs, case.reference(case.rows(0))) > TOLERANCE


# --- bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (((0,), (20,), (1,), (15,), (1,)), "must be a multiple of 16 up to 20"),
        (((0,), (20,), (1,), (32,), (1,)), "must be a multiple of 16 up to 20"),
        (((0,), (20,), (1,), (16,), (2,)), "2 of 1 tokens"),
        (((0, 0), (0, 0), (1, 1), (0, 0), (1, 1)), "the same slot"),
        (((0, 1), (0,), (1,), (0,), (1,)), "lengths"),
    ],
)
def test_impossible_batches(fields: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StateBatch(*fields)


@cases(FEW)
def test_bad_input_is_refused(case: Case) -> None:
    state, rows = case.state("fp32", 1), case.rows(0)
    with pytest.raises(ValueError, match="places"):
        case.step(rows, state, StateBatch((0,), (0,), (40,), (0,), (0,)))
    with pytest.raises(ValueError, match="100 rows"):
        case.step(rows, state, StateBatch((0,), (0,), (101,), (0,), (101,)))
    with pytest.raises(ValueError, match=r"fit|same channels|cannot serve"):
        case.step((rows[0][:, :-1], *rows[1:]), state, StateBatch((0,), (0,), (1,), (0,), (1,)))


def test_bad_options_are_refused() -> None:
    state, rows = CASES["convolution"].state(), CASES["convolution"].rows(0)
    with pytest.raises(ValueError, match="'relu'"):
        op.causal_conv(rows[0], WEIGHT, None, "relu", state, StateBatch((), (), (), (), ()))
    with pytest.raises(ValueError, match="one target for each"):
        op.copy_slots([state], [0, 1], [2, 2])


def test_a_convolution_without_bias_and_activation() -> None:
    x = CASES["convolution"].rows(0)[0]
    y = op.causal_conv(
        x, WEIGHT, None, None, CASES["convolution"].state(), StateBatch((0,), (0,), (100,), (0,), (100,))
    )
    padded = torch.nn.functional.pad(x.double().t(), (TAPS - 1, 0))
    expected = torch.nn.functional.conv1d(padded, WEIGHT.double()[:, None], groups=CHANNELS).t()
    assert error(y, expected) < TOLERANCE
