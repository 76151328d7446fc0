"""Measure KV scales: run text through the model over an unquantised cache, and fit scales to what it stores.

One measurement serves every scheme: a scale is kept as the largest magnitude that it shall store, for K under each set
of transforms. Usually that is the largest one seen, with HEADROOM. But the K of a few tokens, attention sinks, may be
1,000 to 100,000 times that of all others, and a scale that is fitted to them would leave little of the rest. So a scale
is fitted to the rest, and then doubled until the outliers fit too, as often as that costs the rest nothing to speak of:

- Doubling leaves every mantissa as it was, so that the rest is stored to the same values, until they become so small
  that their steps do not shrink any more. E4M3, which holds the values of FP8 and the block scales of NVFP4, has full
  precision from 2^-6 to 448, a ratio of 28,672, and below that steps of 2^-9. The square error of a value x is about
  6.5e-4 x^2 in the range of full precision (its root, 2.6 %, is the mean over mantissas of 3 bits), and below it
  (2^-9 scale)^2 / 12.
- In three of four blocks of 16 channels, steps below 2^-6 may add 3 % to the sum of square errors, 1.5 % to the error.
  For normally distributed values that allows a scale of 17 standard deviations, hence a largest value of 7,700: as the
  rest goes up to 5 or 6, there is room for tokens that are 1,000 times the rest. Where few channels are large, as their
  rotary frequencies or a bias make them, there is less. A block scale of NVFP4 is that of the largest of 16 values, so
  that NVFP4 loses less than FP8.

What is larger saturates as it is stored, and a note says how much that is.

Shape suffixes: T tokens, H heads, D values of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from nibble import formats
from nibble.attention import backends
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import format_layers
from nibble.cache import scales as kv_scales
from nibble.cache.manager import CacheManager
from nibble.cache.pool import PagedPool
from nibble.cache.scales import E4M3_MAX, KVScales, LayerScales, StreamScale
from nibble.cache.state_pool import StatePool
from nibble.cache.states import StateSlots
from nibble.engine.cache_plan import CachePlan
from nibble.engine.model_runner import ModelRunner, adapters
from nibble.engine.page_tables import PageTables
from nibble.engine.plan import EnginePlan
from nibble.engine.ranks import Rank
from nibble.engine.request import Batch, Request, ScheduledRequest
from nibble.engine.scale_source import AUTO
from nibble.errors import ScaleError, WeightError
from nibble.formats import transforms as transform
from nibble.kernels import cdiv
from nibble.kernels.append.naive import dequantize_tokens
from nibble.model_spec import LATENT
from nibble.models.checkpoint import find_broken_weight
from nibble.models.hub import local_folder

EXACT_STATES = "fp32"
CALIBRATION_TOKENS = 8192
"""Most tokens of text that scales are measured on."""
START_TOKENS_CPU = 1024
"""The same on a CPU where nobody asked for a measurement: a start should take seconds."""
MIN_TOKENS = 64
"""Tokens below which scales are not trusted."""
HEADROOM = 1.25
"""Scales leave room for values this much larger than any that was measured; a float format loses no precision by it."""
USUAL = 0.9
"""The share of tokens that are no outliers, whatever they are: prompts may be short, and each begins with a sink."""
OUTLIER = 16.0
"""Times the largest value of usual tokens from which a token is an outlier."""
E4M3_NORMAL, E4M3_STEP, E4M3_ERROR = 2.0**-6, 2.0**-9, 6.5e-4
"""The smallest number of full precision, the step below it, and the relative square error above it."""
BLOCK, BLOCKS, EXTRA = 16, 0.75, 0.03
"""In this share of blocks of so many channels, outliers may add this share of square errors."""
TEXT = Path(__file__).with_name("calibration.txt")
NAMES = {"k": "K", "v": "V", LATENT: "latent"}


def builtin_texts() -> Sequence[str]:
    """Return a text that comes with Nibble: prose, conversations and code, in several languages."""
    return [TEXT.read_text(encoding="utf-8")]


def start_tokens(device: str) -> int:
    """Return how many tokens are measured at a start that nobody asked to measure."""
    return START_TOKENS_CPU if device == "cpu" else CALIBRATION_TOKENS


def tokens_of_start(cache_plan: CachePlan) -> int:
    """Return how many tokens of the built-in text a start with this plan measures."""
    # Who asks for a measurement gets a thorough one; a start that nobody asked to measure should take seconds.
    is_auto = cache_plan.config.kv_scales == AUTO
    return start_tokens(cache_plan.hardware.device) if is_auto else CALIBRATION_TOKENS


def measure_scales(
    cache_plan: CachePlan,
    model: nn.Module,
    prompts: Iterable[Sequence[int]],
    step_tokens: int,
    max_tokens: int = CALIBRATION_TOKENS,
    all_heads: Callable[[int, Tensor], Tensor] = lambda _, x_THD: x_THD,
) -> KVScales:
    """Measure KV scales: run prompts through the model over an unquantised cache.

    Args:
        cache_plan: the plan, and the model that it is for.
        model: with Nibble's attention.
        prompts: token ids.
        step_tokens: most tokens of a step.
        max_tokens: how many tokens of the prompts are used at most.
        all_heads: returns the values of all heads of a layer, of those that this rank has.

    Raises:
        ScaleError: there are too few tokens, or the model overflows.
        WeightError: the weights have numbers that are none.
    """
    pieces = _cut(prompts, max_tokens, cache_plan.model_spec.max_context)
    require_enough(pieces, max_tokens)
    plain_format = formats.plain(cache_plan.plan.dtype).name
    # Ranges are the model's own only if the cache that they are measured over rounds nothing.
    config = replace(cache_plan.config.with_plain_cache(plain_format), hisparse="")
    plan = resolve(config, cache_plan.model_spec, cache_plan.hardware, backends.available_backends())
    lengths = [cdiv(len(piece), plan.page_size) for piece in pieces]
    pool = PagedPool(plan.layout, sum(lengths), kv_scales.NONE, cache_plan.hardware.device)
    # All prompts stay in the cache, so that statistics need not be gathered on the way.
    groups, count = plan.states, len(pieces)
    states = StatePool(groups, count, EXACT_STATES, plan.dtype, pool.device) if groups else None
    tables = PageTables(count, max(lengths), pool.device)
    runner = ModelRunner(model, plan, pool, adapters(plan), tables, states=states)
    # A page from the prefix cache would be counted twice.
    manager = CacheManager(
        pool.pages, plan.page_size, prefix_cache=False, states=StateSlots(count, count) if groups else None
    )
    slots = [slot for piece in pieces for slot in _prefill(runner, manager, piece, step_tokens)]

    def explain(layer: int, what: str) -> Exception:
        return _explain_broken(cache_plan, model, layer, what)

    return _fit_pool(pool, torch.tensor(slots, device=pool.device), explain, all_heads)


def measure(
    engine_plan: EnginePlan, model: nn.Module, rank: Rank | None, prompts: Sequence[Sequence[int]], most: int
) -> KVScales:
    """Return KV scales that are measured on prompts; all ranks must call this, and have those of all heads then.

    Args:
        engine_plan: of the engine.
        model: of this rank.
        rank: where the model is divided.
        prompts: token ids.
        most: how many tokens of them are used at most.

    Raises:
        ScaleError: there are too few tokens, or the model overflows.
        WeightError: the weights have numbers that are none.
    """
    step_tokens, kv_heads = engine_plan.budget.step_tokens, engine_plan.model_spec.kv_heads
    all_heads = partial(_all_heads, rank, kv_heads) if rank else lambda _, x_THD: x_THD
    return measure_scales(engine_plan, model, prompts, step_tokens, most, all_heads)


def _all_heads(rank: Rank, kv_heads: Sequence[int], layer: int, x_THD: Tensor) -> Tensor:
    """Return the values of all heads of a layer, of which this rank has some."""
    own, whole = x_THD.shape[1], kv_heads[layer]
    if own == whole:
        return x_THD
    gathered_THD = rank.group.all_gather(x_THD.contiguous()).transpose(0, 1).flatten(1, 2)
    # Of a head that several ranks keep, one.
    return gathered_THD[:, :: gathered_THD.shape[1] // whole] if own == 1 else gathered_THD


def require_enough(prompts: Iterable[Sequence[int]], max_tokens: int) -> None:
    """Raise ScaleError where prompts have too few tokens to measure on."""
    num_tokens = min(sum(map(len, prompts)), max_tokens)
    if num_tokens < MIN_TOKENS:
        raise ScaleError(f"calibration needs at least {MIN_TOKENS} tokens of text, and got {num_tokens}")


def _cut(prompts: Iterable[Sequence[int]], max_tokens: int, max_context: int) -> list[Sequence[int]]:
    """Return the prompts up to `max_tokens`; one that is longer than the context becomes several."""
    pieces: list[Sequence[int]] = []
    for prompt in prompts:
        ids = prompt[: max_tokens - sum(map(len, pieces))]
        pieces += [ids[start : start + max_context] for start in range(0, len(ids), max_context)]
    return pieces


def _prefill(
    runner: ModelRunner, manager: CacheManager, ids: Sequence[int], step_tokens: int
) -> Iterable[int]:
    """Compute a prompt, whose pages stay reserved, and return its tokens' slots."""
    request = Request("calibration", ids)
    request.lease = manager.open(request.token_ids, "", private=True)
    for start in range(0, len(ids), step_tokens):
        item = ScheduledRequest.next_chunk(request, min(step_tokens, len(ids) - start))
        manager.reserve(request.lease, item.end)
        runner.forward(Batch((item,)))
        manager.commit(request.lease, request.token_ids, item.end)
    size, pages = manager.page_size, request.lease.pages
    return (pages[i // size] * size + i % size for i in range(len(ids)))


# Statistics


@dataclass(frozen=True, slots=True)
class Fit:
    """The range of one stream of one layer, and the largest magnitude that is fitted."""

    largest: float
    usual: float
    """What nine in ten tokens stay below."""
    limit: float
    num_clipped: int = 0
    """Tokens with larger values."""


@dataclass
class _Notes:
    """What is clipped, by stream and layer."""

    clipped: dict[str, dict[int, Fit]] = field(default_factory=dict)

    def add(self, stream: str, layer: int, fitted: Fit) -> None:
        if fitted.num_clipped:
            self.clipped.setdefault(stream, {})[layer] = fitted

    def lines(self, num_tokens: int) -> tuple[str, ...]:
        return tuple(_clip_note(stream, fits, num_tokens) for stream, fits in self.clipped.items())


def _clip_note(stream: str, fits: Mapping[int, Fit], num_tokens: int) -> str:
    layer, worst = max(fits.items(), key=lambda entry: entry[1].largest / entry[1].usual)
    return (
        f"{NAMES[stream]} of layer {layer} reaches {worst.largest:.4g} in {worst.num_clipped} of {num_tokens:,} "
        f"tokens, while {USUAL:.0%} of the tokens stay below {worst.usual:.4g}: such attention sinks are clipped to "
        f"{worst.limit:.4g}, so that the others keep their precision (in layers {format_layers(tuple(fits))})"
    )


def fit(x_THD: Tensor) -> Fit:
    """Return what is fitted to the values [T, H, D] of a stream; see the top of this file."""
    token_T = x_THD.abs().amax((-2, -1))
    largest, usual = float(token_T.max()), float(token_T.quantile(USUAL))
    limit = HEADROOM * float(token_T[token_T <= OUTLIER * usual].max())
    if 0 < limit < HEADROOM * largest:
        enough = math.ceil(math.log2(HEADROOM * largest / limit))
        usual_THD = x_THD[token_T <= OUTLIER * usual]
        steps = takewhile(lambda n: _costs_little(usual_THD, limit * 2.0**n / E4M3_MAX), range(1, enough + 1))
        limit *= 2.0 ** max(steps, default=0)
    # Nearly all tokens are zeros, or all are. Zeros are stored exactly with any scale.
    limit = limit or HEADROOM * largest or 1.0
    return Fit(largest, usual, limit, int((token_T > limit).sum()))


def _costs_little(x_THD: Tensor, scale: float) -> bool:
    """Return whether values [T, H, D] lose little where an E4M3 scale is so large."""
    x_TC = x_THD.flatten(1)
    x_TBC = x_TC.unflatten(1, (-1, BLOCK if x_TC.shape[1] % BLOCK == 0 else x_TC.shape[1]))
    # Zeros are stored exactly.
    small_TBC = (x_TBC.abs() < E4M3_NORMAL * scale) & (x_TBC != 0)
    extra_B = small_TBC.float().mean((0, 2)) * (E4M3_STEP * scale) ** 2 / 12
    usual_B = x_TBC.square().mean((0, 2)) * E4M3_ERROR
    return bool((extra_B <= EXTRA * usual_B).float().mean() >= BLOCKS)


def _usual_mean(x_THD: Tensor) -> Tensor:
    """Return the mean [H, D] of tokens that are no outliers: one of 100,000 times the rest would move it by many."""
    token_T = x_THD.abs().amax((-2, -1))
    usual_THD = x_THD[token_T <= OUTLIER * token_T.quantile(USUAL)]
    # A float32 sum over thousands of tokens would cost the mean its last digits.
    return usual_THD.double().mean(0).float()


def _fit_pool(
    pool: PagedPool,
    slots: Tensor,
    explain: Callable[[int, str], Exception],
    all_heads: Callable[[int, Tensor], Tensor],
) -> KVScales:
    """Return the scales of all layers, fitted to the tokens at `slots`."""
    layers, notes = {}, _Notes()
    for stored in pool.layout.without_index.layers:
        view, layer = pool.view(stored.layer), stored.layer
        values: dict[str, Tensor] = {}
        for entry in stored.streams:
            name = entry.stream.name
            x_THD = values[name] = all_heads(layer, dequantize_tokens(view.streams[name].paged, slots))
            if not x_THD.isfinite().all():
                kind = "NaN" if x_THD.isnan().any() else "infinite"
                raise explain(layer, f"layer {layer}'s {NAMES[name]} is {kind}")
            notes.add(name, layer, fit(x_THD))
        layers[layer] = _fit_layer(values)
    return KVScales(f"measured on {len(slots):,} tokens", layers, notes=notes.lines(len(slots)))


def _fit_layer(values: dict[str, Tensor]) -> LayerScales:
    k_THD = values.get("k")
    # Transforms are for keys alone, so a latent has one scale.
    if k_THD is None:
        return LayerScales({name: _scale(x_THD) for name, x_THD in values.items()})
    rotate, mean_HD = transform.get("rot").key, _usual_mean(k_THD)
    streams = values | {
        "k+rot": rotate(k_THD, None),
        "k+kmean": k_THD - mean_HD,
        "k+kmean+rot": rotate(k_THD - mean_HD, None),
    }
    mean = tuple(tuple(head) for head in mean_HD.tolist())
    return LayerScales({name: _scale(x_THD) for name, x_THD in streams.items()}, mean)


def _scale(x_THD: Tensor) -> StreamScale:
    return StreamScale(fit(x_THD).limit, 1.0)


def _explain_broken(cache_plan: CachePlan, model: nn.Module, layer: int, what: str) -> Exception:
    """Return the error for K or V of a layer that are not finite: the weights are broken, or a dtype overflows."""
    name, dtype = cache_plan.config.model, cache_plan.plan.dtype
    if broken := find_broken_weight(local_folder(name), model, layer):
        return WeightError(
            f"{what}: the weights of {name} contain {broken}; download or save the checkpoint again"
        )
    return ScaleError(
        f"{what}, though all weights of {name} are finite: the model overflows in {dtype}; use another --dtype"
    )
