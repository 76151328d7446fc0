"""Call the kernels that FlashInfer brings: its own templates, TensorRT-LLM's and CUTLASS's.

Shape suffixes: T tokens, B requests, N pages of a request, P pages of all requests in order, H query heads, G KV heads,
S slots of a page, D values of a head, W 16-bit words of a mask.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.attention.backends import flashinfer as facts
from nibble.attention.backends.adapters import Scales, Workspace, capability, check_latents, clamp_lens
from nibble.attention.backends.vendor import RANK, ROPE
from nibble.attention.planner.support import BLACKWELL
from nibble.attention.step import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels import cdiv
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LATENT, Phase, Stream

# FlashInfer's FA2 and FA3 templates

# A wrapper of the package is planned for a batch, once for all layers of a step that ask the same of it; planning
# happens on the host, so a CUDA graph cannot hold it. On SM90 FA3 serves prompts over 16-bit caches, and MLA; FA2 does
# the rest.


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a wrapper is planned for, beside the batch."""

    phase: Phase
    template: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Of the first plane, in which FP4 is bytes."""
    packing: str
    heads: int
    """Query heads."""
    stream: Stream
    """Of the keys, or of the latents."""
    page_size: int
    scale: float
    window: int | None
    softcap: float | None

    @property
    def latent(self) -> bool:
        """Return whether latents are attended over."""
        return self.stream.name == LATENT


class _Wrapper:
    """A wrapper of the package, with a weak reference to the state that it is planned for.

    Once the step drops that state, the wrapper may be planned again.
    """

    def __init__(self, planned: Any) -> None:
        self.planned = planned
        self.state: Callable[[], _PlanState | None] = lambda: None
        """Returns the state that is planned for; None once its step is over."""
        self._copied: torch.cuda.Event | None = None

    def plan(self, state: _PlanState, arguments: dict[str, Any]) -> None:
        """Plan for another state, with the arguments that the package's plan() takes."""
        # The host's copy of the last plan may still be on its way to the device.
        if self._copied is not None:
            self._copied.synchronize()
        # Should the package refuse, the wrapper is planned for nothing.
        self.state = lambda: None
        self.planned.plan(**arguments)
        if state.batch.page_table_BN.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        self.state = ref(state)
        state.wrapper = self


@dataclass(slots=True, eq=False, weakref_slot=True)
class _PlanState:
    """A plan for a batch. Its wrapper may be planned for another state, where a step has more than COPIES of a kind."""

    kind: _Kind
    batch: AttentionBatch
    wrapper: _Wrapper | None = None


class FlashInfer(AttentionBackend):
    """The adapter of the templates. Its workspace and wrappers serve one step at a time."""

    def __init__(self) -> None:
        self._package, self._mla = facts.import_flashinfer(), facts.import_flashinfer(f"{facts.PACKAGE}.mla")
        self._workspace = Workspace(facts.WORKSPACE)
        # The wrappers of a kind, the one that was planned last at the end.
        self._wrappers: dict[_Kind, list[_Wrapper]] = {}
        self._scales = Scales(facts.PACKAGE)

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> _Kind:
        """Return what the package plans for."""
        latent = LATENT in view.streams
        keys = check_latents(view, facts.PACKAGE) if latent else view.streams["k"]
        kv_dtype = keys.planes[0].dtype
        # Over one query token FA3 takes four times as long as FA2, and it reads no cache narrower than the query.
        fa3 = capability(q_THD) == 90 and kv_dtype == q_THD.dtype and (latent or not batch.phase.decodes)
        return _Kind(
            phase=batch.phase,
            template="fa3" if fa3 else "fa2",
            dtype=q_THD.dtype,
            kv_dtype=kv_dtype,
            packing=keys.packing.name,
            heads=q_THD.shape[1],
            stream=keys.stream,
            page_size=view.page_size,
            scale=params.scale,
            window=params.window,
            softcap=params.softcap,
        )

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> _PlanState:
        """Plan a wrapper for the batch, on the host."""
        state = _PlanState(self.kind(q_THD, view, batch, params), batch)
        self._plan(state)
        return state

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _PlanState
    ) -> Tensor:
        """Run the wrapper that is planned for this batch."""
        run = self._planned(state).run
        if q_THD.stride(-1) != 1:
            q_THD = q_THD.contiguous()
        if state.kind.latent:
            data_PSD = view.streams[LATENT].paged.planes_PHS[0][:, 0]
            return run(
                query=(q_THD[..., :RANK], q_THD[..., RANK:]),
                kv_cache=(data_PSD[..., :RANK], data_PSD[..., RANK:]),
            )
        return run(**self._head_options(q_THD, view))

    def forward_partial(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _PlanState
    ) -> PartialAttention:
        """Run the wrapper that is planned for this batch -> values in the query's dtype. Latents are not served."""
        run = self._planned(state).run
        values_THD, lse_TH = run(**self._head_options(q_THD, view), return_lse=True)
        # The package's logarithms have base 2, and no document says what it leaves of a query that sees nothing.
        lse_HT = lse_TH.T * math.log(2)
        if min(map(operator.sub, batch.seq_lens, batch.query_lens)) < 0:
            blind_T = _blind_rows(batch).to(q_THD.device)
            values_THD = values_THD.masked_fill(blind_T[:, None, None], 0.0)
            lse_HT = lse_HT.masked_fill(blind_T, float("-inf"))
        return PartialAttention(values_THD, lse_HT)

    def _head_options(self, q_THD: Tensor, view: KVView) -> dict[str, Any]:
        """Return the arguments of the MHA wrapper's run()."""
        k, v = view.streams["k"], view.streams["v"]
        options: dict[str, Any] = {}
        if k.format.needs_scale:
            options |= {"k_scale": self._scales.of(k), "v_scale": self._scales.of(v)}
        if len(k.planes) > 1:
            # The second plane of FP4 formats has their block scales.
            options["kv_cache_sf"] = (k.planes[1], v.planes[1])
        q_THD = q_THD if q_THD.stride(-1) == 1 else q_THD.contiguous()
        return {"q": q_THD, "paged_kv_cache": (k.planes[0], v.planes[0]), **options}

    def _planned(self, state: _PlanState) -> Any:
        """Return the package's wrapper, planned for this state."""
        # Another state of the step may have taken the wrapper over.
        if state.wrapper is None or state.wrapper.state() is not state:
            self._plan(state)
        assert state.wrapper is not None
        return state.wrapper.planned

    def _plan(self, state: _PlanState) -> None:
        """Plan a wrapper for a state: one whose step is over, a new one, or the one that was planned first."""
        kind, batch = state.kind, state.batch
        wrappers = self._wrappers.setdefault(kind, [])
        entry = next((wrapper for wrapper in wrappers if wrapper.state() is None), None)
        if entry is not None:
            wrappers.remove(entry)
        elif len(wrappers) < facts.COPIES:
            entry = _Wrapper(self._make_wrapper(kind, batch.page_table_BN.device))
        else:
            # Where the state of the one that was planned first is still needed, forward() plans again.
            entry = wrappers.pop(0)
        wrappers.append(entry)
        entry.plan(state, self._latent_plan(kind, batch) if kind.latent else _head_plan(kind, batch))

    def _make_wrapper(self, kind: _Kind, device: torch.device) -> Any:
        workspace = self._workspace.on(device)
        if kind.latent:
            return self._mla.BatchMLAPagedAttentionWrapper(workspace, backend=kind.template)
        return self._package.BatchPrefillWithPagedKVCacheWrapper(
            workspace, kv_layout=kind.packing.upper(), backend=kind.template
        )

    def _latent_plan(self, kind: _Kind, batch: AttentionBatch) -> dict[str, Any]:
        """Return the arguments of the MLA wrapper's plan()."""
        indptr, indices_P, _ = _pages(batch, kind.page_size)
        metadata = self._mla.MLAPlanMetadata.csr(
            qo_indptr=batch.cu_seqlens_q_B1,
            kv_indptr=indptr.to(indices_P.device),
            kv_indices=indices_P,
            kv_len_arr=batch.seq_lens_B,
        )
        return {
            "metadata": metadata,
            "num_heads": kind.heads,
            "head_dim_ckv": RANK,
            "head_dim_kpe": ROPE,
            "page_size": kind.page_size,
            "causal": True,
            "sm_scale": kind.scale,
            "q_data_type": kind.dtype,
            "kv_data_type": kind.kv_dtype,
            "query_layout": "split",
            "kv_cache_layout": "split",
        }


def _head_plan(kind: _Kind, batch: AttentionBatch) -> dict[str, Any]:
    """Return the arguments of the MHA wrapper's plan()."""
    indptr, indices_P, last_B = _pages(batch, kind.page_size)
    return {
        "qo_indptr": torch.tensor(tuple(accumulate(batch.query_lens, initial=0)), dtype=torch.int32),
        "paged_kv_indptr": indptr,
        "paged_kv_indices": indices_P,
        "paged_kv_last_page_len": last_B,
        "num_qo_heads": kind.heads,
        "num_kv_heads": kind.stream.heads,
        "head_dim_qk": kind.stream.dim,
        "page_size": kind.page_size,
        # One token sees all that is stored, without a mask.
        "causal": kind.phase is not Phase.DECODE,
        "sm_scale": kind.scale,
        "window_left": -1
        if kind.window is None
        else kind.window - 1,  # theirs does not count the present token
        "logits_soft_cap": kind.softcap or 0.0,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.kv_dtype,
    }


def _blind_rows(batch: AttentionBatch) -> Tensor:
    """Return which queries see no key: bool [T], on the host."""
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    return torch.cat([torch.arange(stored - new, stored) < 0 for new, stored in lens])


def _pages(batch: AttentionBatch, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch's pages as the package's plans take them, all int32.

    Returns:
        Where each request's pages begin, with the end of the last [B + 1], on the host, where plans are made; the pages
        of all requests [P], on the device; tokens in the last page of each [B], on the host.
    """
    counts = [cdiv(length, page_size) for length in batch.seq_lens]
    indptr = torch.tensor(tuple(accumulate(counts, initial=0)), dtype=torch.int32)
    last_B = torch.tensor([(length - 1) % page_size + 1 for length in batch.seq_lens], dtype=torch.int32)
    total, device = int(indptr[-1]), batch.page_table_BN.device
    counts_B = torch.tensor(counts, device=device)
    # With output_size the host need not wait for the device to count.
    owners_P = torch.repeat_interleave(counts_B, output_size=total)
    columns_P = torch.arange(total, device=device) - (counts_B.cumsum(0) - counts_B)[owners_P]
    return indptr, batch.page_table_BN[owners_P, columns_P], last_B


# TensorRT-LLM's kernels: for MHA trtllm-gen on big Blackwell, and XQA on SM90 and SM120; for MLA trtllm-gen

# All read lengths and page tables on the device, so a CUDA graph may hold a decode step.

WORD = 16
HEAD_DIM = 128
"""The width of a head before latents are absorbed, which nothing here has, and only checks of other kernels read."""


@dataclass(frozen=True, slots=True)
class _TrtllmState:
    """What the kernels read of a batch, the same for all its layers."""

    page_table_BN: Tensor
    lens_B: Tensor
    """Stored tokens; of padding 1, since no document says what a kernel does for 0."""
    padding_B11: Tensor | None = None
    """Whose result is to be zeros; None where there is no padding."""
    mask_TW: Tensor | None = None
    """Bits of the draft tokens that each draft token sees."""
    cu_seqlens_k_B1: Tensor | None = None
    """Where each request's stored tokens begin if they were one behind the other."""


class TrtllmMha(AttentionBackend):
    """The adapter for MHA.

    Its workspace serves one step at a time, and no other backend: kernels keep counters in it.
    """

    def __init__(self) -> None:
        self._decode = facts.import_flashinfer(f"{facts.PACKAGE}.decode")
        self._prefill = facts.import_flashinfer(f"{facts.PACKAGE}.prefill")
        self._workspace = Workspace(facts.WORKSPACE)
        self._scales = Scales(facts.PACKAGE)

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> _TrtllmState:
        """Return tables and lengths as the kernels of the batch's phase take them."""
        page_table_BN, lens_B = batch.page_table_BN.contiguous(), batch.seq_lens_B
        if batch.phase is Phase.DECODE:
            # It may be recorded in a CUDA graph, where lengths are known to the device alone.
            return _TrtllmState(page_table_BN, *clamp_lens(lens_B))
        if batch.phase is Phase.VERIFY:
            # XQA is given the mask of draft tokens; trtllm-gen takes none.
            mask_TW = None if _is_gen(q_THD) else _causal_mask(batch.query_lens).to(q_THD.device)
            return _TrtllmState(page_table_BN, lens_B, mask_TW=mask_TW)
        starts_B1 = F.pad(lens_B.cumsum(0, dtype=torch.int32), (1, 0))
        return _TrtllmState(page_table_BN, lens_B, cu_seqlens_k_B1=starts_B1)

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _TrtllmState
    ) -> Tensor:
        """Call the kernel of the batch's phase, and clear the rows of padding."""
        k, v = view.streams["k"], view.streams["v"]
        options: dict[str, Any] = {
            "query": q_THD.contiguous(),
            "kv_cache": (k.planes[0], v.planes[0]),
            "workspace_buffer": self._workspace.on(q_THD.device),
            "block_tables": state.page_table_BN,
            "seq_lens": state.lens_B,
            # The global scale of K is a factor of the scores, that of V one of the results.
            "bmm1_scale": params.scale * self._scales.of(k),
            "bmm2_scale": self._scales.of(v),
            # Theirs does not count the present token.
            "window_left": -1 if params.window is None else params.window - 1,
            "sinks": None if params.sinks_H is None else params.sinks_H.float(),
            "kv_layout": k.packing.name.upper(),
        }
        if len(k.planes) > 1:
            options["kv_cache_sf"] = (k.planes[1], v.planes[1])
        if batch.phase.decodes:
            out_THD = self._decode_tokens(batch, state, options)
        else:
            out_THD = self._prefill.trtllm_batch_context_with_kv_cache(
                **options,
                max_q_len=max(batch.query_lens),
                max_kv_len=max(batch.seq_lens),
                batch_size=len(batch.query_lens),
                cum_seq_lens_q=batch.cu_seqlens_q_B1,
                cum_seq_lens_kv=state.cu_seqlens_k_B1,
            )
        return out_THD if state.padding_B11 is None else out_THD.masked_fill_(state.padding_B11, 0.0)

    def _decode_tokens(self, batch: AttentionBatch, state: _TrtllmState, options: dict[str, Any]) -> Tensor:
        """Attend from one new token, or from a few: of one number each, or packed."""
        options["max_seq_len"] = max(batch.seq_lens)
        longest = max(batch.query_lens)
        ragged = min(batch.query_lens) < longest
        if _is_gen(options["query"]):
            options["q_len_per_req"] = None if ragged else longest
            if ragged:
                options |= {"max_q_len": longest, "cum_seq_lens_q": batch.cu_seqlens_q_B1}
            return self._decode.trtllm_batch_decode_with_kv_cache(**options, backend="trtllm-gen")
        options |= {"q_len_per_req": longest, "mask": state.mask_TW}
        if ragged:
            options["q_cu_seq_lens"] = batch.cu_seqlens_q_B1
        elif longest > 1 and state.mask_TW is not None:
            options["mask"] = state.mask_TW.view(-1, longest, state.mask_TW.shape[1])
        out: Tensor = self._decode.xqa_batch_decode_with_kv_cache(**options)
        return out.view_as(options["query"])  # of draft tokens it is [B, n, H, D]


def _is_gen(x: Tensor) -> bool:
    """Return whether trtllm-gen serves here; XQA does elsewhere."""
    return capability(x) in BLACKWELL


def _causal_mask(query_lens: tuple[int, ...]) -> Tensor:
    """Return uint16 [T, W]: for each draft token a bit for those of its request up to itself.

    Rows are whole words of 32 bits.
    """
    width = cdiv(max(query_lens), 32) * 32
    place_T = torch.cat([torch.arange(count) for count in query_lens])
    visible_TWb = (torch.arange(width) <= place_T[:, None]).view(len(place_T), -1, WORD)
    return (visible_TWb.int() << torch.arange(WORD)).sum(-1).to(torch.uint16)


class TrtllmMla(AttentionBackend):
    """The adapter for MLA: one new token to a request, or a few.

    Its workspace serves one step at a time, and no other backend: kernels keep counters in it.
    """

    def __init__(self) -> None:
        self._mla = facts.import_flashinfer(f"{facts.PACKAGE}.mla")
        self._workspace = Workspace(facts.TRTLLM_MLA_WORKSPACE)

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> _TrtllmState:
        """Return the page table, and lengths of at least 1."""
        lens_B, padding_B11 = clamp_lens(batch.seq_lens_B)
        # Only a step of one token each may have padding.
        return _TrtllmState(
            batch.page_table_BN.contiguous(), lens_B, padding_B11 if batch.phase is Phase.DECODE else None
        )

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _TrtllmState
    ) -> Tensor:
        """Call the kernel with one number of tokens for all requests, or with offsets where they differ."""
        latent = check_latents(view, "trtllm-gen")
        longest = max(batch.query_lens)
        options: dict[str, Any] = {}
        if min(batch.query_lens) == longest:
            query = q_THD.unflatten(0, (-1, longest))
        else:
            query, options = q_THD, {"cum_seq_lens_q": batch.cu_seqlens_q_B1, "max_q_len": longest}
        out: Tensor = self._mla.trtllm_batch_decode_with_kv_cache_mla(
            query=query.contiguous(),
            kv_cache=latent.planes[0][:, :, 0],
            workspace_buffer=self._workspace.on(q_THD.device),
            qk_nope_head_dim=HEAD_DIM,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            block_tables=state.page_table_BN,
            seq_lens=state.lens_B,
            max_seq_len=max(batch.seq_lens),
            bmm1_scale=params.scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            **options,
        )
        out_THD = out.view(*q_THD.shape[:2], RANK)
        return out_THD if state.padding_B11 is None else out_THD.masked_fill_(state.padding_B11, 0.0)


# CUTLASS's MLA kernel

# A query is one token of 128 heads. Draft tokens are requests of their own, each as long as it sees. Fewer heads are
# filled up with zeros. Lengths and pages are given to each run, on the device, so a CUDA graph may hold a decode step,
# whose first run is not recorded.

CUTLASS_SCALE = 1 / math.sqrt(128 + 64)
"""DeepSeek's scale of scores, which is built into the kernel."""
TABLE_TOKENS = 128
"""The pages in a row of the page table hold a multiple of so many tokens."""


@dataclass(frozen=True, slots=True)
class _CutlassState:
    """A batch, with a request for each token."""

    page_table_TN: Tensor
    lens_T: Tensor
    padding_T11: Tensor


class CutlassMla(AttentionBackend):
    """The adapter of the CUTLASS kernel. Its workspace and wrappers serve one step at a time."""

    def __init__(self) -> None:
        self._mla = facts.import_flashinfer(f"{facts.PACKAGE}.mla")
        self._workspace = Workspace(facts.CUTLASS_WORKSPACE)
        # By number of tokens, page size and dtype. A wrapper is planned once: lengths and pages are given to each run.
        self._wrappers: dict[tuple[int, int, torch.dtype], Any] = {}

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> _CutlassState:
        """Make a request of each token."""
        return _split_tokens(batch, view.page_size)

    def forward(
        self,
        q_THD: Tensor,
        view: KVView,
        batch: AttentionBatch,
        params: AttentionParams,
        state: _CutlassState,
    ) -> Tensor:
        """Fill the heads up to those of the kernel, and call it."""
        latent, heads = check_latents(view, "CUTLASS's MLA kernel"), q_THD.shape[1]
        # The kernel scales scores by CUTLASS_SCALE, so the query takes what another scale differs by.
        query = q_THD
        if not math.isclose(params.scale, CUTLASS_SCALE, rel_tol=1e-5):
            query = q_THD * (params.scale / CUTLASS_SCALE)
        if heads < facts.CUTLASS_HEADS:
            query = F.pad(query, (0, 0, 0, facts.CUTLASS_HEADS - heads))
        out_THD: Tensor = self._wrapper(query, view.page_size).run(
            query=query.contiguous(),
            kv_cache=latent.planes[0][:, :, 0],
            kv_len=state.lens_T,
            page_table=state.page_table_TN,
        )
        return out_THD[:, :heads].masked_fill(state.padding_T11, 0.0)

    def _wrapper(self, query: Tensor, page_size: int) -> Any:
        """Return a wrapper for so many tokens, planned for any lengths and pages."""
        count = len(query)
        key = (count, page_size, query.dtype)
        if key not in self._wrappers:
            wrapper = self._mla.BatchMLAPagedAttentionWrapper(
                self._workspace.on(query.device), backend="cutlass"
            )
            wrapper.plan(
                metadata=self._mla.MLAPlanMetadata.dense(
                    cum_seq_lens_q=torch.arange(count + 1, dtype=torch.int32),
                    block_tables=torch.zeros(count, TABLE_TOKENS // page_size, dtype=torch.int32),
                    seq_lens=torch.ones(count, dtype=torch.int32),
                ),
                num_heads=facts.CUTLASS_HEADS,
                head_dim_ckv=RANK,
                head_dim_kpe=ROPE,
                page_size=page_size,
                causal=True,
                sm_scale=CUTLASS_SCALE,
                q_data_type=query.dtype,
                kv_data_type=query.dtype,
            )
            self._wrappers[key] = wrapper
        return self._wrappers[key]


def _split_tokens(batch: AttentionBatch, page_size: int) -> _CutlassState:
    page_table_TN, lens_T = batch.page_table_TN, batch.seq_lens_B
    if batch.phase is not Phase.DECODE:
        total, counts_B = batch.stop - batch.start, batch.cu_seqlens_q_B1.diff()
        # A token sees as many as its place in the step and this difference, which its request's last token has too.
        after_B = batch.seq_lens_B - batch.cu_seqlens_q_B1[1:]
        lens_T = after_B.repeat_interleave(counts_B, output_size=total)
        lens_T = lens_T + torch.arange(1, total + 1, dtype=torch.int32, device=lens_T.device)
    padding = -page_table_TN.shape[1] % (TABLE_TOKENS // page_size)
    return _CutlassState(F.pad(page_table_TN, (0, padding)).contiguous(), *clamp_lens(lens_T))
