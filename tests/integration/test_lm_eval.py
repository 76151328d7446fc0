"""lm-eval over Nibble, in process and through the server: what plain Transformers gives, to 1e-4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager  # noqa: E402

from lm_tasks import CHOICES, GENERATIONS, PlainTransformers, save_tasks  # noqa: E402
from nibble import LLM, ConfigError  # noqa: E402
from nibble.evals import tasks  # noqa: E402
from nibble.evals.lm_eval_model import NibbleLM  # noqa: E402
from nibble.evals.report import Sizes  # noqa: E402
from server.conftest import running  # noqa: E402
from tiny import save_tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture(scope="module", autouse=True)
def datasets_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    import datasets

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tasks(tmp_path_factory.mktemp("tasks") / "tasks")


def evaluate(model: Any, folder: Path, *names: str, **options: Any) -> Mapping[str, Any]:
    paths = [str(folder / f"local_{name}.yaml") for name in names]
    manager = TaskManager(include_defaults=False)
    result = lm_eval.simple_evaluate(model, tasks=paths, task_manager=manager, bootstrap_iters=0, **options)
    return result["samples"]


@pytest.fixture(scope="module")
def reference(model: Path, folder: Path) -> Mapping[str, Any]:
    return evaluate(PlainTransformers(model), folder, "choice", "generate", "rolling")


def compare(found: Mapping[str, Any], expected: Mapping[str, Any], *names: str) -> None:
    """The same answers, and log-likelihoods within 1e-4."""
    for name in names:
        assert len(found[f"local_{name}"]) == len(expected[f"local_{name}"]) > 1
        for one, other in zip(found[f"local_{name}"], expected[f"local_{name}"], strict=True):
            if name == "generate":
                (((mine,),), ((theirs,),)) = one["resps"], other["resps"]
                # Of a character whose bytes the answer's end cuts Nibble shows nothing.
                assert mine.rstrip("\ufffd") == theirs.rstrip("\ufffd")
                continue
            for (mine,), (theirs,) in zip(one["resps"], other["resps"], strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
                assert not isinstance(mine, tuple) or mine[1] == theirs[1]


@pytest.mark.parametrize("options", [{}, {"token_budget": 9}], ids=["whole", "chunks of 9"])
def test_in_process(model: Path, folder: Path, reference: Mapping[str, Any], options: dict[str, Any]) -> None:
    llm = LLM(str(model), kv_format="fp32", kv_memory="4MiB", max_running=8, **options)
    found = evaluate(NibbleLM(llm), folder, "choice", "generate", "rolling")
    compare(found, reference, "choice", "generate", "rolling")
    # The choices of a question share its pages.
    assert llm.engine.scheduler.metrics.cache.hit_tokens


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with running(
        "--kv-format", "fp32", "--kv-memory", "4MiB", "--served-model-name", "m", model=str(model)
    ) as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"tokenizer_backend": "huggingface", "batch_size": 4}, {"num_concurrent": 3}],
    ids=["own tokenizer", "remote"],
)
def test_local_completions(
    url: str, model: Path, folder: Path, reference: Mapping[str, Any], options: dict[str, Any]
) -> None:
    """Unmodified, with a tokenizer of its own, and with that of the server, which it finds by itself."""
    if "tokenizer_backend" in options:
        options = {**options, "tokenizer": str(model)}
    args = {"model": "m", "base_url": f"{url}/v1/completions", "max_length": 1024, **options}
    compare(
        evaluate("local-completions", folder, "choice", "generate", model_args=args),
        reference,
        "choice",
        "generate",
    )


@pytest.mark.slow
def test_local_chat_completions(url: str, model: Path, folder: Path) -> None:
    expected = evaluate(PlainTransformers(model), folder, "generate", apply_chat_template=True)
    args = {"model": "m", "base_url": f"{url}/v1/chat/completions"}
    found = evaluate("local-chat-completions", folder, "generate", model_args=args, apply_chat_template=True)
    compare(found, expected, "generate")


@pytest.mark.slow
def test_the_command(model: Path, folder: Path, reference: Mapping[str, Any], tmp_path: Path) -> None:
    """`nibble eval MODEL fp32 fp8_e4m3 --tasks FOLDER`: scores beside the rest, and differences by question."""
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 40)
    command = [
        *(sys.executable, "-m", "nibble", "eval", str(model), "fp8_e4m3", "--yardstick", "fp32", "--kv-scales", "one"),
        *("--tasks", f"{folder},{folder / 'local_choice.yaml'}", "--text", str(text), "--tokens", "64", "--recall-cases", "0"),
        *("--window", "64", "--kv-memory", "8MiB", "--max-running", "8", "--json", "--markdown", str(tmp_path / "table.md")),
    ]  # fmt: skip
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    yardstick, quantised = json.loads(done.stdout)["results"]
    scores = {(score["task"], score["metric"]): score for score in yardstick["tasks"]}
    for metric in ("acc", "acc_norm"):
        right = sum(sample[metric] for sample in reference["local_choice"])
        assert scores["local_choice", metric]["value"] == pytest.approx(right / len(CHOICES))
    assert (
        scores["local_choice", "acc"]["questions"] == len(CHOICES)
        and scores["local_choice", "acc"]["stderr"] > 0
    )
    assert scores["local_generate", "exact_match word"]["questions"] == len(GENERATIONS)
    assert all(score["difference"] == 0 for score in yardstick["tasks"])
    assert [score["task"] for score in quantised["tasks"]] == [score["task"] for score in yardstick["tasks"]]
    table = (tmp_path / "table.md").read_text()
    assert (
        "local_choice acc |" in table
        and "Difference from fp32" in table
        and "6 questions" not in table.split("\n")[0]
    )


def test_a_few_questions_with_examples_and_a_template(model: Path, folder: Path) -> None:
    llm = LLM(str(model), kv_format="fp32", kv_memory="4MiB", max_running=8)
    seen: list[str] = []
    sizes = Sizes(tasks=(str(folder / "local_generate.yaml"),), limit=2, apply_chat_template=True)
    (result,) = tasks.run(llm, sizes, seen.append)
    assert result.score.questions == 2 and len(result.by_question) == 2
    assert seen == ["tasks: answers 0 of 2"]
    with pytest.raises(ConfigError, match=r"lm-eval cannot run .*no_such_field"):
        tasks.run(llm, replace(sizes, gen_kwargs="no_such_field=1"), seen.append)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # lm-eval reads all of its own tasks first.
        pytest.param("arc_eazy", "did you mean 'arc_easy'", marks=pytest.mark.slow),
        ("nowhere.yaml", "there is no task file nowhere.yaml"),
        ("EMPTY", "has no tasks"),
        ("BROKEN", r"lm-eval cannot load .*broken.yaml: .*nowhere.jsonl"),
    ],
)
def test_tasks_that_cannot_be_run(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "EMPTY").mkdir()
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: x\ndataset_path: json\ndataset_kwargs: {data_files: {test: /nowhere.jsonl}}\n")
    path = {"EMPTY": str(tmp_path / "EMPTY"), "BROKEN": str(broken)}.get(name, name)
    with pytest.raises(ConfigError, match=message):
        tasks.check(Sizes(tasks=(path,)), "demo")
