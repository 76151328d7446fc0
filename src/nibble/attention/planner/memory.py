"""The memory plan: how a device's memory is divided between weights, workspaces, tables, a reserve and a pool of pages.

The pool allocates exactly `MemoryPlan.pages` pages, so what is printed is what is used. That the rest keeps within its
part is checked when an engine starts (engine/warmup.py).

    pool = memory - reserve - weights - workspace   on a GPU, at most IDLE_FACTOR times what requests can fill
    pool = what requests can fill                   on a CPU, at most CPU_SHARE of the memory
    pool = kv_memory                                where that is given; refused if it does not fit

What requests can fill is max_running x max_context tokens. With a host tier a page's index keys stay on the device, and
its latents need a frame there only while they are needed: a page costs less of the device, and there may be more pages
than frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nibble import formats
from nibble.attention.planner import state_memory, verify_memory, window_memory
from nibble.attention.planner.plan import PageSplit, Plan, Tier, cuda_graph_blocker
from nibble.attention.planner.step_memory import GRAPH_BYTES, LIBRARY_BYTES, RESERVE, StepMemory
from nibble.config import format_size
from nibble.errors import CapacityError
from nibble.hardware import Hardware, format_bytes
from nibble.kernels import SPREAD_TOKENS, cdiv
from nibble.model_spec import INDEX, ModelSpec
from nibble.spec import CacheSpec

MIN_RESERVE_LEFT = 0.25
"""Part of the reserve that must be left on a GPU after the start."""
ERROR_MONITOR_BYTES = 256 << 20
"""What the error monitor takes on a GPU: reference rows (engine/error_monitor.py), and float32 copies of one layer's
while they are compared."""
CPU_SHARE = 0.25
"""Largest part of a CPU's memory that a pool takes by default; the machine has other work to do."""
IDLE_FACTOR = 4
"""With a prefix cache idle pages are worth keeping: a pool may have so many times what requests can fill."""
INDEXER_SCORE_BYTES = 64 << 20
"""Scores that an indexer holds while it chooses tokens."""
TOPK_COPIES = 4
"""int32 lists of chosen tokens alive at once: positions and slots, of the layer at hand and the one before."""
CONTEXTS = (2048, 16384)
"""Tokens of requests that a plan says how many fit of."""
SPLIT_STATISTICS = 3
"""Float32 numbers that a split leaves beside its values: a peak, a total and a factor."""
TABLE_ALIGNMENT = 4
"""Columns of a page table come in groups of 16 bytes: Triton compiles a kernel anew for pointers off that grid."""
GRAPH_ROW_BYTES = 3 * 8 + 4 + 8
"""A row of the buffers of decode steps (engine/model_runner.py): table row, position, id, start, row of its logits."""
SAMPLING_ROW_BYTES = 48
"""A request's sampling parameters on the device (engine/sampler.py)."""
HOST_ROW_BYTES = 48
"""What the host keeps of a row of the page tables: an entry in two lists, and an integer."""
PAGE_ID_BYTES, TOKEN_ID_BYTES = 4, 8
HOST_SHARE = 0.5
"""Part of the free host memory that a tier takes by default."""
WRITE_FRAMES = 2
"""Frames of a lease beside its hot buffer: the page that is written, and the one before while it is saved."""
HOT_SLOT_BYTES = 8
"""For each slot of a hot buffer, in each layer with an indexer: which token it holds, and its turn."""
PLACE_BYTES = 4
"""For each frame of a hot buffer, and for each page: which frame that is."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, by what they are for, and the sizes that follow from them."""

    memory: int
    """Of the device."""
    weights: int
    staging: int
    """Workspaces of attention: dequantised pages, partial results, chosen tokens."""
    activations: int
    runtime: int
    """Libraries, compiled code and recorded steps."""
    tables: int
    """Page tables, and what else grows with the number of requests."""
    reserve: int
    pool: int
    pages: int
    tokens: int
    """That the pool holds."""
    bytes_per_token: int
    limit: str
    """What decided the size of the pool."""
    step_tokens: int
    """Most tokens that one step computes."""
    max_decodes: int
    """Most requests that one step decodes."""
    graph_sizes: tuple[int, ...]
    """Requests of recorded decode steps, ascending."""
    verify_sizes: tuple[tuple[int, int], ...]
    """Requests and tokens of a request of recorded steps with drafts, largest first."""
    piece_sizes: tuple[int, ...]
    """Tokens of steps with prompts that are recorded piecewise, ascending."""
    context: int
    """Tokens of the longest request."""
    table_width: int
    """Columns of a page table."""
    request_tokens: int
    """That requests can fill: max_running x max_context, in whole pages."""
    frames: int
    """Pages that have room on the device: all, but with a host tier."""
    tier: int = 0
    """What the device keeps about hot buffers and the places of pages."""
    host: int = 0
    """Of the host's memory."""
    exact: window_memory.ExactMemory | None = None
    """The exact window's part, where there is one."""
    states: state_memory.StateMemory | None = None
    """That of recurrent states, where the model has any."""

    @property
    def requests(self) -> int | None:
        """Most requests that run at a time where the exact window or states say so; None where max_running does."""
        limits = [part.requests for part in (self.exact, self.states) if part]
        return min(limits) if limits else None

    @property
    def fitting(self) -> dict[int, int]:
        """How many requests run at a time by their tokens, of some lengths up to the longest: pages may end first."""
        most, page_size = self.requests or self.max_decodes, self.tokens // max(self.pages, 1)
        return {
            tokens: min(most, self.pages // cdiv(tokens, page_size))
            for tokens in CONTEXTS
            if page_size and tokens <= self.context
        }

    @property
    def workspace(self) -> int:
        """Everything beside weights and pages that is planned."""
        return self.staging + self.activations + self.runtime + self.tables + self.tier


@dataclass(frozen=True)
class MemoryPlanner:
    """Divides a device's memory for a plan of routes and layouts."""

    spec: CacheSpec
    model: ModelSpec
    device: Hardware
    cache_plan: Plan

    def plan(self) -> MemoryPlan:
        """Return the memory plan; raise CapacityError where weights do not fit, or the pool is too small to serve."""
        step, layout = self.step, self.cache_plan.layout
        self._check_host()
        room, limit = self._pool_room()
        exact, states = self._divide(room)
        window_memory.check(self.cache_plan, exact, room)
        state_memory.check(states, room)
        split = self._split_pages(room - sum(part.bytes for part in (exact, states) if part))
        # Index keys of all pages stay on the device; the rest lies in frames.
        frame = layout.without_index.bytes_per_page
        result = MemoryPlan(
            memory=self.device.memory,
            weights=self.model.weight_bytes,
            staging=self.staging_bytes,
            activations=step.activation_bytes,
            runtime=self.runtime_bytes,
            tables=self.table_bytes,
            reserve=step.reserve,
            pool=split.frames * frame + split.pages * (layout.bytes_per_page - frame),
            pages=split.pages,
            tokens=split.pages * layout.page_size,
            bytes_per_token=layout.bytes_per_token,
            limit=limit,
            step_tokens=step.step_tokens,
            max_decodes=step.max_decodes,
            graph_sizes=step.graph_sizes,
            verify_sizes=self.verify_sizes,
            piece_sizes=self.piece_sizes,
            context=step.context,
            table_width=self.table_width,
            request_tokens=self.spec.max_running * self.request_pages * layout.page_size,
            frames=split.frames,
            # without pages on the host there are no hot buffers either
            tier=self.hot_buffer_bytes + split.pages * PLACE_BYTES if split.host else 0,
            host=split.host,
            exact=exact,
            states=states,
        )
        self._check_pool(result)
        return result

    # What is needed beside pages

    @cached_property
    def step(self) -> StepMemory:
        """What a step takes, whichever backends serve it."""
        return StepMemory(self.spec, self.model, self.device, self.cache_plan.dtype)

    @cached_property
    def used_bytes(self) -> int:
        """Weights and all workspaces."""
        workspace = self.staging_bytes + self.step.activation_bytes + self.runtime_bytes
        return self.model.weight_bytes + workspace + self.table_bytes + self.hot_buffer_bytes

    @cached_property
    def staging_bytes(self) -> int:
        """Workspaces of attention. A layer dequantises pages outside a kernel or inside it, never both."""
        workspace = max(self.dequantized_bytes, self.kernel_bytes, self.fixed_split_bytes)
        return (
            workspace
            + self.sparse_bytes
            + window_memory.scratch_bytes(self.cache_plan, self.step.step_tokens, self.step.max_decodes)
        )

    @property
    def dequantized_bytes(self) -> int:
        """Dequantised pages of the layer that needs most; 0 where no route dequantises."""
        plan = self.cache_plan
        # The workspace is made of the pages that are read, which belong to the owner of a shared layer.
        staging = (group for group in plan.groups if any(route.stage_to for route in group.routes))
        owners = {plan.owner[layer] for group in staging for layer in group.layers}
        layers = (entry for entry in plan.layout.without_index.layers if entry.layer in owners)
        return max((self.step.dequantized_bytes(entry, plan.page_size) for entry in layers), default=0)

    @property
    def kernel_bytes(self) -> int:
        """The workspace of kernels that dequantise prompts piece by piece, of the group that needs most."""
        plan = self.cache_plan
        # Layers run one after the other, so the largest workspace serves them all.
        width = max(entry.bytes_in(formats.plain(plan.dtype).name) for entry in plan.layout.layers)
        return max(self.step.workspace_bytes(r.row, g.group, width) for g in plan.groups for r in g.routes)

    @property
    def fixed_split_bytes(self) -> int:
        """Float32 results of splits that are kept until they are merged, of the group that needs most."""
        # Few tokens of a prompt are computed like as many decodes.
        tokens, sizes = max(self.step.max_decodes, min(SPREAD_TOKENS, self.step.step_tokens)), [0]
        context = self.table_width * self.cache_plan.page_size
        for group in self.cache_plan.groups:
            row_bytes = 4 * group.group.q_heads * (group.group.head_dim + SPLIT_STATISTICS)
            splits = (route.row.fixed_split for route in group.routes if route.row.fixed_split)
            sizes += [cdiv(context, size) * tokens * row_bytes for size in splits]
        return max(sizes)

    @property
    def sparse_bytes(self) -> int:
        """What choosing tokens takes: scores, a bounded number at a time; chosen tokens, by position and by slot; and
        the pages of each token's request. 0 without sparse attention."""
        top_k = max((group.group.top_k for group in self.cache_plan.groups), default=0)
        lists = self.step.step_tokens * 4 * (TOPK_COPIES * top_k + self.request_pages)
        return INDEXER_SCORE_BYTES + lists if top_k else 0

    @cached_property
    def runtime_bytes(self) -> int:
        """What runs the steps on a GPU: libraries, backends' own buffers, recorded decode steps, the error monitor."""
        if self.device.is_cpu:
            return 0
        recorded = len(self.graph_sizes) + len(self.verify_sizes)
        graphs = recorded * GRAPH_BYTES + self.logits_bytes if self.spec.graphs else 0
        graphs += self.step.piece_bytes if self.piece_sizes else 0
        monitor = ERROR_MONITOR_BYTES * self.spec.watches_fidelity
        return LIBRARY_BYTES + self.backend_bytes + monitor + graphs

    @property
    def backend_bytes(self) -> int:
        """What the plan's backends keep on the device for themselves: each once, for all its routes."""
        # A backend is constructed once for all groups and phases (engine/build.py).
        sizes: dict[str, int] = {}
        for route in self.cache_plan.routes:
            sizes[route.backend] = max(sizes.get(route.backend, 0), route.row.workspace_bytes)
        return sum(sizes.values())

    @cached_property
    def graph_sizes(self) -> tuple[int, ...]:
        """Requests of the decode steps that run over stable buffers; empty where there are none."""
        return () if self.device.is_cpu or cuda_graph_blocker(self.cache_plan) else self.step.graph_sizes

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps with prompts that are recorded piecewise; empty where there are none."""
        return self.step.piece_sizes if self.graph_sizes and self.spec.piecewise else ()

    @cached_property
    def verify_sizes(self) -> tuple[tuple[int, int], ...]:
        """Requests and tokens of a request of the steps with drafts that run over stable buffers."""
        limits = self.step.max_decodes, self.step.step_tokens
        return verify_memory.sizes(self.cache_plan, self.spec, self.device, *limits)

    @property
    def logits_bytes(self) -> int:
        """The buffer into which steps of all sizes put their logits."""
        rows = max(
            (*self.graph_sizes[-1:], *(requests * tokens for requests, tokens in self.verify_sizes)),
            default=0,
        )
        return rows * self.model.vocab_size * self.step.value_bytes

    @cached_property
    def table_width(self) -> int:
        """Columns of a page table: the pages of the longest request, and one that is being added."""
        # The pool holds at least one request of the longest kind (_check_pool), so no row needs more columns.
        return TABLE_ALIGNMENT * cdiv(self.request_pages + 1, TABLE_ALIGNMENT)

    @property
    def table_rows(self) -> int:
        """Rows of a page table: a request's each, one for the self-test, and one for padding."""
        return self.spec.max_running + 2

    @cached_property
    def table_bytes(self) -> int:
        """Page tables (engine/model_runner.py), a step's copy of them, its buffers and its sampling parameters."""
        # A recorded step is padded to the next size.
        step_rows = max((self.step.max_decodes, *self.graph_sizes[-1:]))
        table = self.table_rows * (self.table_width * PAGE_ID_BYTES + TOKEN_ID_BYTES)
        step = step_rows * (self.table_width * PAGE_ID_BYTES + SAMPLING_ROW_BYTES)
        buffers = self.graph_sizes[-1] * GRAPH_ROW_BYTES if self.graph_sizes else 0
        buffers += max((verify_memory.buffer_bytes(*size) for size in self.verify_sizes), default=0)
        # with graphs the logits are theirs (runtime_bytes)
        buffers += 0 if self.spec.graphs else self.logits_bytes
        return table + step + buffers + (self.host_table_bytes if self.device.is_cpu else 0)

    @property
    def host_table_bytes(self) -> int:
        """What the host keeps about the rows of the page tables."""
        return (self.spec.max_running + 1) * HOST_ROW_BYTES

    @cached_property
    def hot_buffer_bytes(self) -> int:
        """What the device keeps about hot buffers (cache/hot_buffer.py); 0 without a host tier."""
        layout, tier = self.cache_plan.layout, self.cache_plan.tier
        if tier is None:
            return 0
        index_layers = sum(entry.stream.name == INDEX for layer in layout.layers for entry in layer.streams)
        slots, frames = index_layers * tier.buffer, tier.buffer // layout.page_size
        return self.table_rows * (slots * HOT_SLOT_BYTES + frames * PLACE_BYTES)

    def _check_host(self) -> None:
        """Raise CapacityError where the memory of the machine around a GPU does not hold its part of the tables."""
        free, needed = self.device.host, self.host_table_bytes
        if not self.device.is_cpu and free is not None and needed > free:
            raise CapacityError(
                f"the host's part of the page tables takes {format_bytes(needed)}, and {format_bytes(free)} are free; "
                f"what would help: a smaller --max-running (now {self.spec.max_running})"
            )

    # What is left for pages

    @cached_property
    def useful_tokens(self) -> tuple[int, str]:
        """Tokens that it is worth having pages for, and why."""
        # Without a prefix cache a page is free once its request ends; a CPU has other uses for idle memory.
        factor = IDLE_FACTOR if self.spec.prefix_cache and not self.device.is_cpu else 1
        reason = f"{factor} x max_running x max_context" if factor > 1 else "max_running x max_context"
        longest = self.request_pages * self.cache_plan.page_size
        return factor * self.spec.max_running * longest, reason

    @property
    def request_pages(self) -> int:
        """Pages of the longest request."""
        return cdiv(self.step.context, self.cache_plan.page_size)

    def _divide(self, room: int) -> tuple[window_memory.ExactMemory | None, state_memory.StateMemory | None]:
        """Return what the exact window and recurrent states take of `room` bytes."""
        exact = window_memory.divide(self.cache_plan, self.spec, room)
        requests = exact.requests if exact else self.spec.max_running
        return exact, state_memory.divide(self.model, self.spec, self.cache_plan.dtype, room, requests)

    def _split_pages(self, room: int) -> PageSplit:
        """Return how many pages `room` bytes hold: all of them on the device, but with a host tier."""
        tier, pages = self.cache_plan.tier, room // self.cache_plan.layout.bytes_per_page
        return self._split_with_host(tier, room) if tier else PageSplit(pages, pages, 0)

    def _split_with_host(self, tier: Tier, room: int) -> PageSplit:
        """Divide `room` bytes of the device between frames and index keys; raise CapacityError where one request does
        not fit, or the host has less memory than is requested.

        There are pages for as many of the longest requests as have room for their hot buffers, and what is left is
        frames. A prompt is computed with all of its pages on the device, so one request must fit there in full.
        """
        layout, request_pages = self.cache_plan.layout, self.request_pages
        frame = layout.without_index.bytes_per_page
        # A page always costs its index keys and an entry in the table of places; a frame only while it is needed.
        index = layout.bytes_per_page - frame + PLACE_BYTES
        host_pages, device_pages = self._host_pages(tier), room // layout.bytes_per_page
        useful_pages = cdiv(self.useful_tokens[0], layout.page_size)
        if device_pages >= useful_pages:
            # All pages that are useful fit: a tier would only add work.
            pages = device_pages if self.spec.kv_memory else useful_pages
            return PageSplit(pages, pages, 0)
        # A request that is shorter than a hot buffer keeps its own pages.
        hot = min(tier.buffer // layout.page_size + WRITE_FRAMES, request_pages + 1)
        # One prompt must fit in full beside the hot buffers of the others.
        requests = (room - (request_pages + WRITE_FRAMES) * frame) // (hot * frame + request_pages * index)
        pages = min(self.spec.max_running, requests) * request_pages
        pages = pages if host_pages is None else min(pages, host_pages)
        # The host adds nothing: the device alone has room for more.
        if pages <= device_pages:
            if device_pages < request_pages:
                raise CapacityError(self._too_small(tier, room, request_pages * frame, host_pages))
            return PageSplit(device_pages, device_pages, 0)
        frames = min((room - pages * index) // frame, pages)
        return PageSplit(pages, frames, pages * tier.layout.bytes_per_page)

    def _host_pages(self, tier: Tier) -> int | None:
        """Return how many pages the host has room for, None where that is not known; raise CapacityError where more
        memory is requested than is free."""
        free, offload = self.device.host, self.spec.offload
        if offload and (requested := offload.host_memory) is not None:
            if free is not None and requested > free:
                raise CapacityError(
                    f"--hisparse host_memory={format_size(requested)} does not fit: {format_bytes(free)} of the host's "
                    "memory are free"
                )
            return requested // tier.layout.bytes_per_page
        return None if free is None else int(free * HOST_SHARE) // tier.layout.bytes_per_page

    def _too_small(self, tier: Tier, room: int, device_bytes: int, host_pages: int | None) -> str:
        page_bytes, pages = tier.layout.bytes_per_page, self.request_pages
        host = "any" if host_pages is None else format_bytes(host_pages * page_bytes)
        return (
            f"one request of {pages * tier.layout.page_size} tokens does not fit with --hisparse: while its prompt is "
            f"computed the device holds {format_bytes(device_bytes)} of it, index keys and a hot buffer beside, and "
            f"{format_bytes(room)} are there; the host {format_bytes(pages * page_bytes)} of {host}; a smaller "
            "--max-context would help"
        )

    def _pool_room(self) -> tuple[int, str]:
        """Return the bytes that the pool may take, and what decided so; raise CapacityError where there are none."""
        if self.spec.kv_memory is not None:
            return self._requested_room(self.spec.kv_memory), "kv_memory"
        free = self.device.memory - self.step.reserve - self.used_bytes
        if free <= 0:
            raise CapacityError(
                f"nothing is left for the cache: {self.device}, less {format_bytes(self.step.reserve)} in reserve, "
                f"must hold {self._contents()}; a smaller model or more memory{self._smaller_options(free)} would help"
            )
        limits = [(free, "free memory")]
        if self.cache_plan.tier is None:  # a tier has pages that need no room on the device
            useful, reason = self.useful_tokens
            useful_bytes = useful * self.cache_plan.layout.bytes_per_token
            parts = self._divide(useful_bytes)
            limits.append((useful_bytes + sum(part.bytes for part in parts if part), reason))
        if self.device.is_cpu:
            limits.append((int(self.device.memory * CPU_SHARE), f"{CPU_SHARE:.0%} of memory"))
        # Pairs compare by bytes first, and the reason comes along.
        return min(limits)

    def _requested_room(self, requested: int) -> int:
        """Return `requested`; raise CapacityError where the device has not so much left."""
        # The rest of the reserve may be requested: check_memory() (engine/memory_check.py) accepts that.
        reserve = 0 if self.device.is_cpu else int(MIN_RESERVE_LEFT * self.step.reserve)
        free = self.device.memory - self.used_bytes - reserve
        if requested > free:
            raise CapacityError(
                f"--kv-memory {format_size(requested)} does not fit: {self.device}, holds {self._contents()}, "
                f"which leaves {format_bytes(max(free, 0))}{self._fewer_requests(requested - free, '; ')}"
            )
        return requested

    @property
    def least_bytes(self) -> int:
        """Memory with room for the weights, the workspaces, the reserve, and one request of the longest kind."""
        pages = self.request_pages * self.cache_plan.layout.bytes_per_page
        pages += window_memory.least_bytes(self.cache_plan, self.spec) + self.least_state_bytes
        # A CPU gives a part of its memory to pages.
        share = int(pages / CPU_SHARE) if self.device.is_cpu and self.spec.kv_memory is None else 0
        return max(int((self.used_bytes + pages) / (1 - RESERVE)) + 1, share)

    @property
    def least_state_bytes(self) -> int:
        """What recurrent states take where one request runs at a time."""
        return state_memory.least_bytes(self.model, self.spec, self.cache_plan.dtype)

    @property
    def shortfall(self) -> str:
        """What the device lacks: `needs at least 1279.40 GiB (weights 1250.00 GiB), and h200 has 141.00 GiB`."""
        needed = f"needs at least {format_bytes(self.least_bytes)} (weights {format_bytes(self.model.weight_bytes)})"
        return f"{needed}, and {self.device.name} has {format_bytes(self.device.memory)}"

    def _contents(self) -> str:
        weights = self.model.weight_bytes
        return f"weights ({format_bytes(weights)}) and workspace ({format_bytes(self.used_bytes - weights)})"

    def _smaller_options(self, free: int) -> str:
        """Name the option that would make room: fewer tables, or smaller steps where weights fit."""
        # Tables that are larger than what is missing are named first: they alone decide then.
        if fewer := self._fewer_requests(-free, ", or "):
            return fewer
        if self.model.weight_bytes < self.device.memory - self.step.reserve:
            return f", or a smaller --token-budget (now {self.step.step_tokens})"
        return ""

    def _fewer_requests(self, missing: int, before: str) -> str:
        """Name --max-running where its tables are more than the bytes that are `missing`."""
        return f"{before}a smaller --max-running (now {self.spec.max_running})" * (self.table_bytes > missing)

    def _check_pool(self, result: MemoryPlan) -> None:
        """Raise CapacityError where one request of the longest kind does not fit."""
        size, needed = self.cache_plan.page_size, self.request_pages
        if result.pages >= needed:
            return
        # A pool without a single page has no shorter context to propose.
        shorter = f"--max-context {result.tokens}; " if result.tokens else ""
        # Of what is asked for, snapshots of prefixes get their share.
        share = window_memory.SNAPSHOT_SHARE if self.cache_plan.window and self.spec.prefix_cache else 0.0
        share += state_memory.SNAPSHOT_SHARE if self.model.states and self.spec.prefix_cache else 0.0
        least = needed * self.cache_plan.layout.bytes_per_page + self.least_state_bytes
        least += window_memory.least_bytes(self.cache_plan, self.spec)
        mib = cdiv(int(least / (1 - share)), 1 << 20)
        raise CapacityError(
            f"the pool is too small: {format_bytes(result.pool)} ({result.limit}) is {result.pages} pages of {size} "
            f"tokens, and {needed} are needed for one request of {result.context} tokens; what would help: {shorter}"
            f"--kv-memory {mib}MiB, if that fits; a --kv-format with fewer than {result.bytes_per_token} bytes a token"
        )
