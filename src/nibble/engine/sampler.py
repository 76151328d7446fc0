"""From logits to tokens: one batched pass for all requests of a step, on the device where the logits are.

A row's token depends on its own logits, parameters and seed only: the random number is a hash of seed and position,
so the same seed gives the same answer whatever else runs in the batch. Choosing does not wait for the device; what was
chosen is read later (Picks). Owns Sampler. Must not know of caches.

Order: penalties, logit_bias, grammar, temperature, top_k, top_p, min_p. Shape suffixes: S rows (requests), V
vocabulary, R those of the rows that are treated alike, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.config import SamplingParams
from nibble.engine.outputs import Logprob
from nibble.engine.request import Request
from nibble.engine.sampled_tokens import LogprobRequest, SampledTokens
from nibble.engine.transfer import to_device

_MASK = (1 << 64) - 1
_SEED, _POSITION = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
DRAWN = 1 << 22
"""Logits that are drawn from at a time: sorting takes some 60 bytes for each."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a seed and a position (SplitMix64, Steele et al. 2014, over their mix)."""
    state = (seed * _SEED + (position + 1) * _POSITION) & _MASK
    for shift, factor in _MIX:
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


def uniforms(seeds_S: Tensor, positions_S: Tensor) -> Tensor:
    """uniform() of int64 tensors -> float64 [S]. Products wrap around as those of unsigned integers do."""
    state_S = seeds_S * _signed(_SEED) + (positions_S + 1) * _signed(_POSITION)
    for shift, factor in _MIX:
        state_S = (state_S ^ _shifted(state_S, shift)) * _signed(factor)
    return _shifted(state_S ^ _shifted(state_S, 31), 11).double() / (1 << 53)


def _shifted(x_S: Tensor, by: int) -> Tensor:
    """x >> by of unsigned integers."""
    return (x_S >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned integer."""
    return ((value & _MASK) ^ (1 << 63)) - (1 << 63)


def needs_output_tokens(params: SamplingParams) -> bool:
    """Whether choosing a token takes the values of those before it, which then must be known to the host."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return bool(penalties or params.grammar)


class Sampler:
    """Samples for requests. default_seed: of requests that name no seed."""

    def __init__(self, default_seed: int = 0) -> None:
        self.default_seed = default_seed
        self._seen: WeakKeyDictionary[Request, tuple[int, set[int]]] = WeakKeyDictionary()
        self._table: _Table | None = None

    def sample(self, logits_SV: Tensor, requests: Sequence[Request]) -> list[Logprob | None]:
        """One token per row; None where the logits are not numbers."""
        return self.pick(logits_SV, requests, [request.num_output_tokens for request in requests]).read()

    @torch.inference_mode()
    def pick(self, logits_SV: Tensor, requests: Sequence[Request], made: Sequence[int]) -> SampledTokens:
        """Chooses one token per row, without waiting for the device. made: how many each request has by now."""
        table = self._table_of(requests, logits_SV.device)
        adjusted_SV = self._adjust(logits_SV, requests, table)
        peaks_S, tokens_S = adjusted_SV.max(-1)
        for rows in table.drawn:
            drawn_R = _draw(adjusted_SV[rows.index_R], rows, [made[i] for i in rows.index])
            tokens_S = tokens_S.index_copy(0, rows.index_R, drawn_R)
        return SampledTokens(logits_SV, tokens_S, peaks_S.isnan(), table.wanted)

    def _table_of(self, requests: Sequence[Request], device: torch.device) -> _Table:
        """The parameters of a batch; they are sent to the device anew only where it has changed."""
        if self._table is None or self._table.requests != tuple(requests):
            self._table = _Table(requests, [self._seed(request) for request in requests], device)
        return self._table

    def _adjust(self, logits_SV: Tensor, requests: Sequence[Request], table: _Table) -> Tensor:
        """Penalties and bias; the very tensor where no request has any."""
        if not table.adjusted:
            return logits_SV
        logits_SV = logits_SV.to(torch.float32, copy=True)
        for i in table.adjusted:
            _adjust_row(logits_SV[i], requests[i], self._seen_by(requests[i]))
        return logits_SV

    def _seen_by(self, request: Request) -> list[int]:
        """Tokens of prompt and answer, for the repetition penalty; kept from step to step, and only added to."""
        if request.params.repetition_penalty == 1:
            return []
        count, seen = self._seen.get(request, (0, set()))
        seen.update(request.token_ids[count:])
        self._seen[request] = len(request.token_ids), seen
        return list(seen)

    def _seed(self, request: Request) -> int:
        """The request's own, or one that differs from request to request and repeats from run to run."""
        if request.params.seed is not None:
            return request.params.seed
        return hash((self.default_seed, request.arrival))


class _Rows:
    """Rows that are drawn from in the same way, with their parameters on the device."""

    def __init__(
        self,
        index: Sequence[int],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        def column(values: Iterator[float], dtype: torch.dtype) -> Tensor:
            return to_device(list(values), dtype, device)[:, None]

        mine = [params[i] for i in index]
        self.index = tuple(index)
        self.index_R = to_device(self.index, torch.int64, device)
        self.seeds_R = to_device([_signed(seeds[i]) for i in index], torch.int64, device)
        self.temperature_R1 = column((p.temperature for p in mine), torch.float32)
        self.filters = any(map(_filters, mine))
        self.top_k_R1 = column((p.top_k or _MASK >> 1 for p in mine), torch.int64)
        self.top_p_R1 = column((p.top_p for p in mine), torch.float64)
        self.min_p_R1 = column((p.min_p for p in mine), torch.float32)


class _Table:
    """The parameters of a batch. adjusted: rows with penalties or bias. drawn: rows that are not greedy."""

    def __init__(self, requests: Sequence[Request], seeds: Sequence[int], device: torch.device) -> None:
        self.requests = tuple(requests)
        params = [request.params for request in requests]
        self.adjusted = [i for i, p in enumerate(params) if needs_output_tokens(p) or p.logit_bias]
        random = [i for i, p in enumerate(params) if p.temperature > 0]
        kinds = ([i for i in random if _filters(params[i]) is kind] for kind in (False, True))
        self.drawn = [_Rows(index, params, seeds, device) for index in kinds if index]
        rows = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        self.wanted = (
            LogprobRequest(tuple(rows), tuple(rows.values()), to_device(tuple(rows), torch.int64, device))
            if rows
            else None
        )


def _filters(params: SamplingParams) -> bool:
    return bool(params.top_k or params.top_p < 1 or params.min_p)


def _adjust_row(row_V: Tensor, request: Request, seen: Sequence[int]) -> None:
    """In place, on a row of a private copy."""
    params, device = request.params, row_V.device
    if seen:
        ids = to_device(seen, torch.int64, device)
        logits, penalty = row_V[ids], params.repetition_penalty
        row_V[ids] = torch.where(logits > 0, logits / penalty, logits * penalty)
    if request.num_output_tokens and (params.presence_penalty or params.frequency_penalty):
        made, counts = (
            x.to(device) for x in torch.tensor(request.output_token_ids).unique(return_counts=True)
        )
        row_V[made] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = to_device(list(params.logit_bias), torch.int64, device)
        row_V[ids] += to_device(list(params.logit_bias.values()), row_V.dtype, device)
    if request.matcher:
        row_V.masked_fill_(
            ~_bits(request.matcher.allowed(request.output_token_ids), len(row_V)).to(device), float("-inf")
        )


def _bits(mask: bytes, count: int) -> Tensor:
    """bool [V]: the lowest bit of the first byte comes first; what it does not reach is false."""
    bytes_N = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (bytes_N[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return torch.nn.functional.pad(bits.flatten()[:count].bool(), (0, max(0, count - 8 * len(mask))))


def _draw(logits_RV: Tensor, rows: _Rows, made: Sequence[int]) -> Tensor:
    """int64 [R]: tokens drawn by inverting the cumulated probabilities, a bounded number of logits at a time."""
    target_R1 = uniforms(rows.seeds_R, to_device(made, torch.int64, logits_RV.device))[:, None]
    step = max(1, DRAWN // logits_RV.shape[1])
    parts = [slice(start, start + step) for start in range(0, len(logits_RV), step)]
    found = [
        _draw_part(logits_RV[part].float() / rows.temperature_R1[part], rows, part, target_R1)
        for part in parts
    ]
    return torch.cat(found)


def _draw_part(logits_RV: Tensor, rows: _Rows, part: slice, target_R1: Tensor) -> Tensor:
    if not rows.filters:
        return _inverted(logits_RV.softmax(-1), target_R1[part])[:, 0]
    sorted_RV, tokens_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    probs_RV = _filtered(sorted_RV, rows.top_k_R1[part], rows.top_p_R1[part], rows.min_p_R1[part])
    return tokens_RV.gather(-1, _inverted(probs_RV, target_R1[part]))[:, 0]


def _inverted(probs_RV: Tensor, target_R1: Tensor) -> Tensor:
    """[R, 1]: the place where the cumulated probabilities pass a target in [0, 1) of their total."""
    total_RV = probs_RV.double().cumsum(-1)
    whole_R1 = total_RV[:, -1:]
    below_R1 = whole_R1.nextafter(
        torch.zeros_like(whole_R1)
    )  # so that rounding cannot lead past the last kept token
    place_R1 = torch.searchsorted(total_RV, (target_R1 * whole_R1).minimum(below_R1), right=True)
    return place_R1.clamp(max=probs_RV.shape[1] - 1)  # nothing is passed where logits are NaN


def _filtered(sorted_RV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, min_p_R1: Tensor) -> Tensor:
    """Logits in descending order -> unnormalised probabilities, zero where top_k, top_p or min_p drops a token."""
    rank_V = torch.arange(sorted_RV.shape[-1], device=sorted_RV.device)
    probs_RV = sorted_RV.masked_fill(rank_V >= top_k_R1, float("-inf")).softmax(-1)
    before_RV = probs_RV.double().cumsum(-1) - probs_RV.double()
    keep_RV = before_RV < top_p_R1
    keep_RV &= probs_RV >= probs_RV[:, :1] * min_p_R1
    keep_RV[:, 0] = True
    return probs_RV * keep_RV
