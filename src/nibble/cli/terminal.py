"""What commands share: the model argument, consoles, JSON, texts of files, quiet libraries, figures in words."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nibble.attention.planner.explain import baseline_bytes
from nibble.cache.layout import CacheLayout
from nibble.config import BUNDLED
from nibble.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from nibble.engine.llm import LLM

MODEL_HELP = (
    "Local folder or hub name of a Transformers checkpoint; `demo`, `demo-mla` and `demo-hybrid` are bundled."
)
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


def err() -> Console:
    """Return the console of everything that is not a result. Its lines are not wrapped."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    # Flushed, because `serve` prints its address while it runs, and a script waits for that.
    print(json.dumps(value, indent=1, ensure_ascii=False), flush=True)


def quiet_libraries(model: str) -> None:
    """Keep Transformers from talking in between, before it is imported; downloads keep their bars."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # Threads of tokenizers and a fork do not go together: the package warns, or hangs.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Bars are for downloads, and a local model has none.
    if model in BUNDLED or Path(model).exists() or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def read_utf8(read: Callable[[], str], what: str) -> str:
    """Return what `read` gives; raise RequestError where it is not UTF-8."""
    try:
        text = read()
        # What the system read from other bytes has surrogates, which cannot be encoded.
        text.encode()
    except UnicodeError as error:
        raise RequestError(f"{what} is not UTF-8 ({error}); convert it, as with iconv") from None
    return text


def read_text(path: Path, what: str) -> str:
    """Return the text of a file; raise RequestError where it cannot be read."""
    try:
        return read_utf8(partial(path.read_text, "utf-8"), f"the {what} {path}")
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        why = "does not exist" if missing else f"cannot be read ({error.strerror})"
        raise RequestError(f"the {what} {path} {why}; name a text file in UTF-8") from None


@contextmanager
def start_parts(show: Callable[[str], object]) -> Iterator[None]:
    """Show the part of a start that has begun (startup_report.StartupReport)."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.DEBUG:
                show(record.facts["part"])  # type: ignore[attr-defined]

    logger, handler = logging.getLogger("nibble.start"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def print_startup(llm: LLM) -> None:
    """Print sampling defaults, the scheme, KV scales, the certificate, notes, and how long the start took, by part."""
    startup, defaults = llm.engine.startup, llm.engine.sampling_defaults.summary
    certified = llm.certificate.line if llm.certificate else ""
    lines = (
        defaults,
        startup.meaning,
        startup.kv_scales,
        certified,
        *startup.notes,
        f"ready in {startup.summary}",
    )
    for line in filter(None, lines):
        err().print(line, style="dim")


def summary_of_bytes(scheme: str, layout: CacheLayout) -> str:
    """Return `nvfp4: 864 bytes of KV cache per token, 3.56 x fewer than in 16 bits`."""
    ratio = baseline_bytes(layout) / layout.bytes_per_token
    line = f"{scheme}: {layout.bytes_per_token:,} bytes of KV cache per token"
    return line if ratio == 1 else f"{line}, {ratio:.2f} x fewer than in 16 bits"
