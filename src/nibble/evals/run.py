"""One evaluation: the yardstick first, then each scheme, one engine at a time.

How each thing is measured is in its own file.

    plan every scheme, without weights
    yardstick: scales if any are missing, errors by layer of all schemes, predictions, recall
    each scheme: perplexity and agreement in one pass, recall
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import nibble
from nibble import formats
from nibble.attention.planner.resolve import require_runnable
from nibble.cache.scales import KVScales
from nibble.config import Config
from nibble.engine.calibration import builtin_texts, tokens_of_start
from nibble.engine.llm import LLM
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.engine.scale_source import AUTO, CALIBRATE, Origin, find_source, resolve_scales
from nibble.errors import ConfigError, NibbleError
from nibble.evals import perplexity, recall, tasks
from nibble.evals.perplexity import Agreement, Parts, Perplexity, Prediction, Text, Window
from nibble.evals.report import COMBINATIONS, Entry, Report, SchemeResult, Sizes, TaskScore, parse_entries
from nibble.evals.tasks import TaskResult
from nibble.formats import scheme as schemes
from nibble.model_spec import HEADS, LATENTS, ModelSpec
from nibble.models.checkpoint import download

LOGIT_BYTES = 1 << 30
"""Logits of one window take no more, unless a window is asked for."""
LEAST_WINDOW = 512


Progress = Callable[[str, int, int], None]
"""Takes what is being measured, how many more tokens are done, and how many there are in all."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A scheme that the model can take."""

    entry: Entry
    plan: EnginePlan
    kv_scales: str
    """What --kv-scales says for it, or MEASURED."""

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token in the cache."""
        return self.plan.plan.layout.bytes_per_token


MEASURED = "measured"
"""Stands for the file of scales that the yardstick will measure."""


def default_entries(model_spec: ModelSpec) -> tuple[Entry, ...]:
    """Return every scheme of a usual model of this kind, and combinations worth a look."""
    streams = HEADS if any(group.kind == "mha" for group in model_spec.groups) else LATENTS
    # Plain formats other than BF16 exist for tests.
    for_tests = [name for name in formats.names() if formats.get(name).plain not in (None, "bfloat16")]
    usual = [name for name in schemes.fitting(*streams) if name not in for_tests]
    return parse_entries((*usual, *(COMBINATIONS if streams is HEADS else ())))


def evaluate(
    config: Config,
    names: Sequence[str],
    sizes: Sizes,
    path: Path | None = None,
    progress: Progress | None = None,
    *,
    as_started: bool = False,
) -> Report:
    """Return the report on some schemes.

    A scheme that was named and cannot be served raises its error; a default one is skipped, and reported.

    Args:
        config: How they are served, but for the scheme.
        names: The schemes; default_entries() if there are none.
        sizes: What is measured.
        path: The text to score.
        progress: Is called as tokens are done.
        as_started: Measure the scales that a start would measure, and where the model has no text to score, score the
            one that comes with Nibble.
    """
    # What is measured has no certificate yet.
    config = replace(config, require_quality="")
    text = perplexity.read_text(path, config.model, builtin=as_started)
    tasks.check(sizes, config.model)
    # Every scheme is planned before the first engine starts: a refusal must not come after an hour.
    candidates, skipped = candidates_of(config, parse_entries(names), Entry.parse(sizes.yardstick))
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "kv_scales.json"
        run = _Evaluation(sizes, text, candidates, progress, file, as_started)
        results = tuple(map(run.measure, candidates))
    where = environment(candidates[0].plan)
    return Report(config.model, sizes.yardstick, results, skipped, run.measured(), where)


def candidates_of(
    config: Config, entries: Sequence[Entry], yardstick: Entry
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Return what can be measured, the yardstick first, and what cannot, with the reason."""
    candidates, skipped = [_plan_candidate(yardstick.alone(config), yardstick)], {}
    if candidates[0].kv_scales == MEASURED:
        raise ConfigError(
            f"the yardstick {yardstick.name} needs KV scales itself; name them with --kv-scales FILE"
        )
    for entry in entries or default_entries(candidates[0].plan.model_spec):
        if entry != yardstick:
            try:
                candidates.append(_plan_candidate(entry.config(config), entry))
            except NibbleError as error:
                if entries:
                    raise
                skipped[entry.name] = str(error)
    return tuple(candidates), skipped


def _plan_candidate(config: Config, entry: Entry) -> Candidate:
    """Plan a scheme's config. `auto` takes the checkpoint's scales where they suffice, else what will be measured."""
    plan = plan_engine(config)
    require_runnable(plan.plan)
    source = find_source(plan, download)
    if source.origin is Origin.MEASURED:
        return Candidate(entry, plan, MEASURED)
    resolve_scales(plan, source)  # for its errors
    return Candidate(entry, plan, AUTO if config.kv_scales == CALIBRATE else config.kv_scales)


def _scales_from(plan: EnginePlan, source: str) -> KVScales:
    """Return the scales of a plan if --kv-scales were `source`."""
    plan = replace(plan, config=replace(plan.config, kv_scales=source))
    return resolve_scales(plan, find_source(plan, download))


def environment(plan: EnginePlan) -> dict[str, str]:
    """Return where an evaluation ran."""
    return {
        "nibble": nibble.__version__,
        "torch": torch.__version__,
        "dtype": plan.plan.dtype,
        "hardware": str(plan.hardware),
        "date": time.strftime("%Y-%m-%d"),
    }


@dataclass
class _Evaluation:
    """What is shared by all schemes; the fields after `as_started` are filled by the first, the yardstick."""

    sizes: Sizes
    text: Text
    candidates: Sequence[Candidate]
    progress: Progress | None
    scales_file: Path
    as_started: bool
    parts: Parts = field(init=False)
    windows: tuple[Window, ...] = ()
    cases: Mapping[int, Sequence[recall.RecallCase]] = field(default_factory=dict)
    predictions: list[Prediction] = field(default_factory=list)
    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    task_results: tuple[TaskResult, ...] = ()

    def measure(self, candidate: Candidate) -> SchemeResult:
        """Measure one scheme; its engine is gone afterwards."""
        started = time.perf_counter()
        # No two questions share a beginning, but those of tasks do.
        shared, scales = bool(self.sizes.tasks), self._scales_source(candidate)
        config = replace(candidate.plan.config, kv_scales=scales, prefix_cache=shared)
        llm = LLM(**asdict(config))
        # The first candidate is the yardstick, and its engine prepares what all schemes share.
        if not self.windows:
            self._prepare(llm)
        kv_scales = _scales_from(candidate.plan, scales)
        perplexity, agreement = self._measure_text(llm, candidate)
        accuracies = {length: self._measure_recall(llm, candidate, length) for length in self.cases}
        scores = self._measure_tasks(llm, candidate)
        # The next engine needs this one's memory.
        llm.close()
        return SchemeResult(
            name=candidate.entry.name,
            kv_format=candidate.entry.kv_format,
            kv_layers=candidate.entry.kv_layers,
            options=candidate.entry.options,
            bytes_per_token=candidate.bytes_per_token,
            ratio=self.candidates[0].bytes_per_token / candidate.bytes_per_token,
            scales=candidate.kv_scales,
            scale_version=kv_scales.version,
            perplexity=perplexity.value,
            bits_per_byte=perplexity.bits_per_byte(self.parts.bytes_per_token),
            top1=agreement.top1,
            kl=agreement.kl,
            kl_p99=agreement.kl_p99,
            recall=accuracies,
            attention_error=self.errors.get(candidate.entry.name, ()),
            tasks=scores,
            sinks=kv_scales.notes,
            seconds=round(time.perf_counter() - started, 2),
        )

    def _scales_source(self, candidate: Candidate) -> str:
        """Return what --kv-scales is for a candidate."""
        return str(self.scales_file) if candidate.kv_scales == MEASURED else candidate.kv_scales

    def _prepare(self, llm: LLM) -> None:
        """Draw text and questions, and do what the yardstick does for all schemes."""
        tokenizer, model_spec = llm.tokenizer, self.candidates[0].plan.model_spec
        self.parts = perplexity.split_text(
            self.text.content, self.sizes.tokens, tokenizer.encode, tokenizer.decode
        )
        # Logits are float32: 4 bytes each.
        affordable = max(LEAST_WINDOW, LOGIT_BYTES // (4 * model_spec.vocab_size))
        size = self.sizes.window or min(model_spec.max_context, affordable)
        if size > model_spec.max_context:
            raise ConfigError(
                f"a window of {size} tokens is more than the model's context of {model_spec.max_context}"
            )
        self.windows = perplexity.windows(self.parts.scored, size, self.sizes.stride)
        self.cases = self._draw_questions(llm, model_spec.max_context)
        # Now, because the errors by layer and all later engines read the file.
        self._measure_scales(llm)
        ids = self.parts.scored[: min(self.sizes.attention_tokens, model_spec.max_context)]
        if ids:
            self._advance(self.candidates[0], "attention error", 0)
            schemes_by_name = {
                c.entry.name: (c.plan.plan, _scales_from(c.plan, self._scales_source(c)))
                for c in self.candidates
            }
            yardstick = schemes_by_name[self.candidates[0].entry.name]
            self.errors = perplexity.attention_errors(
                llm.engine.runner.model, ids, yardstick, schemes_by_name
            )

    def _measure_scales(self, llm: LLM) -> None:
        """Write the scales that candidates need and do not have to the file that their engines read."""
        plans = [candidate.plan for candidate in self.candidates if candidate.kv_scales == MEASURED]
        if plans and self.as_started:
            llm.measure_scales(builtin_texts(), self.scales_file, max_tokens=tokens_of_start(plans[0]))
        elif plans:
            llm.measure_scales([self.parts.calibration], self.scales_file)

    def _draw_questions(self, llm: LLM, max_context: int) -> dict[int, list[recall.RecallCase]]:
        if not self.sizes.recall_cases:
            return {}

        def count(piece: str) -> int:
            return len(llm.tokenizer.encode(piece))

        number, seed = self.sizes.recall_cases, self.sizes.seed
        # A seed for each length, so that a longer context does not repeat the questions of a shorter one.
        lengths = self.sizes.lengths(max_context)
        return {length: recall.cases(seed + length, number, length, count) for length in lengths}

    def _advance(self, candidate: Candidate, what: str, tokens: int) -> None:
        """Report what is being measured, and how many more tokens are done."""
        if self.progress:
            of_text = sum(len(window.ids) for window in self.windows)
            of_recall = sum(length * len(cases) for length, cases in self.cases.items())
            total = (of_text + of_recall) * len(self.candidates)
            self.progress(f"{candidate.entry.name}: {what}", tokens, total)

    def _measure_text(self, llm: LLM, candidate: Candidate) -> tuple[Perplexity, Agreement]:
        """Return perplexity and agreement over all windows; the first scheme's predictions are the yardstick."""
        perplexity, agreement = Perplexity(), Agreement()
        for index, window in enumerate(self.windows):
            self._advance(candidate, "perplexity", 0)
            logits_TV = llm.logits(window.ids)
            perplexity.add(logits_TV, window)
            # Only the yardstick comes here. It is then compared with itself, which gives 0.
            if index == len(self.predictions):
                self.predictions.append(Prediction.of(window.predictions(logits_TV)))
            agreement.add(window.predictions(logits_TV), self.predictions[index])
            self._advance(candidate, "perplexity", len(window.ids))
        return perplexity, agreement

    def _measure_recall(self, llm: LLM, candidate: Candidate, length: int) -> float:
        what = f"recall at {length}"
        self._advance(candidate, what, 0)
        right = 0
        for exact in recall.grade(llm, self.cases[length]):
            right += exact
            self._advance(candidate, what, length)
        return right / len(self.cases[length])

    def _measure_tasks(self, llm: LLM, candidate: Candidate) -> tuple[TaskScore, ...]:
        """Return the scores of all tasks; the first scheme's are what the others are compared with."""
        if not self.sizes.tasks:
            return ()

        def advance(what: str) -> None:
            self._advance(candidate, what, 0)

        results = tasks.run(llm, self.sizes, advance)
        # Only the yardstick comes here.
        self.task_results = self.task_results or results
        return tasks.scores(results, self.task_results)

    def measured(self) -> dict[str, Any]:
        """Return how much was measured, and on what."""
        return asdict(self.sizes) | {
            "text": self.text.name,
            "text_sha256": self.parts.digest,
            "scored": sum(window.scored for window in self.windows),
            "window": max(len(window.ids) for window in self.windows),
            "bytes_per_text_token": round(self.parts.bytes_per_token, 4),
            "recall_lengths": sorted(self.cases),
        }
