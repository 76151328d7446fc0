"""scripts/gpu: jobs get cards of their own, one that takes too long is stopped, and one that cannot end is not begun."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script() -> Any:
    loader = SourceFileLoader("gpu_script", str(Path(__file__).parents[2] / "scripts" / "gpu"))
    spec = spec_from_loader(loader.name, loader)
    assert spec
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their own module up
    loader.exec_module(module)
    yield module
    del sys.modules[loader.name]


def test_jobs_share_the_cards(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shows = "python -c 'import os; print(os.environ[\"CUDA_VISIBLE_DEVICES\"])'"
    jobs = [
        script.Job("one", 60, shows),
        script.Job("fails", 60, "python -c 'raise SystemExit(3)'"),
        script.Job("both", 60, shows, cards=2),
        script.Job("hangs", 0, "python -c 'import time; time.sleep(600)'"),
        script.Job("many", 60, shows, cards=3),
        script.Job("long", 5000, shows),
    ]
    ended = {run.job.name: run for run in script.run(jobs, 2, 4000.0, tmp_path)}
    assert {name: run.outcome for name, run in ended.items()} == {
        "one": "passed",
        "fails": "exit status 3",
        "both": "passed",
        "hangs": "stopped by signal 9",
    }
    assert ended["one"].log.read_text() == "0\n" and ended["both"].log.read_text() in ("0,1\n", "1,0\n")
    printed = capsys.readouterr().out
    assert "many: not begun: needs 3 GPUs" in printed and "long: not begun: may take 5000 s" in printed


def test_every_job_is_a_file_of_the_repository(script: Any) -> None:
    root = Path(__file__).parents[2]
    paths = [word for job in script.JOBS for word in job.command.split() if "/" in word]
    assert paths and all((root / path).exists() for path in paths)
