"""The fidelity watch: how far off the quantised cache is, for queries of the requests that are served.

Of a share of requests, one at a time, the rows of a few layers are kept in the model's own precision (engine/reference_rows.py)
from the first token on, and what the cache answered to the last token of the prompt and to the first of the answer is
compared with attention over them. Nothing that is served depends on it, and a fault of the watch ends the sample, not
the request. Owns Fidelity: which requests are looked at, what came out, and when to warn.

    error    ||answered - right|| / ||right|| of one layer, over heads, the tokens that were looked at, and the last
             few requests
    own      the same for what the layer's formats make of these very rows, with scales that fit them
    limit    fidelity_alert; or else FACTOR * own, and what arithmetic is allowed to differ by

A request is left out where part of it came from the prefix cache, as nobody kept those rows; where it is too long;
and while another one is looked at.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, sqrt
from statistics import fmean

import torch
from torch import Tensor

from nibble.engine.batch import ScheduledRequest
from nibble.engine.reference_rows import Asked, ReferenceRows
from nibble.engine.request import Request
from nibble.engine.sampled_tokens import to_host
from nibble.engine.selftest import ATTENDED, ATTENDED_16_BITS
from nibble.kernels.types import AttentionParams

log = logging.getLogger("nibble.fidelity")
LOOKS = 4
"""Tokens of a request that are compared: the last one of its prompt, then those of its answer."""
FACTOR = 2.0
"""An error that is twice what the format makes is a whole bit of the mantissa lost: so far are the two FP8 formats from
each other in docs/quality.md."""
FADING = 0.75
"""What a request's sums weigh against those of the next one: a layer's error is that of about four requests. Of single
ones it scatters as few roundings do, up to 1.9 times what the format makes on average."""
CALM = 0.75
"""An episode ends where all layers are below this part of their limits, so that one that fades away is one."""
REASONS = ("cached", "long", "busy", "ended", "failed")
"""Why a request that was drawn was not compared. ended: before its prompt was read."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was found of a layer; infinite where it is no number."""

    error: float
    own: float
    limit: float

    @property
    def is_over(self) -> bool:
        return self.error > self.limit or self.error == inf


@dataclass(eq=False, slots=True)
class _Sample:
    """A request that is looked at. sums: for each layer what ReferenceRows.compare() gives, added up. filled: tokens whose
    rows are kept. left: looks that are still to come. lost: why it cannot be finished."""

    request: Request
    layers: tuple[int, ...]
    sums: Tensor
    filled: int = 0
    left: int = LOOKS
    lost: str = ""

    @property
    def is_over(self) -> bool:
        return bool(self.lost) or not self.left or self.request.is_finished


class Probe:
    """One step of a sample: an attention/layer.py Watch. row: where its tokens begin in the step."""

    def __init__(self, kept: ReferenceRows, sample: _Sample, row: int, work: ScheduledRequest) -> None:
        self._kept, self._sample, self._row, self._work = kept, sample, row, work

    def observe(
        self, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], spec: AttentionParams, out_THD: Tensor
    ) -> None:
        sample, work = self._sample, self._work
        if sample.lost or layer not in sample.layers:
            return
        place, last = sample.layers.index(layer), self._row + work.num_tokens - 1
        try:
            rows = {name: x_THD[self._row : last + 1] for name, x_THD in streams.items()}
            self._kept.keep(place, layer, rows, work.start)
            if work.samples_token:
                topk_indices_K = None if spec.topk_indices_TK is None else spec.topk_indices_TK[last]
                asked = Asked(q_THD[last], spec, topk_indices_K)
                sample.sums[place] += self._kept.compare(place, layer, work.end, asked, out_THD[last])
        except Exception:  # whatever it is, the request must not suffer
            log.warning("the fidelity watch failed; this sample is lost", exc_info=True)
            sample.lost = "failed"


@dataclass(slots=True)
class _PendingSums:
    """Sums on their way to the host."""

    layers: tuple[int, ...]
    sums: Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, sample: _Sample) -> _PendingSums:
        found = cls(sample.layers, to_host(sample.sums), torch.cuda.Event() if sample.sums.is_cuda else None)
        if found.done:
            found.done.record()
        return found

    @property
    def is_here(self) -> bool:
        return self.done is None or self.done.query()


@dataclass
class ErrorMonitor:
    """The watch of one engine. rate: share of requests; alert: the limit, where it is not left to the formats.

    readings: by layer. samples: requests that were compared. alerting: whether a layer rose over its limit, and not all
    have come well below it since; alerts: how often that began.
    """

    rows: ReferenceRows
    rate: float
    alert: float | None = None
    seed: int = 0
    readings: dict[int, Reading] = field(default_factory=dict, init=False)
    samples: int = field(default=0, init=False)
    alerting: bool = field(default=False, init=False)
    alerts: int = field(default=0, init=False)
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0), init=False)
    _sample: _Sample | None = field(default=None, init=False)
    _coming: list[_PendingSums] = field(default_factory=list, init=False)
    _sums: dict[int, tuple[float, ...]] = field(default_factory=dict, init=False)
    _turns: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def probe(self, works: Sequence[ScheduledRequest]) -> Probe | None:
        """What a step of `works` is to be looked at with, if one of them belongs to a sample. Called for every step,
        before it is computed."""
        self._settle()
        row, found = 0, None
        for work in works:
            if _begins(work) and self._random.random() < self.rate:
                self._take(work)
            if self._sample and work.request is self._sample.request:
                found = self._go_on(self._sample, row, work)
            row += work.num_tokens
        return found

    def numbers(self) -> dict[str, float]:
        """How things stand, flat, as wire.Stats has it; of layers by `fidelity_error_LAYER`."""
        self._settle()
        found = {"samples": self.samples, "alerts": self.alerts, "alert": self.alerting}
        named = {f"fidelity_{name}": float(value) for name, value in found.items()}
        named |= {f"fidelity_skipped_{reason}": float(count) for reason, count in self.skipped.items()}
        for layer, reading in sorted(self.readings.items()):
            named |= {f"fidelity_{name}_{layer}": value for name, value in asdict(reading).items()}
        return named

    @property
    def summary(self) -> str:
        """What was found, in a line."""
        self._settle()
        if not self.readings:
            left_out = [f"{count} {reason}" for reason, count in self.skipped.items() if count]
            return f"fidelity: no request was compared ({', '.join(left_out) or 'none was drawn'})"
        worst = max(self.readings, key=lambda layer: self.readings[layer].error)
        error, own = (fmean(getattr(x, name) for x in self.readings.values()) for name in ("error", "own"))
        return (
            f"fidelity: attention off by {error:.2%} on average and {self.readings[worst].error:.2%} in layer {worst}, "
            f"its formats at best by {own:.2%}; requests compared: {self.samples}, alerts: {self.alerts}"
        )

    def limit(self, own: float) -> float:
        """The error from which to warn, where the formats make `own` at best."""
        return self.alert or FACTOR * own + ATTENDED.get(self.rows.dtype, ATTENDED_16_BITS)

    def _take(self, work: ScheduledRequest) -> None:
        """Begins with a request, if it can be looked at from its first token to its last look."""
        if work.start:
            self.skipped["cached"] += 1
        elif len(work.request.prompt_token_ids) + LOOKS > self.rows.tokens:
            self.skipped["long"] += 1
        elif self._sample:
            self.skipped["busy"] += 1
        else:
            layers = self.rows.turn(self._turns)
            self._turns += 1
            sums = torch.zeros(len(layers), 3, dtype=torch.float64, device=self.rows.device)
            self._sample = _Sample(work.request, layers, sums)

    def _go_on(self, sample: _Sample, row: int, work: ScheduledRequest) -> Probe | None:
        if work.start > sample.filled:  # found in the prefix cache since: these rows are not there
            sample.lost = "cached"
        if sample.is_over:
            return None
        sample.filled = max(sample.filled, work.end)
        sample.left -= work.samples_token
        return Probe(self.rows, sample, row, work)

    def _settle(self) -> None:
        """Ends a sample that is over, and reads what has come. Never waits."""
        sample = self._sample
        if sample and sample.is_over:
            self._sample = None
            if sample.lost or sample.left == LOOKS:
                self.skipped[sample.lost or "ended"] += 1
            else:
                self._coming.append(_PendingSums.of(sample))
        while self._coming and self._coming[0].is_here:
            coming = self._coming.pop(0)
            sums = dict(zip(coming.layers, coming.sums.tolist(), strict=True))
            if all(right for _, _, right in sums.values()):
                self._read(sums)
            else:  # the step that would have been looked at has failed
                self.skipped["failed"] += 1

    def _read(self, sums: Mapping[int, Sequence[float]]) -> None:
        self.samples += 1
        for layer, new in sums.items():
            old = self._sums.get(layer, (0.0, 0.0, 0.0))
            pooled = [FADING * x + y for x, y in zip(old, new, strict=True)]
            is_sound = all(map(isfinite, pooled))
            self._sums[layer] = tuple(pooled) if is_sound else (0.0, 0.0, 0.0)
            error, own = (sqrt(x / pooled[2]) if is_sound else inf for x in pooled[:2])
            self.readings[layer] = Reading(error, own, self.limit(own))
        if any(reading.is_over for reading in self.readings.values()):
            if not self.alerting:
                self.alerting, self.alerts = True, self.alerts + 1
                log.warning("%s", self._warning())
        elif self.alerting and all(x.error <= CALM * x.limit for x in self.readings.values()):
            self.alerting = False
            log.warning("fidelity: attention over the cache is within its limits again")

    def _warning(self) -> str:
        over = [layer for layer, reading in self.readings.items() if reading.is_over]
        worst = max(over, key=lambda layer: self.readings[layer].error)
        found = self.readings[worst]
        return (
            f"fidelity: attention over the cache is off by {found.error:.1%} of its norm in layer {worst} "
            f"({self.rows.schemes[worst]}), where {found.limit:.1%} is allowed and the format itself makes "
            f"{found.own:.1%} of the same rows; "
            + (
                "the format is too small for this model: choose another --kv-format"
                if found.error <= FACTOR * found.own < inf
                else "KV scales may not fit (--kv-scales), or a kernel or memory is at fault (--attention-backend)"
            )
        )


def _begins(work: ScheduledRequest) -> bool:
    """Whether this is the very first work of its request: what preempted ones compute again is none."""
    return work.start == work.request.num_prefix_hit_tokens and not work.request.num_preemptions
