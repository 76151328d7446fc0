"""The launcher of mla.cu and mla_fp4.cu, MLA decode in CUDA C++: which calls they serve, and their arguments.

They serve 4- and 8-bit latents on SM90, one query token a request and up to 16 heads: what a GPU has of a model
whose heads are spread over several GPUs. Triton's combine_kernel merges what several blocks have of a request.

Shape suffixes: T query tokens, H query heads, D values of a latent, P pages, S slots of a page.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from nibble.kernels import SM90, gpu_of
from nibble.kernels.codecs import CUDA_LATENTS
from nibble.kernels.codecs.base import HEADS, RANK, ROPE, CudaLatent
from nibble.kernels.nvrtc import FLOAT, INT, LONG, POINTER, Kernel, code_of, unavailable_reason
from nibble.kernels.types import AttentionBatch, Paged, is_aligned

ARCH = "90a"
PAGES = (16, 32, 64, 128)
MAX_BATCH = 1024
ALIGNMENT = 16
"""Bytes that are loaded at once."""
_TYPES = (*[POINTER] * 12, *[LONG] * 3, *[INT] * 3, FLOAT, *[INT] * 6)


def compile_latent(latent: CudaLatent) -> bytes | Future[bytes]:
    """Return the machine code of the kernel that reads a format of latents."""
    return code_of(Path(__file__).with_name(latent.source), ARCH, dict(latent.macros))


@cache
def _kernel(latent: CudaLatent, device: int) -> Kernel:
    return Kernel(compile_latent(latent), "mla", latent.shared_bytes(MAX_BATCH))


@cache
def _blocks(device: torch.device) -> int:
    """Return the blocks of a launch, one a multiprocessor; 0 where the kernel does not run."""
    gpu = gpu_of(device)
    return gpu.processors if gpu.arch == SM90 and unavailable_reason() is None else 0


def serves(q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch) -> bool:
    """Return whether a kernel serves this call.

    Args:
        q_THD: Queries.
        latents: Stored latents. Their rows must be of 16 aligned bytes.
        rope: Rotary values at the end of a latent.
        batch: The requests.
    """
    return (
        latents.format.name in CUDA_LATENTS
        and (latents.dim - rope, rope, latents.heads) == (RANK, ROPE, 1)
        and q_THD.dtype == torch.bfloat16
        and q_THD.shape[1] <= HEADS
        and max(batch.query_lens, default=0) == 1
        and len(batch.seq_lens_B) <= MAX_BATCH
        and latents.page_size in PAGES
        and all(plane.stride(3) == 1 and is_aligned(plane, ALIGNMENT) for plane in latents.planes_PHS)
        and (not CUDA_LATENTS[latents.format.name].in_runs or has_contiguous_slots(latents.planes_PHS))
        and _blocks(q_THD.device) > 0
    )


def _is_loadable(q_THD: Tensor) -> bool:
    """Return whether a head's query can be loaded by 16 aligned bytes."""
    steps = (q_THD.data_ptr(), *(q_THD.stride(i) * q_THD.itemsize for i in (0, 1)))
    return q_THD.stride(2) == 1 and all(x % ALIGNMENT == 0 for x in steps)


def has_contiguous_slots(planes_PHS: tuple[Tensor, ...]) -> bool:
    """Return whether slots of a page follow one another: in each plane, or as records of all planes in order."""
    rows = [plane.shape[3] * plane.itemsize for plane in planes_PHS]
    slots = [plane.stride(2) * plane.itemsize for plane in planes_PHS]
    starts = [plane.data_ptr() - planes_PHS[0].data_ptr() for plane in planes_PHS]
    pages = {plane.stride(0) * plane.itemsize for plane in planes_PHS}
    are_records = (
        slots == [sum(rows)] * len(rows) and starts == [*accumulate(rows, initial=0)][:-1] and len(pages) == 1
    )
    return slots == rows or are_records


def attend(q_THD: Tensor, latents: Paged, batch: AttentionBatch, scale: float) -> Tensor:
    """Compute mla_attention (kernels/mla/__init__.py) for a call that serves() accepts.

    Args:
        q_THD: Queries, bfloat16.
        latents: Stored latents.
        batch: The requests, of one query token each.
        scale: The softmax scale.

    Returns:
        The output [T, H, RANK], bfloat16.
    """
    from nibble.kernels.flash import combine_kernel

    (tokens, heads, _), requests = q_THD.shape, len(batch.seq_lens_B)
    latent, blocks = CUDA_LATENTS[latents.format.name], _blocks(q_THD.device)
    q_THD = q_THD if _is_loadable(q_THD) else q_THD.clone(memory_format=torch.contiguous_format)
    out = q_THD.new_empty(tokens, heads, RANK)
    rows = (blocks + requests) * HEADS
    parts = q_THD.new_empty(rows, RANK, dtype=torch.float32)
    lse = q_THD.new_empty(rows, dtype=torch.float32)
    plan = q_THD.new_empty(requests, 2, dtype=torch.int32)
    planes = latents.planes_PHS
    pointers = (
        q_THD, out, parts, lse, plan, *planes, latents.scale, batch.seq_lens_B, batch.cu_seqlens_q_B1,
        batch.page_table_BN,
    )  # fmt: skip
    strides = (plane.stride(i) * plane.itemsize for i in (0, 2) for plane in planes)
    # Pages are powers of two, so the kernel shifts by this in place of dividing.
    shift = latents.page_size.bit_length() - 1
    sizes = requests, batch.page_table_BN.stride(0), shift, heads, q_THD.stride(0), q_THD.stride(1)
    arguments = (*(tensor.data_ptr() for tensor in pointers), *strides, scale, *sizes)
    kernel = _kernel(latent, q_THD.device.index or 0)
    kernel.launch(blocks, latent.threads, latent.shared_bytes(requests), _TYPES, arguments)
    # Parts of a row that are merged at once: many where few requests are spread over many blocks.
    parts_at_once = 4 if blocks <= 3 * requests else 16
    combine_kernel[(1, heads, requests)](
        out, None, parts, lse, plan, batch.cu_seqlens_q_B1, 1, heads, RANK, RANK, HEADS, parts_at_once
    )
    return out
