"""Where a model lies, by its name, and what its small files say. No torch or Transformers: the server asks early."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nibble
from nibble.config import BUNDLED
from nibble.errors import WeightError

MODELOPT_FILE = "hf_quant_config.json"
"""File of a checkpoint in which ModelOpt says what it has quantised."""


def locate(model: str) -> str:
    """Return the local folder of a bundled model or a folder, else the hub name unchanged."""
    if model in BUNDLED:
        return str(_bundled(model))
    path = Path(model).expanduser()
    return str(path) if path.exists() else model


def _bundled(name: str) -> Path:
    package = Path(nibble.__file__).parent
    # An installed package has its models inside, a source checkout has them two folders up.
    for folder in (package / "_models" / name, package.parents[1] / "models" / name):
        if (folder / "config.json").exists():
            return folder
    raise WeightError(
        f"the bundled model {name!r} is not part of this installation; name a folder or a hub model"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint, an empty one where there is no file. Raise WeightError."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise WeightError(
            f"{path} is not a JSON object ({error}); download or save the checkpoint again"
        ) from error


def modelopt_entry(folder: Path) -> dict[str, Any]:
    """Return what ModelOpt's own file in a checkpoint says, an empty entry where there is none. Raise WeightError."""
    file = folder / MODELOPT_FILE
    entry = read_json(file).get("quantization") or {}
    if not isinstance(entry, dict):
        raise WeightError(f"{file} is no quantisation config; download or save the checkpoint again")
    return entry


_LOUD = ("transformers.modeling_utils", "transformers.utils.loading_report")


def _no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


@contextmanager
def quiet() -> Iterator[None]:
    """Run the body without progress bars and load reports; models/checkpoint.py turns the latter into errors."""
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(name) for name in _LOUD]
    transformers_logging.disable_progress_bar()
    # Filters and not levels: other warnings of these loggers still appear.
    for logger in loggers:
        logger.addFilter(_no_report)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_no_report)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
