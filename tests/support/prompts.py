"""Prompts for kernels of recurrences: random requests over slots that hold poison, and how far two results are apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from nibble.kernels.recurrence import BLOCK, LayerState, layer_state, naive
from nibble.kernels.recurrence.formats import decode, encode
from nibble.kernels.recurrence.types import StateMetadata
from nibble.kernels.state_formats import FORMATS
from nibble.model_spec import RecurrentGroup

TENSORS = ("keys_SPGK", "updates_SPHV", "decays")


@dataclass(frozen=True)
class Case:
    """A layer, and a step's requests."""

    format: str = "fp32"
    delta: bool = True
    by_column: bool = False
    lengths: tuple[int, ...] = (1, 15, 16, 17, 70)
    starts: tuple[int, ...] = (0, 3, 16, 21, 5)
    padding: tuple[int, ...] = ()
    """Requests that are padding."""
    heads: int = 2
    key_heads: int = 1
    rows: int = 32
    columns: int = 32
    drafts: int = 0
    beta: torch.dtype | None = torch.bfloat16
    strided: bool = False
    """Whether queries, keys and values are parts of wider rows."""
    pace: float = 0.05
    """Decay is e^-pace a token, about."""

    def __str__(self) -> str:
        default = Case()
        names = [
            f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(default, f.name)
        ]
        texts = [f"{name}={getattr(self, name)}".replace(" ", "") for name in names]
        return ",".join(text if len(text) < 50 else text[:40] + "...)" for text in texts) or "default"


@dataclass(frozen=True)
class Prompt:
    """What a kernel is given."""

    case: Case
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
    state: LayerState
    metadata: StateMetadata

    def copy(self) -> Prompt:
        """Return the same with slots of its own."""
        tensors = {name: getattr(self.state, name).clone() for name in TENSORS}
        planes = tuple(plane.clone() for plane in self.state.planes)
        return dataclasses.replace(self, state=dataclasses.replace(self.state, planes=planes, **tensors))

    def expected(self) -> Tensor:
        """Compute in float32 by the definition -> [T, H, V]; the slots are updated."""
        case, (q, k, v, decay, beta) = self.case, self.inputs
        rows = [i for i, owner in enumerate(self._owners()) if owner not in case.padding]
        o_THV = torch.zeros_like(v, dtype=torch.float32)
        parts = (x if x is None else x[rows] for x in (q.float(), k, v.float(), decay, beta))
        o_THV[rows] = naive.recurrence(*parts, self.state, self.metadata.on_host(), delta=case.delta)
        return o_THV

    def _owners(self) -> list[int]:
        return [request for request, n in enumerate(self.case.lengths) for _ in range(n)]


def prompt(case: Case, device: str = "cpu", seed: int = 0, spare_rows: int = 3) -> Prompt:
    """Return random requests. Whatever they may not read is NaN, or a code that is not used."""
    torch.manual_seed(seed)
    rule = "delta" if case.delta else "decay"
    group = RecurrentGroup(
        rule, rule, (0,), case.heads, case.rows, case.columns, case.key_heads, case.by_column
    )
    slots = len(case.lengths) + 2
    state = layer_state(group, slots, case.format, torch.bfloat16, case.drafts, device)
    order = torch.randperm(slots)[: len(case.lengths)].tolist()
    for tensor in (*state.planes, *(getattr(state, name) for name in TENSORS)):
        tensor.view(torch.uint8).fill_(0xFF)
    for request, (slot, start) in enumerate(zip(order, case.starts, strict=True)):
        if request not in case.padding:
            _fill_slot(case, state, slot, start)
    ids = [-1 if request in case.padding else slot for request, slot in enumerate(order)]
    columns = (ids, case.starts, list(accumulate(case.lengths, initial=0)))
    metadata = StateMetadata(
        *(torch.tensor(column, dtype=torch.int32, device=device) for column in columns), max(case.lengths)
    )
    return Prompt(case, _inputs(case, sum(case.lengths) + spare_rows, device), state, metadata)


def _inputs(case: Case, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    q, k = (normalize(values(tokens, case.key_heads, case.columns), dim=-1).bfloat16() for _ in range(2))
    v = values(tokens, case.heads, case.rows).bfloat16()
    pace = values(tokens, case.heads, case.columns) if case.by_column else values(tokens, case.heads)
    beta = None if case.beta is None else torch.sigmoid(values(tokens, case.heads)).to(case.beta)
    if case.strided:
        q, k, v = (_part_of_wider_rows(x) for x in (q, k, v))
    return q, k, v, -softplus(pace) * (case.pace / 0.8), beta


def _part_of_wider_rows(x_THV: Tensor) -> Tensor:
    wide = x_THV.new_full((len(x_THV), x_THV[0].numel() + 64), float("nan"))
    wide[:, 32:-32] = x_THV.flatten(1)
    return wide[:, 32:-32].unflatten(1, x_THV.shape[1:])


def _fill_slot(case: Case, state: LayerState, slot: int, start: int) -> None:
    """Store what a request up to `start` would have stored: its matrix, and what is behind the last multiple."""
    begin, device = start // BLOCK * BLOCK, state.keys_SPGK.device
    if begin:
        matrix_HVK = torch.randn(case.heads, case.rows, case.columns, device=device) * 0.3
        for plane, codes in zip(state.planes, encode(case.format, matrix_HVK), strict=True):
            plane[slot] = codes
    places = [position % state.keys_SPGK.shape[1] for position in range(begin, start)]
    _, k, v, decay, _ = _inputs(case, max(len(places), 1), str(device))
    state.keys_SPGK[slot, places] = k[: len(places)]
    state.updates_SPHV[slot, places] = v[: len(places)].to(state.updates_SPHV.dtype)
    state.decays[slot, places] = decay.cumsum(0)[: len(places)]


@dataclass(frozen=True)
class Difference:
    """How far a kernel's result is from the definition's: norms over norms."""

    output: float
    matrices: float
    keys: float
    updates: float
    decays: float
    far_codes: float
    """The share of values that are more than a code apart."""
    strays: int
    """Values that must not have changed, outputs of nobody that are not zero, and numbers that are none."""

    def __str__(self) -> str:
        values = dataclasses.asdict(self).items()
        return ", ".join(f"{name} {value:.2g}" for name, value in values)


def difference(
    before: Prompt, kernel: Prompt, o_THV: Tensor, naive_result: Prompt, expected_THV: Tensor
) -> Difference:
    """Compare two results, and what may not have changed with what was there before."""
    case, metadata = kernel.case, kernel.metadata
    live = [i for i in range(len(case.lengths)) if i not in case.padding]
    slots = [int(metadata.slots_B[i]) for i in live]
    full = [i for i in live if (case.starts[i] + case.lengths[i]) // BLOCK > 0]
    matrix_slots = [int(metadata.slots_B[i]) for i in full]
    ours, theirs = (
        decode(case.format, [plane[matrix_slots] for plane in p.state.planes]) for p in (kernel, naive_result)
    )
    errors = {"output": _error(o_THV.float(), expected_THV), "matrices": _error(ours, theirs)}
    strays = int(o_THV.isnan().sum() + ours.isnan().sum())
    nobody = [i not in live for i, n in enumerate(case.lengths) for _ in range(n)]
    nobody += [True] * (len(o_THV) - len(nobody))
    strays += int((o_THV[nobody] != 0).sum())
    for name in TENSORS:
        places = getattr(kernel.state, name).shape[1]
        pairs = [
            (slot, position % places)
            for slot, i in zip(slots, live, strict=True)
            for position in range(*_kept(case.starts[i], case.lengths[i]))
        ]
        mine, other, old = (getattr(p.state, name) for p in (kernel, naive_result, before))
        index = tuple(torch.tensor([pair[j] for pair in pairs], dtype=torch.int64) for j in range(2))
        errors[name.split("_")[0]] = _error(mine[index].float(), other[index].float())
        untouched = torch.ones(mine.shape[:2], dtype=torch.bool)
        untouched[index] = False
        strays += _changes(mine, old, untouched)
    for plane, old in zip(kernel.state.planes, before.state.planes, strict=True):
        untouched = torch.ones(len(plane), dtype=torch.bool)
        untouched[matrix_slots] = False
        strays += _changes(plane, old, untouched)
    far = _far_codes(case.format, [plane[matrix_slots] for plane in naive_result.state.planes], ours)
    return Difference(**errors, far_codes=far, strays=strays)


def _kept(start: int, length: int) -> tuple[int, int]:
    """Positions of a step's tokens that are kept for later ones."""
    stop = start + length
    return max(start, stop // BLOCK * BLOCK), stop


def _changes(x: Tensor, old: Tensor, untouched: Tensor) -> int:
    mask = untouched.to(x.device)
    return int((x[mask].contiguous().view(torch.uint8) != old[mask].contiguous().view(torch.uint8)).sum())


def _error(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).norm() / expected.norm()) if expected.numel() else 0.0


def _far_codes(format: str, planes: Sequence[Tensor], x: Tensor) -> float:
    """Return the share of values that are further away from those of planes than codes are from each other.

    Scales differ a little, too.
    """
    if not (largest := FORMATS[format].max_code):
        return 0.0
    step = planes[1].unsqueeze(-1)
    if planes[0].is_floating_point():
        # Codes of small values lie closer together than products of large ones can be told apart.
        step = (step * largest / 100 + x.abs() / 8) / 1.5
    return float(((x - decode(format, planes)).abs() > step * 1.5).float().mean())
