"""Scores of tasks: what lm-eval returned, differences from the yardstick question by question, and the report."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from nibble.errors import ConfigError
from nibble.evals import tasks
from nibble.evals.report import Report, SchemeResult, Sizes, TaskScore


def results(right: list[int]) -> dict[str, Any]:
    """As lm-eval returns them: a mean over questions with two filters, a metric that is no mean, and a group."""
    mean = sum(right) / len(right)
    samples = [
        {"doc_id": number, "filter": name, "metrics": ["exact_match"], "exact_match": value}
        for name in ("strict", "none")
        for number, value in enumerate(right)
    ]
    return {
        "results": {
            "t": {
                "alias": "t", "name": "t", "sample_len": len(right),
                "exact_match,strict": mean, "exact_match_stderr,strict": 0.1,
                "exact_match,none": mean, "exact_match_stderr,none": "N/A",
                "f1,none": 0.25, "f1_stderr,none": math.nan,
            },
            "all": {"alias": "all", "exact_match,none": mean},
        },
        "groups": {"all": {"alias": "all", "exact_match,none": mean}},
        "n-samples": {"t": {"original": 100, "effective": len(right)}},
        "samples": {"t": samples},
    }  # fmt: skip


def test_what_lm_eval_returned_is_read() -> None:
    found = list(tasks.read_results(results([1, 0, 1, 1])))
    assert [(one.score.title, one.score.value, one.score.stderr, one.score.questions) for one in found] == [
        ("t exact_match strict", 0.75, 0.1, 4),
        ("t exact_match", 0.75, None, 4),
        ("t f1", 0.25, None, 4),
        ("all exact_match", 0.75, None, 0),
    ]
    assert [dict(one.by_question) for one in found] == [{0: 1, 1: 0, 2: 1, 3: 1}] * 2 + [{}] * 2


def test_differences_are_taken_over_the_same_questions() -> None:
    yardstick, scheme = (
        list(tasks.read_results(results(right))) for right in ([1, 1, 1, 0, 1], [1, 0, 1, 1, 0])
    )
    strict, _, f1, _ = tasks.scores(scheme, yardstick)
    # By hand: differences 0, -1, 0, 1, -1, whose standard deviation is sqrt(0.7).
    assert strict.difference == pytest.approx(-0.2)
    assert strict.difference_stderr == pytest.approx(math.sqrt(0.7 / 5))
    assert (f1.difference, f1.difference_stderr) == (0, None)
    own = tasks.scores(yardstick, yardstick)
    assert [score.difference for score in own] == [0] * 4 and own[0].difference_stderr == 0


def test_questions_that_differ_are_not_compared_one_by_one() -> None:
    yardstick, scheme = (list(tasks.read_results(results(right))) for right in ([1, 1, 1], [1, 0, 1, 0]))
    score = tasks.scores(scheme, yardstick)[0]
    assert (score.difference, score.difference_stderr) == (-0.5, None)


def test_the_report_has_scores_and_differences() -> None:
    def result(name: str, score: TaskScore) -> SchemeResult:
        return SchemeResult(name, name, "", 100, 1.0, "auto", 4.0, 1.0, 1.0, 0.0, 0.0, tasks=(score,))

    one = TaskScore("gsm8k", "exact_match", 0.9123, 0.0078, 1319, 0.0, 0.0)
    other = TaskScore("gsm8k", "exact_match", 0.9012, 0.0082, 1319, -0.0111, 0.0037)
    report = Report("m", "bf16", (result("bf16", one), result("nvfp4", other)))
    assert report.header()[-1] == "gsm8k exact_match"
    assert [row[-1] for row in report.rows()] == ["0.9123 ± 0.0078", "0.9012 ± 0.0082"]
    text = report.as_markdown()
    assert (
        "| nvfp4 | gsm8k exact_match | -0.0111 ± 0.0037 | -3.0 |" in text and "gsm8k 1,319 questions" in text
    )
    assert report.as_dict()["results"][1]["tasks"][0]["difference"] == -0.0111


def test_names_between_commas() -> None:
    assert Sizes(tasks=("gsm8k, arc_easy", "gsm8k", "x.yaml")).tasks == ("gsm8k", "arc_easy", "x.yaml")


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"num_fewshot": -1}, {"metadata": "{"}, {"metadata": "[1]"}])
def test_bad_sizes(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sizes(**wrong)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match="not installed: pip install lm-eval"):
        tasks.check(Sizes(tasks=("gsm8k",)), "demo")
    tasks.check(Sizes(), "demo")
