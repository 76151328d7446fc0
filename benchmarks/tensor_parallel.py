"""Tensor parallelism on GPUs of one host: a decode step and prompts of one GPU and of several, random weights.

    python benchmarks/tensor_parallel.py --shape qwen3-32b [--tp 1,2] [--kv-format nvfp4] [--requests 8]
        [--context 1024] [--prompt 16384] [--layers N] [--weights fp8] [--options hisparse=on,expert_parallel=1]
        [--serve 32x8192] [--no-graphs] [--collectives] [--keep FOLDER] [--tiny]

**Gate**: logits of a prompt with several GPUs against those with one (the same random weights), by KL divergence and
by the share of tokens whose likeliest is the likeliest of the other, or within 0.1 deviations of it (`same`); and
greedy answers of decode steps, as they are recorded, against logits of whole prompts, by that share (`near`). Packed
weights (`--weights`) are made by each rank for itself, so there `near` is all that is known.
**Measured**: a decode step of the engine with so many requests (schedule, model, sampling, answers handed out), the
rate at which a prompt is computed, and the tokens that the cache holds. `--serve` then runs so many requests with
prompts of that length at the same time. `--collectives` first times an all-reduce alone, in a CUDA graph, by NCCL and
as the engine chooses. NVLink multicast is not used: NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from largest import serve
from packed_weights import KINDS
from random_models import LARGE, PLAIN, SMALL, _queries, make, shape_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from nibble import LLM, SamplingParams
from nibble.engine import build, rank, ranks
from nibble.models import hook
from nibble.models.parallel import Division
from nibble.models.quantization import Handling, parse

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
}  # fmt: skip
"""What keeps libraries from NVLink's multicast, unless the environment says otherwise."""
GATE_TOKENS, ANSWER_TOKENS = 192, 24
KL, SAME, NEAR = 2e-2, 0.9, 0.1
STEPS, WARM_STEPS = 100, 10
OF_SEVERAL = ("attention_dp", "expert_parallel")
"""Options that one GPU does not have."""
WEIGHTS = "NIBBLE_BENCHMARK_WEIGHTS"
"""Tells ranks what --weights says."""


@torch.inference_mode()
def make_part(
    config: PretrainedConfig,
    model_spec: Any,
    dtype: str,
    device: str,
    *,
    division: Division | None = None,
    handling: Handling = Handling.UNPACKED,
    **_: Any,
) -> nn.Module:
    """A rank's part of a model with random weights, each made of a seed of its name, so that parts fit together.

    Packed weights have one seed: what all ranks have is the same for all, and parts are alike.
    """
    if weights := os.environ.get(WEIGHTS):
        del config.quantization_config
        quantization = (
            parse(KINDS[weights].config) if handling in (Handling.PACKED, Handling.EXPERTS) else None
        )
        return make(config, dtype, device, 0.0, quantization, linears=handling is Handling.PACKED)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=hook.NAME
        )
    queries, std = _queries(model), config.initializer_range
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            shape = division.layout.shapes.get(name, (weight.shape,))[0] if division else weight.shape
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(tuple(shape), generator=generator, dtype=weight.dtype, device=device).mul_(
                std
            )
            split = division.splits.get(name) if division else None
            weight.data.copy_(split.of(whole) if split else whole)
        if name.endswith(queries):
            weight.data.mul_(SMALL)
        elif name.endswith("embed_tokens.weight"):
            weight.data.mul_(LARGE)
    made: nn.Module = model.eval().requires_grad_(False)
    return made


@contextmanager
def engine(options: argparse.Namespace, tp: int) -> Iterator[LLM]:
    """The engine of a shape, over so many GPUs."""
    changes: dict[str, Any] = {"num_hidden_layers": options.layers} if options.layers else {}
    if options.weights:
        changes["quantization_config"] = KINDS[options.weights].config
    with tempfile.TemporaryDirectory() as folder:
        shape_config(options.shape, **changes).save_pretrained(Path(folder))
        program, running = (sys.executable, __file__, "--rank"), max(options.requests, served_by(options)[0])
        own = {name: value for name, value in options.engine.items() if tp > 1 or name not in OF_SEVERAL}
        with mock.patch.object(build, "load", make_part), mock.patch.object(ranks, "PROGRAM", program):
            llm = LLM(
                folder, tp=tp, kv_format=options.kv_format, kv_scales="one", max_running=running,
                max_context=options.prompt + 256, graphs=options.graphs, **PLAIN, **options.limits, **own,
            )  # fmt: skip
        try:
            yield llm
        finally:
            llm.close()
            del llm
            torch.compiler.reset()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


@dataclass(frozen=True)
class Result:
    """One engine. logits_TV: of the gate's prompt. near: share of answers that are the likeliest, or nearly.

    tokens: that the cache holds, of all ranks with their own requests.
    """

    tp: int
    tokens: int
    start_s: float
    step_ms: float
    prompt_s: float
    near: float
    logits_TV: Tensor
    notes: tuple[str, ...]


def served_by(options: argparse.Namespace) -> tuple[int, int]:
    """Requests and tokens of each of --serve."""
    requests, _, prompt = options.serve.partition("x")
    return int(requests or 0), int(prompt or 0)


def tokens(count: int, seed: int, vocabulary: int) -> list[int]:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def measure(options: argparse.Namespace, tp: int) -> Result:
    began = time.perf_counter()
    with engine(options, tp) as llm:
        start, vocabulary = time.perf_counter() - began, llm.engine.vocab_size
        print(f"tp {tp}: started in {start:.0f} s ({llm.engine.startup.summary})", flush=True)
        logits_TV = llm.logits(tokens(min(GATE_TOKENS, options.prompt), 1, vocabulary)).float().cpu()
        near = answers_near(llm, options, vocabulary)
        step_ms = decode_step(llm, options, vocabulary)
        prompt_s = min(prompt_seconds(llm, tokens(options.prompt, 10 + i, vocabulary)) for i in range(3))
        # With attention by requests each rank has its own.
        fits = llm.engine.scheduler.manager.num_tokens * (tp if options.engine.get("attention_dp") else 1)
        print(
            f"tp {tp}: step {step_ms:.3f} ms, prompt {prompt_s * 1e3:.1f} ms, answers near {near:.3f}, "
            f"{fits:,} tokens fit",
            flush=True,
        )
        if options.serve:
            serve(llm, *served_by(options), ANSWER_TOKENS)
        return Result(tp, fits, start, step_ms, prompt_s, near, logits_TV, tuple(llm.engine.startup.notes))


def measured(options: argparse.Namespace, tp: int) -> Result:
    """The same, of an earlier call where it is kept: times of one warm machine alone may be compared."""
    if not options.keep:
        return measure(options, tp)
    folder = Path(options.keep)
    parts = options.shape, options.layers, options.kv_format, options.weights, options.options, f"tp{tp}"
    file = folder / f"{'-'.join(map(str, parts))}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(asdict(measure(options, tp)), file)
    return Result(**torch.load(file))


def answers_near(llm: LLM, options: argparse.Namespace, vocabulary: int) -> float:
    """How often a token that a decode step chose is the likeliest of the whole prompt's logits, or near it."""
    prompts = [tokens(40 + 3 * i, 100 + i, vocabulary) for i in range(options.requests)]
    outputs = llm.generate(
        prompts, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, progress=False
    )
    hits = []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.completions[0].token_ids)
        logits_TV = llm.logits([*prompt, *answer]).float()[len(prompt) - 1 : -1]
        hits.append(is_near(logits_TV, torch.tensor(answer, device=logits_TV.device)))
    return float(torch.cat(hits).float().mean())


def decode_step(llm: LLM, options: argparse.Namespace, vocabulary: int) -> float:
    """Milliseconds of a decode step of all requests."""
    params = SamplingParams(max_tokens=STEPS + WARM_STEPS + 50, temperature=0.0, ignore_eos=True)
    requests = [
        request
        for i in range(options.requests)
        for request in llm.engine.submit(tokens(options.context, 200 + i, vocabulary), params, lambda _: None)
    ]
    while any(request.num_tokens < options.context + WARM_STEPS for request in requests):
        llm.engine.step()
    before = sum(request.num_tokens for request in requests)
    synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        llm.engine.step()
    synchronize()
    seconds = time.perf_counter() - began
    made = sum(request.num_tokens for request in requests) - before
    llm.engine.abort(requests)
    # By tokens, so that a step that did something else counts as one.
    return 1e3 * seconds * options.requests / made


def prompt_seconds(llm: LLM, prompt: Sequence[int]) -> float:
    llm.reset_prefix_cache()
    synchronize()
    began = time.perf_counter()
    llm.generate(list(prompt), max_tokens=1, temperature=0.0, ignore_eos=True, progress=False)
    return time.perf_counter() - began


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def divergence(one_TV: Tensor, other_TV: Tensor) -> tuple[float, float]:
    """Mean KL divergence, and the share of tokens whose likeliest is that of the other, or near it."""
    p, q = one_TV.log_softmax(-1), other_TV.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return float(kl), float(is_near(other_TV, one_TV.argmax(-1)).float().mean())


def is_near(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """Which tokens are the likeliest, or near it."""
    chosen_T = logits_TV.gather(1, tokens_T[:, None])[:, 0]
    return chosen_T >= logits_TV.max(-1).values - NEAR * logits_TV.std(-1)


def collectives(size: int) -> None:
    """Time an all-reduce of rows of 4,096 values in BF16 on each of `size` GPUs, in CUDA graphs."""
    spawn: Any = torch.multiprocessing
    spawn.spawn(_time_collectives, (size, 29655), nprocs=size)


def _time_collectives(number: int, size: int, port: int) -> None:
    from nibble.kernels.collectives.processes import NcclCollectives, _graph_us, store

    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    group = NcclCollectives(store("127.0.0.1", port, number, size), number, size, device)
    if not number:
        print(f"{group.note}\n\nrows  NCCL us  as chosen us", flush=True)
    for rows in (1, 8, 32, 64, 128, 512, 8192):
        x = torch.ones(rows, 4096, dtype=torch.bfloat16, device=device)
        times = [_graph_us(partial(run, x)) for run in (group._by_nccl, group.all_reduce)]
        if not number:
            print(f"{rows:5}  {times[0]:7.1f}  {times[1]:12.1f}", flush=True)
    group.barrier()
    group.close()


def report(options: argparse.Namespace, results: Sequence[Result]) -> bool:
    """Print the table; return whether the gate holds."""
    first, *_ = results
    good = True
    print(
        f"\n{options.shape}, {options.layers or 'all'} layers, {options.kv_format}, {options.requests} requests"
    )
    print("tp  start s  step ms  times  prompt ms  tokens/s  times  tokens fit  times  KL       same   near")
    for result in results:
        kl, same = divergence(first.logits_TV, result.logits_TV)
        fits = options.weights or (kl <= KL and same >= SAME)
        good &= bool(fits) and result.near >= SAME and bool(result.logits_TV.isfinite().all())
        print(
            f"{result.tp:2}  {result.start_s:7.0f}  {result.step_ms:7.3f}  {first.step_ms / result.step_ms:5.2f}  "
            f"{1e3 * result.prompt_s:9.1f}  {options.prompt / result.prompt_s:8.0f}  "
            f"{first.prompt_s / result.prompt_s:5.2f}  {result.tokens:10}  {result.tokens / first.tokens:5.2f}  "
            f"{kl:.1e}  {same:.3f}  {result.near:.3f}"
        )
    for note in dict.fromkeys(note for result in results for note in result.notes):
        print(f"note: {note}")
    print("gate:", "holds" if good else "FAILS")
    return good


def option(text: str) -> tuple[str, Any]:
    """A name, and its value: 0 and 1 are no and yes."""
    name, _, value = text.partition("=")
    return name, {"0": False, "1": True}.get(value, value)


def main() -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in NO_MULTICAST.items()})
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--tp", default="1,2")
    parser.add_argument("--kv-format", default="nvfp4")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--weights", default="", help="packed, a name of packed_weights.KINDS")
    parser.add_argument("--options", default="", help="of the engine beside, as name=value,name=value")
    parser.add_argument("--serve", default="", help="requests x tokens of their prompts, at the same time")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    parser.add_argument("--collectives", action="store_true")
    parser.add_argument(
        "--keep", default="", help="a folder for results, so that each --tp may be a call of its own"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.limits = {}
    options.engine = dict(map(option, filter(None, options.options.split(","))))
    if options.weights:
        os.environ[WEIGHTS] = options.weights
    if options.tiny:
        options.shape = options.shape if options.shape.startswith("tiny") else "tiny"
        options.context, options.prompt, options.requests = 24, 64, 3
        options.limits = {"kv_memory": "8MiB", "token_budget": 32, "device": "cpu"}
    sizes = list(map(int, options.tp.split(",")))
    if options.collectives:
        collectives(max(sizes))
    results = [measured(options, tp) for tp in sizes]
    raise SystemExit(not report(options, results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        vars(build)["load"] = make_part
        rank.run(sys.argv[2:])
    else:
        main()
