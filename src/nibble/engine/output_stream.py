"""Answers that are being written: from sampled tokens to the pieces that a caller gets.

Owns Answer: its text, stop strings and log-probabilities. Must not know of batches or of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nibble.engine.outputs import Delta, Logprob
from nibble.engine.request import FinishReason, Request
from nibble.engine.tokenizer import Detokenizer, StopStrings

OnOutput = Callable[[Delta], None]
"""Takes the pieces of an answer, in order, from the thread that runs the engine."""


@dataclass(slots=True)
class OutputStream:
    """whole: hand it out as one piece at its end, since nobody looks before; turning tokens into text one by one
    takes the host longer than all the rest of a step."""

    request: Request
    index: int
    on_output: OnOutput
    detokenizer: Detokenizer | None
    stops: StopStrings
    whole: bool
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[Logprob] = field(default_factory=list)

    def append(self, pick: Logprob, ended: bool) -> Delta | None:
        """What a token adds, which ended the request or did not. A stop token adds nothing; a stop string in the text
        is a reason to finish.
        """
        if not (ended and self.request.finish_reason == "stop"):
            self._ids.append(pick.token)
            if self.request.params.logprobs is not None:
                self._logprobs.append(pick)
        if self.whole and not ended:
            return None
        return self._piece(self.request.finish_reason if ended else None)

    def end(self, reason: FinishReason, error: str | None = None, status: int = 500) -> Delta:
        """The last piece of an answer that ends before its time."""
        return self._piece(reason, error, status)

    def _piece(self, reason: FinishReason | None, error: str | None = None, status: int = 500) -> Delta:
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        self._ids.clear()
        self._logprobs.clear()
        text, stopped = self.stops.add(self._text(ids, ended=reason in {"stop", "length"} or self.whole))
        if stopped:
            reason = "stop"
        elif reason in {"stop", "length"}:
            text += self.stops.finish()
        return Delta(self.index, text, ids, reason, logprobs, error, status)

    def _text(self, ids: tuple[int, ...], ended: bool) -> str:
        if self.detokenizer is None:
            return ""
        text = self.detokenizer.add(ids)
        return text + self.detokenizer.finish() if ended else text
