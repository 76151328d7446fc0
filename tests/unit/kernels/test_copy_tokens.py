"""Moving rows between stores, against the torch reference: the same bytes, for all pairs of formats and packings.

Triton's interpreter rounds to bfloat16 towards zero; global scales are powers of two here, so that what is decoded has
no more bits than that.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
from torch import Tensor

from nibble import formats
from nibble.cache import layout as packings
from nibble.formats.base import raw
from nibble.kernels.append import Target
from nibble.kernels.append.naive import NaiveAppend as Reference
from nibble.kernels.append.naive import dequantize_tokens
from nibble.kernels.offload import alike, copy_tokens, naive
from nibble.kernels.offload import triton as twin
from nibble.kernels.types import Paged
from nibble.model_spec import INDEX, LATENT, Stream

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FROM = [3, 17, 0, -1, 22, 5, 6, 7, 31, 12]
TO = [8, 1, 30, 4, -1, 16, 17, 18, 0, 29]
FORMATS = ("bf16", "fp32", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla", "nvfp4", "fp4_mx16")

pytestmark = pytest.mark.usefixtures("scalars_bound_loops")


@dataclass(frozen=True)
class Store:
    format: str
    packing: str = "record"
    page: int = 4
    scale: float = 2**-6
    rank: int = 256
    rope: int = 64
    name: str = LATENT

    def __str__(self) -> str:
        return f"{self.format}-{self.packing}-{self.rank}+{self.rope}"

    def filled(self, seed: int = 1) -> Paged:
        """32 slots of random rows; of magnitudes that differ, and a NaN and an infinity among them."""
        stream = Stream(self.name, 1, self.rank + self.rope, self.rope)
        fmt, packing = formats.get(self.format).bound(stream), packings.get(self.packing)
        planes = packing.allocate(fmt.planes(stream), 32 // self.page, self.page, DEVICE)
        planes = tuple(plane if packing.heads_first else plane.transpose(1, 2) for plane in planes)
        scale = torch.tensor(self.scale if fmt.needs_scale else 1.0, device=DEVICE)
        pages = Paged(fmt, stream.dim, planes, scale)
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(32, 1, stream.dim, generator=rng) * torch.logspace(-3, 2, 32).view(-1, 1, 1)
        x[12, :, 20] = float("inf")
        if (
            self.format != "fp8_ds_mla"
        ):  # whose codes and scales are both NaN: of a product, no sign is defined
            x[17, :, 3] = float("nan")
        Reference({"x": Target(pages)})({"x": x.bfloat16().to(DEVICE)}, torch.arange(32, device=DEVICE))
        return pages


def bits(pages: Paged) -> list[Tensor]:
    """Copies of planes as integers; a NaN of a plane of floats is -1, since what bits it has is not defined."""
    return [
        raw(plane).masked_fill(plane.float().isnan(), 255 if plane.itemsize == 1 else -1).cpu()
        for plane in pages.planes_PHS
    ]


def compare(
    source: Store, target: Store, dtype: torch.dtype = torch.int64, count: int | None = None, **how: int
) -> None:
    stored, found = source.filled(), []
    slots = [torch.tensor(slots, dtype=dtype, device=DEVICE) for slots in (FROM, TO)]
    most = None if count is None else torch.tensor([count], dtype=torch.int32, device=DEVICE)
    for fused in (False, True):
        pages = target.filled(2)
        before = bits(pages)
        with np.errstate(all="ignore"):
            if fused:
                assert twin.plan_of(stored, pages, DEVICE)
                twin.copy_tokens(stored, slots[0], pages, slots[1], most, programs=how.get("programs"))
            else:
                naive.copy_tokens(stored, slots[0], pages, slots[1], most)
        found.append(bits(pages))
        assert count == 0 or not all(map(torch.equal, before, found[-1]))
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert torch.equal(a, b), f"plane {i}: {int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_bytes_are_those_of_the_reference(source: str, target: str) -> None:
    compare(Store(source), Store(target, "nhd", 8))


@pytest.mark.parametrize("name", ["bf16", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize(
    "packings", [("record", "record"), ("record", "hnd"), ("nhd", "record")], ids="-".join
)
def test_packings_differ(name: str, packings: tuple[str, str]) -> None:
    compare(Store(name, packings[0]), Store(name, packings[1], 16))
    compare(Store(name, packings[0]), Store("fp8_ds_mla", packings[1], 16))


@pytest.mark.parametrize("dims", [(512, 64), (128, 0), (128, 32)], ids=str)
@pytest.mark.parametrize("target", ["bf16", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_ranks(dims: tuple[int, int], target: str) -> None:
    compare(Store("nvfp4_ds_mla", rank=dims[0], rope=dims[1]), Store(target, rank=dims[0], rope=dims[1]))


@pytest.mark.parametrize("target", ["nvfp4_ds_mla", "fp8_ds_mla"])
@pytest.mark.parametrize("count", [0, 3, 99])
def test_only_so_many_count(target: str, count: int) -> None:
    compare(Store("nvfp4_ds_mla"), Store(target), torch.int32, count)


@pytest.mark.parametrize("target", ["nvfp4_ds_mla", "fp8_ds_mla"])
@pytest.mark.parametrize("programs", [1, 2])
def test_few_programs_take_all(target: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "UNITS", 64)
    monkeypatch.setattr(twin, "ROWS", 2)
    compare(Store("nvfp4_ds_mla"), Store(target), torch.int32, 9, programs=programs)


@pytest.mark.parametrize("packing", packings.names())
def test_index_keys_move_as_they_are(packing: str) -> None:
    keys = {"rank": 128, "rope": 0, "name": INDEX}
    compare(Store("index_fp8", **keys), Store("index_fp8", packing, **keys))


def test_runs_are_as_long_as_they_can_be() -> None:
    """A record is one run of wide units; planes apart are a run each."""
    record, other, apart = (
        Store("fp8_ds_mla", packing, rank=512).filled() for packing in ("record", "record", "nhd")
    )
    way = twin.plan_of(record, other, DEVICE)
    assert isinstance(way, twin.ByteCopy) and len(way.runs) == 1
    assert way.units * 16 == sum(plane[0, 0, 0].nbytes for plane in record.planes_PHS)
    way = twin.plan_of(record, apart, DEVICE)
    assert isinstance(way, twin.ByteCopy) and len(way.runs) == 3


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla", "bf16"])
def test_there_and_back(name: str) -> None:
    store, host = Store(name, "nhd").filled(), Store(name).filled(2)
    before = bits(store)
    slots, away = torch.arange(32, device=DEVICE), torch.randperm(32).to(DEVICE)
    twin.copy_tokens(store, slots, host, away)
    for plane in store.planes_PHS:
        raw(plane).zero_()
    copy_tokens(host, away, store, slots)
    assert all(map(torch.equal, before, bits(store)))


def test_scales_are_part_of_what_bytes_mean() -> None:
    a, b = Store("nvfp4_ds_mla").filled(), Store("nvfp4_ds_mla", scale=2**-5).filled()
    assert alike(a, a) and alike(a, Store("nvfp4_ds_mla", "hnd").filled()) and not alike(a, b)
    compare(Store("nvfp4_ds_mla"), Store("nvfp4_ds_mla", scale=2**-5))
    slots = torch.arange(8, device=DEVICE)
    naive.copy_tokens(a, slots, b, slots)
    kept = dequantize_tokens(a, slots), dequantize_tokens(b, slots)
    assert torch.allclose(*kept, rtol=0.3, atol=1e-2)


def test_what_the_kernels_cannot_move() -> None:
    keys = {"rank": 128, "rope": 0, "name": INDEX}
    source, target = Store("index_fp8", **keys).filled(), Store("bf16", **keys).filled()
    assert not twin.plan_of(source, target, DEVICE)
    assert twin.plan_of(target, Store("index_fp8", **keys).filled(), DEVICE)
    slots = torch.arange(8, device=DEVICE)
    copy_tokens(source, slots, target, slots)
    assert torch.equal(dequantize_tokens(target, slots), dequantize_tokens(source, slots).bfloat16().float())
