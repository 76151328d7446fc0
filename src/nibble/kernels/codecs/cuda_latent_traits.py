"""Which kernel reads a format of latents, how it is compiled, and what room it takes. How bytes are read, it says."""

from __future__ import annotations

from dataclasses import dataclass

RANK, ROPE, HEADS, TILE = 512, 64, 16, 64
BATCH = 4
"""Bytes of shared memory for each request, and one more."""


@dataclass(frozen=True, slots=True)
class Latent:
    """source: a file beside this one. macros: what it is compiled with. threads: of a block. shared: bytes of its
    dynamic shared memory, but for what a batch takes. in_runs: whether it fetches tokens in runs.
    """

    source: str
    macros: tuple[tuple[str, int], ...]
    threads: int
    shared: int
    in_runs: bool = False

    def shared_bytes(self, batch: int) -> int:
        """Dynamic shared memory of a block."""
        return self.shared + BATCH * (batch + 1)


def _fp8(teams: int, pitch: int) -> Latent:
    """Each team's tiles, which are two of values and one of rotary values; then queries and weights of tiles, or sums
    on their way from team to team. pitch: bytes of a token's values and block scales."""
    tiles = TILE * (2 * pitch + 2 * ROPE)
    meeting = max(2 * HEADS * (RANK + ROPE) + teams * 2 * (2 * TILE * HEADS), 4 * HEADS * RANK)
    return Latent("mla.cu", (("WARPGROUPS", teams),), 128 * teams, teams * tiles + meeting)


def _fp4(teams: int, depth: int) -> Latent:
    """Of each team a tile as it is stored and as float16, weights and maxima; queries, maxima of late, and sums."""
    tiles = teams * TILE * (2 * RANK + 2 * HEADS + RANK // 2 + RANK // 16 + 2 * ROPE)
    maxima = teams * (4 + 2) * 4 * HEADS
    rest = 2 * 2 * HEADS * (RANK + ROPE) + 4 * 4 * HEADS + 8 * (13 * teams + 2) + 4 * 4 * (teams + 2)
    return Latent(
        "mla_fp4.cu",
        (("WARPGROUPS", teams), ("DEPTH", depth)),
        128 * (teams + 2),
        tiles + maxima + rest,
        in_runs=True,
    )


LATENTS = {"nvfp4_ds_mla": _fp4(teams=2, depth=2), "fp8_ds_mla": _fp8(teams=2, pitch=544)}
"""Planes of values, block scales and BF16 rotary values."""
