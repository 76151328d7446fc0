"""Prompts on a GPU in CUDA C++: what blocks of 16 tokens need is prepared for all at once, then heads are scanned.

A state is rounded every 16 tokens, so a head's blocks wait for each other. All that does not depend on the state is
done before, by scan_prepare.cu, or scan_columns.cu with a decay for each column: how tokens of a block weigh each
other, and the inverse that makes updates by the delta rule of what is read of the matrix. scan.cu goes from block to
block with a part of a head's matrix in registers. Within a block updates are solved for before they are rounded, so
results agree with naive.py up to the rounding of products' factors, not to the bit.

A NaN in a token's inputs may reach the outputs of earlier tokens of its block, too.

Shape suffixes: those of the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, import_problem
from nibble.kernels.recurrence.types import LayerState, StateMetadata
from nibble.kernels.state_formats import BLOCK, state_format

FIRST_ARCH, FIRST_E4M3 = 80, 89
"""Compute capabilities from which all is there, and E4M3."""
CODES = {"float32": 0, "bfloat16": 1, "float8_e4m3fn": 2, "int8": 3}
"""Dtypes of matrices' codes, and how scan.cu calls them."""
RATES = {torch.float32: 1, torch.bfloat16: 2}
COLUMNS = range(16, 129, 16)
ROWS = 16
"""Of a matrix, that a warp has; V is a multiple."""
MIN_TOKENS = 64
"""Of the longest request. A step of fewer is not worth three launches."""
STAGES = {False: 6, True: 4}
"""Blocks of tokens that a block of threads has in shared memory, by whether columns have decays."""
PREPARE_WARPS, COLUMN_THREADS = 4, 128
FRAGMENT = 512
"""Bytes of an operand of 16 x 16."""
ALIGNMENT = 16
"""Bytes that are copied at once."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What kernels are compiled for, and sizes of their memory (scan_records.cuh, scan.cu)."""

    columns: int
    format: str
    delta: bool
    by_column: bool
    rate: int = 0
    """Of RATES; 0: there are none."""

    @property
    def splits(self) -> bool:
        """Whether factors of products have two parts."""
        return not CODES[state_format(self.format).dtype]

    @property
    def record_bytes(self) -> int:
        """Of a block of tokens and head."""
        operands = 1 + self.delta * (1 + self.splits)
        return operands * FRAGMENT + 3 * 4 * BLOCK + (4 * self.columns if self.by_column else 16)

    def stage_bytes(self, warps: int) -> int:
        """Return the bytes of a block of tokens in shared memory."""
        pitch = (2 + self.by_column) * (2 * self.columns + 16) + 2 * ROWS * warps + 16
        return BLOCK * pitch + self.record_bytes

    @property
    def macros(self) -> dict[str, int]:
        """Of all kernels."""
        return {"K": self.columns, "DELTA": int(self.delta), "SPLIT": int(self.splits)}

    def prepare_macros(self, heads: int) -> dict[str, int]:
        """Return the macros of what prepares, `heads` at a time."""
        return {**self.macros, "BETA": self.rate, **({} if self.by_column else {"HEADS": heads})}

    def scan_macros(self, warps: int) -> dict[str, int]:
        """Return the macros of scan.cu."""
        code, by_column = CODES[state_format(self.format).dtype], self.by_column
        own = {"FORMAT": code, "COLUMN": int(by_column), "WARPS": warps, "STAGES": STAGES[by_column]}
        return {**self.macros, **own}


def serves(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    log_decay: Tensor,
    beta_TH: Tensor | None,
    state: LayerState,
    metadata: StateMetadata,
) -> bool:
    """Return whether the kernels serve a step; arguments as in recurrence()."""
    dtypes = {x.dtype for x in (q_TGK, k_TGK, v_THV, state.keys_SPGK)}
    codes = state.planes[0].dtype
    updates = torch.float32 if codes == torch.float32 else torch.bfloat16
    return (
        v_THV.is_cuda
        and metadata.max_length >= MIN_TOKENS
        and metadata.settled_B is None
        and metadata.states_at_B is None
        and not metadata.invariant
        and dtypes == {torch.bfloat16}
        and log_decay.dtype == torch.float32
        and (beta_TH is None or beta_TH.dtype in RATES)
        and str(codes).removeprefix("torch.") in CODES
        and state.updates_SPHV.dtype == updates
        and k_TGK.shape[2] in COLUMNS
        and v_THV.shape[2] % ROWS == 0
        and all(_has_whole_slots(x) for x in _stored(state))
        and _has_compiler()
        and gpu_of(v_THV.device).arch >= (FIRST_E4M3 if codes == torch.float8_e4m3fn else FIRST_ARCH)
    )


def _stored(state: LayerState) -> tuple[Tensor, ...]:
    return *state.planes, state.keys_SPGK, state.updates_SPHV, state.decays


def _has_whole_slots(x: Tensor) -> bool:
    """Return whether what a slot has follows one another, and lies where it can be copied."""
    step = x.stride(0) * x.itemsize
    return x[0].is_contiguous() and x.data_ptr() % ALIGNMENT == 0 and step % ALIGNMENT == 0


@cache
def _has_compiler() -> bool:
    if import_problem("cuda.bindings"):
        return False
    from nibble.kernels.nvrtc import unavailable_reason

    return unavailable_reason() is None


def num_records(tokens: int, requests: int) -> int:
    """Return how many blocks of tokens there is room for: a request's may begin and end within one."""
    return tokens // BLOCK + 3 * requests


def warps_of(values: int, heads: int, requests: int, processors: int) -> int:
    """Return the warps of a block that scan: few where few heads are spread over many processors.

    Args:
        values: V.
        heads: H.
        requests: B.
        processors: Multiprocessors of the GPU.
    """
    tiles = values // ROWS
    most = 4 if requests * heads * cdiv(tiles, 2) > 2 * processors else 2
    return next(warps for warps in (most, 2, 1) if tiles % warps == 0)


def heads_of(heads: int, key_heads: int) -> int:
    """Return for how many heads a warp of scan_prepare.cu multiplies keys and queries once."""
    shared = heads // key_heads
    return next(count for count in (4, 2, 1) if shared % count == 0)


@cache
def _kernel(source: str, arch: int, device: int, shared: int, macros: tuple[tuple[str, int], ...]) -> Any:
    from nibble.kernels.nvrtc import Kernel, code_of

    return Kernel(code_of(Path(__file__).with_name(f"{source}.cu"), arch, dict(macros)), source, shared)


def recurrence(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    log_decay: Tensor,
    beta_TH: Tensor | None,
    state: LayerState,
    metadata: StateMetadata,
    *,
    delta: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Update matrices by keys and values, and read them by queries -> [T, H, V]; a step that serves() accepts.

    `out` is where outputs are written, if given.

    Raises:
        BackendError: The driver refuses a launch.
    """
    (tokens, heads, _), requests = v_THV.shape, len(metadata.slots_B)
    o_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device) if out is None else out
    if not tokens:
        return o_THV
    q_TGK, k_TGK, v_THV = (_loadable(x) for x in (q_TGK, k_TGK, v_THV))
    rate = 0 if beta_TH is None else RATES[beta_TH.dtype]
    shape = Shape(k_TGK.shape[2], state.format, delta, log_decay.dim() == 3, rate)
    records = num_records(tokens, requests)
    blocks = 3 * heads * records if shape.by_column else k_TGK.shape[1] * requests
    rows = k_TGK.new_empty(blocks * BLOCK * shape.columns)
    step = _Step(
        shape, q_TGK, k_TGK, v_THV, log_decay.contiguous(), beta_TH if beta_TH is None else beta_TH.contiguous(),
        state, metadata, o_THV, k_TGK.new_empty(records * heads * shape.record_bytes, dtype=torch.uint8), rows,
    )  # fmt: skip
    _prepare(step, records)
    _scan(step)
    return o_THV


@dataclass(frozen=True, slots=True)
class _Step:
    """Tensors of a step."""

    shape: Shape
    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    decay: Tensor
    beta_TH: Tensor | None
    state: LayerState
    metadata: StateMetadata
    o_THV: Tensor
    records: Tensor
    rows: Tensor
    """Keys that are stored of requests' first blocks, or keys and queries with their decays."""

    @property
    def requests(self) -> tuple[Tensor, ...]:
        return self.metadata.slots_B, self.metadata.starts_B, self.metadata.cu_seqlens_B1

    def launch(
        self, source: str, grid: int, threads: int, shared: int, macros: dict[str, int],
        tensors: tuple[Tensor | None, ...], strides: tuple[int, ...], sizes: tuple[int, ...],
    ) -> None:  # fmt: skip
        from nibble.kernels.nvrtc import INT, LONG, POINTER

        device = self.v_THV.device
        kernel = _kernel(source, gpu_of(device).arch, device.index or 0, shared, tuple(macros.items()))
        pointers = tuple(0 if x is None else x.data_ptr() for x in tensors)
        types = (POINTER,) * len(pointers) + (LONG,) * len(strides) + (INT,) * len(sizes)
        kernel.launch(grid, threads, shared, types, (*pointers, *strides, *sizes))


def _prepare(step: _Step, records: int) -> None:
    """Write records, and rows."""
    shape, state, (heads, key_heads) = step.shape, step.state, (step.v_THV.shape[1], step.k_TGK.shape[1])
    share = heads_of(heads, key_heads)
    if shape.by_column:
        source, grid, threads = "scan_columns", records * heads, COLUMN_THREADS
    else:
        source, threads = "scan_prepare", 32 * PREPARE_WARPS
        grid = cdiv(records * (heads // share), PREPARE_WARPS)
    step.launch(
        source, grid, threads, 0, shape.prepare_macros(share),
        (step.q_TGK, step.k_TGK, step.decay, step.beta_TH, state.keys_SPGK, state.decays, step.records, step.rows,
         *step.requests),
        (*_strides(step.q_TGK, step.k_TGK), state.keys_SPGK.stride(0), state.decays.stride(0)),
        (len(step.metadata.slots_B), records, heads, key_heads, state.keys_SPGK.shape[1]),
    )  # fmt: skip


def _scan(step: _Step) -> None:
    """Scan heads, and write outputs, matrices, and what is kept of the last block."""
    shape, state, requests = step.shape, step.state, len(step.metadata.slots_B)
    tokens, heads, values = step.v_THV.shape
    warps = warps_of(values, heads, requests, gpu_of(step.v_THV.device).processors)
    scales = state.planes[1] if len(state.planes) > 1 else None
    # One more than there are requests: the rows behind them, which become zeros.
    grid, threads = (requests + 1) * heads * (values // (ROWS * warps)), 32 * (warps + 1)
    step.launch(
        "scan", grid, threads, STAGES[shape.by_column] * shape.stage_bytes(warps), shape.scan_macros(warps),
        (step.q_TGK, step.k_TGK, step.v_THV, step.decay, step.o_THV, state.planes[0], scales, state.keys_SPGK,
         state.updates_SPHV, state.decays, step.records, step.rows, *step.requests),
        (*_strides(step.q_TGK, step.k_TGK, step.v_THV), state.planes[0].stride(0),
         0 if scales is None else scales.stride(0), state.keys_SPGK.stride(0), state.updates_SPHV.stride(0),
         state.decays.stride(0)),
        (requests, tokens, heads, step.k_TGK.shape[1], values, state.keys_SPGK.shape[1]),
    )  # fmt: skip


def _loadable(x: Tensor) -> Tensor:
    """Return rows that can be copied by 16 aligned bytes."""
    steps = (x.data_ptr(), *(x.stride(i) * x.itemsize for i in (0, 1)))
    is_fit = x.stride(2) == 1 and all(step % ALIGNMENT == 0 for step in steps)
    return x if is_fit else x.clone(memory_format=torch.contiguous_format)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x.stride(i) for x in tensors for i in (0, 1))
