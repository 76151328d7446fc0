"""The error monitor: how far off the quantised cache is, for queries of the requests that are served.

Of a share of requests, one at a time, the K and V rows of a few layers are kept in the model's own precision, from the
first token on. What the cache answered to the last token of the prompt, and to the first ones of the answer, is then
compared with attention over those rows. Nothing that is served depends on it: a fault of the monitor ends the sample,
not the request.

A request is left out where part of it came from the prefix cache, because its rows were never seen; where it is too
long; and while another one is sampled.

Shape suffixes: L stored tokens of the request, n new ones, H query heads, G KV heads, R query heads of a KV head, K
selected tokens, D values of a head.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, prod, sqrt
from statistics import fmean

import torch
from torch import Tensor

from nibble.attention.planner.plan import Plan
from nibble.engine.request import Request, ScheduledRequest
from nibble.formats import KVFormat
from nibble.formats import transforms as transform
from nibble.kernels.linear import rotate
from nibble.kernels.types import AttentionParams
from nibble.model_spec import INDEX, LATENT, LayerGroup

log = logging.getLogger("nibble.fidelity")
NUM_PROBES = 4
"""Tokens of a request that are compared: the last one of its prompt, then those of its answer."""
FACTOR = 2.0
"""Times the format's own error from which to warn. Twice is a whole bit of the mantissa lost: so far are the two FP8
formats from each other in docs/quality.md."""
DECAY = 0.75
"""Weight of a request's sums against those of the next one: a layer's error is that of about four requests. Errors of
single ones scatter as few roundings do, up to 1.9 times what the format makes on average."""
RECOVERY = 0.75
"""An episode ends where all layers are below this part of their limits, so that one that fades away is one."""
REASONS = ("cached", "long", "busy", "ended", "failed")
"""Why a request that was drawn was not compared. ended: before its prompt was read."""

MAX_LAYERS = 4
"""Layers of which rows are kept at a time."""
MAX_TOKENS = 4096
"""Tokens of the longest request that is kept, where its rows fit into MAX_BYTES."""
MAX_BYTES = 64 << 20
"""Bound on the rows of all kept layers together."""
ATTENTION_TOLERANCE = {"float32": 0.005}
"""Largest deviation of attention's output, norm over norm; tf32 is allowed."""
ATTENTION_TOLERANCE_16_BITS = 0.03
"""The same in 16 bits, where probabilities may be rounded too."""
MIN_AMAX = 1e-30
"""A largest value below this needs no scale."""

Rows = Mapping[str, Tensor]
"""Streams by name: [L, G, D]."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query: of the last stored token."""

    q_HD: Tensor
    params: AttentionParams
    topk_indices_K: Tensor | None = None
    """The tokens that sparse attention looks at."""


class ReferenceRows:
    """Rows of some layers in the model's own precision, in memory that is allocated once.

    The arithmetic here is no backend's: it knows neither pages nor kernels, so it cannot share a fault with them.

    Args:
        plan: layers, formats and transforms.
        max_tokens: of the longest request.
        device: where rows are kept.
    """

    def __init__(self, plan: Plan, max_tokens: int, device: torch.device) -> None:
        self._groups = {layer: group.group for group in plan.groups for layer in group.layers}
        # The owner of a layer's KV stores it: on the device, and with a host tier in a second layout.
        self._layouts = {
            layer: tuple(entry for store in plan.stores for entry in store.layers if entry.layer == owner)
            for layer, owner in enumerate(plan.owner)
        }
        self.schemes = {layer: group.scheme for group in plan.groups for layer in group.layers}
        self.num_unwatched = sum(len(group.layers) for group in plan.states)
        """Layers that keep a recurrent state, which is compared with nothing."""
        self.dtype = plan.dtype
        num_layers, dtype = min(MAX_LAYERS, len(self._groups)), getattr(torch, plan.dtype)
        widest = max(sum(prod(shape) for shape in _shapes(group).values()) for group in self._groups.values())
        self.tokens = min(MAX_TOKENS, max_tokens, MAX_BYTES // (num_layers * widest * dtype.itemsize))
        """Tokens of the longest request that fits."""
        # The layers of a turn change, and with them the shapes: each place is as large as the widest needs.
        self._memory = torch.empty(num_layers, self.tokens * widest, dtype=dtype, device=device)
        self.device = self._memory.device

    def turn(self, number: int) -> tuple[int, ...]:
        """Return the layers whose turn it is: after a few turns all of them have had one."""
        layers, count = sorted(self._groups), len(self._memory)
        return tuple(layers[(number * count + i) % len(layers)] for i in range(count))

    def store(self, place: int, layer: int, streams: Rows, start: int) -> None:
        """Store rows of new tokens.

        Args:
            place: of the layer among those of this turn.
            layer: whose rows these are.
            streams: [n, G, D] by name.
            start: position of the first token.
        """
        for name, rows in self._rows(place, layer).items():
            rows[start : start + len(streams[name])] = streams[name]

    def compare(self, place: int, layer: int, end: int, query: Query, out_HD: Tensor) -> Tensor:
        """Compare what attention answered to a query with what the rows say.

        Args:
            place: of the layer among those of this turn.
            layer: whose rows are read.
            end: tokens that are stored; the query is of the last of them.
            query: of the last token.
            out_HD: what was answered.

        Returns:
            float64 [3], squares of norms: of the error; of the error that the layer's formats make of these rows at
            best; and of the right answer.
        """
        chunk = self._groups[layer].chunk
        first = (end - 1) // chunk * chunk if chunk else 0
        rows = {name: rows[first:end] for name, rows in self._rows(place, layer).items()}
        rope = self._groups[layer].streams[0].rope
        expected_HD = _attend(query, rows, rope)
        quantised_HD = _attend(*self._quantise(layer, query, rows), rope)
        # Squares of norms can be added up over tokens and requests; norms and ratios cannot.
        parts = (out_HD.float() - expected_HD, quantised_HD - expected_HD, expected_HD)
        return torch.stack([part.double().square().sum() for part in parts])

    def _quantise(self, layer: int, query: Query, rows: Rows) -> tuple[Query, Rows]:
        """Return the rows as the layer's formats give them back, and the query that goes with them.

        The scales are made for these very rows. With a host tier all rows are taken to have been on the host, whose
        format may be a smaller one.
        """
        layouts = self._layouts[layer]
        # No mean is subtracted from keys. It is there to make the error smaller, so the error without it is a bound
        # that a wrong mean does not move.
        transforms = [entry for entry in map(transform.get, layouts[0].transforms) if not entry.needs_mean]
        result = {name: x_LGD.float() for name, x_LGD in rows.items()}
        for entry in transforms:
            result["k"] = entry.key(result["k"], None)
        for layout in layouts:
            codecs = {entry.stream.name: entry.codec for entry in layout.streams}
            result = {name: _round_trip(codecs[name], x_LGD) for name, x_LGD in result.items()}
        # Scores are the same where query and keys are rotated alike.
        if any(entry.rotates for entry in transforms):
            query = replace(query, q_HD=rotate(query.q_HD[None])[0])
        return query, result

    def _rows(self, place: int, layer: int) -> dict[str, Tensor]:
        """Return the memory of a layer, stream by stream."""
        rows, first = dict[str, Tensor](), 0
        for name, shape in _shapes(self._groups[layer]).items():
            last = first + self.tokens * prod(shape)
            rows[name] = self._memory[place, first:last].view(self.tokens, *shape)
            first = last
        return rows


def _shapes(group: LayerGroup) -> dict[str, tuple[int, int]]:
    """Return what attention reads of a token, by stream. Index keys are an indexer's."""
    return {stream.name: (stream.heads, stream.dim) for stream in group.streams if stream.name != INDEX}


def _round_trip(codec: KVFormat, x_LGD: Tensor) -> Tensor:
    """Encode and decode, with a scale that fits."""
    scale = torch.ones((), device=x_LGD.device)
    if codec.max_value is not None:
        scale = x_LGD.abs().amax().clamp(min=MIN_AMAX) / codec.max_value
    return codec.decode(codec.encode(x_LGD, scale), scale)


def _attend(query: Query, rows: Rows, rope: int) -> Tensor:
    """Return softmax(scale * q . k) @ v -> float32 [H, D]."""
    params, topk_indices_K = query.params, query.topk_indices_K
    k_LGD = rows[LATENT] if LATENT in rows else rows["k"]
    # A latent is key and value in one; its rotary part belongs to the key alone.
    v_LGD = k_LGD[..., : k_LGD.shape[-1] - rope] if LATENT in rows else rows["v"]
    is_padding_K: Tensor | None = None
    if topk_indices_K is not None:
        # As kernels/indexer/__init__.py gives them: positions, negative ones for padding.
        k_LGD, v_LGD = (x[topk_indices_K.clamp(min=0).long()] for x in (k_LGD, v_LGD))
        is_padding_K = topk_indices_K < 0
    elif params.window is not None:
        # The query is of the last token, so its window is the last rows.
        k_LGD, v_LGD = k_LGD[-params.window :], v_LGD[-params.window :]
    length, heads, _ = k_LGD.shape
    q_GRD = query.q_HD.float().unflatten(0, (heads, -1))
    scores_GRL = q_GRD @ k_LGD.float().permute(1, 2, 0) * params.scale
    if params.softcap:
        scores_GRL = params.softcap * torch.tanh(scores_GRL / params.softcap)
    if is_padding_K is not None:
        scores_GRL = scores_GRL.masked_fill(is_padding_K, float("-inf"))
    if params.sinks_H is not None:
        # A sink takes weight and has no value: its column is cut off after the softmax.
        scores_GRL = torch.cat((scores_GRL, params.sinks_H.float().view(heads, -1, 1)), -1)
    weights_GRL = scores_GRL.softmax(-1)[..., :length]
    return (weights_GRL @ v_LGD.float().transpose(0, 1)).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured of a layer, over heads, compared tokens and the last few requests."""

    error: float
    """Norm of the error over the norm of the right answer; infinite where it is not a number."""
    format_error: float
    """The same for what the layer's formats make of these very rows, with scales that fit them."""
    limit: float
    """The error from which to warn."""

    @property
    def is_over(self) -> bool:
        """Return whether the error is above its limit."""
        return self.error > self.limit or self.error == inf


@dataclass(eq=False, slots=True)
class _Sample:
    """A request that is being compared."""

    request: Request
    layers: tuple[int, ...]
    sums: Tensor
    """For each layer what ReferenceRows.compare() gives, added up."""
    num_stored: int = 0
    """Tokens whose rows are stored."""
    num_probes_left: int = NUM_PROBES
    failure: str = ""
    """Why it cannot be finished: one of REASONS."""

    @property
    def is_over(self) -> bool:
        return bool(self.failure) or not self.num_probes_left or self.request.is_finished


class Probe:
    """One step of a sample: an AttentionObserver (attention/observer.py).

    Args:
        rows: where rows are stored.
        sample: the request.
        first_row: where its tokens begin in the step.
        item: what the step computes of it.
    """

    def __init__(self, rows: ReferenceRows, sample: _Sample, first_row: int, item: ScheduledRequest) -> None:
        self._rows, self._sample, self._first_row, self._item = rows, sample, first_row, item

    def observe(
        self, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], spec: AttentionParams, out_THD: Tensor
    ) -> None:
        """Store a layer's new rows, and compare the answer to the last query where a token is sampled.

        Args:
            layer: the layer's index.
            q_THD: its query, of the whole step.
            streams: its new tokens, of the whole step.
            spec: what it asked for.
            out_THD: what attention returned.
        """
        sample, item = self._sample, self._item
        if sample.failure or layer not in sample.layers:
            return
        place, last = sample.layers.index(layer), self._first_row + item.num_tokens - 1
        try:
            rows = {name: x_THD[self._first_row : last + 1] for name, x_THD in streams.items()}
            self._rows.store(place, layer, rows, item.start)
            if item.samples_token:
                topk_indices_K = None if spec.topk_indices_TK is None else spec.topk_indices_TK[last]
                query = Query(q_THD[last], spec, topk_indices_K)
                # The sums stay on the device, because to read them here would make every step wait.
                sample.sums[place] += self._rows.compare(place, layer, item.end, query, out_THD[last])
        except Exception:  # whatever it is, the request must not suffer
            log.warning("the fidelity watch failed; this sample is lost", exc_info=True)
            sample.failure = "failed"


@dataclass
class ErrorMonitor:
    """The error monitor of one engine: which requests are sampled, what was measured, and when to warn."""

    rows: ReferenceRows
    rate: float
    """Share of requests that are sampled."""
    alert: float | None = None
    """The limit of all layers; None: left to their formats."""
    seed: int = 0
    readings: dict[int, Reading] = field(default_factory=dict, init=False)
    """By layer."""
    samples: int = field(default=0, init=False)
    """Requests that were compared."""
    alerting: bool = field(default=False, init=False)
    """Whether a layer rose over its limit, and not all have come well below theirs since."""
    alerts: int = field(default=0, init=False)
    """How often that began."""
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0), init=False)
    """Requests that were drawn and not compared, by reason."""
    _sample: _Sample | None = field(default=None, init=False)
    _pending: list[tuple[tuple[int, ...], Tensor, torch.cuda.Event | None]] = field(
        default_factory=list, init=False
    )
    """Of samples that are over: layers, sums on their way to the host, and what passes once they are there."""
    _sums: dict[int, tuple[float, ...]] = field(default_factory=dict, init=False)
    _num_turns: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # A generator of its own: the same seed draws the same requests, whatever else uses random numbers.
        self._random = random.Random(self.seed)

    @property
    def is_sampling(self) -> bool:
        """Return whether a request is being looked at."""
        return self._sample is not None

    def probe(self, scheduled: Sequence[ScheduledRequest]) -> Probe | None:
        """Return the observer of a step, if it computes tokens of a sample. Call it before every step."""
        self._collect()
        row, probe = 0, None
        for item in scheduled:
            # The very first work of a request, not what a preempted one computes again.
            is_first = item.start == item.request.num_prefix_hit_tokens and not item.request.num_preemptions
            if is_first and self._random.random() < self.rate:
                self._start_sample(item)
            sample = self._sample
            if sample and item.request is sample.request:
                # The request has skipped tokens that the prefix cache had, so their rows are not here.
                if item.start > sample.num_stored:
                    sample.failure = "cached"
                if not sample.is_over:
                    sample.num_stored = max(sample.num_stored, item.end)
                    sample.num_probes_left -= item.samples_token
                    probe = Probe(self.rows, sample, row, item)
            row += item.num_tokens
        return probe

    def numbers(self) -> dict[str, float]:
        """Return the current counts and readings, flat, as the server's statistics have them."""
        self._collect()
        counts = {"samples": self.samples, "alerts": self.alerts, "alert": self.alerting}
        result = {f"fidelity_{name}": float(value) for name, value in counts.items()}
        if self.rows.num_unwatched:
            result["fidelity_uncovered_layers"] = float(self.rows.num_unwatched)
        result |= {f"fidelity_skipped_{reason}": float(count) for reason, count in self.skipped.items()}
        for layer, reading in sorted(self.readings.items()):
            result[f"fidelity_error_{layer}"] = reading.error
            result[f"fidelity_own_{layer}"] = reading.format_error
            result[f"fidelity_limit_{layer}"] = reading.limit
        return result

    @property
    def summary(self) -> str:
        """Return what was measured, in a line."""
        self._collect()
        if not self.readings:
            reasons = [f"{count} {reason}" for reason, count in self.skipped.items() if count]
            return f"fidelity: no request was compared ({', '.join(reasons) or 'none was drawn'})"
        worst = max(self.readings, key=lambda layer: self.readings[layer].error)
        error = fmean(reading.error for reading in self.readings.values())
        format_error = fmean(reading.format_error for reading in self.readings.values())
        unwatched = self.rows.num_unwatched
        rest = f"; the recurrent states of {unwatched} layers are not compared" if unwatched else ""
        return (
            f"fidelity: attention off by {error:.2%} on average and {self.readings[worst].error:.2%} in layer {worst}, "
            f"its formats at best by {format_error:.2%}; requests compared: {self.samples}, alerts: {self.alerts}{rest}"
        )

    def limit(self, format_error: float) -> float:
        """Return the error from which to warn, where the formats make `format_error` at best."""
        arithmetic = ATTENTION_TOLERANCE.get(self.rows.dtype, ATTENTION_TOLERANCE_16_BITS)
        return self.alert or FACTOR * format_error + arithmetic

    def _start_sample(self, item: ScheduledRequest) -> None:
        """Begin with a request, if it can be followed from its first token to its last probe."""
        if item.start:
            self.skipped["cached"] += 1
        elif len(item.request.prompt_token_ids) + NUM_PROBES > self.rows.tokens:
            self.skipped["long"] += 1
        elif self._sample:
            self.skipped["busy"] += 1
        else:
            layers = self.rows.turn(self._num_turns)
            self._num_turns += 1
            sums = torch.zeros(len(layers), 3, dtype=torch.float64, device=self.rows.device)
            self._sample = _Sample(item.request, layers, sums)

    def _collect(self) -> None:
        """End a sample that is over, and read sums that are on the host. Never waits."""
        sample = self._sample
        if sample and sample.is_over:
            self._sample = None
            # With all probes left nothing was compared: the request ended before its prompt was read.
            if sample.failure or sample.num_probes_left == NUM_PROBES:
                self.skipped[sample.failure or "ended"] += 1
            else:
                # The device goes on meanwhile: the copy on the host is complete once the event has passed.
                done = torch.cuda.Event() if sample.sums.is_cuda else None
                sums = sample.sums.to("cpu", non_blocking=True)
                if done:
                    done.record()
                self._pending.append((sample.layers, sums, done))
        # Copies complete in the order in which they began.
        while self._pending:
            layers, sums, done = self._pending[0]
            if done and not done.query():
                return
            del self._pending[0]
            by_layer = dict(zip(layers, sums.tolist(), strict=True))
            if all(expected for _, _, expected in by_layer.values()):
                self._read(by_layer)
            else:  # the step that was to be compared has failed
                self.skipped["failed"] += 1

    def _read(self, sums: Mapping[int, Sequence[float]]) -> None:
        """Add a request's sums to those of its layers, and warn where a limit is passed."""
        self.samples += 1
        for layer, new in sums.items():
            old = self._sums.get(layer, (0.0, 0.0, 0.0))
            pooled = [DECAY * x + y for x, y in zip(old, new, strict=True)]
            # A NaN would stay in the sums for ever, so they begin anew after one.
            is_finite = all(map(isfinite, pooled))
            self._sums[layer] = tuple(pooled) if is_finite else (0.0, 0.0, 0.0)
            error, format_error = (sqrt(x / pooled[2]) if is_finite else inf for x in pooled[:2])
            self.readings[layer] = Reading(error, format_error, self.limit(format_error))
        if any(reading.is_over for reading in self.readings.values()):
            if not self.alerting:
                self.alerting, self.alerts = True, self.alerts + 1
                log.warning("%s", self._warning())
        elif self.alerting and all(x.error <= RECOVERY * x.limit for x in self.readings.values()):
            self.alerting = False
            log.warning("fidelity: attention over the cache is within its limits again")

    def _warning(self) -> str:
        over = [layer for layer, reading in self.readings.items() if reading.is_over]
        worst = max(over, key=lambda layer: self.readings[layer].error)
        reading = self.readings[worst]
        return (
            f"fidelity: attention over the cache is off by {reading.error:.1%} of its norm in layer {worst} "
            f"({self.rows.schemes[worst]}), where {reading.limit:.1%} is allowed and the format itself makes "
            f"{reading.format_error:.1%} of the same rows; "
            + (
                "the format is too small for this model: choose another --kv-format"
                if reading.error <= FACTOR * reading.format_error < inf
                else "KV scales may not fit (--kv-scales), or a kernel or memory is at fault (--attention-backend)"
            )
        )
