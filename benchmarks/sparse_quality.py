"""What sparse attention, small formats and a host tier cost in quality: perplexity and recall of a trained model.

    python benchmarks/sparse_quality.py [--model demo-mla] [--formats bf16,fp8_ds_mla,...] [--tokens 8192]
        [--window 2048] [--lengths 2048,4096] [--cases 8] [--tiny] [--out FOLDER] [--report]

For every scheme: **dense**, each query looks at all tokens (for perplexity alone); **sparse**, at the model's own
top-k; **HiSparse**, the same with most of the cache on the host; and with a host in 4 bits. With a host tier,
perplexity is that of chunks that look at what has been on the host and back, and recall that of answers decoded from
hot buffers, all full pages of the prompt being on the host alone; `hits` is the share of chosen tokens off the device
that were hot.

Perplexity is teacher-forced over text that the model has not seen; recall is the share of exact greedy answers to
look-ups in the context (nibble/evals).
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from report import markdown, write_figures

import gpu
from nibble import LLM
from nibble.config import Config
from nibble.engine.plan import plan_engine
from nibble.evals import recall
from nibble.evals.perplexity import Perplexity, read_text, split_text, windows

FORMATS = "bf16,fp8_e4m3,fp8_ds_mla,nvfp4_ds_mla,nvfp4,fp4_mx16"
HOST = "nvfp4_ds_mla"
CHUNK = 256
"""Tokens of a step, so that with a host tier most of a window has been there."""
AT_ONCE = 8


@dataclass(frozen=True)
class Result:
    """attention: dense, sparse or what --hisparse says. recall: exact answers by context length."""

    scheme: str
    attention: str
    device_bytes: int
    host_bytes: int
    perplexity: float
    recall: dict[int, float]
    hit_rate: float | None
    spilled: int


@dataclass(frozen=True)
class Plan:
    """What to measure, by the options."""

    model: str
    tokens: int
    window: int
    lengths: tuple[int, ...]
    cases: int

    @property
    def context(self) -> int:
        return max(self.window, *(length + 64 for length in self.lengths))


def config(todo: Plan, scheme: str, attention: str) -> dict[str, Any]:
    """Fields of nibble.Config."""
    made: dict[str, Any] = {
        "model": todo.model, "kv_format": scheme, "max_context": todo.context, "max_running": AT_ONCE,
        "token_budget": CHUNK, "device": gpu.device(), "prefix_cache": False, "kv_window": 0,
    }  # fmt: skip
    if attention == "dense":
        return made | {"index_topk": todo.window}
    return made if attention == "sparse" else made | tight(made | {"hisparse": attention})


def tight(made: dict[str, Any]) -> dict[str, Any]:
    """A device with room for two contexts, and for hot buffers of all requests."""
    plan = plan_engine(Config(**made)).plan
    assert plan.tier
    latent = plan.layout.without_index.bytes_per_token
    index = plan.layout.bytes_per_token - latent
    tokens = 2 * made["max_context"] + AT_ONCE * (plan.tier.buffer + 2 * plan.page_size)
    return {
        "hisparse": made["hisparse"],
        "kv_memory": str(tokens * latent + AT_ONCE * (made["max_context"] + plan.page_size) * index),
    }


def measure(todo: Plan, scheme: str, attention: str) -> Result:
    llm = LLM(**config(todo, scheme, attention))
    tier, plan = llm.engine.runner.tier, llm.plan
    parts = split_text(
        read_text(None, todo.model).content, todo.tokens, llm.tokenizer.encode, llm.tokenizer.decode
    )
    perplexity = Perplexity()
    for window in windows(parts.scored, todo.window):
        perplexity.add(llm.logits(window.ids), window)
    found = {} if attention == "dense" else {n: share(llm, n, todo.cases) for n in todo.lengths}
    looked = tier.lookup_counts if tier else {}
    away = looked.get("hits", 0) + looked.get("misses", 0)
    spilled = tier.residency.stats.spilled if tier else 0
    return Result(
        scheme, attention, plan.layout.without_index.bytes_per_token,
        plan.tier.layout.bytes_per_token if plan.tier else 0,
        perplexity.value, found, looked["hits"] / away if away else None, spilled,
    )  # fmt: skip


def share(llm: LLM, length: int, number: int) -> float:
    """Exact answers to questions on contexts of `length` tokens."""

    def count(piece: str) -> int:
        return len(llm.tokenizer.encode(piece))

    cases = recall.cases(length, number, length, count)
    judged = (hot_answers if llm.tier else recall.grade)(llm, cases)
    return sum(judged) / number


def hot_answers(llm: LLM, cases: Sequence[recall.RecallCase]) -> Iterator[bool]:
    """recall.grade(), with every answer decoded from a hot buffer, all full pages of its prompt on the host alone."""
    engine, manager = llm.engine, llm.engine.scheduler.manager
    assert manager.residency
    streams = [
        llm.stream(case.prompt, max_tokens=len(llm.tokenizer.encode(case.answer)) + 1, temperature=0)
        for case in cases
    ]
    while engine.busy:
        for request in engine.scheduler.running:
            lease = request.lease
            if (
                lease
                and 0 < request.num_computed_tokens == request.num_tokens - 1
                and manager.offload([lease])
            ):
                manager.residency.evict(lease.pages[:-1])
        engine.step()
    for stream, case in zip(streams, cases, strict=True):
        yield "".join(piece.text for piece in stream).startswith(case.answer)


def ways(scheme: str) -> Iterator[str]:
    yield from ("dense", "sparse", "on")
    if scheme not in {HOST, "nvfp4", "fp4_mx16"}:
        yield f"host_format={HOST}"


def table(found: Sequence[Result], lengths: Sequence[int]) -> str:
    names = {"dense": "dense", "sparse": "sparse", "on": "HiSparse"}
    rows = [
        (
            f"`{r.scheme}`", names.get(r.attention, f"HiSparse, host `{HOST}`"), f"{r.device_bytes:,}",
            f"{r.host_bytes:,}" if r.host_bytes else "", f"{r.perplexity:.3f}",
            *(f"{r.recall[n]:.0%}" if n in r.recall else "" for n in lengths),
            "" if r.hit_rate is None else f"{r.hit_rate:.0%}",
        )
        for r in found
    ]  # fmt: skip
    head = (
        "scheme",
        "attention",
        "device bytes",
        "host bytes",
        "perplexity",
        *(f"recall at {n}" for n in lengths),
    )
    return markdown((*head, "hits"), rows)


def main() -> None:
    options = arguments().parse_args()
    lengths = tuple(map(int, options.lengths.split(",")))
    todo = Plan(options.model, options.tokens, options.window, lengths, options.cases)
    schemes = options.formats.split(",")
    if options.tiny:
        todo, schemes = Plan(options.model, 400, 300, (400,), 2), schemes[:1]
    found: list[Result] = []
    for scheme in schemes:
        for attention in options.ways.split(",") if options.ways else ways(scheme):
            found.append(measure(todo, scheme, attention))
            print(found[-1], flush=True)
            gc.collect()
            if options.out:
                write_figures("sparse_quality", options.out, results=[*map(asdict, found)])
    texts = [
        f"Perplexity over {todo.tokens} tokens in windows of {todo.window}; {todo.cases} questions a length; latents' "
        "bytes a token, all layers.",
        table(found, todo.lengths),
    ]
    gpu.publish("sparse_quality", options, str(__doc__), texts, gpu.versions(), results=[*map(asdict, found)])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-mla")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument(
        "--ways", default="", help="dense, sparse, on, host_format=...; what suits, if left out"
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--lengths", default="2048,4096")
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a few tokens, to try the benchmark itself")
    gpu.add_output_options(parser)
    return parser


if __name__ == "__main__":
    main()
