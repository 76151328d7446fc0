"""The examples run as they are, on the bundled model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines and sum(len(line) == 1 for line in lines) < len(lines) / 2, "a text printed letter by letter"


def test_there_are_eight() -> None:
    assert len(EXAMPLES) == 8
