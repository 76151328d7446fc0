"""Choose a format for each layer by measurement: what each candidate costs one layer, and the best that a budget buys.

    candidates    what may store a stream: formats, for K under transforms; only pairs that have a route on the GPU
    measure       for each layer and stream: the forward KL that a candidate causes there, all else unquantised
    wholes        the KL of one assignment with each exact window, over the sum of its parts: the factor of a window
    choose        the assignment and window with the least KL within a budget of bytes, or the fewest bytes within a KL

The model computes a text once over an unquantised cache and then once for each layer and candidate, teacher-forced,
with Nibble's own attention over true pages: in that layer over the candidate's, elsewhere over unquantised ones. The KL
is KL(unquantised || candidate), the mean over tokens, in nats. K and V are measured apart. That KLs add up is a model,
and so is that a window multiplies all of them alike; run.py measures the assignment as a whole, on other text.

Index keys of sparse attention come in one format with every quantised scheme, so they are no part of the budget, and
what they cost in quality is part of each candidate's KL.

Shape suffixes: T tokens of a window, S scored tokens, V vocabulary, H query heads, D values of a head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor, nn

from nibble import formats
from nibble.attention.planner import window_memory
from nibble.attention.planner.options import ROUTED
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import BackendInfo
from nibble.attention.step import StepContext
from nibble.cache import scales as kv_scales
from nibble.cache.scales import KVScales
from nibble.config import Config
from nibble.errors import ConfigError, ScaleError
from nibble.evals.perplexity import Prediction, Window, observed_logits, prompt_context
from nibble.evals.solver import Choice, Option, frontier, least_cost, least_loss
from nibble.formats import scheme as schemes
from nibble.formats import transforms as transforms_of
from nibble.formats.scheme import Scheme
from nibble.hardware import Hardware
from nibble.kernels import cdiv
from nibble.model_spec import LayerGroup, ModelSpec, Stream
from nibble.models import hook
from nibble.models.recurrent import RecurrentCall
from nibble.spec import CacheSpec, LayerRule


@dataclass(frozen=True, slots=True)
class Target:
    """Where a model is to be served."""

    config: Config
    model_spec: ModelSpec
    hardware: Hardware
    backends: Mapping[str, BackendInfo]
    window: int | None = 0
    """Tokens of the exact window; None: what is the default of the schemes that are planned."""

    @property
    def plain(self) -> str:
        """Return the format that stores the compute dtype unchanged."""
        return formats.plain(CacheSpec.from_config(self.config).compute_dtype(self.hardware)).name

    def plan(self, stored: Mapping[int, Scheme]) -> Plan:
        """Return the plan with some layers in the schemes `stored`, the others unquantised; raise ConfigError."""
        layers: dict[Scheme, list[int]] = {}
        for layer, scheme in stored.items():
            layers.setdefault(scheme, []).append(layer)
        config = replace(
            self.config,
            kv_format=self.plain,
            kv_layers=";".join(LayerRule.of(entry, scheme).text for scheme, entry in layers.items()),
            # Schemes here say all of it themselves.
            kv_encoder=schemes.AUTO,
            kv_transforms=schemes.AUTO,
            kv_window=self.window,
            kv_sinks=0 if self.window == 0 else self.config.kv_sinks,
            hisparse="",
        )
        return resolve(config, self.model_spec, self.hardware, self.backends)

    def owners(self, group: LayerGroup) -> tuple[int, ...]:
        """Return the layers of `group` that have pages of their own."""
        return tuple(layer for layer in group.layers if self.model_spec.owner[layer] == layer)

    def refuses(self, stored: Mapping[int, Scheme]) -> str | None:
        """Return why layers cannot be served in the schemes `stored`, by a kernel where there is a GPU; None if so."""
        try:
            plan = self.plan(stored)
        except ConfigError as error:
            return str(error).splitlines()[0]
        groups = [group for group in plan.groups if not stored.keys().isdisjoint(group.layers)]
        for route in (
            () if self.hardware.is_cpu else itertools.chain(*(x.routes + x.near_routes for x in groups))
        ):
            explicit = self.config.backend_for(route.phase.decodes)
            if route.phase in ROUTED and route.row.gathers and route.backend != explicit:
                where = f"{route.phase} on {self.hardware}"
                return f"no kernel reads it for {where}, only {route.backend}, which gathers pages"
        return None


# Candidates


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to store one stream of the layers of a group."""

    group: LayerGroup
    stream: Stream
    format: str
    transforms: tuple[str, ...] = ()
    encoder: str = schemes.AUTO

    @property
    def name(self) -> str:
        """Return the format with its encoder and transforms."""
        encoder = () if self.encoder == schemes.AUTO else (self.encoder,)
        return "+".join(("_".join((self.format, *encoder)), *self.transforms))

    def scheme(self, plain: str) -> Scheme:
        """Return the scheme that stores the stream so, and others unquantised in the format `plain`."""
        streams = {stream.name: plain for stream in stored_streams(self.group)}
        return schemes.compose(streams | {self.stream.name: self.format}, self.transforms, self.encoder)


def stored_streams(group: LayerGroup) -> tuple[Stream, ...]:
    """Return the streams of a group whose format is a choice: all but index keys."""
    return tuple(stream for stream in group.streams if stream.name not in schemes.COMPANIONS)


def candidates(group: LayerGroup, tried: Iterable[Scheme]) -> Iterator[Candidate]:
    """Yield what may store the streams of a group.

    Args:
        group: The layers.
        tried: Formats with encoders, as schemes; those that cannot store a stream are left out for it.
    """
    for stream in stored_streams(group):
        for scheme in tried:
            if not scheme.refuses(stream):
                for transforms in _transforms(group, stream, scheme.base):
                    yield Candidate(group, stream, scheme.base, transforms, scheme.encoder)


def _transforms(group: LayerGroup, stream: Stream, name: str) -> list[tuple[str, ...]]:
    """Return the sets of transforms to try: none, rotations alone, and all that the group can have."""
    if stream.name != "k" or formats.get(name).plain:
        return [()]
    usable = [transforms_of.get(entry) for entry in transforms_of.names()]
    usable = [entry for entry in usable if not entry.refuses(group)]
    every, rotations = (
        tuple(entry.name for entry in usable),
        tuple(entry.name for entry in usable if entry.rotates),
    )
    return list(dict.fromkeys(((), rotations, every)))


# Measuring


Progress = Callable[[str, int, int], None]
"""Takes what is measured, how many passes are done, and how many there are."""
Key = tuple[int, Candidate]
"""A layer and what is tried there."""


@dataclass
class _Trial(hook.Observer):
    """Attends over unquantised pages, and in one layer over a candidate's."""

    exact: StepContext
    candidate: StepContext | None = None
    layer: int = -1
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """Of layers before `layer`: what they return over unquantised pages, from a run without a candidate."""
    reached: bool = False

    def observe(self, call: hook.Call) -> Tensor:
        """Return a layer's output [1, T, H, D]."""
        owner = self.exact.plan.owner[call.layer]
        self.reached |= owner == self.layer
        if self.candidate is not None and owner == self.layer:
            return hook.attend(self.candidate, call)[None]
        if not self.reached and call.layer in self.outputs:
            return self.outputs[call.layer]
        output = hook.attend(self.exact, call)[None]
        if self.candidate is None:
            self.outputs[call.layer] = output
        return output

    def observe_recurrent(self, call: RecurrentCall) -> Tensor:
        """Return what states answer, which no candidate is about."""
        return hook.keep_state(self.exact, call)


@dataclass(frozen=True)
class Measurement:
    """What is measured with: a model, with Nibble's attention, on this machine."""

    model: nn.Module
    target: Target
    """This machine, as serving on it is planned."""
    scales_of: Callable[[Plan], KVScales]

    @cached_property
    def exact(self) -> Plan:
        """The plan of an unquantised cache."""
        return self.target.plan({})

    def plan(self, candidate: Candidate) -> Plan:
        """Return the plan with a candidate in all layers of its group; raise ConfigError."""
        return self.target.plan(
            dict.fromkeys(self.target.owners(candidate.group), candidate.scheme(self.target.plain))
        )

    def without_scales(self, trials: Iterable[Candidate]) -> dict[Candidate, str]:
        """Return the candidates whose KV scales are not there, with the reason: `one` and files may have no means."""
        reasons = {}
        for trial in trials:
            plan = self.plan(trial)
            try:
                kv_scales.require(plan.layout, self.scales_of(plan))
            except ScaleError as error:
                reasons[trial] = str(error)
        return reasons

    def losses(
        self, trials: Sequence[Candidate], windows: Sequence[Window], progress: Progress | None = None
    ) -> dict[Key, float]:
        """Return the mean KL in nats that each candidate causes in each layer of its group alone.

        Args:
            trials: The candidates.
            windows: The text.
            progress: Is called before each pass.
        """
        keys = [(layer, trial) for trial in trials for layer in self.target.owners(trial.group)]
        nats, done = dict.fromkeys(keys, 0.0), 0
        for window in windows:
            device = next(self.model.parameters()).device
            exact = prompt_context(self.exact, self.scales_of(self.exact), len(window.ids), device)
            reference = _Trial(exact)
            prediction = Prediction.of(self._rows(window, reference))
            # Layers that read another's pages find there what the run before has left, unless all is computed again.
            outputs = reference.outputs if self._owns_all else {}
            for trial in trials:
                plan = self.plan(trial)
                context = prompt_context(plan, self.scales_of(plan), len(window.ids), device)
                for layer in self.target.owners(trial.group):
                    if progress:
                        progress(
                            f"layer {layer}: {trial.stream.name} in {trial.name}",
                            done,
                            len(keys) * len(windows),
                        )
                    observer = _Trial(_fresh(exact), _fresh(context), layer, outputs)
                    rows_SV = self._rows(window, observer)
                    nats[layer, trial] += float(prediction.kl(rows_SV).double().sum())
                    done += 1
        scored = sum(window.scored for window in windows)
        return {key: value / scored for key, value in nats.items()}

    def wholes(
        self, plans: Sequence[Plan], windows: Sequence[Window], progress: Progress | None = None
    ) -> tuple[float, ...]:
        """Return the mean KL in nats of the cache of each plan.

        Args:
            plans: What is stored how.
            windows: The text.
            progress: Is called before each pass.
        """
        nats = [0.0] * len(plans)
        for at, window in enumerate(windows):
            device = next(self.model.parameters()).device
            exact = prompt_context(self.exact, self.scales_of(self.exact), len(window.ids), device)
            prediction = Prediction.of(self._rows(window, _Trial(exact)))
            for index, plan in enumerate(plans):
                if progress:
                    what = f"an exact window of {plan.window} tokens"
                    progress(what, at * len(plans) + index, len(plans) * len(windows))
                context = prompt_context(plan, self.scales_of(plan), len(window.ids), device)
                nats[index] += float(prediction.kl(self._rows(window, context)).double().sum())
        return tuple(entry / sum(window.scored for window in windows) for entry in nats)

    @property
    def _owns_all(self) -> bool:
        return all(layer == owner for layer, owner in enumerate(self.target.model_spec.owner))

    def _rows(self, window: Window, observer: hook.Observer | StepContext) -> Tensor:
        return window.predictions(observed_logits(self.model, window.ids, observer))


def _fresh(context: StepContext) -> StepContext:
    """Return the context of another step over the same pages."""
    return replace(context, pending={})


# Choosing


@dataclass(frozen=True, slots=True)
class WindowOption:
    """A length of the exact window: what it costs a request, and what it does to the KL."""

    tokens: int
    exact_bytes: int = 0
    """Of the exact pages of a running request."""
    request: int = 1
    """Tokens of that request."""
    stored: int = 1
    """The same in whole pages."""
    factor: float = 1.0
    """The KL of an assignment with it, over the sum of KLs of single layers."""

    def spread(self, bytes_per_token: float) -> float:
        """Return the bytes of the request over its tokens, where its pages have `bytes_per_token`."""
        return (bytes_per_token * self.stored + self.exact_bytes) / self.request

    def rest(self, bytes_per_token: float) -> float:
        """Return what is left to a token in pages, where the request may have `bytes_per_token` in all."""
        return (bytes_per_token * self.request - self.exact_bytes) / self.stored

    def sum_within(self, most: float) -> float:
        """Return the largest sum of KLs of single layers with which the KL is at most `most`."""
        return most / self.factor if self.factor else math.inf

    @classmethod
    def of(cls, plan: Plan, request: int) -> WindowOption:
        """Return the window of a plan, for a request of so many tokens."""
        exact = window_memory.window_bytes(plan)
        return cls(plan.window, exact, request, cdiv(request, plan.page_size) * plan.page_size)


NO_WINDOW = WindowOption(0)


@dataclass(frozen=True, slots=True)
class Assigned:
    """What is chosen for a layer."""

    scheme: Scheme
    bytes_per_token: int
    """Of the streams whose format is a choice; see cost_of()."""
    losses: Mapping[str, float]
    """KL by stream."""

    @property
    def loss(self) -> float:
        """Return the sum over streams."""
        return sum(self.losses.values())


@dataclass(frozen=True, slots=True)
class Assignment:
    """What is chosen for all layers with pages of their own."""

    layers: Mapping[int, Assigned]
    values: int
    """Values of a token, over all layers."""
    window: WindowOption
    """The exact window."""

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token in all layers."""
        return sum(entry.bytes_per_token for entry in self.layers.values())

    @property
    def bits(self) -> float:
        """Return bits of a cached value, scales included."""
        return 8 * self.bytes_per_token / self.values

    @property
    def bytes_with_window(self) -> float:
        """Return the bytes of a request over its tokens, exact pages included."""
        return self.window.spread(self.bytes_per_token)

    @property
    def loss(self) -> float:
        """Return the KL that is predicted: the sum over layers and streams, by the factor of the window."""
        return self.window.factor * sum(entry.loss for entry in self.layers.values())

    @property
    def schemes(self) -> dict[int, Scheme]:
        """Return the scheme of each layer."""
        return {layer: entry.scheme for layer, entry in self.layers.items()}


def cost_of(group: LayerGroup, scheme: Scheme) -> int:
    """Return the bytes of a token of the streams whose format is a choice.

    Index keys count for what they take more in this scheme than in the format that comes with quantised ones.
    """
    usual = sum(formats.get(schemes.COMPANIONS[x.name]).bytes_per_token(x) for x in _index_keys(group))
    return sum(scheme.format_of(stream).bytes_per_token(stream) for stream in group.streams) - usual


def _index_keys(group: LayerGroup) -> list[Stream]:
    return [stream for stream in group.streams if stream.name in schemes.COMPANIONS]


@dataclass(frozen=True)
class Search:
    """What was measured, and what of it may be served."""

    target: Target
    """Where the model is to be served."""
    losses: Mapping[Key, float]
    skipped: dict[str, str] = field(default_factory=dict)
    """Schemes that cannot be served, with the reason; filled by `options`."""

    @cached_property
    def parts(self) -> dict[int, list[Assigned]]:
        """What may be chosen for each layer with pages of its own; raises ConfigError where there is nothing."""
        parts = {
            layer: list(self._options(group, layer))
            for group in self.target.model_spec.groups
            for layer in self.target.owners(group)
        }
        for layer, options in parts.items():
            if not options:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
                raise ConfigError(f"layer {layer} cannot be served in any candidate: {reasons}")
        return dict(sorted(parts.items()))

    @cached_property
    def front(self) -> tuple[Choice, ...]:
        """The choices of which none is better in both bytes and KL."""
        return frontier(
            [
                [Option(entry.bytes_per_token, entry.loss) for entry in options]
                for options in self.parts.values()
            ]
        )

    @property
    def values(self) -> int:
        """Values of a token, over all layers, of streams whose format is a choice."""
        return sum(
            stream.values * len(self.target.owners(group))
            for group in self.target.model_spec.groups
            for stream in stored_streams(group)
        )

    def within_bits(self, bits: float, windows: Sequence[WindowOption] = (NO_WINDOW,)) -> Assignment:
        """Return the assignment with the least KL of at most `bits` a value; raise ConfigError where all have more.

        Args:
            bits: Of a request's values, its exact pages included.
            windows: The exact windows to choose from.
        """
        most = bits * self.values / 8
        fitting = [(window, least_loss(self.front, window.rest(most))) for window in windows]
        within = [self._assignment(choice, window) for window, choice in fitting if choice]
        if not within:
            least = min(8 * window.spread(self.front[0].cost) / self.values for window in windows)
            raise ConfigError(
                f"a budget of {bits:g} bits is too small: the smallest cache of these candidates takes {least:.3f} "
                f"bits a value, scales included; use --budget {math.ceil(1000 * least) / 1000:.3f}bits"
            )
        return min(within, key=lambda entry: (entry.loss, entry.bytes_with_window))

    def within_kl(self, most: float, windows: Sequence[WindowOption] = (NO_WINDOW,)) -> Assignment:
        """Return the smallest assignment whose predicted KL is at most `most`; raise ConfigError if none has.

        Args:
            most: KL in nats.
            windows: The exact windows to choose from.
        """
        fitting = [(window, least_cost(self.front, window.sum_within(most))) for window in windows]
        within = [self._assignment(choice, window) for window, choice in fitting if choice]
        if not within:
            least = min(window.factor for window in windows) * self.front[-1].loss
            raise ConfigError(
                f"--max-kl {most:g} is too small: the best assignment of these candidates has "
                f"{least:.3g} nats a token; add candidates of more bits with --candidates"
            )
        return min(within, key=lambda entry: (entry.bytes_with_window, entry.loss))

    @property
    def smallest(self) -> Assignment:
        """The assignment of the fewest bytes."""
        return self._assignment(self.front[0], NO_WINDOW)

    def _assignment(self, choice: Choice, window: WindowOption) -> Assignment:
        pairs = zip(self.parts.items(), choice.indices, strict=True)
        layers = {layer: options[index] for (layer, options), index in pairs}
        return Assignment(layers, self.values, window)

    def _options(self, group: LayerGroup, layer: int) -> Iterator[Assigned]:
        """Yield the pairs of the best candidates for K and V, of each format, that can be served together."""
        best = [self._best(group, layer, stream) for stream in stored_streams(group)]
        for combination in itertools.product(*best):
            by_stream = {candidate.stream.name: candidate.format for candidate in combination}
            transforms = tuple(name for candidate in combination for name in candidate.transforms)
            encoders = {x.encoder for x in combination if len(formats.get(x.format).encoders) > 1}
            # A scheme has one encoder for all of its streams.
            if len(encoders) > 1:
                continue
            scheme = schemes.compose(by_stream, transforms, *encoders)
            if self._refuses(group, scheme) is None:
                losses = {x.stream.name: self.losses[layer, x] for x in combination}
                yield Assigned(scheme, cost_of(group, scheme), losses)

    def _best(self, group: LayerGroup, layer: int, stream: Stream) -> list[Candidate]:
        """Return the candidate of each format and encoder that loses least; transforms change no bytes and no route."""
        best: dict[tuple[str, str], Candidate] = {}
        for (at, candidate), loss in self.losses.items():
            if at == layer and candidate.group == group and candidate.stream == stream:
                rival = best.setdefault((candidate.format, candidate.encoder), candidate)
                if loss < self.losses[layer, rival]:
                    best[candidate.format, candidate.encoder] = candidate
        return list(best.values())

    def _refuses(self, group: LayerGroup, scheme: Scheme) -> str | None:
        key = group, scheme
        if key not in self._reasons:
            stored = dict.fromkeys(self.target.owners(group), scheme)
            self._reasons[key] = reason = self.target.refuses(stored)
            if reason:
                self.skipped[scheme.name] = reason
        return self._reasons[key]

    @cached_property
    def _reasons(self) -> dict[tuple[LayerGroup, Scheme], str | None]:
        return {}
