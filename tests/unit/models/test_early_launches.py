"""Kernels that inductor makes wait for those in front of them, all of them; generated for an SM90 that is absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.virtualized import V

import nibble
from nibble.models.forward import _always_waiting

GENERATED = """
import re, sys, types
from unittest import mock
import torch.nn.functional as F
import torch.utils._triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

gpu = types.SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block_optin=232448, shared_memory_per_block=49152, L2_cache_size=50 << 20, gcnArchName="", uuid="x")
for name, value in {
    "cuda.get_device_capability": lambda *_, **__: (9, 0), "cuda.get_device_properties": lambda *_, **__: gpu,
    "cuda.current_device": lambda: 0, "cuda.device_count": lambda: 1, "cuda.is_available": lambda: True,
    "cuda._lazy_init": lambda: None, "version.cuda": "12.9", "utils._triton.triton_hash_with_backend": lambda: "x",
}.items():
    mock.patch(f"torch.{name}", value).start()
import torch._inductor.config
import torch._inductor.graph
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from nibble.models import forward

library = torch.library.Library("early", "DEF")
library.define("attend(Tensor q) -> Tensor")
torch.library.register_fake("early::attend", lambda q: q.new_empty(q.shape), lib=library)


def norm(x):
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()


def layer(h, w, router, bias):
    # Which groups of experts are chosen is marked in zeros, as DeepSeek's router does.
    h = h + torch.ops.early.attend(norm(h) @ w) @ w
    x = norm(h)
    scores = F.linear(x.float(), router.float()).sigmoid() + bias
    groups = scores.view(-1, 8, 32).topk(2, dim=-1)[0].sum(-1)
    chosen = torch.zeros_like(groups).scatter(1, torch.topk(groups, k=4, dim=-1, sorted=False)[1], 1)
    mask = chosen.unsqueeze(-1).expand(-1, 8, 32).reshape(-1, 256)
    best = torch.topk(torch.where(mask > 0, scores, 0.0), k=8, dim=-1, sorted=False)[1]
    y = torch.ops.early.attend((x.unsqueeze(1) * scores.gather(1, best).unsqueeze(-1)).bfloat16())
    return h + y.sum(1).bfloat16()


def model(h, *weights):
    for i in range(0, len(weights), 3):
        h = layer(h, *weights[i : i + 3])
    return h


if sys.argv[1] == "waiting":
    assert forward._early_launches()
shapes = [((16, 64), torch.bfloat16), *[((64, 64), torch.bfloat16), ((256, 64), torch.bfloat16), ((256,), torch.float32)] * 3]
with FakeTensorMode(allow_non_fake_inputs=True) as fake:
    inputs = [torch.empty(shape, device="cuda", dtype=dtype) for shape, dtype in shapes]
    graph = make_fx(model, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
options = {"triton.enable_pdl": True, "combo_kernels": True, "fx_graph_cache": False, "compile_threads": 1}
with torch._inductor.config.patch(options), V.set_fake_mode(fake):
    lowering = torch._inductor.graph.GraphLowering(graph, example_inputs=inputs, is_inference=True, cpp_wrapper=False)
    with V.set_graph_handler(lowering), V.set_debug_handler(mock.MagicMock()):
        lowering.run(*inputs)
        code = lowering.codegen()[0].value
kernels = re.findall(r"@triton.jit\\n(def triton_.*?)\\n'''", code, re.S)
branches = [branch for kernel in kernels for branch in (re.split(r"\\n    (?:el)?if pid", kernel)[1:] or [kernel])]
stores = [branch for branch in branches if "tl.store(" in branch]
print(len(stores), sum("gdc_wait" not in branch for branch in stores))
"""


def generated(how: str) -> tuple[int, int]:
    """Return how many kernels, or branches of combined ones, write something, and how many of them do not wait."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GENERATED, how],
        cwd=Path(nibble.__file__).parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    count, not_waiting = map(int, run.stdout.split()[-2:])
    return count, not_waiting


@pytest.mark.slow
def test_each_kernel_waits_before_it_writes() -> None:
    count, not_waiting = generated("waiting")
    assert count > 10 and not not_waiting
    assert generated("as inductor has it")[1], (
        "inductor's own kernels all wait: forward._always_waiting can go"
    )


def test_a_kernel_waits_whatever_is_in_front_of_it() -> None:
    front = object()
    scheduler = SimpleNamespace(previous_node=front)
    calls: list[Any] = []

    def decide(kernel: Any, name: str, *, consider_reads: bool = False) -> str:
        calls.append((kernel, name, consider_reads, V.graph.scheduler.previous_node))
        return "decided"

    always = _always_waiting(decide)  # type: ignore[arg-type]
    with V.set_graph_handler(SimpleNamespace(scheduler=scheduler)):
        assert always("kernel", "buffer", consider_reads=True) == "decided"
    assert calls == [("kernel", "buffer", True, None)] and scheduler.previous_node is front
