"""One evaluation: the yardstick first, then each scheme, one engine at a time.

How each thing is measured is in its own file.

    plan every scheme, without weights
    yardstick: scales if any are missing, errors by layer of all schemes, predictions, recall
    each scheme: perplexity and agreement in one pass, recall
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

import nibble
from nibble import formats
from nibble.attention.planner.resolve import require_runnable
from nibble.cache import scales as kv_scales
from nibble.cache.scales import KVScales
from nibble.config import Config
from nibble.engine.build import resolve_scales
from nibble.engine.llm import LLM
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.errors import ConfigError, NibbleError, ScaleError
from nibble.evals import perplexity, recall
from nibble.evals.perplexity import (
    Agreement,
    Parts,
    Perplexity,
    Prediction,
    Window,
    attention_errors,
    windows,
)
from nibble.evals.report import COMBINATIONS, Entry, Report, SchemeResult, Sizes, parse
from nibble.formats import scheme as schemes
from nibble.model_spec import HEADS, LATENTS, ModelSpec

LOGIT_BYTES = 1 << 30
"""Logits of one window take no more, unless a window is asked for."""
LEAST_WINDOW = 512


class Progress(Protocol):
    """Hears how far an evaluation is, in tokens."""

    def start(self, tokens: int) -> None:
        """All that is to be done."""
        ...

    def advance(self, scheme: str, what: str, tokens: int) -> None:
        """Add what is done since the last call.

        Args:
            scheme: the scheme that is being measured.
            what: the measurement, in words.
            tokens: how many more are done.
        """
        ...


class Silent:
    """Progress that nobody hears."""

    def start(self, tokens: int) -> None:
        """Do nothing."""

    def advance(self, scheme: str, what: str, tokens: int) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A scheme that the model can take. kv_scales: what --kv-scales says for it."""

    entry: Entry
    plan: EnginePlan
    kv_scales: str

    @property
    def config(self) -> Config:
        """As it is measured: no two questions share a beginning."""
        return replace(self.plan.config, kv_scales=self.kv_scales, prefix_cache=False)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token in the cache."""
        return self.plan.plan.layout.bytes_per_token

    def scales(self) -> KVScales:
        """The scales that its engine uses."""
        return resolve_scales(self.plan, self.kv_scales)


MEASURED = "measured"
"""Stands for the file of scales that the yardstick will measure."""


def default_entries(model_spec: ModelSpec) -> tuple[Entry, ...]:
    """Every scheme of a usual model of this kind, without the plain formats that exist for tests, and combinations
    worth a look."""
    streams = HEADS if any(group.kind == "mha" for group in model_spec.groups) else LATENTS
    usual = [name for name in schemes.fitting(*streams) if name not in formats.names() or _usual(name)]
    return parse((*usual, *(COMBINATIONS if streams is HEADS else ())))


def _usual(name: str) -> bool:
    return formats.get(name).plain in (None, "bfloat16")


def evaluate(
    config: Config,
    names: Sequence[str],
    sizes: Sizes,
    path: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """The report on `names`, or on default_entries() if there are none. path: the text to score.

    A scheme that was named and cannot be served raises its error; a default one is skipped, and reported.
    """
    content = perplexity.read(path, config.model)
    # Every scheme is planned before the first engine starts: a refusal must not come after an hour.
    candidates, skipped = candidates_of(config, parse(names), parse([sizes.yardstick])[0])
    with tempfile.TemporaryDirectory() as temporary:
        run = _Run(sizes, content, progress or Silent(), Path(temporary) / "kv_scales.json")
        results = tuple(run.measure(candidate, candidates) for candidate in candidates)
    return Report(
        config.model, sizes.yardstick, results, skipped, run.measured(path), environment(candidates[0].plan)
    )


def candidates_of(
    config: Config, entries: Sequence[Entry], yardstick: Entry
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """What can be measured, the yardstick first, and what cannot, with the reason."""
    candidates, skipped = [_candidate(config, yardstick)], {}
    if candidates[0].kv_scales == MEASURED:
        raise ConfigError(
            f"the yardstick {yardstick.name} needs KV scales itself; name them with --kv-scales FILE"
        )
    for entry in entries or default_entries(candidates[0].plan.model_spec):
        if entry != yardstick:
            try:
                candidates.append(_candidate(config, entry))
            except NibbleError as error:
                if entries:
                    raise
                skipped[entry.name] = str(error)
    return tuple(candidates), skipped


def _candidate(config: Config, entry: Entry) -> Candidate:
    """Plans a scheme. `auto` takes the checkpoint's scales where they do, else what will be measured."""
    plan = plan_engine(replace(config, kv_format=entry.kv_format, kv_layers=entry.kv_layers))
    require_runnable(plan.plan)
    source = config.kv_scales
    if source in {"auto", "calibrate"}:
        scales = resolve_scales(plan, "auto") if source == "auto" else kv_scales.NONE
        source = "auto" if _suffices(scales, plan) else MEASURED
    else:
        for store in plan.plan.stores:
            kv_scales.require(store, resolve_scales(plan, source))
    return Candidate(entry, plan, source)


def _suffices(scales: KVScales, plan: EnginePlan) -> bool:
    try:
        for store in plan.plan.stores:
            kv_scales.require(store, scales)
    except ScaleError:
        return False
    return True


def environment(plan: EnginePlan) -> dict[str, str]:
    """Where an evaluation ran."""
    return {
        "nibble": nibble.__version__,
        "torch": torch.__version__,
        "dtype": plan.plan.dtype,
        "hardware": str(plan.hardware),
        "date": time.strftime("%Y-%m-%d"),
    }


@dataclass
class _Run:
    """What is shared by all schemes; filled by the first, the yardstick."""

    sizes: Sizes
    content: str
    progress: Progress
    scales_file: Path
    windows: tuple[Window, ...] = ()
    cases: Mapping[int, Sequence[recall.RecallCase]] = field(default_factory=dict)
    predictions: list[Prediction] = field(default_factory=list)
    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    parts: Parts | None = None
    yardstick_bytes: int = 0

    def measure(self, candidate: Candidate, all_candidates: Sequence[Candidate]) -> SchemeResult:
        """Measures one scheme; its engine is gone afterwards."""
        started = time.perf_counter()
        candidate = self._with_scales(candidate)
        llm = LLM(**{option: getattr(candidate.config, option) for option in Config.__slots__})
        # The first candidate is the yardstick, and its engine prepares what all schemes share.
        if self.parts is None:
            self._prepare(llm, all_candidates)
        perplexity, agreement = self._text(llm, candidate)
        accuracies = {length: self._recall(llm, candidate, length) for length in self.cases}
        # The next engine needs this one's memory, which reference cycles would hold for longer.
        del llm
        gc.collect()
        assert self.parts is not None
        return SchemeResult(
            name=candidate.entry.name,
            kv_format=candidate.entry.kv_format,
            kv_layers=candidate.entry.kv_layers,
            bytes_per_token=candidate.bytes_per_token,
            ratio=self.yardstick_bytes / candidate.bytes_per_token,
            # The file is temporary, so a report does not name it.
            scales="measured" if candidate.kv_scales == str(self.scales_file) else candidate.kv_scales,
            perplexity=perplexity.value,
            bits_per_byte=perplexity.bits_per_byte(self.parts.bytes_per_token),
            top1=agreement.top1,
            kl=agreement.kl,
            kl_p99=agreement.kl_p99,
            recall=accuracies,
            attention_error=self.errors.get(candidate.entry.name, ()),
            seconds=round(time.perf_counter() - started, 2),
        )

    def _with_scales(self, candidate: Candidate) -> Candidate:
        return (
            replace(candidate, kv_scales=str(self.scales_file))
            if candidate.kv_scales == MEASURED
            else candidate
        )

    def _prepare(self, llm: LLM, candidates: Sequence[Candidate]) -> None:
        """Draws text and questions, and does what the yardstick does for all schemes."""
        tokenizer, limit = llm.tokenizer, candidates[0].plan.model_spec
        self.parts = perplexity.split(self.content, self.sizes.tokens, tokenizer.encode, tokenizer.decode)
        # Logits are float32: 4 bytes each.
        size = self.sizes.window or min(
            limit.max_context, max(LEAST_WINDOW, LOGIT_BYTES // (4 * limit.vocab_size))
        )
        if size > limit.max_context:
            raise ConfigError(
                f"a window of {size} tokens is more than the model's context of {limit.max_context}"
            )
        self.windows = windows(self.parts.scored, size, self.sizes.stride)
        self.cases = self._questions(llm, limit.max_context)
        self.yardstick_bytes = candidates[0].bytes_per_token
        self.progress.start(self._total_tokens() * len(candidates))
        # Now, because the errors by layer and all later engines read the file.
        if any(candidate.kv_scales == MEASURED for candidate in candidates):
            llm.measure_scales([self.parts.calibration], save=self.scales_file)
        self._layers(llm, candidates)

    def _questions(self, llm: LLM, max_context: int) -> dict[int, list[recall.RecallCase]]:
        if not self.sizes.recall_cases:
            return {}

        def count(piece: str) -> int:
            return len(llm.tokenizer.encode(piece))

        lengths = self.sizes.lengths(max_context)
        number, seed = self.sizes.recall_cases, self.sizes.seed
        # A seed for each length, so that a longer context does not repeat the questions of a shorter one.
        return {length: recall.cases(seed + length, number, length, count) for length in lengths}

    def _total_tokens(self) -> int:
        """Tokens that each scheme computes."""
        return sum(len(window.ids) for window in self.windows) + sum(
            n * len(cases) for n, cases in self.cases.items()
        )

    def _layers(self, llm: LLM, candidates: Sequence[Candidate]) -> None:
        """The attention error by layer of all schemes, in one pass of the yardstick."""
        assert self.parts is not None
        ids = self.parts.scored[: min(self.sizes.attention_tokens, candidates[0].plan.model_spec.max_context)]
        if ids:
            sides = {c.entry.name: (c.plan.plan, self._with_scales(c).scales()) for c in candidates}
            self.progress.advance(candidates[0].entry.name, "attention error", 0)
            self.errors = attention_errors(
                llm.engine.runner.model, ids, sides[candidates[0].entry.name], sides
            )

    def _text(self, llm: LLM, candidate: Candidate) -> tuple[Perplexity, Agreement]:
        """Perplexity and agreement over all windows; the first scheme's predictions are the yardstick."""
        perplexity, agreement = Perplexity(), Agreement()
        for index, window in enumerate(self.windows):
            self.progress.advance(candidate.entry.name, "perplexity", 0)
            logits_TV = llm.logits(window.ids)
            perplexity.add(logits_TV, window)
            # Only the yardstick comes here. It is then compared with itself, which gives 0.
            if index == len(self.predictions):
                self.predictions.append(Prediction.of(window.predictions(logits_TV)))
            agreement.add(window.predictions(logits_TV), self.predictions[index])
            self.progress.advance(candidate.entry.name, "perplexity", len(window.ids))
        return perplexity, agreement

    def _recall(self, llm: LLM, candidate: Candidate, length: int) -> float:
        what = f"recall at {length}"
        self.progress.advance(candidate.entry.name, what, 0)
        right = 0
        for exact in recall.grade(llm, self.cases[length]):
            right += exact
            self.progress.advance(candidate.entry.name, what, length)
        return right / len(self.cases[length])

    def measured(self, path: Path | None) -> dict[str, Any]:
        """How much was measured, and on what."""
        assert self.parts is not None
        return asdict(self.sizes) | {
            "text": path.name if path else perplexity.HELDOUT,
            "text_sha256": self.parts.digest,
            "scored": sum(window.scored for window in self.windows),
            "window": max(len(window.ids) for window in self.windows),
            "bytes_per_text_token": round(self.parts.bytes_per_token, 4),
            "recall_lengths": sorted(self.cases),
        }
