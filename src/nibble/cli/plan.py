"""`nibble plan`: what would be done with a model on a GPU, before anything is loaded; or why it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nibble.cli.exits import REFUSED, JsonOption
from nibble.cli.options import Options, takes
from nibble.cli.terminal import ModelArgument, print_json, quiet
from nibble.config import Config
from nibble.errors import Unsupported

if TYPE_CHECKING:
    from nibble.attention.planner.options import PlanRequest
    from nibble.engine.plan import EnginePlan

GpuOption = Annotated[
    str | None,
    typer.Option(help="Plan for this GPU (h200, b200, rtx5090, sm90... or cpu) and not for this machine."),
]
DeclaredOption = Annotated[
    bool,
    typer.Option("--declared", help="Let `auto` choose backends that this version knows but cannot run yet."),
]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Say of every backend and phase: verified (where and when), declared, staged, or why not.",
    ),
]


@takes("config", Config, "Model and cache", without=("model", "seed"))
def plan(
    model: ModelArgument = "demo",
    gpu: GpuOption = None,
    declared: DeclaredOption = False,
    explain: ExplainOption = False,
    as_json: JsonOption = False,
    *,
    config: Options,
) -> None:
    """Show the routes, page size, bytes per token and tokens that fit; or why not, and what works.

    Neither weights nor a GPU nor any kernel package is needed: a local config.json is enough. A combination
    that no backend serves ends with exit code 3, each backend's reasons, and the nearest command that works.
    """
    # Before Transformers is imported, which reads its verbosity then.
    quiet(model)
    from nibble.engine.plan import plan_engine
    from nibble.hardware import lookup_gpu

    try:
        engine_plan = plan_engine(
            Config(model=model, **config), lookup_gpu(gpu) if gpu else None, declared=declared
        )
    except Unsupported as error:
        # For people a refusal is an error like others; programs get its reasons as data.
        if not as_json:
            raise
        print_json({"model": model, "refused": error.refusal.as_dict()})
        raise typer.Exit(REFUSED) from None
    request = _request(engine_plan, gpu, declared) if explain else None
    if as_json:
        print_json(_as_dict(engine_plan, request))
    else:
        print("\n".join(_lines(engine_plan, request)))


EXAMPLES = """
nibble plan demo --kv-format nvfp4
nibble plan ./my-model --kv-format nvfp4 --gpu b200 --declared
nibble plan ./my-model --kv-format nvfp4 --decode-backend fa3 --gpu h200
nibble plan demo --kv-format nvfp4 --gpu h200 --declared --explain
"""


def _as_dict(engine_plan: EnginePlan, request: PlanRequest | None) -> dict[str, Any]:
    from nibble.attention.planner import cells, explain

    facts = {
        "model": engine_plan.config.model,
        "hardware": asdict(engine_plan.hardware),
        **explain.as_dict(engine_plan.plan, engine_plan.budget),
    }
    if request:
        facts["cells"] = cells.as_dicts(cells.cells(request, engine_plan.plan))
    return facts


def _lines(engine_plan: EnginePlan, request: PlanRequest | None) -> Iterator[str]:
    from nibble.attention.planner import cells
    from nibble.attention.planner.explain import as_text

    yield f"{engine_plan.config.model} ({engine_plan.model_spec.family}) on {engine_plan.hardware}"
    yield as_text(engine_plan.plan, engine_plan.budget)
    if request:
        yield from cells.as_lines(cells.cells(request, engine_plan.plan), request)


def _request(engine_plan: EnginePlan, gpu: str | None, declared: bool) -> PlanRequest:
    """Return what the plan was resolved from: on this machine, with the backends whose packages are here."""
    from nibble.attention import backends
    from nibble.attention.planner.options import PlanRequest

    table = backends.all_backends() if gpu else backends.available_backends()
    return PlanRequest(
        engine_plan.config, engine_plan.model_spec, engine_plan.hardware, table, declared, False
    )
