"""Tasks of lm-eval (EleutherAI's evaluation harness) over an LLM: which are meant, running them, and their scores.

lm-eval is optional, and imported when tasks are run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.errors import ConfigError, RequestError, unknown
from nibble.evals.report import Sizes, TaskScore
from nibble.models.hub import locate

if TYPE_CHECKING:
    from nibble.engine.llm import LLM

INSTALL = "pip install lm-eval"
BOOTSTRAP = 1000
"""Resamplings for the standard error of metrics that have no formula, such as F1."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One metric of a task, and what each question gave."""

    score: TaskScore
    by_question: Mapping[int, float] = field(default_factory=dict)
    """By number; empty for metrics that are no mean over questions."""


def require_lm_eval() -> None:
    """Raise ConfigError where lm-eval is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--tasks needs lm-eval, which is not installed: {INSTALL}") from error


def check(sizes: Sizes, model: str) -> None:
    """Load tasks and their data, so that an error comes before anything is measured.

    Args:
        sizes: the tasks.
        model: whose tokenizer some tasks count with.

    Raises:
        ConfigError: lm-eval is missing, or a task cannot be loaded.
    """
    if sizes.tasks:
        require_lm_eval()
        _load(sizes, model)


def run(llm: LLM, sizes: Sizes, advance: Callable[[str], None]) -> tuple[TaskResult, ...]:
    """Run tasks, and return what each of their metrics came to.

    Args:
        llm: what answers.
        sizes: the tasks, and how many questions.
        advance: is called with what is being done.

    Raises:
        ConfigError: a task cannot be run here.
    """
    require_lm_eval()
    from lm_eval import simple_evaluate

    from nibble.evals.lm_eval_model import NibbleLM

    # Loaded anew for each scheme: tasks draw their examples from a generator of their own.
    manager, specs = _manager(sizes, llm.config.model)
    try:
        results = simple_evaluate(
            model=NibbleLM(llm, advance),
            tasks=specs,
            task_manager=manager,
            limit=sizes.limit,
            num_fewshot=sizes.num_fewshot,
            apply_chat_template=sizes.apply_chat_template,
            gen_kwargs=sizes.gen_kwargs or None,
            bootstrap_iters=BOOTSTRAP,
        )
    except (ValueError, KeyError, NotImplementedError, RequestError) as error:
        raise ConfigError(f"lm-eval cannot run {', '.join(sizes.tasks)}: {error}") from error
    return tuple(read_results(results or {}))


def scores(results: Sequence[TaskResult], yardstick: Sequence[TaskResult]) -> tuple[TaskScore, ...]:
    """Return the scores, each with its difference from the yardstick's over the same questions."""
    before = {result.score.title: result for result in yardstick}
    return tuple(_compared(result, before.get(result.score.title)) for result in results)


def read_results(results: Mapping[str, Any]) -> Iterable[TaskResult]:
    """Yield the metrics of what lm-eval returned: those of tasks, and of groups of tasks."""
    counts = results.get("n-samples", {})
    for kind in ("results", "groups"):
        for name, metrics in results.get(kind, {}).items():
            # Groups are listed among tasks too, there without metrics of their own.
            if kind == "results" and name in results.get("groups", {}):
                continue
            questions = counts.get(name, {}).get("effective") or metrics.get("sample_len") or 0
            samples = results.get("samples", {}).get(name, ())
            yield from _read_metrics(name, metrics, int(questions), samples)


def _read_metrics(
    name: str, metrics: Mapping[str, Any], questions: int, samples: Sequence[Mapping[str, Any]]
) -> Iterable[TaskResult]:
    by_question: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for sample in samples:
        for metric in sample["metrics"]:
            if isinstance(sample.get(metric), int | float):
                by_question[metric, sample["filter"]][sample["doc_id"]] = float(sample[metric])
    for key, value in metrics.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = metrics.get(f"{metric}_stderr,{filtered}")
        title = metric if filtered == "none" else f"{metric} {filtered}"
        error = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
        score = TaskScore(name, title, float(value), error, questions)
        values = by_question[metric, filtered]
        # A difference over questions means something only for what is a mean over them.
        is_mean = bool(values) and math.isclose(sum(values.values()) / len(values), score.value, abs_tol=1e-6)
        yield TaskResult(score, values if is_mean else {})


def _compared(result: TaskResult, yardstick: TaskResult | None) -> TaskScore:
    if yardstick is None:
        return result.score
    mine, other = result.by_question, yardstick.by_question
    if not mine or mine.keys() != other.keys():
        return replace(result.score, difference=result.score.value - yardstick.score.value)
    differences = [mine[question] - other[question] for question in mine]
    count, mean = len(differences), sum(differences) / len(differences)
    if count < 2:
        return replace(result.score, difference=mean)
    variance = sum((difference - mean) ** 2 for difference in differences) / (count - 1)
    return replace(result.score, difference=mean, difference_stderr=math.sqrt(variance / count))


def _load(sizes: Sizes, model: str) -> None:
    names = sizes.tasks
    manager, specs = _manager(sizes, model)
    try:
        manager.load(specs)
    except KeyError as error:
        missing = [name for name in specs if name not in manager.all_tasks and not Path(name).exists()]
        if not missing:
            raise ConfigError(f"lm-eval cannot load {', '.join(names)}: {error}") from error
        raise ConfigError(unknown("task", missing[0], manager.all_tasks)) from error
    except Exception as error:  # of data sets, networks and tasks' own code
        raise ConfigError(
            f"lm-eval cannot load {', '.join(names)}: {type(error).__name__}: {error}"
        ) from error


def _manager(sizes: Sizes, model: str) -> tuple[Any, list[str]]:
    """Return lm-eval's index of tasks, and what to load: names, and YAML files, those of folders too."""
    from lm_eval.tasks import TaskManager

    specs: list[str] = []
    for name in sizes.tasks:
        path = Path(name)
        # Files that begin so are parts of others.
        files = sorted(file for file in path.glob("*.yaml") if not file.name.startswith("_"))
        if path.is_dir() and not files:
            raise ConfigError(f"the folder {name} has no tasks: no *.yaml files")
        if path.suffix in {".yaml", ".yml"} and not path.is_file():
            raise ConfigError(f"there is no task file {name}")
        specs += map(str, files) if path.is_dir() else [name]
    # The index of all of lm-eval's own tasks takes a while to read.
    are_names = any(not Path(spec).is_file() for spec in specs)
    # Tasks that are made as long as is asked for count with the tokenizer.
    metadata = {"tokenizer": locate(model), **sizes.task_metadata}
    return TaskManager(include_defaults=are_names, metadata=metadata), specs
