"""MLA decode in CUDA C++ (mla.cu, mla_fp4.cu): which calls it serves, and how it is launched.

A twin of kernels/mla/__init__.py for 4- and 8-bit latents on SM90, one query token a request and up to 16 heads: what a GPU has
of a model whose heads are spread over several. Everything else is the Triton twin's, whose combine_kernel also joins
what blocks leave here. Must not know of pools or plans.

Shape suffixes: T query tokens, H query heads, D values of a latent, P pages, S slots of a page.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from nibble.kernels.codecs.cuda_latent_traits import HEADS, LATENTS, RANK, ROPE, Latent
from nibble.kernels.nvrtc import FLOAT, INT, LONG, POINTER, Kernel, cubin, trouble
from nibble.kernels.types import AttentionBatch, Paged

ARCH = "90a"
PAGES = (16, 32, 64, 128)
MAX_BATCH = 1024
ALIGNED = 16


def compiled(latent: Latent) -> bytes:
    """The kernel's machine code, made once."""
    return cubin(Path(__file__).with_name(latent.source), ARCH, dict(latent.macros))


@cache
def _kernel(latent: Latent, device: int) -> Kernel:
    return Kernel(compiled(latent), "mla", latent.shared_bytes(MAX_BATCH))


@cache
def _blocks(device: torch.device) -> int:
    """One a multiprocessor; none where the kernel does not run."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.get_device_properties(device)
    usable = (found.major, found.minor) == (9, 0) and trouble() is None
    return int(found.multi_processor_count) if usable else 0


def serves(q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch) -> bool:
    """Whether the kernel is for this call. Its rows must be of 16 aligned bytes."""
    return (
        latents.format.name in LATENTS
        and (latents.dim - rope, rope, latents.heads) == (RANK, ROPE, 1)
        and q_THD.dtype == torch.bfloat16
        and q_THD.shape[1] <= HEADS
        and max(batch.query_lens, default=0) == 1
        and len(batch.seq_lens_B) <= MAX_BATCH
        and latents.page_size in PAGES
        and all(map(_aligned, latents.planes_PHS))
        and (not LATENTS[latents.format.name].in_runs or in_runs(latents.planes_PHS))
        and _blocks(q_THD.device) > 0
    )


def _aligned(plane_PHS: Tensor) -> bool:
    steps = (plane_PHS.storage_offset(), plane_PHS.stride(0), plane_PHS.stride(2))
    return plane_PHS.stride(3) == 1 and all(x * plane_PHS.itemsize % ALIGNED == 0 for x in steps)


def _readable(q_THD: Tensor) -> bool:
    """Whether a head's query can be loaded by 16 aligned bytes."""
    steps = (q_THD.data_ptr(), *(q_THD.stride(i) * q_THD.itemsize for i in (0, 1)))
    return q_THD.stride(2) == 1 and all(x % ALIGNED == 0 for x in steps)


def in_runs(planes_PHS: tuple[Tensor, ...]) -> bool:
    """Whether slots of a page lie one after the other: in each plane, or as records of all planes in their order."""
    rows = [plane.shape[3] * plane.itemsize for plane in planes_PHS]
    slots = [plane.stride(2) * plane.itemsize for plane in planes_PHS]
    starts = [plane.data_ptr() - planes_PHS[0].data_ptr() for plane in planes_PHS]
    pages = {plane.stride(0) * plane.itemsize for plane in planes_PHS}
    records = (
        slots == [sum(rows)] * len(rows) and starts == [*accumulate(rows, initial=0)][:-1] and len(pages) == 1
    )
    return slots == rows or records


def attend(q_THD: Tensor, latents: Paged, batch: AttentionBatch, scale: float) -> Tensor:
    """See kernels/mla/__init__.py."""
    from nibble.kernels.attention.triton_kernel import combine_kernel

    (tokens, heads, _), count = q_THD.shape, len(batch.seq_lens_B)
    latent, blocks = LATENTS[latents.format.name], _blocks(q_THD.device)
    q_THD = q_THD if _readable(q_THD) else q_THD.clone(memory_format=torch.contiguous_format)
    out = q_THD.new_empty(tokens, heads, RANK)
    pieces = (blocks + count) * HEADS
    parts = q_THD.new_empty(pieces, RANK, dtype=torch.float32)
    lse = q_THD.new_empty(pieces, dtype=torch.float32)
    plan = q_THD.new_empty(count, 2, dtype=torch.int32)
    planes = latents.planes_PHS
    pointers = (
        q_THD, out, parts, lse, plan, *planes, latents.scale, batch.seq_lens_B, batch.cu_seqlens_q_B1,
        batch.page_table_BN,
    )  # fmt: skip
    values = (
        *(tensor.data_ptr() for tensor in pointers),
        *(plane.stride(0) * plane.itemsize for plane in planes),
        *(plane.stride(2) * plane.itemsize for plane in planes),
        scale,
        count,
        batch.page_table_BN.stride(0),
        latents.page_size.bit_length() - 1,
        heads,
        q_THD.stride(0),
        q_THD.stride(1),
    )
    kernel = _kernel(latent, q_THD.device.index or 0)
    kernel.launch(blocks, latent.threads, latent.shared_bytes(count), _TYPES, values)
    combine_kernel[(1, heads, count)](
        out, parts, lse, plan, batch.cu_seqlens_q_B1, 1, heads, RANK, RANK, HEADS, _at_once(blocks, count)
    )
    return out


_TYPES = (*[POINTER] * 12, *[LONG] * 3, *[INT] * 3, FLOAT, *[INT] * 6)


def _at_once(blocks: int, batch: int) -> int:
    """Pieces of a row that are joined at a time."""
    return 4 if blocks <= 3 * batch else 16
