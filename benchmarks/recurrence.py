"""Recurrent layers on one GPU: decode steps by formats of states, convolutions, and prompts by the rule of any cut.

    python benchmarks/recurrence.py [--formats fp32,int8] [--requests 1,64] [--no-peers] [--sweep] [--tiny] [--out DIR]

The gated delta rule of Qwen3-Next: 16 heads of keys, 32 of values, 128 x 128, BF16. A decode step is one token of each
request, its place the middle of a block; the mean counts one step in 16 that fills a block and writes matrices. Each
time is the median replay of a CUDA graph of many layers, each with states of its own, of at least four times the L2
cache, divided by their number. Bytes are matrices once, and what is stored of a block. Prompts are those of
--deterministic; others have kernels of their own (recurrence_prompt.py). Gate: outputs against naive.py.

The peer, where `fla` can be imported, is flash-linear-attention's fused_recurrent_gated_delta_rule, which returns new
states, of float32, and chunk_gated_delta_rule.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from report import markdown
from torch import Tensor
from torch.nn.functional import normalize, softplus

import gpu
from nibble.kernels import cdiv
from nibble.kernels import recurrence as op
from nibble.kernels.recurrence import (
    Convolution,
    LayerState,
    Projection,
    Runs,
    StateBatch,
    StateMetadata,
    naive,
)
from nibble.kernels.state_formats import BLOCK, FORMATS
from nibble.model_spec import RecurrentGroup

KEY_HEADS, HEADS, ROWS, COLUMNS, CHANNELS, TAPS = 16, 32, 128, 128, 8192, 4
REQUESTS, PROMPTS = (1, 8, 64, 256), (2048, 16384)
MOST_LAYERS, PROMPT_CALLS = 128, 3
LIMIT = 0.01
"""Of outputs, against the definition, where a rounded update may fall to the other side."""
TILES = ((8, 4), (16, 4), (16, 2), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8))
"""Rows and warps that --sweep tries."""
Rows = tuple[Tensor, ...]


@dataclass(frozen=True)
class Shapes:
    """Sizes of a layer."""

    key_heads: int = KEY_HEADS
    heads: int = HEADS
    rows: int = ROWS
    columns: int = COLUMNS
    channels: int = CHANNELS

    def state(self, slots: int, format: str) -> LayerState:
        group = RecurrentGroup(
            "delta", "delta", (0,), self.heads, self.rows, self.columns, self.key_heads,
            conv_channels=self.channels, conv_taps=TAPS,
        )  # fmt: skip
        return op.layer_state(group, slots, format, torch.bfloat16, 0, gpu.device())

    def inputs(self, tokens: int) -> Rows:
        values = partial(torch.randn, device=gpu.device())
        q, k = (normalize(values(tokens, self.key_heads, self.columns), dim=-1).bfloat16() for _ in "qk")
        pace, beta = values(tokens, self.heads), values(tokens, self.heads)
        return (
            q,
            k,
            values(tokens, self.heads, self.rows).bfloat16(),
            -softplus(pace) / 20,
            torch.sigmoid(beta),
        )


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    what: str
    format: str
    requests: int
    us: float
    bytes: int

    def text(self, copy: float) -> str:
        tbps = self.bytes / self.us / 1e6
        return f"{self.us:.2f} us, {tbps:.2f} TB/s, {tbps / copy:.0%}"


def metadata(slots: Sequence[int], start: int, length: int, *, invariant: bool = False) -> StateMetadata:
    ints = partial(torch.tensor, dtype=torch.int32, device=gpu.device())
    ends = list(range(0, length * len(slots) + 1, length))
    return StateMetadata(
        ints(list(slots)), ints([start] * len(slots)), ints(ends), length, invariant=invariant
    )


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def gate(shapes: Shapes, format: str) -> float:
    """Serve a prompt and decodes over a multiple of BLOCK -> the largest error; stop where one is wrong."""
    worst = 0.0
    for invariant in (False, True):
        states, start = (shapes.state(3, format), shapes.state(3, format)), 0
        for length in (28, *[1] * 6):
            rows, at = shapes.inputs(2 * length), start // BLOCK * BLOCK
            batch = StateBatch((2, 0), (start,) * 2, (length,) * 2, (at,) * 2, (length,) * 2)
            expected = naive.recurrence(*rows, states[1], batch, delta=True)
            actual = op.recurrence(
                *rows, states[0], metadata((2, 0), start, length, invariant=invariant), delta=True
            )
            worst, start = max(worst, error(actual, expected)), start + length
    if not worst <= LIMIT:
        raise SystemExit(f"{format}: outputs are off by {worst:.1e}")
    return worst


def fill(states: Sequence[LayerState]) -> None:
    """Put something into all slots that numbers can be computed of."""
    for state in states:
        for x in (*state.planes, state.keys_SPGK, state.updates_SPHV, state.inputs_SPC):
            x.copy_(torch.randint(-2, 3, x.shape, device=x.device))
        state.decays.fill_(-0.1)


def layers_for(size: int) -> int:
    return (
        min(max(cdiv(gpu.L2_TIMES * gpu.l2_bytes(), size), 4), MOST_LAYERS)
        if torch.cuda.is_available()
        else 1
    )


def decodes(shapes: Shapes, format: str, requests: int, sweep: bool) -> Iterator[Cell]:
    """Decode steps in the middle of a block, and the mean over a block's places."""
    sample = shapes.state(1, format)
    matrix = sum(x.numel() * x.itemsize for x in sample.planes)
    token = sum(x[0, 0].numel() * x.itemsize for x in (sample.keys_SPGK, sample.updates_SPHV, sample.decays))
    layers = layers_for(requests * matrix)
    states, rows = [shapes.state(requests, format) for _ in range(layers)], shapes.inputs(requests)
    fill(states)
    size = requests * (matrix + BLOCK // 2 * token)

    def time(start: int, serve: Callable[..., Any], **options: Any) -> float:
        batch = metadata(range(requests), start, 1)
        batch = dataclasses.replace(batch, invariant=options.pop("invariant", False))
        step = lambda: [serve(*rows, state, batch, delta=True, **options) for state in states]  # noqa: E731
        return gpu.time_calls(step, layers).ms * 1e3

    middle = time(32 + BLOCK // 2, op.recurrence)
    last = time(32 + BLOCK - 1, op.recurrence)
    yield Cell("decode", format, requests, middle, size)
    yield Cell(
        "decode, mean",
        format,
        requests,
        (middle * (BLOCK - 1) + last) / BLOCK,
        size + requests * matrix // BLOCK,
    )
    yield Cell(
        "decode, any cut", format, requests, time(32 + BLOCK // 2, op.recurrence, invariant=True), size
    )
    if sweep:
        from nibble.kernels.recurrence import decode

        for tile in (decode.Tile(*numbers) for numbers in TILES):
            us = time(32 + BLOCK // 2, decode.recurrence, tile=tile)
            yield Cell(f"decode, {tile.rows} rows, {tile.warps} warps", format, requests, us, size)


def joined_decodes(shapes: Shapes, format: str, requests: int, sweep: bool) -> Iterator[Cell]:
    """Decode steps in the middle of a block with what is before them: in launches of their own, and in one."""
    from nibble.kernels.recurrence import decode

    matrix = sum(x.numel() * x.itemsize for x in shapes.state(1, format).planes)
    layers = layers_for(requests * matrix)
    states = [shapes.state(requests, format) for _ in range(layers)]
    fill(states)
    projection, conv = products(shapes, requests)
    batch = metadata(range(requests), 32 + BLOCK // 2, 1)
    x_TC, *gates = naive.project(projection, conv, states[0])
    own = dataclasses.replace(conv, x_TC=x_TC)

    def apart(state: LayerState) -> Tensor:
        y_TC = op.causal_conv(x_TC, own.weight_CW, None, "silu", state, batch)
        return op.recurrence(*own.split(y_TC, state), *gates, state, batch, delta=True, unit=True)

    def joined(state: LayerState, **tile: Any) -> Tensor:
        return decode.conv_recurrence(own, *gates, state, batch, delta=True, unit=True, **tile)

    def projected(state: LayerState, **tile: Any) -> Tensor:
        return decode.projected_recurrence(projection, conv, state, batch, delta=True, unit=True, **tile)

    ways: dict[str, Callable[[LayerState], Tensor]] = {"convolution and rule apart": apart}
    ways |= {"joined": joined, "of products": projected}
    for tile in (decode.Tile(*numbers) for numbers in (TILES if sweep else ())):
        ways[f"of products, {tile.rows} rows, {tile.warps} warps"] = partial(projected, tile=tile)
    for what, serve in ways.items() if torch.cuda.is_available() else ():
        off = error(serve(states[0]), apart(states[0]))
        if not off <= LIMIT:
            raise SystemExit(f"{what}, {format}: off by {off:.1e}")
        step = lambda serve=serve: [serve(state) for state in states]  # noqa: E731
        us = gpu.time_calls(step, layers).ms * 1e3
        yield Cell(f"decode, {what}", format, requests, us, requests * matrix)


def products(shapes: Shapes, requests: int) -> tuple[Projection, Convolution]:
    """Return what a layer begins with in the order of Qwen3-Next, and its convolution."""
    keys, per_key = shapes.key_heads * shapes.columns, shapes.heads // shapes.key_heads
    wide = 2 * (shapes.columns + per_key * shapes.rows)
    at = shapes.key_heads * wide
    runs = (
        Runs(0, shapes.columns, wide), Runs(shapes.columns, shapes.columns, wide),
        Runs(2 * shapes.columns, per_key * shapes.rows, wide), Runs(at + per_key, per_key, 2 * per_key),
        Runs(at, per_key, 2 * per_key),
    )  # fmt: skip
    values = partial(torch.randn, device=gpu.device())
    y_TW = values(requests, at + 2 * shapes.heads).bfloat16()
    paces_H, offsets_H = ((values(shapes.heads) - 2).bfloat16() for _ in range(2))
    weight_CW = values(shapes.channels, TAPS).bfloat16()
    conv = Convolution(y_TW, weight_CW, None, "silu", 0, keys, 2 * keys)
    return Projection(y_TW, y_TW, y_TW, runs, paces_H, offsets_H), conv


def convolutions(shapes: Shapes, requests: int, length: int) -> Cell:
    """Of a decode step, or of prompts."""
    tokens = requests * length
    size = 2 * 2 * tokens * shapes.channels + (2 * TAPS * requests * shapes.channels if length == 1 else 0)
    layers = layers_for(size)
    states = [shapes.state(requests, "int8") for _ in range(layers)]
    x_TC = [torch.randn(tokens, shapes.channels, device=gpu.device()).bfloat16() for _ in range(layers)]
    weight_CW, batch = (
        torch.randn(shapes.channels, TAPS, device=gpu.device()).bfloat16(),
        metadata(range(requests), 40, length),
    )
    pairs = list(zip(x_TC, states, strict=True))
    step = lambda: [op.causal_conv(x, weight_CW, None, "silu", state, batch) for x, state in pairs]  # noqa: E731
    what = "convolution" if length == 1 else f"convolution, {length} tokens"
    return Cell(what, "", requests, gpu.time_calls(step, layers).ms * 1e3, size)


def prompts(shapes: Shapes, format: str, tokens: int) -> tuple[str, str, str]:
    rows, states = shapes.inputs(tokens), [shapes.state(1, format) for _ in range(PROMPT_CALLS)]
    batch = metadata((0,), 0, tokens, invariant=True)
    step = lambda: [op.recurrence(*rows, state, batch, delta=True) for state in states]  # noqa: E731
    return f"any cut, {format}", f"{tokens}", f"{gpu.time_calls(step, PROMPT_CALLS).ms:.3f} ms"


def peer_decodes(shapes: Shapes, requests: int) -> Cell:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    matrix = 4 * shapes.heads * shapes.rows * shapes.columns
    layers = layers_for(requests * matrix)
    q, k, v, decay, beta = (x[:, None] for x in shapes.inputs(requests))
    shape = (requests, shapes.heads, shapes.columns, shapes.rows)
    states = [torch.randn(shape, device=gpu.device()) for _ in range(layers)]
    serve = partial(
        fused_recurrent_gated_delta_rule, q, k, v, decay, beta, scale=1.0, output_final_state=True
    )
    step = lambda: [serve(initial_state=state)[0] for state in states]  # noqa: E731
    return Cell("fla decode", "fp32", requests, gpu.time_calls(step, layers).ms * 1e3, 2 * requests * matrix)


def peer_prompts(shapes: Shapes, tokens: int) -> tuple[str, str, str]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, decay, beta = (x[None] for x in shapes.inputs(tokens))
    state = torch.zeros(1, shapes.heads, shapes.columns, shapes.rows, device=gpu.device())
    serve = partial(chunk_gated_delta_rule, q, k, v, decay, beta, scale=1.0, output_final_state=True)
    step = lambda: [serve(initial_state=state)[0]]  # noqa: E731
    return "fla, chunks", f"{tokens}", f"{gpu.time_calls(step, 1, graph=False).ms:.3f} ms"


def with_peer(options: argparse.Namespace) -> str:
    """Return why there is no peer, or nothing."""
    if not options.peers or not torch.cuda.is_available():
        return "Without flash-linear-attention."
    try:
        import fla.ops.gated_delta_rule  # noqa: F401
    except Exception as error:
        return f"Without flash-linear-attention: {error}"
    return ""


def main() -> None:
    options = arguments().parse_args()
    shapes = Shapes(1, 2, 16, 16, 64) if options.tiny else Shapes()
    requests = (2,) if options.tiny else tuple(map(int, options.requests.split(",")))
    tokens = (33,) if options.tiny else tuple(map(int, options.prompts.split(",")))
    formats, missing, copy = options.formats.split(","), with_peer(options), gpu.copy_tbps()
    cells, lines = list[Cell](), list[tuple[str, str, str]]()
    for format in formats:
        print(f"{format}: off by {gate(shapes, format):.1e} at most", flush=True)
    for count in requests:
        for format in formats:
            cells += decodes(shapes, format, count, options.sweep)
            cells += joined_decodes(shapes, format, count, options.sweep)
        cells.append(convolutions(shapes, count, 1))
        if not missing:
            cells.append(peer_decodes(shapes, count))
        for cell in [cell for cell in cells if cell.requests == count]:
            print(f"{count} requests, {cell.what} {cell.format}: {cell.text(copy)}", flush=True)
    for length in tokens:
        lines += [prompts(shapes, format, length) for format in formats if format in ("fp32", "int8")]
        cell = convolutions(shapes, 1, length)
        lines.append((cell.what, str(length), cell.text(copy)))
        if not missing:
            lines.append(peer_prompts(shapes, length))
    head = ("step", "states", *(f"{count} requests" for count in requests))
    by_key = {(cell.what, cell.format, cell.requests): cell.text(copy) for cell in cells}
    kinds = dict.fromkeys((cell.what, cell.format) for cell in cells)
    table = [(*kind, *(by_key.get((*kind, count), "") for count in requests)) for kind in kinds]
    texts = [
        f"Copy bandwidth {copy:.2f} TB/s.",
        missing,
        markdown(head, table),
        markdown(("prompt", "tokens", "time"), lines),
    ]
    figures = {"copy_tbps": copy, "cells": [dataclasses.asdict(cell) for cell in cells], "prompts": lines}
    gpu.publish("recurrence", options, str(__doc__), texts, gpu.versions(), **figures)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu.add_common_options(parser, tuple(FORMATS))
    parser.add_argument("--requests", default=",".join(map(str, REQUESTS)))
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)))
    parser.add_argument("--sweep", action="store_true", help="try other tiles of decode steps, too")
    return parser


if __name__ == "__main__":
    main()
