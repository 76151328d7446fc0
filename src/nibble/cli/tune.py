"""`nibble tune`: the backends that may serve a model, timed on this machine, so that `auto` takes the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nibble.cli.exits import JsonOption
from nibble.cli.options import Options, takes
from nibble.cli.terminal import ModelArgument, err, print_json, quiet
from nibble.config import Config

if TYPE_CHECKING:
    from nibble.attention.planner.evidence import Timing
    from nibble.attention.planner.plan import Plan
    from nibble.evals.tuning.bench import Result
    from nibble.evals.tuning.tune import Trial

BackendsOption = Annotated[
    str | None, typer.Option(help="Time only these, as cuda,triton; all that may serve if left out.")
]
CHOSEN_BY_TIMES = ("attention_backend", "prefill_backend", "decode_backend", "tuned")


@takes("config", Config, "Model and cache", without=("model", "seed", *CHOSEN_BY_TIMES))
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
    """
    quiet(model)
    from nibble.attention import backends as registry
    from nibble.attention.planner import evidence
    from nibble.errors import ConfigError
    from nibble.evals.tuning.bench import DeviceLostError
    from nibble.evals.tuning.tune import run, timings, tuning

    names = [name for part in (backends or "").split(",") if (name := part.strip())]
    for name in names:
        registry.get(name)
    task = tuning(Config(model=model, **config))
    times: dict[str, tuple[Timing, ...]] = {}
    device_error = None
    for trial in task.trials:
        results: list[Result] = []
        try:
            with err().status(f"timing {trial.subject}"):
                results += run(task, trial, names)
        except DeviceLostError as error:  # what was measured before is kept
            device_error = error
            break
        if not results:  # which none of those that were named serves
            continue
        times[trial.subject] = timings(results)
        if not as_json:
            print("\n".join(_lines(trial, times[trial.subject])))
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
    after = task.plan(
        {entry.match["subject"]: entry.order for entry in evidence.load_tuned(hardware, table).entries}
    )
    changes, failed = list(_changes(before, after)), list(_failed(after))
    if as_json:
        measured = {subject: [asdict(timing) for timing in entries] for subject, entries in times.items()}
        print_json({"path": str(path), "measured": measured, "changed": changes, "failed": failed})
    else:
        print("\n".join(changes) or "auto chooses what it chose before")
        for line in failed:
            print(line)
        print(f"wrote {path}; `nibble plan {model}` shows the choice, --no-tuned leaves it aside")


EXAMPLES = """
nibble tune demo --kv-format nvfp4
nibble tune ./my-model --kv-format nvfp4 --max-context 32768
nibble tune ./my-model --kv-format nvfp4 --kv-layers 0,-1=fp8_e4m3
"""


def _report(
    model: str,
    before: Plan,
    after: Plan,
    times: Mapping[str, tuple[Timing, ...]],
    path: Path,
    *,
    as_json: bool,
) -> None:
    """Print what `auto` chooses by the new times, and where they are kept."""
    changes, failed = list(_changes(before, after)), list(_failed(after))
    if as_json:
        measured = {subject: [asdict(timing) for timing in entries] for subject, entries in times.items()}
        print_json({"path": str(path), "measured": measured, "changed": changes, "failed": failed})
        return
    print("\n".join(changes) or "auto chooses what it chose before")
    for line in failed:
        print(line)
    print(f"wrote {path}; `nibble plan {model}` shows the choice, --no-tuned leaves it aside")


def _lines(trial: Trial, timings: Sequence[Timing]) -> Iterator[str]:
    """Yield a trial as a small table: backends down, workloads across."""
    workloads = [workload.name for workload in trial.workloads]
    names = [f"{t.backend} (staged)" if t.stage_to else t.backend for t in timings]
    width = max(map(len, names))
    yield f"{trial.subject}, ms"
    yield f"  {'':<{width}}  " + "  ".join(f"{workload:>9}" for workload in workloads)
    for name, timing in zip(names, timings, strict=True):
        times = "  ".join(_ms(timing, workload) for workload in workloads)
        yield f"  {name:<{width}}  {times}  {timing.failure}".rstrip()


def _ms(timing: Timing, workload: str) -> str:
    return f"{timing.ms[workload]:9.3f}" if workload in timing.ms else f"{'failed':>9}"


def _failed(after: Plan) -> Iterator[str]:
    """Yield what `auto` chooses though it failed."""
    for group in after.groups:
        for route in group.routes:
            if route.failed:
                where = f"{route.phase} of {group.group.name} in {group.scheme}"
                yield f"{where}: {route} failed: {route.failed}; it stays, as it is by default"


def _changes(before: Plan, after: Plan) -> Iterator[str]:
    """Yield what `auto` chooses otherwise than it did."""
    for old, new in zip(before.groups, after.groups, strict=True):
        for was, now in zip(old.routes, new.routes, strict=False):
            if (was.backend, was.stage_to) != (now.backend, now.stage_to):
                yield f"{now.phase} of {new.group.name} in {new.scheme}: {now}, and not {was}; {now.why}"
    if (before.page_size, before.layout.packing) != (after.page_size, after.layout.packing):
        yield f"pages of {after.page_size}, {after.layout.packing}, and not {before.page_size}, {before.layout.packing}"
