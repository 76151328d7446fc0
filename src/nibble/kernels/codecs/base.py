"""What a codec provides for its format: encoders and decoders for Triton, and traits for CUDA C++.

An encoder is a `@triton.jit` function (x_RD, scale_R1) -> one [R, W] tile per plane, in the plane's order: x_RD in
float32, scale_R1 the format's global scale of each row. Bytes are returned as integers.

A decoder is a `@triton.jit` function (items, scale, DTYPE) -> a tuple of `parts` tiles of the items' shape. A packed
format is read in items of 16 bits, each of which holds `parts` values of a row: 4 of E2M1, 2 of FP8. Part j has the
values j, j + parts, j + 2 * parts... of the row. A sum over a row is a sum over its parts, so attention permutes the
query once instead of interleaving every tile. Two neighbouring items stand in one register wherever the tile came
from, and PTX decodes both at once (small_floats.py).

Block scales are decoded apart, by a function (codes, DTYPE), before they are spread over the items that share them.
What is common to a whole stream stays off the element path: the global scale, and a power of two (`fold`) by which
decoded values are too small. Nothing needs FP8 instructions, which GPUs before SM89 lack.

Shape suffixes: R rows, D values of a row, B blocks of a row, W values of a plane's row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction


@triton.jit
def no_scale(codes, DTYPE: tl.constexpr):
    """Stand for the block scales of a format that has none."""
    return codes


@dataclass(frozen=True, slots=True)
class Decoder:
    """How stored items become values."""

    decode: JITFunction
    """(items, scale, DTYPE) -> `parts` tiles. Items are int16, or the plane's own values where parts is 1."""
    scale: JITFunction = no_scale
    """(codes, DTYPE) -> block scales for `decode`, which gets them in the items' shape."""
    parts: int = 1
    block: int = 0
    """Values that share a block scale, 0 for none."""
    fold: float = 1.0
    """What decoded values must still be multiplied by."""
    half: torch.dtype | None = None
    """The dtype that decodes with the least work, if any, and holds every value exactly."""

    def serves(self, dim: int) -> bool:
        """Return whether rows of `dim` values are whole items and blocks."""
        return dim % self.parts == 0 and dim % max(self.block, 1) == 0


@dataclass(frozen=True, slots=True)
class LatentDecoder:
    """How latents become values: the latent proper, and its rotary values."""

    decoder: Decoder
    """Of the latent proper."""
    rope_apart: bool = False
    """Whether rotary values are a plain plane of their own, the last; else they are stored as the latent is."""


@dataclass(frozen=True, slots=True)
class IndexDecoder:
    """How index keys become values. A key's own scale is positive, so it multiplies the key's score instead."""

    decoder: Decoder
    scaled: bool = False
    """Whether the last plane is a float32 scale of each key."""
    bytes: bool = False
    """Whether a key is 8-bit floats that indexer/gluon_sm90.py can convert."""


Encoders = Mapping[str, JITFunction]
"""The encoders of a format by their names in formats; one that has no name goes by the empty text."""


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """How values of one row (a latent, an index key) become stored bytes."""

    encoders: Encoders
    block: int = 1
    """Values that share a scale; 0 where a whole row does."""
    rope_apart: bool = False
    """Whether rotary values are a plain plane of their own, the last."""


@dataclass(frozen=True, slots=True)
class CudaFormat:
    """How attention/decode.cu names a format, and the sizes that its launch needs."""

    name: str
    bits: int
    """Of a value."""
    block: int = 0
    """Values that share a block scale of one byte, 0 for none."""

    def token_bytes(self, dim: int) -> int:
        """Return the bytes of a token's head."""
        return dim * self.bits // 8 + (dim // self.block if self.block else 0)


RANK, ROPE, HEADS, TILE = 512, 64, 16, 64
"""Of the MLA kernels in CUDA C++: values and rotary values of a latent, query heads, and latents of a tile."""
LENGTH_BYTES = 4
"""Bytes of shared memory for each request, and one more."""


@dataclass(frozen=True, slots=True)
class CudaLatent:
    """Which MLA kernel in CUDA C++ reads a format, and how it is compiled and launched."""

    source: str
    """A file in kernels/mla/."""
    macros: tuple[tuple[str, int], ...]
    threads: int
    """Of a block."""
    shared: int
    """Bytes of its dynamic shared memory, but for what a batch takes."""
    in_runs: bool = False
    """Whether it fetches tokens in runs."""

    def shared_bytes(self, batch: int) -> int:
        """Return the bytes of dynamic shared memory of a block, for so many requests."""
        return self.shared + LENGTH_BYTES * (batch + 1)


@dataclass(frozen=True, slots=True)
class Codec:
    """What kernels know of one format; None where they do not serve it."""

    encoders: Encoders | None = None
    """Write heads."""
    decoder: Decoder | None = None
    """Reads heads."""
    row: RowEncoder | None = None
    """Writes latents and index keys."""
    latent: LatentDecoder | None = None
    """Reads latents."""
    index: IndexDecoder | None = None
    """Reads index keys."""
    cuda: CudaFormat | None = None
    """Reads heads in CUDA C++."""
    cuda_latent: CudaLatent | None = None
    """Reads latents in CUDA C++."""
