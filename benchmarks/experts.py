"""What a layer of experts takes on one GPU, from the router to the combined output, beside the bytes that it must read.

    python benchmarks/experts.py [--models qwen3-30b-a3b,gpt-oss-20b] [--formats bf16,fp8,mxfp4] [--tokens 1,8,64]
        [--peer] [--variants] [--kernels] [--first 32,8,3,3,5]

Blocks of Transformers with random weights, compiled and recorded in a CUDA graph; several layers, one behind the other,
so that none is in the GPU's cache. Bytes: those of the router and of the experts that these tokens chose, as they are
stored, at copy bandwidth. Gate: the last layer's output against the family's own code, over matrices that are unpacked
one by one where they are packed; choices of its router against the definition, over the same logits.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from packed_weights import KINDS, random_experts
from report import markdown
from torch import Tensor, nn

import gpu
from nibble.errors import BackendError
from nibble.kernels import experts as kernels
from nibble.kernels import router
from nibble.kernels.experts import cuda
from nibble.kernels.experts.cuda import Tile
from nibble.kernels.experts.gate import Gate
from nibble.kernels.weight_formats import WeightFormat, experts_unserved
from nibble.models import experts, routers
from nibble.models.forward import inductor_options

SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
    "tiny": (
        "qwen3_moe",
        {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
    ),
}
LAYERS, TRIALS, WARM_SECONDS = 6, 15, 0.2
BF16 = "bf16"
WORST = 0.02
"""Largest error of an output, norm over norm."""
AIMS = {1: 2.2, 8: 2.0, 64: 1.7}
"""Most times the time of the bytes."""


def blocks(name: str, format: str, device: str) -> list[nn.Module]:
    """Return layers of experts with random weights, BF16 or in one of packed_weights.KINDS."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, sizes = SHAPES[name]
    config = AutoConfig.for_model(family, num_hidden_layers=1, vocab_size=64, num_attention_heads=4,
                                  num_key_value_heads=2, **sizes)  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = []
    for _ in range(LAYERS):
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        block = model.model.layers[0].mlp
        if format != BF16:
            pack(block, KINDS[format].format, dtype, device)
        for module in block.modules():
            if not isinstance(module, experts.ExpertMatrices):
                module.to_empty(device=device, recurse=False)
        for parameter in block.parameters():
            parameter.requires_grad_(False).normal_(std=parameter.shape[-1] ** -0.5)
        # On a GPU with the gate that is found, as a model is served.
        if not experts.serve_experts(block):
            serve([block], experts.NAME)
        routers.serve_routers(block)
        made.append(block.eval())
    return made


def pack(block: nn.Module, format: WeightFormat, dtype: torch.dtype, device: str) -> None:
    """Replace the matrices of experts, which need have no values yet, by packed ones."""
    for module in block.modules():
        packed = {}
        for name, weight in experts.expert_matrices(module).items():
            count, rows, columns = weight.shape
            if module.is_transposed:
                rows, columns = columns, rows
            if problem := experts_unserved(format, columns, str(dtype).removeprefix("torch.")):
                raise SystemExit(f"experts with {columns} inputs are not kept packed: {problem}")
            packed[name] = random_experts(format, (count, rows, columns), dtype, device, columns**-0.5)
        if packed:
            experts.set_packed_experts(module, packed)


def own_output(block: nn.Module, x: Tensor) -> Tensor:
    """Return what the family's own code computes, one expert after the other."""
    serve([block], "eager")
    y = output_of(block(x))
    serve([block], experts.NAME)
    return y


def serve(made: list[nn.Module], implementation: str) -> None:
    for block in made:
        for module in block.modules():
            if hasattr(module, "is_transposed"):
                module.config._experts_implementation = implementation


def chain(
    made: list[nn.Module], x: Tensor, compute: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return what each layer gets, the sum of what those before it got and computed, and what the last computes."""
    inputs, y = [], torch.zeros_like(x)
    for block in made:
        # One behind the other, as in a model: a compiler would join what does not depend on one another.
        x = x + y
        inputs.append(x)
        y = output_of(block(x)) if compute is None else compute(block, x)
    return inputs, y


def routed(block: nn.Module, x: Tensor) -> Tensor:
    """Return what a block computes by the operator that has its router, too, as where it is compiled."""
    (module,) = (m for m in block.modules() if hasattr(m, "is_transposed"))
    (own,) = (m for m in block.modules() if hasattr(m, "is_normalized"))
    matrices = (experts._matrices(module, name) for name in ("gate_up_proj", "down_proj"))
    y_TH = kernels.routed_layer(
        x.reshape(-1, x.shape[-1]), (own.weight, getattr(own, "bias", None)), *matrices, Gate(*module.nibble_gate),
        top_k=own.top_k, is_normalized=own.is_normalized,
    )  # fmt: skip
    return y_TH.view_as(x)


def output_of(y: Tensor | tuple[Tensor, ...]) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


def microseconds(made: list[nn.Module], x: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return the time of one layer in a CUDA graph of all, and what the last gets and computes."""
    if x.device.type == "cpu":
        began = time.perf_counter()
        inputs, y = chain(made, x)
        return (time.perf_counter() - began) * 1e6 / len(made), inputs[-1], y
    graph, last, y = compiled(made, x)
    return timed(graph.replay) / len(made), last.clone(), y.clone()


def compiled(made: list[nn.Module], x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """Return a graph of all layers, compiled, and what the last gets and computes."""
    torch._dynamo.reset()
    run: Any = torch.compile(chain, fullgraph=True, options=inductor_options(nn.ModuleList(made)))
    for _ in range(2):
        run(made, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs, y = run(made, x)
    return graph, inputs[-1], y


def timed(call: Callable[[], object], warm: float = WARM_SECONDS) -> float:
    """Return the median time of a call in microseconds."""
    # A GPU that waited for a compiler has slowed its clock down.
    began = time.perf_counter()
    while time.perf_counter() - began < warm:
        call()
        torch.cuda.synchronize()
    times = []
    for _ in range(TRIALS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times) * 1e3


def needed_bytes(block: nn.Module, x: Tensor) -> int:
    """Return the bytes of the router and of the experts that tokens choose."""
    seen: list[Tensor] = []
    (module,) = (m for m in block.modules() if hasattr(m, "is_transposed"))
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    block(x)
    handle.remove()
    own = list(module.parameters())
    each = sum(p.nbytes // p.shape[0] for p in own)
    each += sum(
        packed.matrices.nbytes // packed.packed_shape[0] for packed in experts.packed_matrices(module)
    )
    others = sum(p.nbytes for p in block.parameters() if all(p is not mine for mine in own))
    return each * len(seen[0].unique()) + others


def check_router(block: nn.Module, x: Tensor) -> None:
    """Hold what a router that is served chooses against the definition."""
    x_TH = x.reshape(-1, x.shape[-1])
    for module in block.modules():
        if hasattr(module, "is_normalized"):
            logits_TE, weights_TK, experts_TK = module(x_TH)
            expected_TE, _, _ = type(module).forward(module, x_TH)
            right_TK, chosen_TK = router.naive.choose(logits_TE, module.top_k, module.is_normalized)
            off = float((logits_TE - expected_TE).float().norm() / expected_TE.float().norm())
            worst = float((weights_TK - right_TK).abs().max())
            if off > WORST or worst > WORST or not torch.equal(experts_TK, chosen_TK):
                raise SystemExit(f"a router of {len(x_TH)} tokens is wrong: {off:.2g}, {worst:.2g}")


def recorded(
    made: list[nn.Module], x: Tensor, compute: Callable[[nn.Module, Tensor], Tensor] | None
) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """Return a graph of all layers, not compiled, and what the last gets and computes."""
    chain(made, x, compute)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs, y = chain(made, x, compute)
    return graph, inputs[-1], y


def timeline(graph: torch.cuda.CUDAGraph, layers: int) -> list[str]:
    """Return when kernels of a layer begin and end, in microseconds from where the first does."""
    from torch.profiler import ProfilerActivity, profile

    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    events: list[Any] = sorted((e for e in seen.events() or []), key=lambda e: e.time_range.start)
    each = len(events) // layers
    events = events[len(events) - 2 * each : len(events) - each + 1]
    began = events[0].time_range.start if events else 0
    return [
        f"{e.time_range.start - began:8.2f} {e.time_range.end - began:8.2f}  {e.name[:60]}" for e in events
    ]


FIRST_TILES = {
    tokens: [Tile(*sizes) for sizes in tiles]
    for tokens, tiles in {
        1: [(32, 8, 3, 6), (32, 8, 3, 6, 2), (32, 8, 3, 6, 5), (32, 8, 3, 4), (32, 8, 3, 4, 4), (32, 8, 3, 3),
            (32, 8, 3, 3, 5), (32, 8, 3, 2), (32, 8, 4, 5), (32, 8, 5, 3), (64, 8, 2, 6)],
        8: [(32, 8, 5, 2), (32, 8, 5, 3), (32, 8, 4, 4), (32, 8, 3, 6), (64, 8, 3, 2), (64, 8, 3, 3), (64, 8, 2, 5)],
        64: [(32, 16, 5, 2), (32, 16, 5, 3), (32, 16, 4, 4), (32, 8, 5, 3), (64, 16, 3, 2), (64, 16, 3, 3),
             (64, 16, 2, 4), (64, 8, 3, 3), (64, 8, 4, 2)],
    }.items()
}  # fmt: skip
"""By tokens, tiles that are tried for the first product."""
SECOND_TILES = FIRST_TILES | {
    1: [Tile(32, 8, *rest) for rest in ((4, 4), (4, 3), (3, 6), (2, 7))] + [Tile(64, 8, 2, 4)]
}
"""The same for the second; all are tried with the default of the other."""


SEPARATE = "sums by a launch of their own"
APART = "a router of its own"


@contextmanager
def tiled(first: Tile | None, second: Tile | None, *, combines: bool) -> Iterator[None]:
    """Let products have other tiles, or a token's rows be summed up by a launch of its own, in the body."""
    own, own_combines = cuda.tile_of, cuda.combines

    def tile_of(*arguments: Any, is_second: bool) -> Tile:
        return (second if is_second else first) or own(*arguments, is_second=is_second)

    cuda.tile_of = tile_of
    if not combines:
        cuda.combines = lambda experts_TK, x: False
    try:
        yield
    finally:
        cuda.tile_of, cuda.combines = own, own_combines


def variants_of(tokens: int) -> dict[str, tuple[Tile | None, Tile | None]]:
    """Return tiles of both products by name."""
    few = min((n for n in FIRST_TILES if n >= tokens), default=64)
    found: dict[str, tuple[Tile | None, Tile | None]] = {"as chosen": (None, None)}
    found |= {f"first {_brief(tile)}": (tile, None) for tile in FIRST_TILES[few]}
    if few == 1:
        found |= dict.fromkeys((APART, SEPARATE), (None, None))
    return found | {f"second {_brief(tile)}": (None, tile) for tile in SECOND_TILES[few]}


def _brief(tile: Tile) -> str:
    further = f", next from step {tile.start}" if tile.start else ""
    return f"{tile.rows} x {tile.columns}, {tile.blocks} blocks, {tile.stages} stages{further}"


def compile_variants(block: nn.Module, tokens: int) -> None:
    """Compile kernels of all variants at a time."""
    from nibble.kernels.nvrtc import cubin

    (module,) = (m for m in block.modules() if hasattr(m, "is_transposed"))
    top_k = module.config.num_experts_per_tok
    settings = set()
    gate = (module.nibble_gate or ("",))[0]
    for tiles in variants_of(tokens).values():
        for name, tile in zip(("gate_up_proj", "down_proj"), tiles, strict=True):
            weight = experts._matrices(module, name)[0]
            matrices = (
                weight.matrices if isinstance(weight, experts.ExpertMatrices) else cuda.matrices_of(weight, 1)
            )
            if not matrices:
                continue
            is_second, one = name == "down_proj", tokens == 1
            own = tile or cuda.tile_of(matrices, tokens, tokens * top_k, is_second=is_second)
            use = cuda.Use(
                matrices.format,
                matrices.shape[1:],
                own,
                "" if is_second else gate,
                one,
                top_k if is_second and one else 0,
                matrices.shape[0] if one and not is_second else 0,
                one and is_second,
            )
            settings.add(tuple(cuda.macros(use).items()))
    arch = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda macros: cubin(cuda.SOURCE, arch, dict(macros)), settings))


def time_variants(made: list[nn.Module], x: Tensor, need: float) -> None:
    """Print the time of a layer with each variant, the fastest first, and the timeline of the first and the fastest."""
    tokens = x.shape[1]
    compile_variants(made[0], tokens)
    results = []
    for name, tiles in variants_of(tokens).items():
        with tiled(*tiles, combines=name != SEPARATE):
            try:
                graph, last, y = recorded(made, x, None if name in (APART, SEPARATE) else routed)
            except (BackendError, RuntimeError) as error:
                print(f"  {name}: {str(error)[:80]}", flush=True)
                continue
            us = timed(graph.replay, warm=WARM_SECONDS / 4) / len(made)
            off = (
                error_of(y, own_output(made[-1], last)) if name == "as chosen" else error_of(y, results[0][3])
            )
            results.append((us, name, off, y.clone(), timeline(graph, len(made)) if tokens < 64 else []))
    chosen = results[0]
    for us, name, off, _, _ in sorted(results, key=lambda r: r[0]):
        print(
            f"  {us:8.2f} us  {us / need:5.2f}  {off:.1e}  {name}{'' if off <= WORST else ' WRONG'}",
            flush=True,
        )
    for result in (chosen, min(results, key=lambda r: r[0])):
        print(f"  {result[1]}:", *result[4], sep="\n    ", flush=True)


def error_of(y: Tensor, expected: Tensor) -> float:
    return float((y.float() - expected.float()).norm() / expected.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="qwen3-30b-a3b,gpt-oss-20b")
    parser.add_argument("--formats", default=BF16, help=f"{BF16}, {', '.join(KINDS)}")
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument(
        "--peer", action="store_true", help="time Transformers' own, too, which takes a while"
    )
    parser.add_argument("--variants", action="store_true", help="time other tiles, too, and not compiled")
    parser.add_argument("--kernels", action="store_true", help="list kernels, and when they begin and end")
    parser.add_argument("--first", help="sizes of another tile of the first product, as Tile has them")
    gpu.add_output_options(parser)
    options = parser.parse_args()
    first = Tile(*map(int, options.first.split(","))) if options.first else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    copy = gpu.copy_tbps() if device == "cuda" else 0.01
    rows = []
    with torch.inference_mode(), tiled(first, None, combines=True):
        for name, format in itertools.product(options.models.split(","), options.formats.split(",")):
            made = blocks(name, format, device)
            hidden = SHAPES[name][1]["hidden_size"]
            for tokens in map(int, options.tokens.split(",")):
                x = torch.randn(1, tokens, hidden, device=device, dtype=next(made[0].parameters()).dtype)
                inputs, _ = chain(made, x)
                need = sum(map(needed_bytes, made, inputs)) / len(made) / copy / 1e6
                theirs = None
                if format == BF16 and options.peer:
                    serve(made, "grouped_mm" if device == "cuda" else "eager")
                    theirs, *_ = microseconds(made, x)
                    serve(made, experts.NAME)
                if options.variants:
                    check_router(made[0], x)
                    print(f"{name} {format}, {tokens} tokens, {need:.1f} us of bytes:", flush=True)
                    time_variants(made, x, need)
                    continue
                ours, last, found = microseconds(made, x)
                error = error_of(found, own_output(made[-1], last))
                rows.append((name, format, tokens, f"{need:.1f}", f"{theirs:.1f}" if theirs else "-", f"{ours:.1f}",
                             f"{ours / need:.2f}", AIMS.get(tokens, "-"), f"{error:.1e}"))  # fmt: skip
                print(*rows[-1], flush=True)
                if not error <= WORST:
                    raise SystemExit(
                        f"{name} {format}, {tokens} tokens: off by {error:.2g}, {WORST:g} is allowed"
                    )
                if options.kernels:
                    print(*timeline(compiled(made, x)[0], len(made)), sep="\n    ", flush=True)
            del made
    head = (
        "model",
        "format",
        "tokens",
        "bytes, us",
        "Transformers, us",
        "Nibble, us",
        "times the bytes",
        "floor",
        "error",
    )
    gpu.publish("experts", options, str(__doc__), [markdown(head, rows)], gpu.versions())


if __name__ == "__main__":
    main()
