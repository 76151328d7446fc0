"""What deploy/ ships: an image whose wheel can be built from what it copies, and commands that exist."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nibble.cli.main import app

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def copied(target: Path) -> Path:
    """A folder with exactly what the image's COPY lines bring."""
    for line in DOCKERFILE.splitlines():
        if not line.startswith("COPY "):
            continue
        *sources, place = shlex.split(line.removeprefix("COPY "))
        for source in sources:
            path = ROOT / source
            if path.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, target / place, ignore=ignore, dirs_exist_ok=True)
            else:
                into = target / place
                into = into / path.name if place.endswith("/") else into
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, into)
    return target


@pytest.mark.slow
def test_the_image_s_wheel_is_built_from_what_it_copies(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    source = copied(tmp_path / "source")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    # What is no Python file, and is needed: the demo, the ledger, and data beside the code.
    data = [
        path
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and path.suffix in {".json", ".js", ".html"}
    ]
    wanted = {path.relative_to(ROOT / "src").as_posix() for path in data}
    wanted |= {
        "nibble/_models/demo/config.json",
        "nibble/_models/demo-mla/config.json",
        "nibble/_models/demo-hybrid/config.json",
        "nibble/_ledger.json",
    }
    assert wanted <= names, wanted - names


def test_the_image_s_command_line_exists() -> None:
    lines = [line.partition(" ") for line in DOCKERFILE.splitlines()]
    words = {name: [word.strip(' "') for word in rest.strip("[]").split(",")] for name, _, rest in lines}
    command = [*words["ENTRYPOINT"], *words["CMD"]]
    assert command[:2] == ["nibble", "serve"]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", "--help"]).output
    assert all(word in shown for word in command if word.startswith("--"))
