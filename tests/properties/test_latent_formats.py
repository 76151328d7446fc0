"""Formats of MLA's latents and of index keys: bytes, the record of FlashMLA, error bounds, and damage that shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nibble import formats
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout, names
from nibble.cache.pool import PagedPool
from nibble.cache.scales import ONE
from nibble.errors import ConfigError
from nibble.formats import KVFormat, scheme
from nibble.model_spec import HEADS, INDEX, LATENT, LATENTS, Stream

SHAPE = LATENTS[0]
BYTES = {
    "bf16": 1152, "fp8_e4m3": 576, "fp8_ds_mla": 656, "nvfp4_ds_mla": 416, "nvfp4_ds_mla_fp8rope": 352,
    "fp4_mx16": 324, "nvfp4": 324,
}  # fmt: skip
ERRORS = {
    "bf16": 0.003,
    "fp8_e4m3": 0.03,
    "fp8_ds_mla": 0.03,
    "nvfp4_ds_mla": 0.1,
    "nvfp4_ds_mla_fp8rope": 0.1,
    "fp4_mx16": 0.15,
    "nvfp4": 0.1,
}
ONE_SCALE = torch.tensor(1.0)


def latents(tokens: int, stream: Stream = SHAPE) -> Tensor:
    return torch.randn(tokens, 1, stream.dim, generator=torch.Generator().manual_seed(3))


def codec(name: str, stream: Stream = SHAPE) -> KVFormat:
    return formats.get(name).bound(stream)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_and_errors(name: str) -> None:
    fmt, x = codec(name), latents(50)
    planes = fmt.encode(x, ONE_SCALE)
    assert fmt.bytes_per_token(SHAPE) == BYTES[name] == sum(plane[0].nbytes for plane in planes)
    for plane, spec in zip(planes, fmt.planes(SHAPE), strict=True):
        assert plane.shape == (50, *spec.shape) and plane.dtype == spec.torch_dtype
    found = fmt.decode(planes, ONE_SCALE)
    assert (found - x).norm() < ERRORS[name] * x.norm()
    if name.endswith("ds_mla"):
        assert torch.equal(found[..., -64:], x[..., -64:].bfloat16().float()), (
            "rotary values are kept in BF16"
        )


def test_the_record_is_flash_mlas() -> None:
    """512 E4M3 values, four FP32 scales, 64 BF16 values, token after token in a page of 64; scales as its tests have
    them: amax / 448, at least 1e-4, up to the next power of two."""
    x = latents(70)
    x[3, :, 128:256] = 0.0
    layout = CacheLayout((LayerLayout(0, (StreamLayout(SHAPE, "fp8_ds_mla"),)),), 64, "record")
    pool = PagedPool(layout, 2, ONE)
    pool.write(0, {LATENT: x}, torch.arange(70))
    data = pool.view(0).streams[LATENT].planes[0]
    records = torch.as_strided(data.view(torch.uint8), (128, 656), (656, 1), 0)[:70]
    scales = torch.exp2(
        torch.clamp(x[:, 0, :512].unflatten(-1, (4, 128)).abs().amax(-1) / 448, min=1e-4).log2().ceil()
    )
    values = (x[:, 0, :512].unflatten(-1, (4, 128)) / scales[..., None]).flatten(1).to(torch.float8_e4m3fn)
    assert torch.equal(records[:, :512], values.view(torch.uint8))
    assert torch.equal(records[:, 512:528], scales.view(torch.uint8))
    assert torch.equal(records[:, 528:], x[:, 0, 512:].bfloat16().contiguous().view(torch.uint8))
    assert pool.nbytes == 2 * 64 * 656


def test_the_record_of_fp8_rotary_values_is_flash_mlas() -> None:
    """256 bytes of E2M1 pairs, 64 E4M3 rotary values without a scale, 32 E4M3 block scales, which stand for themselves:
    the record of vllm-project/FlashMLA's pull request 18, built here from its description."""
    x = latents(70)
    x[5, 0, 512] = 1e6  # saturates
    layout = CacheLayout(
        (LayerLayout(0, (StreamLayout(SHAPE, "nvfp4_ds_mla_fp8rope", "amax"),)),), 64, "record"
    )
    pool = PagedPool(layout, 2, ONE)
    pool.write(0, {LATENT: x}, torch.arange(70))
    data = pool.view(0).streams[LATENT].planes[0]
    records = torch.as_strided(data, (128, 352), (352, 1), 0)[:70]
    blocks = x[:, 0, :512].unflatten(-1, (32, 16))
    scales = (blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    values = (blocks / scales.float()[..., None]).flatten(1)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    pairs = records[:, :256]
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).long()
    signed = grid[codes & 7] * (1 - 2 * (codes >> 3))
    nearest = (values[..., None] - torch.cat((grid, -grid))).abs().amin(-1)
    assert torch.allclose((values - signed).abs(), nearest, atol=1e-6), (
        "nearest values of the grid, low half first"
    )
    rotary = x[:, 0, 512:].clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(records[:, 256:320], rotary.view(torch.uint8))
    assert torch.equal(records[:, 320:], scales.view(torch.uint8))
    assert pool.nbytes == 2 * 64 * 352


@pytest.mark.parametrize("kv_format", scheme.fitting(*LATENTS))
def test_every_packing_holds_the_same(kv_format: str) -> None:
    fmt = scheme.parse(kv_format)
    entries = tuple(StreamLayout.of(stream, fmt.format_of(stream)) for stream in LATENTS)
    x, index = latents(40), latents(40, LATENTS[1])
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:40]
    seen = []
    for name in names():
        layout = CacheLayout((LayerLayout(0, entries),), 16, name)
        pool = PagedPool(layout, 4, ONE, poison=True)
        pool.write(0, {LATENT: x, INDEX: index}, slots)
        assert pool.nbytes == 64 * layout.bytes_per_token
        assert layout.layers[0].format_key == entries[0].format, "attention does not read index keys"
        streams = pool.view(0).streams.values()
        seen.append([stream.gather_reference(torch.arange(4)[None])[0, slots] for stream in streams])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_index_keys() -> None:
    stream, x = LATENTS[1], latents(30, LATENTS[1]) * 10
    for kv_format in scheme.fitting(*LATENTS):
        plain = formats.get(kv_format).plain
        assert scheme.parse(kv_format).format_of(stream).name == (kv_format if plain else "index_fp8")
    fmt = codec("index_fp8", stream)
    assert fmt.bytes_per_token(stream) == 132
    planes = fmt.encode(x, ONE_SCALE)
    assert torch.equal(planes[1].log2(), planes[1].log2().round()), "scales are powers of two"
    assert (fmt.decode(planes, ONE_SCALE) - x).norm() < 0.03 * x.norm()
    assert fmt.decode(fmt.encode(torch.zeros(1, 1, 128), ONE_SCALE), ONE_SCALE).count_nonzero() == 0
    assert "stores index keys" in (fmt.refuses(SHAPE) or "")
    with pytest.raises(ConfigError, match="unknown KV format"):
        scheme.parse("index_fp8")


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla", "nvfp4_ds_mla_fp8rope"])
def test_what_is_stored_must_be_a_latent_of_the_right_width(name: str) -> None:
    fmt = formats.get(name)
    assert "stores the latent of MLA" in (fmt.refuses(HEADS[0]) or "")
    assert fmt.refuses(Stream(LATENT, 1, 256 + 32, 32)) is None
    assert fmt.refuses(Stream(LATENT, 1, 512)) is None
    assert "not a multiple of" in (fmt.refuses(Stream(LATENT, 1, 72 + 64, 64)) or "")
    x = latents(3, Stream(LATENT, 1, 512))
    bound = fmt.bound(Stream(LATENT, 1, 512))
    planes = bound.encode(x, ONE_SCALE)
    assert len(planes) == 2, "no plane of rotary values where there are none"
    assert bound.decode(planes, ONE_SCALE).shape == x.shape


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla", "nvfp4_ds_mla_fp8rope"])
def test_damage_shows_and_stays_where_it_is(name: str) -> None:
    fmt, x = codec(name), latents(4)
    x[1, 0, 5], x[2, 0, 5], x[3, 0, 570] = float("nan"), float("inf"), float("nan")
    found = fmt.decode(fmt.encode(x, ONE_SCALE), ONE_SCALE)
    block = fmt.block
    assert found[1, 0, :block].isnan().all() and found[1, 0, block:].isfinite().all()
    assert found[2].isfinite().all() and found[2, 0, 5] > 1
    assert found[3].isnan().sum() == 1
