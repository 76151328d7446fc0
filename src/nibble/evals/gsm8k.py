"""GSM8K over an LLM, as SGLang's tests ask it: few examples before each question, a plain text to go on, greedily.

The first questions of the test set are the examples, with their answers as they are, and the others are asked. An
answer counts by its last number. Sources: SGLang's `python/sglang/test/simple_eval_gsm8k.py` and `run_eval.py`; the
questions are Cobbe et al. 2021 (https://arxiv.org/abs/2110.14168), under the MIT licence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.config import option, sampling
from nibble.errors import BackendError, ConfigError
from nibble.evals.report import TaskScore
from nibble.evals.tasks import TaskResult
from nibble.models.hub import first_line, hub_problem

if TYPE_CHECKING:
    from nibble.engine.llm import LLM
    from nibble.engine.request import Output

REPOSITORY, FILE = "openai/gsm8k", "main/test-00000-of-00001.parquet"
"""Where the hub has the questions."""
JSON_LINES = (
    "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
)
"""The same questions from their authors."""
QUESTIONS = 1319
"""In the test set."""
NUM_FEWSHOT = 5
STOP = ("Question", "Assistant:", "<|separator|>")
"""What ends an answer: a model goes on with a question of its own."""
NUMBER = re.compile(r"-?\d+\.?\d*")
LEAST = {"limit": 1, "num_fewshot": 0, "max_tokens": 1}
"""The smallest values of options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShot:
    """How questions are asked. A field's doc is its command-line help, as in config.py."""

    limit: int | None = option(
        None, "Most questions; as many as the threshold was set on, or all, if left out."
    )
    num_fewshot: int | None = option(
        None, "Examples before each question; as many as the threshold was set with, or 5, if left out."
    )
    max_tokens: int = option(512, "Most tokens of an answer.")
    apply_chat_template: bool = option(
        False, "Put examples and question into the model's chat template; thresholds were set without it."
    )

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")


@dataclass(frozen=True, slots=True)
class Case:
    """A question with the examples before it, and the number that answers it."""

    prompt: str
    answer: float


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model answered."""

    result: TaskResult
    without_number: int
    """Answers in which there is no number; they are wrong."""
    cut: int
    """Answers that ended at `max_tokens`."""


def last_number(text: str) -> float | None:
    """Return the last number in a text, None where it has none. Commas are left out, as in 1,234."""
    numbers = NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


# --- questions --------------------------------------------------------------------------------------------------------


def locate_questions(path: Path | None) -> Path:
    """Return the file of questions: the one that was named, else the hub's, from its cache where it is there.

    Raises:
        ConfigError: There is no such file, or the hub cannot be reached.
    """
    if path is not None:
        if not path.is_file():
            raise ConfigError(f"there is no file {path}; {_advice()}")
        return path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(REPOSITORY, FILE, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    if problem := hub_problem():
        raise ConfigError(f"the questions of GSM8K are not on this machine ({problem}); {_advice()}")
    try:
        return Path(hf_hub_download(REPOSITORY, FILE, repo_type="dataset"))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"cannot fetch the questions of GSM8K, {FILE} of {REPOSITORY}: {first_line(error)}; {_advice()}"
        ) from error


def _advice() -> str:
    return f"fetch {JSON_LINES} where there is a network, and name the file with --data FILE"


def read_cases(path: Path, num_fewshot: int, limit: int | None) -> list[Case]:
    """Return the questions of a file, each with the first ones as examples before it.

    Args:
        path: JSON with a question a line, or Parquet; `question` and `answer`, whose last number is the right one.
        num_fewshot: examples, which are not asked.
        limit: most questions; None: all.

    Raises:
        ConfigError: The file cannot be read, or has no more questions than examples.
    """
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_json_lines(path)
    pairs = [_pair(row, f"{path}, question {number}") for number, row in enumerate(rows, 1)]
    if len(pairs) <= num_fewshot:
        raise ConfigError(
            f"{path} has {len(pairs)} questions, and the first {num_fewshot} are examples, so none is asked; name "
            "fewer with --num-fewshot, or a larger file with --data"
        )
    examples = "".join(f"{_begin(question)} {text}\n\n" for question, text, _ in pairs[:num_fewshot])
    end = None if limit is None else num_fewshot + limit
    return [Case(examples + _begin(question), number) for question, _, number in pairs[num_fewshot:end]]


def _begin(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _pair(row: Any, where: str) -> tuple[str, str, float]:
    """Return a question, its answer in words, and the answer's number."""
    question, text = (row.get("question"), row.get("answer")) if isinstance(row, dict) else (None, None)
    if not (isinstance(question, str) and isinstance(text, str)):
        raise ConfigError(f"{where}: it must have `question` and `answer`, both texts; {_advice()}")
    if (number := last_number(text)) is None:
        raise ConfigError(f"{where}: its answer has no number; {_advice()}")
    return question, text, number


def _read_json_lines(path: Path) -> Iterator[Any]:
    try:
        # Not splitlines(), which knows more ends of lines than JSON's writers.
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                yield _parse(line, f"{path}, line {number}")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read the questions of {path}: {error}; {_advice()}") from error


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); {_advice()}") from error


def _read_parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} is a Parquet file, and pyarrow is not installed: pip install pyarrow; or {_advice()}"
        ) from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as Parquet: {first_line(error)}; {_advice()}") from error
    return rows


# --- answers ----------------------------------------------------------------------------------------------------------


def answer(llm: LLM, cases: Sequence[Case], few_shot: FewShot) -> Answers:
    """Return what a model answers, greedily, and how much of it is right.

    Raises:
        RequestError: A prompt is too long, or there is no chat template.
        BackendError: An answer failed.
    """
    prompts = [case.prompt for case in cases]
    if few_shot.apply_chat_template:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(messages, sampling(max_tokens=few_shot.max_tokens, temperature=0.0))
    else:
        # An object, so that no defaults of the model's generation_config.json are applied.
        outputs = llm.generate(prompts, sampling(max_tokens=few_shot.max_tokens, temperature=0.0, stop=STOP))
    return grade(outputs, cases)


def grade(outputs: Sequence[Output], cases: Sequence[Case]) -> Answers:
    """Return how much of some answers is right. Raises BackendError where one failed."""
    for output in outputs:
        if error := output.completions[0].error:
            raise BackendError(f"a question of GSM8K was not answered, so there is no accuracy: {error}")
    numbers = [last_number(output.text) for output in outputs]
    right = {
        index: float(number == case.answer)
        for index, (number, case) in enumerate(zip(numbers, cases, strict=True))
    }
    value = sum(right.values()) / len(right)
    error_of_mean = math.sqrt(value * (1 - value) / (len(right) - 1)) if len(right) > 1 else None
    score = TaskScore("gsm8k", "exact_match", value, error_of_mean, len(right))
    cut = sum(output.completions[0].finish_reason == "length" for output in outputs)
    return Answers(TaskResult(score, right), numbers.count(None), cut)
