"""FlashInfer's kernels over Nibble's own pools: the bytes are the same, so the data and the check of a result are too.

FlashInfer is optional; `flashinfer()` says why it is missing. Its planning on the host is left out of what is timed.
Each maker returns what can be asked of a cache, by name.

Shape suffixes: T tokens, B requests, N pages of a request, P pages in order, H query heads, G KV heads, D values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from paged import Attention, Cache
from torch import Tensor

import gpu

TENSOR_CORES, FA3, XQA = "FlashInfer", "FlashInfer fa3", "FlashInfer XQA"
PLACES = ((64, "hnd"), (16, "nhd"))
"""Page size and packing: Nibble's, and the one that FlashInfer is measured with most. The better one counts."""
WORKSPACE = 512 << 20
STORED = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "nvfp4": torch.uint8}
"""Schemes that FlashInfer reads, and what it takes each for."""


@cache
def flashinfer() -> ModuleType | str:
    """The package, or why there is none."""
    if not torch.cuda.is_available():
        return "FlashInfer: no CUDA GPU, so its columns are missing"
    try:
        import flashinfer as found
    except ImportError as error:
        return f"FlashInfer cannot be imported ({error}), so its columns are missing"
    return found


def versions() -> tuple[str, ...]:
    """Versions for a report."""
    package = flashinfer()
    return gpu.versions(*([] if isinstance(package, str) else [f"FlashInfer {package.__version__}"]))


def hopper() -> bool:
    """Whether the kernels that FlashInfer has for SM90 alone run here."""
    return torch.cuda.get_device_capability() == (9, 0)


@cache
def _workspace(user: str) -> Tensor:
    """Scratch memory, zeros at first; XQA keeps counters in its own, which nobody else may write."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")


def _layout(cached: Cache) -> str:
    return cached.packing.upper()


def _planes(cached: Cache, layer: int) -> dict[str, Any]:
    """The cache and, where it has them, block scales, as FlashInfer's run() takes them."""
    k, v = (cached.view(layer).streams[name].planes for name in "kv")
    if len(k) == 1:
        return {"paged_kv_cache": (k[0], v[0])}
    scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_sf": (k[1], v[1])}
    return {"paged_kv_cache": (k[0], v[0]), **scales}


def _pages(cached: Cache) -> tuple[Tensor, Tensor, Tensor]:
    """indptr [B + 1], indices [P], last_page_len [B] of all requests' pages."""
    size, device = cached.page_size, cached.page_table_BN.device
    counts = [-(-length // size) for length in cached.lens]
    indptr = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    indices = torch.cat([row[:count] for row, count in zip(cached.page_table_BN, counts, strict=True)])
    last = torch.tensor([(length - 1) % size + 1 for length in cached.lens], dtype=torch.int32)
    return indptr, indices, last.to(device)


def decode(cached: Cache) -> Mapping[str, Callable[[], Attention]]:
    """FlashInfer's ways to decode over a cache, by name; each is planned, and compiled, when it is called.

    Its fa3 is left out: over one query token it takes four times as long as the others on an H200.
    """
    stored = STORED.get(cached.scheme)
    if stored is None:
        return {}
    found = {TENSOR_CORES: partial(_wrapped, cached, stored)}
    if stored is not torch.uint8:  # on SM90 it reads no 4-bit cache
        found[XQA] = partial(_xqa, cached)
    return found


def _wrapped(cached: Cache, stored: torch.dtype) -> Attention:
    package: Any = flashinfer()
    heads = cached.heads
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
        _workspace("wrappers"), _layout(cached), use_tensor_cores=True
    )
    wrapper.plan(
        *_pages(cached), heads.q, heads.kv, heads.dim, cached.page_size,
        q_data_type=torch.bfloat16, kv_data_type=stored,
    )  # fmt: skip
    return lambda q_THD, layer: wrapper.run(q_THD, **_planes(cached, layer))


def _xqa(cached: Cache) -> Attention:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    lens_B = torch.tensor(cached.lens, dtype=torch.int32, device=cached.page_table_BN.device)
    scale, layout, longest = cached.spec.scale, _layout(cached), max(cached.lens)

    def run(q_THD: Tensor, layer: int) -> Tensor:
        k, v = (cached.view(layer).streams[name].planes[0] for name in "kv")
        return xqa_batch_decode_with_kv_cache(
            q_THD, (k, v), _workspace("xqa"), cached.page_table_BN, lens_B, longest,
            bmm1_scale=scale, bmm2_scale=1.0, kv_layout=layout,
        )  # fmt: skip

    return run


def prefill(cached: Cache, new: int) -> Mapping[str, Callable[[], Attention]]:
    """FlashInfer's paged prefill of the last `new` tokens of each request, over a bf16 cache."""
    names = {TENSOR_CORES: "fa2", FA3: "fa3"} if hopper() else {TENSOR_CORES: "fa2"}
    return {name: partial(_prefill, cached, new, backend) for name, backend in names.items()}


def _prefill(cached: Cache, new: int, backend: str) -> Attention:
    package: Any = flashinfer()
    heads = cached.heads
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(
        _workspace("wrappers"), _layout(cached), backend=backend
    )
    rows = torch.arange(len(cached.lens) + 1, dtype=torch.int32, device=cached.page_table_BN.device) * new
    wrapper.plan(
        rows, *_pages(cached), heads.q, heads.kv, heads.dim, cached.page_size, causal=True,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda q_THD, layer: wrapper.run(q_THD, **_planes(cached, layer))


APPENDS = ("bf16", "nvfp4_amax")
"""Schemes that FlashInfer has an append for. Its nvfp4 fits scales to the largest magnitude of a block."""


def append(cached: Cache, new: int) -> Callable[[Tensor, Tensor, int], object]:
    """(k_THD, v_THD, layer): FlashInfer's append of the last `new` tokens of each request, quantising for nvfp4."""
    package: Any = flashinfer()
    device = cached.page_table_BN.device
    owners_T = torch.arange(len(cached.lens), device=device).repeat_interleave(new).int()
    positions_T = torch.cat([torch.arange(length - new, length) for length in cached.lens]).int().to(device)
    indptr, indices, last = _pages(cached)
    where = {"kv_indices": indices, "kv_indptr": indptr, "kv_last_page_len": last}
    call = package.append_paged_kv_cache
    if cached.scheme != "bf16":
        call = package.nvfp4_quantize_append_paged_kv_cache

    def run(k_THD: Tensor, v_THD: Tensor, layer: int) -> None:
        planes = _planes(cached, layer)
        call(k_THD, v_THD, owners_T, positions_T, **planes, **where, kv_layout=_layout(cached))

    return run


def ready(
    ways: Mapping[str, Callable[[], Attention]], q_THD: Tensor, where: str
) -> Iterator[tuple[str, Attention]]:
    """Each way once it is planned and has run once; what FlashInfer cannot do is said, and left out."""
    for name, plan in ways.items():
        try:
            attention = plan()
            attention(q_THD, 0)
            torch.cuda.synchronize()
        except Exception as error:  # of all kinds: what a package refuses, and how, is its own business
            print(f"{name}, {where}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        yield name, attention
