"""Where KV scales come from: the checkpoint, a file beside it, or a measurement, and plan and start say the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibble import LLM, Config, ScaleError, WeightError
from nibble.cache import scales as kv_scales
from nibble.config import BUNDLED
from nibble.engine.plan import plan_engine
from nibble.engine.scale_source import Origin, ScaleSource, find_source
from nibble.models.hub import local_folder

LAYERS = 3


def source(folder: Path | str, kv_format: str = "nvfp4", **options: Any) -> ScaleSource:
    return find_source(plan_engine(Config(model=str(folder), kv_format=kv_format, **options)), local_folder)


def add_scales(folder: Path, layers: int = LAYERS) -> None:
    """Gives a checkpoint scales of its own."""
    scales = {
        f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": torch.tensor(0.01)
        for layer in range(layers)
        for name in "kv"
    }
    save_file(
        load_file(folder / "model.safetensors") | scales, folder / "model.safetensors", {"format": "pt"}
    )


def add_file(folder: Path, *keys: str) -> None:
    layers = {str(layer): {"amax": dict.fromkeys(keys, 2.0)} for layer in range(LAYERS)}
    (folder / kv_scales.FILE_NAME).write_text(json.dumps({"schema": kv_scales.SCHEMA, "layers": layers}))


@pytest.fixture
def folder(tmp_path: Path, tiny: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def test_a_cache_without_scales_needs_none(folder: Path) -> None:
    for name in ("bf16", "mxfp4", "fp4_mx16"):
        assert source(folder, name, kv_transforms="none").origin is Origin.UNNEEDED
        llm = LLM(str(folder), kv_format=name, kv_transforms="none", kv_memory="1MiB")
        assert not llm.startup.get("calibration")


def test_the_checkpoint_comes_first_then_the_file_then_a_measurement(folder: Path) -> None:
    assert source(folder).origin is Origin.MEASURED
    add_file(folder, "k", "v")
    assert source(folder).origin is Origin.FILE
    add_scales(folder)
    assert source(folder).origin is Origin.CHECKPOINT
    # Neither has scales of rotated keys.
    rotated = source(folder, "nvfp4+rot")
    assert rotated.origin is Origin.MEASURED
    assert "the checkpoint has none for 'k+rot' of layer 0, and" in rotated.why
    add_file(folder, "k+rot", "v")
    assert source(folder, "nvfp4+rot").origin is Origin.FILE
    assert source(folder, "nvfp4+rot", kv_scales="calibrate").origin is Origin.MEASURED


def test_scales_of_some_layers_are_not_mixed_with_others(folder: Path) -> None:
    add_scales(folder, LAYERS - 1)
    assert "none for 'k' of layer 2" in source(folder, kv_transforms="none").why
    assert source(folder, kv_layers="-1=bf16").origin is Origin.CHECKPOINT


def test_an_index_alone_names_the_scales(folder: Path) -> None:
    add_scales(folder)
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    assert "weights are not here" in source(folder).why
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert source(folder).origin is Origin.CHECKPOINT


def test_a_config_alone_leaves_it_open(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert (
        source(folder)
        .summary(str(folder))
        .startswith(
            "KV scales: measured at the start on a built-in text, unless the checkpoint, whose weights are not here, has"
        )
    )


def test_without_a_tokenizer_plan_and_start_refuse_alike(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ScaleError, match=r"'k' of layer 0.*no tokenizer") as plan:
        source(folder)
    with pytest.raises(ScaleError) as start:
        LLM(str(folder), kv_format="nvfp4")
    assert str(start.value) == str(plan.value)


def test_a_broken_file_of_weights_is_named(folder: Path) -> None:
    for content in (b"\xff" * 64, b"", b"\x08\0\0\0\0\0\0\0[1, 2]  "):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(WeightError, match=r"model.safetensors is broken or cut short"):
            source(folder)


def test_a_start_says_where_scales_are_from(folder: Path) -> None:
    line = LLM(str(folder), kv_format="nvfp4", kv_memory="1MiB").engine.startup.kv_scales
    assert line.startswith("KV scales: measured on 1,024 tokens of a built-in text in ")
    assert line.endswith(f"to keep them: nibble calibrate {folder} --out {folder}/kv_scales.json")
    add_file(folder, "k", "v")
    llm = LLM(str(folder), kv_format="nvfp4", kv_memory="1MiB")
    assert llm.engine.startup.kv_scales == f"KV scales: from {folder}/kv_scales.json"
    assert "calibration" not in llm.startup


def test_the_bundled_models_bring_theirs() -> None:
    served = {"demo": "nvfp4", "demo-mla": "nvfp4_ds_mla", "demo-hybrid": "nvfp4"}
    assert served.keys() == set(BUNDLED)
    assert all(source(model, scheme).origin is Origin.FILE for model, scheme in served.items())


@pytest.mark.slow
def test_a_second_plan_imports_no_torch(folder: Path, tmp_path: Path) -> None:
    add_scales(folder)
    code = (
        "import sys; from nibble.cli.main import app\n"
        f"try: app(['plan', {str(folder)!r}, '--kv-format', 'nvfp4', '--gpu', 'h200'])\n"
        "except SystemExit: print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    command, env = [sys.executable, "-c", code], {**os.environ, "NIBBLE_CACHE": str(tmp_path / "cache")}
    runs = [subprocess.run(command, capture_output=True, text=True, check=False, env=env) for _ in range(2)]
    assert "KV scales: the checkpoint's own" in runs[1].stdout
    assert runs[1].stdout.splitlines()[-1] == "False False", runs[1].stderr


# Transforms that are left to the plan


def transforms(folder: Path, kv_format: str = "nvfp4", **options: Any) -> tuple[tuple[str, ...], str]:
    """Those of the first layer, and the note that says why there are not more."""
    plan = plan_engine(Config(model=str(folder), kv_format=kv_format, **options)).plan
    notes = [note for note in plan.notes if "the default for K in 4 bits" in note]
    return plan.layout.layers[0].transforms, "".join(notes)


def test_scales_that_will_be_measured_allow_all_transforms(folder: Path) -> None:
    for name in ("nvfp4", "mxfp4"):
        assert transforms(folder, name) == (("kmean", "rot"), "")
        assert source(folder, name).origin is Origin.MEASURED


def test_scales_that_are_given_hold_for_the_keys_that_they_were_measured_on(folder: Path) -> None:
    add_scales(folder)
    chosen, note = transforms(folder)
    assert chosen == () and "no kmean+rot" in note and "the checkpoint has no KV scales" in note
    assert source(folder).origin is Origin.CHECKPOINT
    assert transforms(folder, kv_scales="calibrate") == (("kmean", "rot"), "")
    # Its scales are of no use to a format that has none, so its means are measured.
    assert transforms(folder, "mxfp4") == (("kmean", "rot"), "")


def test_a_file_allows_what_it_has_scales_and_means_for(folder: Path) -> None:
    file = folder / kv_scales.FILE_NAME
    for keys, expected in (
        (("k", "v"), ()),
        (("k", "k+rot", "v"), ("rot",)),
        (("k+kmean+rot", "k+rot", "v"), ("rot",)),
    ):
        add_file(folder, *keys)
        for options in ({}, {"kv_scales": str(file)}):
            chosen, note = transforms(folder, **options)
            assert chosen == expected and "has no KV scales" in note
            assert source(folder, **options).origin is Origin.FILE


def test_scales_of_1_have_no_mean(folder: Path) -> None:
    chosen, note = transforms(folder, kv_scales="one")
    assert chosen == ("rot",) and "no kmean" in note
    llm = LLM(str(folder), kv_format="nvfp4", kv_scales="one", kv_memory="2MiB")
    assert llm.plan.window and note in llm.engine.startup.notes
    assert llm.generate("012", max_tokens=2, ignore_eos=True).completions[0].token_ids


def test_what_cannot_be_measured_is_left_out(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    chosen, note = transforms(folder, "mxfp4")
    assert chosen == ("rot",) and "nothing is there to measure" in note
    with pytest.raises(ScaleError, match="'k' of layer 0"):
        source(folder)


def test_transforms_that_are_named_are_not_left_out(folder: Path) -> None:
    add_scales(folder)
    assert transforms(folder, "nvfp4+rot") == (("rot",), "")
    assert transforms(folder, kv_transforms="rot") == (("rot",), "")
    with pytest.raises(ScaleError, match="mean of K"):
        LLM(str(folder), kv_format="nvfp4+kmean", kv_scales="one", kv_memory="2MiB")
