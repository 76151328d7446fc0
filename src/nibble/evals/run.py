"""One evaluation: the yardstick first, then each scheme, one engine at a time in each process.

How each thing is measured is in its own file.

    plan every scheme, without weights
    yardstick: scales if any are missing, errors by layer of all schemes, predictions; its recall beside the others
    each scheme: perplexity and agreement in one pass, recall
"""

from __future__ import annotations

import copy
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import nibble
from nibble import formats
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import require_runnable
from nibble.attention.planner.window_memory import request_bytes
from nibble.cache.scales import KVScales
from nibble.config import Config
from nibble.engine.calibration import builtin_texts, tokens_of_start
from nibble.engine.llm import LLM
from nibble.engine.parallel_plan import whole_layout
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.engine.ranks import all_ranks
from nibble.engine.scale_source import AUTO, CALIBRATE, Origin, find_source, resolve_scales
from nibble.errors import ConfigError, NibbleError
from nibble.evals import perplexity, recall, tasks
from nibble.evals.perplexity import Agreement, Parts, Perplexity, Prediction, Text, Window
from nibble.evals.report import (
    COMBINATIONS,
    COMBINATIONS_OF_LATENTS,
    Entry,
    Report,
    SchemeResult,
    Sizes,
    TaskScore,
    parse_entries,
)
from nibble.evals.tasks import TaskResult
from nibble.formats import scheme as schemes
from nibble.kernels.state_formats import state_bytes
from nibble.model_spec import HEADS, LATENTS, ModelSpec
from nibble.models.activations import FP8, FULL
from nibble.models.checkpoint import download

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
        """Return the bytes of one token in the cache, as one GPU has them."""
        return whole_layout(self.plan.plan.layout, self.plan.model_spec).bytes_per_token


MEASURED = "measured"
"""Stands for the file of scales that the yardstick will measure."""


def default_entries(model_spec: ModelSpec) -> tuple[Entry, ...]:
    """Return every scheme of a usual model of this kind, and combinations worth a look."""
    streams = HEADS if any(group.kind == "mha" for group in model_spec.groups) else LATENTS
    # Plain formats other than BF16 exist for tests.
    for_tests = [name for name in formats.names() if formats.get(name).plain not in (None, "bfloat16")]
    usual = [name for name in schemes.fitting(*streams) if name not in for_tests]
    return parse_entries((*usual, *(COMBINATIONS if streams is HEADS else COMBINATIONS_OF_LATENTS)))


def evaluate(
    config: Config,
    names: Sequence[str],
    sizes: Sizes,
    path: Path | None = None,
    progress: Progress | None = None,
    *,
    as_started: bool = False,
    jobs: int = 1,
    save: Callable[[Report], None] | None = None,
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
        jobs: Schemes that are measured at the same time, each in a process of its own.
        save: Takes what is measured so far, after each scheme.

    Raises:
        ConfigError: Options do not go together.
        NibbleError: A scheme cannot be measured; all others are by then, and saved.
    """
    # What is measured has no certificate yet.
    config = replace(config, require_quality="")
    text = perplexity.read_text(path, config.model, builtin=as_started)
    tasks.check(sizes, config.model)
    # Every scheme is planned before the first engine starts: a refusal must not come after an hour.
    candidates, skipped = candidates_of(config, parse_entries(names), Entry.parse(sizes.yardstick))
    if jobs > 1 and not config.kv_memory and not candidates[0].plan.hardware.is_cpu:
        raise ConfigError(
            f"{jobs} jobs share the GPU's memory: say how much each cache may take, as --kv-memory 4GiB"
        )
    where, results = environment(candidates[0].plan), dict[int, SchemeResult]()
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "kv_scales.json"
        run = _Evaluation(sizes, text, candidates, progress, file, as_started)
        for index, result in run.measure_all(jobs):
            results[index] = result
            ordered = tuple(result for _, result in sorted(results.items()))
            report = Report(config.model, sizes.yardstick, ordered, skipped, run.measured(), where)
            if save:
                save(report)
    return report


def candidates_of(
    config: Config, entries: Sequence[Entry], yardstick: Entry
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Return what can be measured, the yardstick first, and what cannot, with the reason."""
    candidates, skipped = [_plan_candidate(yardstick.alone(config), yardstick)], {}
    if candidates[0].kv_scales == MEASURED:
        raise ConfigError(
            f"the yardstick {yardstick.name} needs KV scales itself; name them with --kv-scales FILE"
        )
    model_spec = candidates[0].plan.model_spec
    for entry in entries or default_entries(model_spec):
        # The yardstick's states are exact: a scheme that rounds them is another one, and says so.
        own = entry.with_states(config) if model_spec.states else entry
        if own != yardstick:
            try:
                candidates.append(_plan_candidate(own.config(config), own))
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


def _ingredients(plan: Plan) -> dict[str, Any]:
    """Return what a scheme is made of, as fields of SchemeResult."""
    layers = plan.layout.layers
    encoders = dict.fromkeys(entry.encoder for layer in layers for entry in layer.streams if entry.encoder)
    transforms = dict.fromkeys("+".join(layer.transforms) for layer in layers if layer.transforms)
    return {
        "encoder": ", ".join(encoders),
        "transforms": ", ".join(transforms),
        "exact_window": plan.window,
        "state_format": plan.state_format if plan.states else "",
    }


def _request_bytes(plan: Plan, tokens: int) -> int:
    """Return the bytes of a running request: its pages, its exact window and its recurrent states."""
    states = (
        len(group.layers) * state_bytes(group, plan.state_format, plan.dtype, 0) for group in plan.states
    )
    return request_bytes(plan, tokens) + sum(states)


def environment(plan: EnginePlan) -> dict[str, str]:
    """Return where an evaluation ran."""
    return {
        "nibble": nibble.__version__,
        "torch": torch.__version__,
        "dtype": plan.plan.dtype,
        **({"weights": plan.config.weights} if plan.config.weights else {}),
        **({"activations": FP8} if plan.activations != FULL else {}),
        **({"tp": str(plan.config.tp)} if plan.config.tp > 1 else {}),
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

    def measure_all(self, jobs: int) -> Iterator[tuple[int, SchemeResult]]:
        """Yield the result of each candidate with its index, as they come.

        What others need of the yardstick is ready long before its own recall, so they begin then.
        """
        if jobs == 1:
            yield from enumerate(map(self.measure, self.candidates))
            return
        futures: dict[Future[SchemeResult], int] = {}
        # A process that has used a GPU cannot be forked.
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:

            def start() -> None:
                shared = copy.copy(self)
                shared.progress = None
                path = self.scales_file.with_name("evaluation.pickle")
                path.write_bytes(pickle.dumps(shared))
                others = range(1, len(self.candidates))
                futures.update({pool.submit(_measure_apart, path, index): index for index in others})

            yield 0, self.measure(self.candidates[0], start)
            errors = []
            for future in as_completed(futures):
                if error := future.exception():
                    # The others go on: what they take hours for is saved.
                    errors.append(error)
                    continue
                self._advance(self.candidates[futures[future]], "measured", self._tokens_of_scheme)
                yield futures[future], future.result()
        if errors:
            raise errors[0]

    def measure(self, candidate: Candidate, start: Callable[[], None] | None = None) -> SchemeResult:
        """Measure one scheme; its engine is gone afterwards. start: is called when others may begin."""
        started = time.perf_counter()
        # Otherwise no two questions have the same beginning.
        shared = bool(self.sizes.tasks) or self.sizes.recall_per_context > 1
        scales = self._scales_source(candidate)
        # The window that was planned, as serving would have it: what fits may depend on the prefix cache.
        window = candidate.plan.plan.window
        config = replace(candidate.plan.config, kv_scales=scales, prefix_cache=shared, kv_window=window)
        llm = LLM(**asdict(config))
        # The first candidate is the yardstick, and its engine prepares what all schemes share.
        if not self.windows:
            self._prepare(llm)
        kv_scales = _scales_from(candidate.plan, scales)
        perplexity, agreement = self._measure_text(llm, candidate)
        # Others compare their answers to tasks with the yardstick's.
        if start and not self.sizes.tasks:
            start()
        accuracies = {length: self._measure_recall(llm, candidate, length) for length in self.cases}
        scores = self._measure_tasks(llm, candidate)
        if start and self.sizes.tasks:
            start()
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
            request_bytes=_request_bytes(candidate.plan.plan, self._request_tokens),
            **_ingredients(candidate.plan.plan),
        )

    def _scales_source(self, candidate: Candidate) -> str:
        """Return what --kv-scales is for a candidate."""
        return str(self.scales_file) if candidate.kv_scales == MEASURED else candidate.kv_scales

    def _prepare(self, llm: LLM) -> None:
        """Draw text and questions, and do what the yardstick does for all schemes."""
        tokenizer, model_spec = llm.tokenizer, self.candidates[0].plan.model_spec
        self.parts = perplexity.split_text(
            self.text.content, self.sizes.tokens, tokenizer.encode, tokenizer.decode, self.sizes.skip
        )
        affordable = perplexity.affordable_window(model_spec.vocab_size)
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
            arguments = (ids, yardstick, schemes_by_name)
            with all_ranks(llm.engine.ranks, "nibble.evals.perplexity:attention_errors", *arguments) as rank:
                model = llm.engine.runner.model
                self.errors = perplexity.attention_errors(self.candidates[0].plan, model, rank, *arguments)

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

        number, seed, shared = self.sizes.recall_cases, self.sizes.seed, self.sizes.recall_per_context
        # A seed for each length, so that a longer context does not repeat the questions of a shorter one.
        lengths = self.sizes.lengths(max_context)
        return {length: recall.cases(seed + length, number, length, count, shared) for length in lengths}

    def _advance(self, candidate: Candidate, what: str, tokens: int) -> None:
        """Report what is being measured, and how many more tokens are done."""
        if self.progress:
            total = self._tokens_of_scheme * len(self.candidates)
            self.progress(f"{candidate.entry.name}: {what}", tokens, total)

    @property
    def _tokens_of_scheme(self) -> int:
        of_text = sum(len(window.ids) for window in self.windows)
        return of_text + sum(length * len(cases) for length, cases in self.cases.items())

    @property
    def _request_tokens(self) -> int:
        return min(self.sizes.request_tokens, self.candidates[0].plan.model_spec.max_context)

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
            "request_tokens": self._request_tokens,
        }


def _measure_apart(path: Path, index: int) -> SchemeResult:
    """Measure a candidate in a process of its own. path: of the evaluation as the yardstick left it."""
    run: _Evaluation = pickle.loads(path.read_bytes())
    return run.measure(run.candidates[index])
