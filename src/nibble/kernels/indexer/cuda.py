"""The launcher of topk.cu, the top k of rows of scores in CUDA C++: how many blocks share a row.

Shape suffixes: T query tokens, S rows of scores, L tokens, K tokens that are selected.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor

from nibble.kernels import SM90, gpu_of
from nibble.kernels.nvrtc import INT, POINTER, Kernel, code_of
from nibble.kernels.types import AttentionBatch

SOURCE = Path(__file__).with_name("topk.cu")
THREADS = 1024
"""Threads of a block. Half as many, and two blocks a multiprocessor, where there are more rows than those."""
MAX_CLUSTER = 8
"""Most blocks of a cluster."""
MIN_SCORES = 16384
"""Scores of a row for each block that shares it, at least."""
_TYPES = (*[POINTER] * 4, *[INT] * 4)


def topk(scores_SL: Tensor, batch: AttentionBatch, topk_indices_TK: Tensor, start: int, rows: int) -> None:
    """Select the top k of the scores of query rows start to start + rows.

    Args:
        scores_SL: Scores, float32. The first row is that of query `start`; a row is whole float4s.
        batch: The lengths of requests.
        topk_indices_TK: Receives the positions, int32, ascending, -1 at the end.
        start: The first query row.
        rows: How many.
    """
    gpu = gpu_of(scores_SL.device)
    # SM90 is the first that has clusters.
    cluster = cluster_size(rows, scores_SL.shape[1], gpu.processors) if gpu.arch >= SM90 else 1
    pointers = (scores_SL, topk_indices_TK, batch.cu_seqlens_q_B1, batch.seq_lens_B)
    sizes = len(batch.seq_lens_B), start, scores_SL.stride(0), topk_indices_TK.shape[1]
    arguments = (*(tensor.data_ptr() for tensor in pointers), *sizes)
    threads = THREADS if rows * cluster <= gpu.processors else THREADS // 2
    kernel = _kernel(cluster, threads, gpu.arch, scores_SL.device.index or 0)
    kernel.launch(rows * cluster, threads, 0, _TYPES, arguments)


def cluster_size(rows: int, length: int, processors: int) -> int:
    """Return the blocks of a row, a power of two: as many as would be idle otherwise.

    Args:
        rows: Rows of scores.
        length: Scores of a row, at most.
        processors: Multiprocessors of the GPU.
    """
    blocks = 1
    while blocks < MAX_CLUSTER and 2 * blocks * rows <= processors and 2 * blocks * MIN_SCORES <= length:
        blocks *= 2
    return blocks


@cache
def _kernel(cluster: int, threads: int, arch: int, device: int) -> Kernel:
    return Kernel(code_of(SOURCE, arch, macros(cluster, threads)), "topk", 0)


def macros(cluster: int, threads: int) -> dict[str, str | int]:
    """Return the macros of the source for blocks of a cluster and threads of a block."""
    return {"CLUSTER_SIZE": cluster, "THREADS": threads}
