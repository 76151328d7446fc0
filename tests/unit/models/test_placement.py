"""Weights go from their files to the device one by one: what the host holds of them, and that they arrive as they are.

The meta device stands in for a GPU: what was copied to it is no longer in host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from nibble.models import checkpoint, placement
from nibble.models.placement import Placed, PlacedSlice, release
from nibble.models.quantization import Handling
from nibble.models.refusals import load_config
from tiny import save_model

CPU, META = torch.device("cpu"), torch.device("meta")
SHARD = 50 << 20
LARGE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8}
"""About 230 MB in float32, in tensors of 8 MB."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def read(folder: Path, device: torch.device, dtype: str = "float32") -> nn.Module:
    """A model before it is prepared."""
    config = load_config(str(folder))
    source = partial(checkpoint._source, config, str(folder), device, Handling.UNPACKED, None, None)
    return checkpoint._read(source, NAMED, str(folder), dtype)


class Named:
    model = "a model"


NAMED: Any = Named()


def status(name: str) -> int:
    """A number of bytes that the kernel counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def peak(call: Callable[[], object]) -> int:
    """How many bytes the process had more, at the most, while this ran; files that are mapped count."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole, sharded = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("shards")
    model = AutoModelForCausalLM.from_pretrained(save_model(whole, **LARGE))
    model.generation_config = GenerationConfig()
    model.save_pretrained(sharded, max_shard_size=SHARD)
    return sharded


def copied(x: Tensor, device: torch.device) -> Tensor:
    """Reads all values, as a copy to a GPU does."""
    assert x.sum().isfinite()
    return x.to(device).as_subclass(Placed)


@linux
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_host_holds_less_than_a_shard(shards: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "place", copied)
    sizes = [path.stat().st_size for path in shards.glob("*.safetensors")]
    assert len(sizes) > 3
    read(shards, META, dtype)  # what is imported counts no more
    assert peak(lambda: read(shards, META, dtype)) < 1.2 * max(sizes)
    # Where pages are kept, or all stays on the host, that shows.
    monkeypatch.setattr(placement, "release", lambda *_: None)
    assert peak(lambda: read(shards, META, dtype)) > 0.8 * sum(sizes)
    assert peak(lambda: read(shards, CPU, dtype)) > 0.8 * sum(sizes)


def test_weights_arrive_as_they_are(shards: Path) -> None:
    stored = {name: x for path in shards.glob("*.safetensors") for name, x in load_file(path).items()}
    model = read(shards, CPU, "bfloat16")
    weights = model.state_dict()
    assert all(torch.equal(weights[name], x.bfloat16()) for name, x in stored.items())
    assert all(type(x) is nn.Parameter for x in model.parameters())
    assert all(x.is_meta for x in read(shards, META).parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_buffers_that_no_file_has_are_computed_on_the_host(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, family)
    expected = dict(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).named_buffers())
    model = read(folder, META)
    assert all(x.is_meta for x in model.parameters())
    assert all(torch.equal(x, expected[name]) for name, x in model.named_buffers())


def test_the_loader_changes_the_dtype_alone() -> None:
    x = torch.ones(2, 3).as_subclass(Placed)
    assert type(x.to(device="meta", dtype=torch.bfloat16)) is torch.Tensor
    assert x.to(device="meta", dtype=torch.bfloat16).device == CPU
    assert x.to(device="meta", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert x.to(device="meta", dtype=None).data_ptr() == x.data_ptr()
    assert type(torch.stack([x, x])) is torch.Tensor


@linux
def test_pages_that_are_given_back_are_read_again(tmp_path: Path) -> None:
    values = torch.arange(3 << 20, dtype=torch.int32)
    save_file({"x": values[:1000].clone(), "y": values}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        x, y = file.get_slice("x")[...], file.get_slice("y")[...]
        assert torch.equal(y, values)
        mapped = status("RssFile")
        release([x, y], META)
        assert status("RssFile") <= mapped - 0.9 * values.nbytes
        assert torch.equal(y, values) and torch.equal(x, values[:1000])
        assert PlacedSlice(file.get_slice("y"), META)[...].is_meta
