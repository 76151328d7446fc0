"""Held-out perplexity: how well each next token is foretold, teacher-forced through the quantised cache.

A text is cut into windows of `size` tokens that start `stride` tokens apart. Every token but the text's
first is scored exactly once, in the first window that reaches it: a window after the first scores its last
`stride` tokens, and the tokens before them are context only. A smaller stride gives every scored token more
context, for more time.

Shape suffixes: T tokens of a window, S scored tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Window:
    """ids: its tokens. scored: how many of them, counted from the end, are scored."""

    ids: tuple[int, ...]
    scored: int

    @property
    def targets_S(self) -> Tensor:
        """The tokens that are scored."""
        return torch.tensor(self.ids[-self.scored :])

    def predictions(self, logits_TV: Tensor) -> Tensor:
        """The rows [S, V] of the window's logits that foretell the scored tokens."""
        # Row t foretells token t + 1, so rows lie one before their targets.
        return logits_TV[-self.scored - 1 : -1]


def windows(ids: Sequence[int], size: int, stride: int | None = None) -> tuple[Window, ...]:
    """Return the windows of a text.

    Args:
        ids: the tokens of the text.
        size: tokens of a window.
        stride: tokens between the starts of two windows, below `size`; None: size - 1.
    """
    stride = size - 1 if stride is None else stride
    assert 0 < stride < size, f"stride {stride} of windows of {size} tokens"
    # Nothing foretells the first token of the text, so it counts as done.
    result, done = [], 1
    for start in range(0, len(ids), stride):
        if done >= len(ids):
            break
        end = min(start + size, len(ids))
        result.append(Window(tuple(ids[start:end]), end - done))
        done = end
    return tuple(result)


def losses(logits_TV: Tensor, window: Window) -> Tensor:
    """Negative log-likelihood [S] of the scored tokens, in nats."""
    rows_SV = window.predictions(logits_TV).float()
    return F.cross_entropy(rows_SV, window.targets_S.to(rows_SV.device), reduction="none")


@dataclass(slots=True)
class Perplexity:
    """Gathers losses, window by window."""

    nats: float = 0.0
    count: int = 0

    def add(self, logits_TV: Tensor, window: Window) -> None:
        """Add the losses of one window, logits_TV [T, V]."""
        # float64, because the sum is over many thousands of tokens.
        self.nats += float(losses(logits_TV, window).double().sum())
        self.count += window.scored

    @property
    def value(self) -> float:
        """exp of the mean loss."""
        return math.exp(self.nats / self.count)

    def bits_per_byte(self, bytes_per_text_token: float) -> float:
        """The mean loss in bits per byte of text, which does not depend on the tokenizer."""
        return self.nats / self.count / math.log(2) / bytes_per_text_token
