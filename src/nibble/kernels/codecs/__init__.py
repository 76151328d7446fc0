"""Codecs: how kernels read and write the cache formats, one file a family of formats.

EXTENSION POINT: a file here with a dictionary CODECS, from names of formats to a Codec (base.py), which is added to the
list below. From outside, an entry of the registries does the same. The bytes and values are those of the format's
`encode` and `decode` in nibble/formats, which are the definition; no kernel knows a format's name.
"""

from __future__ import annotations

from triton.runtime import JITFunction

from nibble.kernels.codecs import ds_mla, fp8, mx, nvfp4, plain
from nibble.kernels.codecs.base import (
    Codec,
    CudaFormat,
    CudaLatent,
    Decoder,
    IndexDecoder,
    LatentDecoder,
    RowEncoder,
)

CODECS: dict[str, Codec] = {
    name: codec for family in (plain, fp8, nvfp4, mx, ds_mla) for name, codec in family.CODECS.items()
}
"""What kernels know of each format."""

ENCODERS: dict[str, JITFunction] = {n: c.encode for n, c in CODECS.items() if c.encode is not None}
"""How heads are written: gives a format its fused append."""
ROW_ENCODERS: dict[str, RowEncoder] = {n: c.row for n, c in CODECS.items() if c.row is not None}
"""How latents and index keys are written, a row by itself: gives a format their fused append and recoding copies."""
DECODERS: dict[str, Decoder] = {n: c.decoder for n, c in CODECS.items() if c.decoder is not None}
"""How heads are read: gives a format its fused attention and dequantize_pages."""
LATENTS: dict[str, LatentDecoder] = {n: c.latent for n, c in CODECS.items() if c.latent is not None}
"""How latents of multi-head latent attention are read."""
INDEX_KEYS: dict[str, IndexDecoder] = {n: c.index for n, c in CODECS.items() if c.index is not None}
"""How keys of the indexer of sparse attention are read: gives a format its fused scoring."""
CUDA_FORMATS: dict[str, CudaFormat] = {n: c.cuda for n, c in CODECS.items() if c.cuda is not None}
"""How the decode kernel in CUDA C++ (attention/decode.cu) reads heads."""
CUDA_LATENTS: dict[str, CudaLatent] = {n: c.cuda_latent for n, c in CODECS.items() if c.cuda_latent}
"""Which kernel in CUDA C++ (mla/*.cu) reads latents."""
