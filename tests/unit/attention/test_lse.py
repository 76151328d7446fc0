"""Attention over two sources: the newest tokens by one call, all others by another, merged by their log-sum-exp.

The far part is the same queries as the last tokens of requests that are W tokens shorter; the near part has a window
of W. Both read one pool here, so that the merge is all that can differ from attention over all keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.planner.support import Need, Support
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import KVView, PagedPool
from nibble.cache.scales import ONE
from nibble.formats import scheme
from nibble.kernels.attention.naive import PartialAttention, merge_lse
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LATENT, Phase, Stream

PAGE = 16


@dataclass(frozen=True)
class Case:
    """batch: tokens already stored and new tokens of each request."""

    format: str
    batch: tuple[tuple[int, int], ...]
    exact: int
    """W."""
    latent: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        extras = "".join(
            f"-{name}" for name in ("latent", "window", "softcap", "sinks") if getattr(self, name)
        )
        return f"{self.format}-{self.exact}{extras}"


MIXED = ((0, 40), (300, 7), (3, 1), (600, 1), (31, 1), (32, 1))
CASES = [
    Case("nvfp4", MIXED, 32),
    Case("fp32", ((0, 300),), 70),
    Case("bf16", MIXED, 24, window=300, sinks=True),
    Case("bf16", MIXED, 24, window=10),
    Case("fp8_e4m3", MIXED, 1, softcap=4.0),
    Case("nvfp4", MIXED, 1000),
    Case("bf16", MIXED, 32, latent=True),
    Case("fp8_ds_mla", MIXED, 16, latent=True, window=100),
]


@dataclass(frozen=True)
class Scene:
    """Requests in a pool, and the queries of all their tokens."""

    case: Case
    view: KVView
    pages: tuple[Tensor, ...]
    queries: tuple[Tensor, ...]
    """[L, H, D] of each request."""
    sinks_H: Tensor | None


HEADS, GROUP = 2, 3


def scene(case: Case) -> Scene:
    rng = torch.Generator().manual_seed(11)
    streams = (
        (Stream(LATENT, 1, 192, 64),) if case.latent else (Stream("k", HEADS, 32), Stream("v", HEADS, 32))
    )
    formats = scheme.parse(case.format)
    entries = tuple(StreamLayout(stream, formats.format_of(stream).name) for stream in streams)
    lens = [stored + new for stored, new in case.batch]
    counts = [-(-length // PAGE) for length in lens]
    pool = PagedPool(
        CacheLayout((LayerLayout(0, entries),), PAGE, "nhd"), sum(counts), ONE, "cpu", poison=True
    )
    pages = torch.randperm(sum(counts), generator=rng).split(counts)
    for length, own in zip(lens, pages, strict=True):
        token = torch.arange(length)
        tokens = {x.name: torch.randn(length, x.heads, x.dim, generator=rng) for x in streams}
        pool.write(0, tokens, own[token // PAGE] * PAGE + token % PAGE)
    heads = GROUP * streams[0].heads
    queries = tuple(torch.randn(length, heads, streams[0].dim, generator=rng) * 3 for length in lens)
    return Scene(
        case, pool.view(0), pages, queries, torch.randn(heads, generator=rng) if case.sinks else None
    )


def batch_of(s: Scene, stops: list[int], counts: list[int], far: int = 0) -> AttentionBatch:
    """The last `counts` of the first `stops` tokens of each request, without the newest `far` of those."""
    lens = [max(stop - far, 0) for stop in stops]
    return AttentionBatch.from_lens(
        Phase.EXTEND, 0, counts, lens, pad_sequence(s.pages, batch_first=True).int()
    )


def parts(s: Scene, stops: list[int], counts: list[int]) -> tuple[PartialAttention, PartialAttention]:
    """The far part, and the near one, which has the sinks."""
    case, backend = s.case, TorchRef()
    q_THD = torch.cat([q[stop - n : stop] for q, stop, n in zip(s.queries, stops, counts, strict=True)])
    near = AttentionParams(0.2, min(case.exact, case.window or case.exact), case.softcap, s.sinks_H)
    far = replace(
        near, window=None if case.window is None else max(case.window - case.exact, 0), sinks_H=None
    )
    found = []
    for params, skipped in ((far, case.exact), (near, 0)):
        if params.window == 0:
            heads, dim = q_THD.shape[1], 32
            values = torch.full((len(q_THD), heads, dim), torch.nan)
            found.append(PartialAttention(values, torch.full((heads, len(q_THD)), -torch.inf)))
            continue
        batch = batch_of(s, stops, counts, skipped)
        state = backend.prepare(q_THD, s.view, batch, params)
        found.append(backend.forward_partial(q_THD, s.view, batch, params, state))
    return found[0], found[1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_parts_make_the_whole(case: Case) -> None:
    s = scene(case)
    stops, counts = [stored + new for stored, new in case.batch], [new for _, new in case.batch]
    params = AttentionParams(0.2, case.window, case.softcap, s.sinks_H)
    backend, batch = TorchRef(), batch_of(s, stops, counts)
    q_THD = torch.cat([q[-n:] for q, n in zip(s.queries, counts, strict=True)])
    whole = backend.forward_partial(
        q_THD, s.view, batch, params, backend.prepare(q_THD, s.view, batch, params)
    )
    far, near = parts(s, stops, counts)
    values_THD, lse_HT = merge_lse(far, near, torch.float32)
    torch.testing.assert_close(values_THD, whole.values_THD, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_HT, whole.lse_HT, rtol=1e-5, atol=1e-5)
    # Of a request that fits into the exact window nothing is left for the far part.
    if case.window is None or case.window > case.exact:
        spans = zip(stops, counts, strict=True)
        short_T = torch.cat([torch.arange(stop - n, stop) < case.exact for stop, n in spans])
        assert torch.equal(far.lse_HT.isneginf(), short_T.expand_as(far.lse_HT))


CHUNKED = [
    Case("nvfp4", ((0, 400), (0, 90)), 48, sinks=True),
    Case("bf16", ((0, 400),), 48, latent=True, sinks=True),
]


@pytest.mark.parametrize("case", CHUNKED, ids=str)
@pytest.mark.parametrize("size", [40, 7, 1])
def test_a_token_has_the_same_bits_in_every_chunk(case: Case, size: int) -> None:
    """Both parts and their merge, of the same request and position, whatever the chunk and the batch."""
    s = scene(case)
    stops, counts = [new for _, new in case.batch], [new for _, new in case.batch]
    far, near = parts(s, stops, counts)
    whole = (far, near, merge_lse(far, near, torch.bfloat16))
    first = 0
    for request, length in enumerate(stops):
        starts = range(0, length, size) if size > 1 else (0, 47, 48, 49, 255, 256, length - 1)
        for start in (start for start in starts if start < length):
            stop = min(start + size, length)
            alone = replace(s, pages=s.pages[request : request + 1], queries=s.queries[request : request + 1])
            far, near = parts(alone, [stop], [stop - start])
            rows = slice(first + start, first + stop)
            for found, expected in zip((far, near, merge_lse(far, near, torch.bfloat16)), whole, strict=True):
                assert torch.equal(found.values_THD, expected.values_THD[rows])
                assert torch.equal(found.lse_HT, expected.lse_HT[:, rows])
        first += length


def test_only_rows_that_return_it_serve_a_need_of_the_log_sum_exp() -> None:
    need = Need(Phase.DECODE, "mha", "bf16", "hnd", 90, 64, 128, 4, "bfloat16", lse=True)
    rows = {lse: Support(phase={Phase.DECODE}, kind={"mha"}, format=None, lse=lse) for lse in (False, True)}
    assert rows[True].serves(need) and not rows[False].serves(need)
    assert rows[False].refuses(need) == ("does not return the log-sum-exp that an exact window needs",)
    plain = replace(need, lse=False)
    assert rows[True].serves(plain) and rows[False].serves(plain) and "log-sum-exp" in str(need)


def test_pages_before_a_window_may_hold_anything() -> None:
    """They may be another request's by now."""
    s = scene(Case("bf16", ((300, 20),), 32))
    batch, params = batch_of(s, [320], [20]), AttentionParams(0.2, 32)
    backend, q_THD = TorchRef(), s.queries[0][-20:]
    state = backend.prepare(q_THD, s.view, batch, params)
    expected = backend.forward(q_THD, s.view, batch, params, state)
    gone = (320 - 20 - 32) // PAGE
    for stream in s.view.streams.values():
        stream.planes[0][s.pages[0][:gone]] = torch.nan
    assert torch.equal(backend.forward(q_THD, s.view, batch, params, state), expected)
