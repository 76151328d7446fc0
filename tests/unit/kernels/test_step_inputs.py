"""The inputs of a decode step in one launch, against the definition."""

from __future__ import annotations

import pytest
import torch

from nibble.kernels.step_inputs import Tables, naive
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
