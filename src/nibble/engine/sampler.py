"""From logits to tokens: one batched pass for all requests of a step, on the device where the logits are.

A row's token depends on its own logits, parameters and seed only: the random number is a hash of seed and position,
so the same seed gives the same answer whatever else runs in the batch. Sampling does not wait for the device: the
tokens stay there, and SampledTokens.read() gives them to the host.

The order is penalties, logit_bias, bad_words, min_tokens, grammar, temperature, top_k, top_p, min_p.

Shape suffixes: S rows (requests), V vocabulary, R those of the rows that are treated alike, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.config import SamplingParams
from nibble.engine.request import Logprob, Request
from nibble.kernels import topk
from nibble.kernels.topk import NO_TOKEN
from nibble.kernels.transfer import to_device

_MASK = (1 << 64) - 1
_SEED, _POSITION = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LOGITS_PER_DRAW = 1 << 22
"""Logits that are drawn from at a time: sorting takes some 60 bytes for each."""
FIXED_ROWS, FIXED_MULTIPLE = 8, 32
"""Rows and a divisor of columns of what is computed at a time where shapes must not depend on the batch."""
LOGITS_PER_SCORE = 1 << 23
"""Logits that are made into log-probabilities at a time: it takes some 20 bytes for each."""


class HostCopy:
    """Tensors on their way to the host. The copy starts at once; read() waits for it.

    Args:
        tensors: on one device.
        timed: whether `done` says when the copy ended.
    """

    def __init__(self, *tensors: Tensor, timed: bool = False) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self.done = torch.cuda.Event(enable_timing=timed) if tensors[0].is_cuda else None
        if self.done:
            self.done.record()

    def read(self) -> list[list[Any]]:
        """Return the tensors as lists."""
        if self.done:
            self.done.synchronize()
        return [tensor.tolist() for tensor in self._tensors]


class RowLogprobs:
    """The log-probability of one token in each row of logits, and those of the likeliest.

    Args:
        logits_RV: the model's logits.
        tokens_R: a token for each row.
        counts: for each row, how many of the likeliest are reported.
        fixed_shapes: as a Sampler has it.
    """

    @torch.inference_mode()
    def __init__(
        self, logits_RV: Tensor, tokens_R: Tensor, counts: Sequence[int], *, fixed_shapes: bool = False
    ) -> None:
        self._counts = counts
        # A bounded number of rows at a time: float32 copies of all would take several times the memory.
        step = FIXED_ROWS if fixed_shapes else max(1, LOGITS_PER_SCORE // logits_RV.shape[1])
        parts = zip(logits_RV.split(step), tokens_R.split(step), strict=True)
        scores = [_score(part_RV, part_R, max(counts), fixed_shapes) for part_RV, part_R in parts]
        self._copy = HostCopy(tokens_R, *(torch.cat(column) for column in zip(*scores, strict=True)))

    def read(self) -> list[Logprob]:
        """Return one for each row; NaN where logits are not numbers."""
        tokens, values, ids, ranks = self._copy.read()
        rows = zip(tokens, values, ids, ranks, self._counts, strict=True)
        return [
            Logprob(token, row[0], tuple(zip(top[:count], row[1:], strict=False)), rank)
            for token, row, top, rank, count in rows
        ]


def _in_fixed_shape(x_RV: Tensor) -> Tensor:
    """Pad to FIXED_ROWS rows, and their columns with -inf, so that a row is summed up alike whatever comes with it."""
    rows, columns = x_RV.shape
    x_RV = torch.nn.functional.pad(x_RV, (0, -columns % FIXED_MULTIPLE), value=float("-inf"))
    return torch.nn.functional.pad(x_RV, (0, 0, 0, FIXED_ROWS - rows))


def _score(logits_RV: Tensor, tokens_R: Tensor, count: int, fixed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [R, 1 + K] of tokens and of the likeliest, ids of these [R, K], ranks of tokens [R]."""
    logits_RV, tokens_R1 = logits_RV.float(), tokens_R[:, None]
    summed_RV = _in_fixed_shape(logits_RV) if fixed else logits_RV
    total_R1 = summed_RV.logsumexp(-1, keepdim=True)[: len(logits_RV)]
    top_RK, ids_RK = logits_RV.topk(min(count, logits_RV.shape[1]))
    token_R1 = logits_RV.gather(-1, tokens_R1)
    # Equal logits are frequent in 16 bits. Greedy decoding takes the first of them, so they have an order.
    is_before_RV = logits_RV > token_R1
    is_before_RV |= (logits_RV == token_R1) & (
        torch.arange(logits_RV.shape[1], device=logits_RV.device) < tokens_R1
    )
    return torch.cat((token_R1, top_RK), 1) - total_R1, ids_RK, is_before_RV.sum(-1) + 1


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """The rows that need log-probabilities."""

    counts: dict[int, int]
    """By row, how many of the likeliest tokens it needs."""
    rows_R: Tensor
    """The rows on the device."""


class SampledTokens:
    """One token for each row. The copy to the host starts at once; read() waits for it.

    Args:
        logits_SV: the model's logits.
        tokens_S: int64 on the device, valid ids even where logits are not numbers, so that a next step can run.
        reported_S: the same for the host, NO_TOKEN where logits are not numbers.
        logprobs: which log-probabilities to read.
        fixed_shapes: as a Sampler has it.
    """

    def __init__(
        self,
        logits_SV: Tensor,
        tokens_S: Tensor,
        reported_S: Tensor,
        logprobs: LogprobRequest | None,
        *,
        fixed_shapes: bool = False,
    ) -> None:
        self.tokens_S = tokens_S
        # The host sees which rows failed; the device keeps valid ids for the step that runs already.
        self._copy = HostCopy(reported_S, timed=True)
        self._rows: tuple[int, ...] = ()
        if logprobs:
            self._rows, counts = tuple(logprobs.counts), tuple(logprobs.counts.values())
            rows_R = logprobs.rows_R
            self._logprobs = RowLogprobs(
                logits_SV[rows_R], tokens_S[rows_R], counts, fixed_shapes=fixed_shapes
            )

    @property
    def done(self) -> torch.cuda.Event | None:
        """Return what the device records behind the tokens, None on a CPU."""
        return self._copy.done

    @property
    def has_logprobs(self) -> bool:
        """Return whether log-probabilities of any row were asked for."""
        return bool(self._rows)

    def read_ids(self) -> list[int]:
        """Return the tokens, NO_TOKEN where logits are not numbers: no parameter can mend that."""
        (tokens,) = self._copy.read()
        return tokens

    def read(self) -> list[Logprob | None]:
        """Return the tokens with their log-probabilities, None where logits are not numbers."""
        result = [None if token == NO_TOKEN else unscored(token) for token in self.read_ids()]
        if self._rows:
            for row, logprob in zip(self._rows, self._logprobs.read(), strict=True):
                if result[row] is not None:
                    result[row] = logprob
        return result


@lru_cache(1 << 14)
def unscored(token: int) -> Logprob:
    """Return a token whose log-probability nobody asks for; the same object each time, as a step reads many."""
    return Logprob(token, 0.0)


def uniforms(seeds_S: Tensor, positions_S: Tensor) -> Tensor:
    """Return numbers in [0, 1) from int64 seeds and positions (SplitMix64, Steele et al. 2014) -> float64 [S]."""
    # Products of int64 wrap around as those of unsigned integers do.
    state_S = seeds_S * _signed(_SEED) + (positions_S + 1) * _signed(_POSITION)
    for shift, factor in _MIX:
        state_S = (state_S ^ _shift_right(state_S, shift)) * _signed(factor)
    return _shift_right(state_S ^ _shift_right(state_S, 31), 11).double() / (1 << 53)


def _shift_right(x_S: Tensor, by: int) -> Tensor:
    """Return x >> by of unsigned integers."""
    return (x_S >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned integer."""
    return ((value & _MASK) ^ (1 << 63)) - (1 << 63)


def needs_output_tokens(params: SamplingParams) -> bool:
    """Return whether sampling needs the values of the tokens before, which must then be known to the host."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return bool(penalties or params.grammar or params.bad_words)


class Sampler:
    """Samples for requests.

    Args:
        default_seed: of requests that name no seed.
        fixed_shapes: compute rows in parts of one shape, because kernels of torch sum a row up in another order where
            there are more of them.
    """

    def __init__(self, default_seed: int = 0, *, fixed_shapes: bool = False) -> None:
        self.default_seed, self.fixed_shapes = default_seed, fixed_shapes
        # Weak, because nobody tells the sampler when a request ends.
        self._past_tokens: WeakKeyDictionary[Request, tuple[int, set[int]]] = WeakKeyDictionary()
        self._params: _BatchParams | None = None

    @torch.inference_mode()
    def launch(
        self,
        logits_SV: Tensor,
        requests: Sequence[Request],
        num_output_tokens: Sequence[int],
        drafts: Mapping[int, Sequence[int]] = MappingProxyType({}),
        counts_S: Tensor | None = None,
    ) -> SampledTokens:
        """Sample one token per row, without waiting for the device.

        Args:
            logits_SV: the model's logits.
            requests: of each row; one with drafts has several.
            num_output_tokens: tokens that each request has generated by then, those in flight and drafts included.
            drafts: by row, what follows the request's own tokens before it, where there is any.
            counts_S: int64 num_output_tokens on the device, where the host only knows that there are enough.
        """
        # Decode batches stay the same for many steps, and a request's parameters never change, so they are sent to the
        # device again only where the batch has changed.
        if self._params is None or self._params.requests != tuple(requests):
            seeds = [self._seed(request) for request in requests]
            self._params = _BatchParams(requests, seeds, logits_SV.device)
        params = self._params
        adjusted_SV = self._adjust(logits_SV, params, num_output_tokens, drafts)
        # One pass gives the greedy tokens and finds NaN, which is the largest value.
        tokens_S, reported_S = topk.likeliest(adjusted_SV)
        for rows in params.random:
            if counts_S is None:
                counts = [num_output_tokens[i] for i in rows.index]
                counts_R = to_device(counts, torch.int64, logits_SV.device)
            else:
                counts_R = counts_S[rows.index_R]
            drawn_R = _draw(adjusted_SV[rows.index_R], rows, counts_R, fixed=self.fixed_shapes)
            tokens_S = tokens_S.index_copy(0, rows.index_R, drawn_R)
        if params.random:
            reported_S = torch.where(reported_S < 0, reported_S, tokens_S)
        return SampledTokens(logits_SV, tokens_S, reported_S, params.logprobs, fixed_shapes=self.fixed_shapes)

    def _adjust(
        self,
        logits_SV: Tensor,
        params: _BatchParams,
        num_output_tokens: Sequence[int],
        drafts: Mapping[int, Sequence[int]],
    ) -> Tensor:
        """Apply penalties, bias, bans and grammars to a copy; return `logits_SV` itself where no row needs any."""
        requests = params.requests
        unfinished = {i for i, least in params.min_tokens.items() if num_output_tokens[i] < least}
        rows = sorted(unfinished.union(params.adjusted))
        if not rows:
            return logits_SV
        # A copy, because log-probabilities are of the model's own logits.
        logits_SV = logits_SV.to(torch.float32, copy=True)
        for i in rows:
            stops = requests[i].stop_ids if i in unfinished else frozenset()
            of_row = list(drafts.get(i, ()))
            past_tokens = self._tokens_to_penalise(requests[i], of_row)
            _adjust_row(logits_SV[i], requests[i], of_row, past_tokens, stops)
        return logits_SV

    def _tokens_to_penalise(self, request: Request, drafts: Sequence[int]) -> list[int]:
        """Return the distinct tokens of prompt, answer and drafts, for the repetition penalty."""
        if request.params.repetition_penalty == 1:
            return []
        # The set is kept from step to step, and only added to.
        count, distinct = self._past_tokens.get(request, (0, set()))
        distinct.update(request.token_ids[count:])
        self._past_tokens[request] = len(request.token_ids), distinct
        return list(distinct.union(drafts))

    def _seed(self, request: Request) -> int:
        """Return the request's own seed, or one that differs between requests and repeats from run to run."""
        if request.params.seed is not None:
            return request.params.seed
        return hash((self.default_seed, request.arrival))


class _RandomRows:
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

        row_params = [params[i] for i in index]
        self.index = tuple(index)
        self.index_R = to_device(self.index, torch.int64, device)
        self.seeds_R = to_device([_signed(seeds[i]) for i in index], torch.int64, device)
        self.temperature_R1 = column((p.temperature for p in row_params), torch.float32)
        self.has_filters = any(map(_has_filters, row_params))
        # Without top_k the limit is one that no vocabulary reaches.
        self.top_k_R1 = column((p.top_k or _MASK >> 1 for p in row_params), torch.int64)
        self.top_p_R1 = column((p.top_p for p in row_params), torch.float64)
        self.min_p_R1 = column((p.min_p for p in row_params), torch.float32)


class _BatchParams:
    """The parameters of a batch."""

    def __init__(self, requests: Sequence[Request], seeds: Sequence[int], device: torch.device) -> None:
        self.requests = tuple(requests)
        params = [request.params for request in requests]
        self.adjusted = [i for i, p in enumerate(params) if needs_output_tokens(p) or p.logit_bias]
        """Rows with penalties, bias, bad words or a grammar."""
        self.min_tokens = {i: p.min_tokens for i, p in enumerate(params) if p.min_tokens}
        """By row."""
        random = [i for i, p in enumerate(params) if p.temperature > 0]
        # Only rows with filters need sorted logits, so the others are drawn apart.
        kinds = ([i for i in random if _has_filters(params[i]) is kind] for kind in (False, True))
        self.random = [_RandomRows(index, params, seeds, device) for index in kinds if index]
        """Rows that are not greedy."""
        counts = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        self.logprobs: LogprobRequest | None = None
        if counts:
            self.logprobs = LogprobRequest(counts, to_device(list(counts), torch.int64, device))


def _has_filters(params: SamplingParams) -> bool:
    return bool(params.top_k or params.top_p < 1 or params.min_p)


def _adjust_row(
    row_V: Tensor, request: Request, drafts: list[int], past_tokens: Sequence[int], stops: Set[int]
) -> None:
    """Apply penalties, bias, bans and the grammar to a row in place.

    Args:
        row_V: logits.
        request: whose logits they are.
        drafts: what the answer is taken to go on with before this row.
        past_tokens: what the repetition penalty is for.
        stops: tokens that would end the answer before its time.
    """
    params, device = request.params, row_V.device
    if past_tokens:
        ids = to_device(past_tokens, torch.int64, device)
        logits, penalty = row_V[ids], params.repetition_penalty
        # By sign, so that a penalty above 1 lowers negative logits too.
        row_V[ids] = torch.where(logits > 0, logits / penalty, logits * penalty)
    answer = request.output_token_ids
    if answer + drafts and (params.presence_penalty or params.frequency_penalty):
        ids, counts = (x.to(device) for x in torch.tensor(answer + drafts).unique(return_counts=True))
        row_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = to_device(list(params.logit_bias), torch.int64, device)
        row_V[ids] += to_device(list(params.logit_bias.values()), row_V.dtype, device)
    banned = {token for token in stops if 0 <= token < len(row_V)}
    if request.matcher:
        allowed_V = _unpack_bits(request.matcher.allowed(answer, drafts), len(row_V))
        row_V.masked_fill_(~allowed_V.to(device), float("-inf"))
        # A grammar that is complete allows its end alone, so the answer ends there, however short it is.
        allowed_V[list(banned)] = False
        banned = banned if allowed_V.any() else set()
    if banned := banned | _last_tokens(request, answer + drafts):
        row_V[to_device(list(banned), torch.int64, device)] = float("-inf")


def _last_tokens(request: Request, answer: list[int]) -> set[int]:
    """Return the tokens that would complete one of the words that the answer must not have."""
    return {last for *start, last in request.bad_words if not start or answer[-len(start) :] == start}


def _unpack_bits(mask: bytes, count: int) -> Tensor:
    """Return bool [V]: the lowest bit of the first byte comes first; entries beyond the mask are false."""
    bytes_N = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (bytes_N[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return torch.nn.functional.pad(bits.flatten()[:count].bool(), (0, max(0, count - 8 * len(mask))))


def _draw(logits_RV: Tensor, rows: _RandomRows, positions_R: Tensor, *, fixed: bool = False) -> Tensor:
    """Draw tokens by inverting the cumulated probabilities -> int64 [R]. fixed: in parts of one shape."""
    target_R1 = uniforms(rows.seeds_R, positions_R)[:, None]
    # A bounded number of logits at a time, because sorting takes memory.
    step = FIXED_ROWS if fixed else max(1, LOGITS_PER_DRAW // logits_RV.shape[1])
    parts = [slice(start, start + step) for start in range(0, len(logits_RV), step)]
    return torch.cat([_draw_part(logits_RV[part], rows, part, target_R1, fixed) for part in parts])


def _draw_part(logits_RV: Tensor, rows: _RandomRows, part: slice, target_R1: Tensor, fixed: bool) -> Tensor:
    count, vocab = logits_RV.shape
    columns = [target_R1, rows.temperature_R1, rows.top_k_R1, rows.top_p_R1, rows.min_p_R1]
    columns = [column[part] for column in columns]
    if fixed:  # rows that stand in for missing ones have the parameters of the last
        filling = torch.arange(FIXED_ROWS, device=logits_RV.device).clamp(max=count - 1)
        columns = [column[filling] for column in columns]
        logits_RV = _in_fixed_shape(logits_RV.float())
    target_R1, temperature_R1, *filters = columns
    logits_RV = logits_RV.float() / temperature_R1
    if not rows.has_filters:
        tokens_R1 = _invert_cdf(logits_RV.softmax(-1), target_R1)
    else:
        sorted_RV, tokens_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
        tokens_R1 = tokens_RV.gather(-1, _invert_cdf(_filter(sorted_RV, *filters), target_R1))
    # A row of NaN ends in the padding.
    return tokens_R1[:count, 0].clamp(max=vocab - 1)


def _invert_cdf(probs_RV: Tensor, target_R1: Tensor) -> Tensor:
    """Return [R, 1]: the place where the cumulated probabilities pass a target in [0, 1) of their total."""
    # In float32 the rounding of a long sum would move the borders between tokens.
    cumulated_RV = probs_RV.double().cumsum(-1)
    total_R1 = cumulated_RV[:, -1:]
    # Rounding must not lead past the last token with a probability.
    below_R1 = total_R1.nextafter(torch.zeros_like(total_R1))
    place_R1 = torch.searchsorted(cumulated_RV, (target_R1 * total_R1).minimum(below_R1), right=True)
    # Nothing is passed where logits are NaN.
    return place_R1.clamp(max=probs_RV.shape[1] - 1)


def _filter(sorted_RV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, min_p_R1: Tensor) -> Tensor:
    """Return probabilities, not normalised, of descending logits: zero where top_k, top_p or min_p drops a token."""
    rank_V = torch.arange(sorted_RV.shape[-1], device=sorted_RV.device)
    probs_RV = sorted_RV.masked_fill(rank_V >= top_k_R1, float("-inf")).softmax(-1)
    # Of the tokens before it: the token that passes top_p is kept.
    before_RV = probs_RV.double().cumsum(-1) - probs_RV.double()
    keep_RV = before_RV < top_p_R1
    keep_RV &= probs_RV >= probs_RV[:, :1] * min_p_R1
    # The likeliest token stays whatever the filters say, or nothing could be drawn.
    keep_RV[:, 0] = True
    return probs_RV * keep_RV
