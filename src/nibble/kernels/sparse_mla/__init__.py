"""sparse_mla: queries over selected latents of multi-head latent attention, with its projections absorbed.

Every query token has its own list of slots, and reads no others: those that the lightning indexer of DeepSeek V3.2
selects.

Shape suffixes: T query tokens, H query heads, K slots of a list, D values of a latent, R of them that are values.
"""

from __future__ import annotations

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.sparse_mla import naive
from nibble.kernels.types import Paged


def sparse_mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, topk_slots_TK: Tensor, scale: float
) -> Tensor:
    """Return softmax(scale * q . latent) @ latent[:R] over each query's slots.

    Args:
        q_THD: Queries with the projections of keys absorbed.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        topk_slots_TK: Int32, page * page_size + offset; a negative slot is padding, wherever it stands.
        scale: What scores are multiplied by.

    Returns:
        [T, H, R] in the query's dtype; zeros where all slots are padding.
    """
    if q_THD.is_cuda and triton_present():
        from nibble.kernels.codecs import tiles
        from nibble.kernels.sparse_mla import triton as fast

        if tiles.serves_latents(latents, rope):
            return fast.sparse_mla_attention(q_THD, latents, rope, topk_slots_TK, scale)
    return naive.sparse_mla_attention(q_THD, latents, rope, topk_slots_TK, scale)
