"""Where a model lies, by its name. Owns find(). Must not import torch or Transformers: a server asks early on."""

from __future__ import annotations

from pathlib import Path

import nibble
from nibble.config import BUNDLED
from nibble.errors import WeightError


def find(model: str) -> str:
    """A local folder for bundled models and for folders, else the hub name as it is."""
    if model in BUNDLED:
        return str(_bundled(model))
    path = Path(model).expanduser()
    return str(path) if path.exists() else model


def _bundled(name: str) -> Path:
    package = Path(nibble.__file__).parent
    for folder in (package / "_models" / name, package.parents[1] / "models" / name):
        if (folder / "config.json").exists():
            return folder
    raise WeightError(
        f"the bundled model {name!r} is not part of this installation; name a folder or a hub model"
    )
