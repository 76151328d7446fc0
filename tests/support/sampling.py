"""Tokens of given logits, and the sampler's random numbers by their definition."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nibble.engine.request import Logprob, Request
from nibble.engine.sampler import Sampler

MASK = (1 << 64) - 1


def sample(sampler: Sampler, logits_SV: Tensor, requests: Sequence[Request]) -> list[Logprob | None]:
    """One token per row; None where the logits are not numbers."""
    return sampler.launch(logits_SV, requests, [request.num_output_tokens for request in requests]).read()


def uniform(seed: int, position: int) -> float:
    """SplitMix64 (Steele et al. 2014) over their mix: a number in [0, 1)."""
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & MASK
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)
