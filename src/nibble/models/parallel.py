"""Divide a model among ranks: a rank runs the family's own code under a config of one N-th of the heads.

What is divided is observed. The config is given fewer heads, narrower MLPs and a smaller vocabulary, one after the
other, and a model is made of both configs without weights. Where the shapes of their parameters differ, these are
divided: outputs of a linear layer (columns), inputs (rows: what it computes is summed over ranks), experts along their
inner width, tables of the vocabulary. What cannot be divided so, as a norm over all heads, goes back to its size: every
rank then computes all of it, and the plan says so.

KV heads of which there are fewer than ranks are kept by several; the latents of MLA, index keys, routers and norms by
all. A family is divided only if its answers have been compared (VERIFIED), for a config may say more than shapes show.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from nibble.errors import ConfigError
from nibble.model_spec import LATENT, ModelSpec
from nibble.models.experts import expert_matrices
from nibble.models.hook import Call, Observer, adapt
from nibble.models.observe import bare_skeleton, observe, record_calls
from nibble.models.parallel_experts import OwnExperts, divide_experts
from nibble.models.parallel_ways import Ways
from nibble.models.shards import PartOfWhole, Shard, Split, intervals

VERIFIED = frozenset({
    "afmoe", "apertus", "arcee", "axk1", "bamba", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "dots1", "ernie4_5", "exaone4", "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_neox", "gpt_oss", "granite", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "kimi_linear", "lfm2", "llama", "llama4_text", "minicpm3",
    "minimax", "minimax_m2", "ministral", "ministral3", "mistral", "mistral4", "mixtral", "nanochat", "nemotron_h",
    "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "starcoder2", "vaultgemma", "youtu",
})  # fmt: skip
"""Families whose answers were those of one rank in tests/integration/test_parallel_families.py."""
HEADS, LINEAR_ATTENTION = "attention", "linear attention"
"""What is divided by heads; attention also by requests."""
WIDTHS = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", "dense_intermediate_size",
    "prefix_dense_intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "expert_ffn_hidden_size",
    "intermediate_size_mlp",
)  # fmt: skip
"""What configs call the inner widths of MLPs and experts."""
LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
"""What they call the heads of linear attention."""
LARGEST = 64
"""Most ranks that a message proposes."""

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a whole tensor, and of a rank's part."""
Change = Callable[[Any], None]
"""Divides something in the text part of a config."""


@dataclass(frozen=True, slots=True)
class Divided:
    """A config of one rank, and what it does not divide."""

    config: PretrainedConfig
    replicated: tuple[str, ...]
    """In words."""
    kv_heads: tuple[int, ...]
    """KV heads of each layer of the whole model."""


def observe_part(
    config: PretrainedConfig, name: str, dtype: str, max_context: int | None, weights: str | None, ways: Ways
) -> ModelSpec:
    """Return what the model of one rank needs of attention; see observe() and divide()."""
    part = divide(config, ways)
    spec = observe(part.config, name, dtype, max_context, weights)
    return replace(
        spec, vocab_size=config.get_text_config().vocab_size, tp=ways.size, kv_heads=part.kv_heads,
        replicated=part.replicated, ways=ways.names,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """What of a model's modules is divided, by the names of parameters and modules."""

    shapes: Mapping[str, Shapes]
    """Of parameters that are divided: the whole, and a rank's."""
    rows: tuple[str, ...]
    """Linear layers of whose inputs a rank has a part: outputs are summed."""
    experts: tuple[str, ...]
    """Modules with experts of which a rank has some, or of each a part of its inner width: outputs are summed."""
    whole_experts: tuple[str, ...]
    """Those of them of which it has some."""
    is_vocabulary_divided: bool


class _CannotDivideError(Exception):
    """A config cannot be divided in the way that is tried."""


def divide(config: PretrainedConfig, ways: Ways) -> Divided:
    """Return the config of one rank.

    Args:
        config: of the whole model, which is not changed.
        ways: how it is divided.

    Raises:
        ConfigError: the heads are no multiple of it, or nobody has compared the family's answers.
    """
    text = config.get_text_config()
    if text.model_type not in VERIFIED:
        raise ConfigError(
            f"--tp {ways.size}: {text.model_type} cannot be divided among GPUs yet: nobody has compared its answers "
            f"with those of one GPU; families that were compared: {', '.join(sorted(VERIFIED))}"
        )
    return divided(config, ways)


def divided(config: PretrainedConfig, ways: Ways) -> Divided:
    """Return the same for any family; see divide()."""
    text, size = config.get_text_config(), ways.size
    if not ways.attention_dp:
        _check_heads(text, size)
    whole = bare_skeleton(copy.deepcopy(config))
    observer = _observer(bare_skeleton(copy.deepcopy(config)))
    if ways.expert_parallel:
        config = copy.deepcopy(config)
        divide_experts(whole, config.get_text_config(), size)
    attempt = partial(_tried, config, whole, observer, size)
    changes, kv_heads = dict(_changes(text, size)), _heads_by_layer(observer.calls, text.num_hidden_layers)
    replicated = list(_indivisible(text, size))
    if ways.attention_dp:
        changes.pop(LINEAR_ATTENTION, None)
        del changes[HEADS]
        replicated.append(f"{HEADS} (each GPU attends for requests of its own)")
    try:
        part, states = attempt(list(changes.values()))
        return _checked(whole, Divided(part, (*replicated, *states), kv_heads), ways)
    except _CannotDivideError:
        pass
    accepted = list[Change]()
    for what, change in changes.items():
        try:
            attempt([*accepted, change])
            accepted.append(change)
        except _CannotDivideError as error:
            replicated.append(f"{what} ({error})")
    part, states = attempt(accepted)
    return _checked(whole, Divided(part, (*replicated, *states), kv_heads), ways)


def _checked(whole: nn.Module, part: Divided, ways: Ways) -> Divided:
    """Return a part; raise ConfigError where rows of other ranks cannot be gathered for its divided layers."""
    if ways.attention_dp:
        tokenwise_modules(whole, layout(whole, bare_skeleton(copy.deepcopy(part.config))))
    return part


def _heads_by_layer(calls: Sequence[Call], layers: int) -> tuple[int, ...]:
    heads = {call.layer: next(iter(call.streams.values())).shape[1] for call in calls}
    return tuple(heads.get(layer, 0) for layer in range(layers))


def _observer(model: Any) -> Observer:
    """Return how the layers of a bare model attend, and what states they keep; it is adapted."""
    return record_calls(adapt(model).eval(), model.config.get_text_config().model_type)


def _check_heads(text: Any, size: int) -> None:
    heads, kv_heads = text.num_attention_heads, _kv_heads(text)
    if _fits(heads, kv_heads, size):
        return
    fitting = [n for n in range(1, LARGEST + 1) if _fits(heads, kv_heads, n)]
    nearest = min(fitting, key=lambda n: (abs(n - size), n))
    raise ConfigError(
        f"--tp {size}: {heads} heads over {kv_heads} KV heads cannot be divided among {size} GPUs; the nearest number "
        f"that works is --tp {nearest}"
    )


def _fits(heads: int, kv_heads: int, size: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _kv_heads(text: Any) -> int:
    heads = getattr(text, "num_key_value_heads", None)
    return int(heads if isinstance(heads, int) and heads else text.num_attention_heads)


def _changes(text: Any, size: int) -> Iterator[tuple[str, Change]]:
    """Yield what may be divided, in words, and how."""
    yield HEADS, partial(_divide_heads, size)
    for name in WIDTHS:
        value = getattr(text, name, None)
        widths = value if isinstance(value, list | tuple) else [value]
        if value and all(isinstance(width, int) and width % size == 0 for width in widths):
            yield f"layers of {name}", partial(_divide_number, name, size)
    if all(getattr(text, name, None) and getattr(text, name) % size == 0 for name in LINEAR_HEADS):
        yield LINEAR_ATTENTION, partial(_divide_linear_heads, size)
    if text.vocab_size % size == 0:
        yield "the tables of the vocabulary", partial(_divide_vocabulary, size)


def _indivisible(text: Any, size: int) -> Iterator[str]:
    """Yield what is no multiple of the number of ranks."""
    for name in (*WIDTHS, "vocab_size"):
        value = getattr(text, name, None)
        widths = value if isinstance(value, list | tuple) else [value]
        if value and any(isinstance(width, int) and width % size for width in widths):
            yield f"layers of {name} ({value} is no multiple of {size})"
    if any(getattr(text, name, 0) and getattr(text, name) % size for name in LINEAR_HEADS):
        counts = " and ".join(str(getattr(text, name)) for name in LINEAR_HEADS)
        yield f"linear attention ({counts} heads are no multiples of {size})"


def _divide_heads(size: int, text: Any) -> None:
    heads, kv_heads = text.num_attention_heads, _kv_heads(text)
    if not getattr(text, "kv_lora_rank", None):
        # Else it would follow from the number of heads.
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads = heads // size
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = max(kv_heads // size, 1)


def _divide_number(name: str, size: int, text: Any) -> None:
    value = getattr(text, name)
    setattr(
        text, name, [width // size for width in value] if isinstance(value, list | tuple) else value // size
    )


def _divide_linear_heads(size: int, text: Any) -> None:
    for name in LINEAR_HEADS:
        _divide_number(name, size, text)


def _divide_vocabulary(size: int, text: Any) -> None:
    _divide_number("vocab_size", size, text)
    # Of use to training alone, and perhaps of another rank.
    text.pad_token_id = None


def _tried(
    config: PretrainedConfig, whole: nn.Module, observer: Observer, size: int, changes: Sequence[Change]
) -> tuple[PretrainedConfig, tuple[str, ...]]:
    """Return a config with all changes, and which layers with states it leaves whole, in words.

    Raises:
        _CannotDivideError: its model is not a part of the whole one.
    """
    changed = copy.deepcopy(config)
    for change in changes:
        change(changed.get_text_config())
    try:
        part = bare_skeleton(copy.deepcopy(changed))
        layout(whole, part)
        other = _observer(part)
    except ConfigError as error:
        raise _CannotDivideError("its code does not take fewer") from error
    _compare_calls(observer.calls, other.calls, size)
    pairs = zip(observer.recurrent_calls, other.recurrent_calls, strict=True)
    rules = dict.fromkeys(a.rule for a, b in pairs if a.arguments["x"].shape == b.arguments["x"].shape)
    states = (f"layers with recurrent states ({', '.join(rules)})",) if rules else ()
    return changed, states


def _compare_calls(whole: Sequence[Call], part: Sequence[Call], size: int) -> None:
    """Raise _CannotDivideError unless layers attend as in the whole model, over a part of the heads or all."""
    for one, other in zip(whole, part, strict=True):
        heads, own_heads = one.query.shape[1], other.query.shape[1]
        groups = {name: (x.shape[1], other.streams[name].shape[1]) for name, x in one.streams.items()}
        same = one.params.window == other.params.window and one.params.scale == other.params.scale
        sizes = [(x.shape[-1], other.streams[name].shape[-1]) for name, x in one.streams.items()] + [
            (one.width, other.width)
        ]
        if not same or any(a != b for a, b in sizes):
            raise _CannotDivideError("a head's size or scale would follow from the number of heads")
        if own_heads not in (heads, heads // size):
            raise _CannotDivideError(f"{own_heads} of {heads} heads")
        for name, (all_groups, own) in groups.items():
            expected = all_groups if name == LATENT or own_heads == heads else max(all_groups // size, 1)
            if own != expected:
                raise _CannotDivideError(f"{own} of {all_groups} KV heads")


def layout(whole: Any, part: Any) -> Layout:
    """Return what differs between a model and that of one rank, both without weights.

    Raises:
        _CannotDivideError: something differs that nothing is known of.
    """
    shapes, rows, experts, by_number = dict[str, Shapes](), list[str](), list[str](), list[str]()
    own = dict(part.named_parameters(remove_duplicate=False))
    for name, x in whole.named_parameters(remove_duplicate=False):
        other = own.get(name)
        if other is None or other.dim() != x.dim():
            raise _CannotDivideError(f"{name} is another parameter")
        if other.shape == x.shape:
            continue
        shapes[name] = tuple(x.shape), tuple(other.shape)
        path, _, leaf = name.rpartition(".")
        if _is_by_number(whole, path, shapes[name]):
            by_number.append(path)
        else:
            _classify((whole, part), path, leaf, shapes[name], rows, experts)
    others = dict(part.named_buffers())
    for name, x in whole.named_buffers():
        if name not in others or others[name].shape != x.shape:
            raise _CannotDivideError(f"{name} is computed for all heads")
    table = next((n for n, x in whole.named_parameters() if x is whole.get_input_embeddings().weight), "")
    whole_experts = tuple(dict.fromkeys(by_number))
    experts_of_all = tuple(dict.fromkeys([*experts, *whole_experts]))
    return Layout(shapes, tuple(dict.fromkeys(rows)), experts_of_all, whole_experts, table in shapes)


def rows_of(model: nn.Module, layout: Layout) -> tuple[str, ...]:
    """Return the layers whose outputs are summed; not those of shared experts that others compute with theirs."""
    present = dict(model.named_modules())
    return tuple(name for name in layout.rows if name in present)


def tokenwise_modules(model: Any, layout: Layout) -> tuple[str, ...]:
    """Return the modules around layers of whose inputs a rank has a part, which compute each token by itself: MLPs.

    Raises:
        ConfigError: one of them reads more than the tokens.
    """
    paths = tuple(dict.fromkeys(name.rpartition(".")[0] for name in rows_of(model, layout)))
    for path in paths:
        # Itself, and the tokens.
        if len(inspect.signature(type(model.get_submodule(path)).forward).parameters) != 2:
            raise ConfigError(
                f"{type(model).__name__} is not served with --attention-dp: its MLPs are no modules of their own; "
                "leave the option out"
            )
    return paths


def _is_by_number(whole: Any, path: str, shapes: Shapes) -> bool:
    """Return whether a parameter is one of experts of which a rank has some."""
    return shapes[0][1:] == shapes[1][1:] and bool(expert_matrices(whole.get_submodule(path)))


def _classify(
    models: tuple[Any, Any], path: str, leaf: str, shapes: Shapes, rows: list[str], experts: list[str]
) -> None:
    """Note what becomes of the outputs of a parameter's module; raise _CannotDivideError where that is not known."""
    whole, _ = models
    module, name = whole.get_submodule(path), f"{path}.{leaf}"
    dims = [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
    if len(dims) != 1:
        raise _CannotDivideError(f"{name} would be divided both ways")
    if expert_matrices(module):
        if leaf.startswith("down_proj"):
            if leaf != "down_proj":
                raise _CannotDivideError(f"{name} is divided")
            experts.append(path)
        elif getattr(module, "has_post_expert_norm", False):
            raise _CannotDivideError("experts are followed by a norm of each")
    elif type(module) is nn.Linear or isinstance(module, Conv1D):
        inputs = 1 if type(module) is nn.Linear else 0
        if leaf == "weight" and dims == [inputs]:
            rows.append(path)
        sections_of(models, name, shapes, dims[0])
    elif isinstance(module, nn.Embedding):
        if module is not whole.get_input_embeddings():
            raise _CannotDivideError(f"{name} is another table")
    elif "Norm" in type(module).__name__:
        raise _CannotDivideError("a norm goes over all heads")
    elif isinstance(module, nn.Conv1d):
        sections_of(models, name, shapes, dims[0])
    elif dims != [0] or len(shapes[0]) != 1:
        raise _CannotDivideError(f"nothing is known of {name}")


def sections_of(models: tuple[Any, Any], name: str, shapes: Shapes, dim: int) -> list[tuple[int, int]]:
    """Return whole and part of each section of a divided dimension, by how families lay out what they fuse.

    Args:
        models: the whole one and that of a rank, without weights.
        name: of the parameter, or of a tensor of a checkpoint.
        shapes: whole and part.
        dim: the dimension.

    Raises:
        _CannotDivideError: it is fused in a way that is not known.
    """
    whole, _ = models
    full, own = shapes[0][dim], shapes[1][dim]
    path, _, leaf = name.rpartition(".")
    what = leaf if leaf not in ("weight", "bias") else path.rpartition(".")[2]
    sections = [(full, own)]
    if what in ("gate_up_proj", "gate_up_proj_bias") and dim == _outputs(whole, path, shapes[0]):
        if getattr(_module(whole, path), "is_concatenated", True):
            sections = [(full // 2, own // 2)] * 2
    elif what in _FUSED:
        sections = list(zip(*(_FUSED[what](model.config.get_text_config()) for model in models), strict=True))
    elif what in ("Wqkv", "c_attn", "qkv", "wqkv"):
        raise _CannotDivideError(f"{name} fuses heads of several kinds")
    if (sum(a for a, _ in sections), sum(b for _, b in sections)) != (full, own):
        raise _CannotDivideError(f"{name} is fused in a way that is not known")
    return sections


def _heads_of(text: Any) -> tuple[int, ...]:
    """Return the outputs of a layer for queries, keys and values."""
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_attention_heads * dim, _kv_heads(text) * dim, _kv_heads(text) * dim


def _channels_of(text: Any) -> tuple[int, ...]:
    """Return the same of linear attention."""
    keys, values = (getattr(text, name, 0) for name in LINEAR_HEADS)
    keys, values = (
        keys * getattr(text, "linear_key_head_dim", 0),
        values * getattr(text, "linear_value_head_dim", 0),
    )
    return keys, keys, values


_FUSED: Mapping[str, Callable[[Any], tuple[int, ...]]] = {
    "qkv_proj": _heads_of, "conv1d": _channels_of, "in_proj_qkv": _channels_of,
}  # fmt: skip
"""Layers that compute several things, one behind the other, by their name."""


def _module(whole: Any, path: str) -> Any:
    try:
        return whole.get_submodule(path)
    except AttributeError:
        return None


def _outputs(whole: Any, path: str, shape: Sequence[int]) -> int:
    """Return the dimension of a matrix's outputs."""
    if len(shape) == 3:
        return 2 if getattr(_module(whole, path), "is_transposed", False) else 1
    return (
        len(shape) - 1
        if len(shape) == 2 and _module(whole, path) is not None and expert_matrices(_module(whole, path))
        else 0
    )


def splits(whole: Any, part: Any, shard: Shard) -> tuple[dict[str, Split], OwnExperts]:
    """Return what a rank has of tensors, by the names of parameters, and by those that a checkpoint has for them.

    Experts that a checkpoint stores one by one, and of which a rank has some, come apart.

    Args:
        whole: the whole model, without weights.
        part: that of a rank.
        shard: the rank.
    """
    from transformers.core_model_loading import revert_weight_conversion

    states = [dict(model.named_parameters(remove_duplicate=False)) for model in (whole, part)]
    stored: list[dict[str, Any]] = [
        revert_weight_conversion(model, state) for model, state in zip((whole, part), states, strict=True)
    ]
    result = dict[str, Split]()
    for one, other in (states, stored):
        for name, x in one.items():
            if name in other and other[name].shape != x.shape:
                result[name] = _split((whole, part), name, x, other[name], shard)
    return result, OwnExperts(stored[0], stored[1], shard)


def _split(models: tuple[Any, Any], name: str, x: Tensor, own: Tensor, shard: Shard) -> Split:
    shapes = tuple(x.shape), tuple(own.shape)
    (dim,) = (dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b)
    return Split(dim, intervals(shard, sections_of(models, name, shapes, dim)))


class Division:
    """What a rank loads of a checkpoint.

    Args:
        whole: the config of the whole model.
        part: that of a rank, from divide().
        shard: the rank.
    """

    def __init__(self, whole: PretrainedConfig, part: PretrainedConfig, shard: Shard) -> None:
        self.shard = shard
        models = bare_skeleton(copy.deepcopy(whole)), bare_skeleton(copy.deepcopy(part))
        self.layout = layout(*models)
        self.splits, self.own_experts = splits(*models, shard)

    def tensors(self, stored: Mapping[str, Any], renaming: Mapping[str, str] | None) -> dict[str, Any]:
        """Return the rank's parts of a checkpoint's tensors by name.

        Args:
            stored: all tensors, to be read by [...].
            renaming: by which Transformers finds the names of the model in those of the checkpoint.
        """
        result = dict[str, Any]()
        for stored_name, x in stored.items():
            name = stored_name
            for pattern, replacement in (renaming or {}).items():
                name = re.sub(pattern, replacement, name)
            if (own := self.own_experts.name_of(name, stored_name)) is not None:
                result[own] = self._part(name, x)
        return result

    def _part(self, name: str, stored: Any) -> Any:
        split = self.splits.get(name)
        if split is None:
            return stored
        if hasattr(
            stored, "part"
        ):  # a matrix that is stored quantised, or a tensor that lies in a file as it is
            return stored.part(split)
        return PartOfWhole(stored, split)
