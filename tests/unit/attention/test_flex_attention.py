"""flex_attention's blocks of keys: on a CPU torch looks at the mask alone, so what a GPU is told to visit is tested here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nibble.attention.backends.adapters.torch_backends import BLOCK, PACKED, _block_mask, _options, _round_up

REQUESTS = st.lists(
    st.tuples(st.integers(0, 700), st.integers(1, 300)).map(lambda pair: (pair[0] + pair[1], pair[1])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(REQUESTS, st.one_of(st.none(), st.integers(1, 400)))
def test_every_key_that_is_seen_lies_in_a_listed_block_and_no_other_block_is_listed(
    requests: list[tuple[int, int]], window: int | None
) -> None:
    lens_B, counts_B = (torch.tensor(values) for values in zip(*requests, strict=True))
    most, length = int(counts_B.max()), _round_up(int(lens_B.max()))
    mask = _block_mask(lens_B, lens_B - counts_B, most, length, window)
    assert mask.mask_mod and mask.seq_lengths == (most, length)
    query, key = torch.arange(most)[:, None], torch.arange(length)
    for b, (stored, count) in enumerate(requests):
        row = torch.tensor(b)
        seen = mask.mask_mod(row, torch.tensor(0), query, key)[:count]
        at = stored - count + query[:count]
        expected = (key <= at) & (key > at - (window or length + most))
        assert torch.equal(seen, expected)
        for q in range(-(-count // BLOCK)):
            blocks = expected[q * BLOCK : (q + 1) * BLOCK].any(0).view(-1, BLOCK).any(1).nonzero()[:, 0]
            listed = mask.kv_indices[b, 0, q, : mask.kv_num_blocks[b, 0, q]]
            assert listed.tolist() == blocks.tolist()


@pytest.mark.parametrize("window", [None, 20])
def test_blocks_of_padding_are_in_bounds(window: int | None) -> None:
    """Queries that a request does not have still visit a block that is there."""
    mask = _block_mask(torch.tensor([300, 7]), torch.tensor([0, 6]), 300, 384, window)
    assert (mask.kv_num_blocks >= 1).all() and (mask.kv_num_blocks <= 3).all()
    assert (mask.kv_indices >= 0).all() and (mask.kv_indices < 3).all()


def test_rows_that_torch_cannot_pack_into_a_block_of_the_mask_are_kept_from_its_decoding_kernel() -> None:
    """torch/_inductor/kernel/flex/flex_decoding.py: the next power of two of a KV head's rows must divide BLOCK."""
    from torch.nn.attention.flex_attention import FlexKernelOptions

    for rows in range(1, 20 * BLOCK):
        packs = BLOCK % max(1 << (rows - 1).bit_length(), 16) == 0
        assert packs or _options(rows), rows
    assert not _options(1) and not _options(PACKED)
    assert _options(BLOCK + 1).keys() <= FlexKernelOptions.__annotations__.keys()
