"""What the engine answers: completions, and the pieces of one that is still being written.

Owns Logprob, Completion, Output and Delta, all frozen. Must not know of torch, models or caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from nibble.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One generated token. top: the likeliest tokens with their log-probabilities, best first.

    Log-probabilities are of the model itself: before penalties, bias and temperature.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. error: why it ended early by no fault of the request, else None."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[Logprob, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """All answers to one prompt. cached_tokens: prompt tokens of the first answer that came from the prefix cache."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The first answer."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to answer `index`; `finish_reason` comes with its last piece. error: why that came before its
    time; status: what a server says of it in HTTP, 400 where the request is to blame."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[Logprob, ...] = ()
    error: str | None = None
    status: int = 500
