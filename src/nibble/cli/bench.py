"""`nibble bench serve`: a load test by GuideLLM, with defaults for a Nibble server.

`nibble tune`: the backends that may serve a model, timed on this machine, so that `auto` takes the fastest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from nibble.attention import backends as registry
from nibble.attention.planner import evidence
from nibble.attention.planner.evidence import Timing
from nibble.attention.planner.explain import Table
from nibble.attention.planner.plan import Plan
from nibble.cli.command import OUTPUT, JsonOption, Options, takes
from nibble.cli.terminal import ModelArgument, err, print_json, quiet_libraries
from nibble.config import Config
from nibble.errors import ConfigError, NibbleError, unknown

if TYPE_CHECKING:
    from nibble.evals.tune import DeviceLostError, Result, Trial, Tuning

SERVE = "serve"
INSTALL = "pip install guidellm"
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

    Examples:
        nibble bench serve
        nibble bench serve localhost:8000 --concurrency 1,8,64 --requests 200
        nibble bench serve --rate 2,8 --input-tokens 2048 --json load.json
        nibble bench serve --constraint kind=max_duration,seconds=30
    """
    if what != SERVE:
        raise ConfigError(unknown("measurement", what, (SERVE,)))
    if find_spec("guidellm") is None:
        raise ConfigError(f"a load test needs GuideLLM, which is not installed: {INSTALL}")
    url, options = _split_address(rest or [])
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
    if not _has_flag("--tokenizer", options):
        # GuideLLM would look up the served name on the hub, where neither `demo` nor a local folder is.
        from nibble.models.hub import locate

        tokenizer = locate(model or _served_model(url, key))
        defaults["--tokenizer"] = {"kind": "huggingface_auto", "model": tokenizer}
    arguments = ["run", *options]
    # What the user says of a flag replaces the default in full.
    for flag, value in defaults.items():
        if not _has_flag(flag, options):
            arguments += [flag, json.dumps(value)]
    # A profile has one level; several are runs of GuideLLM's own.
    if "," in levels and not _has_flag("--profile", options):
        arguments += ["--override", f"profile.{field}", levels]
    _run_guidellm(arguments, url, key)


def _run_guidellm(arguments: list[str], url: str, key: str | None) -> None:
    """Run GuideLLM, and say what became of the server's drafts meanwhile."""
    from guidellm.cli import cli

    before = _drafts_of(url, key)
    try:
        # In this process, so that no key is an argument of a process.
        cli.main(arguments, prog_name="guidellm")
    finally:
        if before and (after := _drafts_of(url, key)):
            print(_drafts_line(before, after))


class PassThrough(TyperCommand):
    """A command that hands options it does not know to its last argument."""

    ignore_unknown_options = True


def _has_flag(flag: str, options: list[str]) -> bool:
    return any(option == flag or option.startswith(f"{flag}=") for option in options)


def _split_address(rest: list[str]) -> tuple[str, list[str]]:
    """Return a server's address, with a scheme and without /v1, and the options after it."""
    # The address may be left out, and then the first argument is an option.
    has_url = bool(rest) and not rest[0].startswith("-")
    url = rest[0] if has_url else LOCAL_SERVER
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/"), rest[has_url:]


def _drafts_of(url: str, key: str | None) -> dict[str, Any] | None:
    """Return a server's counts of drafts; None where nobody drafts, or it is another kind of server."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        drafts = (
            httpx.get(f"{url}/v1/cache", headers=headers, timeout=30).raise_for_status().json().get("drafts")
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError):
        return None
    return drafts if isinstance(drafts, dict) else None


def _drafts_line(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return what became of the drafts in between."""
    steps, drafted, accepted = (after[name] - before[name] for name in ("steps", "drafted", "accepted"))
    if drafted < 1:
        return f"drafts by {after['drafter']}: none were verified"
    return (
        f"drafts by {after['drafter']}: {accepted:,} of {drafted:,} tokens accepted ({accepted / drafted:.0%}), "
        f"{1 + accepted / steps:.2f} tokens a verification"
    )


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


BackendsOption = Annotated[
    str | None, typer.Option(help="Time only these, as cuda,triton; all that may serve if left out.")
]
Times = dict[str, tuple[Timing, ...]]
IDLE = (
    "kv_scales", "threads", "prefix_cache", "compile", "compile_cache", "watch_fidelity", "fidelity_alert",
    "require_quality", "chat_template", "generation_config", "speculative", "speculative_tokens",
)  # fmt: skip
"""Fields of Config that change no time of a backend."""
CHOSEN_BY_TIMES = ("attention_backend", "prefill_backend", "decode_backend", "tuned")


@takes("config", Config, "Model and cache", without=("model", "seed", *CHOSEN_BY_TIMES), idle=IDLE)
def tune(
    model: ModelArgument = "demo",
    backends: BackendsOption = None,
    as_json: JsonOption = False,
    *,
    config: Options,
) -> None:
    """Time every backend that may serve a model's layers on this machine, and keep the times for `auto`.

    Each backend attends over made-up pages of the shapes that the model asks for, in every phase, after its answer was
    checked; no weights are needed. From then on `auto` takes the fastest, and `nibble plan` says so. The times are kept
    in the user's cache folder, for this device, these versions of packages and this version of Nibble. A backend that
    is named is used all the same, and --no-tuned leaves the times aside. On a CPU the fastest may be one whose last
    bits depend on what else is in a step.

    Examples:
        nibble tune demo --kv-format nvfp4
        nibble tune ./my-model --kv-format nvfp4 --max-context 32768
        nibble tune ./my-model --kv-format nvfp4 --kv-layers 0,-1=fp8_e4m3
    """
    quiet_libraries(model)
    from nibble.evals.tune import plan_tuning

    names = [name for part in (backends or "").split(",") if (name := part.strip())]
    for name in names:
        registry.get(name)
    task = plan_tuning(Config(model=model, **config))
    # Now, and not after minutes of measuring.
    evidence.require_tuned_writable(task.engine_plan.hardware)
    times, device_error = _measure(task, names, as_json)
    if device_error and not times:
        raise device_error
    if not times:
        raise ConfigError(
            f"{', '.join(names)}: none serves this model here; `nibble plan {model} --explain` says why"
        )
    hardware, table = task.engine_plan.hardware, task.request.backends
    path = evidence.save_tuned(hardware, table, times)
    if device_error:
        raise device_error
    entries = evidence.load_tuned(hardware, table).entries
    after = task.plan({entry.match["subject"]: entry.order for entry in entries})
    changes, failed = list(_changed_routes(task.engine_plan.plan, after)), list(_failed_routes(after))
    if as_json:
        measured = {subject: [asdict(timing) for timing in timings] for subject, timings in times.items()}
        print_json({"path": str(path), "measured": measured, "changed": changes, "failed": failed})
        return
    print("\n".join((*(changes or ["auto chooses what it chose before"]), *failed)))
    print(f"wrote {path}; `nibble plan {model}` shows the choice, --no-tuned leaves it aside")


def _measure(task: Tuning, names: list[str], as_json: bool) -> tuple[Times, DeviceLostError | None]:
    """Return the times by subject, and what ended the measuring early. Print them unless JSON is asked for."""
    from nibble.evals import tune

    times: Times = {}
    for trial in task.trials:
        results: list[Result] = []
        try:
            with err().status(f"timing {trial.subject}"):
                results += tune.run_trial(task, trial, names)
        except tune.DeviceLostError as error:
            # What was measured before is kept.
            return times, error
        # There are none where no backend of `names` serves the trial.
        if results:
            times[trial.subject] = tune.timings(results)
            if not as_json:
                print("\n".join(_times_table(trial, times[trial.subject])))
    return times, None


def _times_table(trial: Trial, timings: Sequence[Timing]) -> Iterator[str]:
    """Yield a trial as a small table: backends down, workloads across."""
    workloads = [workload.name for workload in trial.workloads]
    rows = []
    for timing in timings:
        name = f"{timing.backend} (staged)" if timing.stage_to else timing.backend
        times = [f"{timing.ms[w]:9.3f}" if w in timing.ms else f"{'failed':>9}" for w in workloads]
        rows.append((name, *times, timing.failure))
    yield f"{trial.subject}, ms"
    yield from Table(("", *(f"{workload:>9}" for workload in workloads), ""), tuple(rows)).as_text()


def _failed_routes(after: Plan) -> Iterator[str]:
    """Yield what `auto` chooses though it failed."""
    for group in after.groups:
        for route in group.routes:
            if route.failed:
                where = f"{route.phase} of {group.group.name} in {group.scheme}"
                yield f"{where}: {route} failed: {route.failed}; it stays, as it is by default"


def _changed_routes(before: Plan, after: Plan) -> Iterator[str]:
    """Yield what `auto` chooses otherwise than it did."""
    for old, new in zip(before.groups, after.groups, strict=True):
        for was, now in zip(old.routes, new.routes, strict=False):
            if (was.backend, was.stage_to) != (now.backend, now.stage_to):
                yield f"{now.phase} of {new.group.name} in {new.scheme}: {now}, and not {was}; {now.why}"
    if (before.page_size, before.layout.packing) != (after.page_size, after.layout.packing):
        yield f"pages of {after.page_size}, {after.layout.packing}, and not {before.page_size}, {before.layout.packing}"
