"""The sampler's random numbers by their definition: SplitMix64 (Steele et al. 2014), over the mix of seed and position."""

from __future__ import annotations

MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & MASK
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)
