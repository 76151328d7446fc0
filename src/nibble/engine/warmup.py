"""Make a model with its pool ready to serve: compile, test, record, and check the memory. On a CPU only the test.

The start-up test sends random tokens through the very pool, kernels and routes that will serve. For each layer group a
few requests are written, read and attended over in every phase that is planned, as a step of the engine does it. What
was stored is compared with the format's own arithmetic, and what attention answers with the torch reference over the
same pool, with an exact window by the window's definition. So a kernel that is wrong on this machine stops the start,
and not an answer.

Shape suffixes: T tokens of a step, K selected tokens, H heads, D values of a head, N pages of a request, S slots and L
tokens of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.chunks import cut_at_chunks
from nibble.attention.layer import attention
from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.plan import (
    GroupPlan,
    Plan,
    Route,
    cuda_graph_blocker,
)
from nibble.attention.planner.verify_memory import verify_graph_blocker
from nibble.attention.step import AttentionBackend, StepContext
from nibble.attention.window import ExactCache
from nibble.cache.hot_buffer import HotBuffers
from nibble.cache.pool import KVView, PagedPool
from nibble.config import Config
from nibble.engine import rehearsal, window_reference
from nibble.engine.draft_steps import DraftGraphs, HeadForward
from nibble.engine.error_monitor import ATTENTION_TOLERANCE, ATTENTION_TOLERANCE_16_BITS
from nibble.engine.graphs import CudaGraphs, Graphs, live
from nibble.engine.memory_check import check_memory, explain_out_of_memory
from nibble.engine.model_runner import ModelRunner
from nibble.engine.piecewise import PiecewiseSteps
from nibble.engine.startup_report import StartupReport
from nibble.engine.state_test import state_test
from nibble.engine.warmup_steps import (
    DRAFTS,
    FIRST_STEP,
    managers_of,
    run_chunks,
    run_drafts,
    run_longest,
    run_prompts,
)
from nibble.engine.window_reference import Tokens
from nibble.errors import BackendError
from nibble.formats.base import raw
from nibble.kernels import ahead, cdiv
from nibble.kernels.append.naive import apply_rope, apply_rope_to_keys
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.offload import alike, resident_slots
from nibble.kernels.types import AttentionBatch, AttentionMetadata, AttentionParams, Rope
from nibble.model_spec import INDEX, LATENT, Phase
from nibble.models import compile_cache
from nibble.models.linear import check_kernels

TOP_K = 40
"""Tokens that a query of sparse attention looks at here: every second one, from its own backwards, or fewer of them so
that they reach twice as far as an exact window."""
PHASES = (Phase.PREFILL, Phase.EXTEND, Phase.VERIFY, Phase.DECODE)
REQUESTS = ((230, 40, 3, 1), (5, 3, 3, 1), (33, 1, 3, 1))
"""New tokens of each request, phase by phase. Phases that a plan has no route for are left out."""
MAX_WINDOW = 48
"""A sliding window is made so short, at most, so that it hides something: beyond an exact window, if there is one."""
MAX_EXACT = 128
"""An exact window is made so short, at most, so that there are tokens beyond it."""
SOFTCAP = 20.0
STORED_TOLERANCE = 0.02
"""Largest deviation of stored values, norm over norm: a tie may round otherwise."""


def warm_up(
    runner: ModelRunner,
    config: Config,
    budget: MemoryPlan,
    startup: StartupReport,
    max_tokens: int,
    *,
    test: bool = True,
) -> None:
    """Make a runner ready to serve.

    Args:
        runner: with its model, pool and page tables.
        config: whether to record graphs, and of how many requests.
        budget: the memory plan.
        startup: takes the times of the parts, and notes.
        max_tokens: of the longest request.
        test: whether to run the start-up test.

    Raises:
        BackendError: a kernel is wrong, or a step cannot be recorded.
        ConfigError: the model cannot be compiled.
        CapacityError: the memory does not suffice.
    """
    tests = list(tests_of(runner, most_rows(config, budget))) if test else []
    mark = None
    with explain_out_of_memory(budget), ahead.abandoned_on_error():
        if runner.device.type == "cuda":
            with startup.part("rehearsal"):
                mark = _rehearse(runner, config, budget, max_tokens, tests)
            # While the model is traced, which takes a single thread, kernels are compiled.
            with startup.part("compile"):
                run_prompts(runner, (min(FIRST_STEP, max_tokens),), managers_of(runner))
        with startup.part("self-test"):
            if test and runner.followers:
                runner.followers.run("test")
            for run in tests:
                run()
        if runner.device.type != "cuda":
            return
        with startup.part("graphs"):
            _record(runner, config, budget, startup)
        with startup.part("short prompts"):
            run_chunks(runner, budget.step_tokens, max_tokens)
            if config.drafts:
                run_drafts(runner, max_tokens, config.drafts.tokens or max(DRAFTS))
        # No step takes more memory, so a plan that is too tight fails here and not at a request.
        with startup.part("largest step"):
            run_longest(runner, budget.step_tokens, max_tokens)
            # An error of the device shows only where it is waited for.
            torch.cuda.synchronize()
            if runner.followers:
                runner.followers.run("check_memory")
        with startup.part("kernels"):
            ahead.finish()
    if mark:
        rehearsal.leave_mark(mark)
        # Only a first start adds much.
        compile_cache.limit_cache_folder()
    check_memory(budget, torch.cuda.mem_get_info()[0])


def most_rows(config: Config, budget: MemoryPlan) -> int:
    """Return how many rows a product of a step has, at most: tokens, of all ranks where attention has those of some."""
    return budget.step_tokens * (config.tp if config.attention_dp else 1)


def tests_of(runner: ModelRunner, rows: int) -> Iterator[Callable[[], None]]:
    """Yield the tests of a start. rows: see most_rows()."""
    yield partial(check_kernels, runner.model, rows)
    yield partial(self_test, runner.plan, runner.pool, runner.backends, runner.exact)
    if runner.tier:
        yield partial(tier_test, runner.tier, runner.pool)
    # On a CPU the definition itself serves.
    if runner.states and runner.device.type != "cpu":
        yield partial(state_test, runner.states, runner.plan.states, runner.plan.dtype)


def _rehearse(
    runner: ModelRunner,
    config: Config,
    budget: MemoryPlan,
    max_tokens: int,
    tests: Sequence[Callable[[], None]],
) -> Path | None:
    """Begin to compile the kernels of a start; return the file that says so, None where it says so already."""
    mark = rehearsal.mark_of(runner, budget, bool(tests), bool(config.drafts))
    if mark.exists() or runner.followers:  # a rank would wait for the others in each layer
        return None
    steps: list[Callable[[], None]] = [partial(run_chunks, runner, budget.step_tokens, max_tokens)]
    if config.drafts:
        steps.append(partial(run_drafts, runner, max_tokens, config.drafts.tokens or max(DRAFTS)))
    steps.append(partial(rehearsal.rehearse_graphs, runner, budget.graph_sizes, budget.verify_sizes))
    # Models of --deterministic run other operators than they are written with.
    rehearsal.rehearse(runner, [*tests, *([] if config.deterministic else steps)])
    return mark


def _record(runner: ModelRunner, config: Config, budget: MemoryPlan, startup: StartupReport) -> None:
    """Record decode steps and those with drafts, or run them over the same buffers where the config excludes graphs."""
    reason = cuda_graph_blocker(runner.plan)
    if reason is None and not runner.pool.is_capturable:
        reason = "decode steps run without CUDA graphs: writing these formats cannot be recorded"
    if reason is None:
        record = CudaGraphs() if config.graphs else live
        sizes = budget.graph_sizes
        if not isinstance(runner.run, HeadForward):
            runner.record(Graphs(sizes, runner.device, record, budget.verify_sizes))
            if isinstance(record, CudaGraphs):
                _record_pieces(runner, budget.piece_sizes, record, startup)
        elif budget.verify_sizes:
            runner.run.record(
                runner, DraftGraphs(sizes, runner.device, record, budget.verify_sizes, runner.run)
            )
        if config.drafts and not budget.verify_sizes and (why := verify_graph_blocker(runner.plan)):
            startup.notes.append(why)
    elif config.graphs:
        startup.notes.append(reason)


def _record_pieces(
    runner: ModelRunner, sizes: Sequence[int], record: CudaGraphs, startup: StartupReport
) -> None:
    """Record steps with few tokens of prompts piecewise, where that is possible."""
    if not sizes:  # as the plan has it (CacheSpec.piecewise)
        startup.notes.append(
            "steps that compute prompts are launched kernel by kernel: they are recorded for compiled models on one GPU"
        )
        return
    assert runner.graphs and runner.run
    meta = AttentionMetadata(torch.empty(0, device=runner.device), ())
    pieces = PiecewiseSteps(runner.graphs, runner.run)
    try:
        pieces.record(sizes, record, StepContext(runner.plan, runner.pool, runner.backends, meta))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel does that a graph cannot hold
        startup.notes.append(f"steps with prompts run without CUDA graphs ({type(error).__name__}: {error})")
    else:
        runner.pieces = pieces


def self_test(
    plan: Plan,
    pool: PagedPool,
    backends: Mapping[str, AttentionBackend],
    exact: ExactCache | None = None,
) -> None:
    """Run every route of a plan against the reference. The pools are afterwards as they were before.

    Args:
        plan: the routes.
        pool: where tokens are stored.
        backends: by name, all that the plan needs.
        exact: the newest tokens in the compute dtype, with an exact window.

    Raises:
        BackendError: a route does not do what it should.
    """
    if exact and exact.tokens > MAX_EXACT:
        exact = ExactCache(MAX_EXACT, exact.pool, exact.sinks)
    if exact and exact.sinks:
        exact = ExactCache(exact.tokens, exact.pool, plan.page_size)
    for group in plan.groups:
        owner = plan.owner[group.layers[0]]
        pages = _pages(pool, exact)
        with ExitStack() as restored:
            restored.enter_context(torch.inference_mode())
            restored.enter_context(_restored(pool.view(owner), [row.pages for row in pages.values()]))
            if exact:
                copies = [tuple(row.exact.values()) for row in pages.values()]
                restored.enter_context(_restored(exact.pool.view(owner), copies))
            _GroupTest(plan, group, pool, backends, pages, exact).run()


def tier_test(tier: HotBuffers, pool: PagedPool) -> None:
    """Send a page to the host and back, once for each pair of formats. The pool is afterwards as it was before.

    Raises:
        BackendError: the page does not come back as it went, or as the host's format leaves it.
    """
    tested = set()
    for layer, (device, host) in tier.stores.items():
        if (device.format.name, host.format.name) in tested:
            continue
        tested.add((device.format.name, host.format.name))
        stream = pool.view(layer).streams[LATENT]
        with torch.inference_mode(), _restored(pool.view(layer), [[0, 1]]):
            random = torch.Generator(tier.device).manual_seed(0)
            x_SHD = torch.randn((tier.page_size, 1, stream.stream.dim), generator=random, device=tier.device)
            pool.write(layer, {LATENT: x_SHD}, torch.arange(tier.page_size, device=tier.device))
            tier.round_trip(layer, 0, 1)
            both_pages = torch.tensor([[0], [1]], device=tier.device)
            expected_LD, actual_LD = stream.gather_reference(both_pages).flatten(1, 2)
        # A host format of fewer bits rounds the page, so the expected values are rounded alike.
        if not alike(device, host):
            codes = host.format.encode(expected_LD[:, None], host.scale)
            again = device.format.encode(host.format.decode(codes, host.scale), device.scale)
            expected_LD = device.format.decode(again, device.scale)[:, 0]
        error = float((actual_LD - expected_LD).norm() / expected_LD.norm())
        if not error <= STORED_TOLERANCE:
            raise BackendError(
                f"the start-up test failed: a page of {device.format.name} comes back from the host's "
                f"{host.format.name} off by {error:.3g} of its norm; leave --hisparse out, and please report this"
            )


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of a request."""

    pages: Sequence[int]
    exact: Mapping[int, int]
    """By the place of a page in the request: its exact page."""


def _pages(pool: PagedPool, exact: ExactCache | None) -> dict[tuple[int, ...], _Pages]:
    """Return pages of each request, not in order; requests for which a pool is too small are left out."""
    pages: dict[tuple[int, ...], _Pages] = {}
    free = list(range(min(pool.pages, pool.frames)))
    # The last exact page stays empty.
    free_exact = list(range(exact.pool.pages - 1)) if exact else []
    for lens in REQUESTS:
        needed = cdiv(sum(lens), pool.layout.page_size)
        # What the steps after the prompt read exactly, and what they write.
        first = max(0, lens[0] - exact.tokens + 1) // pool.layout.page_size if exact else needed
        sinks = exact.sinks // pool.layout.page_size if exact else 0
        places = [*range(min(sinks, first)), *range(first, needed)]
        if needed <= len(free) and len(places) <= len(free_exact):
            copies = {place: _from_both_ends(free_exact, place) for place in places}
            pages[lens] = _Pages([_from_both_ends(free, i) for i in range(needed)], copies)
    return pages


def _from_both_ends(free: list[int], i: int) -> int:
    """Return a page, from both ends in turn, so that a kernel that takes pages for neighbours fails."""
    return free.pop(-1 if i % 2 else 0)


@contextmanager
def _restored(view: KVView, pages: Sequence[Sequence[int]]) -> Iterator[None]:
    """Restore the bytes of these pages in the end."""
    planes = [raw(plane) for stream in view.streams.values() for plane in stream.planes]
    index = torch.tensor([page for row in pages for page in row], device=planes[0].device, dtype=torch.int64)
    saved = [plane[index] for plane in planes]
    try:
        yield
    finally:
        for plane, values in zip(planes, saved, strict=True):
            plane[index] = values


class _GroupTest:
    """The test of one layer group. Requests grow from step to step, as those of an engine do."""

    def __init__(
        self,
        plan: Plan,
        group: GroupPlan,
        pool: PagedPool,
        backends: Mapping[str, AttentionBackend],
        pages: Mapping[tuple[int, ...], _Pages],
        exact: ExactCache | None,
    ) -> None:
        self.plan, self.group, self.pool, self.backends = plan, group.group, pool, backends
        self.routes = {route.phase: route for route in group.routes}
        self.layer, self.near_kernel = group.layers[0], group.near_kernel
        self.owner = plan.owner[self.layer]
        self.view = pool.view(self.owner)
        self.device = self.view.keys.scale.device
        self.lens = tuple(pages)
        self.num_stored = [0] * len(pages)
        self.pages, self.exact = tuple(pages.values()), exact
        width = max((len(row.pages) for row in self.pages), default=0)
        self.page_table_BN = self._table(
            [[*row.pages, *[0] * (width - len(row.pages))] for row in self.pages]
        )
        self.exact_table_BN: Tensor | None = None
        if exact:
            empty = exact.empty_page
            self.exact_table_BN = self._table(
                [[row.exact.get(i, empty) for i in range(width)] for row in self.pages]
            )
        self.history: dict[str, list[Tensor]] = {}
        """Of each stream all tokens of each request [L, H, D], as they were given."""
        self.random = torch.Generator(self.device).manual_seed(0)
        heads, window = self.group.q_heads, self.group.window
        longest = MAX_WINDOW + (exact.tokens if exact else 0)
        self.params = AttentionParams(
            self.group.head_dim**-0.5,
            None if window is None else min(window, longest),
            SOFTCAP if self.group.softcap else None,
            self._noise(heads) if self.group.sinks else None,
        )

    def run(self) -> None:
        """Run one step in each phase that has a route."""
        for phase, query_lens in zip(PHASES, zip(*self.lens, strict=True), strict=False):
            if phase in self.routes:
                self._step(self.routes[phase], query_lens)

    def _step(self, route: Route, query_lens: tuple[int, ...]) -> None:
        if self.exact:
            self._forget_stored()
        slot_mapping_T = self._slots(query_lens, self.page_table_BN)
        seq_lens = [n + new for n, new in zip(self.num_stored, query_lens, strict=True)]
        batch = AttentionBatch.from_lens(route.phase, 0, query_lens, seq_lens, self.page_table_BN)
        batch = replace(batch, exact_table_BN=self.exact_table_BN)
        streams = self._new_streams(len(slot_mapping_T))
        q_THD = self._noise(len(slot_mapping_T), self.group.q_heads, self.group.head_dim)
        meta = AttentionMetadata(slot_mapping_T, (batch,), exact_slot_mapping_T=self._exact_slots(query_lens))
        inputs, rope = (q_THD, streams), self._rope(len(q_THD)) if route.phase is not PHASES[0] else None
        if rope:
            q_THD = apply_rope(q_THD, rope, None)
            streams = {**streams, "k": apply_rope_to_keys(streams["k"], rope)}
        if self.owner != self.layer:  # this group reads what another stores
            self.pool.write(self.owner, streams, slot_mapping_T, meta.exact_slot_mapping_T)
        ctx = StepContext(self.plan, self.pool, self.backends, meta, exact=self.exact)
        params = self.params
        if self.group.top_k:
            # Positions only: attention() looks up the slots, as in an engine's step.
            params = replace(params, topk_indices_TK=self._topk_indices(query_lens, seq_lens))
        actual_THD = attention(ctx, self.layer, *inputs, params, rope=rope)
        for name, x_THD in streams.items():
            stored_THD, expected_THD = self._read(name, slot_mapping_T), self._round_trip(name, x_THD)
            self._compare(stored_THD, expected_THD, STORED_TOLERANCE, route, f"stores {name}")
        self.num_stored = seq_lens
        limit = ATTENTION_TOLERANCE.get(self.plan.dtype, ATTENTION_TOLERANCE_16_BITS)
        if self.exact is None:
            self._compare(actual_THD, self._expected(q_THD, batch, params), limit, route, "attends")
            return
        near = self._near_name(route.phase)
        what = f"attends with an exact window of {self.exact.tokens} tokens (by {near})"
        if self.plan.has_sinks(self.layer):
            what += f" and {self.exact.sinks} sinks"
        expected_THD = self._expected_with_window(q_THD, query_lens, streams, params)
        # Apart, as answers to short requests are larger and only long ones have far tokens.
        for actual, expected in zip(
            actual_THD.split(query_lens), expected_THD.split(query_lens), strict=True
        ):
            self._compare(actual, expected, limit, route, what)

    def _rope(self, tokens: int) -> Rope | None:
        """Return rotary positions, which compiled models leave to attention; None for layers where they do not."""
        keys = self.view.streams.get("k")
        if keys is None or self.owner != self.layer:
            return None
        angles_TR = self._noise(tokens, keys.stream.dim // 2).repeat(1, 2)
        return Rope(angles_TR.cos(), angles_TR.sin())

    def _near_name(self, phase: Phase) -> str:
        """Return who reads near tokens."""
        if self.near_kernel:
            return "the kernel for near tokens"
        return str(self.plan.near_route(self.layer, phase))

    def _expected(self, q_THD: Tensor, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        """Return the reference's answer over the same pool, so that the format's error does not count."""
        if params.topk_indices_TK is not None:
            table_TN, size = batch.page_table_TN, self.plan.page_size
            topk_slots_TK = resident_slots(params.topk_indices_TK, table_TN, None, size)
            params = replace(params, topk_slots_TK=topk_slots_TK)
        if self.group.chunk:
            batch = cut_at_chunks(batch, self.plan.page_size, self.group.chunk)
        return TorchRef().attend(self.view.query(q_THD), self.view, batch, params)

    def _expected_with_window(
        self, q_THD: Tensor, query_lens: Sequence[int], streams: Mapping[str, Tensor], params: AttentionParams
    ) -> Tensor:
        """Return the answer by the window's definition: near tokens as they were given, others as the pool has them."""
        assert self.exact
        for name, x_THD in streams.items():
            previous = self.history.get(name) or [x_THD[:0]] * len(query_lens)
            self.history[name] = [
                torch.cat(pair) for pair in zip(previous, x_THD.split(query_lens), strict=True)
            ]
        outputs = []
        for i, rows in enumerate(torch.arange(len(q_THD), device=self.device).split(query_lens)):
            of_request = {name: values[i] for name, values in self.history.items()}
            exact = Tokens.from_streams(of_request, self.view.keys.stream.rope)
            stored = Tokens.from_pages(self.view, of_request, self.page_table_BN[i], self.num_stored[i])
            topk_indices_TK = params.topk_indices_TK
            params_of_request = (
                params if topk_indices_TK is None else replace(params, topk_indices_TK=topk_indices_TK[rows])
            )
            outputs.append(
                window_reference.attend(
                    q_THD[rows],
                    exact,
                    stored,
                    params_of_request,
                    self.exact.tokens,
                    self.group.chunk,
                    self.exact.sinks if self.plan.has_sinks(self.layer) else 0,
                )
            )
        return torch.cat(outputs)

    def _forget_stored(self) -> None:
        """Store other tokens in the pool than those of the steps before, so that it shows which copy is read."""
        if any(self.num_stored):
            slots_T = self._slots(self.num_stored, self.page_table_BN, [0] * len(self.num_stored))
            self.pool.write(self.owner, self._new_streams(len(slots_T)), slots_T)

    def _new_streams(self, tokens: int) -> dict[str, Tensor]:
        streams = ((name, entry.stream) for name, entry in self.view.streams.items() if name != INDEX)
        return {name: self._noise(tokens, stream.heads, stream.dim) for name, stream in streams}

    def _table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def _exact_slots(self, query_lens: Sequence[int]) -> Tensor | None:
        """Return the exact slots of the new tokens, with an exact window; -1 for those that are not kept."""
        if self.exact is None or self.exact_table_BN is None:
            return None
        slots_T = self._slots(query_lens, self.exact_table_BN)
        return slots_T.masked_fill(slots_T >= self.exact.empty_page * self.plan.page_size, -1)

    def _slots(
        self, query_lens: Sequence[int], table_BN: Tensor, starts: Sequence[int] | None = None
    ) -> Tensor:
        """Return the slots of tokens that follow `starts`, which are the new ones if left out."""
        size, slots = self.plan.page_size, []
        for pages_N, start, new in zip(table_BN, starts or self.num_stored, query_lens, strict=True):
            positions_T = torch.arange(start, start + new, device=self.device)
            slots.append(pages_N[positions_T // size].long() * size + positions_T % size)
        return torch.cat(slots)

    def _topk_indices(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> Tensor:
        """Return some tokens that each query sees, ascending, as kernels/indexer/__init__.py gives them."""
        last_T = torch.cat([torch.arange(n - new, n) for new, n in zip(query_lens, seq_lens, strict=True)])
        step = max(2, 2 * self.exact.tokens // TOP_K) if self.exact else 2
        back_TK = last_T[:, None] - step * torch.arange(TOP_K)
        ordered_TK = torch.where(back_TK < 0, max(seq_lens), back_TK).sort(dim=1).values
        return torch.where(ordered_TK == max(seq_lens), PAD_INDEX, ordered_TK).int().to(self.device)

    def _noise(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self.random, device=self.device)
        return values.to(getattr(torch, self.plan.dtype))

    def _read(self, name: str, slot_mapping_T: Tensor) -> Tensor:
        """Return what the pool holds of these tokens, dequantised."""
        size = self.plan.page_size
        values_THD = self.view.streams[name].gather_reference((slot_mapping_T // size)[:, None].int())
        return values_THD[torch.arange(len(slot_mapping_T), device=self.device), slot_mapping_T % size]

    def _round_trip(self, name: str, x_THD: Tensor) -> Tensor:
        """Return what the pool should hold of them, by the format's own arithmetic."""
        entry = self.view.streams[name]
        for transform in self.view.transforms if name == "k" else ():
            x_THD = transform.key(x_THD, self.view.k_mean_HD)
        return entry.format.decode(entry.format.encode(x_THD, entry.scale), entry.scale)

    def _compare(self, actual: Tensor, expected: Tensor, limit: float, route: Route, what: str) -> None:
        if ahead.is_rehearsal():
            return
        error = float((actual.float() - expected.float()).norm() / expected.float().norm())
        if error <= limit:  # which NaN is not
            return
        stored = ":".join(dict.fromkeys(entry.format.name for entry in self.view.streams.values()))
        raise BackendError(
            f"the start-up test failed: backend {route} {what} wrongly in {route.phase} of {stored}"
            f"@{self.plan.layout.packing}, page {self.plan.page_size} (layer group {self.group.name}): off by "
            f"{error:.3g} of the reference's norm, where {limit:g} is allowed; choose another backend with "
            f"--attention-backend{', or --kv-window 0' if self.exact else ''}, and please report this"
        )
