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
