"""How much memory goes where: weights, workspace, reserve, and a pool of whole pages.

Owns Budget and its arithmetic. The pool allocates exactly `Budget.pages` pages, so what is printed is what
is used; that the rest keeps within its part is checked when an engine starts (engine/warmup.py). Must not know of
requests or backends.

    pool = memory - reserve - weights - workspace   on a GPU, at most SPARE times what requests can fill
    pool = what requests can fill                   on a CPU, at most SHARE of the memory
    pool = kv_memory                                where that is given; refused if it does not fit

What requests can fill is max_running x max_context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from nibble import formats
from nibble.attention.dequantize import MAX_TOKENS
from nibble.attention.planner import offload as tiering
from nibble.attention.planner.capture import cuda_graph_blocker, graph_sizes
from nibble.attention.planner.offload import Shares
from nibble.attention.planner.plan import Plan
from nibble.cache.layout import LayerLayout
from nibble.config import Config, parse_bytes
from nibble.errors import CapacityError
from nibble.hardware import GIB, Hardware, format_bytes
from nibble.model_spec import ModelSpec

RESERVE = 0.05
"""Part of the memory that nothing is planned into: what allocators waste, and what the formulas here miss."""
KEPT = 0.25
"""Part of the reserve that must be left on a GPU when all is set up: for what the start has not come across."""
LIBRARIES = GIB
"""On a GPU: the driver's context, the workspaces of matrix products, and the code of kernels."""
GRAPH = 16 << 20
"""What a recorded decode step takes beside its buffers."""
TOKENS_CPU, TOKENS_GPU = 512, 8192
"""Most tokens of a step, unless said otherwise. A GPU reaches its arithmetic rate with some thousands."""
WATCH = 256 << 20
"""What the fidelity watch takes on a GPU: kept rows (engine/reference_rows.py), and float32 copies of one layer's while they are
compared."""
SHARE = 0.25
"""Largest part of a CPU's memory that a pool takes unasked; the machine has other work to do."""
SPARE = 4
"""With a prefix cache idle pages are worth keeping: a pool may have so many times what requests can fill."""
CHOOSER = 64 << 20
"""Scores that are held while tokens are chosen."""
CHOSEN_COPIES = 4
"""int32 lists of chosen tokens alive at once: positions and slots, of the layer at hand and the one before."""
WIDTHS = 24
"""Activations alive at once in one layer, in hidden sizes a token: residual, q, k, v, attention's output, and
the MLP's two or three of four widths each, with room for an MLP of eight."""
LOGIT_COPIES = 3
"""float32 copies of the logits while sampling: as computed, sorted, and their probabilities."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, by what they are for. tokens: what the pool holds. limit: what decided the size of the pool.

    runtime: libraries, compiled code and recorded steps. step_tokens: most tokens that one step computes. context: of
    the longest request. tier: what
    the device remembers of hot buffers; frames: pages that have room on the device, all but with a host tier; host: of
    the host's memory.
    """

    memory: int
    weights: int
    staging: int
    activations: int
    runtime: int
    reserve: int
    pool: int
    pages: int
    tokens: int
    bytes_per_token: int
    limit: str
    step_tokens: int
    context: int
    frames: int
    tier: int = 0
    host: int = 0

    @property
    def workspace(self) -> int:
        """Everything beside weights and pages that is planned."""
        return self.staging + self.activations + self.runtime + self.tier


def plan_memory(config: Config, model_spec: ModelSpec, hardware: Hardware, plan: Plan) -> MemoryPlan:
    """The budget; raises CapacityError where weights do not fit, or the pool is too small to serve."""
    reserve = int(hardware.memory * RESERVE)
    tokens = step_tokens(config, hardware)
    staging, activations, runtime = (
        max(staging_bytes(config, model_spec, plan), kernel_bytes(plan, tokens))
        + sparse_bytes(config, model_spec, plan, tokens),
        activation_bytes(config, model_spec, plan.dtype, tokens),
        runtime_bytes(config, model_spec, hardware, plan, tokens),
    )
    tables = tiering.state_bytes(plan.layout, plan.tier, config.max_running + 2)
    longest = context(config, model_spec)
    used = model_spec.weight_bytes + staging + activations + runtime + tables
    room, limit = _room(config, model_spec, hardware, plan, used, reserve)
    layout = plan.layout
    shared = _shares(config, model_spec, hardware, plan, room)
    pool = shared.frames * layout.without_index.bytes_per_page
    pool += shared.pages * (layout.bytes_per_page - layout.without_index.bytes_per_page)
    if plan.tier and not shared.host:
        tables = 0
    result = MemoryPlan(
        hardware.memory, model_spec.weight_bytes, staging, activations, runtime, reserve, pool, shared.pages,
        shared.pages * layout.page_size, layout.bytes_per_token, limit, tokens, longest, shared.frames, tables,
        shared.host,
    )  # fmt: skip
    _check(config, model_spec, plan, result)
    return result


def _shares(config: Config, model_spec: ModelSpec, hardware: Hardware, plan: Plan, room: int) -> Shares:
    """Pages, and those that have room on the device: all, but with a host tier."""
    if plan.tier:
        worth, _ = _worth(config, model_spec, hardware, plan)
        longest = context(config, model_spec)
        return tiering.shares(config, plan.layout, plan.tier, room, longest, worth, hardware.host)
    pages = room // plan.layout.bytes_per_page
    return Shares(pages, pages, 0)


def _worth(config: Config, model_spec: ModelSpec, hardware: Hardware, plan: Plan) -> tuple[int, str]:
    """Tokens that it is worth having pages for, and why."""
    times = SPARE if config.prefix_cache and not hardware.is_cpu else 1
    words = f"{times} x max_running x max_context" if times > 1 else "max_running x max_context"
    return times * config.max_running * _whole_pages(context(config, model_spec), plan.page_size), words


def left_for_pages(config: Config, model_spec: ModelSpec, hardware: Hardware, dtype: str) -> int:
    """About what pages can have, before there is a plan: less a pool of a given size, which is theirs already."""
    taken = activation_bytes(config, model_spec, dtype, step_tokens(config, hardware))
    taken += model_spec.weight_bytes + int(hardware.memory * RESERVE) + (0 if hardware.is_cpu else LIBRARIES)
    return hardware.memory - taken - (parse_bytes(config.kv_memory) if config.kv_memory else 0)


def step_tokens(config: Config, hardware: Hardware) -> int:
    """Most tokens that one step computes."""
    return config.token_budget or (TOKENS_CPU if hardware.is_cpu else TOKENS_GPU)


def most_decodes(config: Config, tokens: int) -> int:
    """Most requests that one step decodes, where it has `tokens` tokens at most."""
    return min(config.max_running, tokens)


def context(config: Config, model_spec: ModelSpec) -> int:
    """Tokens of the longest request."""
    return min(config.max_context or model_spec.max_context, model_spec.max_context)


def staging_bytes(config: Config, model_spec: ModelSpec, plan: Plan) -> int:
    """The staging workspace of one layer, the layer that needs most; 0 where no route stages."""
    owners = {
        plan.owner[layer]
        for group in plan.groups
        for layer in group.layers
        if any(r.stage_to for r in group.routes)
    }
    layers = [entry for entry in plan.layout.without_index.layers if entry.layer in owners]
    return max(
        (staged_bytes(config, model_spec, entry, plan.dtype, plan.page_size) for entry in layers), default=0
    )


def staged_bytes(config: Config, model_spec: ModelSpec, layer: LayerLayout, dtype: str, page: int = 1) -> int:
    """The staging workspace that `layer` needs, on pages of so many tokens.

    tokens x (bytes of all streams in the plain format + 4 bytes x values of the widest stream, while it is
    decoded). tokens: staging's own bound, or one request if that is longer, but no more than all requests
    together.
    """
    longest = _whole_pages(context(config, model_spec), page)
    tokens = min(config.max_running * longest, max(MAX_TOKENS, longest))
    widest = max(entry.stream.values for entry in layer.streams)
    return tokens * (layer.bytes_in(formats.plain(dtype).name) + 4 * widest)


def kernel_bytes(plan: Plan, tokens: int) -> int:
    """What a kernel that dequantises prompts piece by piece has beside its output: pages in the compute dtype, and the
    results of two parts in float32, of a step of `tokens` tokens; of the group that needs most, 0 where there is none.
    """
    widest = max(entry.bytes_in(formats.plain(plan.dtype).name) for entry in plan.layout.layers)
    return max(
        (
            route.row.workspace * widest + 2 * 4 * tokens * group.group.q_heads * group.group.head_dim
            for group in plan.groups
            for route in group.routes
            if route.row.workspace
        ),
        default=0,
    )


def held_bytes(plan: Plan) -> int:
    """What the plan's backends keep on the device for themselves: each once, for all its routes."""
    held: dict[str, int] = {}
    for route in (route for group in plan.groups for route in group.routes):
        held[route.backend] = max(held.get(route.backend, 0), route.row.workspace_bytes)
    return sum(held.values())


def sparse_bytes(config: Config, model_spec: ModelSpec, plan: Plan, tokens: int) -> int:
    """What choosing tokens for a step of `tokens` tokens takes: scores, a bounded number at a time; what was chosen, by
    position and by slot; and the pages of each token's request. 0 without sparse attention."""
    top_k = max((group.group.top_k for group in plan.groups), default=0)
    pages = ceil(context(config, model_spec) / plan.page_size)
    return CHOOSER + tokens * 4 * (CHOSEN_COPIES * top_k + pages) if top_k else 0


def activation_bytes(config: Config, model_spec: ModelSpec, dtype: str, tokens: int) -> int:
    """What one step computes: WIDTHS hidden sizes a token, and float32 logits for requests that sample."""
    hidden = tokens * model_spec.hidden_size * _width(dtype) * WIDTHS
    return hidden + most_decodes(config, tokens) * model_spec.vocab_size * 4 * LOGIT_COPIES


def runtime_bytes(config: Config, model_spec: ModelSpec, hardware: Hardware, plan: Plan, tokens: int) -> int:
    """What runs the steps on a GPU: libraries, what backends hold, the recorded decode steps with their logits, and a
    watch, if any."""
    if hardware.is_cpu:
        return 0
    fixed = LIBRARIES + held_bytes(plan) + (WATCH if config.watch_fidelity else 0)
    if not config.graphs or cuda_graph_blocker(plan):
        return fixed
    recorded = graph_sizes(most_decodes(config, tokens))
    return fixed + len(recorded) * GRAPH + recorded[-1] * model_spec.vocab_size * _width(plan.dtype)


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _whole_pages(tokens: int, page_size: int) -> int:
    return ceil(tokens / page_size) * page_size


def _room(
    config: Config, model_spec: ModelSpec, hardware: Hardware, plan: Plan, used: int, reserve: int
) -> tuple[int, str]:
    """Bytes that the pool may take, and what decided so."""
    if config.kv_memory is not None:
        kept = 0 if hardware.is_cpu else int(KEPT * reserve)
        asked, left = parse_bytes(config.kv_memory), hardware.memory - used - kept
        if asked > left:
            raise CapacityError(
                f"--kv-memory {config.kv_memory} does not fit: {hardware}, holds {_holds(model_spec, used)}, "
                f"which leaves {format_bytes(max(left, 0))}"
            )
        return asked, "kv_memory"
    free = hardware.memory - reserve - used
    if free <= 0:
        fits = model_spec.weight_bytes < hardware.memory - reserve
        less = f", or a smaller --token-budget (now {step_tokens(config, hardware)})" if fits else ""
        raise CapacityError(
            f"nothing is left for the cache: {hardware}, less {format_bytes(reserve)} in reserve, must hold "
            f"{_holds(model_spec, used)}; a smaller model or more memory{less} would help"
        )
    return min(_candidates(config, model_spec, hardware, plan, free))


def _candidates(
    config: Config, model_spec: ModelSpec, hardware: Hardware, plan: Plan, free: int
) -> list[tuple[int, str]]:
    worth, words = _worth(config, model_spec, hardware, plan)
    found = [(free, "free memory")]
    if plan.tier is None:  # which gives pages more room than they need on the device
        found.append((worth * plan.layout.bytes_per_token, words))
    return [*found, (int(hardware.memory * SHARE), f"{SHARE:.0%} of memory")] if hardware.is_cpu else found


def _check(config: Config, model_spec: ModelSpec, plan: Plan, made: MemoryPlan) -> None:
    """Raises CapacityError where one request of the longest kind does not fit."""
    longest, size = context(config, model_spec), plan.page_size
    needed = ceil(longest / size)
    if made.pages >= needed:
        return
    shorter = f"--max-context {made.tokens}; " if made.tokens else ""
    raise CapacityError(
        f"the pool is too small: {format_bytes(made.pool)} ({made.limit}) is {made.pages} pages of {size} tokens, and "
        f"{needed} are needed for one request of {longest} tokens; what would help: {shorter}"
        f"--kv-memory {_ceil_mib(needed * plan.layout.bytes_per_page)}, if that fits; "
        f"a --kv-format with fewer than {made.bytes_per_token} bytes a token"
    )


def _holds(model_spec: ModelSpec, used: int) -> str:
    workspace = used - model_spec.weight_bytes
    return f"weights ({format_bytes(model_spec.weight_bytes)}) and workspace ({format_bytes(workspace)})"


def _ceil_mib(size: int) -> str:
    return f"{ceil(size / (1 << 20))}MiB"
