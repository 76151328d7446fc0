"""Agreement with the yardstick: is the likeliest next token the same, how far apart are the distributions?

The KL divergence is that of the scheme from the yardstick, KL(yardstick || scheme), in nats. To bound memory,
the yardstick's KEEP likeliest tokens are remembered one by one, and all others as one event; so for a larger
vocabulary the value is a (close) lower bound of the full sum.

Shape suffixes: S scored positions, V vocabulary, K remembered tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

KEEP = 512
_TINY = 1e-7  # float32 sums of probabilities are no finer


@dataclass(frozen=True, slots=True)
class Prediction:
    """The yardstick's distributions at a window's scored positions: tokens and log [S, K], rest [S]."""

    tokens: Tensor
    log: Tensor
    rest: Tensor | None

    @classmethod
    def of(cls, rows_SV: Tensor) -> Prediction:
        """What to remember of logits."""
        log_SV = rows_SV.float().log_softmax(-1)
        log_SK, tokens_SK = log_SV.topk(min(KEEP, log_SV.shape[-1]))
        # A vocabulary of at most KEEP tokens is remembered in full, and has no rest.
        rest = _rest(log_SK) if log_SV.shape[-1] > KEEP else None
        # int32, because the predictions of all windows are kept until the last scheme is measured.
        return cls(tokens_SK.int(), log_SK.clone(), rest)

    def kl(self, rows_SV: Tensor) -> Tensor:
        """KL(yardstick || rows) [S] at each position."""
        # Normalised over the full vocabulary before the yardstick's tokens are taken.
        log_SK = rows_SV.float().log_softmax(-1).gather(-1, self.tokens.long())
        kl_S = (self.log.exp() * (self.log - log_SK)).sum(-1)
        if self.rest is not None:
            kl_S += self.rest.exp() * (self.rest - _rest(log_SK))
        # Rounding leaves tiny negative values where the two are the same.
        return kl_S.clamp_min(0.0)

    def same(self, rows_SV: Tensor) -> Tensor:
        """Whether [S] the likeliest token is the same."""
        return rows_SV.argmax(-1) == self.tokens[:, 0]


def _rest(log_SK: Tensor) -> Tensor:
    """Log-probability of everything but the remembered tokens."""
    return (1.0 - log_SK.exp().sum(-1)).clamp_min(_TINY).log()


@dataclass(slots=True)
class Agreement:
    """Gathers comparisons, window by window."""

    hits: int = 0
    nats: float = 0.0
    count: int = 0
    worst: list[Tensor] = field(default_factory=list)

    def add(self, rows_SV: Tensor, reference: Prediction) -> None:
        """Add the predictions rows_SV [S, V] of one window, compared with the reference's."""
        kl_S = reference.kl(rows_SV)
        self.hits += int(reference.same(rows_SV).sum())
        self.nats += float(kl_S.double().sum())
        self.count += len(kl_S)
        self.worst.append(kl_S)

    @property
    def top1(self) -> float:
        """Share of positions with the same likeliest token."""
        return self.hits / self.count

    @property
    def kl(self) -> float:
        """Mean KL divergence in nats."""
        return self.nats / self.count

    @property
    def kl_p99(self) -> float:
        """The KL divergence that one position in a hundred exceeds: damage is rarely spread evenly."""
        return float(torch.cat(self.worst).quantile(0.99))
