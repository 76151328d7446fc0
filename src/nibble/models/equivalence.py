"""Compare a model as it serves with the family's own code, when its weights are loaded.

What is replaced is chosen by how modules are called and what they consist of, and other code may have the same names.
So the first layer of each kind runs twice on a few random tokens: as the family wrote it, before anything is replaced,
and as it serves, by the definition of attention over pages and of recurrent states in float32. That shows all that was
replaced (latents, indexers, recurrent layers, linear layers, experts), and what gets lost between a family and its
attention. Both times a layer behind the
first gets what it got the first time, so that rounding in one does not decide what the next chooses: tokens, experts.

Shape suffixes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from nibble import formats
from nibble.attention import backends
from nibble.attention.planner.plan import GroupPlan, Plan, Route
from nibble.attention.recurrent import RecurrentStates
from nibble.attention.step import StepContext
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import NONE
from nibble.errors import ConfigError, NibbleError
from nibble.kernels.recurrence import BLOCK, StateBatch, layer_state
from nibble.kernels.types import AttentionBatch, AttentionMetadata
from nibble.model_spec import NO_LAYER, LayerGroup, ModelSpec, Phase, RecurrentGroup
from nibble.models import linear
from nibble.models.dsa import lower_topk
from nibble.models.experts import has_packed_experts
from nibble.models.forward import plain
from nibble.models.hub import first_line, quiet
from nibble.models.recurrent import own_forwards

TOKENS = 16
"""Tokens of the comparison, more than dsa.TOP_K, which sparse attention selects in it."""
RECURRENT_TOKENS = 3 * BLOCK + 1
"""Tokens where layers are recurrent: they read a state that was brought forward more than once."""
MAX_LAYERS = 8
"""Most layers that run where layers share KV and none can be left out; a kind that comes later is not compared."""
EXPERTS = 8
"""Experts of a layer that compute in the comparison. Tokens choose nearly all, and reading all takes seconds."""
TOLERANCE = {torch.float32: (1e-3, 0.9)}
"""By dtype the largest error that is taken for rounding, relative to a token's output, and the share of tokens that
must be within. Some may be outside: of nearly equal scores, tokens and experts are chosen by their last bits."""
TOLERANCE_16_BITS = (0.1, 0.5)
REFERENCE = "torch_ref"

Outputs = Mapping[str, Tensor]
"""The outputs of modules by name, in the order of their calls."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What modules computed."""

    outputs: Outputs
    inputs: Mapping[str, Tensor]
    """What layers got, by name, as they got it."""


class _Stop(Exception):
    """Ends a forward pass behind the last layer that is compared."""


def own_outputs(model: Any, model_spec: ModelSpec) -> Recorded:
    """Run the first layer of each kind as the model's family wrote it; the model must not have been adapted.

    Args:
        model: the model, with its weights.
        model_spec: what was observed of it.

    Raises:
        ConfigError: the family's own code fails.
    """
    ids = _random_ids(model, model_spec)
    run = partial(model, input_ids=ids, use_cache=False)
    try:
        with _own_code(model):
            return _record(model, model_spec, _compared_modules(model, model_spec), run, {})
    except (NibbleError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of all kinds: this is foreign code
        raise ConfigError(
            f"{model_spec.family} cannot be compared with its own code, which fails on {ids.shape[1]} tokens "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error


def check(model: Any, model_spec: ModelSpec, reference: Recorded) -> None:
    """Run the same layers as they serve, and raise ConfigError where they differ from `reference`.

    Args:
        model: the model, prepared to serve.
        model_spec: what was observed of it.
        reference: from own_outputs().
    """
    ids = _random_ids(model, model_spec)
    tokens = ids.shape[1]
    positions, rows_S = torch.arange(tokens, device=ids.device)[None], torch.zeros(1, dtype=torch.long)
    run = partial(plain(model), ids, positions, rows_S.to(ids.device), _context(model_spec, ids.device))
    with lower_topk(model), _few_experts(model):
        outputs = _record(model, model_spec, list(reference.outputs), run, reference.inputs).outputs
    limit, share = TOLERANCE.get(model.dtype, TOLERANCE_16_BITS)
    for name, expected in reference.outputs.items():
        error = _error(outputs.get(name), expected, share, tokens)
        if error > limit:
            raise ConfigError(
                f"{model_spec.family} cannot be served: {name} ({type(model.get_submodule(name)).__name__}) as Nibble "
                f"runs it is not what the family's own code computes (off by {error:.2g} of its output on {tokens} "
                f"random tokens, where {limit:g} is allowed)"
            )


def _tokens(model_spec: ModelSpec) -> int:
    return RECURRENT_TOKENS if model_spec.states else TOKENS


def _error(actual: Tensor | None, expected: Tensor, share: float, tokens: int) -> float:
    """Return the error relative to a token's output, within which `share` of the tokens are."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    actual, expected = (
        x.reshape(tokens, -1) if x.numel() % tokens == 0 else x[None] for x in (actual, expected)
    )
    # Weights that are not numbers are not the family's fault.
    is_number_T = expected.isfinite().all(1)
    if not is_number_T.any():
        return 0.0
    norm_T = expected[is_number_T].norm(dim=1)
    difference_T = (actual - expected)[is_number_T].norm(dim=1).nan_to_num(float("inf"))
    # An output near zero is compared with those of the other tokens.
    error_T = difference_T / norm_T.clamp(min=1e-2 * float(norm_T.mean()) + 1e-12)
    return float(error_T.sort().values[int(share * (len(error_T) - 1))])


def _random_ids(model: nn.Module, model_spec: ModelSpec) -> Tensor:
    """Return int64 ids [1, T], without the first and last of the vocabulary, which mean something."""
    low, high = model_spec.vocab_size // 4, model_spec.vocab_size // 2
    ids = torch.randint(
        low, max(high, low + 1), (1, _tokens(model_spec)), generator=torch.Generator().manual_seed(0)
    )
    return ids.to(next(model.parameters()).device)


def _compared_modules(model: Any, model_spec: ModelSpec) -> list[str]:
    """Return the names of the first layer of each kind and of its parts, each layer behind its parts."""
    limit = MAX_LAYERS if _shares_kv(model_spec) else model_spec.layers
    first: dict[object, tuple[str, nn.Module]] = {}
    for name, layer in islice(_layers(model, model_spec), limit):
        first.setdefault(_kind(layer, model_spec), (name, layer))
    return [
        module
        for name, layer in first.values()
        for module in (*(f"{name}.{part}" for part, _ in layer.named_children()), name)
    ]


def _shares_kv(model_spec: ModelSpec) -> bool:
    return any(owner not in (layer, NO_LAYER) for layer, owner in enumerate(model_spec.owner))


def _groups(model_spec: ModelSpec) -> tuple[LayerGroup | RecurrentGroup, ...]:
    return *model_spec.groups, *model_spec.states


def _layers(model: Any, model_spec: ModelSpec) -> Iterator[tuple[str, nn.Module]]:
    """Yield the decoder's layers by name."""
    name, modules = layer_list(model, model_spec)
    yield from ((f"{name}.{i}", layer) for i, layer in enumerate(modules))


def layer_list(model: Any, model_spec: ModelSpec) -> tuple[str, nn.ModuleList]:
    """Return the decoder's layers and their name: the first list of modules with all layers that have a cache."""
    cached = {layer for group in _groups(model_spec) for layer in group.layers}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and _layer_indices(module) >= cached:
            return name, module
    raise ConfigError(f"{model_spec.family} cannot be served: Nibble does not find the list of its layers")


def _layer_indices(module: nn.Module) -> set[int]:
    """Return the indices of the layers in a module that attend or keep a state."""
    indices = (getattr(part, "layer_idx", None) for part in module.modules())
    return {index for index in indices if isinstance(index, int)}


def _kind(layer: nn.Module, model_spec: ModelSpec) -> object:
    """Return what layers of one kind have in common: their classes, and what they need of attention and states."""
    indices = _layer_indices(layer)
    needs = frozenset(group.name for group in _groups(model_spec) if indices.intersection(group.layers))
    return tuple(map(type, layer.modules())), needs


@contextmanager
def _own_code(model: Any) -> Iterator[None]:
    """Let attention, and experts that will be replaced, be computed by the family's own code, in the body."""
    # Other experts stay with what Transformers chose for them: some cannot be computed in another way.
    configs: list[Any] = [
        module.config
        for module in model.modules()
        if linear.has_packable_experts(module) or has_packed_experts(module)
    ]
    before = [config._experts_implementation for config in configs]
    attention = model.config._attn_implementation
    model.eval()
    try:
        with quiet(), lower_topk(model), _few_experts(model), _replace_forwards(own_forwards(model)):
            model.set_attn_implementation("eager")
            for config in configs:
                config._experts_implementation = "eager"
            yield
    finally:
        with quiet():
            model.set_attn_implementation(attention)
        for config, implementation in zip(configs, before, strict=True):
            config._experts_implementation = implementation


@contextmanager
def _few_experts(model: nn.Module) -> Iterator[None]:
    """Let EXPERTS of a layer's experts stand for those that tokens choose, in the body."""
    # What Transformers gives to experts that it calls with the indices of the chosen ones.
    experts = [module for module in model.modules() if hasattr(module, "is_transposed")]
    handles = [module.register_forward_pre_hook(_choose_few) for module in experts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _choose_few(experts: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a layer's tokens, the experts that stand for the chosen ones, and their weights."""
    count = getattr(experts, "num_experts", 0)
    if len(args) != 3 or count <= EXPERTS:
        return None
    x_TH, chosen_TK, weights_TK = args
    spread_TK = chosen_TK % EXPERTS * (count // EXPERTS)
    # Some families choose none by a number behind the last.
    return x_TH, torch.where(chosen_TK < count, spread_TK, chosen_TK), weights_TK


@torch.no_grad()
def _record(
    model: nn.Module, model_spec: ModelSpec, names: Sequence[str], run: Callable[[], Any],
    layer_inputs: Mapping[str, Tensor],
) -> Recorded:  # fmt: skip
    """Call `run` until the last of `names` has been computed; return the first output of each, and inputs of layers.

    layer_inputs: what layers get in the place of their inputs, by name.
    """
    outputs, inputs = dict[str, Tensor](), dict[str, Tensor]()
    latest: Any = None

    def give(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        x = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        inputs.setdefault(name, x.clone())
        other = layer_inputs.get(name)
        if other is None or other.shape != x.shape:
            return None
        return (
            ((other.clone(), *args[1:]), kwargs)
            if args
            else (args, kwargs | {"hidden_states": other.clone()})
        )

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        nonlocal latest
        latest = output
        first = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(first, Tensor) and first.is_floating_point():
            # A copy, because layers add in place.
            outputs.setdefault(name, first.to(torch.float32, copy=True))
        if name == names[-1]:
            raise _Stop

    # A layer of a kind that was compared hands on the output of the layer before it.
    layers = list(_layers(model, model_spec))
    skipped = [] if _shares_kv(model_spec) else [layer for name, layer in layers if name not in names]
    handles = [model.get_submodule(name).register_forward_hook(partial(note, name)) for name in names]
    # What the first one gets shows whether positions are right where they are embedded.
    compared = [(name, layer) for name, layer in layers if name in names]
    handles += [
        layer.register_forward_pre_hook(partial(give, name), with_kwargs=True) for name, layer in compared[1:]
    ]
    try:
        with _replace_forwards(dict.fromkeys(skipped, lambda *args, **kwargs: latest)):
            run()
        raise ConfigError(f"the model cannot be served: its forward pass does not reach {names[-1]}")
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return Recorded(outputs, inputs)


@contextmanager
def _replace_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let other functions compute some modules, in the body."""
    # Only what a module has of its own: another library may have replaced its method already.
    before = [(module, vars(module).get("forward")) for module in forwards]
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, earlier in before:
            del module.forward
            if earlier is not None:
                module.forward = earlier


def _context(model_spec: ModelSpec, device: torch.device) -> StepContext:
    """Return the context of one prompt, over a small pool and states in float32, for the references."""
    tokens = _tokens(model_spec)
    name, owner = formats.plain("float32").name, model_spec.owner
    stored = [
        LayerLayout(layer, tuple(StreamLayout(stream, name) for stream in group.streams))
        for group in model_spec.groups
        for layer in group.layers
        if owner[layer] == layer
    ]
    layout = CacheLayout(tuple(sorted(stored, key=lambda entry: entry.layer)), tokens, "nhd")
    route = Route(Phase.PREFILL, REFERENCE, backends.get(REFERENCE).support[0])
    groups = tuple(GroupPlan(group, group.layers, name, (route,)) for group in model_spec.groups)
    pool = PagedPool(layout, 1, NONE, str(device))
    pages_BN = torch.zeros(1, 1, dtype=torch.int32, device=device)
    batch = AttentionBatch.from_lens(Phase.PREFILL, 0, (tokens,), (tokens,), pages_BN)
    meta = AttentionMetadata(torch.arange(tokens, device=device), (batch,))
    adapters = {REFERENCE: backends.create(backends.get(REFERENCE))}
    plan = Plan(layout, groups, owner, "float32")
    return StepContext(plan, pool, adapters, meta, recurrent=_states(model_spec, tokens, device))


def _states(model_spec: ModelSpec, tokens: int, device: torch.device) -> RecurrentStates | None:
    """Return the states of one prompt, None where no layer has any."""
    layers = {
        layer: layer_state(group, 1, "fp32", torch.float32, 0, device)
        for group in model_spec.states
        for layer in group.layers
    }
    batch = StateBatch(slots=(0,), starts=(0,), lengths=(tokens,), states_at=(0,), settled=(tokens,))
    return RecurrentStates(layers, batch) if layers else None
