"""Certificates: bounds as text, figures against them, files there and back, and which certificate is a plan's."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from nibble import LLM
from nibble.attention.planner.plan import Plan
from nibble.config import BUNDLED, Config
from nibble.engine import certificate_lookup as lookup
from nibble.engine.certificate import SCHEMA, UNKNOWN_SCALES, Certificate, Figures, Subject
from nibble.engine.plan import plan_engine
from nibble.errors import PYTHON, ConfigError, set_caller
from nibble.quality import parse_quality
from nibble.spec import CacheSpec
from tiny import save_tiny

FIGURES = Figures(
    kl=0.004, kl_p99=0.05, perplexity=10.03, yardstick_perplexity=10.0, top1=0.981,
    recall={1024: 1.0, 8192: 0.72}, yardstick_recall={1024: 1.0, 8192: 0.75}, attention_error=(0.1, 0.2),
    bytes_per_token=144, yardstick_bytes=512, sinks=("K of layer 0 reaches 900",),
    tasks=({"task": "t", "metric": "acc", "value": 0.5, "difference": -0.25},),
)  # fmt: skip
SUBJECT = Subject(
    model="m", scheme="nvfp4", weights="w", layout="l", pages="pages of 16 tokens, nhd", scales="v",
    dtype="float32",
)  # fmt: skip


def certificate(
    subject: Subject = SUBJECT, figures: Figures = FIGURES, date: str = "2026-11-23"
) -> Certificate:
    environment = {"date": date, "hardware": "NVIDIA H200 (SM90), 140 GiB", "nibble": "0.1.0"}
    measured = {"yardstick": "bf16", "text": "heldout.txt", "text_sha256": "0123"}
    return Certificate(
        subject=subject, figures=figures, measured=measured, environment=environment, command="nibble certify m nvfp4",
        notes=("short",),
    )  # fmt: skip


# Bounds


def test_bounds_are_read() -> None:
    assert parse_quality("kl=0.01, ppl=1.006,recall=0.97,top1=1,kl_p99=2") == {
        "kl": 0.01, "ppl": 1.006, "recall": 0.97, "top1": 1.0, "kl_p99": 2.0
    }  # fmt: skip
    assert parse_quality("") == {} == Config(model="m").quality


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=1", "did you mean 'kl'"),
        ("kl", "kl must be a number"),
        ("kl=low", "kl must be a number, as 0.01, not 'low'"),
        ("kl=nan", "kl is 0 or more"),
        ("ppl=-1", "ppl is 0 or more"),
        ("recall=97", "recall is a share from 0 to 1, not 97"),
        ("kl=1,kl=2", "says kl twice"),
    ],
)
def test_malformed_bounds_are_refused_with_the_config(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config(model="m", require_quality=text)


def test_figures_are_held_against_bounds() -> None:
    held = {"kl": 0.004, "kl_p99": 0.05, "ppl": 1.0031, "top1": 0.981, "recall": 0.96}
    assert not list(FIGURES.shortfalls(held)), (
        "a figure on its bound keeps it, and recall is a share of the yardstick's"
    )
    broken = {"kl": 0.003, "kl_p99": 0.04, "ppl": 1.002, "top1": 0.99, "recall": 0.97}
    assert list(FIGURES.shortfalls(broken)) == [
        "kl is 0.004, more than 0.003", "kl_p99 is 0.05, more than 0.04", "ppl is 1.003, more than 1.002",
        "top1 is 0.981, less than 0.99", "recall is 0.96, less than 0.97",
    ]  # fmt: skip


def test_what_was_not_measured_keeps_no_bound() -> None:
    for recall, best in (({}, {}), ({1024: 0.0}, {1024: 0.0})):
        figures = replace(FIGURES, recall=recall, yardstick_recall=best)
        assert list(figures.shortfalls({"recall": 0.0})) == ["recall was not measured"]
    broken = replace(FIGURES, kl=math.nan, top1=math.nan)
    assert len(list(broken.shortfalls({"kl": 9.0, "top1": 0.0}))) == 2


# Files


def test_a_certificate_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(certificate().as_json())
    assert json.loads(path.read_text())["schema"] == SCHEMA
    assert Certificate.read(path) == replace(certificate(), path=path)


@pytest.mark.parametrize(
    "change",
    [{"schema": "nibble-certificate-0"}, {"figures": {}}, {"subject": {"model": "m"}}, {"environment": {}},
     {"measured": {}}, {"more": 1}, {"figures": {**json.loads(certificate().as_json())["figures"], "kl": "low"}}],
)  # fmt: skip
def test_a_malformed_file_is_no_certificate(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**json.loads(certificate().as_json()), **change}))
    with pytest.raises(ConfigError, match=r"c\.json (is no certificate|has the schema)"):
        Certificate.read(path)


def test_one_line() -> None:
    assert certificate().line == (
        "certified 2026-11-23 on NVIDIA H200 (SM90): KL 0.004, perplexity +0.3 %, same top token 98.1 %, "
        "recall 96 % of bf16's or more, up to 8K"
    )
    bare = replace(FIGURES, recall={}, yardstick_recall={})
    assert certificate(figures=bare).line.endswith("same top token 98.1 %")


def test_the_key_follows_every_item() -> None:
    keys = {SUBJECT.key} | {
        replace(SUBJECT, **{entry.name: {"x": 1} if entry.name == "options" else "other"}).key
        for entry in fields(Subject)
    }
    assert len(keys) == 1 + len(fields(Subject))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights": "x"}, "it is of other weights or another config.json (fingerprint w, and here x)"),
        ({"weights": ""}, "it is of other weights or another config.json (fingerprint w, and here unknown)"),
        ({"layout": "x", "pages": "pages of 64 tokens, hnd"}, "it is of the layout l (nvfp4, pages of 16 tokens, nhd), and here it is x (nvfp4, pages of 64 tokens, hnd)"),
        ({"scales": "x"}, "it is of other KV scales (version v, and here x; a file of `nibble calibrate` would keep them)"),
        ({"scales": ""}, "it is of other KV scales (version v, and here none; a file of `nibble calibrate` would keep them)"),
        ({"dtype": "bfloat16"}, "it is of float32, and here it is bfloat16"),
        ({"options": {"index_topk": 8}}, "it is of index_topk as usual, and here it is 8"),
        ({"model": "renamed", "scheme": "alias"}, None),
        ({"scales": UNKNOWN_SCALES}, None),
    ],
)  # fmt: skip
def test_what_differs_is_said(change: dict[str, Any], reason: str | None) -> None:
    assert list(SUBJECT.differences(replace(SUBJECT, **change))) == ([reason] if reason else [])


# Which certificate is a plan's


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path / "user"))
    return save_tiny(tmp_path / "model", num_hidden_layers=2)


def config(model: Path, **options: Any) -> Config:
    return Config(model=str(model), **{"kv_format": "nvfp4", "kv_scales": "one", **options})


def write(of: Config, folder: Path | None = None, **changes: Any) -> Path:
    """Writes a certificate of what a config serves. changes: of its subject."""
    with LLM(**{entry.name: getattr(of, entry.name) for entry in fields(of)}) as llm:
        subject = lookup.subject_of(llm._engine_plan, None)
        assert subject.scales == UNKNOWN_SCALES
        subject = replace(subject, scales=llm.engine.namespace.rpartition("/")[2])
    folder = folder or lookup.folder_to_write(of.model)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{lookup.file_name(subject)}.json"
    path.write_text(certificate(replace(subject, **changes)).as_json())
    return path


def served(of: Config, **options: Any) -> LLM:
    return LLM(**{entry.name: getattr(of, entry.name) for entry in fields(of)} | options)


@pytest.mark.parametrize("where", ["beside", "user"])
def test_a_start_finds_its_certificate(model: Path, where: str) -> None:
    folder = model / "certificates" if where == "beside" else lookup.user_folder()
    path = write(config(model), folder)
    with served(config(model, require_quality="kl=0.01,ppl=1.006,top1=0.98,recall=0.96")) as llm:
        assert llm.certificate and llm.certificate.path == path
    # Nothing of this changes what a token's successor is.
    with served(config(model, max_running=3, kv_memory="1MiB", prefix_cache=False, seed=7)) as llm:
        assert llm.certificate


def test_scales_that_a_start_measures_are_known_by_their_version(model: Path) -> None:
    measured = config(model, kv_scales="auto")
    write(measured)
    with served(measured, require_quality="kl=0.01") as llm:
        assert llm.certificate
    with pytest.raises(ConfigError, match="other KV scales"):
        served(measured, require_quality="kl=0.01", calibrate=["other text " * 40])
    with served(measured, calibrate=["other text " * 40]) as llm:
        assert llm.certificate is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "0" * 16}, "it is of other weights"),
        ({"layout": "0" * 16}, "it is of the layout 0000000000000000"),
        ({"scales": "0" * 16}, "it is of other KV scales (version 0000000000000000"),
        ({"dtype": "bfloat16"}, "it is of bfloat16"),
        ({"options": {"index_topk": 3}}, "it is of index_topk 3"),
    ],
)
def test_a_stale_certificate_does_not_count(model: Path, changes: dict[str, Any], message: str) -> None:
    path = write(config(model), **changes)
    with pytest.raises(ConfigError) as error:
        served(config(model, require_quality="kl=9"))
    said = str(error.value)
    assert message in said and f"{path} does not count" in said and "bounds (kl=9)" in said
    assert f"what would make one: nibble certify {model} nvfp4 --kv-scales=one" in said
    with served(config(model)) as llm:
        assert llm.certificate is None


def test_figures_that_do_not_hold_are_refused(model: Path) -> None:
    path = write(config(model))
    with pytest.raises(ConfigError) as error:
        served(config(model, require_quality="kl=0.003,top1=0.9"))
    said = str(error.value)
    assert "kl is 0.004, more than 0.003" in said and "top1" not in said.partition("\n")[0].partition(": ")[2]
    assert str(path) in said and "certified 2026-11-23" in said and f"nibble certify {model} nvfp4" in said


def test_without_any_certificate(model: Path) -> None:
    with pytest.raises(ConfigError, match="there is none yet"):
        served(config(model, require_quality="kl=9"))
    write(config(model, kv_format="fp8_e4m3"))
    with pytest.raises(ConfigError, match="there is none yet"):
        served(config(model, require_quality="kl=9"))
    (model / "certificates" / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"there is none yet \(.*broken\.json is no certificate"):
        served(config(model, require_quality="kl=9"))


def test_weights_that_change_make_it_stale(model: Path) -> None:
    write(config(model))
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="it is of other weights"):
        served(config(model, require_quality="kl=9"))


def test_an_unquantised_cache_needs_none(model: Path) -> None:
    with served(config(model, kv_format="bf16", require_quality="kl=0")) as llm:
        assert llm.certificate is None


def test_the_newest_counts(model: Path) -> None:
    first = write(config(model))
    newer = certificate(Certificate.read(first).subject, date="2027-01-01")
    folder = lookup.user_folder()
    folder.mkdir()
    (folder / first.name).write_text(newer.as_json())
    with served(config(model)) as llm:
        assert llm.certificate and llm.certificate.environment["date"] == "2027-01-01"


def test_a_refusal_in_the_words_of_python(model: Path) -> None:
    before = set_caller(PYTHON)
    try:
        with pytest.raises(ConfigError) as error:
            served(config(model, require_quality="kl=0.01,recall=0.9"))
        first = str(error.value).splitlines()[0]
        assert "require_quality= has bounds (kl=0.01, recall=0.9)" in first and "--" not in first
    finally:
        set_caller(before)


def test_what_is_said_of_a_plan(model: Path) -> None:
    plan = plan_engine(config(model))
    found = lookup.look_up(plan, None)
    assert found
    assert lookup.status(plan, found) == f"not certified: nibble certify {model} nvfp4 --kv-scales=one"
    path = write(config(model))
    found = lookup.look_up(plan, None)
    assert found and lookup.status(plan, found).startswith("certified 2026-11-23")
    path.unlink()
    write(config(model), dtype="float16")
    found = lookup.look_up(plan, None)
    assert found and "does not count: it is of float16" in lookup.status(plan, found)
    assert lookup.look_up(plan_engine(config(model, kv_format="bf16")), None) is None


def test_the_command_has_what_changes_the_cache(model: Path) -> None:
    edited = config(
        model, kv_layers="0=fp8_e4m3", page_size=32, tuned=False, kv_memory="1GiB", require_quality="kl=1"
    )
    words = shlex.split(lookup.command_for(edited))
    assert words[:4] == ["nibble", "certify", str(model), "nvfp4@0=fp8_e4m3"]
    assert set(words[4:]) == {"--kv-scales=one", "--page-size=32", "--no-tuned"}


def test_every_option_that_does_not_count_is_one() -> None:
    names = {entry.name for entry in fields(Config)}
    for group in (lookup.ELSEWHERE, lookup.WITHOUT_EFFECT, lookup.UNSAID):
        assert group <= names
    assert not lookup.ELSEWHERE & lookup.WITHOUT_EFFECT
    assert {entry.name for entry in fields(CacheSpec)} >= lookup.SPEC_ELSEWHERE
    assert {entry.name for entry in fields(Plan)} >= lookup.PLAN_ELSEWHERE


def test_what_a_plan_decides_counts_as_it_was_decided(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version may decide otherwise what the same command leaves to it. Any field that is not named counts."""
    monkeypatch.setattr(lookup, "SPEC_ELSEWHERE", lookup.SPEC_ELSEWHERE - {"max_running"})
    write(config(model))
    with served(config(model)) as llm:
        assert llm.certificate
    with pytest.raises(ConfigError, match="it is of max_running 256, and here it is 3"):
        served(config(model, max_running=3, require_quality="kl=9"))


def test_activations_count_as_they_were_decided(model: Path) -> None:
    plan = plan_engine(config(model))
    before = lookup.subject_of(plan, None)
    assert "activations" not in before.options
    assert lookup.subject_of(replace(plan, config=config(model, activations="bf16")), None) == before
    after = lookup.subject_of(replace(plan, activations="fp8"), None)
    assert [*before.differences(after)] == ["it is of activations as usual, and here it is fp8"]


def test_where_a_new_one_is_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lookup.folder_to_write(str(model)) == model / "certificates"
    monkeypatch.setattr(lookup.os, "access", lambda *_: False)
    assert lookup.folder_to_write(str(model)) == lookup.user_folder()
    monkeypatch.undo()
    for name in BUNDLED:
        assert lookup.folder_to_write(name) == lookup.user_folder()
