"""Checkpoints with random weights on disk, in BF16 or in FP8 with a scale for each block of 128 x 128.

Their names, shards and index are those of published checkpoints, so that reading them is measured as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from packed_weights import KINDS
from random_models import make, shape_config
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from nibble.models.hub import INDEX_FILE
from nibble.models.quantization import parse

FP8 = ("fp8", "fp8a8")
"""Of packed_weights.KINDS, those that can be written."""
SHARD = 5_000_000_000
"""Bytes of a shard at the most, as save_pretrained() has it."""
BLOCK, LARGEST = 128, 448.0


def write(shape: str, folder: Path, weights: str = "", device: str = "cuda", shard: int = SHARD) -> None:
    """Writes a checkpoint.

    shape: a name of random_models.SHAPES. weights: one of FP8, or nothing for BF16. device: where weights are made.
    """
    config = shape_config(shape)
    model = make(config, "bfloat16", device)
    folder.mkdir(parents=True, exist_ok=True)
    entry = KINDS[weights].config if weights else None
    config.save_pretrained(folder)
    data = json.loads((folder / "config.json").read_text())
    data |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(data | ({"quantization_config": entry} if entry else {})))
    quantization = parse(entry) if entry else None
    chosen = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and quantization and quantization.format_of(name)
    }

    def stored() -> Iterator[tuple[str, Tensor]]:
        for name, x in model.state_dict().items():
            if name in chosen:
                yield from zip((name, f"{name}_scale_inv"), in_blocks(x), strict=True)
            else:
                yield name, x

    places = dict[str, str]()
    part: dict[str, Tensor] = {}
    files = 0
    for name, x in stored():
        if part and sum(y.nbytes for y in part.values()) + x.nbytes > shard:
            files += _save(part, folder, files, places)
            part = {}
        part[name] = x.cpu().contiguous()
    _save(part, folder, files, places)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _save(part: dict[str, Tensor], folder: Path, number: int, places: dict[str, str]) -> int:
    file = f"model-{number + 1:05}.safetensors"
    save_file(part, folder / file, metadata={"format": "pt"})
    places.update(dict.fromkeys(part, file))
    return 1


def in_blocks(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in E4M3, and a float32 scale for each block."""
    rows, columns = weight_NK.shape
    x_NK = F.pad(weight_NK.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    x = x_NK.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = x.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    codes_NK = (x / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    return codes_NK[:rows, :columns].to(torch.float8_e4m3fn), scale
