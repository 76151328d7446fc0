"""Read checkpoints: weights, and a model with them that is prepared to serve.

A model whose tensors are checked is prepared: MLA absorbed, rope fixed, linear layers packed or merged.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from nibble.errors import ConfigError, WeightError
from nibble.model_spec import ModelSpec
from nibble.models import equivalence, hook, online
from nibble.models.activations import FULL
from nibble.models.checkpoint_scales import has_weights, is_scale
from nibble.models.experts import expert_matrices
from nibble.models.head_model import class_of
from nibble.models.heads import HeadFacts, head_tensors, is_head_tensor
from nibble.models.hook import adapt
from nibble.models.hub import INDEX_FILE, first_line, locate, quiet, read_json, weight_files
from nibble.models.linear import compile_ahead, prepare_linears, prepare_quantized, set_packed
from nibble.models.mla import fix_rope, tabulate_rope
from nibble.models.pack import Packer
from nibble.models.parallel import Division
from nibble.models.placement import stored_tensors
from nibble.models.quantization import (
    READABLE,
    Handling,
    Quantization,
    parse,
    quantization_entry,
)
from nibble.models.quantize import quantize_experts, quantize_linears
from nibble.models.towers import key_mapping, nested_text, text_attention
from nibble.models.unpack import quantized, unpacked


def load(
    config: PretrainedConfig,
    model_spec: ModelSpec,
    dtype: str,
    device: str,
    *,
    handling: Handling = Handling.UNPACKED,
    weights: str | None = None,
    activations: str = FULL,
    division: Division | None = None,
) -> nn.Module:
    """Load the weights.

    Args:
        config: from models/refusals.py.
        model_spec: what was observed of the model.
        dtype: compute dtype, a name of torch.
        device: where the model runs.
        handling: what becomes of weights that are quantised.
        weights: a format that linear layers are quantised to as they load, None for none.
        activations: what becomes of the inputs of packed matrices (activations.py).
        division: what this rank loads, where the model is divided among GPUs; `config` is then that of the rank.

    Returns:
        The model on the device, to be prepared by prepare_model().

    Raises:
        ConfigError: it cannot be divided as it is quantised.
        WeightError: the checkpoint is missing, broken, or another model's.
    """
    path = locate(model_spec.model)
    _check_files(Path(path))
    packer = None
    if handling in (Handling.PACKED, Handling.EXPERTS):
        packer = Packer(device, getattr(torch, dtype), activations, linears=handling is Handling.PACKED)
    quantization = online.quantization_to(weights) if weights else None
    if packer and (stored := quantization or parse(quantization_entry(config))):
        compile_ahead(config, stored, packer)
    whole = getattr(torch, dtype) if division else None
    reading = Reading(config, path, torch.device(device), handling, packer, quantization, whole)
    model = _read(reading, model_spec, dtype, division)
    if packer:
        set_packed(model, packer)
        # The loader makes other tensors of some matrices, and some are of no linear layer.
        if others := packer.forget():
            packer.plain |= others
            del model  # two would not fit
            model = _read(reading, model_spec, dtype, division)
            set_packed(model, packer)
            if names := ", ".join(sorted(packer.forget())):
                raise WeightError(f"no module of the model has the quantised matrices {names}")
    model = model.to(device)
    if next(model.parameters()).is_cuda:
        # What experts were put together of, which other memory could not use.
        torch.cuda.empty_cache()
    if quantization:
        _quantize_others(model, quantization, packer, reading.places if division else None)
    return model


def _quantize_others(
    model: nn.Module, quantization: Quantization, packer: Packer | None, places: set[str] | None
) -> None:
    """Quantise layers that were not as they were read; raise ConfigError where there are any of a divided model.

    Args:
        model: on the device.
        quantization: which layers, and how.
        packer: for packed layers.
        places: of what was quantised as a whole, before it was divided; None where nothing is.
    """
    if places is None:
        quantize_linears(model, quantization, packer)
        quantize_experts(model, quantization.rules[0].format, packer)
        return
    experts = {online.layer_of(place) for place in places if online.EXPERTS in place.split(".")}
    for name, module in model.named_modules():
        place = online.place(name)
        is_left = type(module) is nn.Linear and quantization.format_of(name) and place not in places
        if is_left or (expert_matrices(module) and place and online.layer_of(place) not in experts):
            raise ConfigError(
                f"--weights {quantization.kind} with --tp is not served for this model: {name} is put together of "
                "tensors with other names; name a checkpoint that is quantised already"
            )


Source = tuple[str | None, PretrainedConfig, dict[str, Any] | None]
"""What Transformers is to load: a path or tensors by name, and the config."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a checkpoint is read."""

    config: PretrainedConfig
    path: str
    device: torch.device
    handling: Handling = Handling.UNPACKED
    packer: Packer | None = None
    """Keeps matrices that stay packed."""
    quantization: Quantization | None = None
    """Of matrices that are quantised as they load."""
    whole: torch.dtype | None = None
    """The compute dtype where all of these are quantised as they are read, as a rank needs a part of what is."""
    places: set[str] = field(default_factory=set)
    """Of those that were then."""

    def open(self, files: ExitStack) -> Source:
        """Return tensors with quantised ones unpacked or packed, or the path where Transformers reads it.

        Transformers reads files of PyTorch, and weights that only it unpacks.
        """
        folder, entry = download(self.path), quantization_entry(self.config)
        if str(entry.get("quant_method") or "") in READABLE and self.handling is not Handling.TRANSFORMERS:
            return None, self._plain_config(), unpacked(folder, entry, self.device, files, self.packer)
        if entry or not weight_files(folder):
            return self.path, self.config, None
        if self.quantization and (self.packer or self.whole):
            choice = _choice(self.config, self.quantization)
            how = self.packer, self.device, self.whole, self.places
            return None, self.config, quantized(folder, choice, files, *how)
        return None, self.config, stored_tensors(folder, self.device, files)

    def _plain_config(self) -> PretrainedConfig:
        """Return the config of the same model unquantised."""
        plain = copy.deepcopy(self.config)
        for part in (plain, plain.get_text_config()):
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        return plain


def _read(reading: Reading, model_spec: ModelSpec, dtype: str, division: Division | None = None) -> nn.Module:
    """Return the model as Transformers loads it, with placeholders for matrices that are kept packed.

    Its parameters are on the device, but for those that Transformers reads itself; buffers that no checkpoint has are
    computed on the host.
    """
    path = reading.path
    try:
        with quiet(), ExitStack() as files:
            source, config, tensors = reading.open(files)
            facts = HeadFacts.of(config)
            if facts:
                source, tensors = None, head_tensors(facts, tensors or _torch_tensors(download(path)))
            renaming, others = (None, set[str]()) if facts else _text_tensors(config, path, tensors)
            if division:
                if tensors is None:
                    raise WeightError(
                        f"the weights of {model_spec.model!r} cannot be divided among GPUs: a part is read of "
                        "safetensors that Nibble reads itself; save them so, or leave --tp out"
                    )
                tensors = division.tensors(tensors, renaming)
            model, info = class_of(config).from_pretrained(
                source,
                config=config,
                state_dict=tensors,
                dtype=getattr(torch, dtype),
                attn_implementation=text_attention(config, hook.NAME),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _check_tensors reports them with the other differences
                trust_remote_code=False,
                key_mapping=renaming,
            )
            if tensors is not None:
                # Transformers does so where it is given a path.
                _set_generation_config(model, download(path))
                others |= {name for name in info["unexpected_keys"] if _is_zero_bias(name, tensors)}
    except SafetensorError as error:
        raise WeightError(
            f"a weight file of {path} is broken or cut short ({error}); download it again"
        ) from error
    except (UnpicklingError, EOFError) as error:
        raise WeightError(
            f"a weight file of {path} is broken, or is no PyTorch checkpoint ({first_line(error)}); "
            "download it again, as safetensors where there is a choice"
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError, ImportError) as error:
        raise WeightError(f"cannot load the weights of {model_spec.model!r} from {path}: {error}") from error
    # Layers that predict further tokens are no part of the model itself.
    others |= {name for name in info["unexpected_keys"] if not facts and is_head_tensor(config, name)}
    info["unexpected_keys"] = set(info["unexpected_keys"]) - others
    _check_tensors(info, model_spec.model)
    loaded: nn.Module = model
    return loaded


def _choice(config: PretrainedConfig, quantization: Quantization) -> online.Choice:
    """Return which matrices of a checkpoint seem to be of linear layers and experts that are quantised."""
    modules = [(online.place(name), name, module) for name, module in _empty_model(config).named_modules()]
    linears = {
        place for place, name, module in modules if type(module) is nn.Linear and quantization.format_of(name)
    }
    experts = {
        f"{place}.{parameter}": bool(module.is_transposed)
        for place, _, module in modules
        for parameter in expert_matrices(module)
        if place
    }
    return online.Choice(
        quantization.rules[0].format, frozenset(linears), frozenset(map(online.layer_of, experts)), experts
    )


def _empty_model(config: PretrainedConfig) -> Any:
    """Return the model without weights."""
    with torch.device("meta"), quiet():
        return class_of(config)._from_config(config)


def _set_generation_config(model: Any, folder: Path) -> None:
    if (folder / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _is_zero_bias(name: str, tensors: dict[str, Any]) -> bool:
    """Return whether a tensor adds nothing, as biases that AutoGPTQ wrote for layers that have none."""
    return name.endswith(".bias") and name in tensors and not tensors[name][...].any()


def _text_tensors(
    config: PretrainedConfig, path: str, tensors: dict[str, Any] | None
) -> tuple[dict[str, str] | None, set[str]]:
    """Return how tensors are renamed, and those of other towers, where Transformers knows the language model alone."""
    raw, _ = PretrainedConfig.get_config_dict(path)
    if nested_text(raw) is None:
        return None, set()
    model = _empty_model(config)
    table = model.get_input_embeddings().weight
    embedding = next(name for name, parameter in model.named_parameters() if parameter is table)
    names = list(tensors or _tensor_names(download(path)))
    renaming = key_mapping(names, embedding)
    is_text = re.compile("|".join(renaming)).match
    return renaming, {name for name in names if not is_text(name)}


def _torch_tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of a head's checkpoint that has files of PyTorch alone, as those of EAGLE-3's authors."""
    tensors = dict[str, Any]()
    for file in sorted(folder.glob("*.bin")):
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    return tensors


def _tensor_names(folder: Path) -> Iterator[str]:
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            yield from tensors.keys()


def prepare_model(model: nn.Module, model_spec: ModelSpec, *, deterministic: bool = False) -> nn.Module:
    """Prepare a loaded model for serving, in place, and return it.

    Args:
        model: as Transformers loads it.
        model_spec: what was observed of it.
        deterministic: leave out kernels that compute few rows in another order than many.

    Raises:
        BackendError: packed matrices cannot be brought into the layout of their kernels.
        ConfigError: what is replaced is not what the family's own code computes.
    """
    # First, because its own code shall compute with the same frequencies, and tabulate_rope() its tables.
    fix_rope(model, model_spec.max_context)
    reference = equivalence.own_outputs(model, model_spec)
    # Before merging and packing, which replace the plain weight of kv_b_proj.
    adapt(model)
    if next(model.parameters()).is_cuda:
        tabulate_rope(model, model_spec.max_context)
    prepare_linears(model, deterministic=deterministic)
    model.eval().requires_grad_(False)
    # Packed layers by their definition: their kernels are still compiled.
    equivalence.check(model, model_spec, reference)
    prepare_quantized(model)
    return model


def _check_files(folder: Path) -> None:
    """Raise WeightError where a local folder lacks weight files."""
    # A hub model is no folder: its files come as they are loaded.
    if not folder.is_dir():
        return
    if not has_weights(folder):
        raise WeightError(
            f"{folder} has no weights: neither *.safetensors nor *.bin beside its config.json; download or save the "
            "checkpoint again (`nibble plan` needs no weights)"
        )
    named = set((read_json(folder / INDEX_FILE).get("weight_map") or {}).values())
    if absent := sorted(name for name in named if not (folder / name).exists()):
        raise WeightError(
            f"{folder} lacks {len(absent)} of the {len(named)} weight files that {INDEX_FILE} names, {absent[0]} "
            "among them: the download may be incomplete"
        )


def _check_tensors(info: dict[str, Any], model: str) -> None:
    """Raise WeightError unless the checkpoint has exactly the model's tensors; KV scales do not count."""
    missing = sorted(info.get("missing_keys", ()))
    unexpected = sorted(key for key in info.get("unexpected_keys", ()) if not is_scale(key))
    mismatched = sorted(_shapes(entry) for entry in info.get("mismatched_keys", ()))
    problems = (
        ("lacks", missing, "the download may be incomplete"),
        (
            "has other shapes than config.json says for",
            mismatched,
            "weights and config.json belong to different models",
        ),
        ("holds, beside those of the model,", unexpected, "they would be ignored, and the answers wrong"),
    )
    for what, keys, meaning in problems:
        if keys:
            raise WeightError(
                f"the checkpoint {model!r} {what} {len(keys)} tensors, {keys[0]} among them: {meaning}"
            )


def _shapes(entry: Any) -> str:
    """Return (name, stored shape, model's shape) as text."""
    name, *shapes = entry if isinstance(entry, (tuple, list)) else (entry,)
    return (
        f"{name} ({' stored, needed '.join(str(tuple(shape)) for shape in shapes)})" if shapes else str(name)
    )


def find_broken_weight(folder: Path | None, model: nn.Module, layer: int) -> str | None:
    """Return `NaN in NAME` of a tensor that can have spoilt a layer's K or V, None where all are finite.

    Args:
        folder: of the checkpoint, where it is on this machine. Its names are those that users know.
        model: whose parameters are looked at where the folder has none.
        layer: where K or V are not finite; what stands nearest before it is looked at first.
    """
    paths = weight_files(folder) if folder else []
    files: list[Any] = [safe_open(path, framework="pt") for path in paths]
    stored: dict[str, Callable[[], Tensor]] = {
        name: partial(file.get_tensor, name) for file in files for name in list(file.keys())
    }
    stored = stored or {name: partial(getattr, weight, "data") for name, weight in model.named_parameters()}
    for name in sorted(stored, key=lambda name: _distance(name, layer)):
        weight = stored[name]()
        # Integers hold packed codes, and FP8 has no test of its own.
        if weight.is_floating_point() and not (values := weight.float()).isfinite().all():
            return f"{'NaN' if values.isnan().any() else 'infinity'} in {name}"
    return None


def _distance(name: str, layer: int) -> tuple[int, bool, str]:
    """Return where a tensor comes in the search: layers downwards, of each first what K and V are made of."""
    number = re.search(r"\.(\d+)\.", name)
    steps = layer - int(number[1]) if number else layer + 1
    return (steps if steps >= 0 else 1 << 20), not re.search(r"attn|attention|input.*norm", name), name


def download(model: str) -> Path:
    """Return the local folder of a model's checkpoint; a hub model is downloaded first. Raise WeightError."""
    path = Path(locate(model))
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                str(path),
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"],
                ignore_patterns=["original/*", "consolidated*"],  # the same weights as their makers have them
            )
        )
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise WeightError(f"cannot fetch {model!r}: {first_line(error)}") from error
