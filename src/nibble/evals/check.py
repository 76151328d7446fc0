"""Checking: GSM8K with the cache that is to be served, held against the thresholds of thresholds.py.

plan the scheme, and the yardstick where a drop is allowed, without weights
read the questions
yardstick: its answers
scheme: its answers, and the verdict
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nibble.attention.planner.resolve import require_runnable
from nibble.config import Config
from nibble.engine.certificate_lookup import is_unquantised
from nibble.engine.llm import LLM
from nibble.engine.plan import plan_engine
from nibble.errors import ConfigError
from nibble.evals import gsm8k, tasks
from nibble.evals.gsm8k import Answers, Case, FewShot
from nibble.evals.report import YARDSTICK, Entry, TaskScore
from nibble.evals.thresholds import MAX_DROP, TASK, Threshold, find

SLACK = 1e-9
"""Of comparisons: shares are sums of floats."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was asked of a model with a cache, and what it came to. Shares lie in [0, 1]."""

    model: str
    scheme: str
    threshold: Threshold | None
    """The least accuracy that is asked of this model; None where only the drop counts."""
    score: TaskScore
    """With its difference from the yardstick, where that ran."""
    yardstick: TaskScore | None
    few_shot: FewShot
    """As it was asked."""
    without_number: int
    cut: int

    @property
    def holds(self) -> bool:
        """Return whether every threshold is kept."""
        return not any(self.violations())

    @property
    def drop(self) -> float | None:
        """Return how far the accuracy lies below the yardstick's; None where that did not run."""
        return None if self.score.difference is None else -self.score.difference

    @property
    def line(self) -> str:
        """Return the verdict in a sentence."""
        if violations := tuple(self.violations()):
            return f"{self.scheme} falls short: {'; '.join(violations)}"
        return f"{self.scheme} holds: {_percent(self.score.value)} of {TASK}, {' and '.join(self._bounds())}"

    def violations(self) -> Iterator[str]:
        """Yield where it falls short."""
        # Two decimals, so that what is less does not look the same.
        accuracy, row = f"{100 * self.score.value:.2f} %", self.threshold
        if row and self.score.value < row.least - SLACK:
            yield f"{accuracy} of {TASK} is less than the {_percent(row.least)} asked of {row.model}"
        if self.yardstick and self.drop is not None and self.drop > MAX_DROP + SLACK:
            yield (
                f"{accuracy} of {TASK} is {100 * self.drop:.2f} points below the {_percent(self.yardstick.value)} of "
                f"the same model's cache in {YARDSTICK}, and {_points(MAX_DROP)} is allowed"
            )

    def _bounds(self) -> Iterator[str]:
        """Yield what is asked."""
        if self.threshold:
            yield f"at least {_percent(self.threshold.least)}"
        if self.yardstick:
            least = max(self.yardstick.value - MAX_DROP, 0.0)
            yield f"at least {_percent(least)} ({YARDSTICK} less {_points(MAX_DROP)} point)"

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the table: a cache, its accuracy, what is asked of it."""
        if self.yardstick:
            yield YARDSTICK, _with_error(self.yardstick), ""
        yield self.scheme, _with_error(self.score), " and ".join(self._bounds())

    def notes(self) -> Iterator[str]:
        """Yield what weakens the verdict."""
        count = self.score.questions
        if row := self.threshold:
            yield f"The threshold is of {row.model} in {row.scheme}: {row.source}"
            yield from self._deviations(row)
            if self.score.stderr is None or abs(self.score.value - row.least) < 2 * self.score.stderr:
                yield (
                    f"{count:,} questions do not tell on which side of {row.least:g} it is: that is within two "
                    "standard errors of the accuracy."
                )
        else:
            yield (
                f"No least accuracy of this model in {self.scheme} is known, so it is held against its own cache in "
                f"{YARDSTICK}."
            )
        if self.drop is not None:
            yield from self._drop_notes(count)
        if self.without_number:
            yield f"{self.without_number:,} of {count:,} answers have no number, and are wrong."
        if self.cut:
            yield f"{self.cut:,} of {count:,} answers ended at {self.few_shot.max_tokens} tokens (--max-tokens)."

    def _deviations(self, row: Threshold) -> Iterator[str]:
        """Yield how questions were asked otherwise than where the threshold was set."""
        if self.few_shot.num_fewshot != row.num_fewshot:
            yield f"It was set with {row.num_fewshot} examples, and here are {self.few_shot.num_fewshot}."
        if self.score.questions != (count := row.limit or gsm8k.QUESTIONS - row.num_fewshot):
            yield f"It was set on {count:,} questions, and here are {self.score.questions:,}."
        if self.few_shot.max_tokens != (tokens := FewShot().max_tokens):
            yield f"It was set with answers of {tokens} tokens at most, and here are {self.few_shot.max_tokens}."
        if self.few_shot.apply_chat_template:
            yield "It was set without a chat template."

    def _drop_notes(self, count: int) -> Iterator[str]:
        if self.score.difference_stderr is not None:
            yield (
                f"The drop is {_points(self.drop or 0.0)} ± {_points(self.score.difference_stderr)} points over the "
                f"same {count:,} questions, ± one standard error."
            )
        if self.yardstick and not self.yardstick.value:
            yield f"{YARDSTICK} itself answers no question right, so what follows from it says nothing of this cache."
        needed = questions_needed(self.score)
        if count < needed:
            suffix = f", and {TASK} has {gsm8k.QUESTIONS:,}" if needed > gsm8k.QUESTIONS else ""
            yield (
                f"{count:,} questions are too few to tell {_points(MAX_DROP)} point: two standard errors of the drop "
                f"are to be less than that, which takes about {needed:,}{suffix}."
            )

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {"holds": self.holds, "line": self.line, "notes": list(self.notes()), **asdict(self)}


def questions_needed(score: TaskScore) -> int:
    """Return how many questions it takes until MAX_DROP is two standard errors of the drop.

    Where no answer changed, three in all questions still might have (the rule of three, at 95 %): otherwise three
    questions without a change would prove that there is none. Over n questions that is an error of sqrt(3) / n.
    """
    variance = score.questions * (score.difference_stderr or 0.0) ** 2
    return math.ceil(max(4 * variance / MAX_DROP**2, 2 * math.sqrt(3) / MAX_DROP))


def check(
    config: Config,
    few_shot: FewShot | None = None,
    path: Path | None = None,
    *,
    relative: bool = False,
) -> Verdict:
    """Ask a model the questions of GSM8K, and hold its accuracy against what is asked of it.

    Args:
        config: What is to be served.
        few_shot: How questions are asked; what is left out is as where the threshold was set.
        path: The file of questions; the hub's, if left out.
        relative: Compare with an unquantised cache too where a least accuracy is known.

    Raises:
        ConfigError: There is nothing to check, the questions cannot be had, or options do not go together.
        NibbleError: The model cannot be served.
    """
    # What is measured needs no certificate.
    config = replace(config, require_quality="")
    plan = plan_engine(config)
    require_runnable(plan.plan)
    entry = Entry.of(config)
    # Thresholds are of checkpoints as they are: with other weights it is another model.
    row = None if config.weights else find(config.model, config.kv_format)
    is_compared = relative or row is None
    if is_compared and is_unquantised(plan):
        if row:
            raise ConfigError(
                f"--relative compares with a cache in {YARDSTICK}, which {entry.name} is itself; leave it out"
            )
        weights = f" and {config.weights} weights" if config.weights else ""
        raise ConfigError(
            f"a cache in {entry.name} is what others are compared with, and no least accuracy of {config.model} with "
            f"it{weights} is known (docs/thresholds.md); name a scheme as nvfp4 or fp8_e4m3 (`nibble formats` has all)"
        )
    few_shot = _completed(few_shot or FewShot(), row)
    cases = gsm8k.read_cases(gsm8k.locate_questions(path), few_shot.num_fewshot or 0, few_shot.limit)
    yardstick = None
    if is_compared:
        plain = Entry.parse(YARDSTICK).alone(config)
        require_runnable(plan_engine(plain).plan)
        yardstick = _answers(plain, cases, few_shot)
    answers = _answers(config, cases, few_shot)
    return verdict(config.model, entry.name, row, few_shot, answers, yardstick)


def _completed(few_shot: FewShot, row: Threshold | None) -> FewShot:
    """Return how questions are asked, with nothing left out but the limit, whose absence is all questions."""
    usual = row.num_fewshot if row else gsm8k.NUM_FEWSHOT
    examples = usual if few_shot.num_fewshot is None else few_shot.num_fewshot
    limit = few_shot.limit if few_shot.limit is not None or row is None else row.limit
    return replace(few_shot, num_fewshot=examples, limit=limit)


def _answers(config: Config, cases: Sequence[Case], few_shot: FewShot) -> Answers:
    # The next engine needs this one's memory.
    with LLM(**asdict(config)) as llm:
        return gsm8k.answer(llm, cases, few_shot)


def verdict(
    model: str,
    scheme: str,
    row: Threshold | None,
    few_shot: FewShot,
    answers: Answers,
    yardstick: Answers | None,
) -> Verdict:
    """Return the verdict on some answers.

    Args:
        model: as it was named.
        scheme: of its cache.
        row: the least accuracy that is asked of it.
        few_shot: how questions were asked.
        answers: with the cache.
        yardstick: with an unquantised one, to the same questions; None where no drop is asked for.
    """
    compared = [yardstick.result] if yardstick else []
    (score,) = tasks.scores([answers.result], compared)
    return Verdict(
        model=model,
        scheme=scheme,
        threshold=row,
        score=score,
        yardstick=yardstick.result.score if yardstick else None,
        few_shot=few_shot,
        without_number=answers.without_number,
        cut=answers.cut,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def _with_error(score: TaskScore) -> str:
    return _percent(score.value) + ("" if score.stderr is None else f" ± {_points(score.stderr)}")
