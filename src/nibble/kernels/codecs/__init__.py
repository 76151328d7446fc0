"""Codecs: how kernels read and write the cache formats, one file a family of formats.

EXTENSION POINT: a file here with a dictionary CODECS, from names of formats to a Codec (base.py), which is added to the
list below. From outside, an entry of the registries does the same. The bytes and values are those of the format's
`encode` and `decode` in nibble/formats, which are the definition; no kernel knows a format's name.
"""

from __future__ import annotations

from nibble.kernels.codecs import ds_mla, fp8, mx, nvfp4, plain
from nibble.kernels.codecs.base import Codec

CODECS: dict[str, Codec] = {
    name: codec for family in (plain, fp8, nvfp4, mx, ds_mla) for name, codec in family.CODECS.items()
}
"""What kernels know of each format."""

ENCODERS = {n: c.encoders for n, c in CODECS.items() if c.encoders is not None}
"""How heads are written, by encoder: gives a format its fused append."""
ROW_ENCODERS = {n: c.row for n, c in CODECS.items() if c.row is not None}
"""How latents and index keys are written, a row by itself: gives a format their fused append and recoding copies."""
DECODERS = {n: c.decoder for n, c in CODECS.items() if c.decoder is not None}
"""How heads are read: gives a format its fused attention and dequantize_pages."""
LATENTS = {n: c.latent for n, c in CODECS.items() if c.latent is not None}
"""How latents of multi-head latent attention are read."""
INDEX_KEYS = {n: c.index for n, c in CODECS.items() if c.index is not None}
"""How keys of the indexer of sparse attention are read: gives a format its fused scoring."""
CUDA_FORMATS = {n: c.cuda for n, c in CODECS.items() if c.cuda is not None}
"""How the decode kernel in CUDA C++ (attention/decode.cu) reads heads."""
CUDA_LATENTS = {n: c.cuda_latent for n, c in CODECS.items() if c.cuda_latent}
"""Which kernel in CUDA C++ (mla/*.cu) reads latents."""
