"""The fused append of latents and index keys, against the formats' own encoding: the same bytes, in every packing.

Values that are stored in bfloat16 here have no more bits than that: Triton's interpreter rounds them towards zero.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
from torch import Tensor

from nibble import formats
from nibble.cache import layout as packings
from nibble.formats import transforms as transform
from nibble.formats.base import raw
from nibble.kernels.append import Target
from nibble.kernels.append import triton as implementation
from nibble.kernels.append.naive import NaiveAppend as Reference
from nibble.kernels.append.triton import RowAppend
from nibble.kernels.codecs import ROW_ENCODERS
from nibble.kernels.codecs.tiles import cut
from nibble.kernels.types import Paged
from nibble.model_spec import INDEX, LATENT, Stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, PAGES = 4, 5
SLOTS = [6, 13, 0, 19, 7, 12, 3, 17]
LATENTS = tuple(name for name in ROW_ENCODERS if name != "index_fp8")
SHAPES = ((512, 64), (128, 32), (256, 0), (96, 32), (288, 0), (36, 0))


@dataclass(frozen=True)
class Case:
    format: str
    rank: int = 512
    rope: int = 64
    packing: str = "nhd"
    name: str = LATENT
    dtype: torch.dtype = torch.bfloat16
    encoder: str = ""

    def __str__(self) -> str:
        return f"{self.format}-{self.rank}+{self.rope}-{self.packing}-{str(self.dtype)[6:]}{self.encoder}"

    @property
    def stream(self) -> Stream:
        return Stream(self.name, 1, self.rank + self.rope, self.rope)


def accepted(case: Case) -> bool:
    return formats.get(case.format).refuses(case.stream) is None


CASES = [
    *(Case(name, packing=packing) for name in LATENTS for packing in packings.names()),
    *filter(accepted, (Case(name, *shape) for name in LATENTS for shape in SHAPES[1:])),
    *filter(accepted, (Case(name, 128, 32, "record", dtype=torch.float16) for name in LATENTS)),
    *(Case(name, encoder=other) for name in LATENTS for other in formats.get(name).encoders[1:]),
    *(Case("index_fp8", dim, 0, packing, INDEX) for dim in (128, 96) for packing in packings.names()),
]


def values(case: Case, seed: int = 3) -> Tensor:
    """Values of many magnitudes, with what is awkward among them: zeros of both signs, values midway between two codes,
    what scales cannot reach, amax where its scale is a power of two already, infinities, and NaN."""
    rng = torch.Generator().manual_seed(seed)
    dim = case.rank + case.rope
    x = torch.randn(len(SLOTS), 1, dim, generator=rng) * torch.logspace(-6, 3, len(SLOTS)).view(-1, 1, 1)
    ties = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]
    x[0, :, :16] = torch.tensor(ties)
    x[1, :, :16] = torch.tensor([0.0, -0.0] * 8)
    x[2, :, :16] *= 1e-30
    x[3, :, 5], x[3, :, 20] = 3e38, -448.0 * 2**9
    x[4, :, 7] = float("-inf")
    if case.dtype == torch.bfloat16:  # of a NaN that is converted, no bits are defined
        x[5, :, 3] = float("nan")
    x[5, :, 9] = float("inf")
    x[6] = x[6].clamp(-14, 14)
    return x.bfloat16().to(case.dtype)


def pages(case: Case, scale: float = 0.02) -> Paged:
    """Poisoned pages."""
    fmt = formats.get(case.format).encoded_by(case.encoder).bound(case.stream)
    packing = packings.get(case.packing)
    planes = packing.allocate(fmt.planes(case.stream), PAGES, PAGE, torch.device(DEVICE))
    for plane in planes:
        raw(plane).fill_(255 if plane.itemsize == 1 else -1)
    planes = tuple(plane if packing.heads_first else plane.transpose(1, 2) for plane in planes)
    value = torch.tensor(scale if fmt.needs_scale else 1.0, device=DEVICE)
    return Paged(fmt, case.stream.dim, planes, value)


def written(case: Case, x_THD: Tensor, slots: list[int], *, fused: bool) -> list[Tensor]:
    """The bytes of pages after one append."""
    targets = {case.name: Target(pages(case))}
    assert RowAppend.serves(targets) and RowAppend.is_capturable
    write = RowAppend(targets) if fused else Reference(targets)
    with np.errstate(all="ignore"):
        write({case.name: x_THD.to(DEVICE)}, torch.tensor(slots, device=DEVICE))
    return [bits(plane) for plane in targets[case.name].pages.planes_PHS]


def bits(plane: Tensor) -> Tensor:
    """A copy as integers. A GPU's NaN has not the bits of a CPU's; there all NaN of a plane of floats are one."""
    found = raw(plane)
    if DEVICE == "cuda":
        found = found.masked_fill(plane.float().isnan(), 255 if plane.itemsize == 1 else -1)
    return found.cpu().clone()


def compare(case: Case, x_THD: Tensor, slots: list[int]) -> None:
    found, expected = (written(case, x_THD, slots, fused=fused) for fused in (True, False))
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"plane {i}: {int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_ds_mla", "fp8_e4m3"])
def test_exact_pages_hold_what_the_model_made(name: str) -> None:
    case = Case(name)
    x_THD = values(case).to(DEVICE)
    exact_slots = [-1, 4, 19, -1, 0, 1, 2, 3]
    places = (torch.tensor(slots, device=DEVICE) for slots in ([-1, *SLOTS[1:]], exact_slots))
    slots_T, exact_T = places
    for make in (RowAppend, Reference):
        targets = {LATENT: Target(pages(case), exact=pages(replace(case, format="bf16")))}
        assert RowAppend.serves(targets)
        write = make(targets)
        with np.errstate(all="ignore"):
            write({LATENT: x_THD}, slots_T, exact_T)
        (plane,) = targets[LATENT].exact.planes_PHS
        rows = plane[:, 0].flatten(0, 1)
        kept = exact_T >= 0
        assert torch.equal(raw(rows[exact_T[kept]]), raw(x_THD[kept, 0].bfloat16()))
        assert int((raw(rows) != -1).any(1).sum()) == int(kept.sum())
        alone = written(case, x_THD, slots_T.tolist(), fused=make is RowAppend)
        assert all(map(torch.equal, map(bits, targets[LATENT].pages.planes_PHS), alone))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_those_of_the_format(case: Case) -> None:
    compare(case, values(case), SLOTS)


@pytest.mark.parametrize("name", ["fp32", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla", "index_fp8"])
def test_any_stride(name: str) -> None:
    """A latent is a part of a wider product; and what has gaps within a row is copied first."""
    case = Case(name, 128, 0, "record", INDEX if name == "index_fp8" else LATENT, torch.float32)
    x_THD = values(case)
    compare(case, torch.cat((x_THD, x_THD), -1)[..., 40:168], SLOTS)
    compare(case, torch.cat((x_THD, x_THD), -1)[..., ::2], SLOTS)


@pytest.mark.parametrize("name", ["bf16", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_negative_slots_store_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(name, packing="record")
    compare(case, values(case), [-1, 13, 0, -9, 7, -1, 3, -1])
    for bits in written(case, values(case), [-1] * len(SLOTS), fused=True):
        assert (bits.view(torch.uint8) == 255).all()
    monkeypatch.setattr(implementation, "FEW_TOKENS", 0)  # several tokens a program, and some left over
    compare(case, values(case)[:-1], [-1, 13, 0, -9, 7, 1, 3])


def test_what_the_kernel_cannot_take_is_left_to_the_reference() -> None:
    good = Target(pages(Case("nvfp4", 128, 0)))
    assert RowAppend.serves({LATENT: good}) and RowAppend.serves({"k": good})
    assert not RowAppend.serves({LATENT: good, "v": good})
    assert not RowAppend.serves({"k": replace(good, transforms=(transform.get("rot"),))})
    two = tuple(torch.cat((plane.view(torch.uint8),) * 2, 1) for plane in good.pages.planes_PHS)
    assert not RowAppend.serves({"k": Target(replace(good.pages, planes_PHS=two))})


def test_rows_are_cut_into_powers_of_two() -> None:
    assert list(cut(0, 576, False)) == [(0, 512), (512, 64)]
    assert list(cut(0, 36, False)) == [(0, 32), (32, 4)]
    assert list(cut(0, 496, False)) == [(0, 496)]
    assert list(cut(0, 96, True)) == [(0, 96)]
