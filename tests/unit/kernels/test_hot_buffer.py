"""Finding slots for chosen tokens: the Triton twin against the reference, and both against a model with plain lists."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.offload import HotBuffer, HotLookup, naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, TOP_K, ROWS = 4, 6, 5
PAGES = 64
TWIN = importlib.util.find_spec("triton") is not None


class Model:
    """One request's hot buffer, as a list of slots whose tokens are given up from the front."""

    def __init__(self, size: int) -> None:
        self.slots: list[tuple[int, int]] = [(slot, PAD_INDEX) for slot in range(size)]

    def look(self, tokens: list[int]) -> tuple[dict[int, int], list[int]]:
        """token -> slot, and the tokens that are copied."""
        found = {token: slot for slot, token in self.slots if token in tokens}
        used = [entry for entry in self.slots if entry[1] in found and entry[1] != PAD_INDEX]
        stale = [entry for entry in self.slots if entry not in used]
        missed = [token for token in tokens if token not in found]
        given = [(slot, token) for (slot, _), token in zip(stale, missed, strict=False)]
        self.slots = stale[len(given) :] + given + used
        return found | {token: slot for slot, token in given}, missed


def hot_of(frames: int) -> HotBuffer:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    size = frames * PAGE
    return HotBuffer(
        torch.zeros(PAGES, **ints),
        torch.full((ROWS, frames), PAD_INDEX, **ints),
        torch.full((ROWS, size), PAD_INDEX, **ints),
        torch.arange(size, **ints).repeat(ROWS, 1),
        torch.zeros(3, dtype=torch.int64, device=DEVICE),
    )


def twin() -> Callable[..., HotLookup]:
    from nibble.kernels.offload import triton as swap

    return swap.lookup_hot


WAYS = [
    pytest.param(lambda: naive.lookup_hot, id="reference"),
    pytest.param(twin, id="twin", marks=pytest.mark.skipif(not TWIN, reason="triton is not installed here")),
]


@pytest.mark.parametrize("frames", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_found_and_the_longest_unused_slots_given_up(way: Any, frames: int) -> None:
    swap, dice, hot = way(), random.Random(frames), hot_of(frames)
    table = torch.tensor(dice.sample(range(PAGES), 3 * 10), dtype=torch.int32, device=DEVICE).view(3, 10)
    rows = [3, 0, 2]  # the last has no hot buffer: all it looks at is on the device
    models = [Model(frames * PAGE), Model(frames * PAGE)]
    own = [[40 + i for i in range(frames)], [50 + i for i in range(frames)]]
    for row, buffer in zip(rows, own, strict=False):
        hot.frames_RF[row] = torch.tensor(buffer, dtype=torch.int32)
    totals = [0, 0, 0]
    for _ in range(30):
        frames_P = hot.frames_P.fill_(PAD_INDEX)
        frames_P[table[2].long()] = torch.arange(10, dtype=torch.int32, device=DEVICE)
        here = dice.sample(range(20), 4)  # of the first two requests' pages
        frames_P[table[:2].reshape(-1)[here].long()] = torch.arange(20, 24, dtype=torch.int32, device=DEVICE)
        lists = [sorted(dice.sample(range(40), dice.choice([1, 3, TOP_K]))) for _ in range(3)]
        chosen = torch.tensor([row + [PAD_INDEX] * (TOP_K - len(row)) for row in lists], dtype=torch.int32)
        made = swap(chosen.to(DEVICE), torch.tensor(rows, device=DEVICE), table, hot)
        expected, copies = slots_by_model(lists, table, frames_P, models, own, totals)
        assert made.topk_slots_TK.tolist() == [row + [PAD_INDEX] * (TOP_K - len(row)) for row in expected]
        count = int(made.count)
        pairs = zip(made.from_M[:count].tolist(), made.to_M[:count].tolist(), strict=True)
        assert sorted(pairs) == sorted(copies)
    assert hot.counts.tolist() == totals and min(totals) > 20


def slots_by_model(
    lists: list[list[int]], table: Tensor, frames_P: Tensor, models: list[Model], own: list[list[int]],
    totals: list[int],
) -> tuple[list[list[int]], list[tuple[int, int]]]:  # fmt: skip
    slots, copies = [], []
    for i, tokens in enumerate(lists):
        pages = [int(table[i, token // PAGE]) for token in tokens]
        frames = [int(frames_P[page]) for page in pages]
        away = [token for token, frame in zip(tokens, frames, strict=True) if frame < 0]
        places, missed = models[i].look(away) if away else ({}, [])
        found = []
        for token, page, frame in zip(tokens, pages, frames, strict=True):
            if frame < 0:
                place = places[token]
                slot = own[i][place // PAGE] * PAGE + place % PAGE
                copies += [(page * PAGE + token % PAGE, slot)] if token in missed else []
            else:
                slot = frame * PAGE + token % PAGE
            found.append(slot)
        slots.append(found)
        for place, number in enumerate((len(tokens) - len(away), len(away) - len(missed), len(missed))):
            totals[place] += number
    return slots, copies


@pytest.mark.parametrize("way", WAYS)
def test_padding_looks_at_nobody(way: Any) -> None:
    hot = hot_of(2)
    table = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    chosen = torch.full((2, TOP_K), PAD_INDEX, dtype=torch.int32, device=DEVICE)
    made = way()(chosen, torch.tensor([4, 1], device=DEVICE), table, hot)
    assert (made.topk_slots_TK == PAD_INDEX).all() and not int(made.count)


@pytest.mark.parametrize(
    "name",
    [
        "reference",
        pytest.param("twin", marks=pytest.mark.skipif(not TWIN, reason="triton is not installed here")),
    ],
)
def test_slots_by_way_of_pages(name: str) -> None:
    if name == "twin":
        from nibble.kernels.offload.triton import resident_slots as resident
    else:
        resident = naive.resident_slots
    table = torch.tensor([[7, 3]], dtype=torch.int32, device=DEVICE)
    chosen = torch.tensor([[0, 5, PAD_INDEX]], dtype=torch.int32, device=DEVICE)
    assert resident(chosen, table, None, PAGE).tolist() == [[28, 13, PAD_INDEX]]
    frames_P = torch.arange(PAGES, dtype=torch.int32, device=DEVICE).flip(0)
    frames_P[3] = PAD_INDEX
    assert resident(chosen, table, frames_P, PAGE).tolist() == [[56 * 4, PAD_INDEX, PAD_INDEX]]
