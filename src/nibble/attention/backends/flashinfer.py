"""flashinfer: FlashInfer's FA2 and FA3 templates over paged KV, dense MHA and absorbed MLA.

A wrapper of the package is planned for a segment, once for all layers of a step that ask the same of it; planning
happens on the host, so a CUDA graph cannot hold it. On SM90 FA3 serves prompts over 16-bit caches, and MLA; FA2 does
the rest: over one query token FA3 takes four times as long, and it reads no cache narrower than the query. Over NVFP4
the library does not split long contexts on SM120. No sinks: the templates that have them are other wrappers. Owns what
the package needs of a machine, for all backends that call it.

The MLA kernels cut a request's queries, heads and all, into tiles of 64 or 128 rows. A token whose heads are in two
tiles may lose its last key, and the package refuses to plan that, so the number of heads must divide a tile; and a plan
has room for 16384 tiles, which a step of 16384 tokens of 128 heads fills.

Shape suffixes: T tokens, B requests, N pages of a request, P pages of all requests in order, H query heads, G KV heads,
S slots of a page, D values of a head.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from nibble.attention.backends.vendor import (
    ALL,
    HALVES,
    PLAIN,
    RANK,
    ROPE,
    Scales,
    Workspace,
    capability,
    imported,
    latents,
    outdated,
    row,
    without_cuda,
)
from nibble.attention.metadata import AttentionBatch, AttentionParams
from nibble.attention.planner.support import NEVER, PROMPT, WITH, BackendInfo, Phase, Support
from nibble.cache.view import KVView, StreamView
from nibble.kernels import import_problem
from nibble.model_spec import LATENT

PACKAGE, DISTRIBUTION = "flashinfer", "flashinfer-python"
OLDEST = "0.7.2"
INSTALL = "pip install 'flashinfer-python>=0.7.2', beside nvcc (the CUDA toolkit) or a flashinfer-jit-cache to match"
VERSIONS = "0.7.2"
WORKSPACE = 512 << 20
"""Results of split contexts, for all wrappers: they run one after the other."""
PLANS = 128 << 20
"""What wrappers keep of their plans: 8 MiB each, of up to four phases, a few kinds of layers, and COPIES of each."""
COPIES = 2
"""Wrappers of one kind: a step may be planned while the one before runs."""


def package(name: str = PACKAGE) -> ModuleType:
    """The package or a module of it, or a BackendError that says why it cannot be imported."""
    return imported(name, INSTALL)


def trouble() -> str | None:
    """What the package needs and this machine lacks: a version, a CUDA build of torch, or something that compiles."""
    lack = outdated(DISTRIBUTION, OLDEST) or without_cuda()
    if lack or _compiles():
        return lack
    return f"its kernels compiled, which takes nvcc or the package {_CACHE}, and neither is here"


_CACHE = "flashinfer_jit_cache"


def _compiles() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return not import_problem(_CACHE) or bool(shutil.which("nvcc")) or Path(home, "bin/nvcc").exists()


@dataclass(frozen=True, slots=True)
class _Ask:
    """What a wrapper is planned for, beside the segment. stored: dtype of the first plane, in which FP4 is bytes."""

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
    """A wrapper and the segment that it is planned for, as long as somebody has that."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._segment: Callable[[], AttentionBatch | None] = lambda: None
        self._copied: torch.cuda.Event | None = None

    @property
    def segment(self) -> AttentionBatch | None:
        return self._segment()

    def plan(self, segment: AttentionBatch, how: Callable[[], None]) -> None:
        """Plans anew. The host's copy of the last plan may still be on its way to the device, and is waited for."""
        if self._copied is not None:
            self._copied.synchronize()
        self._segment = lambda: None
        how()
        if segment.page_table_BN.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._segment = ref(segment)


class FlashInfer:
    """The adapter. Its workspace and wrappers serve one step at a time."""

    def __init__(self) -> None:
        self._package, self._mla = package(), package(f"{PACKAGE}.mla")
        self._workspace = Workspace(WORKSPACE)
        self._planned: dict[_Ask, list[_Planned]] = {}
        self._scales = Scales(PACKAGE)

    def attend(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        if q_THD.stride(-1) != 1:
            q_THD = q_THD.contiguous()
        if LATENT in view.streams:
            return self._latents(q_THD, view, segment, spec)
        k, v = view.streams["k"], view.streams["v"]
        ask = _ask(q_THD, k, view.page_size, segment, spec)
        wrapper = self._wrapper(ask, segment, self._heads_wrapper, _plan_heads)
        options: dict[str, Any] = {}
        if k.format.needs_scale:
            options |= {"k_scale": self._scales.of(k), "v_scale": self._scales.of(v)}
        if len(k.planes) > 1:
            options["kv_cache_sf"] = (k.planes[1], v.planes[1])
        return wrapper.run(q_THD, (k.planes[0], v.planes[0]), **options)

    def _latents(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        latent = latents(view, PACKAGE)
        ask = _ask(q_THD, latent, view.page_size, segment, spec)
        wrapper = self._wrapper(ask, segment, self._latent_wrapper, self._plan_latents)
        data_PSD = latent.paged.planes_PHS[0][:, 0]
        return wrapper.run(
            query=(q_THD[..., :RANK], q_THD[..., RANK:]),
            kv_cache=(data_PSD[..., :RANK], data_PSD[..., RANK:]),
        )

    def _wrapper(
        self,
        ask: _Ask,
        segment: AttentionBatch,
        make: Callable[[_Ask, Tensor], Any],
        plan: Callable[[Any, _Ask, AttentionBatch], None],
    ) -> Any:
        """The wrapper that is planned for this segment: the same for all layers that ask so."""
        known = self._planned.setdefault(ask, [])
        for entry in known:
            if entry.segment is segment:
                return entry.wrapper
        free = next((entry for entry in known if entry.segment is None), None)
        if free is None:
            free = (
                known.pop(0)
                if len(known) == COPIES
                else _Planned(make(ask, self._workspace.on(segment.page_table_BN.device)))
            )
        else:
            known.remove(free)
        known.append(free)
        wrapper = free.wrapper
        free.plan(segment, lambda: plan(wrapper, ask, segment))
        return wrapper

    def _heads_wrapper(self, ask: _Ask, scratch: Tensor) -> Any:
        return self._package.BatchPrefillWithPagedKVCacheWrapper(
            scratch, ask.packing.upper(), backend=ask.template
        )

    def _latent_wrapper(self, ask: _Ask, scratch: Tensor) -> Any:
        return self._mla.BatchMLAPagedAttentionWrapper(scratch, backend=ask.template)

    def _plan_latents(self, wrapper: Any, ask: _Ask, segment: AttentionBatch) -> None:
        indptr, indices_P, _ = _pages(segment, ask.page)
        wrapper.plan(
            metadata=self._mla.MLAPlanMetadata.csr(
                segment.cu_seqlens_q_B1, indptr.to(indices_P.device), indices_P, segment.seq_lens_B
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


def _ask(q_THD: Tensor, keys: StreamView, page: int, segment: AttentionBatch, spec: AttentionParams) -> _Ask:
    stored, narrow = keys.planes[0].dtype, keys.planes[0].dtype != q_THD.dtype
    latents = keys.stream.name == LATENT
    fa3 = capability(q_THD) == 90 and not narrow and (latents or not segment.phase.decodes)
    return _Ask(
        segment.phase,
        "fa3" if fa3 else "fa2",
        q_THD.dtype,
        stored,
        keys.packing.name,
        q_THD.shape[1],
        keys.stream.heads,
        keys.stream.dim,
        page,
        spec.scale,
        spec.window,
        spec.softcap,
    )


def _plan_heads(wrapper: Any, ask: _Ask, segment: AttentionBatch) -> None:
    indptr, indices_P, last_B = _pages(segment, ask.page)
    starts = torch.tensor(tuple(accumulate(segment.query_lens, initial=0)), dtype=torch.int32)
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


def _pages(segment: AttentionBatch, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32: where each request's pages begin, with the end of the last [B + 1]; the pages of all requests [P]; and how
    much the last page of each holds [B]. Lengths are on the host, where plans are made; pages stay on the device.
    """
    counts = [-(-length // size) for length in segment.seq_lens]
    indptr = torch.tensor(tuple(accumulate(counts, initial=0)), dtype=torch.int32)
    last_B = torch.tensor([(length - 1) % size + 1 for length in segment.seq_lens], dtype=torch.int32)
    total, device = int(indptr[-1]), segment.page_table_BN.device
    counts_B = torch.tensor(counts, device=device)
    owners_P = torch.repeat_interleave(counts_B, output_size=total)
    columns_P = torch.arange(total, device=device) - (counts_B.cumsum(0) - counts_B)[owners_P]
    return indptr, segment.page_table_BN[owners_P, columns_P], last_B


GPUS = frozenset({80, 86, 89, 90, 100, 103, 120, 121})
ONE = frozenset({Phase.DECODE})
MORE = ALL - ONE
VERIFY = frozenset({Phase.VERIFY})
RACE = "benchmarks/backends.py on one H200"
TILED = frozenset({1, 2, 4, 8, 16, 32, 64, 128})
EXTENDS = "benchmarks/extend.py on one H200, fa3: 8K new on 32K in 9.12 ms, 2K in 0.100 ms"
UNRECORDED = "its plan is made on the host, so decode steps run without CUDA graphs"
FP8 = {"fp8_e4m3", "fp8_e5m2"}


def _heads(
    phase: frozenset[Phase],
    formats: set[str],
    dtypes: Iterable[str],
    prefer: int,
    cites: str,
    dims: Iterable[int] = (64, 128, 256),
    staged: int | None = None,
    **more: Iterable[int],
) -> Support:
    facts: dict[str, Any] = {"packing": {"nhd", "hnd"}, "arch": GPUS, "sinks": NEVER}
    return row(
        "mha", phase=phase, format=formats, dim=dims, dtype=dtypes, prefer=prefer, staged=staged,
        held=WORKSPACE + PLANS, cites=cites, **facts | more,
    )  # fmt: skip


def _latents(
    phase: frozenset[Phase],
    facts: Mapping[str, Iterable[int]],
    fmt: str,
    dtype: str,
    prefer: int,
    staged: int | None,
    cites: str,
) -> Support:
    given: dict[str, Any] = {"arch": GPUS, "group": TILED}
    return row(
        "mla", phase=phase, format={fmt}, dtype={dtype}, prefer=prefer, staged=staged, held=WORKSPACE + PLANS,
        cites=f"flashinfer/mla: {cites}", **given | dict(facts),
    )  # fmt: skip


HOPPER: Mapping[str, Iterable[int]] = {"arch": {90}}
FIRST, NEXT = frozenset({Phase.PREFILL}), frozenset({Phase.EXTEND})
CAPPED_WINDOWS: Mapping[str, Iterable[int]] = {"window": WITH, "softcap": WITH}
PROMPT_ROWS: tuple[tuple[frozenset[Phase], Mapping[str, Iterable[int]], int, int | None, str], ...] = (
    (NEXT, {}, 30, None, EXTENDS),
    (
        NEXT,
        {**HOPPER, "softcap": WITH},
        30,
        25,
        f"{RACE}: over staged pages, triton 1.2 x, with windows 1.07 x",
    ),
    (FIRST, {"window": NEVER}, 30, None, EXTENDS),
    (FIRST, {**HOPPER, "window": NEVER, "softcap": WITH}, 30, 25, f"{RACE}: over staged pages, triton 1.1 x"),
    (FIRST, {"window": WITH, "softcap": NEVER}, 30, None, EXTENDS),
    (FIRST, {"arch": GPUS - {90}, **CAPPED_WINDOWS}, 30, None, EXTENDS),
    (FIRST, {**HOPPER, **CAPPED_WINDOWS}, 18, None, f"{RACE}: 8K in 1.15 ms, triton 1.04"),
)
"""Of heads: phases, of what beyond what all take, prefer, the same over staged pages."""
LATENT_ROWS: tuple[tuple[frozenset[Phase], Mapping[str, Iterable[int]], int, int | None, str], ...] = (
    (PROMPT, {}, 28, None, f"any page size; {RACE}: 1.1 to 1.2 x fa3, triton 1.7 x"),
    (PROMPT, HOPPER, 28, 25, f"{RACE}: over staged pages 1.1 to 1.4 x fa3, triton 1.2 to 1.6 x"),
    (VERIFY, {}, 5, None, f"{RACE}: 16 heads, 2.4 x flashmla, triton 1.5 x"),
    (VERIFY, {**HOPPER, "group": {64, 128}}, 25, None, f"{RACE}: 128 heads, 1.4 x flashmla, triton 2 x"),
    (
        ONE,
        {},
        12,
        None,
        f"attention alone as fast as FlashMLA on one H200; {UNRECORDED}, 5 ms a step before it",
    ),
)
"""Phases, of what beyond what all take, prefer, the same over staged pages."""


BACKEND = BackendInfo(
    name="flashinfer",
    summary="FlashInfer's FA2 and FA3 templates; its NVFP4 reader also runs outside Blackwell",
    adapter=FlashInfer,
    packages=(PACKAGE,),
    install=INSTALL,
    versions=VERSIONS,
    unavailable_reason=trouble,
    support=(
        *(
            _heads(phase, {fmt}, {dtype}, prefer, cites, staged=staged, **facts)
            for phase, facts, prefer, staged, cites in PROMPT_ROWS
            for fmt, dtype in PLAIN
        ),
        *(
            _heads(VERIFY, {fmt}, {dtype}, 15, f"{RACE}: 1.1 x fa3, 2.2 x with 1 KV head; triton 1.1 x")
            for fmt, dtype in PLAIN
        ),
        *(
            _heads(ONE, {fmt}, {dtype}, 15, f"{RACE}: 64 x 8K in 0.532 ms, fa3 0.491; {UNRECORDED}")
            for fmt, dtype in PLAIN
        ),
        _heads(
            MORE, FP8, HALVES, 12, f"flashinfer/prefill.py: fa2 reads both; {RACE}: 2.4 x sdpa, triton 1.6 x"
        ),
        _heads(ONE, FP8, HALVES, 12, f"{RACE}: 64 x 8K in 0.460 ms, cuda 0.262; {UNRECORDED}"),
        _heads(
            ALL,
            {"nvfp4"},
            HALVES,
            10,
            f"{RACE}: 64 x 8K in 0.706 ms, cuda 0.160; wrong over heads of 64",
            (128, 256),
        ),
        *(
            _latents(phase, facts, fmt, dtype, prefer, staged, cites)
            for phase, facts, prefer, staged, cites in LATENT_ROWS
            for fmt, dtype in PLAIN
        ),
    ),
)
