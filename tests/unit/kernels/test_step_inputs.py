"""The inputs of recorded steps in one launch, against the definition."""

from __future__ import annotations

import pytest
import torch

from nibble.kernels.step_inputs import ON_DEVICE, Tables, naive
from nibble.kernels.step_inputs import triton as fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16


@pytest.mark.parametrize("has_exact", [False, True])
@pytest.mark.parametrize("width", [3, fast.PART, fast.PART + 5])
def test_inputs(width: int, has_exact: bool) -> None:
    rng = torch.Generator().manual_seed(width)
    rows = 7
    pages, exact = (torch.randint(0, 1000, (rows, width), generator=rng, dtype=torch.int32) for _ in range(2))
    latest = torch.arange(100, 100 + rows)
    tables = Tables(pages.to(DEVICE), latest.to(DEVICE), exact.to(DEVICE) if has_exact else None, PAGE)
    last = width * PAGE - 1
    sent = torch.tensor([[6, 0, 3, 3, 6], [0, last, PAGE - 1, -1, PAGE], [5, -1, -1, 0, 9]], device=DEVICE)
    found, expected = (module.decode_inputs(*sent.unbind(), tables) for module in (fast, naive))
    assert expected.ids_B.tolist() == [5, 100, 103, 0, 9]
    assert expected.positions_B.tolist() == [0, last, PAGE - 1, 0, PAGE]
    assert expected.seq_lens_B.tolist() == [1, last + 1, PAGE, 0, PAGE + 1]
    assert expected.slots_B.tolist() == [
        int(pages[6, 0]) * PAGE, int(pages[0, -1]) * PAGE + PAGE - 1, int(pages[3, 0]) * PAGE + PAGE - 1, -1,
        int(pages[6, 1]) * PAGE,
    ]  # fmt: skip
    for name in naive.StepInputs.__slots__:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None) == (not has_exact and name.startswith("exact"))
        if one is not None:
            assert torch.equal(one, other) and one.dtype == other.dtype, name


@pytest.mark.parametrize("has_unread", [False, True])
@pytest.mark.parametrize("has_exact", [False, True])
@pytest.mark.parametrize(("length", "width"), [(4, 3), (3, 3), (8, fast.PART + 5)])
def test_inputs_with_drafts(length: int, width: int, has_exact: bool, has_unread: bool) -> None:
    rng = torch.Generator().manual_seed(width)
    rows = 7
    pages, exact = (torch.randint(0, 1000, (rows, width), generator=rng, dtype=torch.int32) for _ in range(2))
    latest, drafts = torch.arange(100, 100 + rows), 1000 + torch.arange(7 * rows).view(7, rows)
    tables = Tables(
        pages.to(DEVICE), latest.to(DEVICE), exact.to(DEVICE) if has_exact else None, PAGE,
        drafts.to(DEVICE) if has_unread else None,
    )  # fmt: skip
    last = width * PAGE
    # All rows new, and over the end of a page; one of them; a request's first tokens; padding.
    numbers = [[6, 0, 3, 5], [PAGE + 2, last, 2, 0], [length, 1, 2, 0]]
    row, end, new = (torch.tensor(x, device=DEVICE) for x in numbers)
    ids = torch.arange(4 * length).view(4, length)
    # Of the second what was sampled last, of the third drafts that only the device has: place 2, column 3.
    ids[1], ids[2, 1:] = ON_DEVICE, ON_DEVICE - 1 - (2 * rows + 3)
    found, expected = (
        module.verify_inputs(row, end, new, ids.to(DEVICE), tables) for module in (fast, naive)
    )
    # Where nobody leaves drafts there, all that the host does not know was sampled last.
    unread = 1000 + 2 * rows + 3 if has_unread else 103
    assert expected.ids_T[length:].tolist() == [
        *[100] * length, 2 * length, *[unread] * (length - 1), *range(3 * length, 4 * length)
    ]  # fmt: skip
    assert expected.positions_T[:length].tolist() == list(range(PAGE + 2 - length, PAGE + 2))
    assert expected.positions_T[length:].tolist() == [
        *[last - 1] * length, *[0] * (length - 1), 1, *[0] * length
    ]  # fmt: skip
    slots = expected.slots_T.view(4, length).tolist()
    assert slots[1:] == [
        [*[-1] * (length - 1), int(pages[0, -1]) * PAGE + PAGE - 1],
        [*[-1] * (length - 2), int(pages[3, 0]) * PAGE, int(pages[3, 0]) * PAGE + 1],
        [-1] * length,
    ]
    assert expected.seq_lens_B.tolist() == numbers[1]
    for name in naive.DraftInputs.__slots__:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None) == (not has_exact and name.startswith("exact"))
        if one is not None:
            assert torch.equal(one, other) and one.dtype == other.dtype, name


def _verified(rows: int, most: int) -> naive.Verified:
    ints = torch.arange(rows, device=DEVICE)
    runs = 1000 * ints[:, None] + torch.arange(most, device=DEVICE)
    return naive.Verified(500 + ints, 20 + 10 * ints, 1 + ints % 3, runs)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(("length", "others"), [(4, 0), (3, 2), (8, 2)])
def test_what_the_host_did_not_know_is_filled_in(length: int, others: int, is_ahead: bool) -> None:
    """Of four requests the first is known, the second ends behind what is stored, and the third has what it gained."""
    header, requests = 4, 4
    count = requests * (3 + 2 * length + others)
    rows, links = [6, 0, 3, 5], [1, 4, 2, 0]
    numbers = [*rows, 19, -1 - 2, -1, 0, 2, 2, -1, 0]
    ids = list(range(100, 100 + requests * length))
    numbers += [*ids, *[7 + place for place in range(requests * length)]]
    numbers += links[:requests] if others else []
    numbers += [40 + place for place in range(requests * (others - 1))]
    newer, older = torch.zeros(2, header + count, dtype=torch.int64, device=DEVICE)
    newer[header:], newer[0] = torch.tensor(numbers), 9
    older[header:], older[0] = -3, 8
    target_rows_at = requests * (3 + 2 * length) if others else 0
    used = links if others else rows
    made = []
    for module in (fast, naive):
        settled = torch.full((count,), -99, device=DEVICE)
        both = (older, newer) if is_ahead else (newer, older)
        module.settle_inputs(*both, settled, (requests, length), target_rows_at, _verified(7, 16))
        made.append(settled.tolist())
    assert made[0] == made[1]
    gained = 1 + used[2] % 3
    run = [1000 * used[2] + max(place - (length - gained), 0) for place in range(length)]
    assert made[0] == [
        *rows, 19, 20 + 10 * used[1] + 2, 20 + 10 * used[2], 0, 2, 2, gained, 0,
        *ids[: 2 * length], *run, *ids[3 * length :], *numbers[3 * requests + requests * length :],
    ]  # fmt: skip


@pytest.mark.parametrize("length", [2, 4, 7])
def test_what_a_step_with_drafts_brought(length: int) -> None:
    """Drafts of all numbers, the first 0, 1, 2, ... of them right; some of them only the device knows."""
    rows, made = 40, []
    cases = [(new, right) for new in range(1, length + 1) for right in range(new)]
    requests = len(cases) + 2  # two of padding
    ids, tokens, expected = torch.full((requests, length), 1), list[int](), list[tuple[int, ...]]()
    drafts = 2000 + torch.arange(15 * rows).view(15, rows)
    for request, (new, right) in enumerate(cases):
        drawn = [2000 + place * rows + request for place in range(new)]
        for place in range(new - 1):
            unread = ON_DEVICE - 1 - place * rows - request
            at = length - new + 1 + place
            ids[request, at] = unread if request % 2 else drawn[place]
            if place == right:
                ids[request, at] += 1 if request % 2 == 0 else -rows
        tokens += drawn
        expected.append((drawn[right], 30 + request - new + right + 1, right + 1, *drawn[: right + 1]))
    row = torch.tensor([*range(3, 3 + len(cases)), rows - 1, rows - 1])
    end = torch.tensor([*range(30, 30 + len(cases)), 0, 0])
    new = torch.tensor([*(new for new, _ in cases), 0, 0])
    for module in (fast, naive):
        verified = _verified(rows, 16)
        before = [x.clone() for x in (verified.latest_R, verified.stored_R, verified.counts_R)]
        module.accept(
            *(x.to(DEVICE) for x in (row, end, new, ids, torch.tensor(tokens))), verified, drafts.to(DEVICE)
        )
        for place, (token, stored, count, *run) in zip(row.tolist(), expected, strict=False):
            assert verified.latest_R[place] == token and verified.stored_R[place] == stored
            assert verified.counts_R[place] == count and verified.runs_RK[place, :count].tolist() == run
        for old, now in zip(before, (verified.latest_R, verified.stored_R, verified.counts_R), strict=True):
            # Neither padding nor whoever is not part of the step.
            others = [0, 1, 2, *range(3 + len(cases), rows)]
            assert old[others].tolist() == now[others].tolist()
        made.append(verified)
    assert torch.equal(made[0].runs_RK, made[1].runs_RK)
