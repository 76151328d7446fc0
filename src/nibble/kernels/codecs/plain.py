"""Codec of plain values: FP32, BF16 and FP16 as they are."""

from __future__ import annotations

import triton
import triton.language as tl

from nibble.kernels.codecs.base import Codec, CudaFormat, Decoder, IndexDecoder, LatentDecoder, RowEncoder


@triton.jit
def encode(x_RD, scale_R1):
    """Return values as they are; storing them rounds them to the plane's dtype."""
    return (x_RD,)


@triton.jit
def decode(items, scale, DTYPE: tl.constexpr):
    """Return values in DTYPE."""
    return (items.to(DTYPE),)


DECODER = Decoder(decode)


def _codec(cuda: CudaFormat | None = None) -> Codec:
    encoders = {"": encode}
    return Codec(encoders, DECODER, RowEncoder(encoders), LatentDecoder(DECODER), IndexDecoder(DECODER), cuda)


CODECS = {
    "fp32": _codec(),
    "bf16": _codec(CudaFormat("BF16", 16)),
    "fp16": _codec(CudaFormat("FP16", 16)),
}
