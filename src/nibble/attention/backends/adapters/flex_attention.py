"""Call torch's FlexAttention over gathered pages. On a GPU compiled, on a CPU as torch interprets it.

Windows are blocks of keys that are left out, and a mask within those that are not; caps are an expression; a sink
scales the result by what the sum of the softmax becomes with it. Which blocks of keys a block of queries sees is worked
out from lengths, once for all layers of a step: no mask of queries by keys is ever made on a GPU. Quantised pages are
staged (attention/layer.py).

Shape suffixes: T tokens, B requests, n new tokens of each (padded), L stored tokens (padded), Q blocks of queries,
K blocks of keys, S slots of B * n, H query heads, G KV heads, D values of a head.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.attention.layer import AttentionBackend
from nibble.attention.planner.support import MAX_STAGED_TOKENS
from nibble.cache.pool import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams

if TYPE_CHECKING:  # torch's compiler takes a second to import
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of a block of the mask. Stored tokens are padded to whole blocks, so that there are few shapes."""
PACKED = BLOCK // 2
"""Most query rows of a KV head that are left to torch's kernel for decoding, which has all of them in one block of the
next power of two. That must divide BLOCK: with more torch finds no kernel at all (torch 2.11: NoValidChoicesError)."""
VARIANTS = 64
"""Kernels that may be compiled: for a model one for each phase, head, window and cap, with some room."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests that are computed together."""

    rows: slice
    page_table_BN: Tensor
    lens_B: Tensor
    counts: tuple[int, ...]
    most: int
    length: int
    row_T: Tensor | None
    """Rows of the part's tokens in [B * n]; None where those are all."""
    mask: BlockMask


class Flex(AttentionBackend):
    """The adapter. Its state: how a batch is cut, and what the requests of each part see."""

    def __init__(self) -> None:
        import torch._dynamo as dynamo

        # Beyond the limit the compiler would go on without compiling, and say nothing.
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, VARIANTS)

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Hashable:
        """Return the window."""
        return params.window

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> tuple[_Part, ...]:
        """Cut the batch and build the masks of its parts."""
        return tuple(_parts(batch, view.page_size, params.window))

    def forward(
        self,
        q_THD: Tensor,
        view: KVView,
        batch: AttentionBatch,
        params: AttentionParams,
        state: tuple[_Part, ...],
    ) -> Tensor:
        """Attend part by part."""
        outputs = [_attend(q_THD[part.rows], view, part, params) for part in state]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _parts(batch: AttentionBatch, page: int, window: int | None) -> Iterator[_Part]:
    """Yield neighbours that fit into MAX_STAGED_TOKENS padded stored tokens, and prompts of more than a block alone."""
    row, first = 0, 0
    step = max(1, MAX_STAGED_TOKENS // _round_up(max(batch.seq_lens)))
    alone = [i if count > BLOCK else -1 - i // step for i, count in enumerate(batch.query_lens)]
    for _, group in groupby(alone):
        last = first + len(tuple(group))
        counts, lens = batch.query_lens[first:last], batch.seq_lens[first:last]
        yield _part(batch, slice(row, row + sum(counts)), slice(first, last), counts, lens, page, window)
        row, first = row + sum(counts), last


def _part(
    batch: AttentionBatch,
    rows: slice,
    requests: slice,
    counts: tuple[int, ...],
    lens: tuple[int, ...],
    page: int,
    window: int | None,
) -> _Part:
    most, length = max(counts), _round_up(max(lens))
    device = batch.page_table_BN.device
    row_T = None
    if min(counts) < most:
        row_T = torch.cat([torch.arange(i * most, i * most + count) for i, count in enumerate(counts)]).to(
            device
        )
    lens_B, counts_B = (torch.tensor(values, device=device) for values in (lens, counts))
    return _Part(
        rows,
        batch.page_table_BN[requests, : -(-max(lens) // page)],
        lens_B,
        counts,
        most,
        length,
        row_T,
        _block_mask(lens_B, lens_B - counts_B, most, length, window),
    )


def _round_up(length: int) -> int:
    """Return a multiple of BLOCK."""
    return -(-length // BLOCK) * BLOCK


def _block_mask(lens_B: Tensor, before_B: Tensor, most: int, length: int, window: int | None) -> BlockMask:
    """Return which blocks of keys each block of queries sees, and the mask within those.

    Args:
        lens_B: stored tokens of each request.
        before_B: those of them before the first query, which is token before_B itself.
        most: queries of a request, with padding.
        length: stored tokens of a request, with padding.
        window: tokens that a query sees, if not all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= before_B[b] + q) & (kv < lens_B[b])

    reach = length + most if window is None else window

    def windowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return causal(b, h, q, kv) & (kv > before_B[b] + q - reach)

    device, blocks = lens_B.device, -(-length // BLOCK)
    first_Q = torch.arange(0, most, BLOCK, device=device)
    positions_BQ = before_B[:, None] + first_Q
    last_BQ = torch.minimum(positions_BQ + BLOCK, lens_B[:, None]) - 1
    # A block of padding still needs one block of keys; the mask hides all of it.
    last_BQ = torch.maximum(last_BQ, torch.zeros_like(last_BQ))
    start_BQ = torch.minimum((positions_BQ - reach + 1).clamp(min=0), last_BQ) // BLOCK
    counts_BQ = last_BQ // BLOCK - start_BQ + 1
    order_K = torch.arange(blocks, device=device)
    indices_BQK = (start_BQ[..., None] + order_K).clamp(max=blocks - 1)
    return BlockMask.from_kv_blocks(
        counts_BQ[:, None].int(),
        indices_BQK[:, None].int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=causal if window is None else windowed,
        seq_lengths=(most, length),
        compute_q_blocks=False,  # which gradients are for
    )


def _attend(q_THD: Tensor, view: KVView, part: _Part, params: AttentionParams) -> Tensor:
    k_BGLD, v_BGLD = (_gather(view, name, part, q_THD.dtype) for name in "kv")
    q_BnHD = _pad_queries(q_THD, part)
    output: Any = _kernel(q_THD.is_cuda)(
        q_BnHD.transpose(1, 2),
        k_BGLD,
        v_BGLD,
        score_mod=_score_mod(params.softcap) if params.softcap else None,
        block_mask=part.mask,
        scale=params.scale,
        enable_gqa=True,
        return_lse=params.sinks_H is not None,
        kernel_options=_options(part.most * q_THD.shape[1] // k_BGLD.shape[1]),
    )
    if params.sinks_H is not None:
        out_BHnD, lse_BHn = output
        output = _with_sinks(out_BHnD, lse_BHn, params.sinks_H)
    out_THD = output.transpose(1, 2).flatten(0, 1)
    return out_THD if part.row_T is None else out_THD[part.row_T]


def _options(rows: int) -> dict[str, bool]:
    """Return kernel options for so many query rows of a KV head."""
    # Torch looks at tokens alone, and takes its kernel for decoding where a prompt has less than 128.
    return {"FORCE_USE_FLEX_ATTENTION": True} if rows > PACKED else {}


def _with_sinks(out_BHnD: Tensor, lse_BHn: Tensor, sinks_H: Tensor) -> Tensor:
    """Add the sinks' weights to the softmax's sum."""
    share_BHn = torch.sigmoid(lse_BHn - sinks_H.float()[:, None])
    return (out_BHnD * share_BHn.unsqueeze(-1)).to(out_BHnD.dtype)


def _gather(view: KVView, name: str, part: _Part, dtype: torch.dtype) -> Tensor:
    """Return [B, G, L, D], with zeros behind each request's tokens."""
    values_BLGD = view.streams[name].dequantize(part.page_table_BN, dtype)[:, : part.length]
    values_BLGD = F.pad(values_BLGD, (0, 0, 0, 0, 0, part.length - values_BLGD.shape[1]))
    behind_BL = torch.arange(part.length, device=part.lens_B.device) >= part.lens_B[:, None]
    # A NaN that lies there would reach the result although it is masked.
    return values_BLGD.masked_fill(behind_BL[..., None, None], 0.0).transpose(1, 2)


def _pad_queries(q_THD: Tensor, part: _Part) -> Tensor:
    if part.row_T is None:
        return q_THD.unflatten(0, (len(part.counts), part.most))
    q_SHD = q_THD.new_zeros(len(part.counts) * part.most, *q_THD.shape[1:])
    return q_SHD.index_copy_(0, part.row_T, q_THD).unflatten(0, (-1, part.most))


@cache
def _score_mod(cap: float) -> Callable[..., Tensor]:
    """Return a function of the scores: one for each cap, so that it is compiled once."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


@cache
def _kernel(on_gpu: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    def interpreted(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():  # of being slow: on a CPU it is what can be had without a compiler
            warnings.simplefilter("ignore")
            return flex_attention(*args, **options)

    return torch.compile(flex_attention) if on_gpu else interpreted
