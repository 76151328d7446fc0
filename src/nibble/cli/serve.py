"""`nibble serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import typer
from typer.core import TyperCommand

from nibble import errors
from nibble.cli.aliases import translated
from nibble.cli.exits import JsonOption, code_of
from nibble.cli.options import Options, takes
from nibble.cli.terminal import ModelArgument, err, print_json, quiet
from nibble.config import Config
from nibble.server.settings import Settings


class Translating(TyperCommand):
    """Takes the flags of other servers too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translated(args))


@takes("settings", Settings, "Server")
@takes("config", Config, "Model and cache", without=("model",))
def serve(
    model: ModelArgument = "demo", as_json: JsonOption = False, *, config: Options, settings: Options
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    The engine runs in a process of its own, and is started again should it die. Listens at localhost unless told
    otherwise. Ctrl-C, or SIGTERM, lets open requests end first. With --json a line says where, once it serves. Flags
    of vLLM and SGLang that mean the same are taken too (docs/migrating.md).
    """
    served = Config(model=model, **config)
    chosen = Settings(**settings)
    if chosen.api_key is None:
        chosen = replace(chosen, api_key=os.environ.get("NIBBLE_API_KEY"))
    quiet(model)
    from nibble.models.hub import locate
    from nibble.server.engine_client import EngineDiedError
    from nibble.server.run import serve as run

    try:
        run(served, chosen, locate(model), _say_json if as_json else None)
    except EngineDiedError as error:
        err().print(f"error: {error}", markup=False, highlight=False)
        raise typer.Exit(code_of(getattr(errors, error.kind, EngineDiedError))) from None


CLASS = Translating
EXAMPLES = """
nibble serve demo --kv-format nvfp4
nibble serve Qwen/Qwen3-8B --kv-format nvfp4 --host 0.0.0.0 --api-key KEY
nibble serve demo-mla --kv-format fp8_ds_mla --hisparse on --port 9000
"""


def _say_json(name: str, url: str) -> None:
    print_json({"model": name, "url": url})
