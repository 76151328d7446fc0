"""Observed models are kept: a second plan of a config.json needs neither torch nor Transformers; what changes is observed anew."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nibble.errors import ConfigError
from nibble.model_spec import NO_LAYER, ModelSpec, RecurrentGroup
from nibble.models import observations, observe
from nibble.models.observations import observe_model

PLAN = """
import sys
from nibble.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as done:
    print(done.code, *(name in sys.modules for name in ("torch", "transformers")), file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model without weights, and an empty cache folder."""
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(observations, "FOLDER", "observed")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((tiny / "config.json").read_text())
    return model


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were observed, and not read."""
    names: list[str] = []

    def observe_again(config: Any, name: str, *args: Any) -> ModelSpec:
        names.append(name)
        return observe.observe_skeleton(observe.skeleton(config), name, *args)

    monkeypatch.setattr(observe, "observe", observe_again)
    return names


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "observed").glob("*"))


def plan(model: Path, tmp_path: Path, *options: str) -> tuple[str, list[str]]:
    """What `nibble plan` prints, its exit code, and whether it imported torch and Transformers."""
    environment = {**os.environ, "NIBBLE_CACHE": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", PLAN, "plan", str(model), *options],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    return run.stdout, run.stderr.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--gpu", "h200", "--kv-format", "nvfp4"),
        ("--gpu", "b200", "--json", "--explain"),
        pytest.param(
            (), marks=pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="torch looks at the GPU")
        ),
    ],
)
def test_a_second_plan_needs_neither_torch_nor_transformers(
    folder: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    first, (code, *imported) = plan(folder, tmp_path, *options)
    assert (code, imported) == ("0", ["True", "True"])
    second, (code, *imported) = plan(folder, tmp_path, *options)
    assert (code, imported) == ("0", ["False", "False"])
    assert first == second


@pytest.mark.slow
def test_a_refusal_of_a_known_model_needs_no_torch_either(folder: Path, tmp_path: Path) -> None:
    plan(folder, tmp_path, "--gpu", "b200")
    _, errors = plan(folder, tmp_path, "--gpu", "b200", "--kv-format", "nvfp4", "--decode-backend", "fa3")
    assert errors[-3:] == ["3", "False", "False"]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "code"), [("nvfp4", 0), ("fp5", 2)])
def test_the_process_of_a_plan_ends_in_order(folder: Path, tmp_path: Path, scheme: str, code: int) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = subprocess.run(
        [sys.executable, "-m", "nibble", "plan", str(folder), "--gpu", "b200", "--kv-format", scheme, "--json"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "NIBBLE_CACHE": str(tmp_path / "cache"), "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert run.returncode == code, run.stderr
    assert ("unknown KV format" in run.stderr) if code else json.loads(run.stdout)["model"] == str(folder)
    # torch makes temporary folders, which are removed as if nothing was cut short; the cache of its compiler stays
    assert {path.name.split("_")[0] for path in temporary.iterdir()} <= {"torchinductor"}


def test_an_observation_comes_back_as_it_was(folder: Path, observed: list[str]) -> None:
    first = observe_model(str(folder), "float32")
    assert observe_model(str(folder), "float32") == first
    assert observed == [str(folder)]


def test_recurrent_states_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "observed.json"
    states = (
        RecurrentGroup("delta", "delta", (0, 2), 4, 16, 16, 2, True, 128, 4),
        RecurrentGroup("conv", "conv", (1,)),
    )
    spec = ModelSpec("m", "toy", (), (NO_LAYER,) * 3, 96, 320, 64, 1000, states=states)
    observations._write(path, spec)
    assert observations._read(path) == spec


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"max_context": 64}, {"dtype": "float16", "max_context": 32}]
)
def test_another_option_is_observed_anew(folder: Path, observed: list[str], options: dict[str, Any]) -> None:
    usual = {"dtype": "float32"}
    specs = [observe_model(str(folder), **(usual | more)) for more in ({}, options, {}, options)]
    assert specs[:2] == specs[2:] and specs[0] != specs[1]
    assert len(observed) == 2


def test_a_changed_config_is_observed_anew(folder: Path, observed: list[str]) -> None:
    before = observe_model(str(folder), "float32")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 2 * config["vocab_size"]}))
    assert observe_model(str(folder), "float32").vocab_size == 2 * before.vocab_size
    path.write_text(json.dumps(config, indent=3))  # other bytes of the same config, too
    assert observe_model(str(folder), "float32") == before
    assert len(observed) == 3


@pytest.mark.parametrize("package", observations.PACKAGES)
def test_another_version_is_observed_anew(
    folder: Path, observed: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe_model(str(folder), "float32")
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == package else version(name))
    observe_model(str(folder), "float32")
    assert len(observed) == 2


def test_another_line_of_the_observing_code_is_observed_anew(
    folder: Path, tmp_path: Path, observed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "guard.py"
    code.write_text("LIMIT = 1\n")
    monkeypatch.setattr(observations, "_observing_code", lambda: [code])
    observe_model(str(folder), "float32")
    code.write_text("LIMIT = 2\n")
    observe_model(str(folder), "float32")
    assert len(observed) == 2


def test_the_code_that_observes_is_part_of_the_key() -> None:
    names = {path.name for path in observations._observing_code()}
    assert names >= {
        "observe.py",
        "hook.py",
        "refusals.py",
        "mla.py",
        "dsa.py",
        "recurrent.py",
        "model_spec.py",
    }


@pytest.mark.parametrize("name", ["modeling_custom.py", "hf_quant_config.json"])
def test_other_files_of_a_checkpoint_are_part_of_the_key(
    folder: Path, observed: list[str], name: str
) -> None:
    observe_model(str(folder), "float32")
    (folder / name).write_text("{}")
    observe_model(str(folder), "float32")
    assert len(observed) == 2


def test_a_broken_file_is_ignored_and_written_again(
    folder: Path, tmp_path: Path, observed: list[str]
) -> None:
    before = observe_model(str(folder), "float32")
    (path,) = kept(tmp_path)
    whole = path.read_text()
    changed = whole.replace(f'"vocab_size": {before.vocab_size}', '"vocab_size": 7')
    assert changed != whole
    for content in (
        "",
        whole[: len(whole) // 2],
        "[]",
        "{}",
        '{"digest": "", "model_spec": 1}',
        changed,
        "\udcff",
    ):
        path.write_bytes(content.encode(errors="surrogateescape"))
        assert observe_model(str(folder), "float32") == before
        assert path.read_text() == whole
    assert len(observed) == 8


def test_a_folder_that_cannot_be_written_costs_time_only(
    folder: Path, tmp_path: Path, observed: list[str]
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert observe_model(str(folder), "float32") == observe_model(str(folder), "float32")
    assert len(observed) == 2


def test_what_is_refused_is_not_kept(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was made for"):
        observe_model(str(folder), "float32", max_context=1 << 30)
    assert not kept(tmp_path)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    during = []

    def observe_nothing(*_: Any) -> ModelSpec:
        during.append(gc.isenabled())
        raise ConfigError

    monkeypatch.setattr(observe, "observe", observe_nothing)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ConfigError):
            observe_model(str(folder), "float32")
        assert (during, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()


def test_one_observation_serves_a_model_under_all_its_names(
    folder: Path, observed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = observe_model(str(folder), "float32")
    monkeypatch.chdir(folder.parent)
    assert observe_model(folder.name, "float32").model == folder.name
    assert spec.model == str(folder) and len(observed) == 1
