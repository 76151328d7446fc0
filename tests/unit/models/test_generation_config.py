"""Sampling defaults from a model's generation_config.json, and what wins over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nibble import Config, ConfigError, SamplingParams, WeightError
from nibble.engine.build import preflight
from nibble.models.generation_config import SamplingDefaults, sampling_defaults

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
"""The entries of Qwen3-8B's own file."""


def folder_with(folder: Path, **entries: Any) -> str:
    (folder / "generation_config.json").write_text(json.dumps(entries))
    return str(folder)


def test_the_models_own_values_are_taken_and_announced(tmp_path: Path) -> None:
    defaults = sampling_defaults(folder_with(tmp_path, **QWEN3))
    assert defaults.values == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert defaults.summary == (
        "sampling defaults of the model: temperature 0.6, top_p 0.95, top_k 20 (generation_config.json); "
        "--generation-config none for none"
    )


def test_a_request_wins_over_the_model_and_the_model_over_nibble(tmp_path: Path) -> None:
    params = sampling_defaults(folder_with(tmp_path, **QWEN3, min_p=0.1)).params(
        temperature=0.2, max_tokens=3
    )
    assert params == SamplingParams(temperature=0.2, top_p=0.95, top_k=20, min_p=0.1, max_tokens=3)


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"do_sample": False, "max_new_tokens": 2048},  # as Qwen3's base models have; vLLM passes over both
        {"temperature": None, "top_p": None},
    ],
)
def test_files_without_sampling_values(tmp_path: Path, entries: dict[str, Any]) -> None:
    defaults = sampling_defaults(folder_with(tmp_path, **entries))
    assert (defaults.values, defaults.summary, defaults.params()) == ({}, "", SamplingParams())


def test_no_file_none_and_another_folder(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    assert sampling_defaults(str(model)) == SamplingDefaults()
    folder_with(model, **QWEN3)
    assert sampling_defaults(str(model), "none") == SamplingDefaults()
    with pytest.raises(
        ConfigError, match=r"auto, none, or a folder with a generation_config.json, and there is no"
    ):
        sampling_defaults(str(model), str(other))
    folder_with(other, top_k=-1, repetition_penalty=1.05, temperature=1e-9)
    defaults = sampling_defaults(str(model), str(other))
    assert defaults.values == {"temperature": 0.0, "top_k": 0, "repetition_penalty": 1.05}
    assert str(other) in defaults.summary


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"temperature": "warm"}, "generation_config.json cannot give .* temperature must lie in .*'warm'"),
        ({"top_p": 1.5}, "generation_config.json cannot give .* top_p must lie in"),
        ({"top_k": True}, "top_k must lie in .* integer, not True"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0.*--generation-config none"),
    ],
)
def test_values_that_cannot_be_used(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightError, match=message):
        sampling_defaults(folder_with(tmp_path, **entries))


def test_a_file_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(WeightError, match=r"generation_config.json is not a JSON object"):
        sampling_defaults(str(tmp_path))


def test_they_are_known_before_weights_load() -> None:
    params = preflight([Config(model="demo", kv_format="nvfp4")], ["x"], {"top_k": 5})
    assert params == SamplingParams(temperature=0.0, top_k=5), (
        "the bundled models are greedy by their own file"
    )
