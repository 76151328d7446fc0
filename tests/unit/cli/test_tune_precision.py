"""`nibble tune-precision` as a user meets it, and what --kv-format takes of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nibble.cli.command import USAGE
from nibble.cli.main import app
from nibble.evals import tune_precision
from tiny import save_tiny

FEW = ("--tokens", "256", "--window", "256", "--candidates", "fp8_e4m3,nvfp4", "--kv-scales", "one")


def run(*words: str) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(words))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_tiny(tmp_path_factory.mktemp("cli"), max_position_embeddings=512, num_hidden_layers=2)
    (folder / "heldout.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(400)))
    return str(folder)


@pytest.fixture(autouse=True)
def _short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_precision, "CALIBRATION_TOKENS", 64)


def test_a_file_for_kv_format_and_one_for_modelopt(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--budget", "5.5bits", *FEW, "--verify-tokens", "64", "--gpu", "h200")
    result = run("tune-precision", model, *words, "--modelopt", "hf_quant_config.json")
    assert result.exit_code == 0, result.output
    assert "wrote kv_scheme.json: " in result.stdout
    assert "bits a value" in result.stdout
    # No kernel of this GPU reads K in 4 and V in 8 bits.
    assert "not a candidate: nvfp4:fp8_e4m3" in result.stderr
    exported = json.loads(Path("hf_quant_config.json").read_text())["quantization"]
    assert exported["kv_cache_quantized_layers"]
    sizes = {}
    for path in ("kv_scheme.json", "hf_quant_config.json"):
        planned = run("plan", model, "--kv-format", path, "--gpu", "h200", "--json")
        assert planned.exit_code == 0, planned.output
        sizes[path] = json.loads(planned.stdout)["bytes_per_token"]
    # ModelOpt's form has the formats, and these make the bytes.
    assert len(set(sizes.values())) == 1


def test_as_json(model: str, tmp_path: Path) -> None:
    out = tmp_path / "kv_scheme.json"
    words = ("--max-kl", "100", *FEW, "--verify-tokens", "0", "--out", str(out), "--json")
    result = run("tune-precision", model, *words)
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["bits"] == 4.5
    assert content["path"] == str(out)
    written = json.loads(out.read_text())
    # The smallest has no exact window.
    assert written["provenance"]["bits"] == 4.5 and written["kv_window"] == 0


def test_a_window_that_was_measured_with_is_served(model: str, tmp_path: Path) -> None:
    out = tmp_path / "kv_scheme.json"
    words = ("--kv-window", "32", "--max-kl", "100", *FEW, "--verify-tokens", "0", "--out", str(out))
    result = run("tune-precision", model, *words)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["kv_window"] == 32
    for options, window in (((), 32), (("--kv-window", "0"), 0)):
        planned = run("plan", model, "--kv-format", str(out), "--gpu", "cpu", "--json", *options)
        assert json.loads(planned.stdout)["kv_window"] == window


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "either how large the cache may be, with --budget 5.0bits, or --max-kl 0.01"),
        (("--budget", "4bits", *FEW, "--verify-tokens", "0"), "a budget of 4 bits is too small"),
        (("--budget", "5", "--out", "/nowhere/a.json"), "there is no folder /nowhere"),
        (("--budget", "5", "--gpu", "h20x"), "h20x"),
    ],
)
def test_errors(model: str, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    out = () if "--out" in words else ("--out", str(tmp_path / "a.json"))
    result = run("tune-precision", model, *words, *out)
    assert result.exit_code == USAGE, result.output
    assert said in result.stderr


def test_help() -> None:
    result = run("tune-precision", "--help")
    assert result.exit_code == 0
    for option in ("--budget", "--max-kl", "--candidates", "--verify-tokens", "--modelopt", "--gpu", "--out"):
        assert option in result.stdout
    assert "--kv-layers" not in result.stdout


@pytest.mark.parametrize("layer", ["0", "1"])
def test_a_file_that_cannot_be_stored(model: str, tmp_path: Path, layer: str) -> None:
    """What works instead is spelled out, whether most layers are in the scheme that is refused or one is."""
    usual = {"k": {"format": "nvfp4"}, "v": {"format": "nvfp4"}}
    wrong = {"k": {"format": "nvfp4_ds_mla"}, "v": {"format": "nvfp4"}}
    path = tmp_path / "s.json"
    path.write_text(
        json.dumps({"schema": "nibble-kv-scheme-1", "layers": {"0": usual, "1": usual, layer: wrong}})
    )
    result = run("plan", model, "--kv-format", str(path), "--gpu", "h200")
    assert result.exit_code == USAGE
    assert f"layers {layer}" in result.stderr
    _, mark, command = result.stderr.partition("what works: nibble ")
    assert mark
    assert "s.json" not in command
    assert run(*shlex.split(command)).exit_code == 0


def test_a_bad_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"schema": "nibble-kv-scheme-1", "layers": {"0": {"k": {"format": "nvfp4"}}}}))
    result = run("plan", model, "--kv-format", str(path))
    assert result.exit_code == USAGE
    assert "s.json, layer 0: a layer has k and v or latent, not k" in result.stderr
