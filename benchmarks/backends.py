"""Backends: all that may serve a need on this machine, checked and timed, and what `auto` chooses among them.

    python benchmarks/backends.py [--only gqa,mla16/bf16/decode] [--formats bf16,nvfp4] [--backends cuda,triton]
        [--without flex_attention] [--limit 540] [--model demo] [--phases decode] [--list] [--small] [--tiny]
        [--out FOLDER] [--report]

The entrants are the resolver's own options, from the cache's own bytes or over pages dequantised first (`staged`). Each
is called as the engine calls it, through its adapter over the pool, pages of random tokens in random order, several
times the L2 cache: decode steps in a CUDA graph of up to 32 calls where the backend can be recorded, and otherwise call
by call with all that the host does (`eager`), to which an engine adds the launches of the rest of the model. In the
other phases calls are queued ahead of the GPU, as among the large kernels of a prompt: the host counts where the GPU
waits for it. Gate: rows from the beginning and the end, against the reference over the same cache in
float32. A backend that fails says so in its cell.

`auto` is the plan's choice by the shipped rankings. Its ratio is its time over that of the fastest; in decode, the
fastest of those that can be recorded, and beside it the fastest of all. TB/s counts the bytes of the cache that must be
read. What later rankings choose of the same times says replay.py.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import peers
from report import markdown

import gpu
from nibble.attention import backends
from nibble.attention.planner.options import PlanRequest
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import BackendInfo, SchemeGroup
from nibble.config import Config
from nibble.errors import ConfigError
from nibble.evals import fixtures
from nibble.evals import tune as race
from nibble.evals.fixtures import Workload
from nibble.evals.tune import Result, fastest
from nibble.hardware import Hardware, probe
from nibble.model_spec import LATENT, LayerGroup, ModelSpec, Phase, Stream

FORMATS, LATENTS = "bf16,fp8_e4m3,nvfp4", "bf16,fp8_e4m3,nvfp4_ds_mla"
"""Schemes that are measured, of heads and of latents."""
HEAD = ("job", "auto", "best (recordable)", "ratio", "best of all", "ratio")
BOUND = 1.05
"""How much slower than the best `auto` may be."""
LAYERS = 2
REFERENCE = "torch_ref"


def heads(kv: int, dim: int) -> tuple[Stream, Stream]:
    return Stream("k", kv, dim), Stream("v", kv, dim)


def latent() -> tuple[Stream]:
    return (Stream(LATENT, 1, 576, rope=64),)


def group(name: str, streams: tuple[Stream, ...], q_heads: int, **more: object) -> LayerGroup:
    kind = "mla" if streams[0].name == LATENT else "mha"
    return LayerGroup(name, kind, streams, tuple(range(LAYERS)), q_heads, **more)  # type: ignore[arg-type]


SHAPES = {
    shape.name: shape
    for shape in (
        group("gqa", heads(8, 128), 32),
        group("gqa8", heads(8, 128), 64),
        group("mqa", heads(1, 128), 8),
        group("sinks", heads(8, 64), 64, sinks=True),
        group("sinks-window", heads(8, 64), 64, sinks=True, window=128),
        group("softcap", heads(8, 256), 16, softcap=True),
        group("softcap-window", heads(8, 256), 16, softcap=True, window=4096),
        group("mla16", latent(), 16),
        group("mla128", latent(), 128),
    )
}
"""Layer groups of models: Llama and Qwen, large ones, one KV head of eight ranks, gpt-oss, Gemma 2, DeepSeek V2 Lite
(or V3 over eight ranks) and V3."""
TINY = {
    shape.name: shape
    for shape in (
        group("gqa", heads(2, 32), 4),
        group("sinks-window", heads(1, 32), 4, sinks=True, window=20),
        group("mla16", (Stream(LATENT, 1, 96, rope=32),), 4),
    )
}


@dataclass(frozen=True)
class Job:
    """One part of a plan in one phase: what is raced for."""

    shape: str
    scheme: str
    request: PlanRequest
    plan: Plan
    part: SchemeGroup
    work: Workload

    @property
    def name(self) -> str:
        return f"{self.shape}/{self.scheme}/{self.work.phase}/{self.work.name}"


@dataclass(frozen=True)
class Verdict:
    """How `auto` did in one job. best: of those that an engine would record, where there are such; any: of all."""

    job: str
    auto: Result | None
    best: Result | None
    any: Result | None

    @property
    def ratio(self) -> float | None:
        """auto / best."""
        return _ratio(self.auto, self.best)

    def row(self) -> tuple[str, ...]:
        return (
            self.job,
            _who(self.auto),
            _who(self.best),
            _number(self.ratio),
            _who(self.any),
            _number(_ratio(self.auto, self.any)),
        )


def _ratio(auto: Result | None, other: Result | None) -> float | None:
    return auto.ms / other.ms if auto and other and auto.ms and other.ms else None


def _who(result: Result | None) -> str:
    if result is None:
        return "-"
    return f"{result.name} {result.ms:.3f}" if result.ms else f"{result.name} failed"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def verdict(job: str, results: Sequence[Result]) -> Verdict:
    auto = next((result for result in results if result.in_plan), None)
    decode = bool(results) and results[0].phase is Phase.DECODE
    return Verdict(job, auto, fastest(results, recordable=decode), fastest(results))


def jobs(options: argparse.Namespace, hardware: Hardware, table: Mapping[str, BackendInfo]) -> Iterator[Job]:
    """Everything to measure on a machine with these backends, in an order in which neighbours are alike."""
    works = small_works() if options.tiny or options.small else fixtures.default_workloads(hardware.is_cpu)
    phases = set(options.phases.split(","))
    for model_spec in geometries(options):
        latents = model_spec.groups[0].streams[0].name == LATENT
        for name in (options.formats or (LATENTS if latents else FORMATS)).split(","):
            config = Config(model=model_spec.model, kv_format=name, kv_transforms="none", kv_window=0)
            try:
                plan = resolve(config, model_spec, hardware, table, verify=Phase.VERIFY in phases)
            except ConfigError as error:
                print(f"{model_spec.model} in {name} is left out: {str(error).splitlines()[0]}", flush=True)
                continue
            request = PlanRequest(config, model_spec, hardware, table, False, False)
            for part in request.parts:
                for work in works:
                    job = Job(model_spec.model if len(plan.groups) == 1 else f"{model_spec.model} {part.group.name}",
                              name, request, plan, part, work)  # fmt: skip
                    if work.phase in phases and wanted(job, options.only) and not part.group.top_k:
                        yield job


def small_works() -> list[Workload]:
    texts = {Phase.PREFILL: "1x40", Phase.EXTEND: "8+33", Phase.DECODE: "3x40", Phase.VERIFY: "2x40"}
    return [fixtures.parse_workload(phase, text) for phase, text in texts.items()]


def wanted(job: Job, only: str | None) -> bool:
    """Whether one of the selections, as `gqa/bf16/decode`, begins the job's name; parts may be left empty."""
    parts = job.name.split("/")
    return only is None or any(
        all(not asked or asked == part for asked, part in zip(text.split("/"), parts, strict=False))
        for text in only.split(",")
    )


def geometries(options: argparse.Namespace) -> Iterator[ModelSpec]:
    if options.model:
        from nibble.models.observe import observe
        from nibble.models.refusals import load_config

        yield observe(load_config(options.model, None), options.model, "bfloat16", None)
        return
    for name, shape in (TINY if options.tiny else SHAPES).items():
        yield ModelSpec(name, "shape", (shape,), tuple(range(LAYERS)), 1 << 17, 1000, 4096, 1 << 30)


def compiled(found: Sequence[Job], names: Sequence[str]) -> str:
    """How many kernels each package may have to compile, at most, before anything is timed."""
    modules: dict[str, set[tuple[object, ...]]] = {}
    for job in found:
        for entrant in race.entrants(job.request, job.plan, job.part, job.work.phase, names):
            shape = job.part.group
            stored = entrant.route.stage_to or job.part.stored_layer(0).format_key
            key = (
                shape.kind,
                job.work.phase.decodes,
                stored,
                shape.head_dim,
                shape.window is None,
                shape.softcap,
            )
            modules.setdefault(entrant.route.backend, set()).add(key)
    counts = ", ".join(f"{name} {len(keys)}" for name, keys in sorted(modules.items()))
    return f"{len(found)} jobs; kinds of kernels that may have to be compiled, at most: {counts}"


def main() -> None:
    options = arguments().parse_args()
    names = chosen(options)
    found = list(jobs(options, probe(), backends.available_backends()))
    print(compiled(found, names), flush=True)
    if options.list:
        print("\n".join(job.name for job in found))
        return
    results, trouble = run(found, names, options.limit)
    verdicts = [verdict(job, group) for job, group in results.items()]
    copy = f"All times in ms a call. Copy bandwidth {gpu.copy_tbps():.2f} TB/s."
    texts = [trouble, copy, *tables(results), table(verdicts), orders(results)]
    texts += [f"## What auto chooses, by need\n\n{by_need(results)}", summary(verdicts)]
    cells = [{"job": job, **asdict(result)} for job, group in results.items() for result in group]
    gpu.publish("backends", options, str(__doc__), texts, peers.versions(), cells=cells)


def chosen(options: argparse.Namespace) -> list[str]:
    """The backends that race; none stands for all that may."""
    without = options.without.split(",") if options.without else []
    names = options.backends.split(",") if options.backends else []
    for name in (*names, *without):
        backends.get(name)
    if without and not names:
        names = [name for name in backends.all_backends() if options.tiny or name != REFERENCE]
    return [name for name in names if name not in without]


def run(found: Sequence[Job], names: Sequence[str], limit: float) -> tuple[dict[str, list[Result]], str]:
    """The results of each job, and what ended the run early."""
    results: dict[str, list[Result]] = {}
    began = time.perf_counter()
    for job in found:
        if time.perf_counter() - began > limit:
            return results, f"**The run ended early**, before {job.name}: {limit:g} s were over"
        group = results.setdefault(job.name, [])
        try:
            for result in race.bench_backends(job.request, job.plan, job.part, job.work, names):
                group.append(result)
                at = time.perf_counter() - began
                print(f"{at:5.1f} s  {job.name} {result.name}: {cell(result)}", flush=True)
        except race.DeviceLostError as error:
            return results, f"**The run ended early**: {error}"
    return results, ""


def cell(result: Result) -> str:
    if result.ms is None:
        return result.failure
    eager = result.phase is Phase.DECODE and not result.captured
    marks = {"eager": eager, "one call": result.rough, "**auto**": result.in_plan}
    notes = [text for text, holds in marks.items() if holds]
    place = "" if result.page == 64 else f"page {result.page}"
    read = [f"{result.read_bytes / result.ms / 1e9:.2f} TB/s"] if result.phase.decodes else []
    return ", ".join(
        (f"{result.ms:.3f}", *read, *notes, *([place] if place else []), f"error {result.error:.0e}")
    )


def tables(results: dict[str, list[Result]]) -> Iterator[str]:
    """One table for each shape and phase's workloads: backends and schemes down, workloads across."""
    shapes = dict.fromkeys(job.split("/")[0] for job in results)
    for shape in shapes:
        own = {
            tuple(job.split("/")[1:]): group for job, group in results.items() if job.split("/")[0] == shape
        }
        columns = list(dict.fromkeys(key[1:] for key in own))
        rows = []
        for scheme in dict.fromkeys(key[0] for key in own):
            by_name: dict[str, dict[tuple[str, ...], str]] = {}
            for key, group in own.items():
                for result in group if key[0] == scheme else ():
                    by_name.setdefault(result.name, {})[key[1:]] = cell(result)[:120]
            rows += [
                (scheme, name, *(line.get(column, "") for column in columns))
                for name, line in by_name.items()
            ]
        yield f"## {shape}"
        yield markdown(("cache", "backend", *(" ".join(column) for column in columns)), rows)


def orders(results: dict[str, list[Result]]) -> str:
    """For each need, over its workloads together: backends by time, with the places that they have."""
    needs_of: dict[str, dict[str, list[Result]]] = {}
    for job, group in results.items():
        for result in group:
            needs_of.setdefault(job.rpartition("/")[0], {}).setdefault(result.name, []).append(result)
    rows = []
    for need, by_name in needs_of.items():
        slow = {name: slowness(group, results, need) for name, group in by_name.items()}
        ranked = sorted(by_name, key=lambda name: slow[name])
        places = [by_name[name][0].place for name in ranked if slow[name] < math.inf]
        rows.append((need, "; ".join(_ranked(by_name[name][0], slow[name]) for name in ranked),
                     "" if places == sorted(places) else "other than ranked"))  # fmt: skip
    about = "Times over those of the fastest, geometric means of a need's workloads; places in brackets."
    return f"## Order of backends\n\n{about}\n\n{markdown(('need', 'backends', ''), rows)}"


def slowness(group: Sequence[Result], results: Mapping[str, list[Result]], need: str) -> float:
    """The geometric mean of time / best time; infinite where one workload was not finished."""
    logs = []
    for result in group:
        best = fastest(results[f"{need}/{result.workload}"])
        if result.ms is None or best is None or best.ms is None:
            return math.inf
        logs.append(math.log(result.ms / best.ms))
    return math.exp(sum(logs) / len(logs))


def _ranked(result: Result, slowness: float) -> str:
    eager = ", eager" if result.phase is Phase.DECODE and not result.graphs else ""
    return f"{result.name} {slowness:.2f} ({result.place:g}{eager})"


def judge(need: str, results: Mapping[str, list[Result]]) -> tuple[str, str, str, float]:
    """The need, what `auto` takes, the best, and how much slower the former is; infinite where that is not known."""
    by_name: dict[str, list[Result]] = {}
    for job, group in results.items():
        for result in group if job.rpartition("/")[0] == need else ():
            by_name.setdefault(result.name, []).append(result)
    work = max(map(len, by_name.values()))
    slow = {name: slowness(group, results, need) for name, group in by_name.items() if len(group) == work}
    able = {n: s for n, s in slow.items() if by_name[n][0].graphs or by_name[n][0].phase is not Phase.DECODE}
    best = min(able or slow, key=lambda name: slow[name])
    auto = next((name for name, group in by_name.items() if group[0].in_plan), "not recorded")
    return need, auto, best, slow.get(auto, math.inf) / slow[best]


def by_need(results: Mapping[str, list[Result]]) -> str:
    """How `auto` does in each need, over its workloads together, and the worst of all."""
    timed = {job: [each for each in group if each.ms is not None] for job, group in results.items()}
    results = {job: group for job, group in timed.items() if group}
    if not results:
        return "Nothing measured."
    judged = [judge(need, results) for need in dict.fromkeys(job.rpartition("/")[0] for job in results)]
    rows = [(*names, f"{ratio:.2f}", "ABOVE" if ratio > BOUND else "") for *names, ratio in judged]
    worst, above = max(judged, key=lambda each: each[-1]), sum(bool(row[-1]) for row in rows)
    last = f"Worst ratio {worst[-1]:.2f} ({worst[0]}); {above} of {len(rows)} needs are above {BOUND}."
    return "\n".join((markdown(("need", "auto", "best", "ratio", f"bound {BOUND}"), rows), "", last))


def table(verdicts: Sequence[Verdict]) -> str:
    return "## What auto chooses\n\n" + markdown(HEAD, [each.row() for each in verdicts])


def summary(verdicts: Sequence[Verdict]) -> str:
    """The short table that comes last: where `auto` is more than BOUND times the best, and the worst of all."""
    known = [each for each in verdicts if each.ratio is not None]
    slow = sorted((each for each in known if (each.ratio or 0) > BOUND), key=lambda each: -(each.ratio or 0))
    unknown = [each.job for each in verdicts if each.ratio is None]
    worst = max(known, key=lambda each: each.ratio or 0, default=None)
    lines = ["## Where auto is slower than the best", ""]
    lines += [markdown(HEAD, [each.row() for each in slow]), ""]
    lines += [
        f"Worst ratio {worst.ratio:.2f} ({worst.job}); " if worst and worst.ratio else "Nothing measured; "
    ]
    lines[-1] += f"{len(slow)} of {len(known)} jobs are above {BOUND}."
    lines += [f"auto failed or was not raced in: {', '.join(unknown)}"] if unknown else []
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", help="shape/cache/phase/workload, parts may be empty: gqa/bf16,//decode/64x8K")
    add("--formats", help=f"KV schemes; usually {FORMATS}, of latents {LATENTS}")
    add("--phases", default=",".join(Phase), help="phases")
    add("--backends", help="race only these; `auto` still chooses among all")
    add("--without", help="let these not race, as flex_attention, which compiles for long")
    add("--limit", type=float, default=540, help="seconds after which no other job begins")
    add("--model", help="a model's layer groups instead of the shapes; a folder or a name")
    add("--list", action="store_true", help="only say what would be measured")
    add(
        "--small",
        action="store_true",
        help="a few tokens: compiles and checks every kernel, measures nothing",
    )
    add("--tiny", action="store_true", help="small heads too, to try the benchmark itself on a CPU")
    gpu.add_output_options(parser)
    return parser


if __name__ == "__main__":
    main()
