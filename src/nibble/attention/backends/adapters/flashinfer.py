"""Call FlashInfer's FA2 and FA3 templates over paged KV, dense MHA and absorbed MLA.

A wrapper of the package is planned for a batch, once for all layers of a step that ask the same of it; planning
happens on the host, so a CUDA graph cannot hold it. On SM90 FA3 serves prompts over 16-bit caches, and MLA; FA2 does
the rest.

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

from nibble.attention.backends.adapters.vendor import Scales, Workspace, capability, check_latents
from nibble.attention.backends.flashinfer import COPIES, PACKAGE, WORKSPACE, import_flashinfer
from nibble.attention.backends.vendor import RANK, ROPE
from nibble.attention.layer import AttentionBackend
from nibble.cache.pool import KVView, StreamView
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LATENT, Phase


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
    kv_heads: int
    dim: int
    page_size: int
    scale: float
    window: int | None
    softcap: float | None
    latent: bool

    @property
    def causal(self) -> bool:
        """Return whether a mask is needed: one token sees all that is stored."""
        return self.phase is not Phase.DECODE


class _Wrapper:
    """A wrapper of the package, and the state whose plan it holds, as long as somebody has that."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._state: Callable[[], _State | None] = lambda: None
        self._copied: torch.cuda.Event | None = None

    @property
    def state(self) -> _State | None:
        """Return the state that is planned for; None once its step is over."""
        return self._state()

    def plan(self, state: _State, write_plan: Callable[[Any, _State], None]) -> None:
        """Plan for another state."""
        # The host's copy of the last plan may still be on its way to the device.
        if self._copied is not None:
            self._copied.synchronize()
        self._state = lambda: None
        write_plan(self.wrapper, state)
        if state.batch.page_table_BN.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._state = ref(state)
        state.wrapper = self


@dataclass(slots=True, eq=False, weakref_slot=True)
class _State:
    """A plan for a batch. Its wrapper may be planned for another state, where a step has more than COPIES of a kind."""

    kind: _Kind
    batch: AttentionBatch
    wrapper: _Wrapper | None = None


class FlashInfer(AttentionBackend):
    """The adapter. Its workspace and wrappers serve one step at a time."""

    def __init__(self) -> None:
        self._package, self._mla = import_flashinfer(), import_flashinfer(f"{PACKAGE}.mla")
        self._workspace = Workspace(WORKSPACE)
        # The wrappers of a kind, the one that was planned last at the end.
        self._wrappers: dict[_Kind, list[_Wrapper]] = {}
        self._scales = Scales(PACKAGE)

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> _Kind:
        """Return what the package plans for."""
        keys = check_latents(view, PACKAGE) if LATENT in view.streams else view.streams["k"]
        return _kind(q_THD, keys, view.page_size, batch, params)

    def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> _State:
        """Plan a wrapper for the batch, on the host."""
        state = _State(self.kind(q_THD, view, batch, params), batch)
        self._plan(state)
        return state

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _State
    ) -> Tensor:
        """Run the wrapper that is planned for this batch."""
        # Another state of the step may have taken the wrapper over.
        if state.wrapper is None or state.wrapper.state is not state:
            self._plan(state)
        assert state.wrapper is not None
        wrapper = state.wrapper.wrapper
        if q_THD.stride(-1) != 1:
            q_THD = q_THD.contiguous()
        if state.kind.latent:
            data_PSD = view.streams[LATENT].paged.planes_PHS[0][:, 0]
            return wrapper.run(
                query=(q_THD[..., :RANK], q_THD[..., RANK:]),
                kv_cache=(data_PSD[..., :RANK], data_PSD[..., RANK:]),
            )
        k, v = view.streams["k"], view.streams["v"]
        options: dict[str, Any] = {}
        if k.format.needs_scale:
            options |= {"k_scale": self._scales.of(k), "v_scale": self._scales.of(v)}
        if len(k.planes) > 1:
            # The second plane of FP4 formats has their block scales.
            options["kv_cache_sf"] = (k.planes[1], v.planes[1])
        return wrapper.run(q_THD, (k.planes[0], v.planes[0]), **options)

    def _plan(self, state: _State) -> None:
        """Plan a wrapper for a state: one whose step is over, a new one, or the one that was planned first."""
        wrappers = self._wrappers.setdefault(state.kind, [])
        free = next((entry for entry in wrappers if entry.state is None), None)
        if free is None and len(wrappers) < COPIES:
            free = _Wrapper(self._make_wrapper(state.kind, state.batch.page_table_BN.device))
        elif free is None:
            # The wrapper that was planned first: where its state is still needed, forward() plans again.
            free = wrappers.pop(0)
        else:
            wrappers.remove(free)
        wrappers.append(free)
        free.plan(state, self._plan_latents if state.kind.latent else _plan_heads)

    def _make_wrapper(self, kind: _Kind, device: torch.device) -> Any:
        workspace = self._workspace.on(device)
        if kind.latent:
            return self._mla.BatchMLAPagedAttentionWrapper(workspace, backend=kind.template)
        return self._package.BatchPrefillWithPagedKVCacheWrapper(
            workspace, kind.packing.upper(), backend=kind.template
        )

    def _plan_latents(self, wrapper: Any, state: _State) -> None:
        kind, batch = state.kind, state.batch
        indptr, indices_P, _ = _pages(batch, kind.page_size)
        wrapper.plan(
            metadata=self._mla.MLAPlanMetadata.csr(
                batch.cu_seqlens_q_B1, indptr.to(indices_P.device), indices_P, batch.seq_lens_B
            ),
            num_heads=kind.heads,
            head_dim_ckv=RANK,
            head_dim_kpe=ROPE,
            page_size=kind.page_size,
            causal=True,
            sm_scale=kind.scale,
            q_data_type=kind.dtype,
            kv_data_type=kind.kv_dtype,
            query_layout="split",
            kv_cache_layout="split",
        )


def _kind(
    q_THD: Tensor, keys: StreamView, page_size: int, batch: AttentionBatch, params: AttentionParams
) -> _Kind:
    kv_dtype = keys.planes[0].dtype
    latent = keys.stream.name == LATENT
    # Over one query token FA3 takes four times as long as FA2, and it reads no cache narrower than the query.
    fa3 = capability(q_THD) == 90 and kv_dtype == q_THD.dtype and (latent or not batch.phase.decodes)
    return _Kind(
        batch.phase,
        "fa3" if fa3 else "fa2",
        q_THD.dtype,
        kv_dtype,
        keys.packing.name,
        q_THD.shape[1],
        keys.stream.heads,
        keys.stream.dim,
        page_size,
        params.scale,
        params.window,
        params.softcap,
        latent,
    )


def _plan_heads(wrapper: Any, state: _State) -> None:
    kind, batch = state.kind, state.batch
    indptr, indices_P, last_B = _pages(batch, kind.page_size)
    starts = torch.tensor(tuple(accumulate(batch.query_lens, initial=0)), dtype=torch.int32)
    wrapper.plan(
        starts,
        indptr,
        indices_P,
        last_B,
        kind.heads,
        kind.kv_heads,
        kind.dim,
        kind.page_size,
        causal=kind.causal,
        sm_scale=kind.scale,
        window_left=-1 if kind.window is None else kind.window - 1,  # theirs does not count the present token
        logits_soft_cap=kind.softcap or 0.0,
        q_data_type=kind.dtype,
        kv_data_type=kind.kv_dtype,
    )


def _pages(batch: AttentionBatch, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch's pages as the package's plans take them, all int32.

    Returns:
        Where each request's pages begin, with the end of the last [B + 1], on the host, where plans are made; the pages
        of all requests [P], on the device; tokens in the last page of each [B], on the host.
    """
    counts = [-(-length // page_size) for length in batch.seq_lens]
    indptr = torch.tensor(tuple(accumulate(counts, initial=0)), dtype=torch.int32)
    last_B = torch.tensor([(length - 1) % page_size + 1 for length in batch.seq_lens], dtype=torch.int32)
    total, device = int(indptr[-1]), batch.page_table_BN.device
    counts_B = torch.tensor(counts, device=device)
    # With output_size the host need not wait for the device to count.
    owners_P = torch.repeat_interleave(counts_B, output_size=total)
    columns_P = torch.arange(total, device=device) - (counts_B.cumsum(0) - counts_B)[owners_P]
    return indptr, batch.page_table_BN[owners_P, columns_P], last_B
