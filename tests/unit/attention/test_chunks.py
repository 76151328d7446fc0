"""Chunked attention: requests cut where chunks begin are attended over as a mask of chunks says.

Shape suffixes: T tokens, H query heads, D values of a head, L tokens of a request.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.chunks import cut_at_chunks
from nibble.attention.planner.resolve import resolve
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import KVView, PagedPool
from nibble.cache.scales import ONE
from nibble.config import Config
from nibble.errors import ConfigError
from nibble.hardware import lookup_gpu
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LayerGroup, ModelSpec, Phase, Stream

PAGE, CHUNK, HEADS, DIM, PAGES = 16, 32, 2, 16, 40
STORED = (5, 32, 33, 100, 64, 97)
PARAMS = AttentionParams(DIM**-0.5)


@pytest.fixture(scope="module")
def view() -> KVView:
    streams = tuple(StreamLayout(Stream(name, HEADS, DIM), "fp32") for name in "kv")
    pool = PagedPool(CacheLayout((LayerLayout(0, streams),), PAGE, "nhd"), PAGES, ONE)
    rng, slots = torch.Generator().manual_seed(3), torch.arange(PAGES * PAGE)
    pool.write(0, {name: torch.randn(len(slots), HEADS, DIM, generator=rng) for name in "kv"}, slots)
    return pool.view(0)


def requests(phase: Phase, new: tuple[int, ...], start: int = 0) -> AttentionBatch:
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(5)).int()
    table_BN = torch.zeros(len(STORED), -(-max(STORED) // PAGE), dtype=torch.int32)
    for row, length in zip(table_BN, STORED, strict=True):
        count = -(-length // PAGE)
        row[:count], order = order[:count], order[count:]
    return AttentionBatch.from_lens(phase, start, new, STORED, table_BN)


def expected(view: KVView, batch: AttentionBatch, q_THD: Tensor) -> Tensor:
    """By the definition: softmax over the tokens of the query's chunk."""
    rows, first = [], 0
    for i, (new, stored) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        k_LGD, v_LGD = (
            view.streams[name].gather_reference(batch.page_table_BN[i : i + 1])[0] for name in "kv"
        )
        for j in range(new):
            at = stored - new + j
            seen = slice(at // CHUNK * CHUNK, at + 1)
            q_GRD = q_THD[first + j].unflatten(0, (HEADS, -1)).float()
            scores_GRL = q_GRD @ k_LGD[seen].permute(1, 2, 0) * PARAMS.scale
            rows.append((scores_GRL.softmax(-1) @ v_LGD[seen].transpose(0, 1)).flatten(0, 1))
        first += new
    return torch.stack(rows)


CASES = {
    "prompts": (Phase.PREFILL, STORED),
    "extensions": (Phase.EXTEND, (5, 1, 2, 70, 33, 65)),
    "drafts": (Phase.VERIFY, (3, 3, 3, 3, 3, 3)),
    "tokens": (Phase.DECODE, (1,) * 6),
}


@pytest.mark.parametrize(("phase", "new"), CASES.values(), ids=CASES)
def test_a_cut_batch_is_attended_over_within_chunks(view: KVView, phase: Phase, new: tuple[int, ...]) -> None:
    batch = requests(phase, new)
    q_THD = torch.randn(sum(new), 2 * HEADS, DIM, generator=torch.Generator().manual_seed(7))
    cut = cut_at_chunks(batch, PAGE, CHUNK)
    assert (cut.start, cut.stop) == (batch.start, batch.stop)
    assert max(cut.seq_lens) == CHUNK and cut.page_table_BN.shape[1] == CHUNK // PAGE
    assert cut.seq_lens == tuple(cut.seq_lens_B.tolist()) and sum(cut.query_lens) == sum(new)
    answer = TorchRef().attend(q_THD, view, cut, PARAMS)
    right = expected(view, batch, q_THD)
    assert (answer - right).abs().max() < 1e-5
    whole = TorchRef().attend(q_THD, view, batch, PARAMS)
    assert (whole - right).abs().max() > 0.1, "chunks make no difference here"


def test_rows_stay_where_they_are_in_the_step() -> None:
    cut = cut_at_chunks(requests(Phase.EXTEND, (5, 1, 2, 70, 33, 65), start=11), PAGE, CHUNK)
    assert (cut.start, cut.stop) == (11, 11 + 176)


def test_lengths_of_a_recorded_step_are_bounds_and_its_padding_stays_empty() -> None:
    """The host knows bounds only, of which no length follows; the device has the lengths, 0 for padding."""
    batch = requests(Phase.DECODE, (1,) * 6)
    lens_B = batch.seq_lens_B.clone()
    lens_B[-1] = 0
    cut = cut_at_chunks(replace(batch, seq_lens=(112,) * 6, seq_lens_B=lens_B, bounds=True), PAGE, CHUNK)
    assert cut.seq_lens == (CHUNK,) * 6
    assert cut.seq_lens_B.tolist() == [5, 32, 1, 4, 32, 0]
    assert cut.seq_lens_B.dtype is cut.page_table_BN.dtype is torch.int32


def test_pages_divide_chunks() -> None:
    """A chunk must begin with a page."""
    streams = tuple(Stream(name, 8, 128) for name in "kv")
    groups = (LayerGroup("chunked", "mha", streams, (0, 1), 40, chunk=48),)
    spec = ModelSpec("m", "llama4_text", groups, (0, 1), 4096, 1000, 512, 1 << 20)
    machine = lookup_gpu("h200")
    assert resolve(Config(model="m"), spec, machine).page_size == 16
    with pytest.raises(
        ConfigError, match=r"pages of 64 tokens do not divide .*chunks of attention \(48 tokens\)"
    ):
        resolve(Config(model="m", page_size=64), spec, machine)
