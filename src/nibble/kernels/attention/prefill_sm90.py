"""Attention of many new tokens on SM90: how requests are cut, and the launcher of prefill_sm90.cu.

Neighbours that fit into the workspace are attended to in one launch, whatever their lengths. A request with more keys
than the workspace holds goes through it in passes, whose results are merged by their log-sum-exp. Requests with few new
tokens go to the kernel that splits keys (triton.py), and so do all where their rows are too few for the GPU and see
long contexts.

Shape suffixes: T query tokens, B requests, N pages or turns, H query heads, G KV heads, D values of a head, L tokens of
the workspace, I its tiles, J items, P blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nibble.kernels import PREFILL_WORKSPACE, SM90, cdiv
from nibble.kernels.attention import merge_lse
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.attention.prefill_stage import KEYS, stage
from nibble.kernels.flash import LOG2E
from nibble.kernels.nvrtc import FLOAT, INT, POINTER, Kernel, code_of
from nibble.kernels.tensor_map import tensor_map
from nibble.kernels.transfer import to_device
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

SOURCE = Path(__file__).with_name("prefill_sm90.cu")
ROWS, THREADS = 128, 384
DIMS = (64, 128)
MEMORY, ALIGNMENT = 230400, 1024
"""Bytes of shared memory that a block of SM90 has for tiles, and what these are aligned to."""
MOST_STAGES = 4
"""Tiles of keys, and of values, beyond which there is nothing to gain."""
COLUMN = 64
"""Values of 16 bits in a row of a box."""
MIN_ROWS = 128
"""New tokens of a request from which it goes to this kernel."""
ITEM_TILES = 1.5
"""Tiles that an item takes as long as, beside its own."""
LONG_TILES = 32
"""Tiles of keys from which blocks that are too few for the GPU take longer than splits of keys."""
_TYPES = (None, None, None, *[POINTER] * 5, FLOAT, FLOAT, *[INT] * 4)
_HALVES = {torch.bfloat16: '"bf16"', torch.float16: '"f16"'}


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One launch: some keys of some requests."""

    spans_I4: Tensor
    """Int32: the tiles of the workspace (prefill_stage.py)."""
    items_J8: Tensor
    """Int32: what prefill_sm90.cu calls an Item, with rows counted from the block's; those with most tiles first."""
    shares_NP: Tensor
    """Int32: for each turn of each processor's block an item times the heads, plus its head; -1 where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of the queries."""

    rows: slice
    plan: tuple[Pass, ...] | AttentionBatch
    """Passes, which together hold all keys that the rows see; or requests with few rows each."""


# ---- how requests are cut --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A request, its rows, and the keys that they may see: tokens [start, stop)."""

    request: int
    row: int
    count: int
    start: int
    stop: int

    @property
    def tiles(self) -> int:
        """Return how many tiles of the workspace the keys take."""
        return cdiv(self.stop - self.start, KEYS)


def plan_blocks(batch: AttentionBatch, window: int | None, heads: int, processors: int) -> tuple[Block, ...]:
    """Cut a batch into blocks.

    Args:
        batch: The requests. Where one has more new tokens than are stored, the first of them see none.
        window: Tokens that a query sees, if not all.
        heads: Of queries.
        processors: Of the GPU.

    Returns:
        Blocks in the order of rows.
    """
    blocks: list[Block] = []
    requests = list(_parts(batch, window))
    busy = heads * sum(cdiv(part.count, ROWS) for part in requests if part.count >= MIN_ROWS)
    is_sparse = 2 * busy < processors and max(part.tiles for part in requests) >= LONG_TILES
    for parts, short in _groups(requests, max(batch.query_lens) + 1 if is_sparse else MIN_ROWS):
        rows = slice(parts[0].row, parts[-1].row + parts[-1].count)
        plan = _short(parts, batch) if short else tuple(_passes(parts, batch, window, heads, processors))
        blocks.append(Block(rows, plan))
    return tuple(blocks)


def _parts(batch: AttentionBatch, window: int | None) -> Iterator[_Part]:
    row = 0
    for i, (count, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        start = 0 if window is None else max(length - count + 1 - window, 0) // KEYS * KEYS
        yield _Part(i, row, count, start, max(length, start))
        row += count


def _groups(parts: Sequence[_Part], least: int) -> Iterator[tuple[list[_Part], bool]]:
    """Yield neighbours that share a launch, and whether their rows are fewer than `least`."""
    group: list[_Part] = []
    free, short = PREFILL_WORKSPACE // KEYS, False
    for part in parts:
        is_short = part.count < least
        if group and (is_short != short or (not short and part.tiles > free)):
            yield group, short
            group = []
        if not group:
            free, short = PREFILL_WORKSPACE // KEYS, is_short
        group.append(part)
        free -= part.tiles
    if group:
        yield group, short


def _short(parts: Sequence[_Part], batch: AttentionBatch) -> AttentionBatch:
    """Return neighbours as a batch."""
    requests = slice(parts[0].request, parts[-1].request + 1)
    lens = batch.query_lens[requests], batch.seq_lens[requests]
    return AttentionBatch.from_lens(Phase.EXTEND, parts[0].row, *lens, batch.page_table_BN[requests])


def _passes(
    parts: Sequence[_Part], batch: AttentionBatch, window: int | None, heads: int, processors: int
) -> Iterator[Pass]:
    """Yield the passes of requests that share a launch: one, or several of a single request."""
    device = batch.page_table_BN.device
    longest = max(part.stop - part.start for part in parts)
    for first in range(0, max(longest, 1), PREFILL_WORKSPACE):
        spans: list[tuple[int, int, int, int]] = []
        items: list[tuple[int, ...]] = []
        for part in parts:
            start, key = part.start + first, len(spans) * KEYS
            keys = max(min(part.stop - start, PREFILL_WORKSPACE), 0)
            spans += [(part.request, start + at, part.stop, 0) for at in range(0, keys, KEYS)]
            row, visible = part.row - parts[0].row, batch.seq_lens[part.request] - part.count - start + 1
            for at in range(0, part.count, ROWS):
                items.append((row + at, min(ROWS, part.count - at), key, keys, visible + at, 0, 0, 0))
        items.sort(key=lambda item: -_tiles(item, window))
        shares = share_out([_tiles(item, window) for item in items], heads, processors)
        yield Pass(*(_table(rows, device) for rows in (spans or [(0, 0, 0, 0)], items, shares)))


def _tiles(item: tuple[int, ...], window: int | None) -> int:
    """Return how many tiles the rows of an item see."""
    _, rows, _, keys, visible, *_ = item
    stop = cdiv(max(min(keys, visible + rows - 1), 0), KEYS)
    return stop - (min(max(visible - window, 0) // KEYS, stop) if window else 0)


def share_out(tiles: Sequence[int], heads: int, processors: int) -> list[list[int]]:
    """Return what blocks do in each turn, as Pass.shares_NP has it, so that all end at about the same time.

    In each turn the block that has least to do gets most. Items that are left over are the smallest: some blocks have
    one more of these, which counts from the start, and comes last.

    Args:
        tiles: Of items, the most first.
        heads: That each item has.
        processors: That have a block each, or fewer of them where there are fewer items.
    """
    costs = [count + ITEM_TILES for count in tiles for _ in range(heads)]
    blocks = min(processors, len(costs))
    turns, more = divmod(len(costs), blocks)
    rest = [*range(len(costs) - more, len(costs)), *[-1] * (blocks - more)]
    loads = [0.0 if item < 0 else costs[item] for item in rest]
    shares: list[list[int]] = []
    for turn in range(turns):
        share = [0] * blocks
        for item, block in enumerate(sorted(range(blocks), key=loads.__getitem__), turn * blocks):
            share[block] = item
            loads[block] += costs[item]
        shares.append(share)
    return [*shares, rest, [-1] * blocks]


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    flat = [number for row in rows for number in row]
    return to_device(flat, torch.int32, device).view(len(rows), -1)


# ---- the kernel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """Where keys and values are, and what the layer asks for."""

    k: Paged
    v: Paged
    page_table_BN: Tensor
    params: AttentionParams


def prefill_attention(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, blocks: Sequence[Block], params: AttentionParams,
    out_THD: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention of each request's last tokens over its pages.

    Args:
        q_THD: Queries of 16 bits, request after request.
        k: Pages of the keys.
        v: Pages of the values.
        batch: The requests.
        blocks: From plan_blocks.
        params: Scale, window, capping and sinks.
        out_THD: Where to leave what is returned, contiguous, if anywhere; few rows are left elsewhere.

    Returns:
        [T, H, D] in the query's dtype.
    """
    if len(blocks) == 1 and isinstance(few := blocks[0].plan, AttentionBatch):
        from nibble.kernels.attention.triton import paged_attention

        return paged_attention(q_THD, k, v, few, params, max(few.seq_lens))
    if out_THD is None:
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    q_THD = _copyable(q_THD)
    pages = _Pages(k, v, batch.page_table_BN, params)
    for block in blocks:
        _attend(q_THD[block.rows], pages, block.plan, out_THD[block.rows], None)
    return out_THD


def partial_prefill_attention(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, blocks: Sequence[Block], params: AttentionParams
) -> PartialAttention:
    """Return what prefill_attention returns, with its log-sum-exp; arguments are the same."""
    if len(blocks) == 1 and isinstance(few := blocks[0].plan, AttentionBatch):
        from nibble.kernels.attention.triton import partial_attention

        return partial_attention(q_THD, k, v, few, params, max(few.seq_lens))
    q_THD, (out_THD, lse_HT) = _copyable(q_THD), _empty(q_THD)
    pages = _Pages(k, v, batch.page_table_BN, params)
    for block in blocks:
        _attend(q_THD[block.rows], pages, block.plan, out_THD[block.rows], lse_HT[:, block.rows])
    return PartialAttention(out_THD, lse_HT)


def _copyable(q_THD: Tensor) -> Tensor:
    """Return queries as the tensor copy engine takes them: in 16-byte pieces."""
    token, head, value = q_THD.stride()
    return q_THD if value == 1 and not (token | head | q_THD.data_ptr() // 2) % 8 else q_THD.contiguous()


def _empty(q_THD: Tensor) -> PartialAttention:
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    return PartialAttention(
        out_THD, torch.empty(q_THD.shape[1], len(q_THD), dtype=torch.float32, device=q_THD.device)
    )


def _attend(
    q_THD: Tensor,
    pages: _Pages,
    plan: tuple[Pass, ...] | AttentionBatch,
    out_THD: Tensor,
    lse_HT: Tensor | None,
) -> None:
    """Write the rows of a block."""
    if isinstance(plan, AttentionBatch):
        _attend_few(q_THD, pages, plan, out_THD, lse_HT)
    elif len(plan) == 1:
        _launch(q_THD, pages, plan[0], out_THD, lse_HT)
    else:
        total = _part(q_THD, pages, plan[0])
        pages = replace(pages, params=replace(pages.params, sinks_H=None))  # sinks join the softmax once
        for step in plan[1:]:
            # Merged parts stay in float32, and only the last merge rounds.
            rounded = q_THD.dtype if step is plan[-1] else torch.float32
            total = merge_lse(total, _part(q_THD, pages, step), rounded)
        out_THD.copy_(total.values_THD)
        if lse_HT is not None:
            lse_HT.copy_(total.lse_HT)


def _attend_few(
    q_THD: Tensor, pages: _Pages, batch: AttentionBatch, out_THD: Tensor, lse_HT: Tensor | None
) -> None:
    """Write the rows of requests with few rows each."""
    from nibble.kernels.attention.triton import paged_attention, partial_attention

    longest = max(batch.seq_lens)
    if lse_HT is None:
        out_THD.copy_(paged_attention(q_THD, pages.k, pages.v, batch, pages.params, longest))
    else:
        part = partial_attention(q_THD, pages.k, pages.v, batch, pages.params, longest)
        out_THD.copy_(part.values_THD)
        lse_HT.copy_(part.lse_HT)


def _part(q_THD: Tensor, pages: _Pages, step: Pass) -> PartialAttention:
    """Return attention over the keys of a pass."""
    part = _empty(q_THD)
    _launch(q_THD, pages, step, *part)
    return part


def _launch(q_THD: Tensor, pages: _Pages, step: Pass, out_THD: Tensor, lse_HT: Tensor | None) -> None:
    (_, heads, dim), params = q_THD.shape, pages.params
    keys, values = stage(pages.k, pages.v, pages.page_table_BN, step.spans_I4, q_THD.dtype)
    sinks = None if params.sinks_H is None else params.sinks_H.float().contiguous()
    window, softcap = params.window or 0, params.softcap or 0.0
    # What a score is capped at, in scores that are not scaled yet.
    cap = softcap / params.scale if softcap else 1.0
    kernel = _kernel(q_THD.device, dim, q_THD.dtype, bool(softcap), bool(window))
    kernel.launch(
        step.shares_NP.shape[1], THREADS, _shared(dim), _TYPES,
        (
            *(tensor_map(x, (n, 1, COLUMN)) for x, n in ((q_THD, ROWS), (keys, KEYS), (values, KEYS))),
            *(0 if x is None else x.data_ptr() for x in (step.items_J8, step.shares_NP, sinks, out_THD, lse_HT)),
            params.scale * LOG2E.value, cap, heads, heads // pages.k.heads,
            0 if lse_HT is None else lse_HT.stride(0), window,
        ),
    )  # fmt: skip


def _stages(dim: int) -> int:
    """Return how many tiles of keys, and of values, a block has in shared memory."""
    return min((MEMORY - 2 * ROWS * dim) // (4 * KEYS * dim), MOST_STAGES)


def _shared(dim: int) -> int:
    """Return the bytes of shared memory of a block: queries, stages, and room to align them."""
    return 2 * ROWS * dim + 4 * KEYS * dim * _stages(dim) + ALIGNMENT


def macros_of(dim: int, dtype: torch.dtype, *, capped: bool, windowed: bool) -> dict[str, str | int]:
    """Return the macros of a variant of the kernel."""
    return {
        "STAGES": _stages(dim), "DIM": dim, "HALF": _HALVES[dtype], "CAPPED": int(capped), "WINDOWED": int(windowed)
    }  # fmt: skip


@cache
def _kernel(device: torch.device, dim: int, dtype: torch.dtype, capped: bool, windowed: bool) -> Kernel:
    code = code_of(SOURCE, f"{SM90}a", macros_of(dim, dtype, capped=capped, windowed=windowed))
    return Kernel(code, "prefill_attention", _shared(dim))
