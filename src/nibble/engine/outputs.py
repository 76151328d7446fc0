"""What the engine answers: completions, the pieces of a growing one, and the stream that makes them from tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nibble.engine.request import FinishReason, Request

if TYPE_CHECKING:
    from nibble.engine.tokenizer import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class Logprob:
    """One generated token. Log-probabilities are the model's own: before penalties, bias and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[Logprob, ...] | None = None
    error: str | None = None
    """Why it ended early by no fault of the request, else None."""


@dataclass(frozen=True, slots=True)
class Output:
    """All answers to one prompt."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    cached_tokens: int = 0
    """Prompt tokens of the first answer that came from the prefix cache."""

    @property
    def text(self) -> str:
        """Return the text of the first answer."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to answer `index`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Comes with the last piece of an answer."""
    logprobs: tuple[Logprob, ...] = ()
    error: str | None = None
    """Why the answer ended before its time."""
    status: int = 500
    """The HTTP status of `error`: 400 where the request is to blame."""


OnOutput = Callable[[Delta], None]
"""Takes the pieces of an answer, in order, from the thread that runs the engine."""


@dataclass(slots=True)
class OutputStream:
    """An answer that is being generated: from sampled tokens to the pieces that a caller gets."""

    request: Request
    index: int
    on_output: OnOutput
    detokenizer: Detokenizer | None
    stop_strings: StopStrings
    final_only: bool
    """Hand out the answer as one piece at its end. Detokenizing token by token takes the host longer than all the
    rest of a step."""
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[Logprob] = field(default_factory=list)

    def append(self, token: Logprob, is_last: bool) -> Delta | None:
        """Return what a token adds to the answer, None where there is nothing to hand out yet.

        A stop token adds nothing. A stop string in the text sets the finish reason.

        Args:
            token: the sampled token.
            is_last: whether the request has ended with it.
        """
        if not (is_last and self.request.finish_reason == "stop"):
            self._ids.append(token.token)
            if self.request.params.logprobs is not None:
                self._logprobs.append(token)
        if self.final_only and not is_last:
            return None
        return self._piece(self.request.finish_reason if is_last else None)

    def end(self, reason: FinishReason, error: str | None = None, status: int = 500) -> Delta:
        """Return the last piece of an answer that ends before its time.

        Args:
            reason: why it ends.
            error: the message, where it failed.
            status: the HTTP status of the error.
        """
        return self._piece(reason, error, status)

    def _piece(self, reason: FinishReason | None, error: str | None = None, status: int = 500) -> Delta:
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        self._ids.clear()
        self._logprobs.clear()
        # Bytes of an unfinished character are held back until the answer ends.
        new_text = self._detokenize(ids, is_last=reason in {"stop", "length"} or self.final_only)
        text, is_stopped = self.stop_strings.add(new_text)
        if is_stopped:
            reason = "stop"
        elif reason in {"stop", "length"}:
            # Text that could have begun a stop string was held back, and is part of the answer after all.
            text += self.stop_strings.finish()
        return Delta(self.index, text, ids, reason, logprobs, error, status)

    def _detokenize(self, ids: tuple[int, ...], is_last: bool) -> str:
        if self.detokenizer is None:
            return ""
        text = self.detokenizer.add(ids)
        return text + self.detokenizer.finish() if is_last else text
