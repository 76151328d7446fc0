"""The best of rows of scores in CUDA C++ (choose.cu): how many blocks share a row, and the launch.

Owns best(). Must not know where scores come from.

Shape suffixes: T query tokens, S rows of scores, L tokens, B requests, K tokens that are chosen.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nibble.kernels.nvrtc import INT, POINTER, Kernel, cubin

SOURCE = Path(__file__).with_name("topk.cu")
THREADS = 1024
"""Of a block; half as many, and two blocks of a processor, where there are more rows than processors."""
MOST_BLOCKS = 8
"""Blocks of a cluster."""
LEAST = 16384
"""Scores for which a block of its own is worth while."""
HOPPER = 90
_TYPES = (*[POINTER] * 4, *[INT] * 4)


def best(
    scores_SL: Tensor,
    cu_seqlens_q_B1: Tensor,
    seq_lens_B: Tensor,
    topk_indices_TK: Tensor,
    start: int,
    rows: int,
) -> None:
    """The best of rows start to start + rows of the queries, ascending, -1 at the end -> their rows of topk_indices_TK.

    scores_SL: float32, the first row that of query `start`; whole float4s a row.
    """
    arch, processors = _gpu(scores_SL.device)
    blocks = blocks_of_row(rows, scores_SL.shape[1], processors) if arch >= HOPPER else 1
    pointers = (tensor.data_ptr() for tensor in (scores_SL, topk_indices_TK, cu_seqlens_q_B1, seq_lens_B))
    values = (*pointers, len(seq_lens_B), start, scores_SL.stride(0), topk_indices_TK.shape[1])
    threads = THREADS if rows * blocks <= processors else THREADS // 2
    kernel = _kernel(blocks, threads, arch, scores_SL.device.index or 0)
    kernel.launch(rows * blocks, threads, 0, _TYPES, values)


def blocks_of_row(rows: int, length: int, processors: int) -> int:
    """A power of two: as many as are idle otherwise, for rows of up to `length` scores."""
    blocks = 1
    while blocks < MOST_BLOCKS and 2 * blocks * rows <= processors and 2 * blocks * LEAST <= length:
        blocks *= 2
    return blocks


@cache
def _kernel(blocks: int, threads: int, arch: int, device: int) -> Kernel:
    return Kernel(cubin(SOURCE, arch, macros(blocks, threads)), "best", 0)


def macros(blocks: int, threads: int) -> dict[str, str | int]:
    return {"CLUSTER": blocks, "THREADS": threads}


@cache
def _gpu(device: torch.device) -> tuple[int, int]:
    found = torch.cuda.get_device_properties(device)
    return 10 * found.major + found.minor, found.multi_processor_count
