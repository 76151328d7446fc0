"""Weights go from their files to the device one by one: what the host holds of them, and that they arrive as they are.

The meta device stands in for a GPU: what was copied to it is no longer in host memory.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from nibble.models import checkpoint, placement, unpack
from nibble.models.pack import Packer
from nibble.models.placement import Placed, PlacedSlice, release
from nibble.models.quantization import Handling
from nibble.models.refusals import load_config
from tiny import BASE, save_model

CPU, META = torch.device("cpu"), torch.device("meta")
SHARD = 50 << 20
LARGE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8}
"""About 230 MB in float32, in tensors of 8 MB."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def read(folder: Path, device: torch.device, dtype: str = "float32") -> nn.Module:
    """A model before it is prepared."""
    config = load_config(str(folder))
    return checkpoint._read(checkpoint.Reading(config, str(folder), device), NAMED, dtype)


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


# ---- quantised matrices: those that stay packed are kept in this machine's memory, and are subtracted ----------------

FP8_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def save_sharded(folder: Path, config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint in shards of SMALL_SHARD bytes."""
    config.save_pretrained(folder)
    part, files, places = dict[str, Tensor](), 0, dict[str, str]()
    for i, (name, x) in enumerate(tensors.items(), 1):
        part[name] = x
        if sum(y.nbytes for y in part.values()) >= SMALL_SHARD or i == len(tensors):
            files += 1
            save_file(part, folder / f"model-{files:05}.safetensors", metadata={"format": "pt"})
            places.update(dict.fromkeys(part, f"model-{files:05}.safetensors"))
            part = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def fp8(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    codes = torch.randint(0, 120, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {
        f"{name}.weight": codes,
        f"{name}.weight_scale_inv": torch.full((rows // 128, columns // 128), 0.01),
    }


def dense(folder: Path) -> Path:
    """Linear layers in blocks of FP8."""
    config = AutoConfig.for_model("qwen3", **{**BASE, **DENSE}, quantization_config=FP8_BLOCKS)
    return save_sharded(folder, config, stored(config, fp8))


def gpt_oss(folder: Path) -> Path:
    """All experts of a layer in MXFP4."""
    config = AutoConfig.for_model(
        "gpt_oss", **{**BASE, **GPT_OSS}, quantization_config={"quant_method": "mxfp4"}
    )
    tensors = dict[str, Tensor]()
    for name, x in stored(config).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = x.shape
            tensors[f"{name}_blocks"] = torch.randint(
                0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8
            )
            tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 120, dtype=torch.uint8)
        else:
            tensors[name] = x
    return save_sharded(folder, config, tensors)


def stored(
    config: PretrainedConfig, quantized: Callable[[str, int, int], dict[str, Tensor]] | None = None
) -> dict[str, Tensor]:
    """The tensors of a model by name, linear layers quantised."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = dict[str, Tensor]()
    for name, x in model.state_dict().items():
        module = name.removesuffix(".weight")
        if (
            quantized
            and name != module
            and type(model.get_submodule(module)) is nn.Linear
            and "lm_head" not in name
        ):
            tensors |= quantized(module, *x.shape)
        else:
            # Of experts that are written otherwise the shape is enough.
            tensors[name] = torch.zeros(x.shape, dtype=x.dtype) if x.dim() < 3 else x
    return tensors


SMALL_SHARD, M_MMAP_THRESHOLD = 32 << 20, -3
SIZES: dict[str, Any] = {"hidden_size": 1024, "vocab_size": 320, "head_dim": 128}
DENSE = {**SIZES, "num_hidden_layers": 24, "intermediate_size": 1024}
GPT_OSS = {
    **SIZES, "num_hidden_layers": 7, "intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 2
}  # fmt: skip
"""Of a layer's experts either matrix is a quarter of a shard at the most, as in published checkpoints."""


def away(x: Tensor) -> Tensor:
    """A copy on the device, as `copied`; placeholders of matrices have no values."""
    if type(x) is not Tensor or (not x.is_meta and x.is_floating_point() and x[..., 0].isnan().all()):
        return x
    return x.as_subclass(Placed) if x.is_meta else copied(x, META)


def host_peak(folder: Path, handling: Handling, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes the process had more, at the most, while a matrix was read, beside those that were kept."""
    packer = Packer("cpu", torch.bfloat16) if handling is Handling.PACKED else None
    own, lock, peaks = unpack._Slice.__getitem__, Lock(), list[int]()
    bases = list[int]()

    def kept() -> int:
        parts = [entry.packed for entry in packer._entries.values()] if packer else []
        return sum(
            x.nbytes for part in parts for x in (part.codes, part.scale, part.global_scale) if x is not None
        )

    def measured(self: Any, index: Any) -> Tensor:
        with lock:
            before = kept()
            # The first time nothing is kept, and all that has to be imported was.
            if not bases:
                bases.append(status("VmRSS"))
            Path("/proc/self/clear_refs").write_text("5")
            x = own(self, index)
            peaks.append(status("VmHWM") - bases[0] - before)
            return x

    for module in (placement, unpack):
        monkeypatch.setattr(module, "place", lambda x, _: away(x))
        monkeypatch.setattr(module, "release", lambda tensors, _: release(tensors, META))
    monkeypatch.setattr(unpack._Slice, "__getitem__", measured)
    # The allocator keeps some of what threads gave back, up to 32 MB each: as much as a shard here.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    # What torch imports for its first copy to this device is no weight.
    torch.empty(2, device=META).copy_(torch.ones(2))
    config = load_config(str(folder))
    reading = checkpoint.Reading(config, str(folder), CPU if packer else META, handling, packer)
    checkpoint._read(reading, NAMED, "bfloat16")
    monkeypatch.undo()
    assert not packer or kept() > 2 * SMALL_SHARD
    return max(peaks)


@linux
@pytest.mark.parametrize(
    ("save", "handling"),
    [
        (dense, Handling.PACKED),
        (gpt_oss, Handling.UNPACKED),
    ],
)
def test_the_host_holds_less_than_a_shard_of_quantised_weights(
    save: Callable[[Path], Path], handling: Handling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) > 2
    assert host_peak(folder, handling, monkeypatch) < 1.2 * max(sizes)
