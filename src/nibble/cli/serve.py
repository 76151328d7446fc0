"""`nibble serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import typer
from typer.core import TyperCommand

from nibble import errors
from nibble.cli import peer_flags
from nibble.cli.command import JsonOption, Options, code_of, takes
from nibble.cli.terminal import ModelArgument, err, print_json, quiet_libraries
from nibble.config import Config
from nibble.server.listen import check_tls, listen
from nibble.server.replicas import environments
from nibble.server.settings import Settings

FLAG_ALIASES = {
    "--kv-cache-dtype": "--kv-format",  # vLLM, SGLang
    "--max-model-len": "--max-context",  # vLLM
    "--context-length": "--max-context",  # SGLang
    "--max-num-seqs": "--max-running",  # vLLM
    "--max-running-requests": "--max-running",  # SGLang
    "--max-num-batched-tokens": "--token-budget",  # vLLM
    "--chunked-prefill-size": "--token-budget",  # SGLang
    "--block-size": "--page-size",  # vLLM
    "--enable-prefix-caching": "--prefix-cache",  # vLLM
    "--no-enable-prefix-caching": "--no-prefix-cache",  # vLLM
    "--disable-radix-cache": "--no-prefix-cache",  # SGLang
    "--enforce-eager": "--no-compile --no-graphs",  # vLLM
    "--disable-cuda-graph": "--no-graphs",  # SGLang
    "--enable-deterministic-inference": "--deterministic",  # SGLang
    "--random-seed": "--seed",  # SGLang
    "--tool-call-parser": "--tool-format",  # vLLM, SGLang
    "--enable-auto-tool-choice": "",  # vLLM; always so
    "--scheduling-policy": "--scheduling",  # vLLM
    "--tensor-parallel-size": "--tp",  # vLLM, SGLang
    "-tp": "--tp",  # vLLM
    "--tp-size": "--tp",  # SGLang
    "--enable-expert-parallel": "--expert-parallel",  # vLLM
    "--enable-dp-attention": "--attention-dp",  # SGLang
    "--enable-log-requests": "--log-requests",  # vLLM
    "--disable-log-requests": "--no-log-requests",  # vLLM
    "--data-parallel-size": "--replicas",  # vLLM, SGLang
    "-dp": "--replicas",  # vLLM
    "--dp": "--replicas",  # SGLang
    "--dp-size": "--replicas",  # SGLang
}
"""Flags of other servers, and ours that mean the same (not nearly the same); docs/migrating.md shows them."""
VALUE_ALIASES = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--generation-config": {"vllm": "none"},
    "--tool-format": {
        "llama3_json": "llama3", "llama4_json": "llama3", "llama4_pythonic": "pythonic", "qwen": "hermes",
        "qwen25": "hermes", "qwen3_xml": "qwen3_coder", "glm": "glm45", "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "minimax-m2": "minimax_m2",
    },
    "--reasoning-parser": {
        "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v31", "deepseek_v3": "deepseek_v31",
        "qwen3-thinking": "qwen3", "glm45": "qwen3", "mistral": "magistral",
    },
}  # fmt: skip
"""Other spellings of values, by our flag. The schemes themselves know other names of cache formats."""
MODEL_FLAGS = ("--model", "--model-path")  # vLLM, SGLang: a flag for our argument


def translate_flags(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the flags of other servers replaced by ours, and the model first."""
    result: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        flags = FLAG_ALIASES.get(flag, flag).split()
        if equals and flags:
            result += [*flags[:-1], f"{flags[-1]}={VALUE_ALIASES.get(flags[-1], {}).get(value, value)}"]
        # The argument is the value of the flag before it, as in `--dtype half`.
        elif result and result[-1] in VALUE_ALIASES:
            result.append(VALUE_ALIASES[result[-1]].get(argument, argument))
        else:
            result += flags
    for i, argument in enumerate(result):
        flag, equals, value = argument.partition("=")
        if flag in MODEL_FLAGS:
            end = i + (1 if equals else 2)
            # Here the model is an argument and not an option, so it loses its flag.
            return [*([value] if equals else result[i + 1 : end]), *result[:i], *result[end:]]
    return result


class ServeCommand(TyperCommand):
    """A command that takes the flags of other servers too."""

    def translate(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Return an option of a config file, which may be another server's, as ours: names without dashes, values."""
        flag = f"--{name}"
        if flag in MODEL_FLAGS:
            return [("model", value)]
        # A switch that is off in the file is one that is not on the command line.
        flags = [] if value is False and flag in FLAG_ALIASES else FLAG_ALIASES.get(flag, flag).split()
        return [
            (entry.removeprefix("--"), VALUE_ALIASES.get(entry, {}).get(str(value), value)) for entry in flags
        ]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate the flags of other servers, then parse."""
        try:
            return super().parse_args(ctx, translate_flags(peer_flags.translate(args)))
        except errors.ConfigError as error:
            ctx.fail(str(error))  # ends the command
            raise


@takes("settings", Settings, "Server")
@takes("config", Config, "Model and cache", without=("model",))
def serve(
    model: ModelArgument = "demo", as_json: JsonOption = False, *, config: Options, settings: Options
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    The engine runs in a process of its own, and is started again should it die. Listens at localhost unless told
    otherwise. Ctrl-C, or SIGTERM, lets open requests end first. With --json a line says where, once it serves. Flags
    of vLLM and SGLang that mean the same are taken too (docs/migrating.md).

    Examples:
        nibble serve demo --kv-format nvfp4
        nibble serve Qwen/Qwen3-8B --kv-format nvfp4 --host 0.0.0.0 --api-key KEY
        nibble serve demo-mla --kv-format fp8_ds_mla --hisparse on --port 9000
        nibble serve Qwen/Qwen3-8B --kv-format nvfp4 --replicas 8
    """
    served = Config(model=model, **config)
    server_settings = Settings(**settings)
    # A key in the environment is not seen in the list of processes.
    if server_settings.api_key is None:
        server_settings = replace(server_settings, api_key=os.environ.get("NIBBLE_API_KEY"))
    quiet_libraries(model)
    check_tls(server_settings)
    if server_settings.kv_events and not served.prefix_cache:
        raise errors.ConfigError("kv_events tell of the prefix cache, which --no-prefix-cache turns off")
    if server_settings.replicas > 1:
        environments(
            served.device, server_settings.replicas, served.tp
        )  # raises where there are too few GPUs
    # Before seconds of imports.
    sockets = listen(server_settings)
    from nibble.models.hub import locate, pinned
    from nibble.server.engine_client import EngineDiedError
    from nibble.server.run import serve as run

    try:
        run(
            served,
            server_settings,
            locate(pinned(served).model),
            sockets,
            _print_address if as_json else None,
        )
    except EngineDiedError as error:
        err().print(f"error: {error}", markup=False, highlight=False)
        # The engine's process sends the name of its error, so the exit code is that of the cause.
        raise typer.Exit(code_of(getattr(errors, error.kind, EngineDiedError))) from None
    finally:
        for listener in sockets:
            listener.close()


def _print_address(name: str, url: str) -> None:
    print_json({"model": name, "url": url})
