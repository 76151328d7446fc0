"""What a layer of experts takes on one GPU, from the router to the combined output, beside the bytes that it must read.

    python benchmarks/experts.py [--models qwen3-30b-a3b,gpt-oss-20b] [--formats bf16,fp8,mxfp4] [--tokens 1,8,64]
        [--peer] [--tiles] [--kernels]

Blocks of Transformers with random weights, compiled and recorded in a CUDA graph; several layers, one behind the other,
so that none is in the GPU's cache. Bytes: those of the router and of the experts that these tokens chose, as they are
stored, at copy bandwidth. Gate: the last layer's output against the family's own code, over matrices that are unpacked
one by one where they are packed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from packed_weights import KINDS, random_experts
from report import markdown
from torch import Tensor, nn
from triton.runtime.errors import OutOfResources

import gpu
from nibble.errors import BackendError
from nibble.kernels.experts import cuda, triton
from nibble.kernels.experts.matrices import PackedExperts
from nibble.kernels.weight_formats import WeightFormat, experts_unserved
from nibble.models import experts
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
            serve([block], experts._NAME)
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
    serve([block], experts._NAME)
    return y


def serve(made: list[nn.Module], implementation: str) -> None:
    for block in made:
        for module in block.modules():
            if hasattr(module, "is_transposed"):
                module.config._experts_implementation = implementation


def chain(made: list[nn.Module], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return what each layer gets, the sum of what those before it got and computed, and what the last computes."""
    inputs, y = [], torch.zeros_like(x)
    for block in made:
        # One behind the other, as in a model: a compiler would join what does not depend on one another.
        x = x + y
        inputs.append(x)
        y = output_of(block(x))
    return inputs, y


def output_of(y: Tensor | tuple[Tensor, ...]) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


def microseconds(made: list[nn.Module], x: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return the time of one layer in a CUDA graph of all, and what the last gets and computes."""
    if x.device.type == "cpu":
        began = time.perf_counter()
        inputs, y = chain(made, x)
        return (time.perf_counter() - began) * 1e6 / len(made), inputs[-1], y
    torch._dynamo.reset()
    run: Any = torch.compile(chain, fullgraph=True, options=inductor_options(nn.ModuleList(made)))
    for _ in range(2):
        run(made, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs, y = run(made, x)
    return timed(graph.replay) / len(made), inputs[-1].clone(), y.clone()


def timed(call: Callable[[], object], flush: Tensor | None = None) -> float:
    """Return the median time of a call in microseconds. flush: written before each, so that no cache has weights."""
    # A GPU that waited for a compiler has slowed its clock down.
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        call()
        torch.cuda.synchronize()
    times = []
    for _ in range(TRIALS):
        if flush is not None:
            flush.zero_()
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


def kernels_of(made: list[nn.Module], x: Tensor) -> str:
    from torch.profiler import ProfilerActivity, profile

    options = inductor_options(nn.ModuleList(made))
    run: Any = torch.compile(chain, fullgraph=True, options=options)
    run(made, x)
    run(made, x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(made, x)
        torch.cuda.synchronize()
    return str(found.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=70))


def tiles(block: nn.Module, x: Tensor) -> list[tuple[float, str]]:
    """Return the microseconds of both products alone by tile, the fastest first."""
    (module,) = (m for m in block.modules() if hasattr(m, "is_transposed"))
    chosen_TK = torch.rand(len(x[0]), module.num_experts, device=x.device).topk(
        module.config.num_experts_per_tok
    )[1]
    flush, results = torch.empty(1 << 28, dtype=torch.uint8, device=x.device), []
    for name in ("gate_up_proj", "down_proj"):
        weight_ENI, _ = experts._matrices(module, name)
        if isinstance(weight_ENI, experts.ExpertMatrices):
            weight_ENI = weight_ENI.matrices
        tokens = len(x[0]) if name == "gate_up_proj" else chosen_TK.numel()
        rows = torch.randn(tokens, weight_ENI.shape[2], device=x.device, dtype=x.dtype)
        for compute, tile in tiles_of(weight_ENI):
            call = partial(compute, rows, chosen_TK, weight_ENI, None, tile=tile)
            try:
                call()
                results.append((timed(call, flush), f"{name} {tile}"))
            except (OutOfResources, BackendError):
                continue
    return sorted(results)


def tiles_of(weight: Tensor | PackedExperts) -> list[tuple[Callable[..., Tensor], Any]]:
    """Return what multiplies with a weight, with each of its tiles."""
    choices = itertools.product(cuda.ROWS, cuda.COLUMNS, (2, 3, 4, 5, 6), (2, 3, 4))
    packed = [(few_product, cuda.Tile(*choice)) for choice in choices]
    if not isinstance(weight, Tensor):
        return packed
    sizes = itertools.product((16, 32, 64, 128), (64, 128, 256), (3, 4, 6))
    plain = [(triton.few_product, triton.Tile(n, k, stages=stages)) for n, k, stages in sizes]
    return plain + packed if cuda.plain_experts(weight, 1) else plain


def few_product(
    x: Tensor, chosen_TK: Tensor, weight: Tensor | PackedExperts, bias: None, **tile: Any
) -> Tensor:
    matrices = cuda.plain_experts(weight, 1) if isinstance(weight, Tensor) else weight
    assert matrices is not None
    return cuda.few_product(x, chosen_TK, matrices, bias, **tile)


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
    parser.add_argument("--tiles", action="store_true", help="time products alone, by tile")
    parser.add_argument("--kernels", action="store_true", help="list kernels and their times")
    gpu.add_output_options(parser)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    copy = gpu.copy_tbps() if device == "cuda" else 0.01
    rows = []
    with torch.inference_mode():
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
                    serve(made, experts._NAME)
                ours, last, found = microseconds(made, x)
                expected = own_output(made[-1], last)
                error = float((found.float() - expected.float()).norm() / expected.float().norm())
                rows.append((name, format, tokens, f"{need:.1f}", f"{theirs:.1f}" if theirs else "-", f"{ours:.1f}",
                             f"{ours / need:.2f}", AIMS.get(tokens, "-"), f"{error:.1e}"))  # fmt: skip
                print(*rows[-1], flush=True)
                if not error <= WORST:
                    raise SystemExit(
                        f"{name} {format}, {tokens} tokens: off by {error:.2g}, {WORST:g} is allowed"
                    )
                if options.kernels:
                    print(kernels_of(made, x), flush=True)
                if options.tiles:
                    for us, text in tiles(made[0], x):
                        print(f"  {us:8.1f} us  {text}", flush=True)
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
