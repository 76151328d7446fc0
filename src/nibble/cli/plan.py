"""`nibble plan`: what would be done with a model on a GPU, before anything is loaded; or why it cannot be.

`nibble formats`: the schemes that --kv-format takes, with their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from nibble.attention import backends
from nibble.attention.planner import explain as explanation
from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.options import PlanRequest
from nibble.cli.command import REFUSED, JsonOption, Options, takes
from nibble.cli.terminal import ModelArgument, print_json, quiet_libraries
from nibble.config import Config
from nibble.engine import certificate_lookup
from nibble.engine.cache_plan import CachePlan
from nibble.engine.plan import as_text, plan_cache, plan_memory
from nibble.engine.scale_source import find_source
from nibble.errors import CapacityError, Unsupported
from nibble.formats import scheme as schemes
from nibble.formats import transforms
from nibble.formats.base import ENCODERS
from nibble.hardware import lookup_gpu
from nibble.model_spec import HEADS, LATENTS, Stream
from nibble.models.hub import hub_name, local_folder

HEAD_DIM = 128
IDLE = ("threads", "compile", "compile_cache", "fidelity_alert", "chat_template", "generation_config")
"""Fields of Config that change no plan."""


def formats(as_json: JsonOption = False) -> None:
    """List the cache schemes, with bytes per token, what they save, and whose bytes they agree with.

    Examples:
        nibble formats
        nibble formats --json
    """
    facts = {
        "head_dim": HEAD_DIM,
        "schemes": [
            {"of": of, "name": name, **_scheme_facts(name, streams)}
            for of, streams in (("kv", HEADS), ("latent", LATENTS[:1]))
            for name in schemes.fitting(*streams)
        ],
        "encoders": [
            {"name": name, "formats": having, "summary": ENCODERS[name]}
            for name, having in schemes.encoders().items()
        ],
        "transforms": [{"name": n, "summary": transforms.get(n).summary} for n in transforms.names()],
    }
    if as_json:
        print_json(facts)
    else:
        _print_formats(facts)


def _scheme_facts(name: str, streams: Sequence[Stream]) -> dict[str, Any]:
    codecs = {stream.name: schemes.parse(name).format_of(stream) for stream in streams}
    size = schemes.bytes_per_token(name, streams)
    distinct = {codec.name: codec for codec in codecs.values()}
    summary = ", ".join(f"{stream.upper()} in {codec.name}" for stream, codec in codecs.items())
    if len(distinct) == 1:
        (summary,) = (codec.summary for codec in distinct.values())
    return {
        "formats": {stream: codec.name for stream, codec in codecs.items()},
        "bytes_per_token": size,
        # 2 bytes a value: the same streams in 16 bits.
        "ratio": round(2 * sum(stream.values for stream in streams) / size, 2),
        "needs_scales": any(codec.needs_scale for codec in distinct.values()),
        "head_dim_multiple": max(codec.block for codec in distinct.values()),
        "summary": summary,
        "source": "; ".join(dict.fromkeys(codec.source for codec in distinct.values())),
    }


def _print_formats(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False)
    kinds = {"kv": f"K and V of one KV head of {HEAD_DIM} values", "latent": "a latent of MLA, 512 + 64"}
    for of, what in kinds.items():
        numbers = (Column("bytes", justify="right"), Column("x fewer", justify="right"))
        table = Table("scheme", *numbers, "scales", "what it is", box=box.SIMPLE_HEAD)
        for row in facts["schemes"]:
            if row["of"] == of:
                scales = "needed" if row["needs_scales"] else "none"
                size, ratio = str(row["bytes_per_token"]), f"{row['ratio']:.2f}"
                table.add_row(row["name"], size, ratio, scales, row["summary"])
        console.print(table)
        console.print(f"Bytes per token of {what}.")
    console.print("How 4-bit formats choose block scales, --kv-encoder:")
    for row in facts["encoders"]:
        console.print(f"  {row['name']:<7} {row['summary']}")
    console.print("Written behind a scheme, for K and V:")
    for row in facts["transforms"]:
        console.print(f"  +{row['name']:<6} {row['summary']}")


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


@takes(
    "config",
    Config,
    "Model and cache",
    without=("model", "seed"),
    idle=IDLE,
)
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

    Examples:
        nibble plan demo --kv-format nvfp4
        nibble plan ./my-model --kv-format nvfp4 --gpu b200 --declared
        nibble plan ./my-model --kv-format nvfp4 --decode-backend fa3 --gpu h200
        nibble plan demo --kv-format nvfp4 --gpu h200 --declared --explain
    """
    quiet_libraries(model)
    try:
        hardware = lookup_gpu(gpu) if gpu is not None else None
        cache_plan = plan_cache(Config(model=model, **config), hardware, declared=declared, published=True)
        source = find_source(cache_plan, local_folder)
    except Unsupported as error:
        # For people a refusal is an error like others; programs get its reasons as data.
        if not as_json:
            raise
        print_json({"model": model, "refused": error.refusal.as_dict()})
        raise typer.Exit(REFUSED) from None
    cache_plan, budget, problem = _memory(cache_plan)
    certified = certificate_lookup.look_up(cache_plan, source.scales)
    request = _plan_request(cache_plan) if explain else None
    cells = explanation.cells(request, cache_plan.plan) if request else ()
    if as_json:
        scales = {"origin": str(source.origin), "summary": source.summary(hub_name(model))}
        facts: dict[str, Any] = {"model": model, "hardware": asdict(cache_plan.hardware), "kv_scales": scales}
        facts |= explanation.as_dict(cache_plan.plan, budget) | (
            {"does_not_fit": str(problem)} if problem else {}
        )
        facts["certificate"] = (
            certified.certificate.summary() if certified and certified.certificate else None
        )
        print_json(facts | ({"cells": explanation.as_dicts(cells)} if request else {}))
    else:
        print(as_text(cache_plan, budget))
        print(source.summary(hub_name(model)))
        if certified:
            print(certificate_lookup.status(cache_plan, certified))
        if request:
            print("\n".join(explanation.as_lines(cells, request)))
    # What does not fit has routes all the same, which are said before the error.
    if problem:
        raise problem
    certificate_lookup.require(cache_plan, source.scales)


def _memory(cache_plan: CachePlan) -> tuple[CachePlan, MemoryPlan | None, CapacityError | None]:
    """Return the plan as it fits in memory and the memory plan, or why there is none."""
    try:
        engine_plan = plan_memory(cache_plan)
        return engine_plan, engine_plan.budget, None
    except CapacityError as error:
        return cache_plan, None, error


def _plan_request(cache_plan: CachePlan) -> PlanRequest:
    """Return what the plan was resolved from: on this machine, with the backends whose packages are here."""
    table = backends.available_backends() if cache_plan.here else backends.all_backends()
    facts = cache_plan.config, cache_plan.model_spec, cache_plan.hardware
    return PlanRequest(*facts, table, cache_plan.declared, defaults=cache_plan.settled)
