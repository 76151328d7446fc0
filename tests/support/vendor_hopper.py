"""Stand-ins for FlashMLA and FlashAttention 3 and 4: the calls that adapters make, held to what the kernels ask, in plain torch.

Signatures are those of sgl-flash-mla 1.0.0 (and of FlashMLA's source of April 2026), of FlashAttention's hopper/ of
August 2026, and of vLLM 0.33.0. What is an error or a wrong answer there is an error here. No number is read from a
tensor where a CUDA graph may be recorded: one token to a request.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import vendor

BF16, INT = torch.bfloat16, torch.int32
RECORD = 656


@dataclass
class Calls:
    """ran: the kernels' arguments, by name. schedules: those that were made."""

    ran: list[dict[str, Any]] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)


def _causal(length: Tensor, longest: int, n: int) -> Tensor:
    """bool [n, longest]: of `length` keys, those that each of the last n tokens sees."""
    key = torch.arange(longest)
    return (key < length) & (key <= length - n + torch.arange(n)[:, None])


def _zeros_where_blind(out_nHD: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen.any(-1)[:, None, None], out_nHD, 0)


# FlashMLA


@dataclass
class FlashMLASchedMeta:
    config: tuple[Any, ...] | None = None
    lens_B: Tensor | None = None

    def used(self, config: tuple[Any, ...], lens_B: Tensor | None) -> None:
        if self.config is None:
            self.config, self.lens_B = config, lens_B
        assert self.config == config, "a schedule is for one shape"
        assert self.lens_B is lens_B, "a schedule is for the lengths that it was made for"


class _FlashMLA:
    def __init__(self, calls: Calls, legacy: bool) -> None:
        self.calls, self.legacy = calls, legacy

    def get_mla_metadata(self) -> tuple[FlashMLASchedMeta, None]:
        self.calls.schedules.append(FlashMLASchedMeta())
        return self.calls.schedules[-1], None

    def with_kvcache(
        self, q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
        tile_scheduler_metadata: FlashMLASchedMeta, num_splits: None = None, softmax_scale: float | None = None,
        causal: bool = False, is_fp8_kvcache: bool = False, indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None
        assert head_dim_v == 512 and softmax_scale is not None and q.dim() == k_cache.dim() == 4
        assert k_cache.shape[2] == 1 and q.shape[3] == 576 and q.stride(-1) == k_cache.stride(-1) == 1
        config = (
            *q.shape[:3],
            *k_cache.shape[1:3],
            causal,
            is_fp8_kvcache,
            None if indices is None else indices.shape[2],
        )
        tile_scheduler_metadata.used(config, cache_seqlens)
        self.calls.ran.append({"q": q.shape, "causal": causal, "k_cache": k_cache.dtype})
        if indices is None:
            assert block_table is not None and cache_seqlens is not None and not is_fp8_kvcache
            return self._dense(q, k_cache, block_table, cache_seqlens, softmax_scale, causal)
        return self._records(q, k_cache, indices, softmax_scale, causal, is_fp8_kvcache)

    def _dense(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        count, n = q.shape[:2]
        assert q.dtype in vendor.HALVES and k_cache.dtype is q.dtype and k_cache.shape[1:] == (64, 1, 576)
        assert (
            cache_seqlens.dtype is INT and cache_seqlens.is_contiguous() and cache_seqlens.shape == (count,)
        )
        assert block_table.dtype is INT and block_table.stride(-1) == 1 and len(block_table) == count
        out = q.new_empty(*q.shape[:3], 512)
        longest = block_table.shape[1] * 64
        for i in range(count):
            seen = _causal(cache_seqlens[i], longest, n if causal else 1).expand(n, -1)
            k = vendor._tokens(k_cache, block_table[i], longest)
            out[i] = _zeros_where_blind(vendor._attend(q[i], k, k[..., :512], scale, seen), seen)
        return out, q.new_empty(0)

    def _records(
        self, q: Tensor, k_cache: Tensor, indices: Tensor, scale: float, causal: bool, is_fp8: bool
    ) -> tuple[Tensor, Tensor]:
        assert is_fp8 and not causal and q.dtype is BF16 and q.shape[2] in {64, 128}
        assert k_cache.dtype in {torch.float8_e4m3fn, torch.uint8, torch.int8} and k_cache.shape[3] == RECORD
        assert k_cache.stride(1) == RECORD, "a page is one run of bytes"
        assert indices.dtype is INT and indices.shape[:2] == q.shape[:2] and indices.shape[2] % 64 == 0
        bytes_LR = k_cache.view(torch.uint8).flatten(0, 2)
        codes = bytes_LR[:, :512].view(torch.float8_e4m3fn).float().unflatten(1, (4, 128))
        latent = (codes * bytes_LR[:, 512:528].view(torch.float32)[..., None]).flatten(1)
        tokens = torch.cat((latent, bytes_LR[:, 528:].view(BF16).float()), 1)
        out = _chosen(q.flatten(0, 1), tokens[:, None], indices.flatten(0, 1), scale)
        return out.unflatten(0, q.shape[:2]), q.new_empty(0)

    def sparse_fwd(
        self, q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.ran.append({"q": q.shape, "kv": kv.shape})
        assert (
            q.dtype is kv.dtype is BF16
            and q.shape[2] == kv.shape[2] == 576
            and kv.shape[1] == 1
            and d_v == 512
        )
        assert q.shape[1] in {64, 128} and q.stride(-1) == kv.stride(-1) == 1
        assert indices.dtype is INT and indices.shape[:2] == (len(q), 1) and indices.shape[2] % 128 == 0
        out = _chosen(q, kv, indices[:, 0], sm_scale)
        return out, out.new_empty(0), out.new_empty(0)


def _chosen(q_THD: Tensor, tokens_L1D: Tensor, indices_TK: Tensor, scale: float) -> Tensor:
    """Nobody is -1 and nothing else: what any other number names is read."""
    rows = []
    for q_HD, own_K in zip(q_THD, indices_TK, strict=True):
        seen = (own_K != -1)[None]
        k = tokens_L1D[torch.where(seen[0], own_K, 0).long()]
        rows.append(_zeros_where_blind(vendor._attend(q_HD[None], k, k[..., :512], scale, seen), seen))
    return torch.cat(rows)


def _flash_mla(calls: Calls, kind: str) -> dict[str, dict[str, Any]]:
    """Modules of one package. kind: sgl (prebuilt), source (of April 2026), vllm, sglang; and those that will not do:
    half (sgl without its legacy half), late (source of September 2026), early (of 2025)."""
    legacy = kind in {"sgl", "half"}
    own = _FlashMLA(calls, legacy)

    def get_ops(use_legacy: bool) -> None:
        if kind == "half":
            raise RuntimeError("built with FLASH_MLA_BUILD_LEGACY=0")

    def flash_mla_with_kvcache(*args: Any, use_legacy: bool = False, **options: Any) -> Any:
        assert use_legacy, "dense decoding and Hopper are in the legacy half"
        return own.with_kvcache(*args, **options)

    def flash_mla_sparse_fwd(*args: Any, use_legacy: bool = False, **options: Any) -> Any:
        assert use_legacy
        return own.sparse_fwd(*args, **options)

    def late(q: Tensor, enable_batch_invariant: bool = False) -> None: ...

    content: dict[str, Any] = {
        "FlashMLASchedMeta": FlashMLASchedMeta,
        "get_mla_metadata": own.get_mla_metadata,
    }
    if legacy:
        content |= {
            "flash_mla_with_kvcache": flash_mla_with_kvcache,
            "flash_mla_sparse_fwd": flash_mla_sparse_fwd,
        }
        content |= {"get_ops": get_ops}
    else:
        content |= {"flash_mla_with_kvcache": own.with_kvcache, "flash_mla_sparse_fwd": own.sparse_fwd}
    if kind == "late":
        content["flash_mla_with_kvcache"] = late
    if kind == "early":
        del content["FlashMLASchedMeta"]
    where = {"vllm": "vllm.third_party.flashmla.flash_mla_interface", "sglang": "sgl_kernel.flash_mla"}
    return {where.get(kind, "flash_mla.flash_mla_interface"): content}


# FlashAttention 3 and 4

TILES = {64: (128, 192), 96: (128, 144), 128: (128, 176), 192: (96, 112, 128), 256: (64, 80)}
"""Keys of a tile, by the width of a head, of all kernels; 64 where values are latents."""


class _FA3:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: Tensor | None = None,
        cache_seqlens: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, return_softmax_lse: bool = False,
    ) -> Any:  # fmt: skip
        return self._attend(
            q, k_cache, v_cache, qv, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
            window_size, softcap, return_softmax_lse,
        )  # fmt: skip

    def _attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, qv: Tensor | None, cache_seqlens: Tensor | None,
        page_table: Tensor | None, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, softmax_scale: float | None,
        causal: bool, window_size: tuple[int, int], softcap: float, return_softmax_lse: bool,
        sinks: Tensor | None = None,
    ) -> Any:  # fmt: skip
        assert cache_seqlens is not None and page_table is not None and cu_seqlens_q is not None
        self.calls.ran.append(
            {"q": q.shape, "window_size": window_size, "softcap": softcap, "qv": qv is not None}
        )
        for x in (cache_seqlens, page_table, cu_seqlens_q):
            assert x.dtype is INT and x.stride(-1) == 1
        count, dim, width = len(cache_seqlens), q.shape[2], v_cache.shape[3]
        assert len(cu_seqlens_q) == count + 1 and len(page_table) == count and max_seqlen_q and softmax_scale
        assert q.dtype in vendor.HALVES and k_cache.dtype is v_cache.dtype is q.dtype, "one dtype for all"
        assert all(x.stride(-1) == 1 and x.stride(0) % 8 == 0 for x in (q, k_cache, v_cache))
        assert k_cache.shape[:3] == v_cache.shape[:3] and k_cache.shape[3] == dim and dim % 8 == 0
        assert q.shape[1] % k_cache.shape[2] == 0 and (dim == width <= 256 or (dim <= 64 and width <= 512))
        if qv is not None:
            assert dim <= 64 and width >= 256 and qv.dtype is q.dtype and qv.stride(-1) == 1
            assert qv.shape == (*q.shape[:2], width)
            q, k_cache = torch.cat((q, qv), -1), torch.cat((k_cache, v_cache), -1)
        # one token each may be in a CUDA graph, where the numbers of tensors are not known
        query_lens = [1] * count if max_seqlen_q == 1 else cu_seqlens_q.diff().tolist()
        assert sum(query_lens) == len(q) and max(query_lens) == max_seqlen_q
        longest, row = page_table.shape[1] * k_cache.shape[1], 0
        tiles = (64,) if width == 512 else TILES[dim]
        whole = any(k_cache.shape[1] % tile == 0 for tile in tiles)
        out, lse = q.new_empty(*q.shape[:2], width), torch.empty(q.shape[1], len(q))
        for i, n in enumerate(query_lens):
            seen = (
                _causal(cache_seqlens[i], longest, n) if causal else torch.arange(longest) < cache_seqlens[i]
            )
            if window_size != (-1, -1):
                at = cache_seqlens[i] - n + torch.arange(n)[:, None]
                key = torch.arange(longest)
                seen = seen & (key >= at - window_size[0]) & (key <= at + window_size[1])
            keys, values = (vendor._tokens(x, page_table[i], longest) for x in (k_cache, v_cache))
            assert not whole or values.isfinite().all(), (
                "a whole tile is fetched, and what lies beyond the end with it"
            )
            own = slice(row, row + n)
            found = vendor._attend(q[own], keys, values, softmax_scale, seen, softcap, sinks)
            out[own] = _zeros_where_blind(found, seen)
            lse[:, own] = _lse(q[own], keys, softmax_scale, seen, softcap)
            row += n
        return (out, lse) if return_softmax_lse else out

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int,
        cu_seqlens_k: None = None, seqused_k: Tensor | None = None, q_v: Tensor | None = None,
        softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] | None = None,
        softcap: float = 0.0, block_table: Tensor | None = None, return_softmax_lse: bool = False, fa_version: int = 2,
    ) -> Any:  # fmt: skip
        """vLLM's."""
        assert fa_version == 3 and block_table is not None and window_size is not None
        assert max_seqlen_k <= block_table.shape[1] * k.shape[1]
        return self.flash_attn_with_kvcache(
            q, k, v, None, None, q_v, seqused_k, block_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
            window_size, softcap, return_softmax_lse,
        )  # fmt: skip

    def fa4_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_k: Tensor | None = None,
        page_table: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None), learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """FlashAttention 4's."""
        left, right = window_size
        assert max_seqlen_k and page_table is not None and max_seqlen_k <= page_table.shape[1] * k.shape[1]
        assert (left is None) == (right is None)
        assert learnable_sink is None or learnable_sink.dtype is torch.bfloat16
        out = self._attend(
            q, k, v, qv, seqused_k, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
            (-1 if left is None else left, -1 if right is None else right), softcap, False,
            None if learnable_sink is None else learnable_sink.float(),
        )  # fmt: skip
        return out, None


def _lse(q_nHD: Tensor, k_LGD: Tensor, scale: float, seen: Tensor, cap: float) -> Tensor:
    k = k_LGD.float().nan_to_num().repeat_interleave(q_nHD.shape[1] // k_LGD.shape[1], 1)
    scores = torch.einsum("nhd,lhd->hnl", q_nHD.float(), k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return scores.masked_fill(~seen, float("-inf")).logsumexp(-1)


def _fa3(calls: Calls, kind: str) -> dict[str, dict[str, Any]]:
    """Modules of one package. kind: own, vllm, sglang; and what will not do: bare (own, without pages), without (vLLM
    of another GPU)."""
    own = _FA3(calls)
    if kind in {"vllm", "without"}:
        available = {"FA3_AVAILABLE": kind == "vllm", "FA3_UNAVAILABLE_REASON": "no such file"}
        return {
            "vllm.vllm_flash_attn.flash_attn_interface": {
                "flash_attn_varlen_func": own.flash_attn_varlen_func,
                **available,
            }
        }
    content = {"flash_attn_with_kvcache": own.flash_attn_with_kvcache}
    if kind == "sglang":
        return {"sgl_kernel.flash_attn": content}
    flags = {"FLASHATTENTION_DISABLE_PAGEDKV": kind == "bare", "FLASHATTENTION_DISABLE_FP8": True}
    return {"flash_attn_interface": content, "flash_attn_config": {"CONFIG": {"build_flags": flags}}}


PACKAGES = frozenset({"flash_mla", "flash_attn", "flash_attn_interface", "sgl_kernel", "vllm"})


def _hide(patch: pytest.MonkeyPatch) -> None:
    """As if none of the packages were here, where some are."""
    real = importlib.util.find_spec
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES and not hasattr(module, "stand_in"):
            patch.delitem(sys.modules, name)

    def find(name: str, package: str | None = None) -> Any:
        top = name.partition(".")[0]
        return None if top in PACKAGES and top not in sys.modules else real(name, package)

    patch.setattr(importlib.util, "find_spec", find)


def install(patch: pytest.MonkeyPatch, backend: str, kind: str, calls: Calls | None = None) -> Calls:
    """Puts a stand-in where a package would be, parents included, and hides the packages themselves."""
    _hide(patch)
    calls = calls or Calls()
    modules = _flash_mla(calls, kind) if backend == "flashmla" else _fa3(calls, kind)
    if backend == "fa4":
        modules = {"flash_attn.cute": {"flash_attn_varlen_func": _FA3(calls).fa4_varlen_func}}
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            module = ModuleType(path)
            module.__spec__ = importlib.machinery.ModuleSpec(path, None)
            module.__path__ = []
            vars(module)["stand_in"] = True
            patch.setitem(sys.modules, path, module)
        vars(module).update(content)
    return calls
