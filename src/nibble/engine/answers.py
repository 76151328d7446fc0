"""What LLM and AsyncLLM share: parameters and priorities for each prompt, and answers from their pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nibble.config import SamplingParams
from nibble.engine.engine import Engine
from nibble.engine.prompts import ParsedPrompt
from nibble.engine.request import Completion, Delta, Output, Request
from nibble.engine.tokenizer import require_tokenizer
from nibble.errors import RequestError

Encoded = tuple[list[int], str | None]
"""The token ids of a prompt, and its text where it was given."""


def encode(engine: Engine, prompt: ParsedPrompt) -> Encoded:
    """Return a prompt's tokens; raise RequestError where it is text and the checkpoint has no tokenizer."""
    if prompt.token_ids is not None:
        return list(prompt.token_ids), prompt.text
    return require_tokenizer(engine.tokenizer).encode(prompt.text or ""), prompt.text


class Collector:
    """Gathers the pieces of the answers to one prompt."""

    requests: tuple[Request, ...]

    def __init__(self, text: str | None, params: SamplingParams) -> None:
        self.prompt, self.params = text, params
        self.num_open = params.n
        self._pieces: list[list[Delta]] = [[] for _ in range(params.n)]

    def add(self, piece: Delta) -> None:
        """Take a piece."""
        self._pieces[piece.index].append(piece)
        self.num_open -= piece.finish_reason is not None

    def output(self) -> Output:
        """Return the answers, once all have ended."""
        completions = tuple(self._completion(index, pieces) for index, pieces in enumerate(self._pieces))
        cached_tokens = self.requests[0].num_prefix_hit_tokens
        prompt_logprobs = self._pieces[0][0].prompt_logprobs
        # Not what was given: a prompt may be cut on the way.
        prompt_ids = tuple(self.requests[0].prompt_token_ids)
        return Output(self.prompt, prompt_ids, completions, cached_tokens, prompt_logprobs)

    def _completion(self, index: int, pieces: Sequence[Delta]) -> Completion:
        last = pieces[-1]
        logprobs = tuple(entry for piece in pieces for entry in piece.logprobs)
        return Completion(
            index=index,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            finish_reason=last.finish_reason,
            logprobs=logprobs if self.params.logprobs is not None else None,
            error=last.error,
            accepted_drafts=last.accepted_drafts,
            rejected_drafts=last.rejected_drafts,
        )


def sampling_params_of(
    engine: Engine,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    options: Mapping[str, Any],
    count: int,
) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts.

    Args:
        engine: whose model's defaults fill in what options leave out.
        sampling_params: of all prompts, or of each; complete in themselves.
        options: fields of SamplingParams, in place of them.
        count: of prompts.

    Raises:
        RequestError: they are malformed, or not as many as the prompts.
    """
    if sampling_params is not None and options:
        raise RequestError("give either sampling_params or loose sampling options, not both")
    if sampling_params is None:
        return [engine.sampling_defaults.params(**options)] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, Sequence) or not all(
        isinstance(one, SamplingParams) for one in sampling_params
    ):
        raise RequestError(
            f"sampling_params are SamplingParams, or a list of them, not {sampling_params!r:.60}"
        )
    if len(sampling_params) != count:
        raise RequestError(
            f"there are {len(sampling_params)} sampling_params for {count} prompts: give one for all, or one for each"
        )
    return list(sampling_params)


def priorities_of(priority: int | Sequence[int], count: int) -> Sequence[int]:
    """Return a priority for each of `count` prompts, or raise RequestError."""
    several = list(priority) if isinstance(priority, Sequence) else []
    priorities = [priority] * count if isinstance(priority, int) else several
    if len(priorities) != count or not all(isinstance(one, int) for one in priorities):
        raise RequestError(
            f"priority must be an integer, or one for each of the {count} prompts, not {priority!r}"
        )
    return priorities
