"""The start-up test: random tokens through the very pool, kernels and routes that will serve.

For each layer group a few requests are written, read and attended over in every phase that is planned, as a step of the
engine does it; what was stored is compared with the format's own arithmetic, and what was attended with the torch
reference over the same pool. So a kernel that is wrong on this machine stops the start, and not an answer. Owns
self_test() and tier_test(). Must not know of requests or models.

Shape suffixes: T tokens of a step, H heads, D values of a head, N pages of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from nibble.attention.backends.adapters.torch_ref import TorchRef
from nibble.attention.layer import AttentionBackend, StepContext, attention, page_table_by_token
from nibble.attention.planner.plan import GroupPlan, Plan, Route
from nibble.attention.planner.support import Phase
from nibble.cache.offload.hot_buffer import HotBuffers
from nibble.cache.pool import PagedPool
from nibble.cache.view import KVView
from nibble.errors import BackendError
from nibble.formats.base import raw
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.offload import alike, resident_slots
from nibble.kernels.types import AttentionBatch, AttentionMetadata, AttentionParams
from nibble.model_spec import INDEX, LATENT

CHOSEN = 40
"""Tokens that a query of sparse attention looks at here: every second one, from its own backwards."""
PHASES = (Phase.PREFILL, Phase.EXTEND, Phase.VERIFY, Phase.DECODE)
REQUESTS = ((230, 40, 3, 1), (5, 3, 3, 1), (33, 1, 3, 1))
"""New tokens of each request, phase by phase. Phases that a plan has no route for are left out."""
WINDOW = 48
"""A sliding window is made so short, at most, so that it hides something."""
SOFTCAP = 20.0
STORED, ATTENDED = 0.02, {"float32": 0.005}
"""Largest deviations, norm over norm: of stored values, where a tie may round otherwise; of what is attended, in
float32 (tf32 allowed); and in 16 bits, where probabilities may be rounded too."""
ATTENDED_16_BITS = 0.03


def self_test(plan: Plan, pool: PagedPool, backends: Mapping[str, AttentionBackend]) -> None:
    """Raises BackendError where a route does not do what it says. The pool is afterwards as it was before."""
    for group in plan.groups:
        view = pool.view(plan.owner[group.layers[0]])
        pages = _pages(pool)
        with torch.inference_mode(), _borrowed(view, list(pages.values())):
            _Trial(plan, group, pool, backends, pages).run()


def tier_test(tier: HotBuffers, pool: PagedPool) -> None:
    """Raises BackendError where a page does not come back from the host as it went, or as the host's format leaves it;
    once for each pair of formats. The pool is afterwards as it was before."""
    tried = set()
    for layer, (device, host) in tier.stores.items():
        if (device.format.name, host.format.name) in tried:
            continue
        tried.add((device.format.name, host.format.name))
        stream = pool.view(layer).streams[LATENT]
        with torch.inference_mode(), _borrowed(pool.view(layer), [[0, 1]]):
            random = torch.Generator(tier.device).manual_seed(0)
            x_SHD = torch.randn((tier.page_size, 1, stream.stream.dim), generator=random, device=tier.device)
            pool.write(layer, {LATENT: x_SHD}, torch.arange(tier.page_size, device=tier.device))
            tier.round_trip(layer, 0, 1)
            sent_LD, found_LD = stream.gather_reference(torch.tensor([[0], [1]], device=tier.device)).flatten(
                1, 2
            )
        if not alike(device, host):
            codes = host.format.encode(sent_LD[:, None], host.scale)
            again = device.format.encode(host.format.decode(codes, host.scale), device.scale)
            sent_LD = device.format.decode(again, device.scale)[:, 0]
        error = float((found_LD - sent_LD).norm() / sent_LD.norm())
        if not error <= STORED:
            raise BackendError(
                f"the start-up test failed: a page of {device.format.name} comes back from the host's "
                f"{host.format.name} off by {error:.3g} of its norm; leave --hisparse out, and please report this"
            )


def _pages(pool: PagedPool) -> dict[tuple[int, ...], list[int]]:
    """Pages of each request, not in order; requests for which the pool is too small are left out."""
    found: dict[tuple[int, ...], list[int]] = {}
    free = list(range(min(pool.pages, pool.frames)))
    for lens in REQUESTS:
        needed = -(-sum(lens) // pool.layout.page_size)
        if needed <= len(free):
            found[lens] = [free.pop(-1 if i % 2 else 0) for i in range(needed)]
    return found


@contextmanager
def _borrowed(view: KVView, pages: Sequence[Sequence[int]]) -> Iterator[None]:
    """Puts the bytes of these pages back in the end."""
    planes = [raw(plane) for stream in view.streams.values() for plane in stream.planes]
    index = torch.tensor([page for row in pages for page in row], device=planes[0].device, dtype=torch.int64)
    saved = [plane[index] for plane in planes]
    try:
        yield
    finally:
        for plane, values in zip(planes, saved, strict=True):
            plane[index] = values


class _Trial:
    """One layer group's trial. Requests grow from step to step, as those of an engine do."""

    def __init__(
        self,
        plan: Plan,
        group: GroupPlan,
        pool: PagedPool,
        backends: Mapping[str, AttentionBackend],
        pages: Mapping[tuple[int, ...], Sequence[int]],
    ) -> None:
        self.plan, self.group, self.pool, self.backends = plan, group, pool, backends
        self.layer = group.layers[0]
        self.owner = plan.owner[self.layer]
        self.view = pool.view(self.owner)
        self.device = self.view.keys.scale.device
        self.lens = tuple(pages)
        self.stored = [0] * len(pages)
        width = max(map(len, pages.values()), default=0)
        rows = [[*row, *[0] * (width - len(row))] for row in pages.values()]
        self.page_table_BN = torch.tensor(rows, dtype=torch.int32, device=self.device)
        self.random = torch.Generator(self.device).manual_seed(0)
        heads, window = group.group.q_heads, group.group.window
        self.spec = AttentionParams(
            group.group.head_dim**-0.5,
            None if window is None else min(window, WINDOW),
            SOFTCAP if group.group.softcap else None,
            self._noise(heads) if group.group.sinks else None,
        )

    def run(self) -> None:
        routes = {route.phase: route for route in self.group.routes}
        for phase, query_lens in zip(PHASES, zip(*self.lens, strict=True), strict=False):
            if phase in routes:
                self._step(routes[phase], query_lens)

    def _step(self, route: Route, query_lens: tuple[int, ...]) -> None:
        slot_mapping_T, seq_lens = (
            self._slots(query_lens),
            [n + new for n, new in zip(self.stored, query_lens, strict=True)],
        )
        segment = AttentionBatch.from_lens(route.phase, 0, query_lens, seq_lens, self.page_table_BN)
        streams = {
            name: self._noise(len(slot_mapping_T), entry.stream.heads, entry.stream.dim)
            for name, entry in self.view.streams.items()
            if name != INDEX
        }
        q_THD = self._noise(len(slot_mapping_T), self.group.group.q_heads, self.group.group.head_dim)
        if self.owner != self.layer:  # this group reads what another stores
            self.pool.write(self.owner, streams, slot_mapping_T)
        ctx = StepContext(self.plan, self.pool, self.backends, AttentionMetadata(slot_mapping_T, (segment,)))
        spec = (
            replace(self.spec, topk_indices_TK=self._chosen(query_lens, seq_lens))
            if self.group.group.top_k
            else self.spec
        )
        found_THD = attention(ctx, self.layer, q_THD, streams, spec)
        for name, x_THD in streams.items():
            self._compare(
                self._read(name, slot_mapping_T), self._encoded(name, x_THD), STORED, route, f"stores {name}"
            )
        if spec.topk_indices_TK is not None:
            topk_slots_TK = resident_slots(
                spec.topk_indices_TK, page_table_by_token(segment), None, self.plan.page_size
            )
            spec = replace(spec, topk_slots_TK=topk_slots_TK)
        expected_THD = TorchRef().attend(self.view.query(q_THD), self.view, segment, spec)
        limit = ATTENDED.get(self.plan.dtype, ATTENDED_16_BITS)
        self._compare(found_THD, expected_THD, limit, route, "attends")
        self.stored = seq_lens

    def _slots(self, query_lens: Sequence[int]) -> Tensor:
        size = self.plan.page_size
        return torch.cat(
            [
                self.page_table_BN[row, positions // size].long() * size + positions % size
                for row, (start, new) in enumerate(zip(self.stored, query_lens, strict=True))
                for positions in [torch.arange(start, start + new, device=self.device)]
            ]
        )

    def _chosen(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> Tensor:
        """Some tokens that each query sees, ascending, as kernels/indexer/__init__.py gives them."""
        last_T = torch.cat([torch.arange(n - new, n) for new, n in zip(query_lens, seq_lens, strict=True)])
        back_TK = last_T[:, None] - 2 * torch.arange(CHOSEN)
        ordered_TK = torch.where(back_TK < 0, max(seq_lens), back_TK).sort(dim=1).values
        return torch.where(ordered_TK == max(seq_lens), PAD_INDEX, ordered_TK).int().to(self.device)

    def _noise(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self.random, device=self.device)
        return values.to(getattr(torch, self.plan.dtype))

    def _read(self, name: str, slot_mapping_T: Tensor) -> Tensor:
        """What the pool holds of these tokens, dequantised."""
        size = self.plan.page_size
        values_THD = self.view.streams[name].gather_reference((slot_mapping_T // size)[:, None].int())
        return values_THD[torch.arange(len(slot_mapping_T), device=self.device), slot_mapping_T % size]

    def _encoded(self, name: str, x_THD: Tensor) -> Tensor:
        """What the pool should hold of them, by the format's own arithmetic."""
        entry = self.view.streams[name]
        for transform in self.view.transforms if name == "k" else ():
            x_THD = transform.key(x_THD, self.view.k_mean_HD)
        return entry.format.decode(entry.format.encode(x_THD, entry.scale), entry.scale)

    def _compare(self, found: Tensor, expected: Tensor, limit: float, route: Route, what: str) -> None:
        error = float((found.float() - expected.float()).norm() / expected.float().norm())
        if error <= limit:  # which NaN is not
            return
        stored = ":".join(dict.fromkeys(entry.format.name for entry in self.view.streams.values()))
        raise BackendError(
            f"the start-up test failed: backend {route} {what} wrongly in {route.phase} of {stored}"
            f"@{self.plan.layout.packing}, page {self.plan.page_size} (layer group {self.group.group.name}): off by "
            f"{error:.3g} of the reference's norm, where {limit:g} is allowed; choose another backend with "
            "--attention-backend, and please report this"
        )
