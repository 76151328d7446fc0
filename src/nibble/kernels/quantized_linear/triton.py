"""Activations in FP8, in Triton: scales and codes of groups of inputs, or of whole tokens.

Inductor's own code of the definition takes ten times as long for thousands of tokens.

Shape suffixes: T tokens, K inputs, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, next_power_of_2
from nibble.kernels.codecs import small_floats as floats
from nibble.kernels.codecs.fp8 import encode_e4m3
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.quantized_linear.naive import TINY
from nibble.kernels.weight_formats import E4M3_MAX

VALUES, THREAD_VALUES, MOST_WARPS = 2048, 16, 16
"""Values of a program, but where a group has more; of each thread; and warps of a program."""


@triton.jit(do_not_specialize=["tokens"])
def quantize_activations_kernel(
    x, codes, scale, stride, tokens, groups, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    TINY: tl.constexpr, MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantise GROUPS groups of a token. Grid: T, groups / GROUPS."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i = tl.arange(0, BLOCK)
    at = group[:, None] * GROUP + i[None, :]
    live = (group[:, None] < groups) & (i[None, :] < GROUP)
    wait_for_inputs(PDL)
    value = tl.load(x + token * stride + at, mask=live, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(value), 1), TINY)
    # As the definition has it to the bit: a plain division may be off in the last place.
    of_group = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    if floats.HAS_PTX:
        # The conversion saturates, and keeps what is no number.
        scaled = tl.div_rn(value, tl.broadcast_to(of_group[:, None], value.shape))
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = encode_e4m3(value, of_group[:, None])[0]
    tl.store(codes + token * (groups * GROUP) + at, code, mask=live)
    tl.store(scale + group * tokens + token, of_group, mask=group < groups)


def quantize_activations(x_TK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes, E4M3 [T, K], and float32 scales [T, G], as the definition does; scales of a group lie together.

    A value that is no number is one of the codes alone, where by the definition all of its group are.

    Args:
        x_TK: Inputs.
        group: Inputs that share a scale, of which a token has whole groups.
    """
    (tokens, columns), options = x_TK.shape, launch_options(gpu_of(x_TK.device))
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    groups, block = columns // group, next_power_of_2(group)
    of_program = min(max(VALUES // block, 1), next_power_of_2(groups))
    codes_TK = x_TK.new_empty(tokens, columns, dtype=torch.float8_e4m3fn)
    scale_TG = x_TK.new_empty(groups, tokens, dtype=torch.float32).T
    warps = min(max(of_program * block // (32 * THREAD_VALUES), 1), MOST_WARPS)
    if tokens:
        quantize_activations_kernel[(tokens, cdiv(groups, of_program))](
            x_TK, codes_TK.view(torch.uint8), scale_TG, x_TK.stride(0), tokens, groups, group, of_program, block,
            TINY, E4M3_MAX, bool(options), num_warps=warps, **options,
        )  # fmt: skip
    return codes_TK, scale_TG
