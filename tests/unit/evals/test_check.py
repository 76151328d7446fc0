"""GSM8K: its questions, the numbers in answers, which threshold is meant, the verdict, and the command's exit code."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from typer.testing import CliRunner

from nibble.cli.main import app
from nibble.engine.request import Completion, Output
from nibble.errors import BackendError, ConfigError
from nibble.evals import gsm8k, thresholds
from nibble.evals.check import Verdict, questions_needed, verdict
from nibble.evals.gsm8k import Case, FewShot, last_number
from nibble.evals.thresholds import THRESHOLDS, Threshold, find
from nibble.formats import scheme as schemes
from nibble.models import hub
from tiny import save_tiny

PAIRS = (
    ("What is 1 + 1?", "It is <<1+1=2>>2.\n#### 2"),
    ("What is 500 + 734?", "They are 1,234.\u2028So:\n#### 1,234"),
    ("What is 3 - 4?", "#### -1"),
    ("What is 2 + 2?", "#### 4"),
)
LLAMA = THRESHOLDS[0]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    lines = (
        json.dumps({"question": question, "answer": answer}, ensure_ascii=False) for question, answer in PAIRS
    )
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


# Answers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", 42),
        ("She makes $1,234.50.", 1234.5),
        ("16 - 3 = 13, so $13.", 13),
        ("It is -7 degrees", -7),
        ("2.5 and then 2.50", 2.5),
        ("007", 7),
        ("12,345,678", 12345678),
        ("no number at all", None),
        ("", None),
    ],
)
def test_the_last_number_counts(text: str, number: float | None) -> None:
    assert last_number(text) == number


def outputs(*texts: str, finish_reason: Any = "stop", error: str | None = None) -> list[Output]:
    return [Output("p", (1,), (Completion(0, text, (1,), finish_reason, error=error),)) for text in texts]


def test_answers_are_graded() -> None:
    cases = [Case("p", number) for number in (2.0, 1234.0, -1.0, 4.0)]
    answers = gsm8k.grade(outputs("so 2", "$1,234.", "1", "four"), cases)
    assert dict(answers.result.by_question) == {0: 1, 1: 1, 2: 0, 3: 0}
    assert answers.result.score.value == 0.5 and answers.result.score.questions == 4
    # As the standard deviation of the four, over the square root of their number.
    assert answers.result.score.stderr == pytest.approx(math.sqrt(1 / 3) / 2)
    assert (answers.without_number, answers.cut) == (1, 0)
    assert gsm8k.grade(outputs("2", finish_reason="length"), cases[:1]).cut == 1
    with pytest.raises(BackendError, match="was not answered, so there is no accuracy: broken"):
        gsm8k.grade(outputs("2", error="broken"), cases[:1])


# Questions


def test_the_first_questions_are_examples(questions: Path) -> None:
    cases = gsm8k.read_cases(questions, 2, None)
    assert [case.answer for case in cases] == [-1, 4]
    assert cases[0].prompt == (
        "Question: What is 1 + 1?\nAnswer: It is <<1+1=2>>2.\n#### 2\n\n"
        "Question: What is 500 + 734?\nAnswer: They are 1,234.\u2028So:\n#### 1,234\n\n"
        "Question: What is 3 - 4?\nAnswer:"
    )
    assert gsm8k.read_cases(questions, 2, 1) == cases[:1]
    assert [case.prompt for case in gsm8k.read_cases(questions, 0, 1)] == [
        "Question: What is 1 + 1?\nAnswer:"
    ]


def test_parquet_has_the_same_questions(questions: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "test.parquet"
    rows = [{"question": question, "answer": answer} for question, answer in PAIRS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert gsm8k.read_cases(path, 1, None) == gsm8k.read_cases(questions, 1, None)
    path.write_bytes(b"not Parquet")
    with pytest.raises(ConfigError, match=r"as Parquet: .* name the file with --data FILE"):
        gsm8k.read_cases(path, 1, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "question 2: it must have `question` and `answer`, both texts"),
        ('{"question": "q", "answer": 2}', "question 2: it must have"),
        ('{"question": "q", "answer": "two"}', "question 2: its answer has no number"),
        ("", "has 1 questions, and the first 1 are examples, so none is asked"),
    ],
)
def test_a_file_of_something_else_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n' + line)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}.*{message}"):
        gsm8k.read_cases(path, 1, None)


def test_without_a_network_it_says_which_file_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("not there")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", missing)
    monkeypatch.setattr(gsm8k, "hub_problem", lambda: "no connection")
    advice = re.escape(gsm8k.JSON_LINES) + ".* --data FILE"
    with pytest.raises(ConfigError, match=rf"are not on this machine \(no connection\); fetch {advice}"):
        gsm8k.locate_questions(None)
    monkeypatch.setattr(gsm8k, "hub_problem", lambda: "")
    with pytest.raises(ConfigError, match=f"cannot fetch .* of openai/gsm8k: not there; fetch {advice}"):
        gsm8k.locate_questions(None)
    with pytest.raises(ConfigError, match=f"there is no file .*none; fetch {advice}"):
        gsm8k.locate_questions(tmp_path / "none")


def test_questions_in_the_hubs_cache_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        assert local_files_only
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", cached)
    monkeypatch.setattr(gsm8k, "hub_problem", lambda: pytest.fail("it asks the network"))
    assert gsm8k.locate_questions(None) == tmp_path


@pytest.mark.parametrize("values", [{"limit": 0}, {"num_fewshot": -1}, {"max_tokens": 0}])
def test_sizes_out_of_range(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        FewShot(**values)


# Which threshold is meant


def folder_with(path: Path, **config: Any) -> str:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_model_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    assert find(LLAMA.model, "nvfp4") is LLAMA
    assert find(LLAMA.model.lower(), "nvfp4_amax+kmean") is LLAMA
    assert find(LLAMA.model, "fp8_e4m3") is None and find(LLAMA.model, "some.json") is None
    assert find("Llama-3.1-8B-Instruct-NVFP4", "nvfp4") is None and find("other/model", "nvfp4") is None


def test_a_copy_is_known_by_its_folder_or_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, other = [LLAMA.architecture], ["Qwen3ForCausalLM"]
    name = LLAMA.model.rpartition("/")[2]
    assert find(folder_with(tmp_path / "a" / name, architectures=right), "nvfp4") is LLAMA
    assert find(folder_with(tmp_path / "b" / name, architectures=other), "nvfp4") is None
    tuned = folder_with(tmp_path / "tuned", architectures=right, _name_or_path=LLAMA.model)
    assert find(tuned, "nvfp4") is None, "a fine-tune is another model"
    cache = tmp_path / "hub"
    snapshot = cache / f"models--{LLAMA.model.replace('/', '--')}" / "snapshots" / "0123"
    folder_with(snapshot, architectures=right)
    assert find(str(snapshot), "nvfp4") is LLAMA
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    assert hub.local_folder(LLAMA.model) == snapshot and find(LLAMA.model, "nvfp4") is LLAMA


def test_thresholds_are_of_schemes_that_there_are() -> None:
    assert {row.scheme for row in THRESHOLDS} <= set(schemes.names())
    assert all(0 < row.least < 1 and row.source.startswith("https://") for row in THRESHOLDS)
    assert len({(row.model, row.scheme) for row in THRESHOLDS}) == len(THRESHOLDS)
    least = {(row.model, row.scheme): row.least for row in THRESHOLDS}
    assert (
        least["nvidia/Llama-3.1-8B-Instruct-NVFP4", "nvfp4"] == 0.617
        and least["Qwen/Qwen3.5-9B", "nvfp4"] == 0.7
    )
    assert all(f"| `{row.model}` |" in thresholds.page() for row in THRESHOLDS)


# The verdict


def answered(right: Sequence[int]) -> gsm8k.Answers:
    return gsm8k.grade(outputs(*(f"{one}" for one in right)), [Case("p", 1.0)] * len(right))


def judged(right: Sequence[int], plain: Sequence[int] = (), row: Threshold | None = None) -> Verdict:
    few_shot = FewShot(num_fewshot=row.num_fewshot if row else 5)
    yardstick = answered(plain) if plain else None
    return verdict("m", "nvfp4", row, few_shot, answered(right), yardstick)


def test_a_least_accuracy() -> None:
    enough, short = (judged([1] * right + [0] * (1000 - right), row=LLAMA) for right in (617, 616))
    assert enough.holds and enough.line == "nvfp4 holds: 61.7 % of GSM8K, at least 61.7 %"
    assert not short.holds and short.line == (
        f"nvfp4 falls short: 61.60 % of GSM8K is less than the 61.7 % asked of {LLAMA.model}"
    )
    barely = judged([1] * 370 + [0] * 230, row=LLAMA)
    assert not barely.holds and "61.67 % of GSM8K is less than the 61.7 %" in barely.line
    notes = "\n".join(short.notes())
    assert LLAMA.source in notes and "set on 1,314 questions, and here are 1,000" in notes
    assert "1,000 questions do not tell on which side of 0.617 it is" in notes
    assert "do not tell" not in "\n".join(judged([1] * 900 + [0] * 100, row=LLAMA).notes())
    assert "set with 5 examples, and here are 1" in "\n".join(
        replace(short, few_shot=FewShot(num_fewshot=1, max_tokens=9)).notes()
    )


def test_a_drop_of_one_point_is_allowed() -> None:
    plain = [1] * 900 + [0] * 100
    at_bound = judged([1] * 890 + [0] * 110, plain)
    assert at_bound.holds and at_bound.line == (
        "nvfp4 holds: 89.0 % of GSM8K, at least 89.0 % (bf16 less 1.0 point)"
    )
    beyond = judged([1] * 889 + [0] * 111, plain)
    assert not beyond.holds and beyond.line == (
        "nvfp4 falls short: 88.90 % of GSM8K is 1.10 points below the 90.0 % of the same model's cache in bf16, and 1.0 "
        "is allowed"
    )
    assert [row[:2] for row in beyond.rows()] == [("bf16", "90.0 % ± 0.9"), ("nvfp4", "88.9 % ± 1.0")]
    assert judged([1] * 1000, plain).holds


def test_both_may_fall_short() -> None:
    both = judged([0] * 100, [1] * 100, LLAMA)
    assert len(list(both.violations())) == 2 and "; " in both.line


def test_too_few_questions_are_named() -> None:
    same = judged([1, 0, 1], [1, 0, 1])
    # The rule of three: 2 sqrt(3) / 0.01, rounded up.
    assert questions_needed(same.score) == 347 and same.holds
    assert "3 questions are too few to tell 1.0 point" in "\n".join(same.notes())
    assert "too few" not in "\n".join(judged([1] * 400, [1] * 400).notes())
    # Every tenth answer changes, back and forth: a variance of 0.1 a question, so 4 * 0.1 / 0.01**2.
    plain, other = [1, 0] * 500, ([1, 0] * 9 + [0, 1]) * 50
    changed = judged(other, plain)
    assert questions_needed(changed.score) == pytest.approx(4000, rel=0.01)
    assert "and GSM8K has 1,319" in "\n".join(changed.notes())


def test_a_yardstick_that_answers_nothing_says_nothing() -> None:
    assert "bf16 itself answers no question right" in "\n".join(judged([0, 0], [0, 0]).notes())


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("check"), max_position_embeddings=512, num_hidden_layers=2))


def run(*words: str) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(
        app, ["check", *words, "--kv-scales", "one"]
    )


def test_the_command_runs_the_model_with_both_caches(model: str, questions: Path) -> None:
    words = (
        model,
        "nvfp4",
        "--data",
        str(questions),
        "--num-fewshot",
        "1",
        "--limit",
        "2",
        "--max-tokens",
        "4",
    )
    result = run(*words)
    # A random model: what it answers is not known, but the table, the verdict and the code belong together.
    assert result.exit_code == ("falls short" in result.stdout), result.output
    assert "bf16" in result.stdout and "nvfp4 " in result.stdout and "too few" in result.stderr
    found = json.loads(run(*words, "--json").stdout)
    assert (found["score"]["questions"], found["yardstick"]["questions"]) == (2, 2)
    assert found["holds"] == (result.exit_code == 0) and found["threshold"] is None


def test_exit_codes(model: str, questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(right: dict[str, bool]) -> None:
        def answer(llm: Any, cases: Sequence[Case], few_shot: FewShot) -> gsm8k.Answers:
            asked.append(llm.config.kv_format)
            texts = (f"{case.answer}" if right[asked[-1]] else "none" for case in cases)
            return gsm8k.grade(outputs(*texts), cases)

        monkeypatch.setattr(gsm8k, "answer", answer)

    words = (model, "fp8_e4m3", "--data", str(questions))
    ask({"bf16": True, "fp8_e4m3": True})
    assert run(*words, "--num-fewshot", "1").exit_code == 0 and asked == ["bf16", "fp8_e4m3"]
    ask({"bf16": True, "fp8_e4m3": False})
    result = run(*words, "--num-fewshot", "1")
    assert result.exit_code == 1 and "fp8_e4m3 falls short: 0.00 % of GSM8K is 100.00 points" in result.stdout
    # With a threshold of its own only that cache is asked, as many examples as it was set with.
    (architecture,) = json.loads((Path(model) / "config.json").read_text())["architectures"]
    name = f"someone/{Path(model).name}"
    row = Threshold(name, architecture, "bf16", "fp8_e4m3", 2, 1, 0.5, "https://x")
    monkeypatch.setattr(thresholds, "THRESHOLDS", (row,))
    asked.clear()
    result = run(*words)
    assert result.exit_code == 1 and asked == ["fp8_e4m3"] and "asked of someone/" in result.stdout
    ask({"bf16": True, "fp8_e4m3": True})
    assert run(*words).exit_code == 0
    found = json.loads(run(*words, "--json").stdout)
    assert found["few_shot"]["num_fewshot"] == 2 and found["score"]["questions"] == 1
    asked.clear()
    assert run(*words, "--relative").exit_code == 0 and asked == ["bf16", "fp8_e4m3"]
    # With other weights it is another model.
    asked.clear()
    assert run(*words, "--num-fewshot", "1", "--weights", "fp8").exit_code == 0 and asked == [
        "bf16",
        "fp8_e4m3",
    ]


def test_nothing_to_compare_is_refused_before_weights_load(
    model: str, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nibble.evals.check.LLM", lambda **_: pytest.fail("it loads the model"))
    result = run(model, "bf16", "--data", str(questions))
    assert result.exit_code == 2 and "name a scheme as nvfp4" in result.stderr
    result = run(model, "nvfp4", "--data", str(questions), "--num-fewshot", "4")
    assert result.exit_code == 2 and "so none is asked" in result.stderr


def test_chats(model: str, questions: Path, tmp_path: Path) -> None:
    words = ("nvfp4", "--data", str(questions), "--num-fewshot", "0", "--limit", "1", "--max-tokens", "2")
    result = run(model, *words, "--apply-chat-template")
    assert result.exit_code == 2 and "template" in result.stderr
    chatty = tmp_path / "chatty"
    shutil.copytree(model, chatty)
    (chatty / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    found = json.loads(run(str(chatty), *words, "--apply-chat-template", "--json").stdout)
    assert found["score"]["questions"] == 1 and found["few_shot"]["apply_chat_template"]
