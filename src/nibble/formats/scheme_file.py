"""A scheme for each layer in one JSON file: what `nibble tune-precision` writes and `--kv-format FILE` reads.

    {
      "schema": "nibble-kv-scheme-1",
      "layers": {
        "0": {
          "k": {"format": "nvfp4", "encoder": "sweep", "transforms": ["kmean", "rot"]},
          "v": {"format": "nvfp4", "encoder": "sweep"}
        },
        "1": {"latent": {"format": "fp8_e4m3"}}
      },
      "kv_window": 64,
      "provenance": {"model": "...", "text": "...", "figures": {...}}
    }

An `encoder` that is left out is the default, or that of --kv-encoder. Both streams of a layer have the same.

`kv_window`, which may be left out, is the exact window that the schemes were measured with; --kv-window wins over it.

`provenance` says where the choice comes from; nothing depends on it. Index keys of sparse attention have one format,
so a file does not name them.

ModelOpt's form is read and written too (schema 1 of `kv_cache_quantized_layers`, NVIDIA/Model-Optimizer#2272). It lies
in a checkpoint's hf_quant_config.json under `quantization`, or in its config.json under `quantization_config`:

    {"kv_cache_quantized_layers": {"model.layers.0.self_attn": {"quant_algo": "FP8"}}, "kv_cache_schema_version": 1}

Layers that it leaves out keep the model's precision, as vLLM takes it (vllm-project/vllm#56116).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nibble import files, formats
from nibble.errors import ConfigError, unknown
from nibble.formats import scheme as schemes
from nibble.formats.scheme import Scheme
from nibble.model_spec import LATENT, Stream

FILE_NAME = "kv_scheme.json"
"""A file of this name in a model's folder is what `--kv-format auto` means."""
SCHEMA = "nibble-kv-scheme-1"
MODELOPT_SCHEMA = 1
MODELOPT_LAYERS = "kv_cache_quantized_layers"
MODELOPT_ALGO = "kv_cache_quant_algo"
MIXED_PRECISION = "MIXED_PRECISION"
UNQUANTISED = "bf16"
"""The scheme of layers that ModelOpt's form leaves out."""
MODELOPT_SCHEMES = {"FP8": "fp8_e4m3", "NVFP4": "nvfp4", "FP8_K_NVFP4_V": "k8v4"}
"""ModelOpt's algorithm of a layer -> our scheme."""
_MODELOPT_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
STREAMS = (("k", "v"), (LATENT,))
"""The streams that a layer of a file may have."""
SETTINGS = ("format", "encoder", "transforms")
"""What a file says of a stream."""


@dataclass(frozen=True, slots=True)
class SchemeFile:
    """Schemes by layer."""

    path: str
    """Where it was read, for messages."""
    layers: Mapping[int, Scheme]
    others: Scheme | None = None
    """The scheme of layers that it does not name; None where it must name all."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    """Tokens of the exact window, None where the file says nothing of it."""

    @property
    def usual(self) -> Scheme:
        """Return the scheme of layers that it does not name, else that of most layers."""
        return self.others or Counter(self.layers.values()).most_common(1)[0][0]

    def check(self, layers: int) -> None:
        """Raise ConfigError unless it is for a model of `layers` layers."""
        if beyond := sorted(layer for layer in self.layers if layer >= layers):
            raise ConfigError(
                f"{self.path}, layer {beyond[0]}: the model has layers 0 to {layers - 1}; the file is for another model"
            )
        absent = [layer for layer in range(layers) if layer not in self.layers]
        if absent and self.others is None:
            raise ConfigError(
                f"{self.path} has no layer {absent[0]}, and the model has layers 0 to {layers - 1}; the file is for "
                "another model, or cut short"
            )


def is_file(text: str) -> bool:
    """Return whether what --kv-format says is a file and not the name of a scheme."""
    return text.endswith(".json") or "/" in text


def load(path: str | Path) -> SchemeFile:
    """Read a file in our form or in ModelOpt's; raise ConfigError with the path, the layer and the reason."""
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the KV scheme file {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a KV scheme file is a JSON object, not {type(content).__name__}")
    if (entry := modelopt_layers(content)) is not None:
        return _parse_modelopt(entry, str(path))
    if content.get("schema") != SCHEMA:
        raise ConfigError(
            f'{path}: neither "schema": "{SCHEMA}" nor ModelOpt\'s {MODELOPT_LAYERS}; '
            "`nibble tune-precision` writes such files"
        )
    layers = content.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise ConfigError(f'{path}: "layers" must be an object with an entry for each layer')
    by_layer = {_layer(key, str(path)): _parse_layer(layers[key], f"{path}, layer {key}") for key in layers}
    window = content.get("kv_window")
    if window is not None and (type(window) is not int or window < 0):
        raise ConfigError(f'{path}: "kv_window" is a number of tokens, from 0, not {window!r}')
    return SchemeFile(str(path), by_layer, provenance=content.get("provenance") or {}, window=window)


def save(
    path: Path,
    layers: Mapping[int, Scheme],
    streams: Mapping[int, Iterable[Stream]],
    window: int | None = None,
    **provenance: Any,
) -> None:
    """Write a file in our form.

    Args:
        path: Of the file.
        layers: The scheme of each layer.
        streams: What each layer caches.
        window: Tokens of the exact window, None to say nothing of it.
        provenance: Where the choice comes from: anything that JSON can say.
    """
    entries = {str(layer): _entry(scheme, streams[layer]) for layer, scheme in sorted(layers.items())}
    exact = {} if window is None else {"kv_window": window}
    content = {"schema": SCHEMA, "layers": entries, **exact, "provenance": provenance}
    files.write_atomic(path, json.dumps(content, indent=1) + "\n")


def _entry(scheme: Scheme, streams: Iterable[Stream]) -> dict[str, Any]:
    names = [stream for stream in streams if stream.name not in schemes.COMPANIONS]
    return {stream.name: _stream_entry(scheme, stream) for stream in names}


def _stream_entry(scheme: Scheme, stream: Stream) -> dict[str, Any]:
    codec = scheme.format_of(stream)
    encoder = {"encoder": codec.encoder} if codec.encoder else {}
    transforms = {"transforms": list(scheme.transforms)} if scheme.transforms and stream.name == "k" else {}
    return {"format": codec.name, **encoder, **transforms}


def _layer(key: str, path: str) -> int:
    if not key.isdecimal():
        raise ConfigError(f"{path}: {key!r} is no layer; layers are numbers from 0")
    return int(key)


def _parse_layer(entry: Any, where: str) -> Scheme:
    """Return the scheme of one layer's entry; raise ConfigError that begins with `where`."""
    if not isinstance(entry, dict) or tuple(sorted(entry)) not in STREAMS:
        forms = " or ".join(" and ".join(names) for names in STREAMS)
        raise ConfigError(
            f"{where}: a layer has {forms}, not {', '.join(sorted(entry)) if entry else 'nothing'}"
        )
    by_stream = {name: _parse_format(entry[name], f"{where}, {name}") for name in entry}
    transforms = {name: tuple(entry[name].get("transforms") or ()) for name in entry}
    if wrong := [name for name in transforms if transforms[name] and name != "k"]:
        raise ConfigError(f"{where}, {wrong[0]}: transforms are of k alone; leave them out")
    encoders = {entry[name]["encoder"] for name in entry if entry[name].get("encoder")}
    if len(encoders) > 1:
        raise ConfigError(
            f"{where}: k and v have the encoders {' and '.join(sorted(encoders))}; give them the same"
        )
    try:
        return schemes.compose(by_stream, transforms.get("k", ()), *encoders)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _parse_format(entry: Any, where: str) -> str:
    """Return the format of one stream's entry, whose encoder it has; raise ConfigError that begins with `where`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("format"), str):
        raise ConfigError(f'{where}: write it as {{"format": NAME}}')
    if beyond := sorted(entry.keys() - set(SETTINGS)):
        raise ConfigError(f"{where}: {unknown('setting', beyond[0], SETTINGS)}")
    name, encoder, transforms = entry["format"], entry.get("encoder"), entry.get("transforms") or []
    usable = [name for name in formats.names() if name not in schemes.COMPANIONS.values()]
    if name not in usable:
        raise ConfigError(f"{where}: {unknown('KV format', name, usable)}")
    if encoder and encoder not in formats.get(name).encoders:
        raise ConfigError(f"{where}: {unknown(f'encoder of {name}', encoder, formats.get(name).encoders)}")
    if not isinstance(transforms, list) or not all(isinstance(x, str) for x in transforms):
        raise ConfigError(f"{where}: transforms are a list of names, not {transforms!r}")
    return str(name)


# ModelOpt's form


def modelopt_layers(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the entry of ModelOpt's form in a JSON object, wherever it lies; None where there is none."""
    for place in (content, content.get("quantization"), content.get("quantization_config")):
        if isinstance(place, dict) and place.get(MODELOPT_LAYERS):
            return place
    return None


def modelopt_algos(entry: Mapping[str, Any], where: str) -> dict[int, str]:
    """Return ModelOpt's algorithm of each layer that its form names.

    Args:
        entry: What modelopt_layers() returned.
        where: It was read, for messages.

    Raises:
        ConfigError: The entry is malformed, or of another schema.
    """
    version, by_name = entry.get("kv_cache_schema_version", MODELOPT_SCHEMA), entry[MODELOPT_LAYERS]
    if version != MODELOPT_SCHEMA:
        raise ConfigError(
            f"{where}: {MODELOPT_LAYERS} is of schema {version}, and Nibble reads {MODELOPT_SCHEMA}"
        )
    if not isinstance(by_name, dict):
        raise ConfigError(f"{where}: {MODELOPT_LAYERS} must be an object with an entry for each layer")
    algos: dict[int, str] = {}
    for name, value in by_name.items():
        match = _MODELOPT_LAYER.search(f"{name}.")
        if not match:
            raise ConfigError(f"{where}: {name!r} in {MODELOPT_LAYERS} names no layer")
        algo = value.get("quant_algo") if isinstance(value, dict) else value
        if algo not in MODELOPT_SCHEMES:
            raise ConfigError(
                f"{where}, layer {match[1]}: KV caches in {algo} are not served; Nibble reads "
                f"{', '.join(MODELOPT_SCHEMES)}"
            )
        algos[int(match[1])] = algo
    return algos


def _parse_modelopt(entry: Mapping[str, Any], path: str) -> SchemeFile:
    algos = modelopt_algos(entry, path)
    layers = {layer: schemes.parse(MODELOPT_SCHEMES[algo]) for layer, algo in algos.items()}
    return SchemeFile(path, layers, schemes.parse(UNQUANTISED), {"producer": "ModelOpt"})


def as_modelopt(layers: Mapping[int, Scheme], producer: Mapping[str, str]) -> dict[str, Any]:
    """Return ModelOpt's hf_quant_config.json of schemes by layer; transforms are not part of its form.

    Args:
        layers: The scheme of each layer.
        producer: `name` and `version` of what writes it.

    Raises:
        ConfigError: A layer has a format that the form cannot say.
    """
    algos = {scheme: algo for algo, scheme in MODELOPT_SCHEMES.items()}
    by_name: dict[str, dict[str, str]] = {}
    for layer, scheme in sorted(layers.items()):
        if scheme.base == UNQUANTISED:
            continue
        if scheme.base not in algos:
            raise ConfigError(
                f"layer {layer}: ModelOpt's form has no word for {scheme.base}; it knows {', '.join(algos)}, and "
                f"{UNQUANTISED} for layers that it leaves out"
            )
        by_name[f"model.layers.{layer}.self_attn"] = {"quant_algo": algos[scheme.base]}
    kinds = {entry["quant_algo"] for entry in by_name.values()}
    uniform = len(kinds) == 1 and len(by_name) == len(layers)
    quantization = {
        # Without it vLLM does not look for a map of layers. The weights are as the checkpoint has them.
        "quant_algo": MIXED_PRECISION,
        "quantized_layers": {},
        MODELOPT_ALGO: kinds.pop() if uniform else MIXED_PRECISION,
        MODELOPT_LAYERS: by_name,
        "kv_cache_schema_version": MODELOPT_SCHEMA,
    }
    return {"producer": dict(producer), "quantization": quantization}
