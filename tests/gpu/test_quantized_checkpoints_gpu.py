"""Quantised checkpoints of every spelling on a GPU: products by the definition, logits beside those of unpacked weights.

In models this small BF16 itself moves logits by a hundredth, so logits of dequantised weights are held against those of
packed products in a model that is in float32 otherwise. All in BF16, each product is held against its definition, and
logits against those in float32, which unpacked weights miss by as much. How far they are off unpacked weights, and
products by the definition, is printed: rounding alone is up to 0.012 (one H200, 2026-11-29).

Skipped where there is no GPU or no `humming-kernels`, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.config import Config
from nibble.engine.plan import plan_cache
from nibble.kernels import import_problem
from nibble.kernels.quantized_linear import expected_product, humming, naive
from nibble.kernels.quantized_linear.matrix import PackedMatrix
from nibble.kernels.weight_formats import PACKAGE, Activations
from nibble.models import checkpoint
from nibble.models.activations import AUTO, FULL
from nibble.models.experts import ExpertMatrices, has_packed_experts, packed_matrices
from nibble.models.linear import (
    MergedLinear,
    QuantizedLinear,
    check_kernels,
    prepare_linears,
    prepare_quantized,
    quantized_layers,
)
from nibble.models.observations import observe_model
from nibble.models.quantization import Handling
from nibble.models.refusals import load_config

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(import_problem(PACKAGE)), reason="needs a GPU and humming-kernels"
)
FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
UNPACKED = {"ct_w4a16_actorder", "gptq_asym_actorder", "gptq_sym_actorder"}
"""Inputs out of order."""
FP8_ACTIVATIONS = (
    "fp8_block", "fp8_block_ue8m0", "ct_fp8_block", "ct_fp8_channel_dynamic", "modelopt_fp8_channel",
    "ct_fp8_tensor_static", "modelopt_fp8",
)  # fmt: skip
TOLERANCE = 1e-2
"""Largest error of a product, norm over norm."""
TIMES = 2.0
"""How many times as far as unpacked weights in BF16 logits may be off."""
LENGTHS = (5, 17)
"""Few tokens have kernels of their own."""
RANGES = (16, 64)
"""Numbers of rows that have kernels of their own, as each takes seconds to compile."""


def read(name: str, handling: Handling, activations: str = FULL, dtype: str = "bfloat16") -> Any:
    folder = str(FIXTURES / name)
    model_spec = observe_model(folder, dtype, 64)
    config = load_config(folder)
    return checkpoint.load(config, model_spec, dtype, "cuda", handling=handling, activations=activations)


def logits(model: Any) -> list[Tensor]:
    """Of prompts of several lengths, each [T, V]."""
    ids = torch.randint(1, 60, (1, max(LENGTHS)), generator=torch.Generator().manual_seed(1)).cuda()
    model.eval().set_attn_implementation("eager")
    with torch.inference_mode():
        return [model(ids[:, :length], use_cache=False).logits[0].float() for length in LENGTHS]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of the usual token: one of whose experts nearly as good ones are chosen computes something else."""
    errors = [(x - y).norm(dim=-1) / y.norm(dim=-1) for x, y in zip(found, expected, strict=True)]
    return max(float(one.median()) for one in errors)


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming, "RANGES", RANGES)


def product_errors(model: Any) -> list[float]:
    """Prepare a model, and return how far each of its packed products is off, of prompts of all lengths."""
    prepare_linears(model)
    matrices, errors = [layer.matrix for layer in quantized_layers(model)], list[float]()
    prepare_quantized(model)
    check_kernels(model, max(LENGTHS))

    def compare(matrix: PackedMatrix, _: Any, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        expected = expected_product(inputs[0].reshape(-1, matrix.shape[1]), matrix).float()
        errors.append(float((y.float().view_as(expected) - expected).norm() / expected.norm()))

    hooks = [
        layer.register_forward_hook(partial(compare, matrix))
        for layer, matrix in zip(quantized_layers(model), matrices, strict=True)
    ]
    logits(model)
    for hook in hooks:
        hook.remove()
    assert len(errors) == len(LENGTHS) * len(matrices)
    return errors


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_unpacked_weights(name: str) -> None:
    exact = logits(read(name, Handling.UNPACKED, dtype="float32"))
    unpacked, model = logits(read(name, Handling.UNPACKED)), read(name, Handling.PACKED)
    assert bool(quantized_layers(model) or packed_matrices(model)) == (name not in UNPACKED)
    by_definition = logits(read(name, Handling.PACKED))
    product, found = max(product_errors(model), default=0.0), logits(model)
    packed, others = error(found, exact), (error(found, one) for one in (unpacked, by_definition))
    print(
        f"{name}: products {product:.1e}; logits off float32 {packed:.1e} and {error(unpacked, exact):.1e} unpacked,",
        "off unpacked ones {:.1e}, off the definition {:.1e}".format(*others),
    )
    assert product <= TOLERANCE and packed <= TIMES * error(unpacked, exact)


def prepare(model: Any) -> Any:
    """The model with kernels for its packed products."""
    prepare_linears(model)
    prepare_quantized(model)
    check_kernels(model, max(LENGTHS))
    return model


def float32_around(model: Any) -> Any:
    """The model with all in float32 but its packed products and experts, whose inputs and outputs have 16 bits."""
    layers, experts = quantized_layers(model), [x for x in model.modules() if has_packed_experts(x)]
    for module in (*layers, *experts):
        dtype = packed_matrices(module)[0].dtype if module in experts else module.dtype
        module.register_forward_pre_hook(lambda _, inputs, to=dtype: (inputs[0].to(to), *inputs[1:]))
        module.register_forward_hook(lambda _, inputs, y: y.float())
    # Products of merged layers are no modules of the model.
    merged = {x.product.layer for x in model.modules() if isinstance(x, MergedLinear)}
    for layer in merged - {*layers}:
        layer.float()
    for module in model.modules():
        if module in layers or module in experts or isinstance(module, ExpertMatrices):
            continue
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.float()
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in (torch.bfloat16, torch.float16):
                module._buffers[name] = buffer.float()
    return model


@pytest.mark.parametrize("name", sorted({*NAMES} - UNPACKED))
def test_logits_are_those_of_dequantised_weights(name: str) -> None:
    """With all else in float32, whose rounding hides nothing; in float16 where kernels take that."""
    exact, errors = logits(read(name, Handling.UNPACKED, dtype="float32")), list[float]()
    for dtype in ("float16", "bfloat16"):
        model = read(name, Handling.PACKED, dtype=dtype)
        if quantized_layers(model) or packed_matrices(model):
            errors.append(error(logits(float32_around(prepare(model))), exact))
    print(f"{name}: {', '.join(f'{one:.1e}' for one in errors)}")
    # In bfloat16 inputs and outputs of products are rounded by up to two thirds of that.
    assert errors and min(errors) <= TOLERANCE and max(errors) <= 1.5 * TOLERANCE


def quantise(x: Tensor, layer: QuantizedLinear) -> Tensor:
    """Inputs of a layer in float32, with the errors that the definition gives them in FP8."""
    activations, input_scale = layer.activations, layer.input_scale
    codes, scale = naive.quantize_activations(x.to(layer.dtype), activations, input_scale)
    groups = codes.float().unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale.unsqueeze(-1)).flatten(-2)


@pytest.mark.parametrize("name", FP8_ACTIVATIONS)
def test_logits_are_those_of_dequantised_weights_and_quantised_inputs(name: str) -> None:
    """With the tested model's own inputs at each product, quantised by the definition: codes differ where an input does in
    a last bit, and so on through the model. Each product is held against its definition besides, of the same inputs."""
    model, reference = read(name, Handling.PACKED, AUTO), read(name, Handling.UNPACKED, dtype="float32")
    product, inputs = max(product_errors(read(name, Handling.PACKED, AUTO))), dict[str, deque[Tensor]]()
    for place, module in prepare(model).named_modules():
        layer = module.product.layer if isinstance(module, MergedLinear) else module
        if isinstance(layer, QuantizedLinear) and layer.activations is not Activations.NONE:
            inputs[place] = deque()
            module.register_forward_pre_hook(
                lambda _, x, layer=layer, to=inputs[place]: to.append(quantise(x[0], layer))
            )
    for place in inputs:
        reference.get_submodule(place).register_forward_pre_hook(
            lambda _, x, source=inputs[place]: (source.popleft(),)
        )
    logits_error = error(logits(float32_around(model)), logits(reference))
    print(f"{name}: products {product:.1e}, logits {logits_error:.1e} with FP8 inputs")
    assert inputs and not any(inputs.values())
    assert product <= TOLERANCE and logits_error <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_the_bytes_on_the_device(name: str) -> None:
    plan = plan_cache(Config(model=str(FIXTURES / name), dtype="bfloat16", device="cuda"))
    model = read(name, Handling.UNPACKED if name in UNPACKED else Handling.PACKED)
    packed = [*(x.matrix for x in quantized_layers(model)), *(x.matrices for x in packed_matrices(model))]
    assert all(x.is_cuda for x in model.parameters())
    size = sum(x.nbytes for x in model.parameters()) + sum(matrix.nbytes for matrix in packed)
    assert plan.model_spec.weight_bytes == size
