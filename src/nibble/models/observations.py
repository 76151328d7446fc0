"""Observed models, kept in the cache folder: what was observed once is read again without torch and Transformers.

A file is named by a hash of everything that an observation depends on, so what has changed is observed anew:

    observed/HASH.json    {"digest": SHA-256 of the model spec, "model_spec": {...}}
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import nibble
from nibble import files
from nibble.garbage import pause_gc
from nibble.hardware import cache_folder
from nibble.model_spec import LayerGroup, ModelSpec, RecurrentGroup, StoredWeights, Stream
from nibble.models.hub import INDEX_FILE, MODELOPT_FILE, cached_folder, locate, require_hub, split_head
from nibble.models.parallel_ways import ONE_GPU, Ways
from nibble.models.weight_bytes import folder_bytes

FOLDER = "observed"
CONFIG_FILES = ("config.json", INDEX_FILE, MODELOPT_FILE)
"""Files of a checkpoint that say what the model is, or that refuse it."""
PACKAGES = ("transformers", "torch")
"""Packages whose code is observed, or observes."""
OBSERVING = (
    "models/*.py",
    "attention/*.py",
    "kernels/types.py",
    "kernels/weight_formats.py",
    "model_spec.py",
)
"""Nibble's own code that takes part in an observation."""


def observe_model(
    model: str,
    dtype: str,
    max_context: int | None = None,
    index_topk: int | None = None,
    *,
    trust_remote_code: bool = False,
    weights: str | None = None,
    ways: Ways = ONE_GPU,
) -> ModelSpec:
    """Return what `model` asks of attention: from the cache folder, or by observing it.

    Args:
        model: A folder, or the name of a bundled model or of one on the hub. Models on the hub may change, and are
            observed each time.
        dtype: The compute dtype, in which weights are counted.
        max_context: The longest context, None for the model's own.
        index_topk: Tokens that sparse attention looks at, None for the model's own.
        trust_remote_code: Whether code that comes with it may run. It may change, so it is observed each time.
        weights: A format that linear layers are quantised to as they load, None for none.
        ways: How the model is divided among ranks; what is returned is then of one of them.

    Raises:
        ConfigError: The model cannot be served, or the context is too long.
        WeightError: The checkpoint is missing or broken.
    """
    folder = Path(locate(model))
    # A name on the hub may mean another version tomorrow.
    is_fixed = (folder / "config.json").is_file() and not trust_remote_code
    head = split_head(model)[0]
    division = repr(ways) if ways != ONE_GPU else ""
    options = (dtype, max_context, index_topk, weights, *filter(None, [division, head]))
    path = _path(folder, *options) if is_fixed else None
    cached = _read(path) if path else None
    if cached is not None:
        # The name is not part of the key: the same files may have several.
        return replace(cached, model=model)
    if not folder.exists() and cached_folder(model) is None:
        require_hub(model)
    with pause_gc():
        # Both import torch and Transformers, which takes seconds.
        from nibble.models.heads import load_config
        from nibble.models.observe import observe

        config = load_config(model, index_topk, trust_remote_code=trust_remote_code)
        if ways.size > 1:
            from nibble.models.parallel import observe_part

            model_spec = observe_part(config, model, dtype, max_context, weights, ways)
        else:
            model_spec = observe(config, model, dtype, max_context, weights)
    stored = model_spec.stored_weights
    if stored and not (weights or head or division) and (size := folder_bytes(folder, model_spec.layers)):
        # What lies in the folder is certain; what follows from the config is an account of it.
        model_spec = replace(model_spec, stored_weights=replace(stored, bytes=size))
    if path:
        _write(path, model_spec)
    return model_spec


def _path(folder: Path, *options: str | int | None) -> Path:
    """Return the file for a checkpoint in `folder` under these options."""
    digest = hashlib.sha256(repr(options).encode())
    for package in PACKAGES:
        digest.update(f"{package} {metadata.version(package)}".encode())
    # code that comes with a checkpoint (auto_map) lies beside its config
    for source in (
        *(folder / name for name in CONFIG_FILES),
        *sorted(folder.glob("*.py")),
        *_observing_code(),
    ):
        if source.is_file():
            content = source.read_bytes()
            digest.update(f"{source.name} {len(content)}".encode())
            digest.update(content)
    for weights in sorted(folder.glob("*.safetensors")):
        # Their headers say what quantised weights take, and their contents nothing more.
        digest.update(f"{weights.name} {weights.stat().st_size}".encode())
    return cache_folder() / FOLDER / f"{digest.hexdigest()[:32]}.json"


def _observing_code() -> list[Path]:
    """Return the files of Nibble that take part in an observation."""
    package = Path(nibble.__file__).parent
    return [path for pattern in OBSERVING for path in sorted(package.glob(pattern))]


def _read(path: Path) -> ModelSpec | None:
    """Return the model spec in a file; None where there is no file, or not one that _write() left."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        facts = content["model_spec"]
        # A file that was cut off or edited has another digest.
        return _model_spec(facts) if content["digest"] == _digest(facts) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, model_spec: ModelSpec) -> None:
    facts = asdict(model_spec)
    # a cache folder that cannot be written costs time, nothing else
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, json.dumps({"digest": _digest(facts), "model_spec": facts}, indent=1) + "\n")


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _model_spec(facts: dict[str, Any]) -> ModelSpec:
    groups = tuple(
        LayerGroup(
            **{
                **group,
                "streams": tuple(Stream(**stream) for stream in group["streams"]),
                "layers": tuple(group["layers"]),
            }
        )
        for group in facts["groups"]
    )
    stored = StoredWeights(**facts["stored_weights"]) if facts["stored_weights"] else None
    states = tuple(RecurrentGroup(**{**group, "layers": tuple(group["layers"])}) for group in facts["states"])
    fields = {"groups": groups, "owner": tuple(facts["owner"]), "stored_weights": stored, "states": states}
    divided = {name: tuple(facts[name]) for name in ("kv_heads", "replicated", "ways")}
    return ModelSpec(**{**facts, **fields, **divided})
