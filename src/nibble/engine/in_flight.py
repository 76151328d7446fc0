"""Steps that were launched, what is read of them, and what they brought.

Shape suffixes: R rows whose log-probabilities are computed, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.engine.request import Batch, FinishReason, Logprob, Request, ScheduledRequest
from nibble.engine.sampler import RowLogprobs, SampledTokens, unscored
from nibble.engine.speculative import accepted_run
from nibble.kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched and is not read yet."""

    batch: Batch
    sampling: tuple[ScheduledRequest, ...]
    """What it samples for, in the order of `sampled`: a token, and one more for each draft."""
    sampled: SampledTokens | None
    prompt_logprobs: RowLogprobs | None
    """Of all logprob_rows of the batch, in its order."""

    @property
    def has_drafts(self) -> bool:
        """Return whether it verifies drafts."""
        return any(item.drafts for item in self.sampling)

    def read(
        self, drafts_of: Callable[[ScheduledRequest], Sequence[int]] | None = None
    ) -> tuple[dict[Request, list[int]], dict[Request, int]]:
        """Return the tokens that each request gained, and how many drafts could have been among them.

        NO_TOKEN stands for one whose logits are not numbers.

        Args:
            drafts_of: returns the drafts of a step that has ended; None: those that it was scheduled with.
        """
        tokens, first = self.sampled.read_ids() if self.sampled else [], 0
        runs, num_drafts = dict[Request, list[int]](), dict[Request, int]()
        for item in self.sampling:
            end = first + 1 + len(item.drafts)
            drafts = drafts_of(item) if drafts_of else item.drafts
            runs[item.request], num_drafts[item.request] = (
                accepted_run(drafts, tokens[first:end]),
                len(drafts),
            )
            first = end
        return runs, num_drafts

    def read_logprobs(self) -> dict[Request, list[Logprob | None]]:
        """Return what was sampled with its log-probabilities, where any are asked for: of all rows of each request."""
        if not self.sampled or not self.sampled.has_logprobs:
            return {}
        tokens = iter(self.sampled.read())
        return {item.request: list(itertools.islice(tokens, 1 + len(item.drafts))) for item in self.sampling}


@dataclass(frozen=True, slots=True)
class Gains:
    """What a step brought."""

    batch: Batch
    runs: Mapping[Request, Sequence[int]]
    """Tokens by request."""
    num_drafts: Mapping[Request, int]
    """That could have been among them."""
    logprobs: Mapping[Request, Sequence[Logprob | None]]
    """Of these tokens and those behind them, where any were asked for."""
    prompt_logprobs: Mapping[Request, Sequence[Logprob]]
    """Of its logprob_rows."""
    ended: Mapping[Request, FinishReason]
    """Requests that ended with it, and why."""


def scored(run: Sequence[int], logprobs: Sequence[Logprob | None] | None) -> list[Logprob]:
    """Return the tokens of a run with their log-probabilities, where any were asked for."""
    if logprobs is None:
        return [*map(unscored, run)]
    return [score for _, score in zip(run, logprobs, strict=False) if score]


def score_prompts(batch: Batch, logits_RV: Tensor, *, fixed_shapes: bool) -> RowLogprobs | None:
    """Start to compute the log-probabilities of all logprob_rows of a batch, if it has any."""
    rows = [(item.request, at) for item in batch.scheduled for at in item.logprob_rows]
    if not rows:
        return None
    tokens = to_device([request.token_ids[at + 1] for request, at in rows], torch.int64, logits_RV.device)
    counts = [request.params.prompt_logprobs or 0 for request, _ in rows]
    return RowLogprobs(logits_RV, tokens, counts, fixed_shapes=fixed_shapes)


def by_request(batch: Batch, prompt_logprobs: Sequence[Logprob]) -> dict[Request, Sequence[Logprob]]:
    """Return the log-probabilities of a batch's logprob_rows, those of each request apart."""
    entries = iter(prompt_logprobs)
    items = [item for item in batch.scheduled if item.logprob_rows]
    return {item.request: list(itertools.islice(entries, len(item.logprob_rows))) for item in items}
