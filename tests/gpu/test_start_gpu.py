"""A start on a GPU: what the host holds while weights are read, and a second start that compiles nothing.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble.kernels import import_problem
from nibble.kernels.weight_formats import PACKAGE

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import random_checkpoints
import random_models
import start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHARD = 600 << 20
LAYERS = {"num_hidden_layers": 4, "vocab_size": 32000}
"""Of the 8B model, about 2.3 GB in BF16."""


def folder_of(folder: Path, weights: str) -> Path:
    """A checkpoint in several shards."""
    family, fields = random_models.SHAPES["llama-3.1-8b"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_models.SHAPES, "part", (family, {**fields, **LAYERS}))
        random_checkpoints.write("part", folder, weights, shard=SHARD)
    torch.cuda.empty_cache()
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize("weights", ["", "fp8", "fp8a8"])
def test_two_starts(weights: str, tmp_path: Path) -> None:
    if weights and import_problem(PACKAGE):
        pytest.skip("needs humming-kernels")
    first, second = starts(folder_of(tmp_path / "model", weights), weights, tmp_path / "cache")
    for result in (first, second):
        memory = result["host memory"]
        assert max(memory["resident"], memory["anonymous"]) < 1.2 * memory["largest shard"]
        after = result["after the start"]
        assert (after["graphs"], after["kernels"], after["files"]) == (0, 0, [])
    assert first["counters"]["unique_graphs"] == 1
    assert second["counters"]["unique_graphs"] == 0 and not second["triton"].get("compiled")


def starts(folder: Path, weights: str, cache: Path) -> list[dict[str, Any]]:
    """What benchmarks/start.py measures of two starts."""
    command = [
        sys.executable,
        start.__file__,
        "--checkpoint",
        str(folder),
        "--weights",
        weights,
        "--kv-memory",
        "1GiB",  # other tests run beside it
    ]
    done = subprocess.run([*command, "--cache", str(cache)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(part[part.index("{") :]) for part in done.stdout.split("start ")[1:]]
