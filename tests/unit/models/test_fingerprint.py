"""The fingerprint of a checkpoint: another one for other weights, the same for a copy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibble.models.fingerprint import SAMPLE, SAMPLES, fingerprint
from tiny import save_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def change(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_copy_has_the_same(model: Path, tmp_path: Path) -> None:
    before = fingerprint(model)
    copy = shutil.copytree(model, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (0, 0))
    (copy / "tokenizer.json").write_text("{}")
    assert fingerprint(copy) == before and len(before) == 16


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_config_or_header_is_another_model(model: Path, name: str) -> None:
    before = fingerprint(model)
    change(model / name, 20)
    assert fingerprint(model) != before


def test_weights_that_were_trained_further_are_others(model: Path) -> None:
    """The header and the size are the same: only values differ, all of them by little."""
    before, path = fingerprint(model), model / "model.safetensors"
    size = path.stat().st_size
    tensors = {name: tensor * 1.001 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    assert path.stat().st_size == size and fingerprint(model) != before


def test_large_files_are_sampled_from_beginning_to_end(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(4 * SAMPLES * SAMPLE, dtype=torch.uint8)}, path)
    before, size = fingerprint(tmp_path), path.stat().st_size
    for at in (size - 1, size - 4 * SAMPLES * SAMPLE):
        change(path, at)
        assert fingerprint(tmp_path) != before
        change(path, at)
    assert fingerprint(tmp_path) == before


def test_the_hubs_own_hash_is_taken(tmp_path: Path) -> None:
    """A blob of the hub's cache is named by its content, which need not be read."""
    folders = []
    for name, content in (("a", b"1" * 64), ("b", b"2" * 64)):
        blob = tmp_path / name / ("0123456789abcdef" * 4)
        blob.parent.mkdir()
        blob.write_bytes(content)
        folders.append(tmp_path / f"snapshot-{name}")
        folders[-1].mkdir()
        (folders[-1] / "model.safetensors").symlink_to(blob)
    assert fingerprint(folders[0]) == fingerprint(folders[1])


def test_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert fingerprint(tmp_path)
