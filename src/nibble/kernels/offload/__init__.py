"""offload: what a host tier below the device's memory is made of.

copy_tokens moves stored tokens of one stream between stores, one of which may lie in the host's memory
(host_memory.py), in another format if need be.

With a host tier a page of tokens may be off the device. A request that decodes then has a hot buffer: slots that hold
single tokens, of which the least recently used is given up first. lookup_hot finds a selected token

    in its page, if that is on the device;  else in a hot slot that holds it;  else in one that it is to be copied into.

Shape suffixes: T query tokens, each of another request, K tokens that each looks at, N pages of a request, P pages in
all, M tokens to copy.
"""

from __future__ import annotations

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.offload import naive
from nibble.kernels.offload.naive import HotBuffer, HotLookup, alike
from nibble.kernels.types import Paged

__all__ = ["HotBuffer", "HotLookup", "alike", "copy_tokens", "lookup_hot", "resident_slots"]


def copy_tokens(
    source: Paged,
    from_M: Tensor,
    target: Paged,
    to_M: Tensor,
    count: Tensor | None = None,
    *,
    programs: int | None = None,
) -> None:
    """Copy tokens from one store to another, and encode them anew where formats differ.

    On a GPU slots lie there, and a store that does not is reachable from it. The first copy between two stores may wait
    for the device, no other does: after it a CUDA graph may hold one.

    Args:
        source: Pages that are read.
        from_M: Slots that are read, page * page_size + offset, int64 or int32; nothing is copied where negative.
        target: Pages that are written.
        to_M: Slots that are written, likewise. They differ from each other, and from those that are read if both
            stores are one.
        count: Int32 [1] on the device, how many entries count; None for all.
        programs: How many blocks of the GPU it may take at a time; None for as many as are of use.
    """
    if from_M.is_cuda and triton_present():
        from nibble.kernels.offload import triton as fast

        if fast.plan_of(source, target, from_M.device):
            fast.copy_tokens(source, from_M, target, to_M, count, programs=programs)
            return
    naive.copy_tokens(source, from_M, target, to_M, count)


def lookup_hot(topk_indices_TK: Tensor, rows_T: Tensor, page_table_TN: Tensor, hot: HotBuffer) -> HotLookup:
    """Find slots for the selected tokens, and change `hot` to what it will hold.

    Args:
        topk_indices_TK: Int32 positions, ascending, PAD_INDEX at the end; no more than a buffer's slots of one request
            are off the device.
        rows_T: Int64 rows of `hot`, each once.
        page_table_TN: Int32 pages of each request.
        hot: The hot buffers.

    Returns:
        The slots, and the copies that must be made.
    """
    if topk_indices_TK.is_cuda and triton_present():
        from nibble.kernels.offload import triton as fast

        return fast.lookup_hot(topk_indices_TK, rows_T, page_table_TN, hot)
    return naive.lookup_hot(topk_indices_TK, rows_T, page_table_TN, hot)


def resident_slots(
    topk_indices_TK: Tensor, page_table_TN: Tensor, frames_P: Tensor | None, page_size: int
) -> Tensor:
    """Return the slots of tokens in their pages.

    Args:
        topk_indices_TK: Int32 positions, PAD_INDEX where no token is selected.
        page_table_TN: Int32 pages of each request.
        frames_P: Int32, the frame of each page, PAD_INDEX where it has none; None where pages lie in the frames of
            their own numbers.
        page_size: Tokens of a page.

    Returns:
        Int32 [T, K]; PAD_INDEX where no token is selected, or its page has no frame.
    """
    if topk_indices_TK.is_cuda and triton_present():
        from nibble.kernels.offload import triton as fast

        return fast.resident_slots(topk_indices_TK, page_table_TN, frames_P, page_size)
    return naive.resident_slots(topk_indices_TK, page_table_TN, frames_P, page_size)
