"""The fused append and rotation, against the formats' own encoding: the same bytes, for every format and packing.

Without a GPU the kernels run in Triton's interpreter, which rounds float32 to bfloat16 towards zero; so the values
that are stored in bfloat16 here have no more bits than that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import nibble
from nibble import formats
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool, _targets
from nibble.cache.scales import KVScales, LayerScales, StreamScale
from nibble.formats import scheme
from nibble.formats import transforms as transform
from nibble.kernels.append import Target, naive
from nibble.kernels.append import triton as append
from nibble.kernels.append.naive import NaiveAppend as Reference
from nibble.kernels.append.triton import HeadsAppend
from nibble.kernels.codecs import ENCODERS
from nibble.kernels.linear import rotate
from nibble.kernels.linear.triton import rotate as rotate_twin
from nibble.kernels.types import Rope
from nibble.model_spec import HEADS as ONE_HEAD
from nibble.model_spec import Stream
from pairs import rotated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, PAGES = 4, 5
HEADS, DIM = 3, 96  # neither is a power of two


def values(seed: int, tokens: int = 7, heads: int = HEADS, dim: int = DIM) -> Tensor:
    """bfloat16 values of many magnitudes, with what is awkward among them: blocks that hold zeros of both signs, what
    lies beyond the scales' range on either side, values midway between two codes, and infinities."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, dim, generator=rng) * torch.logspace(-6, 3, tokens).view(-1, 1, 1)
    ties = torch.tensor(
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]
    )
    x[0, :, :16] = ties
    x[1, :, :16] = torch.tensor([0.0, -0.0] * 8)
    x[2, :, :16] *= 1e-30
    x[3, :, 5] = 3e38
    x[4, :, 7] = float("-inf")
    return x.bfloat16()


def pool(
    kv_format: str,
    packing: str,
    dims: tuple[int, int] = (DIM, DIM),
    heads: int = HEADS,
    exact: PagedPool | None = None,
) -> PagedPool:
    chosen = scheme.parse(kv_format)
    streams = [Stream(name, heads, dim) for name, dim in zip("kv", dims, strict=True)]
    entries = tuple(StreamLayout.of(stream, chosen.format_of(stream)) for stream in streams)
    layout = CacheLayout((LayerLayout(0, entries, chosen.transforms),), PAGE, packing)
    mean = torch.randn(heads, dims[0], generator=torch.Generator().manual_seed(9)).tolist()
    amax = {
        name: StreamScale(300.0 + 7 * i, 1.0)
        for i, name in enumerate(("k", "v", "k+rot", "k+kmean", "k+kmean+rot"))
    }
    scales = KVScales("test", {0: LayerScales(amax, tuple(map(tuple, mean)))})
    return PagedPool(layout, PAGES, scales, DEVICE, exact=exact, poison=True)


def planes(
    kv_format: str, packing: str, streams: dict[str, Tensor], slots: list[int], *, fused: bool
) -> list[Tensor]:
    """The bytes of a pool after one append."""
    dims = streams["k"].shape[2], streams["v"].shape[2]
    target = pool(kv_format, packing, dims, streams["k"].shape[1])
    targets = _targets(target.view(0))
    assert HeadsAppend.serves(targets)
    write = HeadsAppend(targets) if fused else Reference(targets, target.view(0).joint_scale)
    with np.errstate(all="ignore"):  # numpy, which the interpreter computes with, warns of what IEEE defines
        write({name: x.to(DEVICE) for name, x in streams.items()}, torch.tensor(slots, device=DEVICE))
    return bytes_of(target)


def bytes_of(target: PagedPool) -> list[Tensor]:
    return [
        plane.view(torch.uint8).cpu() for stream in target.view(0).streams.values() for plane in stream.planes
    ]


def compare(kv_format: str, packing: str, streams: dict[str, Tensor], slots: list[int]) -> None:
    fused, plain = (planes(kv_format, packing, streams, slots, fused=fused) for fused in (True, False))
    for found, expected in zip(fused, plain, strict=True):
        assert torch.equal(found, expected), (
            f"{int((found != expected).sum())} bytes of {found.numel()} differ"
        )


SLOTS = [6, 13, 0, 19, 7, 12, 3]


ENCODED = tuple(f"{n}_{e}" for e, names in scheme.encoders().items() for n in names if n in ENCODERS)
"""Formats by each of their encoders."""


@pytest.mark.parametrize(
    ("kv_format", "packing"),
    rotated([*dict.fromkeys(("nvfp4", *scheme.fitting(*ONE_HEAD), *ENCODED))], ["nhd", "hnd"]),
)
def test_bytes_are_those_of_the_format(kv_format: str, packing: str) -> None:
    compare(kv_format, packing, {"k": values(1), "v": values(2)}, SLOTS)


@pytest.mark.parametrize("kv_format", ["nvfp4+kmean", "k8v4+kmean", "mxfp4+kmean", "fp32+kmean"])
def test_a_mean_is_subtracted_from_keys(kv_format: str) -> None:
    compare(kv_format, "hnd", {"k": values(1), "v": values(2)}, SLOTS)


SHAPES = [(5, (80, 16)), (1, (128, 128)), (2, (256, 64)), (12, (32, 32))]
"""Heads, and the widths of K and V."""


@pytest.mark.parametrize(("shape", "dtype"), rotated(SHAPES, [torch.float32, torch.float16, torch.bfloat16]))
def test_any_shape_dtype_and_stride(shape: tuple[int, tuple[int, int]], dtype: torch.dtype) -> None:
    """Heads before tokens in memory, as models hand them over, and values of every compute dtype."""
    heads, dims = shape
    k, v = (values(i, 7, heads, dim).to(dtype) for i, dim in enumerate(dims))
    k = k.transpose(0, 1).contiguous().transpose(0, 1)
    assert heads == 1 or not k.is_contiguous()
    compare("k8v4", "hnd", {"k": k, "v": v}, SLOTS)
    compare("k8v4", "nhd", {"k": k.flip(-1).flip(-1)[..., :: dims[0] // 16], "v": v[..., :16]}, SLOTS)


@pytest.mark.parametrize("packing", ["nhd", "hnd"])
def test_negative_slots_store_nothing(packing: str) -> None:
    streams = {"k": values(1), "v": values(2)}
    compare("nvfp4", packing, streams, [-1, 13, 0, -1, 7, 12, -9])
    for written in (planes("nvfp4", packing, streams, [-1] * 7, fused=fused) for fused in (True, False)):
        assert all((plane == 0xFF).all() for plane in written)


@pytest.mark.parametrize("kv_format", ["nvfp4", "fp8_e4m3"])
def test_scales_may_differ_by_head(kv_format: str) -> None:
    streams = {"k": values(1), "v": values(2)}
    found = []
    for make in (HeadsAppend, Reference):
        target = pool(kv_format, "hnd")
        scale = torch.tensor([[0.5], [0.01], [3.0]], device=DEVICE)
        targets = {
            name: replace(entry, pages=replace(entry.pages, scale=scale))
            for name, entry in _targets(target.view(0)).items()
        }
        with np.errstate(all="ignore"):
            make(targets)({n: x.to(DEVICE) for n, x in streams.items()}, torch.tensor(SLOTS, device=DEVICE))
        found.append(target.view(0).streams["k"].planes)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*found, strict=True))


def smooth(seed: int, dim: int) -> Tensor:
    return torch.randn(7, HEADS, dim, generator=torch.Generator().manual_seed(seed)) * 10


@pytest.mark.parametrize("dim", [16, 96, 128])
def test_keys_are_rotated(dim: int) -> None:
    """Sums of a rotation have another order, so last bits of float32 may differ; in a block of 4-bit codes that moves
    few values, by one code."""
    streams = {"k": smooth(1, dim), "v": smooth(2, dim)}
    fused, plain = (
        planes("fp32+kmean+rot", "nhd", streams, SLOTS, fused=fused)[0].view(torch.float32)
        for fused in (True, False)
    )
    error = (fused.flatten(0, 1)[SLOTS] - plain.flatten(0, 1)[SLOTS]).abs()
    assert (error <= 2**-20 * streams["k"].norm(dim=-1, keepdim=True)).all()
    fused, plain = (planes("nvfp4+rot", "nhd", streams, SLOTS, fused=fused) for fused in (True, False))
    assert (fused[0] != plain[0]).float().mean() < 0.01 and torch.equal(fused[2], plain[2])


@pytest.mark.parametrize(("dim", "dtype"), rotated([80, 16, 128, 256], [torch.float32, torch.bfloat16]))
def test_queries_are_rotated(dim: int, dtype: torch.dtype) -> None:
    q_THD = smooth(3, dim).to(dtype).transpose(0, 1).contiguous().transpose(0, 1).to(DEVICE)
    exact = transform.rotate(q_THD.double())
    step = torch.finfo(dtype).eps * exact.abs()
    for found in (rotate_twin(q_THD), rotate(q_THD)):
        assert found.dtype == dtype and found.shape == q_THD.shape
        assert (
            (found.double() - exact).abs() <= step + 2**-20 * q_THD.double().norm(dim=-1, keepdim=True)
        ).all()
    if dtype == torch.float32:
        assert (rotate_twin(rotate_twin(q_THD)) - q_THD).abs().max() < 1e-4


NEVER = [-1] * 7
MIXED, MIXED_EXACT = [-1, 13, 0, -1, 7, -9, 3], [-1, 7, -8, 3, 9, 14, -1]
"""Of each pair of signs there is a token."""


def once(
    kv_format: str,
    places: tuple[str, str, str],
    streams: dict[str, Tensor],
    slots: list[list[int]],
    *,
    fused: bool,
) -> list[Tensor]:
    """The bytes of pages, then of exact pages, after one launch or two."""
    packing, exact_packing, exact_format = places
    exact = pool(exact_format, exact_packing)
    target = pool(kv_format, packing)
    slots_T, exact_slots_T = (torch.tensor(of_pages, device=DEVICE) for of_pages in slots)
    targets = _targets(target.view(0), exact.view(0))
    assert HeadsAppend.serves(targets)
    with np.errstate(all="ignore"):
        if fused:
            HeadsAppend(targets)(streams, slots_T, exact_slots_T)
        else:
            HeadsAppend(_targets(target.view(0)))(streams, slots_T)
            HeadsAppend(_targets(exact.view(0)))(streams, exact_slots_T)
    return bytes_of(target) + bytes_of(exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_format", "places"),
    [
        ("nvfp4+kmean+rot", ("hnd", "nhd", "bf16")),
        ("nvfp4_amax", ("nhd", "nhd", "fp32")),
        ("fp8_e4m3+kmean", ("hnd", "nhd", "bf16")),
        ("mxfp4+rot", ("nhd", "hnd", "bf16")),
        ("k8v4+none", ("hnd", "hnd", "fp32")),
        ("bf16", ("hnd", "nhd", "bf16")),
    ],
)
def test_exact_pages_are_filled_in_the_same_launch(kv_format: str, places: tuple[str, str, str]) -> None:
    """Byte for byte what two launches store, of strided K and V, whichever slots a token has."""
    k, v = values(1).transpose(0, 1).contiguous().transpose(0, 1), values(2).repeat(1, 1, 2)[..., ::2]
    assert not k.is_contiguous() and not v.is_contiguous()
    streams = {"k": k.to(DEVICE), "v": v.to(DEVICE)}
    for slots, exact_slots in ((MIXED, MIXED_EXACT), (NEVER, MIXED_EXACT), (MIXED, NEVER)):
        found, expected = (
            once(kv_format, places, streams, [slots, exact_slots], fused=fused) for fused in (True, False)
        )
        assert all(map(torch.equal, found, expected)), (slots, exact_slots)
        assert all((plane == 0xFF).all() for plane in found[-2:]) == (exact_slots == NEVER)
        assert all((plane == 0xFF).all() for plane in found[:-2]) == (slots == NEVER)


@pytest.mark.parametrize(
    ("exact_slots", "dims"), [([0, 7, 18, 3, 9, 14, 5], (DIM, DIM)), (MIXED_EXACT, (128, 64))]
)
def test_exact_pages_hold_what_the_model_made(exact_slots: list[int], dims: tuple[int, int]) -> None:
    """By the kernel, by the definition, and by the pool's own write; a launch without exact slots leaves them alone."""
    streams = {name: values(i, dim=dim) for i, (name, dim) in enumerate(zip("kv", dims, strict=True))}
    places = torch.tensor(SLOTS, device=DEVICE), torch.tensor(exact_slots, device=DEVICE)
    for make in (HeadsAppend, Reference, None):
        exact = pool("bf16", "nhd", dims)
        target = pool("fp8_e4m3+kmean", "hnd", dims, exact=exact)
        write = make(_targets(target.view(0), exact.view(0))) if make else partial(target.write, 0)
        given = {name: x.to(DEVICE) for name, x in streams.items()}
        with np.errstate(all="ignore"):
            write(given, places[0])
            assert all((plane == 0xFF).all() for plane in bytes_of(exact))
            write(given, *places)
        for name, x_THD in streams.items():
            rows = exact.view(0).streams[name].planes[0].flatten(0, 1).cpu()
            for x_HD, slot in zip(x_THD, exact_slots, strict=True):
                assert slot < 0 or torch.equal(rows[slot].view(torch.int16), x_HD.view(torch.int16))
            empty = [slot for slot in range(len(rows)) if slot not in exact_slots]
            assert (rows[empty].view(torch.int16) == -1).all()


def refused() -> Iterator[dict[str, Target]]:
    """Layers that the kernel leaves to the reference."""
    good = _targets(pool("nvfp4", "hnd").view(0))
    k, v = good["k"], good["v"]
    yield {"k": k}
    yield {"latent": k, "v": v}
    yield {"k": k, "v": replace(v, transforms=(transform.get("rot"),))}
    yield {"k": replace(k, transforms=(transform.get("rot"), transform.get("kmean"))), "v": v}
    yield {"k": k, "v": _targets(pool("nvfp4", "hnd", heads=2).view(0))["v"]}
    yield {"k": replace(k, pages=replace(k.pages, dim=40)), "v": v}
    bf16, fp8 = (_targets(pool(name, "nhd").view(0))["k"].pages for name in ("bf16", "fp8_e4m3"))
    for exact in (
        (bf16, None),
        (None, bf16),
        (fp8, fp8),
        (bf16, _targets(pool("bf16", "hnd").view(0))["v"].pages),
    ):
        yield {name: replace(good[name], exact=pages) for name, pages in zip("kv", exact, strict=True)}


def test_what_the_kernel_cannot_take_is_left_to_the_reference() -> None:
    assert HeadsAppend.serves(_targets(pool("nvfp4+kmean+rot", "hnd").view(0)))
    assert not any(map(HeadsAppend.serves, refused()))
    assert pool("nvfp4", "hnd").is_capturable == (DEVICE == "cuda")


def rope_of(tokens: int, width: int, dim: int, *, has_norm: bool) -> Rope:
    rng = torch.Generator().manual_seed(3)
    angles = torch.randn(tokens, width // 2, generator=rng).repeat(1, 2)
    norms = [1 + torch.randn(dim, generator=rng) / 4 for _ in range(2 * has_norm)]
    cos, sin, *norms = [x.to(DEVICE) for x in (angles.cos(), angles.sin(), *norms)]
    return Rope(cos, sin, tuple(norms), 1e-6, 0.5 if has_norm else 0.0)


ROPES = [((96, 96), 32), ((64, 64), 20), ((32, 32), 32), ((512, 64), 512), ((80, 256), 80)]
"""Values of a head of K and of V, and how many of K's are rotated. Wide heads take several programs."""


@pytest.mark.parametrize(
    ("shape", "has_norm", "keeps", "kv_format"),
    [
        (ROPES[0], False, False, "fp32"),
        (ROPES[0], True, True, "nvfp4+kmean+rot"),
        (ROPES[1], True, False, "fp8_e4m3"),
        (ROPES[1], False, True, "fp32"),
        (ROPES[2], False, False, "nvfp4"),
        (ROPES[2], True, True, "fp32"),
        (ROPES[3], True, True, "nvfp4"),
        (ROPES[4], False, False, "fp32"),
    ],
)
def test_rotation_of_queries_and_keys(
    shape: tuple[tuple[int, int], int], has_norm: bool, keeps: bool, kv_format: str
) -> None:
    """In the launch that stores keys, as by the book; rows of padding have no slot, and their queries rotate too."""
    dims, width = shape
    rng = torch.Generator().manual_seed(width)
    stored, rows, q_heads = 7, 9, 7
    # As one product makes them.
    parts = [q_heads * dims[0], HEADS * dims[0], HEADS * dims[1]]
    wide = torch.randn(rows, sum(parts), generator=rng).to(DEVICE).split(parts, 1)
    q, k, v = (x.unflatten(1, (-1, dim)) for x, dim in zip(wide, (dims[0], *dims), strict=True))
    slots = torch.tensor([6, -1, 0, 19, 7, -1, 3], device=DEVICE)
    exact_slots = torch.tensor([1, 2, -1, 3, 4, -1, 5], device=DEVICE)
    rope, found = rope_of(rows, width, dims[0], has_norm=has_norm), []
    for make in (HeadsAppend, Reference):
        exact = pool("fp32", "nhd", dims)
        target = pool(kv_format, "hnd", dims, exact=exact)
        write = make(_targets(target.view(0), exact.view(0)))
        streams = {"k": k[:stored], "v": v[:stored]}
        with np.errstate(all="ignore"):
            q_out, out = write.append_with_rope(q, streams, slots, exact_slots, rope, keeps_keys=keeps)
        assert "k" in out if keeps or make is Reference else out.keys() == {"v"}
        kept = [q_out, out["k"]] if keeps else [q_out]
        found.append((kept, bytes_of(exact), bytes_of(target)))
    (kept, exact_bytes, stored_bytes), (expected, expected_exact, expected_bytes) = found
    for x, y in zip(kept, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=2e-6)
    for plane, expected_plane in zip(exact_bytes, expected_exact, strict=True):
        x, y = plane.view(torch.float32), expected_plane.view(torch.float32)
        assert torch.equal(x.isnan(), y.isnan())  # what is not stored stays poisoned
        torch.testing.assert_close(x.nan_to_num(), y.nan_to_num(), atol=2e-6, rtol=2e-6)
    if kv_format != "fp32":  # last bits decide few codes
        differing = [
            (x != y).float().mean().item() for x, y in zip(stored_bytes, expected_bytes, strict=True)
        ]
        assert max(differing) < 0.01


def test_a_rehearsal_compiles_for_few_and_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    target, (q, k) = pool("fp32", "hnd", (128, 128)), (values(i, 7, dim=128).to(DEVICE) for i in range(2))
    write, launched = HeadsAppend(_targets(target.view(0))), list[int]()
    slots = torch.arange(7, device=DEVICE)
    monkeypatch.setattr(write, "_launches", lambda *_, num_warps, **__: launched.append(num_warps))
    few, many = write._warps
    for is_rehearsal, expected in ((False, [few]), (True, [few, many])):
        monkeypatch.setattr(append.ahead, "is_rehearsal", lambda: is_rehearsal)  # noqa: B023
        write.append_with_rope(
            q, {"k": k, "v": k}, slots, None, rope_of(7, 128, 128, has_norm=False), keeps_keys=False
        )
        assert sorted(launched, reverse=True) == expected
        launched.clear()


@pytest.mark.parametrize("pair", ["halves", "neighbours"])
def test_rotation_turns_halves(pair: str) -> None:
    """A quarter turn: cos 0 and sin 1 exchange the halves of a head, the upper one with its sign changed."""
    x = torch.arange(1.0, 9.0, device=DEVICE).view(1, 1, 8)
    rope = Rope(torch.zeros(1, 8, device=DEVICE), torch.ones(1, 8, device=DEVICE))
    expected = [-5, -6, -7, -8, 1, 2, 3, 4] if pair == "halves" else [-2, 1, -4, 3, -6, 5, -8, 7]
    is_equal = torch.equal(naive.apply_rope(x, rope, None).flatten().cpu(), torch.tensor(expected).float())
    assert is_equal == (pair == "halves")


def test_rotation_where_the_kernel_cannot() -> None:
    """Queries of another dtype than positions: by the book, and stored by the kernel."""
    q, k, v = (torch.randn(3, n, 32, device=DEVICE) for n in (4, HEADS, HEADS))
    target = pool("fp32", "hnd", (32, 32))
    write, rope = HeadsAppend(_targets(target.view(0))), rope_of(3, 32, 32, has_norm=False)
    half = replace(rope, cos_TR=rope.cos_TR.bfloat16(), sin_TR=rope.sin_TR.bfloat16())
    slots = torch.tensor([0, 1, 2], device=DEVICE)
    q_out, out = write.append_with_rope(q, {"k": k, "v": v}, slots, None, half, keeps_keys=False)
    assert torch.equal(q_out, naive.apply_rope(q, half, None)) and torch.equal(
        out["k"], naive.apply_rope(k, half, None)
    )
    found = target.view(0).streams["k"].planes[0][0, :, :3].transpose(0, 1)
    assert torch.equal(found, out["k"])


def test_every_format_has_its_encoders() -> None:
    assert ENCODERS.keys() == set(scheme.fitting(*ONE_HEAD)) & set(formats.names())
    assert all(encoders.keys() == set(formats.get(name).encoders) for name, encoders in ENCODERS.items())


def hard(case: int) -> Tensor:
    """Blocks among whose scales there is no clear winner, or which test the ends of what scales can be."""
    rng = torch.Generator().manual_seed(case)
    if case == 0:  # of every magnitude, subnormal scales and saturating ones included
        return torch.randn(64, HEADS, DIM, generator=rng) * torch.logspace(-8, 5, 64).view(-1, 1, 1)
    if case == 1:  # few different values, so that many errors are equal
        return torch.randint(-48, 49, (64, HEADS, DIM), generator=rng) / 8.0
    if case == 2:  # one loud value in a block
        x = torch.randn(64, HEADS, DIM, generator=rng)
        x[..., ::16] *= torch.rand(64, HEADS, DIM // 16, generator=rng) * 20
        return x
    # any bits at all, NaN and infinities among them; those that a GPU would not keep as they are are left out
    bits = torch.randint(-(1 << 31), 1 << 31, (64, HEADS, DIM), generator=rng).int()
    return bits.view(torch.float32).bfloat16().float().nan_to_num(nan=1.0)


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("kv_format", ENCODED)
def test_encoders_agree_with_the_definition_on_hard_blocks(
    kv_format: str, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PAGES", 16)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    compare(kv_format, "hnd", {"k": hard(case), "v": hard(case).flip(0)}, slots)


def printed(program: str) -> list[list[str]]:
    """What a program prints that compiles kernels as for a GPU, which none is needed for: the words of each line."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment, source = os.environ | {"TRITON_INTERPRET": "0"}, Path(nibble.__file__).parent.parent
    run = subprocess.run(command, cwd=source, env=environment, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [line.split() for line in run.stdout.splitlines()]


COMPILED = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nibble.kernels.append import triton as append
from nibble.kernels.codecs import ENCODERS

kernel, dim = append.append_heads_kernel, 128
names = kernel.arg_names
exact = dict(exact_slots="*i64", exact_k="*bf16", exact_v="*bf16")
pointers = dict(k="*bf16", v="*bf16", slots="*i64", k_scale_H="*fp32", v_scale_H="*fp32", k_mean_HD="*fp32", **exact)
for arch in (89, 90):
    for name, widths in (("nvfp4", (64, 8)), ("mxfp4", (64, 4)), ("fp8_e4m3", (128,))):
        encode = next(iter(ENCODERS[name].values()))
        fixed = dict(K_ENCODE=encode, V_ENCODE=encode, K_WIDTHS=widths, V_WIDTHS=widths, K_DIM=dim, V_DIM=dim,
                     ROTATE=dim, HEADS=8, PAGE=64, HEADS_FIRST=True, EXACT_HEADS_FIRST=False, R=8,
                     PDL=arch >= 90, ROPE=None, Q_HEADS=None, OFFSET=0.0,
                     **dict.fromkeys(("q", "q_out", "k_out", "cos", "sin", "q_norm_D", "k_norm_D", "eps")))
        planes = dict.fromkeys(("k_planes", "v_planes"), ("*u8",) * len(widths))
        for absent in (dict.fromkeys(exact), {}):
            constants = {**fixed, **absent}
            signature = {n: "constexpr" if n in constants else {**pointers, **planes}.get(n, "i32") for n in names}
            paths = [(i, *j) for i, n in enumerate(names) if n not in constants
                     for j in ([(part,) for part in range(len(widths))] if n in planes else [()])]
            source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()},
                               {path: [["tt.divisibility", 16]] for path in paths})
            ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=4)).asm["ptx"]
            print(name, len(re.findall("ld.global.b64", ptx)), len(re.findall("ld.global", ptx)),
                  len(re.findall("st.global", ptx)), len(re.findall("st.global.v4.b32", ptx)))
"""


@pytest.mark.slow
def test_exact_pages_cost_a_slot_and_a_store_of_whole_rows() -> None:
    """Compiled as for a GPU, which none is needed for: of K and V each 8 values of a thread go in one store."""
    lines = printed(COMPILED)
    assert len(lines) == 12
    for without, both in zip(lines[::2], lines[1::2], strict=True):
        assert [int(b) - int(a) for a, b in zip(without[1:], both[1:], strict=True)] == [1, 1, 2, 2], both


TURNED = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nibble.kernels.append import triton as append
from nibble.kernels.codecs import ENCODERS

kernel, dim = append.append_heads_kernel, 128
names = kernel.arg_names
pointers = dict(k="*bf16", v="*bf16", slots="*i64", k_scale_H="*fp32", v_scale_H="*fp32", q="*bf16", q_out="*bf16",
                cos="*bf16", sin="*bf16", eps="fp32", q_norm_D="*bf16", k_norm_D="*bf16")
for name, widths in (("nvfp4", (64, 8)), ("bf16", (128,))):
    encode = next(iter(ENCODERS[name].values()))
    planes = dict.fromkeys(("k_planes", "v_planes"), ("*bf16" if name == "bf16" else "*u8",) * len(widths))
    fixed = dict(K_ENCODE=encode, V_ENCODE=encode, K_WIDTHS=widths, V_WIDTHS=widths, K_DIM=dim, V_DIM=dim,
                 ROTATE=0, HEADS=8, PAGE=64, HEADS_FIRST=True, EXACT_HEADS_FIRST=False, R=8, PDL=True, OFFSET=1.0,
                 **dict.fromkeys(("exact_slots", "exact_k", "exact_v", "k_mean_HD", "k_out")))
    norms = dict.fromkeys(("q_norm_D", "k_norm_D"))
    plain = dict.fromkeys(("q", "q_out", "cos", "sin", "eps", "ROPE", "Q_HEADS"))
    for variant in ({**norms, **plain}, {**norms, "ROPE": dim, "Q_HEADS": 32}, {"ROPE": dim, "Q_HEADS": 32}):
        constants = {**fixed, **variant}
        signature = {n: "constexpr" if n in constants else {**pointers, **planes}.get(n, "i32") for n in names}
        paths = [(i, *j) for i, n in enumerate(names) if n not in constants and n not in ("eps", "stored")
                 for j in ([(part,) for part in range(len(widths))] if n in planes else [()])]
        source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()},
                           {path: [["tt.divisibility", 16]] for path in paths})
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4)).asm["ptx"]
        print(name, len(re.findall("bar.sync", ptx)), len(re.findall("ld.global.b16", ptx)))
"""


@pytest.mark.slow
def test_rotation_moves_nothing_between_threads() -> None:
    """Compiled as for a GPU: as many barriers as without but one, and no load of single values."""
    lines = [[int(count) for count in line[1:]] for line in printed(TURNED)]
    for (barriers, _), *variants in (lines[:3], lines[3:]):
        assert all(own <= barriers + 1 and not narrow for own, narrow in variants), lines
