"""Stand-ins for FlashInfer's MLA kernels for big Blackwell, trtllm-gen and CUTLASS, as tests/support/vendor.py is for the rest.

Signatures and checks are those of 0.7.2. No number is read from a tensor where a CUDA graph may be recorded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import vendor
from vendor import INT, Calls

RANK, ROPE = 512, 64


def _attend(q_nHD: Tensor, pages_PSD: Tensor, ids_N: Tensor, length: Tensor, scale: float) -> Tensor:
    """The last tokens of a request of `length`."""
    n, longest = len(q_nHD), len(ids_N) * pages_PSD.shape[1]
    key = torch.arange(longest)
    seen = (key < length) & (key <= length - n + torch.arange(n)[:, None])
    k = vendor._tokens(pages_PSD[:, :, None], ids_N, longest)
    return vendor._attend(q_nHD, k, k[..., :RANK], scale, seen)


@dataclass
class _Gen:
    calls: Calls

    def trtllm_batch_decode_with_kv_cache_mla(
        self, query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int, kv_lora_rank: int,
        qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, bmm1_scale: float = 1.0,
        bmm2_scale: float = 1.0, backend: str = "auto", cum_seq_lens_q: Tensor | None = None,
        max_q_len: int | None = None,
    ) -> Tensor:  # fmt: skip
        assert backend == "trtllm-gen" and (kv_lora_rank, qk_rope_head_dim) == (RANK, ROPE)
        assert type(bmm1_scale) is float and bmm2_scale == 1.0 and workspace_buffer.dtype is torch.uint8
        assert query.dtype is kv_cache.dtype is torch.bfloat16, "what is written is bf16"
        assert query.is_contiguous() and kv_cache.shape[1:] in {(32, RANK + ROPE), (64, RANK + ROPE)}
        assert seq_lens.dtype is block_tables.dtype is INT and block_tables.is_contiguous()
        heads, count = query.shape[-2], len(seq_lens)
        assert heads <= 64 or heads >= 128, "not supported by trtllm-gen"
        assert 0 < max_seq_len <= block_tables.shape[1] * kv_cache.shape[1] and len(block_tables) == count
        self.calls.ran.append({"function": "mla", "query": query.shape, "bmm1_scale": bmm1_scale})
        if cum_seq_lens_q is None:
            assert query.dim() == 4 and len(query) == count and max_q_len is None
            query_lens = [query.shape[1]] * count
        else:
            assert query.dim() == 3 and cum_seq_lens_q.dtype is INT and max_q_len
            query_lens = cum_seq_lens_q.diff().tolist()
            assert max(query_lens) <= max_q_len
        parts = query.reshape(-1, *query.shape[-2:]).split(query_lens)
        out = [_attend(q, kv_cache, block_tables[i], seq_lens[i], bmm1_scale) for i, q in enumerate(parts)]
        return torch.cat(out).view(*query.shape[:-1], RANK)


@dataclass
class MLAPlanMetadata:
    dense_: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def dense(cls, cum_seq_lens_q: Tensor, block_tables: Tensor, seq_lens: Tensor) -> MLAPlanMetadata:
        return cls((cum_seq_lens_q, block_tables, seq_lens))


def _cutlass(calls: Calls) -> type:
    class BatchMLAPagedAttentionWrapper:
        def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
            assert float_workspace_buffer.dtype is torch.uint8 and backend == "cutlass"
            calls.made.append(self)

        def plan(
            self, *, metadata: MLAPlanMetadata, num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int,
            causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        ) -> None:  # fmt: skip
            starts, tables, lens = metadata.dense_
            assert all(x.dtype is INT and x.device.type == "cpu" for x in metadata.dense_)
            assert (starts.diff() == 1).all() and len(tables) == len(lens), "one query token to a request"
            assert ((lens + page_size - 1) // page_size <= tables.shape[1]).all()
            assert num_heads == 128 and (head_dim_ckv, head_dim_kpe) == (RANK, ROPE) and 128 % page_size == 0
            assert q_data_type is kv_data_type and q_data_type in vendor.HALVES
            assert sm_scale == pytest.approx(192**-0.5, rel=1e-5), "the kernel's scale is built in"
            self.planned = (len(lens), page_size, q_data_type)
            calls.planned.append({"planned": self.planned})

        def run(self, *, query: Tensor, kv_cache: Tensor, kv_len: Tensor, page_table: Tensor) -> Tensor:
            assert (
                len(query),
                kv_cache.shape[1],
                query.dtype,
            ) == self.planned and kv_cache.dtype is query.dtype
            assert (
                query.shape[1:] == (128, RANK + ROPE) and query.is_contiguous() and kv_cache.is_contiguous()
            )
            assert kv_cache.shape[2:] == (RANK + ROPE,) and kv_len.dtype is page_table.dtype is INT
            assert kv_len.shape == (len(query),) and page_table.shape[0] == len(query)
            assert page_table.shape[1] % (128 // kv_cache.shape[1]) == 0, "whole tables"
            calls.ran.append({"function": "cutlass", "query": query.shape})
            rows = zip(query, page_table, kv_len, strict=True)
            return torch.cat([_attend(q[None], kv_cache, ids, length, 192**-0.5) for q, ids, length in rows])

    return BatchMLAPagedAttentionWrapper


def install(patch: pytest.MonkeyPatch, backend: str) -> Calls:
    """Puts the stand-ins where the package would be."""
    calls = vendor.install(patch)
    content: dict[str, Any] = {
        "MLAPlanMetadata": MLAPlanMetadata,
        "BatchMLAPagedAttentionWrapper": _cutlass(calls),
    }
    if backend == "trtllm_mla":
        gen = _Gen(calls)
        content = {"trtllm_batch_decode_with_kv_cache_mla": gen.trtllm_batch_decode_with_kv_cache_mla}
    vars(sys.modules["flashinfer.mla"]).update(content)
    return calls
