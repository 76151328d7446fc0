"""What commands share in speaking to a terminal: consoles, JSON, quiet libraries, figures in words.

Must not know of any one command.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nibble.config import BUNDLED

if TYPE_CHECKING:
    from rich.console import Console

    from nibble.cache.layout import CacheLayout
    from nibble.engine.llm import LLM

MODEL_HELP = "Local folder or hub name of a Transformers checkpoint; `demo` and `demo-mla` are bundled."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


def out() -> Console:
    """The console of results."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def err() -> Console:
    """The console of everything that is not a result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def quiet(model: str) -> None:
    """Keeps Transformers from talking in between; downloads keep their bars. For before it is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if model in BUNDLED or Path(model).exists() or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def say_ready(llm: LLM) -> None:
    """How long the start took, part by part, and what is worth knowing of it."""
    startup = llm.engine.startup
    for line in (*startup.notes, f"ready in {startup.words}"):
        err().print(line, style="dim")


def bytes_in_words(scheme: str, layout: CacheLayout) -> str:
    """`nvfp4: 864 bytes of KV cache per token, 3.56 x fewer than in 16 bits`."""
    from nibble.attention.explain import baseline_bytes

    ratio = baseline_bytes(layout) / layout.bytes_per_token
    said = f"{scheme}: {layout.bytes_per_token:,} bytes of KV cache per token"
    return said if ratio == 1 else f"{said}, {ratio:.2f} x fewer than in 16 bits"
