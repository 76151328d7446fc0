"""What attention backends are timed on, and how: workloads, made-up caches, and the time of a call.

A workload is so many requests of one phase:

    64x8K    64 requests of 8K stored tokens: prompts in PREFILL, one new token each in DECODE, a few in VERIFY
    2K+32K   one request: 2K new tokens over 32K stored ones (EXTEND)

Its fixture is random tokens in scattered pages of one layer group. They are written by the engine's own pool
(PagedPool.write), so that the error of a format is not counted when what is read is judged.

A step is a function that makes several calls, as the layers of a model would, and returns their outputs. Where it can
be captured, its time is the median replay of a CUDA graph: the gap between two launches counts as in an engine, and
nothing that the host does in between. Otherwise the step is called as it is. With the host ahead of the GPU, as among
the large kernels of a prompt, the host's work counts only where the GPU waits for it; otherwise all of it does.

Shape suffixes: T tokens, B requests, N pages of a request, H heads, D values of a head.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nibble.attention.planner.support import SchemeGroup
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import ONE
from nibble.errors import ConfigError
from nibble.kernels import cdiv
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import Phase

DRAFTS = 4
"""Tokens of a request in VERIFY."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one phase."""

    phase: Phase
    name: str
    requests: int
    new: int
    """New tokens of each request."""
    stored: int
    """Tokens of each request, the new ones included."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the cache."""
        return self.requests * self.stored


ON_GPU: Mapping[Phase, tuple[str, ...]] = {
    Phase.PREFILL: ("1x8K",),
    Phase.EXTEND: ("2K+32K", "8K+32K"),
    Phase.DECODE: ("64x8K", "16x8K", "1x32K", "128x1K"),
    Phase.VERIFY: ("16x8K",),
}
ON_CPU: Mapping[Phase, tuple[str, ...]] = {
    Phase.PREFILL: ("1x256",),
    Phase.EXTEND: ("64+256",),
    Phase.DECODE: ("8x256", "1x512"),
    Phase.VERIFY: ("2x256",),
}


def parse_workload(phase: Phase, text: str) -> Workload:
    """Return a workload of `phase`; raises ConfigError where the text is none."""
    if phase is Phase.EXTEND:
        new, plus, before = text.strip().partition("+")
        if plus:
            return Workload(
                phase, text.strip(), 1, parse_tokens(new), parse_tokens(new) + parse_tokens(before)
            )
        raise ConfigError(
            f"cannot read {text!r} as a workload of {phase}; write new+stored tokens, as 2K+32K"
        )
    count, times, length = text.strip().partition("x")
    if not times or not count.isdecimal() or not int(count):
        raise ConfigError(f"cannot read {text!r} as a workload of {phase}; write requests x tokens, as 64x8K")
    stored = parse_tokens(length)
    new_tokens = {Phase.PREFILL: stored, Phase.DECODE: 1, Phase.VERIFY: min(DRAFTS, stored)}[phase]
    return Workload(phase, text.strip(), int(count), new_tokens, stored)


def parse_tokens(text: str) -> int:
    """Return 8192 for `8K`; raises ConfigError."""
    match = re.fullmatch(r"([1-9]\d*)(K?)", text.strip(), re.IGNORECASE)
    if not match:
        raise ConfigError(f"cannot read {text!r} as a number of tokens; write it as 512 or 8K")
    return int(match[1]) * (1024 if match[2] else 1)


def default_workloads(on_cpu: bool) -> tuple[Workload, ...]:
    """Return the workloads that stand for their phases on such a machine."""
    table = ON_CPU if on_cpu else ON_GPU
    return tuple(parse_workload(phase, text) for phase, texts in table.items() for text in texts)


def fit_workloads(workloads: Iterable[Workload], context: int, tokens: int) -> tuple[Workload, ...]:
    """Return workloads cut down to requests of at most `context` tokens, and to `tokens` tokens in all; each once."""
    unique: dict[tuple[Phase, str], Workload] = {}
    for workload in workloads:
        cut = _cut(workload, min(context, tokens))
        cut = cut if cut.tokens <= tokens else _resized(cut, requests=max(tokens // cut.stored, 1))
        unique.setdefault((cut.phase, cut.name), cut)
    return tuple(unique.values())


def _cut(workload: Workload, most: int) -> Workload:
    """Return a workload whose requests have at most `most` tokens, new ones in proportion."""
    if workload.stored <= most:
        return workload
    in_proportion = max(workload.new * most // workload.stored, 1)
    new = {Phase.PREFILL: most, Phase.EXTEND: in_proportion}.get(workload.phase, min(workload.new, most))
    return _resized(workload, stored=most, new=new)


def _resized(workload: Workload, **changed: int) -> Workload:
    result = replace(workload, **changed)  # type: ignore[arg-type]
    name = f"{result.requests}x{_short(result.stored)}"
    if result.phase is Phase.EXTEND:
        name = f"{_short(result.new)}+{_short(result.stored - result.new)}"
    return replace(result, name=name)


def _short(count: int) -> str:
    """Return `8K` for 8192."""
    return str(count) if count % 1024 else f"{count // 1024}K"


CHUNK = 1 << 16
"""Tokens that are made up and written at a time."""
SOFTCAP = 5.0
"""Where scores are capped, so that it is seen."""
ROWS = 8
"""Rows of a request that are checked at each place."""
SEED = 7


@dataclass(frozen=True)
class Fixture:
    """Requests in a pool, and their queries."""

    pool: PagedPool
    batch: AttentionBatch
    queries: tuple[Tensor, ...]
    params: AttentionParams
    samples: tuple[tuple[slice, AttentionBatch], ...]
    """Rows whose answers are checked, each with a batch of their own."""
    read_bytes: int
    """What one call must read of the cache."""

    @property
    def layers(self) -> int:
        """Return the number of layers of the pool."""
        return len(self.queries)


def make_fixture(
    part: SchemeGroup, workload: Workload, page: int, packing: str, dtype: str, device: str
) -> Fixture:
    """Return requests of `workload` for the layers of `part`.

    Args:
        part: The layers, with what they store.
        workload: The requests.
        page: Tokens of a page.
        packing: Of the pages.
        dtype: Of queries.
        device: Where all of it lies.

    Raises:
        ConfigError: Attention is sparse.
    """
    group = part.group
    if group.top_k:
        raise ConfigError("sparse attention is not timed: its indexer chooses what it reads")
    rng = torch.Generator(device).manual_seed(SEED)
    entries = tuple(StreamLayout.of(stream, part.scheme.format_of(stream)) for stream in group.streams)
    size = sum(entry.bytes_per_token for entry in entries)
    # With a window, the first new token reaches back the furthest.
    num_attended = min(workload.stored, workload.new + group.window) if group.window else workload.stored
    read = workload.requests * num_attended * size
    query_dtype: torch.dtype = getattr(torch, dtype)
    query_shape = (workload.requests * workload.new, group.q_heads, group.head_dim)
    query_bytes = math.prod(query_shape) * query_dtype.itemsize
    # As many layers as outgrow the L2 cache, so that no call reads from it what another has left there.
    layers = min(max(cdiv(L2_TIMES * l2_bytes(device), read + query_bytes), 1), CALLS)
    layout = CacheLayout(tuple(LayerLayout(i, entries, ()) for i in range(layers)), page, packing)
    pages = cdiv(workload.stored, page)
    pool = PagedPool(layout, workload.requests * pages, ONE, device)
    for layer in range(layers):
        _fill(pool, layer, query_dtype, rng)
    # The pages of a request that is served are not neighbours either.
    order = torch.randperm(workload.requests * pages, generator=rng, device=device).int()
    page_table_BN = order.view(workload.requests, pages)
    queries = tuple(
        torch.randn(query_shape, generator=rng, dtype=query_dtype, device=device) for _ in range(layers)
    )
    sinks = torch.randn(group.q_heads, generator=rng, device=device) if group.sinks else None
    params = AttentionParams(group.head_dim**-0.5, group.window, SOFTCAP if group.softcap else None, sinks)
    query_lens, seq_lens = [workload.new] * workload.requests, [workload.stored] * workload.requests
    batch = AttentionBatch.from_lens(workload.phase, 0, query_lens, seq_lens, page_table_BN)
    return Fixture(pool, batch, queries, params, _samples(workload, page_table_BN), read)


def _fill(pool: PagedPool, layer: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Write random tokens to every slot of a layer."""
    slots, device = pool.pages * pool.layout.page_size, pool.device
    entries = pool.layout.layers[layer].streams
    # All tokens at once would take more memory than the pool that stores them in fewer bits.
    for start in range(0, slots, CHUNK):
        slot_mapping_T = torch.arange(start, min(start + CHUNK, slots), device=device)
        random = {}
        for stream in (entry.stream for entry in entries):
            shape = (len(slot_mapping_T), stream.heads, stream.dim)
            random[stream.name] = torch.randn(shape, generator=rng, dtype=dtype, device=device)
        pool.write(layer, random, slot_mapping_T)


def _samples(workload: Workload, page_table_BN: Tensor) -> tuple[tuple[slice, AttentionBatch], ...]:
    """Return the first and the last rows of the first and the last request, with a batch of their own."""
    rows = min(ROWS, workload.new)
    samples = []
    # Wrong offsets and bounds show at the first and at the last request.
    for request in sorted({0, workload.requests - 1}):
        for first in sorted({0, workload.new - rows}):
            begin, stored = request * workload.new + first, workload.stored - workload.new + first + rows
            own_table = page_table_BN[request : request + 1]
            batch = AttentionBatch.from_lens(workload.phase, 0, [rows], [stored], own_table)
            samples.append((slice(begin, begin + rows), batch))
    return tuple(samples)


Step = Callable[[], Sequence[Tensor]]
REPLAYS_MS = 60.0
"""What the replays of one measurement may take together; at least FEWEST_REPLAYS and at most MOST_REPLAYS are made."""
FEWEST_REPLAYS, MOST_REPLAYS = 5, 60
L2_TIMES = 4
"""A measurement goes through at least so many times the L2 cache before it comes back to the same bytes."""
CALLS = 32
"""Calls of a step: the layers of a model."""
LEAD, MOST_LEAD_MS, CYCLES = 1.5, 200.0, 2_000_000
"""How far the host gets ahead: so many times what it needs for a step. CYCLES: of a GPU in a ms, rather too many."""


@dataclass(frozen=True)
class Timed:
    """A measurement."""

    ms: float
    """Median time of one call."""
    outputs: Sequence[Tensor]
    """What the replays wrote."""
    captured: bool
    """False where it could not be a graph."""


def time_calls(
    step: Step,
    calls: int,
    *,
    graph: bool = True,
    queue_ahead: bool = False,
    device: str | None = None,
    spend_ms: float = REPLAYS_MS,
    fewest: int = FEWEST_REPLAYS,
) -> Timed:
    """Return the time of one of `calls` calls. On a CPU nothing is captured.

    Outputs are poisoned before the last replay, so that what is not written shows.

    Args:
        step: Makes the calls.
        calls: How many it makes.
        graph: False for steps that talk to the host, whose time then counts too.
        queue_ahead: Count the host's time only where the GPU waits for it.
        device: The torch device type; this machine's if None.
        spend_ms: What all replays may take together.
        fewest: Replays to make at least.
    """
    on_cpu = (device or device_type()) == "cpu"
    captured = graph and not on_cpu
    outputs, replay = _capture(step) if captured else (step(), step)
    lead_ms = 0.0
    if queue_ahead and not captured and not on_cpu:
        # The GPU is to sleep so long that a whole step is queued behind it.
        torch.cuda.synchronize()
        lead_ms = min(LEAD * _cpu_ms(step), MOST_LEAD_MS)
    once_ms = _cpu_ms if on_cpu else partial(_replay_ms, lead_ms=lead_ms)
    # The number of repeats follows from one replay; 1e-3 ms stands for a time that is too short to divide by.
    repeats = min(max(int(spend_ms / max(once_ms(replay), 1e-3)), 1 if on_cpu else fewest), MOST_REPLAYS)
    ms = statistics.median(once_ms(replay) for _ in range(repeats)) / calls
    if captured:
        for output in outputs:
            output.fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
    return Timed(ms, outputs, captured)


def _capture(step: Step) -> tuple[Sequence[Tensor], Callable[[], object]]:
    """Return the outputs of a step that is recorded as a CUDA graph, and what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles, tunes and allocates what a capture may not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may compile
        outputs = step()
    return outputs, graph.replay


def _replay_ms(replay: Callable[[], object], lead_ms: float) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # While the GPU sleeps the host queues the calls, so that its own time does not count.
    torch.cuda._sleep(int(lead_ms * CYCLES))
    start.record()
    replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _cpu_ms(replay: Callable[[], object]) -> float:
    start = time.perf_counter()
    replay()
    return (time.perf_counter() - start) * 1e3


def device_type() -> str:
    """Return the torch device type of this machine."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def l2_bytes(device: str | None = None) -> int:
    """Return the size of the L2 cache; on a CPU, where caches are not outgrown, next to nothing."""
    return torch.cuda.get_device_properties(0).L2_cache_size if (device or device_type()) == "cuda" else 1
