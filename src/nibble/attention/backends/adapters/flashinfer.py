"""Call FlashInfer's FA2 and FA3 templates over paged KV, dense MHA and absorbed MLA.

A wrapper of the package is planned for a batch, once for all layers of a step that ask the same of it; planning
happens on the host, so a CUDA graph cannot hold it. On SM90 FA3 serves prompts over 16-bit caches, and MLA; FA2 does
the rest: over one query token FA3 takes four times as long, and it reads no cache narrower than the query.

Shape suffixes: T tokens, B requests, N pages of a request, P pages of all requests in order, H query heads, G KV heads,
S slots of a page, D values of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from nibble.attention.backends.adapters.vendor import Scales, Workspace, capability, latents
from nibble.attention.backends.flashinfer import COPIES, PACKAGE, WORKSPACE, import_flashinfer
from nibble.attention.backends.vendor import RANK, ROPE
from nibble.attention.planner.support import Phase
from nibble.cache.view import KVView, StreamView
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LATENT


@dataclass(frozen=True, slots=True)
class _Ask:
    """What a wrapper is planned for, beside the batch. stored: dtype of the first plane, in which FP4 is bytes."""

    phase: Phase
    template: str
    dtype: torch.dtype
    stored: torch.dtype
    packing: str
    heads: int
    kv_heads: int
    dim: int
    page: int
    scale: float
    window: int | None
    softcap: float | None

    @property
    def causal(self) -> bool:
        """One token sees all that is stored, and needs no mask."""
        return self.phase is not Phase.DECODE


class _Planned:
    """A wrapper and the batch that it is planned for, as long as somebody has that."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._segment: Callable[[], AttentionBatch | None] = lambda: None
        self._copied: torch.cuda.Event | None = None

    @property
    def batch(self) -> AttentionBatch | None:
        return self._segment()

    def plan(self, batch: AttentionBatch, how: Callable[[], None]) -> None:
        """Plans anew. The host's copy of the last plan may still be on its way to the device, and is waited for."""
        if self._copied is not None:
            self._copied.synchronize()
        self._segment = lambda: None
        how()
        if batch.page_table_BN.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._segment = ref(batch)


class FlashInfer:
    """The adapter. Its workspace and wrappers serve one step at a time."""

    def __init__(self) -> None:
        self._package, self._mla = import_flashinfer(), import_flashinfer(f"{PACKAGE}.mla")
        self._workspace = Workspace(WORKSPACE)
        self._planned: dict[_Ask, list[_Planned]] = {}
        self._scales = Scales(PACKAGE)

    def attend(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        if q_THD.stride(-1) != 1:
            q_THD = q_THD.contiguous()
        if LATENT in view.streams:
            return self._latents(q_THD, view, batch, params)
        k, v = view.streams["k"], view.streams["v"]
        ask = _ask(q_THD, k, view.page_size, batch, params)
        wrapper = self._wrapper(ask, batch, self._heads_wrapper, _plan_heads)
        options: dict[str, Any] = {}
        if k.format.needs_scale:
            options |= {"k_scale": self._scales.of(k), "v_scale": self._scales.of(v)}
        if len(k.planes) > 1:
            options["kv_cache_sf"] = (k.planes[1], v.planes[1])
        return wrapper.run(q_THD, (k.planes[0], v.planes[0]), **options)

    def _latents(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        latent = latents(view, PACKAGE)
        ask = _ask(q_THD, latent, view.page_size, batch, params)
        wrapper = self._wrapper(ask, batch, self._latent_wrapper, self._plan_latents)
        data_PSD = latent.paged.planes_PHS[0][:, 0]
        return wrapper.run(
            query=(q_THD[..., :RANK], q_THD[..., RANK:]),
            kv_cache=(data_PSD[..., :RANK], data_PSD[..., RANK:]),
        )

    def _wrapper(
        self,
        ask: _Ask,
        batch: AttentionBatch,
        make: Callable[[_Ask, Tensor], Any],
        plan: Callable[[Any, _Ask, AttentionBatch], None],
    ) -> Any:
        """The wrapper that is planned for this batch: the same for all layers that ask so."""
        known = self._planned.setdefault(ask, [])
        for entry in known:
            if entry.batch is batch:
                return entry.wrapper
        free = next((entry for entry in known if entry.batch is None), None)
        if free is None:
            free = (
                known.pop(0)
                if len(known) == COPIES
                else _Planned(make(ask, self._workspace.on(batch.page_table_BN.device)))
            )
        else:
            known.remove(free)
        known.append(free)
        wrapper = free.wrapper
        free.plan(batch, lambda: plan(wrapper, ask, batch))
        return wrapper

    def _heads_wrapper(self, ask: _Ask, scratch: Tensor) -> Any:
        return self._package.BatchPrefillWithPagedKVCacheWrapper(
            scratch, ask.packing.upper(), backend=ask.template
        )

    def _latent_wrapper(self, ask: _Ask, scratch: Tensor) -> Any:
        return self._mla.BatchMLAPagedAttentionWrapper(scratch, backend=ask.template)

    def _plan_latents(self, wrapper: Any, ask: _Ask, batch: AttentionBatch) -> None:
        indptr, indices_P, _ = _pages(batch, ask.page)
        wrapper.plan(
            metadata=self._mla.MLAPlanMetadata.csr(
                batch.cu_seqlens_q_B1, indptr.to(indices_P.device), indices_P, batch.seq_lens_B
            ),
            num_heads=ask.heads,
            head_dim_ckv=RANK,
            head_dim_kpe=ROPE,
            page_size=ask.page,
            causal=True,
            sm_scale=ask.scale,
            q_data_type=ask.dtype,
            kv_data_type=ask.stored,
            query_layout="split",
            kv_cache_layout="split",
        )


def _ask(q_THD: Tensor, keys: StreamView, page: int, batch: AttentionBatch, params: AttentionParams) -> _Ask:
    stored, narrow = keys.planes[0].dtype, keys.planes[0].dtype != q_THD.dtype
    latents = keys.stream.name == LATENT
    fa3 = capability(q_THD) == 90 and not narrow and (latents or not batch.phase.decodes)
    return _Ask(
        batch.phase,
        "fa3" if fa3 else "fa2",
        q_THD.dtype,
        stored,
        keys.packing.name,
        q_THD.shape[1],
        keys.stream.heads,
        keys.stream.dim,
        page,
        params.scale,
        params.window,
        params.softcap,
    )


def _plan_heads(wrapper: Any, ask: _Ask, batch: AttentionBatch) -> None:
    indptr, indices_P, last_B = _pages(batch, ask.page)
    starts = torch.tensor(tuple(accumulate(batch.query_lens, initial=0)), dtype=torch.int32)
    wrapper.plan(
        starts,
        indptr,
        indices_P,
        last_B,
        ask.heads,
        ask.kv_heads,
        ask.dim,
        ask.page,
        causal=ask.causal,
        sm_scale=ask.scale,
        window_left=-1 if ask.window is None else ask.window - 1,  # theirs does not count the present token
        logits_soft_cap=ask.softcap or 0.0,
        q_data_type=ask.dtype,
        kv_data_type=ask.stored,
    )


def _pages(batch: AttentionBatch, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32: where each request's pages begin, with the end of the last [B + 1]; the pages of all requests [P]; and how
    much the last page of each holds [B]. Lengths are on the host, where plans are made; pages stay on the device.
    """
    counts = [-(-length // size) for length in batch.seq_lens]
    indptr = torch.tensor(tuple(accumulate(counts, initial=0)), dtype=torch.int32)
    last_B = torch.tensor([(length - 1) % size + 1 for length in batch.seq_lens], dtype=torch.int32)
    total, device = int(indptr[-1]), batch.page_table_BN.device
    counts_B = torch.tensor(counts, device=device)
    owners_P = torch.repeat_interleave(counts_B, output_size=total)
    columns_P = torch.arange(total, device=device) - (counts_B.cumsum(0) - counts_B)[owners_P]
    return indptr, batch.page_table_BN[owners_P, columns_P], last_B
