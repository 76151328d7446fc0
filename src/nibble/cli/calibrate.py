"""`nibble calibrate`: KV scales for every scheme, measured on a text, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nibble.cli.exits import OUTPUT, JsonOption
from nibble.cli.options import Options, takes
from nibble.cli.terminal import ModelArgument, err, print_json, quiet, text_of
from nibble.config import Config

TextOption = Annotated[
    list[Path] | None,
    typer.Option(help="A text like those to be served; else one that Python brings."),
]
OutOption = Annotated[Path, typer.Option(help="The file to write.", rich_help_panel=OUTPUT)]


@takes(
    "config",
    Config,
    "Model",
    without=("model", "kv_format", "kv_layers", "kv_scales", "prefix_cache", "seed"),
)
def calibrate(
    model: ModelArgument = "demo",
    text: TextOption = None,
    out: OutOption = Path("kv_scales.json"),
    as_json: JsonOption = False,
    *,
    config: Options,
) -> None:
    """Measure KV scales once, for all schemes, and write them to a file for --kv-scales.

    A file called kv_scales.json in a checkpoint's folder is found by itself.
    """
    # Before the imports below, which bring Transformers: it reads its verbosity then.
    quiet(model)
    from nibble.engine.calibration import builtin_texts
    from nibble.engine.llm import LLM

    texts = [text_of(path, "text") for path in text or ()] or builtin_texts()
    with err().status(f"measuring K and V of {model}"):
        scales = LLM(model, **config).measure_scales(texts, save=out)
    if as_json:
        print_json(
            {
                "path": str(out),
                "source": scales.source,
                "layers": len(scales.layers),
                "version": scales.version,
            }
        )
    else:
        print(
            f"wrote {out}: scales of {len(scales.layers)} layers, from {scales.source}; "
            f"use them with --kv-scales {out}"
        )


EXAMPLES = """
nibble calibrate demo --out kv_scales.json
nibble calibrate ./my-model --text talk.txt --out ./my-model/kv_scales.json
"""
