"""The kernel that attends over exact pages, against its definition, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)

import nibble
from nibble import formats
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.near import naive
from nibble.kernels.near import triton as fast
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 2e-2 if DEVICE == "cuda" else 1e-5
LENS = (5, 64, 0, 130, 200, 1)
pytestmark = pytest.mark.usefixtures("scalars_bound_loops")


def pages(heads: int, dim: int, page: int, seed: int) -> Paged:
    values = torch.randn(64, page, heads, dim, generator=torch.Generator().manual_seed(seed)).to(
        DEVICE, DTYPE
    )
    values[0] = 1e6  # nobody sees it
    plain = formats.plain("bfloat16" if DTYPE is torch.bfloat16 else "float32")
    return Paged(plain, dim, (values.transpose(1, 2),), torch.ones((), device=DEVICE))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "extra"),
    [
        (4, 2, 32, 16, {}),
        (8, 1, 64, 64, {"softcap": 5.0}),
        (6, 2, 80, 16, {"sinks": True}),
        (40, 2, 64, 32, {"mean": True}),
    ],
)
@pytest.mark.parametrize("window", [1, 64, 100])
def test_it_is_the_definition(
    heads: int, kv_heads: int, dim: int, page: int, extra: dict[str, float], window: int
) -> None:
    random = torch.Generator().manual_seed(7)
    k, v = pages(kv_heads, dim, page, 1), pages(kv_heads, dim, page, 2)
    table = torch.stack([torch.randperm(63, generator=random)[: -(-256 // page)] + 1 for _ in LENS])
    # Nobody sees what lies before the window.
    for row, length in zip(table, LENS, strict=True):
        row[: max(length - window, 0) // page] = 0
        row[-(-length // page) :] = 0
    q = torch.randn(len(LENS), heads, dim, generator=random).to(DEVICE, DTYPE)
    counts = [1] * len(LENS)
    batch = AttentionBatch.from_lens(Phase.DECODE, 0, counts, LENS, table.int().to(DEVICE))
    sinks = torch.randn(heads, generator=random).to(DEVICE) if extra.get("sinks") else None
    params = AttentionParams(dim**-0.5, window, extra.get("softcap"), sinks)
    mean = torch.randn(kv_heads, dim, generator=random).to(DEVICE) if extra.get("mean") else None
    expected = naive.near_attention(q, k, v, batch, params, mean)
    found = fast.near_attention(q, k, v, batch, params, mean)
    assert not found.values_THD.isnan().any() and (found.values_THD[2] == 0).all()
    assert found.lse_HT[:, 2].isneginf().all()
    live = torch.tensor([length > 0 for length in LENS], device=DEVICE)
    assert (found.values_THD - expected.values_THD).abs().max() < TOLERANCE
    assert (found.lse_HT - expected.lse_HT)[:, live].abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "counts"),
    [
        (4, 1, 32, 16, (4, 4, 4, 4, 4, 4)),
        (6, 2, 64, 64, (3, 8, 1, 2, 5, 1)),
        (40, 2, 80, 16, (8, 8, 8, 8, 8, 8)),
    ],
)
@pytest.mark.parametrize("window", [3, 100])
def test_a_few_queries_of_each_request(
    heads: int, kv_heads: int, dim: int, page: int, counts: tuple[int, ...], window: int
) -> None:
    """Some requests have fewer tokens than queries, and one has none: those rows are padding."""
    random = torch.Generator().manual_seed(7)
    k, v = pages(kv_heads, dim, page, 1), pages(kv_heads, dim, page, 2)
    table = torch.stack([torch.randperm(63, generator=random)[: -(-256 // page)] + 1 for _ in LENS])
    for row, length, count in zip(table, LENS, counts, strict=True):
        row[: max(length - count - window + 1, 0) // page] = 0
        row[-(-length // page) :] = 0
    q = torch.randn(sum(counts), heads, dim, generator=random).to(DEVICE, DTYPE)
    batch = AttentionBatch.from_lens(Phase.VERIFY, 0, counts, LENS, table.int().to(DEVICE))
    params = AttentionParams(dim**-0.5, window, None, torch.randn(heads, generator=random).to(DEVICE))
    mean = torch.randn(kv_heads, dim, generator=random).to(DEVICE)
    expected = naive.near_attention(q, k, v, batch, params, mean)
    found = fast.near_attention(q, k, v, batch, params, mean)
    pairs = zip(LENS, counts, strict=True)
    seen = torch.tensor([length - count + i >= 0 for length, count in pairs for i in range(count)])
    assert (~seen).sum() > 0 and (found.values_THD[~seen] == 0).all()
    assert found.lse_HT[:, ~seen].isneginf().all()
    assert (found.values_THD - expected.values_THD)[seen].abs().max() < TOLERANCE
    assert (found.lse_HT - expected.lse_HT)[:, seen].abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), [(5, 6, 2, 80), (70, 8, 8, 64), (1, 4, 1, 32)]
)
def test_log_sum_exps_without_the_mean(tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    random = torch.Generator().manual_seed(3)
    q = torch.randn(heads, tokens, dim, generator=random).to(DEVICE, DTYPE).transpose(0, 1)
    mean = torch.randn(kv_heads, dim, generator=random).to(DEVICE)
    part = PartialAttention(q.float(), torch.randn(heads, tokens, generator=random).to(DEVICE))
    expected = naive.without_mean(part, q, mean, 0.3)
    found = fast.without_mean(part, q, mean, 0.3)
    assert found.values_THD is part.values_THD and (expected.lse_HT - part.lse_HT).abs().max() > 0.1
    assert (found.lse_HT - expected.lse_HT).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "extra"),
    [
        (4, 2, 32, 16, {}),
        (8, 1, 64, 64, {"softcap": 5.0, "far": True}),
        (6, 2, 80, 16, {"sinks": True, "far": True}),
        (8, 2, 64, 32, {"mean": True, "far": True}),
    ],
)
@pytest.mark.parametrize("window", [1, 21, 64])
def test_prompts_read_what_is_new_from_the_model_and_the_rest_from_exact_pages(
    heads: int, kv_heads: int, dim: int, page: int, extra: dict[str, float], window: int
) -> None:
    random = torch.Generator().manual_seed(11)
    k, v = pages(kv_heads, dim, page, 1), pages(kv_heads, dim, page, 2)
    news, lens = (37, 5, 1, 70), (37, 150, 64, 200)
    table = torch.stack([torch.randperm(63, generator=random)[: -(-256 // page)] + 1 for _ in lens])
    # Nobody sees what lies before the window, nor new tokens in their pages.
    for row, new, length in zip(table, news, lens, strict=True):
        row[: max(length - new - window + 1, 0) // page] = 0
        row[-(-(length - new) // page) :] = 0
    q = torch.randn(sum(news), heads, dim, generator=random).to(DEVICE, DTYPE)
    streams = {
        name: torch.randn(kv_heads, sum(news), dim, generator=random).to(DEVICE, DTYPE).transpose(0, 1)
        for name in "kv"
    }
    batch = AttentionBatch.from_lens(Phase.EXTEND, 0, news, lens, table.int().to(DEVICE))
    batch = replace(batch, exact_table_BN=table.int().to(DEVICE))
    sinks = torch.randn(heads, generator=random).to(DEVICE) if extra.get("sinks") else None
    params = AttentionParams(dim**-0.5, window, extra.get("softcap"), sinks)
    mean = torch.randn(kv_heads, dim, generator=random).to(DEVICE) if extra.get("mean") else None
    far = None
    if extra.get("far"):
        lse = torch.randn(heads, sum(news), generator=random).to(DEVICE) + 3
        lse[:, :3] = float("-inf")  # of queries that see no far token, whose values are anything
        values = torch.randn(sum(news), heads, dim, generator=random).to(DEVICE, DTYPE)
        values[:3] = float("nan")
        far = PartialAttention(values, lse)
    arguments = (q, streams, k, v, batch, params, mean)
    expected = naive.near_prompt_attention(*arguments, far)
    assert expected.isfinite().all()
    for tile in (None, fast.PromptTile(16, 16, 4, 1)):
        found = fast.near_prompt_attention(*arguments, far, tile=tile)
        assert found.dtype == q.dtype and (found.float() - expected.float()).abs().max() < TOLERANCE
    if far:  # rows that see no far token may be left out
        for first in (1, 3):
            last = PartialAttention(far.values_THD[first:], far.lse_HT[:, first:])
            assert torch.equal(
                fast.near_prompt_attention(*arguments, last), fast.near_prompt_attention(*arguments, far)
            )
            assert torch.equal(naive.near_prompt_attention(*arguments, last), expected)


COMPILED = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nibble.kernels.near import triton as near

kernel = near.near_prompt_kernel
names = kernel.arg_names
pointers = {"table": "*i32", "cu_seqlens_q": "*i32", "seq_lens": "*i32", "k_mean": "*fp32", "far_lse": "*fp32"}
for arch, dim, dtype, group in ((89, 128, "bf16", 4), (89, 256, "bf16", 2), (90, 128, "fp32", 4), (90, 64, "bf16", 1)):
    tile = near.prompt_tile(dim * {"bf16": 2, "fp32": 4}[dtype], group)
    fixed = dict(sinks=None, WINDOW=64, SOFTCAP=False, GROUP=group, K_DIM=dim, V_DIM=dim, PAGE=64, M=tile.rows,
                 K_WIDTH=dim, V_WIDTH=dim, N=tile.keys)
    floats = dict.fromkeys(("q", "new_k", "new_v", "k", "v", "far", "out"), "*" + dtype)
    known = {**pointers, **floats, "scale": "fp32", "softcap": "fp32"}
    signature = {n: "constexpr" if n in fixed else known.get(n, "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if n not in fixed and signature[n] != "fp32" and not n.startswith(("far_lse_", "far_first"))}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in fixed.items()}, aligned)
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    single = re.findall(r"ld.global[^;]*b16|cp.async.ca[^;]*, 0x[24],", compiled.asm["ptx"])
    print(arch, dim, dtype, compiled.metadata.shared, len(single))
"""


@pytest.mark.slow
def test_the_kernel_of_prompts_fits_into_small_gpus_and_loads_whole_rows() -> None:
    """Compiled as for a GPU, which none is needed for: shared memory of Ada, and no load of a single value."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    source = Path(nibble.__file__).parent.parent
    run = subprocess.run(command, cwd=source, env=environment, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 4
    for arch, dim, dtype, shared, single in lines:
        assert int(shared) <= 99 << 10 and single == "0", (arch, dim, dtype)
