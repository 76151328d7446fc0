"""Where a config is read from: a folder, the hub's cache, what came with Nibble, the hub; and no waiting for networks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.errors import WeightError
from nibble.models import hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_names_of_the_hub_mean_a_published_config(cache: Path) -> None:
    for name in ("deepseek-r1", "deepseek-ai/DeepSeek-R1", "deepseek-ai/deepseek-r1-0528"):
        path, note = hub.locate_config(name)
        assert json.loads((Path(path) / "config.json").read_text())["model_type"] == "deepseek_v3"
        assert note == f"config of {name}: built in, as published; there is no local copy"
    assert hub.locate_config("nobody/knows-it") == ("nobody/knows-it", "")


def test_a_local_copy_and_a_folder_come_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cache / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert hub.cached_folder("Qwen/Qwen3-8B") is None, "no branch names it"
    (cache / "models--Qwen--Qwen3-8B" / "refs").mkdir()
    (cache / "models--Qwen--Qwen3-8B" / "refs" / "main").write_text("abc\n")
    assert hub.locate_config("Qwen/Qwen3-8B") == (str(snapshot), "")
    (tmp_path / "qwen3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.locate_config("qwen3-8b") == ("qwen3-8b", "")


def test_a_host_that_does_not_answer_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.require_hub("some/model")
    with pytest.raises(
        WeightError, match="'some/model' is neither a folder nor a hub model that can be reached"
    ) as error:
        hub.require_hub("some/model")
    assert "a folder with its config.json is enough" in str(error.value) and "gpt-oss-120b" in str(
        error.value
    )


def test_a_name_that_only_plans_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(WeightError, match="the hub has its weights as openai/gpt-oss-20b"):
        hub.require_hub("gpt-oss-20b")


def test_an_unknown_name_is_refused_without_torch() -> None:
    code = (
        "import sys; from nibble.models.observations import observe_model; from nibble.errors import WeightError\n"
        "try: observe_model('some/model', 'bfloat16')\n"
        "except WeightError as error: print('HF_HUB_OFFLINE' in str(error), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout.split() == ["True", "False"]
