"""A stand-in for FlashInfer: the calls that adapters make, held to what the package asks, computed in plain torch.

Signatures are those of 0.7.2. Arguments of the wrong dtype, shape, device or contract are errors here, as they would be
wrong answers there. Every call is recorded.
"""

from __future__ import annotations

import importlib.machinery
import math
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble import formats

HALVES = (torch.bfloat16, torch.float16)
INT = torch.int32


@dataclass
class Calls:
    """planned, ran: arguments of plans, and of the kernels, by name. made: wrappers that were made."""

    planned: list[dict[str, Any]]
    ran: list[dict[str, Any]]
    made: list[Any]


def _decoded(data: Tensor, scales: Tensor | None, scale: float) -> Tensor:
    if data.dtype is torch.uint8:
        assert scales is not None and scales.dtype is torch.float8_e4m3fn, "FP4 comes with block scales"
        return formats.get("nvfp4").decode((data, scales), torch.tensor(scale))
    assert scales is None
    return data.float() * scale


def _tokens(pages_PSHD: Tensor, ids: Tensor, length: int) -> Tensor:
    return pages_PSHD[ids.long()].flatten(0, 1)[:length]


def _attend(
    q_nHD: Tensor,
    k_LGD: Tensor,
    v_LGD: Tensor,
    scale: float,
    seen: Tensor,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    n, group = len(q_nHD), q_nHD.shape[1] // k_LGD.shape[1]
    k, v = (x.float().nan_to_num().repeat_interleave(group, 1) for x in (k_LGD, v_LGD))
    scores = torch.einsum("nhd,lhd->hnl", q_nHD.float(), k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        assert sinks.dtype is torch.float32
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, n, 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[0]].nan_to_num()
    return torch.einsum("hnl,lhd->nhd", weights, v).to(q_nHD.dtype)


def _base_2_lse(q_nHD: Tensor, k_LGD: Tensor, scale: float, seen: Tensor, cap: float) -> Tensor:
    """[n, H] as the package returns it; of rows that see nothing it is not documented."""
    k = k_LGD.float().nan_to_num().repeat_interleave(q_nHD.shape[1] // k_LGD.shape[1], 1)
    scores = torch.einsum("nhd,lhd->nhl", q_nHD.float(), k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    lse = scores.masked_fill(~seen[:, None], float("-inf")).logsumexp(-1) / math.log(2)
    return lse.nan_to_num(neginf=7.0)


def _seen(n: int, length: int, causal: bool, window_left: int) -> Tensor:
    query, key = torch.arange(length - n, length)[:, None], torch.arange(length)
    seen = key <= query if causal else torch.ones(n, length, dtype=torch.bool)
    return seen & (key >= query - window_left) if window_left >= 0 else seen


def _nhd(pages: Tensor, layout: str) -> Tensor:
    assert layout in {"NHD", "HND"}
    return pages if layout == "NHD" else pages.transpose(1, 2)


class _Wrapper:
    """What both wrappers share: planned state, which a run reads."""

    calls: Calls

    def __init__(self, float_workspace_buffer: Tensor, backend: str) -> None:
        assert float_workspace_buffer.dtype is torch.uint8 and backend in {"fa2", "fa3"}
        self.backend, self.state = backend, dict[str, Any]()
        self.calls.made.append(self)

    def _requests(self) -> Any:
        """Rows, pages and length of each request."""
        s = self.state
        for i in range(len(s["q"]) - 1):
            rows = slice(int(s["q"][i]), int(s["q"][i + 1]))
            yield rows, s["indices"][int(s["kv"][i]) : int(s["kv"][i + 1])], int(s["lens"][i])


def _paged(calls_: Calls) -> type:
    class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
        calls = calls_

        def __init__(
            self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto"
        ) -> None:
            super().__init__(float_workspace_buffer, backend)
            self.layout = kv_layout

        def plan(
            self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
            num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
            window_left: int, logits_soft_cap: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        ) -> None:  # fmt: skip
            host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
            assert all(x.dtype is INT and x.device.type == "cpu" for x in (*host, paged_kv_indices))
            assert len(paged_kv_indices) == paged_kv_indptr[-1] and (paged_kv_last_page_len >= 1).all()
            assert q_data_type in HALVES
            if kv_data_type in HALVES:
                assert kv_data_type is q_data_type
            elif self.backend == "fa3":
                raise AssertionError("fa3 reads no cache narrower than the query")
            assert head_dim_qk in {64, 128, 256} and num_qo_heads % num_kv_heads == 0
            lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
            self.state = {
                "q": qo_indptr,
                "kv": paged_kv_indptr,
                "indices": paged_kv_indices,
                "lens": lens,
            } | {name: value for name, value in locals().items() if name not in {"self", "host", "lens"}}
            calls_.planned.append(self.state)

        def run(
            self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, k_scale: float = 1.0, v_scale: float = 1.0,
            kv_cache_sf: tuple[Tensor, Tensor] | None = None, return_lse: bool = False,
        ) -> Any:  # fmt: skip
            s = self.state
            assert type(k_scale) is float and type(v_scale) is float
            assert q.dtype is s["q_data_type"] and q.stride(-1) == 1
            assert q.shape == (int(s["q"][-1]), s["num_qo_heads"], s["head_dim_qk"])
            streams = []
            for i, (data, scale) in enumerate(zip(paged_kv_cache, (k_scale, v_scale), strict=True)):
                assert data.dtype is s["kv_data_type"]
                scales = None if kv_cache_sf is None else _nhd(kv_cache_sf[i], self.layout)
                streams.append(_decoded(_nhd(data, self.layout), scales, scale))
                assert streams[-1].shape[1:] == (s["page_size"], s["num_kv_heads"], s["head_dim_qk"])
            calls_.ran.append({"wrapper": self})
            out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
            for rows, ids, length in self._requests():
                seen = _seen(rows.stop - rows.start, length, s["causal"], s["window_left"])
                k, v = (_tokens(x, ids, length) for x in streams)
                out[rows] = _attend(q[rows], k, v, s["sm_scale"], seen, s["logits_soft_cap"])
                lse[rows] = _base_2_lse(q[rows], k, s["sm_scale"], seen, s["logits_soft_cap"])
            return (out, lse) if return_lse else out

    return BatchPrefillWithPagedKVCacheWrapper


@dataclass
class MLAPlanMetadata:
    csr_: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def csr(
        cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor
    ) -> MLAPlanMetadata:
        return cls((qo_indptr, kv_indptr, kv_indices, kv_len_arr))


def _latent(calls_: Calls) -> type:
    class BatchMLAPagedAttentionWrapper(_Wrapper):
        calls = calls_

        def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
            super().__init__(float_workspace_buffer, backend)

        def plan(
            self, *, metadata: MLAPlanMetadata, num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int,
            causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype, query_layout: str,
            kv_cache_layout: str,
        ) -> None:  # fmt: skip
            q, kv, indices, lens = metadata.csr_
            assert all(x.dtype is INT for x in metadata.csr_) and (head_dim_ckv, head_dim_kpe) == (512, 64)
            assert 128 % num_heads == 0, "a token's heads must not be in two tiles"
            assert kv_data_type is q_data_type and query_layout == kv_cache_layout == "split"
            self.state = {
                "q": q,
                "kv": kv,
                "indices": indices,
                "lens": lens,
                "page": page_size,
                "heads": num_heads,
            }
            self.state |= {"causal": causal, "sm_scale": sm_scale, "dtype": q_data_type}
            calls_.planned.append(self.state)

        def run(self, *, query: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            s, (nope, rope), (ckv, kpe) = self.state, query, kv_cache
            assert nope.shape[1:] == (s["heads"], 512) and rope.shape[1:] == (s["heads"], 64)
            assert (
                ckv.shape[1:] == (s["page"], 512)
                and kpe.shape[1:] == (s["page"], 64)
                and nope.dtype is s["dtype"]
            )
            calls_.ran.append({"wrapper": self})
            q, keys, out = torch.cat(query, -1), torch.cat(kv_cache, -1)[:, :, None], torch.empty_like(nope)
            for rows, ids, length in self._requests():
                seen = _seen(rows.stop - rows.start, length, s["causal"], -1)
                k = _tokens(keys, ids, length)
                out[rows] = _attend(q[rows], k, k[..., :512], s["sm_scale"], seen)
            return out

    return BatchMLAPagedAttentionWrapper


class _TensorRT:
    """The functions of trtllm_mha, all of them over a table of pages. No number is read from a device where a CUDA
    graph may be recorded, which is in xqa and decode of one token each."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def _streams(self, kv_cache: Any, layout: str, sf: Any, scales: tuple[float, float]) -> list[Tensor]:
        assert layout == "HND"
        blocks = (None, None) if sf is None else sf
        pairs = zip(kv_cache, blocks, scales, strict=True)
        return [
            _decoded(_nhd(data, layout), None if b is None else _nhd(b, layout), scale)
            for data, b, scale in pairs
        ]

    def _dense(
        self, query: Tensor, kv_cache: Any, block_tables: Tensor, seq_lens: Tensor, query_lens: list[int], *, scale: float,
        value_scale: float, window_left: int, sinks: Tensor | None, layout: str, sf: Any, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert seq_lens.dtype is INT and block_tables.dtype is INT and block_tables.is_contiguous()
        assert type(scale) is float and type(value_scale) is float and query.is_contiguous()
        assert query.dtype in HALVES
        if kv_cache[0].dtype in HALVES:
            assert kv_cache[0].dtype is query.dtype
        k_PSGD, v_PSGD = self._streams(kv_cache, layout, sf, (1.0, value_scale))
        longest, pieces, row = block_tables.shape[1] * k_PSGD.shape[1], [], 0
        for i, n in enumerate(query_lens):
            key = torch.arange(longest)
            query_at = seq_lens[i] - n + torch.arange(n)[:, None]
            seen = (key < seq_lens[i]) & (key <= query_at)
            if mask is not None:  # bits of the draft tokens that each may see
                bits = (mask[row : row + n].int()[..., None] >> torch.arange(16)) & 1
                draft = key - (seq_lens[i] - n)
                allowed = bits.flatten(1).bool()[:, draft.clamp(0, bits[0].numel() - 1)]
                seen = (key < seq_lens[i]) & ((draft < 0) | allowed)
            if window_left >= 0:
                seen = seen & (key >= query_at - window_left)
            k, v = (_tokens(x, block_tables[i], longest) for x in (k_PSGD, v_PSGD))
            pieces.append(_attend(query[row : row + n], k, v, scale, seen, 0.0, sinks))
            row += n
        assert row == len(query)
        return torch.cat(pieces)

    def xqa_batch_decode_with_kv_cache(
        self, query: Tensor, kv_cache: Any, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
        max_seq_len: int, bmm1_scale: float, bmm2_scale: float, window_left: int, sinks: Tensor | None, kv_layout: str,
        q_len_per_req: int, mask: Tensor | None, kv_cache_sf: Any = None, q_cu_seq_lens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self.calls.ran.append({"function": "xqa", "bmm1_scale": bmm1_scale, "bmm2_scale": bmm2_scale})
        assert max_seq_len <= block_tables.shape[1] * kv_cache[0].shape[2] and sinks is None
        batch, words = len(seq_lens), -(-q_len_per_req // 32) * 2
        if q_cu_seq_lens is not None:
            assert q_len_per_req > 1 and q_cu_seq_lens.dtype is INT and mask is not None
            assert mask.shape == (len(query), words)
            query_lens = q_cu_seq_lens.diff().tolist()
        else:
            query_lens = [q_len_per_req] * batch
            assert len(query) == batch * q_len_per_req
            if q_len_per_req > 1:
                assert mask is not None and mask.shape == (batch, q_len_per_req, words)
                mask = mask.flatten(0, 1)
        assert mask is None or mask.dtype is torch.uint16
        out = self._dense(
            query, kv_cache, block_tables, seq_lens, query_lens, scale=bmm1_scale, value_scale=bmm2_scale,
            window_left=window_left, sinks=sinks, layout=kv_layout, sf=kv_cache_sf, mask=mask,
        )  # fmt: skip
        return (
            out.view(batch, q_len_per_req, *out.shape[1:])
            if q_cu_seq_lens is None and q_len_per_req > 1
            else out
        )

    def trtllm_batch_decode_with_kv_cache(
        self, query: Tensor, kv_cache: Any, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
        max_seq_len: int, bmm1_scale: float, bmm2_scale: float, window_left: int, sinks: Tensor | None, kv_layout: str,
        backend: str, q_len_per_req: int | None = 1, max_q_len: int | None = None, cum_seq_lens_q: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self.calls.ran.append({"function": "decode", "bmm1_scale": bmm1_scale, "bmm2_scale": bmm2_scale})
        assert backend == "trtllm-gen" and (q_len_per_req is None) == (max_q_len is not None)
        query_lens = [q_len_per_req] * len(seq_lens) if q_len_per_req else cum_seq_lens_q.diff().tolist()
        return self._dense(
            query, kv_cache, block_tables, seq_lens, query_lens, scale=bmm1_scale, value_scale=bmm2_scale,
            window_left=window_left, sinks=sinks, layout=kv_layout, sf=None,
        )  # fmt: skip

    def trtllm_batch_context_with_kv_cache(
        self, query: Tensor, kv_cache: Any, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
        max_q_len: int, max_kv_len: int, bmm1_scale: float, bmm2_scale: float, batch_size: int, cum_seq_lens_q: Tensor,
        cum_seq_lens_kv: Tensor, window_left: int, kv_layout: str, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        self.calls.ran.append({"function": "context", "bmm1_scale": bmm1_scale, "bmm2_scale": bmm2_scale})
        assert kv_cache[0].dtype is query.dtype, "the context kernels read no cache narrower than the query"
        assert cum_seq_lens_q.dtype is INT and cum_seq_lens_kv.dtype is INT
        assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist() and batch_size == len(seq_lens)
        query_lens = cum_seq_lens_q.diff().tolist()
        assert max_q_len == max(query_lens) and max_kv_len == int(seq_lens.max())
        return self._dense(
            query, kv_cache, block_tables, seq_lens, query_lens, scale=bmm1_scale, value_scale=bmm2_scale,
            window_left=window_left, sinks=sinks, layout=kv_layout, sf=None,
        )  # fmt: skip


def install(patch: pytest.MonkeyPatch) -> Calls:
    """Puts the stand-in where the package would be."""
    calls = Calls([], [], [])
    trt, root = _TensorRT(calls), ModuleType("flashinfer")
    found = {
        "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": _paged(calls)},
        "flashinfer.mla": {
            "BatchMLAPagedAttentionWrapper": _latent(calls),
            "MLAPlanMetadata": MLAPlanMetadata,
        },
        "flashinfer.decode": {
            name: getattr(trt, name)
            for name in ("xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache")
        },
        "flashinfer.prefill": {"trtllm_batch_context_with_kv_cache": trt.trtllm_batch_context_with_kv_cache},
    }
    for name, content in found.items():
        module = root if name == "flashinfer" else ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
    return calls
