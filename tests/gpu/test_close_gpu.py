"""close() on a GPU: 20 opens and closes in one process end with the memory that they began with.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from nibble import LLM, NibbleError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPENS = 20
MIB = 1 << 20
KINDS: tuple[dict[str, Any], ...] = (
    {"model": "demo", "kv_format": "nvfp4", "kv_memory": "512MiB", "watch_fidelity": 0.5},
    {"model": "demo", "kv_format": "bf16", "kv_memory": "512MiB", "compile": False},
    {"model": "demo-mla", "kv_format": "fp8_ds_mla", "hisparse": "buffer=256", "max_context": 1200, "max_running": 6,
     "kv_memory": "9500KiB", "compile": False},
)  # fmt: skip
"""Compiled and recorded; recorded alone; with a host tier."""


def used() -> tuple[int, int]:
    """Bytes of live tensors in this process, and bytes of the device that somebody uses."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


def open_and_close(**options: Any) -> None:
    with LLM(**options, device="cuda") as llm:
        before = torch.cuda.memory_allocated()
        answers = llm.generate(
            ["def f(x):", "import os\n"] * 3, max_tokens=8, temperature=0.7, progress=False
        )
        assert all(answer.completions[0].token_ids for answer in answers) and before > 8 * MIB
    with pytest.raises(NibbleError, match="closed"):
        llm.generate("a")


@pytest.mark.slow
def test_twenty_opens_and_closes_give_all_memory_back() -> None:
    for kind in KINDS:  # kernels are loaded once in a process, and stay
        open_and_close(**kind)
    allocated, device = used()
    history = []
    for i in range(OPENS):
        open_and_close(**KINDS[i % len(KINDS)])
        history.append(used())
    print([(a // MIB, d // MIB) for a, d in [(allocated, device), *history]])
    assert allocated < MIB and all(now == allocated for now, _ in history)
    # Loading is lazy; a leak would be a pool or weights each time. Other workers of pytest share the device.
    assert "PYTEST_XDIST_WORKER" in os.environ or history[-1][1] - device < 64 * MIB
    assert torch.cuda.memory_reserved() <= 32 * MIB


def test_a_deleted_llm_gives_its_memory_back_too() -> None:
    open_and_close(**KINDS[1])
    before = torch.cuda.memory_allocated()
    llm = LLM(**KINDS[1], device="cuda")
    stream = llm.stream("def f(x):", max_tokens=100)
    next(stream)
    assert torch.cuda.memory_allocated() > before + 256 * MIB
    del llm, stream
    gc.collect()
    assert torch.cuda.memory_allocated() == before
