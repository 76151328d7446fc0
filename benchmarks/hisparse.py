"""HiSparse on one GPU: how many more requests of sparse attention a host tier serves, and what it costs without need.

    python benchmarks/hisparse.py [--context 32K] [--answer 2048] [--fits 32] [--asked 256] [--likeness 0.93,0]
        [--tiny] [--out FOLDER] [--report]

A model of DeepSeek V3.2's shape, cut to four layers, three of which have its 256 experts, with random weights, through
nibble.LLM. The cache may have as much of the device as the plain engine needs for `--fits` requests; the engines with
a host tier have the same, what they remember of hot buffers included. Contexts are planted: random latents and index
keys, entered as cached prompts.

How often a token is still hot is a matter of the model: how much the choices of neighbouring steps have in common. With
random weights that is nothing at all (likeness 0, the worst case). With `--likeness` embeddings share a direction, as
they do in trained models; the trained demo-mla finds 90 % of what is not in pages in a buffer of twice its top-k.

**Throughput**: at least `--asked` requests, in waves of as many as an engine has pages for, all of them full, as they
are where more requests wait than run; from a wave's first step to its last token, what is brought back to the device
included, the planting of prompts not. The plain engine's does not depend on likeness, and is taken once. **Cost**: a
decode step at low concurrency, where all fits. **Link**: rows brought by the kernel that a step uses, beside a plain
copy from pinned memory.

Gate: logits of a prompt against the unmodified model, and greedy answers against logits (engine_load.gate).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import engine_load as load
import paged
import torch
from random_models import SHAPES, served
from report import Aim, aims_table, markdown, ratio, worst, write_figures

import gpu
from nibble import LLM, SamplingParams
from nibble.attention.planner.memory import HOT_SLOT_BYTES
from nibble.attention.planner.resolve import HOT_BUFFER_FACTOR
from nibble.cache.hot_buffer import HotBuffers
from nibble.engine.page_tables import PackedInts
from nibble.engine.request import Delta
from nibble.formats import scheme as schemes
from nibble.kernels.offload import copy_tokens
from nibble.model_spec import INDEX, LATENT, Stream

MODEL, TINY_MODEL = "deepseek-v3.2, 4 layers", "tiny sparse"
LOW = (1, 8)
"""Requests at low concurrency."""
WAYS = (
    ("fp8_ds_mla", ""),
    ("fp8_ds_mla", "on"),
    ("fp8_ds_mla", "host_format=nvfp4_ds_mla"),
    ("nvfp4_ds_mla", "on"),
)
"""Scheme, and what --hisparse says."""
CHUNK = 1 << 15
"""Tokens that are made up at a time."""
MISSES = 1 << 18
"""Tokens that the link is measured with."""


@dataclass
class Result:
    """One engine. tokens_s: of answers, with `running` requests at a time at most. steps_ms: by concurrency."""

    scheme: str
    hisparse: str
    likeness: float
    pages: int
    frames: int
    asked: int
    tokens_s: float
    running: int
    preemptions: int
    looked: dict[str, int]
    link: dict[str, float]
    steps_ms: dict[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return (
            f"{self.scheme}, {f'hisparse {self.hisparse}' if self.hisparse else 'plain'}, {self.likeness:g}"
        )

    @property
    def hit_rate(self) -> float | None:
        hot = self.looked.get("hits", 0) + self.looked.get("misses", 0)
        return self.looked["hits"] / hot if hot else None


@dataclass(frozen=True)
class Plan:
    """What to measure, by the options."""

    model: str
    context: int
    answer: int
    fits: int
    asked: int
    engine: dict[str, Any]


def plan(options: argparse.Namespace) -> Plan:
    context, answer = paged.tokens(options.context), options.answer
    fits, asked, model = options.fits, options.asked, MODEL
    if options.tiny:
        context, answer, fits, asked, model = 256, 8, 2, 5, TINY_MODEL
    engine = {
        "max_running": asked,
        "max_context": context + max(answer, load.STEPS + load.WARMUP) + 64,
        "token_budget": 64 if options.tiny else 4096,
        "device": gpu.device(),
        "compile": not options.plain_model,
    }
    return Plan(model, context, answer, fits, asked, engine)


def memory(todo: Plan, scheme: str, hisparse: str) -> int:
    """Bytes that the cache may have: what the plain engine needs, less what hot buffers are remembered in."""
    shape = SHAPES[todo.model][1]
    layers, rope = shape["num_hidden_layers"], shape["qk_rope_head_dim"]
    latent = Stream(LATENT, 1, shape["kv_lora_rank"] + rope, rope)
    index = Stream(INDEX, 1, shape["index_head_dim"], rope)
    size = layers * schemes.bytes_per_token(scheme, (latent, index)) * todo.fits * todo.engine["max_context"]
    buffer = HOT_BUFFER_FACTOR * shape["index_topk"]
    return size - bool(hisparse) * layers * (todo.asked + 2) * buffer * HOT_SLOT_BYTES


def measure(todo: Plan, scheme: str, hisparse: str, likeness: float) -> Result:
    """Everything about one engine."""
    began = time.perf_counter()
    size = memory(todo, scheme, hisparse)
    options = {"kv_format": scheme, "hisparse": hisparse, "kv_memory": str(size), **todo.engine}
    with served(todo.model, likeness, **options) as made:
        llm = made.llm
        runner, stats = llm.engine.runner, llm.engine.scheduler.manager.stats
        say(
            f"{scheme} {hisparse or 'plain'}: {time.perf_counter() - began:.0f} s ({llm.engine.startup.summary})"
        )
        say(f"  {stats.total} pages, {runner.pool.frames} on the device; notes {llm.engine.startup.notes}")
        error, below = load.gate(llm, made.prompt, made.expected_TV, 0.35)
        say(f"  logits off {error:.1e}, answers at most {below:.2f} deviations below the best")
        fill(llm)
        steps = {n: low_step(llm, n, todo) for n in LOW if n <= todo.fits}
        say(f"  steps {', '.join(f'{n}: {ms:.2f} ms' for n, ms in steps.items())}")
        result = throughput(llm, todo, scheme, hisparse, likeness)
        result.steps_ms = steps
        if runner.tier:
            result.link = link(runner.tier, runner.pool.frames * runner.plan.page_size, stats.total)
        say(
            f"  {result.tokens_s:.0f} tokens/s with {result.running} at a time; {result.looked} {result.link}"
        )
        return result


def fill(llm: LLM) -> None:
    """Random latents in all frames, and index keys in all pages."""
    pool, size = llm.engine.runner.pool, llm.plan.page_size
    for layer in pool.layout.layers:
        for entry in layer.streams:
            pages = pool.pages if entry.stream.name == INDEX else pool.frames
            for start in range(0, pages * size, CHUNK):
                slot_mapping_T = torch.arange(start, min(start + CHUNK, pages * size), device=gpu.device())
                x = torch.randn(
                    len(slot_mapping_T), 1, entry.stream.dim, dtype=paged.dtype(), device=gpu.device()
                )
                pool.write(layer.layer, {entry.stream.name: x}, slot_mapping_T)


def low_step(llm: LLM, requests: int, todo: Plan) -> float:
    """ms of a decode step of so many requests, all of whose pages are on the device."""
    return load.decode_step(llm, requests, todo.context // llm.plan.page_size * llm.plan.page_size).ms


def plant(llm: LLM, prompts: Sequence[Sequence[int]]) -> None:
    """load.plant(), with the device told of each prompt, so that what has no room goes to the host."""
    runner = llm.engine.runner
    for prompt in prompts:
        load.plant(llm, [prompt])
        if runner.tier:
            parcel = PackedInts()
            news = runner.tier.take_updates(parcel.add, {})
            runner.tier.apply_updates(parcel.on_host().to(runner.device), news)


def throughput(llm: LLM, todo: Plan, scheme: str, hisparse: str, likeness: float) -> Result:
    """Tokens of answers a second."""
    engine, tier, manager = llm.engine, llm.engine.runner.tier, llm.engine.scheduler.manager
    context = todo.context // llm.plan.page_size * llm.plan.page_size
    most = manager.num_tokens // (todo.engine["max_context"] // llm.plan.page_size * llm.plan.page_size)
    before = tier.lookup_counts if tier else {}
    seconds, running, seeds = 0.0, 0, range(-(-todo.asked // most) * most)
    for first in range(0, len(seeds), most):
        manager.clear()
        wave = [
            load.random_prompt(context + 1, engine.vocab_size, seed) for seed in seeds[first : first + most]
        ]
        plant(llm, wave)
        _wait()
        took, together = run(llm, wave, todo.answer)
        seconds, running = seconds + took, max(running, together)
    looked = {name: count - before[name] for name, count in tier.lookup_counts.items()} if tier else {}
    stats = manager.stats
    say(f"  {stats.tier}")
    manager.clear()
    return Result(
        scheme, hisparse, likeness, stats.total, engine.runner.pool.frames, len(seeds),
        len(seeds) * todo.answer / seconds, running, engine.scheduler.metrics.preemptions, looked, {},
    )  # fmt: skip


def run(llm: LLM, prompts: Sequence[Sequence[int]], answer: int) -> tuple[float, int]:
    """Seconds that answers of so many tokens take, and how many ran at a time."""
    engine, pieces = llm.engine, list[Delta]()
    for prompt in prompts:
        engine.submit(
            prompt, SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0), pieces.append
        )
    running, start = 0, time.perf_counter()
    while engine.busy:
        engine.step()
        running = max(running, engine.scheduler.metrics.running)
    seconds = time.perf_counter() - start
    errors = [piece.error for piece in pieces if piece.error]
    if errors:
        raise SystemExit(f"a request failed: {errors[0]}")
    return seconds, running


def link(tier: HotBuffers, frames: int, pages: int) -> dict[str, float]:
    """GB/s from the host: single tokens as a step brings them, whole pages, and a plain copy of pinned memory."""
    device, size = tier.device, tier.page_size
    layer, (own, host) = next(iter(tier.stores.items()))
    del layer
    row = sum(plane[0, 0, 0].nbytes for plane in host.planes_PHS)
    count = min(MISSES, frames // 2)
    to_M = torch.randperm(frames, device=device)[:count].int()
    single_M = torch.randint(pages * size, (count,), device=device, dtype=torch.int32)
    whole_M = (
        torch.randint(pages, (count // size, 1), device=device) * size + torch.arange(size, device=device)
    ).int()
    found = {
        "tokens": _gbps(lambda: copy_tokens(host, single_M, own, to_M), count * row),
        "pages": _gbps(
            lambda: copy_tokens(host, whole_M.flatten(), own, to_M[: whole_M.numel()]), whole_M.numel() * row
        ),
    }
    plain = torch.empty(
        1 << (30 if device.type == "cuda" else 20), dtype=torch.uint8, pin_memory=device.type == "cuda"
    )
    there = torch.empty_like(plain, device=device)
    return {**found, "copy": _gbps(lambda: there.copy_(plain, non_blocking=True), plain.nbytes)}


def _gbps(run: Any, size: int) -> float:
    times = []
    for _ in range(4):
        _wait()
        start = time.perf_counter()
        run()
        _wait()
        times.append(time.perf_counter() - start)
    return size / min(times) / 1e9


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def say(text: str) -> None:
    print(text, flush=True)


def aims(found: Sequence[Result]) -> Iterator[Aim]:
    """Against the plain engine of the same scheme."""
    plain = {result.scheme: result for result in found if not result.hisparse}
    for result in found:
        base = plain.get(result.scheme)
        if result.hisparse and base:
            more = ratio(result.tokens_s, base.tokens_s)
            yield Aim(
                "H1",
                f"{result.name}: tokens/s with {result.running} at a time / plain at its limit",
                1.8,
                3.0,
                more,
            )
            cost = worst((ratio(ms, base.steps_ms.get(n)) for n, ms in result.steps_ms.items()), least=False)
            yield Aim("H2", f"{result.name}: step at low concurrency / plain", 1.15, 1.05, cost, least=False)


def table(found: Sequence[Result]) -> str:
    head = (
        "engine, likeness", "pages", "on the device", "asked", "at a time", "tokens/s", "hits",
        *(f"step of {n}, ms" for n in LOW), "tokens from host, GB/s", "pages from host", "plain copy",
    )  # fmt: skip
    rows = []
    for r in found:
        steps = [f"{r.steps_ms[n]:.2f}" if n in r.steps_ms else "" for n in LOW]
        links = [f"{r.link[name]:.1f}" if r.link else "" for name in ("tokens", "pages", "copy")]
        hits = "" if r.hit_rate is None else f"{r.hit_rate:.1%}"
        rows.append(
            (
                r.name,
                f"{r.pages:,}",
                f"{r.frames:,}",
                r.asked,
                r.running,
                f"{r.tokens_s:.0f}",
                hits,
                *steps,
                *links,
            )
        )
    return markdown(head, rows)


def main() -> None:
    options = arguments().parse_args()
    todo, found = plan(options), list[Result]()
    wanted = options.ways.split(";") if options.ways else ["/".join(way) for way in WAYS]
    likenesses = [*map(float, options.likeness.split(","))]
    for likeness, way in product(likenesses, wanted):
        scheme, _, hisparse = way.partition("/")
        if not hisparse and likeness != likenesses[0]:
            continue
        found.append(measure(todo, scheme, hisparse, likeness))
        if options.out:  # what is known so far, should time run out
            write_figures("hisparse", options.out, results=[*map(asdict, found)])
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    texts = [
        f"Contexts of {todo.context} tokens, answers of {todo.answer}.",
        table(found),
        aims_table(aims(found)),
    ]
    facts = gpu.versions()
    gpu.publish("hisparse", options, str(__doc__), texts, facts, results=[*map(asdict, found)])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", default="32K")
    parser.add_argument("--answer", type=int, default=2048)
    parser.add_argument("--fits", type=int, default=32, help="requests that the plain engine has room for")
    parser.add_argument("--asked", type=int, default=256, help="requests that the others are asked at once")
    parser.add_argument(
        "--likeness", default="0.93", help="of embeddings, more than one with commas between them"
    )
    parser.add_argument("--ways", default="", help="scheme/hisparse;..., as fp8_ds_mla/;fp8_ds_mla/on")
    parser.add_argument("--plain-model", action="store_true", help="do not compile the model")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, to try the benchmark itself on a CPU"
    )
    gpu.add_output_options(parser)
    return parser


if __name__ == "__main__":
    main()
