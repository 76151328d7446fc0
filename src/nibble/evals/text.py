"""The text of an evaluation, and its two parts: what is scored, and what scales are measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nibble.engine.calibration import builtin_texts
from nibble.errors import ConfigError, WeightError
from nibble.models.checkpoint import download

HELDOUT = "heldout.txt"
CALIBRATION_TOKENS = 4096
LEAST_CALIBRATION = 1024


def read(path: Path | None, model: str) -> str:
    """The text of `path`, or the heldout.txt of the model's folder; raises ConfigError."""
    path = path or _bundled(model)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {path}: {error}") from error


def _bundled(model: str) -> Path:
    try:
        path = download(model) / HELDOUT
    except OSError as error:
        raise WeightError(f"cannot find the checkpoint of {model!r}: {error}") from error
    if not path.exists():
        raise ConfigError(
            f"{model!r} brings no {HELDOUT} to score; name a text that it was not trained on with --text FILE"
        )
    return path


@dataclass(frozen=True, slots=True)
class Parts:
    """scored: token ids.

    calibration: text beyond them. bytes_per_token: of what is scored. digest: of it all.
    """

    scored: tuple[int, ...]
    calibration: str
    bytes_per_token: float
    digest: str


def split(
    text: str, tokens: int, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]
) -> Parts:
    """The first `tokens` tokens, and what follows; where that is too short, a built-in text calibrates."""
    ids = encode(text)
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens; at least 2 are needed to score one")
    # The parts do not overlap: scales that are measured on the scored text would flatter a scheme.
    scored, rest = ids[:tokens], ids[tokens : tokens + CALIBRATION_TOKENS]
    calibration = decode(rest) if len(rest) >= LEAST_CALIBRATION else builtin_texts()[0]
    size = len(decode(scored).encode())
    # Reports can be compared only where this is the same.
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Parts(tuple(scored), calibration, max(size, 1) / len(scored), digest)
