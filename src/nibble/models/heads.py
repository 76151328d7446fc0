"""Heads that draft: what their checkpoints say of them, and how their tensors are called here.

A head is one decoder layer that reads a model's hidden states beside the tokens after them. It is named like a model,
with its kind in front, and planned, loaded and served as one (head_model.py):

    mtp:MODEL       a checkpoint's own layer for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)
    eagle3:PATH     an EAGLE-3 checkpoint (arXiv 2503.01840), as its authors' code or as `speculators` writes it

Transformers does not know these layers, so they are built of the family's own decoder layer, and tensors get the names
that they have there:

    input_norm, fc              EAGLE-3: of the hidden states of three layers
    enorm, hnorm, fc            MTP: norms of token and hidden state, and the projection of both
    model.layers.0.*            the decoder layer; EAGLE-3 has a hidden_norm there
    norm, lm_head, embed_tokens the last two where they are not those of the model that is drafted for
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from nibble.errors import ConfigError, WeightError
from nibble.models import refusals
from nibble.models.checkpoint_scales import tensor_names
from nibble.models.hub import EAGLE3, MTP, local_folder, locate, model_file, read_json, split_head

FACTS = "nibble_head"
"""Attribute of a head's config: its HeadFacts, as a dictionary."""
LAYER_FAMILIES = ("llama", "qwen3")
"""Families of the decoder layer of EAGLE-3 heads."""
UNBOUNDED_ROPE, LONGEST_CONTEXT = ("default", "llama3"), 1 << 20
"""Rotary positions that do not depend on the longest context, and the most that is taken for one then."""


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What a head is, beside its decoder layer."""

    kind: str
    spelling: str = ""
    """How the checkpoint calls an MTP layer, a key of SPELLINGS."""
    layer: int = 0
    """Number of the MTP layer where it is counted with the others."""
    hidden_first: bool = False
    """MTP: the hidden state is the first half of what is projected, and not the second."""
    draft_vocab_size: int = 0
    """Tokens that it can draft; 0: all."""
    target_hidden_size: int = 0
    """EAGLE-3: of the model that is drafted for."""
    num_states: int = 3
    """EAGLE-3: layers whose hidden states it reads."""
    state_layers: tuple[int, ...] | None = None
    """EAGLE-3: the layers that get these hidden states; None: the published default."""
    norm_before_residual: bool = False
    """EAGLE-3: the normed hidden state is what attention adds to."""
    norm_before_fc: bool = False
    """EAGLE-3: the hidden states of all layers are normed together."""
    own_embedding: bool = False
    own_output: bool = False
    """Whether the checkpoint has a table of tokens, and an output matrix, of the head's own."""

    @classmethod
    def of(cls, config: Any) -> HeadFacts | None:
        """Return those of a config, None where it is not a head's."""
        values = getattr(config, FACTS, None)
        if not values:
            return None
        layers = values["state_layers"]
        return cls(**{**values, "state_layers": None if layers is None else tuple(layers)})


def load_config(
    model: str, index_topk: int | None = None, *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Return the config of a model or head; see refusals.load_config().

    Args:
        model: a folder or hub name, with the kind of head in front where it is one.
        index_topk: tokens that sparse attention looks at, None for the model's own.
        trust_remote_code: whether code that comes with the checkpoint may run.

    Raises:
        ConfigError: the model or head cannot be served right.
        WeightError: there is no checkpoint, or it is broken.
    """
    kind, path = split_head(model)
    if kind == EAGLE3:
        return _eagle3_config(path)
    config = refusals.load_config(path, index_topk, trust_remote_code=trust_remote_code)
    return _mtp_config(config, path) if kind == MTP else config


# MTP


@dataclass(frozen=True, slots=True)
class Spelling:
    """How checkpoints call the tensors of an MTP layer."""

    prefix: str
    """A pattern of what stands in front of all of them, with the number of the layer as its group."""
    names: Mapping[str, str]
    """Of modules beside the decoder layer: their name -> ours."""
    layer: str = ""
    """What stands in front of the decoder layer's own names, behind the prefix."""
    hidden_first: bool = False

    def rename(self, name: str) -> tuple[int, str] | None:
        """Return the number of a tensor's layer and our name of it; None for a tensor of no MTP layer."""
        match = re.match(self.prefix, name)
        if match is None:
            return None
        number = int(match[1]) if match.groups() else 0
        rest = name[match.end() :]
        module, dot, end = rest.rpartition(".")
        for theirs, ours in self.names.items():
            if module == theirs or module.startswith(theirs + "."):
                return number, f"{ours}{module[len(theirs) :]}{dot}{end}"
        inner = re.match(self.layer, rest) if self.layer else None
        if self.layer and inner is None:
            return None
        if inner is not None:
            number, rest = int(inner[1]), rest[inner.end() :]
        return number, f"model.layers.0.{rest}"


_NEXTN = {
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "fc", "shared_head.norm": "norm", "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}  # fmt: skip
_QWEN = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "fc",
    "norm": "norm",
    "lm_head": "lm_head",
    "embed_tokens": "embed_tokens",
}
_MIMO = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "fc",
    "final_layernorm": "norm",
}
SPELLINGS = {
    "nextn": Spelling(r"(?:model\.|language_model\.)*layers\.(\d+)\.", _NEXTN),
    "mtp": Spelling(r"(?:model\.|language_model\.)*mtp\.", _QWEN, layer=r"layers\.(\d+)\."),
    "mtp_layers": Spelling(r"(?:model\.|language_model\.)*mtp_layers\.(\d+)\.", _MIMO, hidden_first=True),
}
"""DeepSeek's and GLM's, behind the model's own layers; Qwen's; MiMo's."""
MTP_FAMILIES = {
    "deepseek_v3": "nextn", "deepseek_v32": "nextn", "glm4_moe": "nextn", "glm4_moe_lite": "nextn",
    "glm_moe_dsa": "nextn", "qwen3_next": "mtp", "qwen3_5_text": "mtp", "qwen3_5_moe_text": "mtp",
    "qwen2": "mtp_layers",
}  # fmt: skip
"""Families whose checkpoints have such layers -> their spelling. MiMo's is qwen2 with more layers."""


def is_head_tensor(config: PretrainedConfig, name: str) -> bool:
    """Return whether a tensor of a model's checkpoint belongs to its MTP layers, which the model itself has not.

    Args:
        config: of the model.
        name: of the tensor.
    """
    text = config.get_text_config()
    spelling = MTP_FAMILIES.get(text.model_type)
    renamed = SPELLINGS[spelling].rename(name) if spelling else None
    return renamed is not None and (spelling != "nextn" or renamed[0] >= text.num_hidden_layers)


def _mtp_config(model: PretrainedConfig, path: str) -> PretrainedConfig:
    """Return the config of a checkpoint's own head: the family's, with one layer of the right kind."""
    text = model.get_text_config()
    spelling = MTP_FAMILIES.get(text.model_type)
    folder = local_folder(path)
    names = tensor_names(folder) if folder else frozenset()
    own = {name for name in names if is_head_tensor(model, name)}
    if spelling is None or (names and not own):
        raise ConfigError(no_head(path, text.model_type, spelling is not None))
    if not names and not _counts_layers(text):
        raise ConfigError(no_head(path, text.model_type, True))
    config = copy.deepcopy(text)
    if quantization := getattr(model, "quantization_config", None):
        config.quantization_config = quantization
    _keep_one_layer(config)
    first = text.num_hidden_layers if spelling == "nextn" else 0
    facts = HeadFacts(MTP, spelling, first, hidden_first=SPELLINGS[spelling].hidden_first)
    return with_facts(config, facts)


def _counts_layers(text: Any) -> bool:
    """Return whether a config says that there are MTP layers."""
    counts = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    return any(getattr(text, name, None) for name in counts)


def no_head(path: str, family: str, is_known: bool) -> str:
    """Return why a model has no head of its own, and who could draft instead."""
    why = (
        "its checkpoint has no layer for multi-token prediction"
        if is_known
        else f"Nibble knows no layer for multi-token prediction of {family}"
    )
    return (
        f"--speculative mtp: {path} cannot draft for itself, as {why}; what works: --speculative lookup, "
        "eagle3:PATH with a head that was trained for it, or draft:PATH with a smaller model of the same tokenizer"
    )


def _keep_one_layer(config: Any) -> None:
    """Let a config be of one layer that attends to all tokens and, where the family has experts, has them."""
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        kinds = set(config.layer_types) - {"linear_attention", "sliding_attention"}
        config.layer_types = [sorted(kinds)[0] if len(kinds) == 1 else "full_attention"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["sparse"]
    if getattr(config, "indexer_types", None):
        config.indexer_types = ["full"]
    if hasattr(config, "decoder_sparse_step"):
        config.decoder_sparse_step, config.mlp_only_layers = 1, []


# EAGLE-3


def _eagle3_config(path: str) -> PretrainedConfig:
    """Return the config of an EAGLE-3 head: that of its decoder layer, whose family Transformers knows."""
    raw = _raw_config(path)
    layer, own = _layer_config(raw, path), _tensor_outline(path)
    if layer.get("num_hidden_layers", 1) != 1:
        raise _refused(path, f"it has {layer['num_hidden_layers']} layers, and heads of one layer are served")
    family = layer.get("model_type", "llama")
    if family not in LAYER_FAMILIES:
        raise _refused(
            path, f"its layer is one of {family}, and those of {' and '.join(LAYER_FAMILIES)} are served"
        )
    eagle = raw.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise _refused(path, "it reads the hidden state of the last layer alone, as EAGLE-1 does")
    unused = {"num_hidden_layers", "model_type", "auto_map", "layer_types", "architectures", "torch_dtype"}
    values = {name: value for name, value in layer.items() if name not in unused}
    config = AutoConfig.for_model(family, num_hidden_layers=1, **values)
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") in UNBOUNDED_ROPE:
        # Heads are trained on short texts and used for long ones; what is beyond only makes drafts worse.
        config.max_position_embeddings = max(config.max_position_embeddings, LONGEST_CONTEXT)
    layers = _state_layers(raw, eagle)
    draft = int(raw.get("draft_vocab_size") or 0)
    facts = HeadFacts(
        EAGLE3,
        draft_vocab_size=0 if draft == config.vocab_size else draft,
        target_hidden_size=int(raw.get("target_hidden_size") or config.hidden_size),
        num_states=len(layers) if layers else 3,
        state_layers=layers,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", eagle.get("norm_before_fc", False))),
        own_embedding="embed_tokens.weight" in own,
        own_output=not own or "lm_head.weight" in own,
    )
    if not facts.own_output and facts.draft_vocab_size:
        raise _refused(path, "it drafts a part of the tokens and has no output matrix of its own (lm_head)")
    return with_facts(config, facts)


def _raw_config(path: str) -> dict[str, Any]:
    """Return config.json of a head."""
    file = model_file(path, "config.json")
    if file is None:
        raise WeightError(f"{locate(path)} is no checkpoint of a head: it has no config.json")
    return read_json(file)


def _layer_config(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """Return what a head's config says of its decoder layer; raise ConfigError where it is no EAGLE-3 head."""
    if "speculators_config" in raw or "transformer_layer_config" in raw:
        kind = raw.get("speculators_model_type") or (raw["speculators_config"] or {}).get("algorithm")
        if kind != EAGLE3:
            raise _refused(path, f"it is a speculator of the kind {kind}")
        layer: dict[str, Any] = raw["transformer_layer_config"]
        return layer
    names = [str(name) for name in raw.get("architectures") or ()]
    is_eagle = any("eagle3" in name.lower() for name in names) or "draft_vocab_size" in raw
    if not is_eagle:
        raise ConfigError(
            f"--speculative eagle3:{path}: it is no EAGLE-3 head ({', '.join(names) or 'without architectures'}): its "
            f"config.json has neither speculators_config nor draft_vocab_size; a whole model drafts by draft:{path}"
        )
    # Older configs name Llama by the architecture alone.
    return {"model_type": "llama", **raw}


def _state_layers(raw: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layers that get the hidden states which a head reads, None where its config does not say.

    `speculators` names the layers that get them; raw checkpoints those that they come from (`eagle_config`, as
    SpecForge and ModelOpt write it), which are one before.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    if raw.get(name):
        return tuple(int(layer) for layer in raw[name])
    return tuple(int(layer) + 1 for layer in eagle[name]) if eagle.get(name) else None


def default_state_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs EAGLE-3 heads read where their configs name none, as their authors' code does."""
    return 2, num_layers // 2, num_layers - 3


def _tensor_outline(path: str) -> frozenset[str]:
    """Return our names of a head's tensors as far as they can be told without reading them."""
    folder = local_folder(path)
    if folder is None:
        return frozenset()
    names = tensor_names(folder)
    if not names and (file := folder / "pytorch_model.bin").exists():
        import torch

        names = frozenset(torch.load(file, map_location="meta", weights_only=True, mmap=True))
    return frozenset(eagle3_name(name) or "" for name in names)


def eagle3_name(name: str) -> str | None:
    """Return our name of a tensor of an EAGLE-3 checkpoint; None for one that is not needed."""
    name = name.removeprefix("model.")
    if name == "t2d" or name.startswith(("verifier_norm.", "verifier_lm_head.", "rotary_emb.")):
        return None
    name = re.sub(r"^(midlayer|layers\.0)\.", "model.layers.0.", name)
    return re.sub(r"^fc_norm\.", "input_norm.", name)


def _refused(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"--speculative eagle3:{path}: this head cannot be served, as {why}; what works: another head, --speculative "
        "lookup, or draft:PATH"
    )


# Both


def with_facts(config: PretrainedConfig, facts: HeadFacts) -> PretrainedConfig:
    """Return a head's config."""
    setattr(config, FACTS, {**asdict(facts), "state_layers": facts.state_layers and list(facts.state_layers)})
    return config


def head_name(facts: HeadFacts, name: str) -> str | None:
    """Return our name of a tensor of a head's checkpoint; None where it is not the head's, or not needed."""
    if facts.kind == EAGLE3:
        ours = eagle3_name(name)
        if ours == "d2t" and not facts.draft_vocab_size:
            return None
    else:
        number, ours = SPELLINGS[facts.spelling].rename(name) or (-1, None)
        if number != facts.layer:
            return None
    module = (ours or "").partition(".")[0]
    is_shared = (module == "embed_tokens" and not facts.own_embedding) or (
        module == "lm_head" and not facts.own_output
    )
    return None if is_shared else ours


def head_tensors(facts: HeadFacts, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a head's tensors of a checkpoint by our names."""
    renamed = ((head_name(facts, name), x) for name, x in tensors.items())
    return {name: x for name, x in renamed if name is not None}
