"""How planes lie in a page, against the published layouts."""

from __future__ import annotations

import pytest
import torch

from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import ONE
from nibble.formats import scheme
from nibble.kernels.append import dequantize_pages
from nibble.model_spec import Stream


@pytest.mark.parametrize("kv_format", ["nvfp4", "k8v4"])
def test_block_scales_of_v_are_interleaved_as_trtllm_has_them(kv_format: str) -> None:
    """FlashInfer's nvfp4_quantize_paged_kv_cache lays scales [page, head, token, scale] of V out by
    reshape(P, H, T / 4, 4, 4, S / 4).permute(0, 1, 2, 4, 5, 3); K's stay in order, and so do all values."""
    streams = (Stream("k", 2, 128), Stream("v", 2, 128))
    chosen = scheme.parse(kv_format)
    entries = tuple(StreamLayout.of(stream, chosen.format_of(stream)) for stream in streams)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:50]
    x = {s.name: torch.randn(50, 2, 128, generator=torch.Generator().manual_seed(2)) for s in streams}
    pools = {}
    for packing in ("hnd", "trtllm"):
        pools[packing] = PagedPool(CacheLayout((LayerLayout(0, entries),), 16, packing), 4, ONE, poison=True)
        pools[packing].write(0, x, slots)
    plain, interleaved = (pool.view(0).streams for pool in pools.values())
    for a, b in zip(plain["k"].planes, interleaved["k"].planes, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    data, scales = (plane.view(torch.uint8) for plane in plain["v"].planes)
    swizzled = scales.reshape(4, 2, 4, 4, 4, 2).permute(0, 1, 2, 4, 5, 3).reshape(4, 2, 16, 8)
    assert torch.equal(data, interleaved["v"].planes[0].view(torch.uint8))
    assert torch.equal(swizzled, interleaved["v"].planes[1].view(torch.uint8)) and not torch.equal(
        swizzled, scales
    )
    table = torch.arange(4, dtype=torch.int32)[None]
    for name in ("k", "v"):
        wanted = plain[name].gather_reference(table)[0, slots]
        assert torch.equal(interleaved[name].gather_reference(table)[0, slots], wanted)
        assert torch.equal(dequantize_pages(interleaved[name].paged, table, torch.float32)[0, slots], wanted)
