"""How likely texts are: scores from log-probabilities of prompts, and what of a text is scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nibble.config import SamplingParams
from nibble.engine.request import Logprob, Output
from nibble.errors import RequestError


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is after its prompt, or a prompt after its own first token."""

    logprob: float
    """Sum over all tokens that are scored, in nats."""
    token_logprobs: tuple[Logprob, ...]
    """Of each token that is scored."""
    is_greedy: bool
    """Whether greedy decoding would give the same tokens."""


@dataclass(frozen=True, slots=True)
class ScoringPrompt:
    """Tokens of which those from `start` on are scored."""

    token_ids: list[int]
    start: int

    def params(self) -> SamplingParams:
        """Return what to ask of the engine: nothing is generated."""
        return SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, logprob_start_len=self.start)


def scoring_prompt(prompt: Sequence[int], continuation: Sequence[int] | None) -> ScoringPrompt:
    """Return the tokens to score; raise RequestError where there are none, or nothing stands before them."""
    if continuation is None:
        if len(prompt) < 2:
            raise RequestError("a prompt of one token cannot be scored: nothing predicts its first token")
        return ScoringPrompt(list(prompt), 1)
    if not prompt:
        raise RequestError(
            "a continuation needs a prompt of one token at least, such as the model's first one"
        )
    if not continuation:
        raise RequestError("the continuation is empty; it must have at least one token")
    return ScoringPrompt([*prompt, *continuation], len(prompt))


def encode_pair(
    encode: Callable[[str], list[int]], prompt: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and of what follows it, as lm-eval divides them.

    White space at the end of the prompt goes to the continuation, and both are tokenised as one text: tokenizers join
    a space and the word after it.

    Args:
        encode: returns the tokens of a text.
        prompt: what stands before.
        continuation: what is scored.
    """
    context = encode(prompt.rstrip())
    return context, encode(prompt + continuation)[len(context) :]


def score_of(output: Output, start: int) -> Score:
    """Return the score of the tokens from `start` on. output: what the engine answered to their ScoringPrompt."""
    entries = tuple(entry for entry in (output.prompt_logprobs or ())[start:] if entry is not None)
    is_greedy = all(entry.rank == 1 for entry in entries)
    return Score(sum(entry.logprob for entry in entries), entries, is_greedy)
