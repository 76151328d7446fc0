"""MLA decode in CUDA C++: it compiles for every format without a GPU; on a GPU of SM90 it agrees with its reference.

Pages are in random order over poisoned memory, so a slot that is not a request's own shows as NaN.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

from nibble import formats
from nibble.formats.base import raw
from nibble.kernels import nvrtc as compiling
from nibble.kernels.append.naive import dequantize_pages
from nibble.kernels.codecs import CUDA_LATENTS as LATENTS
from nibble.kernels.mla import cuda as twin
from nibble.kernels.mla import naive
from nibble.kernels.types import AttentionBatch, Paged
from nibble.model_spec import LATENT, Phase, Stream

SHARED, STATIC = 232448, {"mla.cu": 4096, "mla_fp4.cu": 0}
"""Bytes of shared memory that a block of SM90 can have, and the most of them that the kernel declares itself."""
STREAM = Stream(LATENT, 1, twin.RANK + twin.ROPE, twin.ROPE)
SCALE = STREAM.dim**-0.5
BATCHES = ((1,), (70, 0, 1, 15, 16, 17, 1000), (5000, 3, 0, 640, 129), (300,) * 150)
runs = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or importlib.util.find_spec("triton") is None,
    reason="needs a GPU of SM90, and Triton",
)


@pytest.mark.parametrize("name", LATENTS)
def test_it_compiles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path))
    code = twin.compile_latent(LATENTS[name])
    assert isinstance(code, bytes) and code.startswith(compiling.ELF)


@pytest.mark.parametrize("name", LATENTS)
def test_a_block_fits(name: str) -> None:
    assert LATENTS[name].shared_bytes(twin.MAX_BATCH) + STATIC[LATENTS[name].source] <= SHARED


@pytest.mark.parametrize("name", LATENTS)
def test_a_machine_without_the_gpu_is_not_served(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    stored, segment = batch(name, (20, 3), 16, record=False, device="cpu")
    assert not twin.serves(torch.zeros(2, 16, STREAM.dim, dtype=torch.bfloat16), stored, twin.ROPE, segment)


def test_what_can_be_fetched_in_runs() -> None:
    planes, records = (
        batch("nvfp4_ds_mla", (20, 3), 16, record, "cpu")[0].planes_PHS for record in (False, True)
    )
    assert twin.has_contiguous_slots(planes) and twin.has_contiguous_slots(records)
    wide = torch.zeros(*planes[2].shape[:3], 2 * planes[2].shape[3], dtype=planes[2].dtype)
    assert not twin.has_contiguous_slots((*planes[:2], wide.chunk(2, -1)[1]))
    assert not twin.has_contiguous_slots((records[1], records[0], records[2]))


@runs
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize(("heads", "page"), [(16, 64), (16, 16), (5, 128), (8, 32)])
@pytest.mark.parametrize("lens", BATCHES, ids=lambda lens: f"{len(lens)}x{max(lens)}")
@pytest.mark.parametrize("name", LATENTS)
def test_it_agrees_with_its_reference(
    name: str, lens: tuple[int, ...], heads: int, page: int, record: bool
) -> None:
    stored, segment = batch(name, lens, page, record, "cuda")
    q_THD = torch.randn(len(lens), heads, STREAM.dim, dtype=torch.bfloat16, device="cuda")
    assert twin.serves(q_THD, stored, twin.ROPE, segment)
    found, again = (agrees(q_THD, stored, segment) for _ in range(2))
    assert torch.equal(found, again)


@runs
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize(
    "lens",
    [(1,) * 300 + (0,) * 7 + (1,) * 293, (64,) * 400 + (65, 0, 5000)],
    ids=["one tile each", "one tile and more"],
)
@pytest.mark.parametrize("name", LATENTS)
def test_many_requests(name: str, lens: tuple[int, ...], heads: int) -> None:
    """More of them than a block has threads, and segments that some readers have no tile of."""
    stored, segment = batch(name, lens, 64, record=False, device="cuda")
    q_THD = torch.randn(len(lens), heads, STREAM.dim, dtype=torch.bfloat16, device="cuda")
    agrees(q_THD, stored, segment)


@runs
@pytest.mark.parametrize("name", LATENTS)
def test_maxima_that_rise_late(name: str) -> None:
    """Scores far apart, and the largest one behind: sums are brought to another maximum in the middle of a segment."""
    stored, segment = batch(name, (3000, 700), 64, record=False, device="cuda")
    keys_LD = dequantize_pages(stored, segment.page_table_BN[:1], torch.float32)[0, :3000, 0]
    q_THD = torch.randn(2, 16, STREAM.dim, dtype=torch.bfloat16, device="cuda") * 30
    q_THD[0] = (keys_LD[2900] * torch.linspace(0.1, 3, 16, device="cuda")[:, None]).bfloat16()
    agrees(q_THD, stored, segment)


@runs
@pytest.mark.parametrize("name", LATENTS)
def test_queries_of_any_strides_and_no_numbers(name: str) -> None:
    stored, segment = batch(name, (300, 20), 64, record=False, device="cuda")
    wide = torch.randn(2, 16, STREAM.dim + 3, dtype=torch.bfloat16, device="cuda")
    odd_THD = wide[:, :, 1 : STREAM.dim + 1]
    assert torch.equal(
        twin.attend(odd_THD, stored, segment, SCALE),
        twin.attend(odd_THD.contiguous(), stored, segment, SCALE),
    )
    odd_THD[1, 3, 5] = float("nan")
    found = twin.attend(odd_THD, stored, segment, SCALE)
    assert found[1, 3].isnan().all() and found.isnan().sum() == twin.RANK


def agrees(q_THD: Tensor, stored: Paged, segment: AttentionBatch) -> Tensor:
    """What the kernel answers, which must be the reference's."""
    expected = naive.mla_attention(q_THD.float(), stored, twin.ROPE, segment, SCALE)
    found = twin.attend(q_THD, stored, segment, SCALE)
    assert (found.float() - expected).norm() <= 4e-3 * expected.norm()
    return found


def batch(
    name: str, lens: tuple[int, ...], page: int, record: bool, device: str
) -> tuple[Paged, AttentionBatch]:
    """Random latents of requests, whose pages are in random order; what no request owns is poison."""
    fmt, rng = formats.get(name).bound(STREAM), torch.Generator().manual_seed(7)
    counts = [-(-length // page) for length in lens]
    scale = torch.tensor(0.02 if fmt.needs_scale else 1.0)
    planes = fmt.encode(torch.randn(sum(counts) + 3, 1, page, STREAM.dim, generator=rng), scale)
    order = torch.randperm(sum(counts), generator=rng).tolist()
    page_table_BN = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    mine_PS = torch.zeros(sum(counts) + 3, page, dtype=torch.bool)
    for row, length, count in zip(page_table_BN, lens, counts, strict=True):
        for i in range(count):
            row[i] = order.pop()
            mine_PS[row[i], : length - i * page] = True
    planes = tuple(plane.contiguous().to(device) for plane in planes)
    planes = _records(planes) if record else planes
    for plane in planes:
        poison = 255 if plane.dtype.itemsize == 1 else -1
        raw(plane).masked_fill_(~mine_PS[:, None, :, None].to(device), poison)
    segment = AttentionBatch.from_lens(Phase.DECODE, 0, [1] * len(lens), list(lens), page_table_BN.to(device))
    return Paged(fmt, STREAM.dim, planes, scale.to(device)), segment


def _records(planes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same planes as columns of one array of bytes."""
    parts = [plane.contiguous().view(torch.uint8) for plane in planes]
    columns = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
    return tuple(column.view(plane.dtype) for column, plane in zip(columns, planes, strict=True))
