"""Triton twin of kernels/append/__init__.py for a layer's one stream of one head: latents, or index keys, in one launch.

A program takes some tokens. Their rows go through the format's encoder part by part (encoders_latent.py): the kernel
knows spans and planes, and no format. Planes may have any strides, so columns of records are served too.

Shape suffixes: T tokens, H heads, D values of a row, R rows of a tile (a token each).
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.append import Target
from nibble.kernels.codecs.encoders_latent import parts, put, span, writes
from nibble.kernels.sizes import cdiv

FEW = 1024
"""Tokens up to which a program takes one, and a thread few values, so that the work spreads over the GPU."""
MANY_ROWS, WARPS = 4, 2


@triton.jit(do_not_specialize=["tokens"])
def _append(x, slots, spans, tokens, stride, R: tl.constexpr):
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    slot_R = tl.load(slots + token_R, mask=token_R < tokens, other=-1).to(tl.int64)
    row_R = x + token_R.to(tl.int64) * stride
    for i in tl.static_range(len(spans)):
        value = tl.arange(0, spans[i].WIDTH)[None, :]
        keep = (slot_R >= 0)[:, None] & (value < spans[i].COUNT)
        x_RD = tl.load(row_R[:, None] + (spans[i].FIRST + value), mask=keep, other=0.0).to(tl.float32)
        put(spans[i], x_RD, slot_R)


class Append:
    """See kernels/append/__init__.py."""

    is_capturable = True

    def __init__(self, targets: Mapping[str, Target]) -> None:
        ((self._name, target),) = targets.items()
        pages = target.pages
        self._spans = tuple(span(pages, pages.scale, *part) for part in parts(pages))

    def __call__(self, streams: Mapping[str, Tensor], slot_mapping_T: Tensor) -> None:
        x_THD, tokens = streams[self._name], len(slot_mapping_T)
        if x_THD.stride(2) != 1:
            x_THD = x_THD.contiguous()
        rows = 1 if tokens <= FEW else MANY_ROWS
        if tokens:
            _append[cdiv(tokens, rows),](
                x_THD, slot_mapping_T, self._spans, tokens, x_THD.stride(0), rows, num_warps=WARPS
            )


def serves(targets: Mapping[str, Target]) -> bool:
    """Whether the kernel can store this stream."""
    if len(targets) != 1:
        return False
    (target,) = targets.values()
    return not target.transforms and writes(target.pages)
