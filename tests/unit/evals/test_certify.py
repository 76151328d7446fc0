"""Certifying a tiny random model: what is written is what a start finds, and what people read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nibble import LLM
from nibble.config import Config
from nibble.engine import certificate_lookup
from nibble.engine.certificate import Certificate
from nibble.errors import ConfigError
from nibble.evals import certify as certifying
from nibble.evals.certify import as_markdown, certify
from nibble.evals.report import Sizes
from nibble.evals.run import evaluate
from tiny import QWEN3_NEXT, save_tiny

TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(40))
SMALL = Sizes(
    tokens=120, recall_cases=1, recall_lengths=(256,), attention_tokens=32, yardstick="fp32", seed=3
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("certify"), num_hidden_layers=2, max_position_embeddings=512)
    (folder / "heldout.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def written(model: Path) -> Certificate:
    return certify(Config(model=str(model), kv_format="nvfp4"), SMALL)


def test_a_start_finds_what_was_certified(model: Path, written: Certificate) -> None:
    """Scales are measured at both: they must be the same, or no certificate would ever count."""
    assert written.path and written.path.parent == model / "certificates"
    with LLM(str(model), kv_format="nvfp4", require_quality=f"kl={written.figures.kl}") as llm:
        assert llm.certificate == Certificate.read(written.path) == written
    with LLM(str(model), kv_format="nvfp4", kv_scales="one") as llm:
        assert llm.certificate is None


def test_states_are_certified_against_exact_ones(tmp_path: Path) -> None:
    """Also where K and V are stored as they are: then states alone are certified."""
    folder = save_tiny(tmp_path / "hybrid", "qwen3_next", **QWEN3_NEXT)
    (folder / "heldout.txt").write_text(TEXT)
    of, sizes = (
        Config(model=str(folder), kv_format="fp32", state_format="fp8"),
        replace(SMALL, recall_cases=0),
    )
    found = certify(of, sizes)
    assert found.figures.kl > 0 and found.figures.bytes_per_token == found.figures.yardstick_bytes
    assert found.subject.options["state_format"] == "fp8" and "--state-format=fp8" in found.command
    bound = f"kl={found.figures.kl}"
    with LLM(
        **{"model": of.model, "kv_format": "fp32", "state_format": "fp8", "require_quality": bound}
    ) as llm:
        assert llm.certificate == found
    with pytest.raises(ConfigError, match="of state_format fp8, and here it is int8"):
        LLM(str(folder), kv_format="fp32", state_format="int8", require_quality=bound)


def test_figures_are_those_of_an_evaluation(model: Path, written: Certificate) -> None:
    scales = model.parent / "scales.json"
    with LLM(str(model), kv_format="nvfp4") as llm:
        llm.measure_scales(certifying_text(), scales, max_tokens=1024)
    report = evaluate(Config(model=str(model), kv_scales=str(scales)), ["nvfp4"], SMALL)
    yardstick, result = report.results
    figures = written.figures
    assert (figures.kl, figures.kl_p99, figures.top1) == (result.kl, result.kl_p99, result.top1)
    assert figures.perplexity_ratio == result.perplexity / yardstick.perplexity
    assert figures.attention_error == result.attention_error and figures.recall == result.recall
    assert (figures.bytes_per_token, figures.yardstick_bytes) == (144, 1024)
    assert written.subject.scales == result.scale_version


def certifying_text() -> list[str]:
    from nibble.engine.calibration import builtin_texts

    return list(builtin_texts())


def test_what_people_read(written: Certificate) -> None:
    assert written.path
    text = written.path.with_suffix(".md").read_text()
    assert text == as_markdown(written)
    lines = text.splitlines()
    assert lines[0].startswith("# ") and "nvfp4" in lines[0] and lines[2].startswith("Certified ")
    table = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert table[:5] == ["figure", "---", "KL, mean", "KL, 99th percentile", "perplexity"]
    assert {"recall at 256", "attention error", "cache, bytes/token"} <= set(table)
    for value in (written.subject.weights, written.subject.layout, written.subject.scales, written.command):
        assert value in text
    assert "heldout.txt" in text and "seed 3" in text and "Only 119 tokens were scored" in text
    assert "fp32 itself answers no recall question at 256" in text and "measured as a start does it" in text


def test_its_command_measures_the_same(model: Path, written: Certificate) -> None:
    command = f"nibble certify {model} nvfp4 --tokens=120 --recall-cases=1 --recall-lengths=256 "
    assert written.command == command + "--attention-tokens=32 --yardstick=fp32 --seed=3"


def test_a_model_without_a_text_takes_the_built_in_one(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "bare", num_hidden_layers=1, max_position_embeddings=512)
    sizes = replace(SMALL, recall_cases=0, attention_tokens=0)
    out = tmp_path / "certificates"
    of = Config(model=str(folder), kv_format="mxfp4", kv_transforms="none", kv_window=0, max_running=2)
    found = certify(of, sizes, out=out)
    assert found.path and found.path.parent == out and not (folder / "certificates").exists()
    assert found.measured["text"] == "built-in" and any("--text FILE" in note for note in found.notes)
    assert "Recall was not measured." in found.notes
    assert found.subject.scales == "", "a format without scales asks for none"
    assert found.subject.options == {"window": "0", "deterministic": "False"}
    text = tmp_path / "mine.txt"
    text.write_text(TEXT)
    found = certify(of, sizes, text, out)
    assert found.measured["text"] == "mine.txt" and found.command.endswith(f"--text={text}")
    assert len(list(out.glob("*.json"))) == 1, "a newer one of the same takes its place"


@pytest.mark.parametrize(
    ("kv_format", "sizes", "out", "message"),
    [
        ("bf16", SMALL, None, "a cache in bf16 is not quantised"),
        ("nvfp4", replace(SMALL, yardstick="fp8_e4m3"), None, "compares with an unquantised cache"),
        ("nvfp4", SMALL, Path("/dev/null/x"), "cannot write the certificate to /dev/null/x"),
    ],
)
def test_refused_before_anything_is_measured(
    model: Path, kv_format: str, sizes: Sizes, out: Path | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certifying, "evaluate", lambda *_, **__: pytest.fail("it measures"))
    with pytest.raises(ConfigError, match=message):
        certify(Config(model=str(model), kv_format=kv_format), sizes, out=out)


def test_what_is_required_does_not_keep_from_certifying(model: Path, tmp_path: Path) -> None:
    sizes = replace(SMALL, recall_cases=0, attention_tokens=0)
    config = Config(model=str(model), kv_format="mxfp4", require_quality="kl=0")
    found = certify(config, sizes, out=tmp_path)
    assert found.figures.kl > 0 and "require" not in found.command


def test_options_of_the_cache_are_part_of_it(model: Path, tmp_path: Path) -> None:
    """As --kv-layers, which has a layout of its own, and page sizes."""
    sizes = replace(SMALL, recall_cases=0, attention_tokens=0)
    config = Config(
        model=str(model), kv_format="mxfp4", kv_layers="0=fp8_e4m3", kv_scales="one", page_size=32
    )
    found = certify(config, sizes, out=tmp_path)
    assert found.subject.scheme == "mxfp4@0=fp8_e4m3" and "pages of 32 tokens" in found.subject.pages
    assert found.path and found.path.name.startswith(f"{model.name}-mxfp4-0-fp8_e4m3-")
    assert certificate_lookup.folder_to_write(str(model)) != tmp_path
