"""choose(): the tokens of sparse attention, against the definition written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import ONE
from nibble.geometry import INDEX, LATENT, Stream
from nibble.kernels import choose as op

DIM, HEADS, PAGE = 32, 4, 16


def stored(keys_LD: Tensor, pages: list[int], kv_format: str) -> tuple[op.Paged, Tensor]:
    """Index keys in pages that lie in any order."""
    entries = (StreamLayout(Stream(LATENT, 1, 32), "bf16"), StreamLayout(Stream(INDEX, 1, DIM), kv_format))
    pool = PagedPool(CacheLayout((LayerLayout(0, entries),), PAGE, "nhd"), 8, ONE, poison=True)
    tokens = torch.arange(len(keys_LD))
    table = torch.tensor(pages)
    pool.write(0, {INDEX: keys_LD[:, None]}, table[tokens // PAGE] * PAGE + tokens % PAGE)
    return pool.view(0).streams[INDEX].paged, table[None].int()


def by_the_book(keys_LD: Tensor, q_nHD: Tensor, weights_nH: Tensor, top_k: int) -> list[list[int]]:
    found, length, n = [], len(keys_LD), len(q_nHD)
    for i in range(n):
        seen = length - n + i + 1
        score = [float((weights_nH[i] * (q_nHD[i] @ keys_LD[t]).clamp(min=0)).sum()) for t in range(seen)]
        best = sorted(range(seen), key=lambda t: (-score[t], t))[:top_k]
        found.append(sorted(best) + [op.NOBODY] * (top_k - len(best)))
    return found


@pytest.mark.parametrize("n", [1, 5, 70])
@pytest.mark.parametrize("top_k", [1, 7, 64, 100])
def test_the_best_are_chosen(top_k: int, n: int) -> None:
    rng = torch.Generator().manual_seed(n + top_k)
    keys = torch.randint(-3, 4, (70, DIM), generator=rng).float()
    q, weights = (
        torch.randint(-3, 4, (n, HEADS, DIM), generator=rng).float(),
        torch.randn(n, HEADS, generator=rng),
    )
    weights = (weights * 8).round()  # whole numbers: sums are exact, and ties are many
    paged, table = stored(keys, [3, 0, 6, 1, 5], "bf16")
    found = op.choose(paged, table, (n,), (70,), q, weights, top_k)
    assert found.dtype == torch.int32 and found.tolist() == by_the_book(keys, q, weights, top_k)


def test_equal_scores_go_by_position() -> None:
    keys = torch.ones(40, DIM)
    paged, table = stored(keys, [3, 0, 6], "bf16")
    found = op.choose(paged, table, (2,), (40,), torch.ones(2, HEADS, DIM), torch.ones(2, HEADS), 3)
    assert found.tolist() == [[0, 1, 2]] * 2


def test_requests_and_bounds_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(1)
    keys, q, weights = (
        torch.randn(*shape, generator=rng) for shape in ((70, DIM), (6, HEADS, DIM), (6, HEADS))
    )
    paged, table = stored(keys, [3, 0, 6, 1, 5], "index_fp8")
    whole = op.choose(paged, table, (6,), (70,), q, weights, 9)
    pairs = op.choose(paged, table.expand(2, -1), (4, 2), (68, 70), q, weights, 9)
    assert torch.equal(pairs, whole)
    monkeypatch.setattr(op, "SCORES", 1)
    assert torch.equal(op.choose(paged, table, (6,), (70,), q, weights, 9), whole)
