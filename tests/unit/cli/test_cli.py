"""The command line as a user and a script meet it: help, options, output, errors and exit codes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import nibble
from nibble.cli import docs, evaluate, plan
from nibble.cli.command import EXIT_CODES, FAILED, USAGE, takes
from nibble.cli.command import command as cli_command
from nibble.cli.main import COMMANDS, app
from nibble.config import Config, SamplingParams
from nibble.engine.request import Completion, Output
from nibble.errors import (
    PYTHON,
    ConfigError,
    NibbleError,
    OutOfPages,
    Refusal,
    RequestError,
    ScaleError,
    Unsupported,
    WeightError,
    set_caller,
)
from nibble.evals.gsm8k import FewShot
from nibble.evals.report import QUICK, Sizes
from tiny import save_tiny

NAMES = [entry.name for entry in COMMANDS]
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
ONE = ("--kv-scales", "one")


def run(*words: str, stdin: str | None = None) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(words), input=stdin)


def data(*words: str, code: int = 0, stdin: str | None = None) -> Any:
    """What a command prints as JSON."""
    result = run(*words, "--json", stdin=stdin)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_tiny(tmp_path_factory.mktemp("cli"), max_position_embeddings=512, num_hidden_layers=2)
    (folder / "heldout.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(400)))
    return str(folder)


@pytest.fixture(scope="module")
def chatty(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    return str(folder)


# Help


@pytest.mark.parametrize("name", NAMES)
def test_help_teaches(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output and f"nibble {name}" in result.output
    assert "--json" in result.output and "--debug" in result.output and "Exit codes" in result.output


def test_help_lists_all_commands() -> None:
    for words in ((), ("--help",), ("-h",)):
        assert all(name in run(*words).output for name in NAMES)


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"nibble {nibble.__version__}\n")


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_examples_are_of_the_command_and_fit_a_terminal(entry: Any) -> None:
    for line in entry.examples.splitlines():
        assert f"nibble {entry.name}" in line and len(line) <= 76


def test_options_of_examples_exist() -> None:
    known = set(re.findall(r"`(-[-\w]+)`", docs.reference()))
    for entry in COMMANDS:
        for word in shlex.split(entry.examples):
            if re.fullmatch(r"--?[a-z][\w-]*", word):
                assert word in known, word


def test_starting_is_light() -> None:
    code = "import nibble.cli.main, sys; sys.exit(bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    source = Path(nibble.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=source, check=False).returncode == 0


# Options from dataclasses


@pytest.mark.parametrize(
    ("name", "kind", "without"),
    [
        ("generate", Config, {"model", "seed"}),
        ("generate", SamplingParams, set()),
        ("chat", Config, {"model", "seed"}),
        ("plan", Config, {"model", "seed", *plan.IDLE}),
        ("eval", Sizes, set()),
        ("eval", Config, {*evaluate.SET_HERE, *evaluate.IDLE}),
        ("certify", Sizes, set()),
        ("check", FewShot, set()),
        ("check", Config, {*evaluate.SET_HERE, *evaluate.IDLE_IN_CHECKS}),
        ("certify", Config, {*evaluate.SET_HERE, *evaluate.IDLE}),
    ],
)
def test_every_field_is_an_option_with_its_doc_as_help(name: str, kind: type, without: set[str]) -> None:
    section = docs.reference().partition(f"## nibble {name}\n")[2].partition("\n## ")[0]
    for entry in fields(kind):
        if entry.name not in without:
            row = next(line for line in section.splitlines() if f"`--{entry.name.replace('_', '-')}`" in line)
            assert entry.metadata["doc"] in row


@pytest.mark.parametrize("name", ["plan", "tune", "calibrate"])
def test_options_without_effect_are_taken_and_not_shown(name: str, model: str) -> None:
    """So that the options of `serve` can be copied to a command that has no use for some of them."""
    shown = run(name, "--help").output
    assert "--fidelity-alert" not in shown and "--no-compile" not in shown
    assert "--watch-fidelity" not in shown or name == "plan"  # whose memory plan has room for it
    assert run("plan", model, "--no-compile", "--threads", "2", *ONE).exit_code == 0


def _parsed(*words: str) -> dict[str, Any]:
    """What a command that takes Config and SamplingParams is given."""
    seen: dict[str, Any] = {}
    small = typer.Typer()

    @takes("params", SamplingParams, "Sampling")
    @takes("config", Config, "Config", without=("model", "seed"))
    def command(config: dict[str, Any], params: dict[str, Any]) -> None:
        seen.update(config=Config(model="m", **config), params=SamplingParams(**params))

    small.command()(cli_command(command))
    result = CliRunner().invoke(small, list(words))
    assert result.exit_code == 0, result.output
    return seen


def test_sizes_that_are_left_out_are_those_of_the_quick_evaluation() -> None:
    seen: dict[str, Any] = {}
    small = typer.Typer()

    @takes("evaluation", Sizes, "Sizes", unset=True)
    def command(evaluation: dict[str, Any]) -> None:
        seen.update(full=replace(Sizes(), **evaluation), quick=replace(QUICK, **evaluation))

    small.command()(cli_command(command))
    assert CliRunner().invoke(small, []).exit_code == 0
    assert seen == {"full": Sizes(), "quick": QUICK}
    assert CliRunner().invoke(small, ["--tokens", "99"]).exit_code == 0
    assert (seen["quick"].tokens, seen["quick"].recall_lengths) == (99, QUICK.recall_lengths)


def test_defaults_are_the_dataclasses_own() -> None:
    assert _parsed() == {"config": Config(model="m"), "params": SamplingParams()}


def test_values_of_every_kind() -> None:
    seen = _parsed(
        *(
            "--kv-format",
            "nvfp4",
            "--kv-layers=-1=bf16",
            "--page-size",
            "32",
            "--no-prefix-cache",
            "--allow-staging",
        ),
        *("--temperature", "0.5", "--seed", "7", "--stop", "a", "--stop", "b", "--stop-token-ids", "3"),
        *("--logit-bias", "5=-1.5", "--logit-bias", "6=2", "--logprobs", "0"),
    )
    assert seen["config"] == Config(
        model="m",
        kv_format="nvfp4",
        kv_layers="-1=bf16",
        page_size=32,
        prefix_cache=False,
        allow_staging=True,
    )
    assert seen["params"] == SamplingParams(
        temperature=0.5,
        seed=7,
        stop=("a", "b"),
        stop_token_ids=(3,),
        logit_bias={5: -1.5, 6: 2.0},
        logprobs=0,
    )


# Errors and exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unsupported(Refusal("that", {"here": ("no",)})), 3),
        (ConfigError("no"), 2),
        (ScaleError("no"), 2),
        (RequestError("no"), 2),
        (WeightError("no"), 1),
        (OutOfPages("no"), 1),
        (NibbleError("no"), 1),
        (FileNotFoundError("no"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    def fails() -> None:
        raise error

    small = typer.Typer()
    small.command()(cli_command(fails))
    result = CliRunner().invoke(small, [])
    assert result.exit_code == code and code in EXIT_CODES
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ") or code == 130
    if code != 130:
        assert CliRunner().invoke(small, ["--debug"]).exception is error


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("plan", "MODEL", "--kv-format", "nvfp5"), 2, "did you mean 'nvfp4'?"),
        (("plan", "MODEL", "--gpu", "h20"), 2, "did you mean 'h200'?"),
        (("plan", "MODEL", "--kv-layers", "9=bf16"), 2, "layer 9 is out of range"),
        (("plan", "MODEL", "--page-size", "0"), 2, "page_size must be at least 1"),
        (("plan", "MODEL", "--page-size", "many"), 2, "page-size"),
        (("plan", "MODEL", "--nonsense"), 2, "--nonsense"),
        (("plan", "EMPTY"), 1, "it has no config.json"),
        (("generate", "--model", "MODEL"), 2, "no prompt was given"),
        (
            ("generate", "x", "--model", "MODEL", "--kv-format", "nvfp4", "--kv-scales", "/no.json"),
            2,
            "no such file",
        ),
        (("plan", "MODEL", "--kv-format", "nvfp4", "--kv-scales", "/no.json"), 2, "no such file"),
        (("calibrate", "MODEL", "--out", "/no/s.json"), 2, "there is no folder /no; create it"),
        (("generate", "x", "--model", "MODEL", "--top-p", "3"), 2, "top_p must lie in"),
        (("generate", "x", "--model", "MODEL", "--logit-bias", "x"), 2, "--logit-bias as INT=FLOAT"),
        (("generate", "x", "--model", "MODEL", "--compare"), 2, "--compare needs another cache"),
        (
            ("generate", "--prompt-file", "/nowhere.txt"),
            2,
            "the prompt file /nowhere.txt does not exist; name a",
        ),
        (("generate", "--prompt-file", "/"), 2, "the prompt file / cannot be read (Is a directory); name a"),
        (("generate", "x" * 600, "--model", "MODEL"), 1, "context length is 512 tokens"),
        (("chat", "MODEL"), 2, "no chat template"),
        (("eval", "MODEL", "nvfp5"), 2, "did you mean 'nvfp4'?"),
        (("eval", "MODEL", "--window", "8", "--stride", "8"), 2, "stride 8 must be smaller"),
        (("eval", "MODEL", "nvfp4:page_sze=3"), 2, "did you mean 'page_size'?"),
        (("certify", "MODEL", "nvfp5"), 2, "did you mean 'nvfp4'?"),
        (("certify", "MODEL", "bf16"), 2, "a cache in bf16 is not quantised"),
        (("serve", "MODEL", "--require-quality", "kl"), 2, "kl must be a number, as 0.01"),
        (
            ("generate", "x", "--model", "MODEL", "--kv-format", "nvfp4", "--require-quality", "kl=1"),
            2,
            "there is none yet",
        ),
        (("calibrate", "MODEL", "--text", "/nowhere.txt"), 2, "the text /nowhere.txt does not exist; name a"),
        (("calibrate", "MODEL", "--text", "SHORT"), 2, "at least 64 tokens"),
    ],
)
def test_errors_are_one_message(
    model: str, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "short.txt").write_text("short")
    places = {"MODEL": model, "EMPTY": str(tmp_path), "SHORT": str(tmp_path / "short.txt")}
    result = run(*(places.get(word, word) for word in words))
    assert result.exit_code == code
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


# plan


@pytest.mark.parametrize("gpu", ["h200", "b200", "rtx5090", "sm90", "cpu"])
def test_plan_on_any_gpu(model: str, gpu: str) -> None:
    found = data("plan", model, "--gpu", gpu, "--kv-format", "nvfp4", "--declared")
    assert found["bytes_per_token"] == 2 * 2 * 36 and found["budget"]["tokens"] > 0
    assert found["hardware"]["name"] == gpu
    assert set(found["groups"][0]["routes"]) >= {"prefill", "extend", "decode"}
    text = run("plan", model, "--gpu", gpu, "--kv-format", "nvfp4", "--declared")
    assert text.exit_code == 0 and "144 bytes a token" in text.stdout


def test_plan_refused_names_a_command_that_works(model: str) -> None:
    words = ("plan", model, "--kv-format", "nvfp4", "--decode-backend", "fa3", "--gpu", "h200")
    refused = run(*words)
    assert refused.exit_code == 3 and refused.stdout == ""
    command = refused.stderr.partition("what works: nibble ")[2].strip()
    assert run(*shlex.split(command)).exit_code == 0
    answer = data(*words, code=3)["refused"]
    assert answer["works"] == f"nibble {command}" and "fa3" in answer["reasons"]


@pytest.mark.parametrize(
    "words",
    [("plan", "MODEL", "--kv-format"), ("tune", "MODEL", "--kv-format"), ("eval", "MODEL")],
    ids=lambda w: w[0],
)
def test_a_command_that_works_has_no_options_that_nobody_gave(model: str, words: tuple[str, ...]) -> None:
    given = [model if word == "MODEL" else word for word in words]
    result = run(*given, "fp8_ds_mla", "--device", "cpu", "--max-running", "3")
    assert result.exit_code == 2, result.output
    options = re.findall(r" (--[\w-]+)", result.stderr.partition("what works: ")[2])
    assert sorted(options) == ["--device", *["--gpu"] * (words[0] != "tune"), "--kv-format", "--max-running"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("plan", "MODEL"), "nibble plan MODEL --kv-format"),
        (("generate", "x", "--model", "MODEL"), "nibble generate PROMPT --model MODEL --kv-format"),
        (("tune", "MODEL"), "nibble tune MODEL --kv-format"),
    ],
    ids=lambda value: value[0],
)
def test_what_works_is_a_command_of_the_program_that_was_called(
    model: str, words: tuple[str, ...], command: str
) -> None:
    given = [model if word == "MODEL" else word for word in words]
    refused = run(*given, "--kv-format", "fp8_ds_mla", "--device", "cpu")
    assert f"what works: {command.replace('MODEL', model)}" in refused.stderr


def test_what_works_is_a_call_in_python(model: str) -> None:
    before = set_caller(PYTHON)
    try:
        with pytest.raises(nibble.ConfigError) as error:
            nibble.LLM(model, kv_format="fp8_ds_mla", device="cpu")
        call = str(error.value).partition("what works: ")[2]
    finally:
        set_caller(before)
    assert call == f"LLM({model!r}, kv_format='fp8_e4m3', device='cpu')"


@pytest.mark.slow
def test_plan_of_what_does_not_fit_says_routes_and_what_is_missing() -> None:
    """Of a model whose weights are larger than the GPU: the routes, then needs and has; and no command that works."""
    refused = run("plan", "deepseek-r1", "--gpu", "h200", "--kv-format", "fp8_e4m3")
    assert refused.exit_code == 1
    assert "decode   triton" in refused.stdout and "35,136 bytes a token" in refused.stdout
    assert re.search(
        r"deepseek-r1 does not fit: needs at least 68\d\.\d+ GiB .*, and h200 has 141\.00 GiB", refused.stderr
    )
    assert "what works" not in refused.stderr
    found = data("plan", "deepseek-r1", "--gpu", "h200", "--kv-format", "fp8_e4m3", code=1)
    assert found["budget"] is None and "does not fit" in found["does_not_fit"]
    assert found["groups"][0]["routes"]["decode"]["backend"] == "triton"
    asked = ("--prefill-backend", "flashinfer", "--decode-backend", "flashinfer", "--declared")
    refused = run("plan", "deepseek-r1", "--gpu", "h200", "--kv-format", "fp4_mx16", *asked)
    assert refused.exit_code == 3 and "what works" not in refused.stderr
    assert "what would serve it: nibble plan deepseek-r1" in refused.stderr
    assert "which does not fit: needs at least" in refused.stderr


def test_plan_says_why_no_host_tier_is_made() -> None:
    few = ("--kv-memory", "1300KiB", "--max-context", "512", "--max-running", "24", "--device", "cpu")
    text = run("plan", "demo-mla", "--kv-format", "fp8_ds_mla", "--hisparse", "on", *few).stdout
    assert "no host tier is made: the device has room for 672 of 12,288 tokens, and with hot buffers" in text
    text = run("plan", "demo-mla", "--kv-format", "fp8_ds_mla", "--hisparse", "on", *few[2:]).stdout
    assert "no host tier is made: the device has room for all pages" in text


def test_plan_of_a_pair_of_backends() -> None:
    """One storage that both read, or a refusal that says what divides them and a command that works."""
    pair = ("--prefill-backend", "fa3", "--decode-backend", "trtllm_mha", "--gpu", "h200")
    refused = run("plan", "demo", "--kv-format", "bf16", *pair)
    assert refused.exit_code == 3 and "no packing in common" in refused.stderr
    assert run(*shlex.split(refused.stderr.partition("what works: nibble ")[2])).exit_code == 0
    pair = ("--prefill-backend", "fa4", "--decode-backend", "triton", "--gpu", "b200")
    found = data("plan", "demo", "--kv-format", "nvfp4", *pair)
    routes = found["groups"][0]["routes"]
    assert (routes["extend"]["stage_to"], routes["decode"]["stage_to"], found["page_size"]) == (
        "bf16",
        None,
        64,
    )
    assert [entry["phase"] for entry in found["staging"]] == ["extend"]
    assert "staging, extend of" in run("plan", "demo", "--kv-format", "nvfp4", *pair).stdout


def test_plan_explains_every_cell(model: str) -> None:
    found = data("plan", model, "--gpu", "h200", "--kv-format", "nvfp4", "--explain")["cells"]
    decode = {entry["backend"]: entry for entry in found if entry["phase"] == "decode"}
    assert decode["triton"]["verified"]["gpu"] == "NVIDIA H200" and decode["triton"]["reasons"] == []
    assert decode["flashinfer"]["status"] == "refused" and "dim 32" in decode["flashinfer"]["reasons"][0]
    text = run("plan", model, "--gpu", "h200", "--kv-format", "nvfp4", "--explain").stdout
    assert "  verified on NVIDIA H200, 2026-" in text and "cutlass_mla: only for mla" in text


# formats, docs


def test_formats() -> None:
    schemes = data("formats")["schemes"]
    latents = {entry["name"]: entry["bytes_per_token"] for entry in schemes if entry["of"] == "latent"}
    assert (
        latents.items()
        >= {"bf16": 1152, "fp8_ds_mla": 656, "fp8_e4m3": 576, "nvfp4_ds_mla": 416, "fp4_mx16": 324}.items()
    )
    found = {entry["name"]: entry for entry in schemes if entry["of"] == "kv"}
    sizes = {name: entry["bytes_per_token"] for name, entry in found.items()}
    facts = {
        "bf16": 512,
        "fp8_e4m3": 256,
        "fp8_e5m2": 256,
        "k8v4": 200,
        "nvfp4": 144,
        "fp4_mx16": 144,
        "mxfp4": 136,
    }
    assert sizes.items() >= facts.items()
    assert (
        found["nvfp4"]["ratio"] == 3.56
        and found["nvfp4"]["needs_scales"]
        and found["mxfp4"]["head_dim_multiple"] == 32
    )
    assert found["k8v4"]["formats"] == {"k": "fp8_e4m3", "v": "nvfp4"}
    assert all(entry["source"] and entry["summary"] for entry in found.values())
    text = run("formats").stdout
    assert all(name in text for name in (*found, "+rot", "+kmean"))


def test_docs_check_detects_stale_pages(tmp_path: Path) -> None:
    folder = str(tmp_path / "docs")
    assert run("docs", "--check", "--out", folder).exit_code == 1
    assert not (tmp_path / "docs").exists()
    assert data("docs", "--out", folder)["written"] == [
        "capabilities.md",
        "formats.md",
        "thresholds.md",
        "cli.md",
    ]
    assert run("docs", "--check", "--out", folder).exit_code == 0
    (tmp_path / "docs" / "cli.md").write_text("old")
    result = run("docs", "--check", "--out", folder)
    assert (
        result.exit_code == 1
        and "cli.md is not up to date" in result.stdout
        and "formats.md is" not in result.stdout
    )
    assert data("docs", "--check", "--out", folder, code=1)["stale"] == ["cli.md"]


def test_pages_are_the_same_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = docs.pages(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert docs.pages(tmp_path) == narrow
    for text in narrow.values():
        assert "\x1b" not in text and str(Path.home()) + "/" not in text and str(tmp_path) not in text


# generate, chat, eval, calibrate


def test_generate_streams_prompt_and_answer(model: str) -> None:
    result = run("generate", "def f", "--model", model, "--max-tokens", "6", "--kv-format", "nvfp4", *ONE)
    assert result.exit_code == 0 and result.stdout.startswith("def f")
    assert (
        "nvfp4: 144 bytes of KV cache per token, 3.56 x fewer" in result.stderr
        and "6 tokens" in result.stderr
    )


def test_generate_gives_the_same_streamed_and_batched(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("class A")
    words = ("--model", model, "--max-tokens", "5")
    alone = run("generate", "def f", *words).stdout
    both = data("generate", "-", "--prompt-file", str(tmp_path / "prompt.txt"), *words, stdin="def f")
    (only,) = both["runs"]
    assert [answer["prompt"] for answer in only["answers"]] == ["def f", "class A"]
    assert only["answers"][0]["prompt"] + only["answers"][0]["completions"][0]["text"] == alone.removesuffix(
        "\n"
    )
    assert (only["scheme"], only["bytes_per_token"], only["tokens"]) == ("bf16", 512, 10)
    listed = run("generate", "def f", "class A", *words)
    assert alone.strip() in listed.stdout and "prompt 2" in listed.stdout


def test_generate_compares_caches_side_by_side(model: str) -> None:
    words = (
        "generate",
        "def f",
        "--model",
        model,
        "--max-tokens",
        "4",
        "--compare",
        "--kv-format",
        "nvfp4",
        *ONE,
    )
    result = run(*words, "--also", "nvfp4@0=bf16")
    assert result.exit_code == 0, result.output
    assert "512 bytes/token" in result.stdout and "144 bytes/token" in result.stdout
    assert re.search(r"nvfp4 gave the same answer as bf16 to [01] of 1 prompts", result.stderr)
    assert [found["scheme"] for found in data(*words)["runs"]] == ["bf16", "nvfp4"]


def test_generate_labels_answers_by_position_and_shows_all(model: str) -> None:
    words = ("generate", "aa", "aa", "--model", model, "--max-tokens", "2", "--n", "2")
    listed = run(*words).stdout
    assert all(f"prompt {p}, answer {a}" in listed for p in (1, 2) for a in (1, 2))
    shown = run(*words, "--compare", "--kv-format", "nvfp4", *ONE)
    assert sum(line.strip().startswith("aa") for line in shown.stdout.splitlines()) == 4
    assert "of 2 prompts" in shown.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("x", "--compare", "--also", "nope", *ONE), 2, "unknown KV format 'nope'"),
        (("x", "--also", "nvfp4", "--kv-scales", "/no.json"), 2, "no such file"),
        (("x", "--also", "k8v4@9=bf16", *ONE), 2, "layer 9 is out of range"),
        (
            ("x", "--decode-backend", "fa3", "--device", "cpu"),
            3,
            "what works: nibble generate PROMPT --model",
        ),
        (("",), 2, "the prompt is empty"),
        (("x", "--grammar", "nonsense"), 2, "a grammar is written as KIND:BODY"),
        (("x", "--grammar", "json_schema:{"), 2, "the grammar json_schema cannot be read"),
        (("x", "--grammar", "regex:("), 2, "grammar"),
        (("x", "--logit-bias", "1000000=1"), 2, "token 1000000 is out of range"),
    ],
)
def test_generate_refuses_before_it_loads_anything(
    model: str, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, message: str
) -> None:
    def loaded(*_: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("nibble.engine.build.load", loaded)
    result = run("generate", *words, "--model", model)
    assert result.exit_code == code, result.output
    assert message in result.stderr and result.stdout == ""


def test_generate_refuses_what_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"caf\xe9 au lait")
    assert "latin.txt is not UTF-8" in refused("generate", "--prompt-file", str(file))
    assert "a prompt is not UTF-8" in refused("generate", "caf\udce9")
    assert "standard input is not UTF-8" in refused("generate", "-", stdin=b"caf\xe9 au lait")


def refused(*words: str, stdin: bytes | None = None) -> str:
    result = CliRunner().invoke(app, list(words), input=stdin)
    assert result.exit_code == USAGE, result.output
    return str(result.stderr)


def test_chat_in_json_fails_where_an_answer_does(chatty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Completion(0, "", (), "abort", error="a kernel failed")
    monkeypatch.setattr("nibble.engine.llm.LLM.chat", lambda *_: Output("", (), (answer,)))
    result = run("chat", chatty, "--json", stdin="hello\n")
    assert result.exit_code == FAILED and "a kernel failed" in result.stderr
    assert result.stdout == ""


def test_chat(chatty: str) -> None:
    result = run("chat", chatty, "--max-tokens", "3", stdin="hello\n\n/reset\nhello\n/quit\nnever read\n")
    first, second = result.stdout.splitlines()[:2]
    assert result.exit_code == 0 and first == second
    assert "512 bytes of KV cache per token" in result.stderr
    lines = run("chat", chatty, "--max-tokens", "3", "--json", stdin="hello\nhello\n").stdout.splitlines()
    one, two = map(json.loads, lines)
    assert one["message"]["role"] == "assistant" and two["prompt_tokens"] > one["prompt_tokens"] > 0


def test_chat_goes_on_when_the_conversation_is_too_long(chatty: str) -> None:
    result = run("chat", chatty, "--max-tokens", "3", stdin=f"{'x' * 600}\nhello\n")
    assert result.exit_code == 0 and "context length is 512 tokens" in result.stderr
    assert len(result.stdout.splitlines()) >= 1


def test_calibrate_then_serve(model: str, tmp_path: Path) -> None:
    scales = tmp_path / "kv_scales.json"
    text = tmp_path / "text.txt"
    text.write_text("some words to measure, " * 20)
    found = data("calibrate", model, "--out", str(scales), "--text", str(text))
    assert found["layers"] == 2 and found["path"] == str(scales)
    words = (
        "--model",
        model,
        "--max-tokens",
        "2",
        "--kv-format",
        "nvfp4+kmean+rot",
        "--kv-scales",
        str(scales),
    )
    assert run("generate", "def f", *words).exit_code == 0


def test_eval(model: str, tmp_path: Path) -> None:
    page, picture = tmp_path / "eval.md", tmp_path / "eval.png"
    words = (
        "eval",
        model,
        "fp8_e4m3",
        "--tokens",
        "64",
        "--recall-cases",
        "0",
        "--attention-tokens",
        "32",
        *ONE,
    )
    result = run(*words, "--markdown", str(page), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "fp8_e4m3" in result.stdout and "perplexity" in result.stdout
    assert page.read_text().startswith("| scheme |") and picture.read_bytes().startswith(b"\x89PNG")
    assert [entry["name"] for entry in data(*words)["results"]] == ["bf16", "fp8_e4m3"]


def test_certify_then_serve(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_CERTIFICATES", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("some words to score, " * 40)
    few = ("--tokens", "64", "--recall-cases", "0", "--attention-tokens", "0", "--text", str(text), *ONE)
    cache = ("mxfp4@0=fp8_e4m3", "--kv-scales", "one", "--out", str(tmp_path))
    plan = ("plan", model, "--kv-format", "mxfp4", "--kv-layers", "0=fp8_e4m3", "--kv-scales", "one")
    before = run(*plan)
    last = before.stdout.splitlines()[-1]
    assert last == f"not certified: nibble certify {model} mxfp4@0=fp8_e4m3 --kv-scales=one"
    assert data(*plan)["certificate"] is None
    result = run("certify", model, *cache, *few)
    assert result.exit_code == 0, result.output
    assert (
        "KL, mean" in result.stdout
        and "certified " in result.stdout
        and "note: Only 63 tokens" in result.stderr
    )
    found = data("certify", model, *cache, *few)
    assert Path(found["path"]).parent == tmp_path and found["schema"] == "nibble-certificate-1"
    assert found["subject"]["scheme"] == "mxfp4@0=fp8_e4m3" and found["command"].startswith("nibble certify ")
    kl = found["figures"]["kl"]
    assert (
        run(*plan).stdout.splitlines()[-1].startswith(f"certified {found['environment']['date']} on CPU: KL ")
    )
    assert data(*plan)["certificate"]["kl"] == kl
    result = run(*plan, "--require-quality", f"kl={kl / 2:.6f}")
    assert result.exit_code == 2 and "does not keep the bounds of --require-quality" in result.stderr
    words = ("generate", "def f", "--model", model, *plan[2:], "--max-tokens", "2", "--require-quality")
    result = run(*words, f"kl={kl + 1:.6f}")
    assert result.exit_code == 0 and "certified " in result.stderr
    result = run(*words, "recall=0.9")
    assert result.exit_code == 2 and "recall was not measured" in result.stderr


@pytest.mark.parametrize("option", ["--markdown", "--plot"])
def test_eval_refuses_a_file_that_cannot_be_written_before_it_measures(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nibble.evals.run.evaluate", lambda *_: pytest.fail("it measures"))
    result = run("eval", "--quick", option, str(tmp_path / "no" / "eval.svg"))
    assert result.exit_code == 2 and f"there is no folder {tmp_path / 'no'}; create it" in result.stderr
