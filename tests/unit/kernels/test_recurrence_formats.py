"""Formats of recurrent states: bytes that stay what they are, errors, and sizes that plans reckon with."""

from __future__ import annotations

import pytest
import torch

from nibble.kernels.recurrence import BLOCK, layer_state
from nibble.kernels.recurrence.formats import decode, encode, planes
from nibble.kernels.state_formats import BYTES, FORMATS, IN_FLIGHT, bytes_per_layer, plane_shapes, state_bytes
from nibble.model_spec import RecurrentGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-4, "int8": 0.505 / 127}
"""Of a value relative to itself (bf16, fp8), or to its row's largest."""
GROUPS = (
    RecurrentGroup("delta", "delta", (0, 1), 4, 24, 32, 2, conv_channels=160, conv_taps=4),
    RecurrentGroup("kda", "delta", (0,), 4, 24, 32, 4, key_decay=True, conv_channels=160, conv_taps=4),
    RecurrentGroup("lightning", "decay", (0,), 4, 24, 32, 4),
    RecurrentGroup("mamba", "selective", (0,), 1, 48, 16, 1, conv_channels=48, conv_taps=4),
    RecurrentGroup("conv", "conv", (0,), conv_channels=64, conv_taps=3),
)


def values(seed: int = 0) -> torch.Tensor:
    """Rows of all magnitudes, of zeros, with one large value, and too small for a scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 3, 50, 33, generator=generator)
    x *= 10 ** torch.empty(64, 3, 50, 1).uniform_(-12, 12, generator=generator)
    x[0, 0], x[1, 1, 0] = 0, 1e-38
    x[2, :, :, 0] *= 1e4
    return x


@pytest.mark.parametrize("format", FORMATS)
def test_decoded_values_are_encoded_as_the_same_bytes(format: str) -> None:
    for seed in range(3):
        first = encode(format, values(seed))
        again = encode(format, decode(format, first))
        assert all(
            torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(first, again, strict=True)
        )


@pytest.mark.parametrize(
    "max_code", sorted({format.max_code for format in FORMATS.values() if format.max_code})
)
def test_every_scale_is_what_its_row_is_encoded_with_again(max_code: float) -> None:
    largest = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)  # all in [1, 2)
    scale = largest / max_code
    assert torch.equal((scale * max_code) / max_code, scale)
    assert float((largest / scale - max_code).abs().max()) < 1e-4


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_errors(format: str) -> None:
    x = values()[3:]
    y, largest = decode(format, encode(format, x)), x.abs().amax(-1, keepdim=True)
    # FP8 has subnormal codes below 2^-6, whose step is 2^-9.
    bound = {"int8": largest, "fp8": x.abs() + largest * 2.0**-5 / 448}.get(format, x.abs())
    assert bool(((x - y).abs() <= ERRORS[format] * bound).all())
    assert format == "fp32" or float(((x - y).abs() / bound).max()) > ERRORS[format] / 3


def test_int8_codes() -> None:
    codes, scale = encode(
        "int8", torch.tensor([[127.0, -127.0, 2.5, 3.5, -2.5, 0.4], [-1.0, 1.0, 0, 0, 0, 0]])
    )
    assert codes.tolist() == [[127, -127, 2, 4, -2, 0], [-127, 127, 0, 0, 0, 0]] and scale[0] == 1
    assert int(encode("int8", values())[0].min()) == -127


def test_fp8_codes_fill_their_range() -> None:
    codes, _ = encode("fp8", values()[3:])
    assert bool((codes.float().abs().amax(-1) == 448).all())


@pytest.mark.parametrize("format", FORMATS)
def test_planes_are_what_encoding_returns(format: str) -> None:
    tensors, codes = planes(format, 64, 3, 50, 33), encode(format, values())
    assert [(x.shape, x.dtype) for x in tensors] == [(x.shape, x.dtype) for x in codes]
    assert bytes_per_layer(format, 3, 50, 33) * 64 == sum(x.nbytes for x in tensors)
    assert not any(x.float().any() for x in tensors)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("drafts", [0, 3, 16, 17])
def test_slots_have_the_bytes_that_plans_reckon_with(
    group: RecurrentGroup, format: str, dtype: torch.dtype, drafts: int
) -> None:
    state = layer_state(group, 5, format, dtype, drafts, "cpu")
    tensors = (*state.planes, state.keys_SPGK, state.updates_SPHV, state.decays, state.inputs_SPC)
    assert state_bytes(group, format, str(dtype).removeprefix("torch."), drafts) * 5 == sum(
        x.nbytes for x in tensors
    )
    assert state.inputs_SPC.shape[1] == (
        group.conv_taps - 1 + max(drafts, IN_FLIGHT) if group.conv_channels else 0
    )
    assert state.keys_SPGK.shape[1] == (0 if group.rule == "conv" else {0: 16, 3: 32, 16: 32, 17: 48}[drafts])


def test_the_matrix_is_most_of_a_state() -> None:
    """Of a layer as large as models have: 32 heads of 128 x 128, with 16 heads of keys."""
    group = RecurrentGroup("delta", "delta", (0,), 32, 128, 128, 16)
    sizes = {format: state_bytes(group, format, "bfloat16", 0) for format in FORMATS}
    matrix = 32 * 128 * 128
    block = {
        format: BLOCK * (16 * 128 * 2 + 32 * 128 * (4 if format == "fp32" else 2) + 32 * 4)
        for format in FORMATS
    }
    scales = 32 * 128 * 4
    assert sizes == {
        "fp32": 4 * matrix + block["fp32"],
        "bf16": 2 * matrix + block["bf16"],
        "fp8": matrix + scales + block["fp8"],
        "int8": matrix + scales + block["int8"],
    }


def test_sizes_of_dtypes() -> None:
    assert {name: torch.empty(0, dtype=getattr(torch, name)).element_size() for name in BYTES} == BYTES


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="'fp4'; there are fp32, bf16, fp8, int8"):
        plane_shapes("fp4", 1, 1, 1, 1)
    with pytest.raises(ValueError, match="float64"):
        state_bytes(GROUPS[0], "fp32", "float64", 0)
    with pytest.raises(ValueError, match="4 heads cannot share 3"):
        state_bytes(RecurrentGroup("odd", "delta", (0,), 4, 8, 8, 3), "fp32", "float32", 0)
