"""The launcher of topk.cu, the top k of rows of scores in CUDA C++: how many blocks share a row.

Shape suffixes: T query tokens, S rows of scores, L tokens, B requests, K tokens that are selected.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nibble.kernels.nvrtc import INT, POINTER, Kernel, cubin

SOURCE = Path(__file__).with_name("topk.cu")
THREADS = 1024
"""Threads of a block. Half as many, and two blocks a multiprocessor, where there are more rows than those."""
MAX_CLUSTER = 8
"""Most blocks of a cluster."""
MIN_SCORES = 16384
"""Scores of a row for each block that shares it, at least."""
CLUSTERS_FROM = 90
"""The first compute capability that has clusters."""
_TYPES = (*[POINTER] * 4, *[INT] * 4)


def topk(
    scores_SL: Tensor,
    cu_seqlens_q_B1: Tensor,
    seq_lens_B: Tensor,
    topk_indices_TK: Tensor,
    start: int,
    rows: int,
) -> None:
    """Select the top k of the scores of query rows start to start + rows.

    Args:
        scores_SL: Scores, float32. The first row is that of query `start`; a row is whole float4s.
        cu_seqlens_q_B1: First query row of each request, int32.
        seq_lens_B: Stored tokens of each request, int32.
        topk_indices_TK: Receives the positions, int32, ascending, -1 at the end.
        start: The first query row.
        rows: How many.
    """
    arch, multiprocessors = _gpu(scores_SL.device)
    cluster = cluster_size(rows, scores_SL.shape[1], multiprocessors) if arch >= CLUSTERS_FROM else 1
    pointers = (tensor.data_ptr() for tensor in (scores_SL, topk_indices_TK, cu_seqlens_q_B1, seq_lens_B))
    arguments = (*pointers, len(seq_lens_B), start, scores_SL.stride(0), topk_indices_TK.shape[1])
    threads = THREADS if rows * cluster <= multiprocessors else THREADS // 2
    kernel = _kernel(cluster, threads, arch, scores_SL.device.index or 0)
    kernel.launch(rows * cluster, threads, 0, _TYPES, arguments)


def cluster_size(rows: int, length: int, multiprocessors: int) -> int:
    """Return the blocks of a row, a power of two: as many as would be idle otherwise.

    Args:
        rows: Rows of scores.
        length: Scores of a row, at most.
        multiprocessors: Those of the GPU.
    """
    blocks = 1
    while blocks < MAX_CLUSTER and 2 * blocks * rows <= multiprocessors and 2 * blocks * MIN_SCORES <= length:
        blocks *= 2
    return blocks


@cache
def _kernel(cluster: int, threads: int, arch: int, device: int) -> Kernel:
    return Kernel(cubin(SOURCE, arch, macros(cluster, threads)), "topk", 0)


def macros(cluster: int, threads: int) -> dict[str, str | int]:
    """Return the macros of the source for blocks of a cluster and threads of a block."""
    return {"CLUSTER_SIZE": cluster, "THREADS": threads}


@cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, as 90 for 9.0, and the number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count
