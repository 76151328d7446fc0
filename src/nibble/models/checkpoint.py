"""Load a checkpoint and prepare the model for serving: tensors checked, rope fixed, linear layers packed or merged."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from nibble.errors import WeightError
from nibble.model_spec import ModelSpec
from nibble.models import hook
from nibble.models.hook import adapt
from nibble.models.hub import first_line, locate, quiet
from nibble.models.kv_scales import is_scale
from nibble.models.linear import pack_experts, pack_linears
from nibble.models.merged_linear import merge_and_tune_linears
from nibble.models.mla import fix_rope, tabulate_rope
from nibble.models.refusals import architecture_class


def load(config: PretrainedConfig, model_spec: ModelSpec, dtype: str, device: str) -> nn.Module:
    """Load the weights.

    Args:
        config: from models/refusals.py.
        model_spec: what was observed of the model.
        dtype: compute dtype, a name of torch.
        device: where the model runs.

    Returns:
        The model in eval mode, prepared by prepare_model().

    Raises:
        WeightError: the checkpoint is missing, broken, or another model's.
    """
    path = locate(model_spec.model)
    try:
        with quiet():
            model, info = (architecture_class(config) or AutoModelForCausalLM).from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=hook.NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _check_tensors reports them with the other differences
                trust_remote_code=False,
            )
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
    _check_tensors(info, model_spec.model)
    return prepare_model(model.to(device), model_spec.max_context)


def prepare_model(model: nn.Module, max_context: int) -> nn.Module:
    """Prepare a loaded model for serving, in place, and return it."""
    # First, because it needs the plain weight of kv_b_proj, which merging and packing replace.
    adapt(model)
    # Before tabulate_rope(), which computes its tables with these frequencies.
    fix_rope(model, max_context)
    if next(model.parameters()).is_cuda:
        tabulate_rope(model, max_context)
        merge_and_tune_linears(model)
    else:
        pack_linears(model)
        pack_experts(model)
    return model.eval().requires_grad_(False)


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


def download(model: str) -> Path:
    """Return the local folder of a model's checkpoint; a hub model is downloaded first. Raise WeightError."""
    path = Path(locate(model))
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"])
        )
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise WeightError(f"cannot fetch {model!r}: {first_line(error)}") from error
