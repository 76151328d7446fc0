"""From logits to tokens: one batched pass for all requests of a step.

A row's token depends on its own logits, parameters and seed only: the random number is a hash of seed and position,
so the same seed gives the same answer whatever else runs in the batch. Owns Sampler. Must not know of caches.

Order: penalties, logit_bias, temperature, top_k, top_p, min_p. Shape suffixes: S rows (requests), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.config import SamplingParams
from nibble.engine.outputs import Logprob
from nibble.engine.request import Request

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a seed and a position (SplitMix64, Steele et al. 2014, over their mix)."""
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


class Sampler:
    """Samples for requests. default_seed: of requests that name no seed."""

    def __init__(self, default_seed: int = 0) -> None:
        self.default_seed = default_seed
        self._seen: WeakKeyDictionary[Request, tuple[int, set[int]]] = WeakKeyDictionary()

    def sample(self, logits_SV: Tensor, requests: Sequence[Request]) -> list[Logprob | None]:
        """One token per row; None where the logits are not numbers, which no parameter can mend."""
        raw_SV = logits_SV.float()
        adjusted_SV = self._adjust(raw_SV, requests)
        tokens_S = adjusted_SV.argmax(-1)
        random = [i for i, request in enumerate(requests) if request.params.temperature > 0]
        if random:
            tokens_S[random] = self._draw(adjusted_SV[random], [requests[i] for i in random])
        wrong = raw_SV.amax(-1).isnan().tolist()
        tokens = tokens_S.tolist()
        return [
            None if bad else _logprob(row, token, request.params)
            for bad, row, token, request in zip(wrong, raw_SV, tokens, requests, strict=True)
        ]

    def _adjust(self, logits_SV: Tensor, requests: Sequence[Request]) -> Tensor:
        """Penalties and bias; the very tensor where no request has any."""
        rows = [i for i, request in enumerate(requests) if _adjusts(request.params)]
        if not rows:
            return logits_SV
        logits_SV = logits_SV.clone()
        for i in rows:
            _adjust_row(logits_SV[i], requests[i], self._seen_by(requests[i], logits_SV.device))
        return logits_SV

    def _seen_by(self, request: Request, device: torch.device) -> Tensor | None:
        """Tokens of prompt and answer, for the repetition penalty; kept from step to step, and only added to."""
        if request.params.repetition_penalty == 1:
            return None
        count, seen = self._seen.get(request, (0, set()))
        seen.update(request.tokens[count:])
        self._seen[request] = len(request.tokens), seen
        return torch.tensor(list(seen), device=device)

    def _draw(self, logits_SV: Tensor, requests: Sequence[Request]) -> Tensor:
        """int64 [S]: tokens drawn from the filtered distributions, by inverting the cumulated probabilities."""
        params = [request.params for request in requests]
        temperature_S1 = _column([p.temperature for p in params], logits_SV)
        sorted_SV, tokens_SV = (logits_SV / temperature_S1).sort(dim=-1, descending=True, stable=True)
        probs_SV = _filtered(sorted_SV, params)
        total_SV = probs_SV.double().cumsum(-1)
        picks = [uniform(self._seed(request), request.generated) for request in requests]
        target_S1 = (
            torch.tensor(picks, dtype=torch.float64, device=logits_SV.device)[:, None] * total_SV[:, -1:]
        )
        place_S1 = torch.searchsorted(total_SV, target_S1, right=True)
        # Rounding may put the target past the last kept token; tokens are sorted, so the kept ones come first.
        last_S1 = (
            (probs_SV > 0).sum(-1, keepdim=True).sub(1).clamp(min=0)
        )  # none is kept where logits are NaN
        return tokens_SV.gather(-1, place_S1.minimum(last_S1))[:, 0]

    def _seed(self, request: Request) -> int:
        """The request's own, or one that differs from request to request and repeats from run to run."""
        if request.params.seed is not None:
            return request.params.seed
        return hash((self.default_seed, request.arrival))


def _adjusts(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
    )


def _adjust_row(row_V: Tensor, request: Request, seen: Tensor | None) -> None:
    """In place, on a row of a private copy."""
    params = request.params
    if seen is not None:
        logits, penalty = row_V[seen], params.repetition_penalty
        row_V[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
    if request.generated and (params.presence_penalty or params.frequency_penalty):
        made, counts = torch.tensor(request.answer, device=row_V.device).unique(return_counts=True)
        row_V[made] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row_V.device)
        row_V[ids] += torch.tensor(list(params.logit_bias.values()), device=row_V.device)


def _filtered(sorted_SV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits in descending order -> unnormalised probabilities, zero where top_k, top_p or min_p drops a token."""
    rank_V = torch.arange(sorted_SV.shape[-1], device=sorted_SV.device)
    top_k_S1 = _column([p.top_k or sorted_SV.shape[-1] for p in params], sorted_SV)
    probs_SV = sorted_SV.masked_fill(rank_V >= top_k_S1, float("-inf")).softmax(-1)
    before_SV = probs_SV.double().cumsum(-1) - probs_SV.double()
    keep_SV = before_SV < _column([p.top_p for p in params], before_SV)
    keep_SV &= probs_SV >= probs_SV[:, :1] * _column([p.min_p for p in params], probs_SV)
    keep_SV[:, 0] = True
    return probs_SV * keep_SV


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _logprob(row_V: Tensor, token: int, params: SamplingParams) -> Logprob:
    if params.logprobs is None:
        return Logprob(token, 0.0)
    logprobs_V = row_V.log_softmax(-1)
    values, ids = logprobs_V.topk(min(params.logprobs, len(row_V)))
    return Logprob(token, float(logprobs_V[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
