"""Steps that were launched, what is read of them, and what they brought.

Shape suffixes: R rows whose log-probabilities are computed, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from nibble.engine.page_tables import PageTables
from nibble.engine.request import Batch, FinishReason, Logprob, Request, ScheduledRequest, is_ahead
from nibble.engine.sampler import RowLogprobs, SampledTokens, Sampler, needs_output_tokens, unscored
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

        NO_TOKEN stands for one whose logits are not numbers. A request that has ended meanwhile gains none.

        Args:
            drafts_of: returns the drafts of a step that has ended; None: those that it was scheduled with.
        """
        tokens, first = self.sampled.read_ids() if self.sampled else [], 0
        runs, num_drafts = dict[Request, list[int]](), dict[Request, int]()
        for item in self.sampling:
            end = first + 1 + len(item.drafts)
            runs[item.request], num_drafts[item.request] = [], 0
            if not item.request.is_finished:
                drafts = drafts_of(item) if drafts_of else item.drafts
                runs[item.request] = accepted_run(drafts, tokens[first:end])
                num_drafts[item.request] = len(drafts)
            first = end
        return runs, num_drafts

    def read_logprobs(self) -> dict[Request, list[Logprob | None]]:
        """Return what was sampled with its log-probabilities, where any are asked for: of all rows of each request."""
        if not self.sampled or not self.sampled.has_logprobs:
            return {}
        tokens = iter(self.sampled.read())
        return {item.request: list(itertools.islice(tokens, 1 + len(item.drafts))) for item in self.sampling}


@dataclass(slots=True)
class StepClock:
    """When steps ended, in seconds by the device's clock.

    The host sees the end of a step when it comes to read it, which is later where it was busy. The device knows how
    long after the one before that was.
    """

    end: float = 0.0
    """Of the newest step that was read."""
    _seen_at: float = 0.0
    """When the host had read it, by the host's clock."""
    _timed: tuple[torch.cuda.Event, float] | None = None
    """The end of the newest one that the device has noted."""

    def read(self, step: InFlightStep) -> None:
        """Note that a step was read; of one that sampled nothing, the host's time stands for its end."""
        now, done = perf_counter(), step.sampled.done if step.sampled else None
        if done and self._timed:
            event, at = self._timed
            self.end = at + event.elapsed_time(done) / 1e3
        else:
            self.end = self.at(now)
        self._seen_at = now
        if done:
            self._timed = done, self.end

    def at(self, host_seconds: float) -> float:
        """Return the device's time of a moment by the host's clock."""
        return self.end + host_seconds - self._seen_at


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


def sample(
    sampler: Sampler, logits_SV: Tensor, sampling: Sequence[ScheduledRequest], tables: PageTables
) -> SampledTokens:
    """Start to sample tokens of items: of each one, and one more after each of its drafts."""
    requests, num_output_tokens, drafts = list[Request](), list[int](), dict[int, tuple[int, ...]]()
    behind = list[int]()
    for item in sampling:
        request, count = item.request, 1 + len(item.drafts)
        if count > 1 and needs_output_tokens(request.params):
            first = len(requests)
            drafts |= {first + place: item.drafts[:place] for place in range(1, count)}
        requests += [request] * count
        # From positions: the host's own count lacks the tokens that are in flight.
        end = item.end + 1 - len(request.prompt_token_ids)
        num_output_tokens += range(end - count, end)
        behind += range(end - count - item.start, end - item.start)
    counts_S = None
    if is_ahead(sampling) and any(item.request.params.temperature for item in sampling):
        counts_S = tables.counts_behind((request.lease for request in requests), behind)
    return sampler.launch(logits_SV, tuple(requests), num_output_tokens, drafts, counts_S)


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
