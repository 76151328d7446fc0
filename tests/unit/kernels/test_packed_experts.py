"""Products of tokens with packed experts: kernels in Triton's interpreter against the definition, and PTX by its bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import nibble
from nibble.kernels import experts as op
from nibble.kernels.experts import decode, naive
from nibble.kernels.experts import triton as fast
from nibble.kernels.experts.matrices import (
    MAX_EXPONENT,
    PackedExperts,
    arranged,
    joined,
    packed_experts,
    restored,
)
from nibble.kernels.quantized_linear.matrix import PackedMatrix
from nibble.kernels.quantized_linear.naive import E2M1, dequantize
from nibble.kernels.quantized_linear.quantize import quantize
from nibble.kernels.weight_formats import EXPERT_FORMATS, WeightFormat, expert_bytes, experts_unserved, run_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
"""The interpreter does not multiply bfloat16."""
TOLERANCE = 4e-3 if DEVICE == "cuda" else 1e-6
pytestmark = pytest.mark.usefixtures("scalars_bound_loops")
FORMATS = {
    "fp8": (WeightFormat("e4m3", 128), 256),
    "fp8 rows": (WeightFormat("e4m3"), 144),
    "mxfp8": (WeightFormat("e4m3", 32, "e8m0"), 96),
    "mxfp4": (WeightFormat("e2m1", 32, "e8m0"), 288),
    "nvfp4": (WeightFormat("e2m1", 16, "e4m3", has_global=True), 272),
    "int4": (WeightFormat("uint4", 128), 128),
    "int4, groups of 64": (WeightFormat("uint4", 64), 192),
    "int4 rows": (WeightFormat("uint4"), 160),
}
"""Formats with numbers of inputs that are no whole steps of most tiles."""
OUTPUTS = 70


def matrices(name: str, experts: int, seed: int = 0) -> list[PackedMatrix]:
    format, inputs = FORMATS[name]
    rng = torch.Generator().manual_seed(seed)
    weight_ENI = torch.randn(experts, OUTPUTS, inputs, generator=rng).to(DEVICE, DTYPE)
    if (format.codes, format.scales) != ("e4m3", "e8m0"):
        return [quantize(weight_NI, format, DTYPE) for weight_NI in weight_ENI]
    codes = weight_ENI.to(torch.float8_e4m3fn).view(torch.int32)
    scale = torch.randint(100, 129, (experts, OUTPUTS, inputs // 32), generator=rng).to(DEVICE, torch.uint8)
    return [PackedMatrix(format, *pair, DTYPE) for pair in zip(codes, scale, strict=True)]


def packed(name: str, experts: int) -> PackedExperts:
    found = packed_experts(matrices(name, experts))
    assert found
    return found


class Layer:
    """Tokens that chose `chosen` of an expert's matrices in a format, and biases."""

    def __init__(self, name: str, tokens: int, chosen: int, experts: int) -> None:
        rng = torch.Generator().manual_seed(tokens)
        self.weight = packed(name, experts)
        inputs = self.weight.shape[2]
        self.experts_TK = torch.rand(tokens, experts, generator=rng).topk(chosen).indices.to(DEVICE)
        self.bias = torch.randn(experts, OUTPUTS, generator=rng).to(DEVICE, DTYPE)
        self.x_TI = torch.randn(tokens, inputs, generator=rng).to(DEVICE, DTYPE)
        self.x_SI = torch.randn(tokens * chosen, inputs, generator=rng).to(DEVICE, DTYPE)

    def expected(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x if len(x) != len(self.experts_TK) else x.repeat_interleave(self.experts_TK.shape[1], 0)
        chosen = self.experts_TK.flatten().clamp(max=self.weight.shape[0] - 1)
        weight = torch.stack([self.weight.dequantize(e) for e in range(self.weight.shape[0])]).double()
        y = torch.bmm(weight[chosen], rows.double()[:, :, None])[:, :, 0]
        return y if bias is None else y + bias[chosen].double()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def many(layer: Layer, x: Tensor, bias: Tensor | None) -> Tensor:
    """Of rows that are sorted by their experts, in the order of choices again."""
    order_S, ends_E = naive.order(layer.experts_TK, layer.weight.shape[0])
    top_k, is_each = layer.experts_TK.shape[1], len(x) != len(layer.experts_TK)
    rows = (x[order_S], None, 1) if is_each else (x, order_S, top_k)
    y_SN = fast.many_product(*rows, ends_E, layer.weight, bias)
    found = torch.empty_like(y_SN)
    found[order_S] = y_SN
    return found


@pytest.mark.parametrize("tokens", [1, 5, 64, 100])
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_multiply_as_the_definition_does(name: str, tokens: int) -> None:
    """Rows of tokens and of choices, few and sorted ones; with a bias and without."""
    layer = Layer(name, tokens, 2, 5)
    for x, bias in ((layer.x_TI, None), (layer.x_SI, layer.bias)):
        expected = layer.expected(x, bias)
        assert error(naive.product(x, layer.experts_TK, layer.weight, bias), expected) < TOLERANCE
        assert error(many(layer, x, bias), expected) < TOLERANCE
        if tokens <= op.MAX_TOKENS:
            places = torch.full((2 * tokens,), -1, device=DEVICE)
            found = fast.few_product(x, layer.experts_TK, layer.weight, bias, places_S=places)
            assert error(found, expected) < TOLERANCE
            assert places.tolist() == list(range(2 * tokens))


@pytest.mark.parametrize("together", [16, 32, 64])
def test_more_tokens_of_an_expert_than_a_tile_has_room_for(together: int) -> None:
    layer = Layer("mxfp4", 60, 2, 3)
    for x in (layer.x_TI, layer.x_SI):
        found = fast.few_product(x, layer.experts_TK, layer.weight, layer.bias, together=together)
        assert error(found, layer.expected(x, layer.bias)) < TOLERANCE


@pytest.mark.slow
def test_tiles_compute_alike() -> None:
    layer = Layer("nvfp4", 5, 3, 9)
    for tile in (fast.Tile(16, 64), fast.Tile(64, 256, stages=2), fast.Tile(32, 512, stages=1)):
        found = fast.few_product(layer.x_TI, layer.experts_TK, layer.weight, None, tile=tile)
        assert error(found, layer.expected(layer.x_TI, None)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_choices_of_no_expert_and_an_expert_twice(tokens: int) -> None:
    layer = Layer("fp8", tokens, 3, 4)
    layer.experts_TK[:, 2] = layer.experts_TK[:, 0]
    layer.experts_TK[:, 1] = 4
    expected = layer.expected(layer.x_TI, layer.bias).view(tokens, 3, -1)[:, [0, 2]]
    found = [many(layer, layer.x_TI, layer.bias)]
    if tokens <= op.MAX_TOKENS:
        found.append(fast.few_product(layer.x_TI, layer.experts_TK, layer.weight, layer.bias))
    for y in found:
        assert error(y.view(tokens, 3, -1)[:, [0, 2]], expected) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_both_products_keep_their_order(tokens: int) -> None:
    layer = Layer("mxfp4", tokens, 3, 5)
    y_SN, places_S = op.up(layer.x_TI, layer.experts_TK, layer.weight, layer.bias)
    assert error(y_SN[places_S], layer.expected(layer.x_TI, layer.bias)) < TOLERANCE
    x_SI = torch.empty_like(layer.x_SI)
    x_SI[places_S] = layer.x_SI
    found = op.down(x_SI, layer.experts_TK, layer.weight, None)[places_S]
    assert error(found, layer.expected(layer.x_SI, None)) < TOLERANCE


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_matrices(name: str) -> None:
    """Codes in their order for kernels and back; bytes as a plan counts them."""
    parts = matrices(name, 3)
    found = packed_experts(parts)
    assert found
    for expert, matrix in enumerate(parts):
        assert torch.equal(restored(arranged(matrix.codes, matrix.format), matrix.format), matrix.codes)
        assert torch.equal(found.dequantize(expert), dequantize(matrix))
    dtype = str(DTYPE).removeprefix("torch.")
    assert found.nbytes == expert_bytes(found.format, 3, OUTPUTS, found.shape[2], dtype)
    others = packed_experts(matrices(name, 3, seed=1))
    assert others
    both = joined([found, others])
    assert both and both.shape[1] == 2 * OUTPUTS
    expected = torch.cat([found.dequantize(1), others.dequantize(1)])
    assert torch.equal(both.dequantize(1), expected)


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4", "int4"])
def test_planted_errors_show(name: str) -> None:
    """Scales of two experts exchanged; codes of neighbouring words, of the two bytes of words, and of their nibbles."""
    layer = Layer(name, 5, 2, 3)
    right, expected = layer.weight, layer.expected(layer.x_TI, None)
    raw = right.codes.view(torch.uint8)
    wrong = {
        "scale": right.scale[[1, 0, 2]],
        "codes": raw.unflatten(2, (-1, 2)).flip(3).flatten(2).contiguous().view(torch.int16),
    }
    for field, value in wrong.items():
        layer.weight = replace(right, **{field: value})
        for found in (
            fast.few_product(layer.x_TI, layer.experts_TK, layer.weight, None), many(layer, layer.x_TI, None)
        ):  # fmt: skip
            assert error(found, expected) > 0.05, field
    if right.format.bits == 4:
        layer.weight = replace(right, codes=(raw << 4 | raw >> 4).view(torch.int16))
        assert error(fast.few_product(layer.x_TI, layer.experts_TK, layer.weight, None), expected) > 0.05


def test_what_is_not_kept() -> None:
    fp8, mxfp4 = matrices("fp8", 2), matrices("mxfp4", 2)
    assert packed_experts([fp8[0], mxfp4[0]]) is None
    large = replace(mxfp4[0], scale=torch.full_like(mxfp4[0].scale, MAX_EXPONENT + 1))
    assert packed_experts([large, mxfp4[1]]) is None
    assert packed_experts([replace(large, scale=large.scale - 1), mxfp4[1]])
    assert experts_unserved(WeightFormat("uint4", 128, has_zero=True), 256, "bfloat16")
    assert experts_unserved(WeightFormat("uint4", 32), 256, "bfloat16")
    assert experts_unserved(WeightFormat("e4m3"), 40, "bfloat16") == "40 inputs"
    assert "float16" in experts_unserved(WeightFormat("e4m3", 128), 256, "float16")
    for (codes, scales), groups in EXPERT_FORMATS.items():
        assert not any(experts_unserved(WeightFormat(codes, g, scales), 128, "bfloat16") for g in groups)


# ---- PTX, whose bits are moved here one instruction after the other --------------------------------------------------


def bf16(bits: int) -> Tensor:
    """Two values of a register."""
    return torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def executed(ptx: str, registers: dict[str, int]) -> dict[str, int]:
    """Run the few instructions that decode.py uses, on 32 bits."""

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    body = re.sub(r"\.reg[^;]*;", "", ptx.strip("{} "))
    for line in filter(None, map(str.strip, body.split(";"))):
        name, _, rest = line.partition(" ")
        to, *sources = (part.strip() for part in rest.split(","))
        x = [value(source) for source in sources]
        if name == "mov.b32":
            result = x[0]
        elif name in ("shl.b32", "shr.b32"):
            result = x[0] << x[1] if name == "shl.b32" else x[0] >> x[1]
        elif name == "and.b32":
            result = x[0] & x[1]
        elif name == "mul.lo.u32":
            result = x[0] * x[1]
        elif name == "lop3.b32":
            assert x[3] == 0xEA
            result = x[0] & x[1] | x[2]
        else:
            assert name == "fma.rn.bf16x2", name
            a, b, c = (bf16(bits).double() for bits in x)
            low, high = (a * b + c).bfloat16().view(torch.int16).tolist()
            result = (high & 0xFFFF) << 16 | low & 0xFFFF
        registers[to] = result & 0xFFFFFFFF
    return registers


def values_of(ptx: Any, parts: int, words: tuple[int, int], factor: float) -> Tensor:
    """Return [part, word]."""
    bits = int(torch.tensor(factor).bfloat16().view(torch.int16)) & 0xFFFF
    registers = {f"${parts}": words[1] << 16 | words[0], f"${parts + 1}": bits << 16 | bits}
    found = executed(str(ptx.value), registers)
    return torch.stack([bf16(found[f"${part}"]) for part in range(parts)]).double()


@pytest.mark.parametrize(("kind", "bits"), [("e4m3", 8), ("e2m1", 4), ("uint4", 4)])
def test_ptx_moves_the_right_bits(kind: str, bits: int) -> None:
    """Every code at every place of a word, beside others that must not reach into it."""
    format, parts = WeightFormat(kind, 32), 16 // bits
    ptx = {"e4m3": decode.E4M3_PTX, "e2m1": decode.E2M1_PTX, "uint4": decode.UINT4_PTX}[kind]
    codes = [code for code in range(1 << bits) if kind != "e4m3" or code & 127 != 127]
    rng, run = torch.Generator().manual_seed(0), run_of(format)
    for code in codes:
        row = torch.tensor(codes)[torch.randint(len(codes), (32,), generator=rng)]
        row[::3] = code
        natural = torch.zeros(1, 32 * bits // 32, dtype=torch.int64)
        for i, x in enumerate(row.tolist()):
            natural[0, i * bits // 32] |= x << (i * bits % 32)
        words = arranged(natural.to(torch.int32), format)[0].tolist()
        if kind == "e4m3":
            value, factor = row.to(torch.uint8).view(torch.float8_e4m3fn).double(), 2.0**120
        elif kind == "e2m1":
            value, factor = torch.tensor(E2M1)[row].double(), 2.0**126
        else:
            value, factor = row.double() - 8, 1.0
        for first in range(0, len(words), 2):
            pair = words[first] & 0xFFFF, words[first + 1] & 0xFFFF
            found = values_of(ptx, parts, pair, factor)
            for place in range(2):
                word = first + place
                expected = value[word // run * run * parts + word % run :: run][:parts]
                assert torch.equal(found[:, place], expected), (kind, code, word)


COMPILED = """
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nibble.kernels import GPU, next_power_of_2
from nibble.kernels.experts import triton as fast
from nibble.kernels.experts.matrices import PackedExperts
from nibble.kernels.weight_formats import WeightFormat, parts_of

LARGE = {90: GPU(90, 132, 232_448), 89: GPU(89, 142, 101_376)}
FP8, MXFP4 = WeightFormat("e4m3", 128), WeightFormat("e2m1", 32, "e8m0")
FP8_ROWS, MXFP8 = WeightFormat("e4m3"), WeightFormat("e4m3", 32, "e8m0")
NVFP4, INT4 = WeightFormat("e2m1", 16, "e4m3", has_global=True), WeightFormat("uint4", 128)
for arch, format, shape, top_k in ((90, FP8, (128, 1536, 2048), 8), (90, MXFP4, (32, 5760, 2880), 4),
                                   (90, NVFP4, (128, 1536, 2048), 8), (89, MXFP4, (32, 5760, 2880), 4),
                                   (90, INT4, (128, 1536, 2048), 8), (89, FP8, (128, 1536, 2048), 8),
                                   (90, FP8_ROWS, (24, 768, 640), 4), (90, MXFP8, (24, 768, 640), 4)):
    experts, outputs, inputs = shape
    words = torch.empty(experts, outputs, inputs // parts_of(format), dtype=torch.int16, device="meta")
    packed = PackedExperts(format, words, words, torch.bfloat16)
    fixed = dict(EXPERTS=experts, OUTPUTS=outputs, INPUTS=inputs, TOP_K=top_k, bias=None, PDL=arch >= 90)
    for name, value in zip(("CODES", "GROUP", "SCALES", "PARTS", "RUN"), fast._format_of(packed)):
        fixed[name] = value
    types = {"x": "*bf16", "out": "*bf16", "scale": "*u8" if format.scales else "*bf16", "experts": "*i64",
             "order": "*i64", "ends": "*i32", "weight": "*i16", "codes": "*i16"}
    if format.has_global:
        types["global_scale"] = "*fp32"
    else:
        fixed["global_scale"] = None
    gpu = LARGE[arch]
    for kernel, rows in ((fast.few_kernel, 1), (fast.few_kernel, 64), (fast.many_kernel, 128)):
        if kernel is fast.many_kernel:
            tile, own = fast.many_tile(packed, rows, gpu), dict(E=next_power_of_2(experts), BM=rows)
        else:
            tile = fast.packed_tile(packed, min(experts, rows * top_k), 16, gpu)
            own = dict(EACH=False, SINGLE=rows == 1, DISTINCT=rows == 1, M=max(rows, 16), BM=16, places=None,
                       K=next_power_of_2(top_k))
        known = fixed | own | dict(BN=tile.outputs, BI=tile.inputs, STAGES=tile.stages)
        names = kernel.arg_names
        signature = {n: "constexpr" if n in known else types.get(n, "i32") for n in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
                   if n not in known and n not in ("tokens", "rows")}
        source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in known.items()}, aligned)
        options = dict(num_warps=tile.warps, num_stages=tile.stages)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        ptx = compiled.asm["ptx"]
        # Of loops, whether the last product that reads registers ends before the next step.
        waits = []
        for branch in re.finditer(r"bra\\s+([$]L\\w+);", ptx):
            _, product, rest = ptx[ptx.index(branch[1] + ":"):branch.start()].rpartition("wgmma.mma_async")
            if product and "}, {" in rest.partition(";")[0]:
                waits.append("wgmma.wait_group.sync.aligned 0" in rest)
        print(arch, str(format).replace(" ", "_"), rows, compiled.metadata.shared, gpu.memory, tile.stages,
              ptx.count("cp.async.c"), ptx.count("mma"), waits.count(True), waits.count(False))
"""


@pytest.mark.slow
def test_kernels_compile_for_gpus_and_load_ahead() -> None:
    """As for a GPU, which none is needed for: within its shared memory, weights in flight, on the tensor cores.

    Registers that products of SM90 read are written by the next step, so it must not begin before they have ended.
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED],
        cwd=Path(nibble.__file__).parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 24
    for arch, _, rows, shared, memory, stages, copies, products, waiting, overtaken in lines:
        assert int(shared) <= int(memory), (arch, rows)
        assert int(products) > 0
        assert arch == "89" or (int(stages) >= 3 and int(copies) >= 3), (arch, rows, stages)
        assert overtaken == "0" and (int(waiting) > 0 or arch == "89" or rows != "128"), (arch, rows)
