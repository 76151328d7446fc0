"""Options of day one: a config file, a chat template, revisions and folders of hub models, a share of the GPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nibble import LLM
from nibble.cli.main import app
from nibble.config import Config
from nibble.engine.plan import plan_engine
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import ConfigError, WeightError
from nibble.hardware import lookup_gpu
from nibble.models.hub import pinned

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "models/demo"
REVISION = "a" * 40


def run(*words: Any) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(map(str, words)))


def planned(*words: Any) -> dict[str, Any]:
    result = run("plan", *words, "--json")
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def test_a_config_file_has_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "nibble.yaml"
    file.write_text("model: demo\nkv_format: nvfp4\nmax-running: 8\nprefix-cache: false\nkv-memory: 16MiB\n")
    facts = planned("--config", file)
    assert facts["model"] == "demo" and facts["groups"][0]["scheme"] == "nvfp4+kmean+rot"
    won = planned("--config", file, "--kv-format", "k8v4", "demo")
    assert won["groups"][0]["scheme"] == "k8v4" and won["budget"]["limit"] == "kv_memory"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kv_fromat: nvfp4", "unknown option 'kv_fromat': did you mean 'kv-format'?"),
        ("port: 8000", "unknown option 'port'"),  # which is of `serve`
        ("- kv_format", "must have a line `option: value`"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_a_config_file_that_is_wrong(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "nibble.yaml"
    file.write_text(text)
    result = run("plan", "--config", file)
    assert result.exit_code == 2 and says in result.stderr and str(file) in result.stderr
    missing = run("plan", "--config", tmp_path / "no.yaml")
    assert missing.exit_code == 2 and "cannot be read" in missing.stderr


def test_a_config_file_of_vllm_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys may be other servers' flags; YAML's `on` is no truth value where a text is meant."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr("nibble.server.listen.listen", lambda settings: [])
    monkeypatch.setattr("nibble.cli.serve.listen", lambda settings: [])
    monkeypatch.setattr("nibble.server.run.serve", lambda *a: seen.update(config=a[0], settings=a[1]))
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: demo\nport: 9000\nmax-model-len: 512\nenforce-eager: true\nno-enable-prefix-caching: true\n"
        "dtype: half\nserved-model-name: [a, b]\nallowed-origins: '*'\nhisparse: on\ndisable-log-requests: false\n"
    )
    result = run("serve", "--config", file, "--port", 9001)
    assert result.exit_code == 0, result.output
    config, settings = seen["config"], seen["settings"]
    assert (config.model, config.max_context, config.dtype, config.hisparse) == ("demo", 512, "float16", "on")
    assert not (config.compile or config.graphs or config.prefix_cache)
    assert (settings.port, settings.served_model_name) == (9001, ("a", "b"))
    assert settings.allowed_origins == ("*",) and not settings.log_requests


def test_a_chat_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    messages = [{"role": "user", "content": "hello"}]
    for source in (str(file), file.read_text()):
        tokenizer = Tokenizer(str(DEMO), source)
        assert tokenizer.decode(tokenizer.chat(messages)) == "<hello>"
    with pytest.raises(ConfigError, match=r"'no\.jinja' cannot be read"):
        Tokenizer(str(DEMO), "no.jinja")
    with pytest.raises(ConfigError, match="malformed in line 1"):
        Tokenizer(str(DEMO), "{% for %}")
    with pytest.raises(ConfigError, match="cannot be read"):
        LLM("demo", chat_template=tmp_path / "no")  # before weights load


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    """A folder of downloads that has one revision of a model."""
    repository = tmp_path / "models--someone--model"
    shutil.copytree(DEMO, repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(REVISION)
    return tmp_path


def test_a_revision_in_a_folder_of_downloads(downloads: Path) -> None:
    config = Config(model="someone/model", revision="v2", download_dir=str(downloads))
    for weights in (False, True):
        there = pinned(config, weights=weights)
        assert Path(there.model) == downloads / "models--someone--model/snapshots" / REVISION
        assert pinned(there) == there
    answer = LLM(**{**vars_of(config), "kv_memory": "24MiB"}).generate("import os", max_tokens=2)
    assert len(answer.completions[0].token_ids) == 2
    with pytest.raises(WeightError, match="cannot fetch 'someone/model' at revision 'v3'"):
        pinned(replace(config, revision="v3"))
    with pytest.raises(ConfigError, match="'demo' is a local one"):
        pinned(Config(model="demo", revision="v2"))


def vars_of(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("model", "revision", "download_dir")}


def test_a_share_of_the_gpu_holds_weights_and_cache() -> None:
    config, gpu = Config(model="demo", kv_format="nvfp4"), lookup_gpu("l4")
    whole = plan_engine(config, gpu, declared=True).budget
    part = plan_engine(replace(config, gpu_memory_utilization=0.1), gpu, declared=True).budget
    assert part.memory == int(0.1 * whole.memory)
    assert part.weights + part.workspace + part.pool + part.reserve <= part.memory
    with pytest.raises(ConfigError, match="is for GPUs; on a CPU --kv-memory"):
        plan_engine(replace(config, gpu_memory_utilization=0.5), lookup_gpu("cpu"))
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match="gpu_memory_utilization is a share"):
            Config(model="demo", gpu_memory_utilization=share)
