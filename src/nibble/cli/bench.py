"""`nibble bench serve`: a load test by GuideLLM, with defaults for a Nibble server."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from nibble.cli.exits import OUTPUT
from nibble.errors import ConfigError, NibbleError, unknown

SERVE = "serve"
INSTALL = "pip install 'nibble-llm[bench]'"
LOCAL_SERVER = "http://localhost:8000"

WhatArgument = Annotated[str, typer.Argument(metavar="WHAT", help="What is measured: `serve`, a server.")]
RestArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[URL] [GUIDELLM OPTIONS]",
        help=f"The server's address ({LOCAL_SERVER} if left out), then options of `guidellm run`.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Hub name or folder whose tokenizer counts tokens; the name in /v1/models if left out."
    ),
]
ConcurrencyOption = Annotated[str, typer.Option(help="Open requests; several numbers, several measurements.")]
RateOption = Annotated[
    str | None, typer.Option(help="Requests a second, evenly spaced, as 1,4,8; replaces --concurrency.")
]
RequestsOption = Annotated[int, typer.Option(min=1, help="Requests of each measurement.")]
InputOption = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")]
AnswerOption = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
ChatOption = Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions, not /v1/completions.")]
KeyOption = Annotated[str | None, typer.Option(help="The server's key; NIBBLE_API_KEY, if left out.")]
JsonFileOption = Annotated[
    Path | None, typer.Option("--json", help="Write GuideLLM's report to this file.", rich_help_panel=OUTPUT)
]


def bench(
    what: WhatArgument = SERVE,
    rest: RestArgument = None,
    model: ModelOption = None,
    concurrency: ConcurrencyOption = "1,4,16",
    rate: RateOption = None,
    requests: RequestsOption = 100,
    input_tokens: InputOption = 512,
    output_tokens: AnswerOption = 128,
    chat: ChatOption = False,
    api_key: KeyOption = None,
    json_file: JsonFileOption = None,
) -> None:
    """Measure a server under load, with GuideLLM.

    Runs `guidellm run` (extra `bench`) with synthetic prompts, and shows time to the first token and between tokens,
    and throughput, for each concurrency or rate. Its own options may follow, and replace what this command sets:
    `--backend`, `--tokenizer`, `--data`, `--profile`, `--constraint`, `--output`.
    """
    if what != SERVE:
        raise ConfigError(unknown("measurement", what, (SERVE,)))
    if find_spec("guidellm") is None:
        raise ConfigError(f"a load test needs GuideLLM, which is not installed: {INSTALL}")
    rest = rest or []
    # The address may be left out, and then the first argument is an option.
    has_url = bool(rest) and not rest[0].startswith("-")
    url, options = _server_root(rest[0] if has_url else LOCAL_SERVER), rest[has_url:]
    key = api_key or os.environ.get("NIBBLE_API_KEY")
    path = "/v1/chat/completions" if chat else "/v1/completions"
    # GuideLLM 0.8.1's `poisson` sent 2.3 times the rate it was given; `constant` keeps it.
    kind, field, levels = ("constant", "rate", rate) if rate else ("concurrent", "streams", concurrency)
    output = {"kind": "json", "path": str(json_file)} if json_file else {"kind": "console"}
    defaults: dict[str, dict[str, Any]] = {
        "--backend": {"kind": "openai_http", "target": url, "request_format": path, "api_key": key},
        "--profile": {"kind": kind, field: levels.split(",")[0]},
        "--constraint": {"kind": "max_requests", "count": requests},
        "--data": {"kind": "synthetic_text", "prompt_tokens": input_tokens, "output_tokens": output_tokens},
        "--output": output,
    }
    if not _names("--tokenizer", options):
        # GuideLLM would look up the served name on the hub, where neither `demo` nor a local folder is.
        from nibble.models.hub import locate

        tokenizer = locate(model or _served_model(url, key))
        defaults["--tokenizer"] = {"kind": "huggingface_auto", "model": tokenizer}
    arguments = ["run", *options]
    # What the user says of a flag replaces the default in full.
    for flag, value in defaults.items():
        if not _names(flag, options):
            arguments += [flag, json.dumps(value)]
    # A profile has one level; several are runs of GuideLLM's own.
    if "," in levels and not _names("--profile", options):
        arguments += ["--override", f"profile.{field}", levels]
    _run_guidellm(arguments)


class PassThrough(TyperCommand):
    """A command that hands options it does not know to its last argument."""

    ignore_unknown_options = True


CLASS = PassThrough
EXAMPLES = """
nibble bench serve
nibble bench serve localhost:8000 --concurrency 1,8,64 --requests 200
nibble bench serve --rate 2,8 --input-tokens 2048 --json load.json
nibble bench serve --constraint kind=max_duration,seconds=30
"""


def _run_guidellm(arguments: list[str]) -> None:
    """Run GuideLLM's command line in this process, so that no key is an argument of a process."""
    from guidellm.cli import cli

    cli.main(arguments, prog_name="guidellm")


def _names(flag: str, options: list[str]) -> bool:
    return any(option == flag or option.startswith(f"{flag}=") for option in options)


def _server_root(url: str) -> str:
    """Return a server's address with a scheme and without /v1."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _served_model(url: str, key: str | None) -> str:
    """Return the first model that a server lists."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=30)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise NibbleError(f"{url} does not answer: {error or type(error).__name__}") from None
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url}/v1/models names no model ({error}); give --model") from None
