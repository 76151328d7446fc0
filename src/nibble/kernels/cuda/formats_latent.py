"""What mla.cu calls a format of latents, and the room that it takes. How bytes are read, mla.cu says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latent:
    """name: the kernel's. pitch: bytes of a token's values and block scales in shared memory. teams: of a block. Four
    would fit for 4 bits, and were measured to be slower.
    """

    name: str
    pitch: int
    teams: int


LATENTS = {"nvfp4_ds_mla": Latent("NVFP4", 288, 3), "fp8_ds_mla": Latent("E4M3", 544, 2)}
"""Planes of values, block scales and BF16 rotary values."""
