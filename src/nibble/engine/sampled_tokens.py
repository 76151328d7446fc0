"""What was sampled in one step: known to the device at once, and to the host when it reads it.

Owns Picks. How tokens are chosen is the sampler's business.

Shape suffixes: S rows (requests), R those that asked for log-probabilities, K likeliest tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.engine.outputs import Logprob

INVALID_TOKEN = -1
"""Stands for a token where logits are not numbers."""


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Rows that asked for log-probabilities, and of how many likeliest tokens each. rows_R: the same on the device."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    rows_R: Tensor


class SampledTokens:
    """One token for each row. The copy to the host is under way from the start; read() waits for it.

    tokens_S: int64 on the device, valid ids even where logits are not numbers, so that a next step may run on them.
    """

    def __init__(
        self, logits_SV: Tensor, tokens_S: Tensor, wrong_S: Tensor, wanted: LogprobRequest | None
    ) -> None:
        self.tokens_S = tokens_S
        self._wanted = wanted
        self._shown_S = to_host(tokens_S.masked_fill(wrong_S, INVALID_TOKEN))
        if wanted:
            values, ids = _logprobs(
                logits_SV[wanted.rows_R].float(), tokens_S[wanted.rows_R], max(wanted.counts)
            )
            self._values, self._ids = to_host(values), to_host(ids)
        self._done = torch.cuda.Event() if tokens_S.is_cuda else None
        if self._done:
            self._done.record()

    def read(self) -> list[Logprob | None]:
        """What was chosen; None where logits are not numbers, which no parameter can mend."""
        if self._done:
            self._done.synchronize()
        found = [None if token == INVALID_TOKEN else Logprob(token, 0.0) for token in self._shown_S.tolist()]
        if self._wanted:
            rows = zip(self._values.tolist(), self._ids.tolist(), strict=True)
            for row, count, (values, ids) in zip(self._wanted.rows, self._wanted.counts, rows, strict=True):
                found[row] = _explained(found[row], values, ids, count)
        return found


def _explained(
    pick: Logprob | None, values: Sequence[float], ids: Sequence[int], count: int
) -> Logprob | None:
    """A pick with its log-probability and the likeliest `count` tokens. values: its own, then those of `ids`."""
    if pick is None:
        return None
    return Logprob(pick.token, values[0], tuple(zip(ids[:count], values[1:], strict=False)))


def _logprobs(logits_RV: Tensor, tokens_R: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [R, 1 + K] of the chosen token and of the likeliest, and the ids of these [R, K]."""
    total_R1 = logits_RV.logsumexp(-1, keepdim=True)
    top_RK, ids_RK = logits_RV.topk(min(most, logits_RV.shape[1]))
    chosen_R1 = logits_RV.gather(-1, tokens_R[:, None])
    return torch.cat((chosen_R1, top_RK), 1) - total_R1, ids_RK


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete once an event that is recorded after this has come to pass."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
