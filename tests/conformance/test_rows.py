"""Conformance: every row of every backend that this machine can run, against dense attention in float64.

Generated from the rows. Each case writes random K and V through the pool into pages in random order, over poisoned
memory, and attends through attention/layer.py. The oracle attends densely over the same dequantised cache, so the
error of the format itself is not counted; a backend may have twice the error of plain torch in the same dtype.

    pytest tests/conformance                                                what the CPU can run
    NIBBLE_TEST_GPU=1 pytest tests/conformance --ledger docs/ledger.json    what the GPU can, into the ledger
"""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance_report import PROPERTY
from nibble import formats
from nibble.attention import backends
from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.layer import attention
from nibble.attention.planner.evidence import LedgerEntry, shipped_rankings, versions
from nibble.attention.planner.plan import STAGED_PACKING, GroupPlan, Plan, Route
from nibble.attention.planner.support import PROMPT, BackendInfo, Need, Support
from nibble.attention.step import StepContext
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import KVView, PagedPool
from nibble.cache.scales import ONE
from nibble.formats import scheme
from nibble.hardware import probe
from nibble.kernels.attention import merge_lse
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.offload import resident_slots
from nibble.kernels.types import AttentionBatch, AttentionMetadata, AttentionParams
from nibble.model_spec import LATENT, Kind, LayerGroup, Phase, Stream

HARDWARE = probe()
DEVICE = HARDWARE.device
DTYPE = "float32" if HARDWARE.is_cpu else "bfloat16"
"""Of queries, where the row allows it; on a GPU rows of float16 alone are asked in that."""

# Tokens already stored and new tokens of each request, by phase.
BATCHES: dict[Phase, tuple[tuple[tuple[int, int], ...], ...]] = {
    Phase.PREFILL: (((0, 1), (0, 5), (0, 70)), ((0, 300),)),
    Phase.EXTEND: (((64, 3), (1, 9), (130, 33)), ((500, 2),), ((37, 150), (300, 129), (20, 4))),
    Phase.DECODE: (((0, 1), (15, 1), (16, 1), (257, 1)), ((530, 1),)),
    Phase.VERIFY: (((40, 4), (7, 4), (300, 4)), ((33, 2), (12, 8))),
}


STAGED_FOR_SPEED = {
    timing.backend for ranking in shipped_rankings().entries for timing in ranking.order if timing.stage_to
}
"""Backends that are also taken over pages that were dequantised first, where they could read them as they are."""
VERSIONS = {
    name: versions([info]) for name, info in backends.available_backends().items() if info.adapter is not None
}


@dataclass(frozen=True)
class Shape:
    """What a model asks, beside the format."""

    dim: int = 64
    heads: int = 2
    group: int = 3
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kind: Kind = "mha"
    rope: int = 0
    top_k: int = 0


def of_query(heads: int, fewer: int) -> int:
    """Heads of queries: kernels of GPUs have tiles of them; a CPU's rows take any number, and need long for many."""
    return fewer if HARDWARE.is_cpu else heads


SHAPES = (
    Shape(),
    Shape(dim=128, heads=1, group=8, page=64),
    Shape(dim=96, group=1, page=32, window=37),
    Shape(dim=80, heads=1, group=4, page=1),
    Shape(dim=256, group=2, page=128, softcap=5.0, window=100),
    Shape(group=4, sinks=True, window=20),
    Shape(dim=128, heads=1, group=4, page=32, window=37),
    Shape(dim=128, heads=1, group=2, page=16, softcap=5.0),
    Shape(kind="mla", heads=1, dim=128 + 64, group=of_query(16, 4), page=64, rope=64),
    Shape(kind="mla", heads=1, dim=512 + 64, group=20, page=64, rope=64),
    Shape(kind="mla", heads=1, dim=512 + 64, group=16, page=32, rope=64),
    Shape(kind="mla", heads=1, dim=256 + 32, group=3, page=16, rope=32),
    Shape(kind="mla", heads=1, dim=128 + 64, group=of_query(16, 4), page=64, rope=64, window=37),
    Shape(kind="mla", heads=1, dim=256, group=of_query(128, 8), page=32),
    Shape(kind="dsa", heads=1, dim=128 + 64, group=of_query(16, 4), page=64, rope=64, top_k=24),
    Shape(kind="dsa", heads=1, dim=256, group=3, page=16, top_k=7),
    Shape(kind="dsa", heads=1, dim=512 + 64, group=40, page=64, rope=64, top_k=24),
    Shape(kind="dsa", heads=1, dim=128 + 64, group=of_query(16, 4), page=64, rope=64, top_k=24, sinks=True),
    Shape(kind="dsa", heads=1, dim=256, group=3, page=16, top_k=7, sinks=True),
)


@dataclass(frozen=True)
class Case:
    backend: str
    row: int
    phase: Phase
    format: str
    packing: str
    shape: Shape
    staged: bool = False

    def __str__(self) -> str:
        extras = "".join(f"-{name}" for name in ("window", "softcap", "sinks") if getattr(self.shape, name))
        where = (
            f"{self.format}@{self.packing}-d{self.shape.dim}-g{self.shape.group}-p{self.shape.page}{extras}"
        )
        kind = "" if self.shape.kind == "mha" else f"-{self.shape.kind}{self.shape.rope}"
        return f"{self.backend}{self.row}-{self.phase}{kind}-{where}{'-staged' * self.staged}"


def streams(shape: Shape) -> tuple[Stream, ...]:
    if shape.kind != "mha":
        return (Stream(LATENT, 1, shape.dim, shape.rope),)
    return Stream("k", shape.heads, shape.dim), Stream("v", shape.heads, shape.dim)


def layout(kv_format: str, packing: str, shape: Shape) -> CacheLayout:
    chosen = scheme.parse(kv_format)
    entries = tuple(StreamLayout.of(stream, chosen.format_of(stream)) for stream in streams(shape))
    return CacheLayout((LayerLayout(0, entries, chosen.transforms),), shape.page, packing)


def dtype_of(case: Case) -> str:
    allowed = backends.get(case.backend).support[case.row].dtype
    return DTYPE if HARDWARE.is_cpu or allowed is None or DTYPE in allowed else min(allowed)


def need(case: Case, kv_format: str, packing: str) -> Need:
    shape = case.shape
    return Need(
        case.phase, shape.kind, kv_format, packing, HARDWARE.arch, shape.page, shape.dim, shape.group,
        dtype_of(case),        shape.window is not None, shape.softcap is not None, shape.sinks,
    )  # fmt: skip


def cases_of(info: BackendInfo, index: int, row: Support) -> Iterator[Case]:
    packings = sorted(row.packing or ("nhd", "hnd"))
    for i, shape in enumerate(SHAPES):
        for kv_format in scheme.fitting(*streams(shape)) if shape.kind in row.kind else ():
            for phase in sorted(row.phase & BATCHES.keys()):
                case = Case(info.name, index, phase, kv_format, packings[i % len(packings)], shape)
                yield case
                direct = route_for(case)
                if info.name in STAGED_FOR_SPEED and phase in PROMPT and direct and not direct.stage_to:
                    yield replace(case, staged=True)


def route_for(case: Case) -> Route | None:
    """How the row serves the case: as it is, staged, or not at all."""
    row = backends.get(case.backend).support[case.row]
    key = layout(case.format, case.packing, case.shape).layers[0].format_key
    plain = formats.plain(dtype_of(case)).name
    ways = ((key, case.packing, None), (plain, STAGED_PACKING, plain))
    for stored, packing, stage_to in ways[case.staged :]:
        if not row.refuses(need(case, stored, packing)):
            return Route(case.phase, case.backend, row, stage_to)
    return None


CASES = [
    case
    for info in backends.available_backends().values()
    if info.adapter is not None
    for index, row in enumerate(info.support)
    if (row.arch is None or HARDWARE.arch in row.arch)
    for case in cases_of(info, index, row)
]


def dense(q_nHD: Tensor, k_LGD: Tensor, v_LGD: Tensor, spec: AttentionParams) -> Tensor:
    """Attention in the dtype of its arguments, by the book."""
    return dense_part(q_nHD, k_LGD, v_LGD, spec).values_THD


def dense_part(q_nHD: Tensor, k_LGD: Tensor, v_LGD: Tensor, spec: AttentionParams) -> PartialAttention:
    """The same with its log-sum-exp, in float32 at least; of as many queries as there are, keys or not."""
    n, length = len(q_nHD), len(k_LGD)
    repeat = q_nHD.shape[1] // k_LGD.shape[1]
    k, v = (x.repeat_interleave(repeat, 1).transpose(0, 1) for x in (k_LGD, v_LGD))
    scores = (q_nHD.transpose(0, 1) @ k.transpose(1, 2)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    query, key = torch.arange(length - n, length)[:, None], torch.arange(length)
    hidden = (key > query) | (key <= query - (spec.window or length + n))
    scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
    if spec.topk_indices_TK is not None:
        chosen = torch.zeros(n, length + 1, dtype=torch.bool, device=scores.device)
        chosen.scatter_(1, torch.where(spec.topk_indices_TK < 0, length, spec.topk_indices_TK).long(), True)
        scores = scores.masked_fill(~chosen[:, :length], float("-inf"))
    if spec.sinks_H is not None:
        sinks = spec.sinks_H.to(scores).view(-1, 1, 1).expand(-1, n, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1).nan_to_num()[..., :length]
    precise = scores if scores.dtype == torch.float64 else scores.float()
    return PartialAttention((weights @ v).transpose(0, 1), precise.logsumexp(-1))


@dataclass(frozen=True)
class Scene:
    """A pool with requests in it, and what they ask. pages: the page ids of each request."""

    ctx: StepContext
    q_THD: Tensor
    streams: dict[str, Tensor]
    spec: AttentionParams
    pages: tuple[list[int], ...]


def scene(case: Case, route: Route, batch: tuple[tuple[int, int], ...]) -> Scene:
    shape, rng = case.shape, torch.Generator().manual_seed(7)
    lens = [stored + new for stored, new in batch]
    counts = [-(-length // shape.page) for length in lens]
    order = torch.randperm(sum(counts) + 3, generator=rng).tolist()
    pages = tuple([order.pop() for _ in range(count)] for count in counts)
    placed = layout(case.format, case.packing, shape)
    pool = PagedPool(placed, sum(counts) + 3, ONE, DEVICE, poison=True)
    heads = shape.heads * shape.group

    def random(tokens: int, width: int) -> Tensor:
        return torch.randn(tokens, width, shape.dim, generator=rng).to(DEVICE, getattr(torch, dtype_of(case)))

    def slots(i: int, start: int, stop: int) -> list[int]:
        return [pages[i][t // shape.page] * shape.page + t % shape.page for t in range(start, stop)]

    for i, (stored, _) in enumerate(batch):
        if stored:
            old = {entry.name: random(stored, shape.heads) for entry in streams(shape)}
            pool.write(0, old, torch.tensor(slots(i, 0, stored), device=DEVICE))
    table = torch.zeros(len(batch), max(counts), dtype=torch.int32)
    for i, own in enumerate(pages):
        table[i, : len(own)] = torch.tensor(own)
    new = tuple(count for _, count in batch)
    fresh = [slot for i, (stored, count) in enumerate(batch) for slot in slots(i, stored, stored + count)]
    segment = AttentionBatch.from_lens(case.phase, 0, new, lens, table.to(DEVICE))
    group = LayerGroup("full", shape.kind, streams(shape), (0,), heads)
    plan = Plan(placed, (GroupPlan(group, (0,), case.format, (route,)),), (0,), dtype_of(case))
    meta = AttentionMetadata(torch.tensor(fresh, device=DEVICE), (segment,))
    sinks = torch.randn(heads, generator=rng).to(DEVICE) if shape.sinks else None
    chosen = chosen_at_random(batch, shape.top_k, rng).to(DEVICE) if shape.top_k else None
    spec = AttentionParams(shape.dim**-0.5, shape.window, shape.softcap, sinks, chosen)
    kv = {entry.name: random(sum(new), shape.heads) for entry in streams(shape)}
    return Scene(
        StepContext(plan, pool, {case.backend: backends.create(backends.get(case.backend))}, meta),
        random(sum(new), heads),
        kv,
        spec,
        pages,
    )


def chosen_at_random(batch: tuple[tuple[int, int], ...], top_k: int, rng: torch.Generator) -> Tensor:
    """Tokens for each query to look at, ascending, as kernels/indexer/__init__.py gives them."""
    rows = []
    for stored, new in batch:
        for seen in range(stored + 1, stored + new + 1):
            some = torch.randperm(seen, generator=rng)[:top_k].sort().values
            rows.append(torch.nn.functional.pad(some, (0, top_k - len(some)), value=-1))
    return torch.stack(rows).int()


def check(case: Case, route: Route, batch: tuple[tuple[int, int], ...]) -> None:
    s = scene(case, route, batch)
    given = [s.q_THD, *s.streams.values()]
    frozen = [t.clone() for t in given]
    out = attention(s.ctx, 0, s.q_THD, s.streams, s.spec)
    assert out.dtype == s.q_THD.dtype and out.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(frozen, given, strict=True))
    view, row = s.ctx.pool.view(0), 0
    for (stored, new), pages in zip(batch, s.pages, strict=True):
        ids = torch.tensor([pages], device=DEVICE)
        found = [stream.gather_reference(ids)[0, : stored + new] for stream in view.streams.values()]
        k, v = found if len(found) > 1 else (found[0], found[0][..., : case.shape.dim - case.shape.rope])
        q = s.q_THD[row : row + new]
        chosen = None if s.spec.topk_indices_TK is None else s.spec.topk_indices_TK[row : row + new]
        spec = replace(s.spec, topk_indices_TK=chosen)
        exact = dense(q.double(), k.double(), v.double(), spec)
        same = dense(q, k.to(q.dtype), v.to(q.dtype), spec).double()
        error = (out[row : row + new].double() - exact).abs().max()
        assert error <= 2 * (same - exact).abs().max() + 2e-6, f"error {error:.2e} at {stored}+{new} tokens"
        row += new


EXACT = 13
"""Tokens that another part has: some requests of BATCHES have no others, and some fewer than new ones."""


def check_partial(case: Case, route: Route, batch: tuple[tuple[int, int], ...]) -> None:
    """Attention over all but the newest tokens with its log-sum-exp, and merged with attention over those."""
    s = scene(case, route, batch)
    s.ctx.pool.write(0, s.streams, s.ctx.meta.slot_mapping_T)
    (whole,), view, backend = s.ctx.meta.batches, s.ctx.pool.view(0), s.ctx.backends[case.backend]
    window = None if case.shape.window is None else case.shape.window - EXACT
    lens = [max(length - EXACT, 0) for length in whole.seq_lens]
    far = AttentionBatch.from_lens(case.phase, 0, whole.query_lens, lens, whole.page_table_BN)
    params = replace(s.spec, window=window)
    if params.topk_indices_TK is not None:
        # Chosen tokens of the other part are left out. Some queries are left with none.
        far, positions_T = whole, torch.cat([torch.arange(old, old + new) for old, new in batch]).to(DEVICE)
        early = params.topk_indices_TK <= positions_T[:, None] - EXACT
        indices_TK = torch.where(early, params.topk_indices_TK, -1)
        slots_TK = resident_slots(indices_TK, whole.page_table_TN, None, view.page_size)
        params = replace(params, topk_indices_TK=indices_TK, topk_slots_TK=slots_TK)
    q_THD = view.query(s.q_THD)
    state = backend.prepare(q_THD, view, far, params)
    found = backend.forward_partial(q_THD, view, far, params, state)
    assert found.values_THD.dtype in {q_THD.dtype, torch.float32} and found.lse_HT.dtype == torch.float32
    assert not found.values_THD.isnan().any() and not found.lse_HT.isnan().any()
    row = 0
    for i, (new, pages) in enumerate(zip(far.query_lens, s.pages, strict=True)):
        rows = slice(row, row + new)
        ids = torch.tensor([pages], device=DEVICE)
        streams = [stream.gather_reference(ids)[0, : far.seq_lens[i]] for stream in view.streams.values()]
        k, v = (
            streams if len(streams) > 1 else (streams[0], streams[0][..., : case.shape.dim - case.shape.rope])
        )
        chosen = None if params.topk_indices_TK is None else params.topk_indices_TK[rows]
        spec, q = replace(params, topk_indices_TK=chosen), q_THD[rows]
        exact = dense_part(q.double(), k.double(), v.double(), spec)
        same = dense_part(q, k.to(q.dtype), v.to(q.dtype), spec)
        empty = exact.lse_HT.isneginf()
        assert torch.equal(found.lse_HT[:, rows].isneginf(), empty)
        for ours, theirs, book in zip(
            (found.values_THD[rows], found.lse_HT[:, rows]), same, exact, strict=True
        ):
            a, b, c = (x.double().nan_to_num(neginf=0.0) for x in (ours, theirs, book))
            error, limit = (a - c).abs().max(), 2 * (b - c).abs().max() + 2e-6
            assert error <= limit, f"error {error:.2e} at {far.seq_lens[i]} tokens"
        row += new
    check_merged(found, backend.forward_merged, (q_THD, view, far, params, state))


def check_merged(
    far: PartialAttention, forward_merged: Callable[..., Tensor], arguments: tuple[Any, ...]
) -> None:
    """A backend that merges as it stores does what merging its part does."""
    rng, dtype = torch.Generator().manual_seed(2), arguments[0].dtype
    near = PartialAttention(
        torch.randn(far.values_THD.shape, generator=rng).to(DEVICE),
        torch.randn(far.lse_HT.shape, generator=rng).to(DEVICE),
    )
    near.lse_HT[:, 0] += 20  # one part may weigh next to nothing
    near.lse_HT[:, -1], near.values_THD[-1] = float("-inf"), 0.0
    merged = forward_merged(*arguments, near)
    expected = merge_lse(far, near, dtype).values_THD
    assert merged.dtype == dtype
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 2e-3)
    torch.testing.assert_close(merged, expected, rtol=rtol, atol=atol)


# vendors' packages warn of what is their business
@pytest.mark.sample(500)
@pytest.mark.filterwarnings("error" if HARDWARE.is_cpu else "ignore")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_conforms(case: Case, request: pytest.FixtureRequest) -> None:
    route = route_for(case)
    if route is None:
        key = layout(case.format, case.packing, case.shape).layers[0].format_key
        row = backends.get(case.backend).support[case.row]
        pytest.skip(f"{case.backend} refuses: {'; '.join(row.refuses(need(case, key, case.packing)))}")
    request.node.user_properties.append((PROPERTY, json.dumps(asdict(entry(case, route)))))
    for batch in BATCHES[case.phase]:
        check(case, route, batch)
        if route.row.lse and not route.stage_to:
            check_partial(case, route, batch)


def entry(case: Case, route: Route) -> LedgerEntry:
    """What the ledger says where the case conforms, and all others of its combination do."""
    key = layout(case.format, case.packing, case.shape).layers[0].format_key
    name = f"{platform.machine()} CPU" if HARDWARE.is_cpu else HARDWARE.name
    today = datetime.date.today().isoformat()
    stored = route.stage_to or key
    return LedgerEntry(
        case.backend, case.phase, case.shape.kind, stored, HARDWARE.arch, name, today, VERSIONS[case.backend]
    )


def test_a_wrong_kernel_is_caught() -> None:
    """The suite can fail: an adapter that forgets the newest token does not conform."""
    case = next(case for case in CASES if case.backend == "torch_ref" and case.phase is Phase.DECODE)
    route = route_for(case)
    assert route

    class Forgetful(TorchRef):
        def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Any:
            short = tuple(max(length - 1, 1) for length in batch.seq_lens)
            cut = AttentionBatch.from_lens(
                batch.phase, batch.start, batch.query_lens, short, batch.page_table_BN
            )
            return super().prepare(q_THD, view, cut, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            backends._registry,
            "torch_ref",
            backends.BackendInfo(name="torch_ref", support=(route.row,), summary="", adapter=Forgetful),
        )
        with pytest.raises(AssertionError, match="error"):
            check(case, route, BATCHES[Phase.DECODE][0])


@pytest.mark.parametrize("transforms", ["rot", "kmean", "kmean+rot"])
@pytest.mark.parametrize("dim", [64, 96, 80])
def test_transforms_leave_attention_as_it_was(transforms: str, dim: int) -> None:
    """With an exact cache, a transform of K and its counterpart of Q change nothing but rounding."""
    from nibble.cache.scales import KVScales, LayerScales

    mean = torch.randn(2, dim, generator=torch.Generator().manual_seed(3)).tolist()
    scales = KVScales("test", {0: LayerScales({}, tuple(map(tuple, mean)))})
    case = Case("torch_ref", 0, Phase.EXTEND, "fp32", "nhd", Shape(dim=dim))
    route = route_for(case)
    assert route
    plain = scene(case, route, ((0, 50),))
    placed = layout(f"fp32+{transforms}", "nhd", case.shape)
    pool = PagedPool(placed, plain.ctx.pool.pages, scales, DEVICE, poison=True)
    other = StepContext(plain.ctx.plan, pool, plain.ctx.backends, plain.ctx.meta)
    expected = attention(plain.ctx, 0, plain.q_THD, plain.streams, plain.spec)
    found = attention(other, 0, plain.q_THD, plain.streams, plain.spec)
    stored = [
        p.view(0).streams["k"].gather_reference(torch.tensor([plain.pages[0]], device=DEVICE))[0, :50]
        for p in (plain.ctx.pool, pool)
    ]
    assert (stored[0] - stored[1]).abs().max() > 0.1
    assert (found - expected).abs().max() < (
        1e-5 if DTYPE == "float32" else 3e-2
    )  # Q is rotated in its own dtype
