"""What a cache scheme costs in predictions: perplexity, agreement with the yardstick, and attention error by layer.

Perplexity is teacher-forced through the quantised cache, over held-out text. A text is cut into windows of `size`
tokens that start `stride` tokens apart. Every token but the text's first is scored exactly once, in the first window
that reaches it: a window after the first scores its last `stride` tokens, and the tokens before them are context only.
A smaller stride gives every scored token more context, for more time.

Agreement asks whether the likeliest next token is the same, and how far apart the distributions are:
KL(yardstick || scheme), in nats. To bound memory, the yardstick's KEEP likeliest tokens are remembered one by one, and
all others as one event; so for a larger vocabulary the value is a (close) lower bound of the full sum.

The attention error is how far a scheme moves a layer's attention output on the very same inputs. So it is of one layer
alone, not of all layers before it.

Shape suffixes: T tokens of a window or prompt, S scored tokens, V vocabulary, K remembered tokens, H query heads,
G KV heads, D values of a head; a leading 1 is Transformers' batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nibble.attention.planner.plan import Plan
from nibble.attention.recurrent import RecurrentStates
from nibble.attention.step import StepContext
from nibble.attention.window import ExactCache
from nibble.cache import scales as kv_scales
from nibble.cache.pool import PagedPool
from nibble.cache.scales import KVScales
from nibble.cache.state_pool import StatePool
from nibble.engine.calibration import builtin_texts
from nibble.engine.model_runner import adapters
from nibble.engine.plan import EnginePlan
from nibble.engine.ranks import Rank
from nibble.errors import ConfigError, WeightError
from nibble.kernels import cdiv
from nibble.kernels.recurrence import StateBatch
from nibble.kernels.types import AttentionBatch, AttentionMetadata
from nibble.model_spec import Phase
from nibble.models import hook
from nibble.models.checkpoint import download
from nibble.models.hook import attention_mask_for
from nibble.models.recurrent import RecurrentCall
from nibble.models.shards import Shard

HELDOUT = "heldout.txt"
LOGIT_BYTES = 1 << 30
"""Logits of one window take no more, unless a window is asked for."""
LEAST_WINDOW = 512
CALIBRATION_TOKENS = 4096
LEAST_CALIBRATION = 1024


BUILTIN = "built-in"
"""The name of the text that comes with Nibble."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text to score."""

    name: str
    content: str


def read_text(path: Path | None, model: str, *, builtin: bool = False) -> Text:
    """Return the text to score.

    Args:
        path: Of a file; None: heldout.txt in the model's folder.
        model: Whose folder that is.
        builtin: Take the text that comes with Nibble where the model has none.

    Raises:
        ConfigError: There is no text, or it cannot be read.
        WeightError: The model's folder is not there.
    """
    if path is None:
        try:
            path = download(model) / HELDOUT
        except OSError as error:
            raise WeightError(f"cannot find the checkpoint of {model!r}: {error}") from error
        if not path.exists() and builtin:
            return Text(BUILTIN, "\n".join(builtin_texts()))
        if not path.exists():
            raise ConfigError(
                f"{model!r} brings no {HELDOUT} to score; name a text that it was not trained on with --text FILE"
            )
    try:
        return Text(path.name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Parts:
    """A text, cut into what is scored and what scales are measured on."""

    scored: tuple[int, ...]
    """Token ids."""
    calibration: str
    """Text beyond the scored tokens."""
    bytes_per_token: float
    """Of what is scored."""
    digest: str
    """Of the whole text."""


def split_text(
    text: str,
    tokens: int,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    skip: int = 0,
) -> Parts:
    """Return `tokens` tokens after the first `skip`, and what follows; if that is short, a built-in text calibrates."""
    total = len(ids := encode(text))
    ids = ids[skip:]
    if len(ids) < 2:
        skipped = f", of which {skip:,} are skipped" if skip else ""
        raise ConfigError(f"the text has {total:,} tokens{skipped}; at least 2 are needed to score one")
    # The parts do not overlap: scales that are measured on the scored text would flatter a scheme.
    scored, rest = ids[:tokens], ids[tokens : tokens + CALIBRATION_TOKENS]
    calibration = decode(rest) if len(rest) >= LEAST_CALIBRATION else builtin_texts()[0]
    size = len(decode(scored).encode())
    # Reports can be compared only where this is the same.
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Parts(tuple(scored), calibration, max(size, 1) / len(scored), digest)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that the model computes together."""

    ids: tuple[int, ...]
    scored: int
    """How many of them, counted from the end, are scored."""

    @property
    def targets_S(self) -> Tensor:
        """Return the tokens that are scored."""
        return torch.tensor(self.ids[-self.scored :])

    def predictions(self, logits_TV: Tensor) -> Tensor:
        """Return the rows [S, V] of the window's logits that foretell the scored tokens."""
        # Row t foretells token t + 1, so rows lie one before their targets.
        return logits_TV[-self.scored - 1 : -1]


def windows(ids: Sequence[int], size: int, stride: int | None = None) -> tuple[Window, ...]:
    """Return the windows of a text.

    Args:
        ids: the tokens of the text.
        size: tokens of a window.
        stride: tokens between the starts of two windows, below `size`; None: size - 1.
    """
    stride = size - 1 if stride is None else stride
    assert 0 < stride < size, f"stride {stride} of windows of {size} tokens"
    # Nothing foretells the first token of the text, so it counts as done.
    result, done = [], 1
    for start in range(0, len(ids), stride):
        if done >= len(ids):
            break
        end = min(start + size, len(ids))
        result.append(Window(tuple(ids[start:end]), end - done))
        done = end
    return tuple(result)


def affordable_window(vocab_size: int) -> int:
    """Return the tokens of a window whose logits take no more than LOGIT_BYTES, in float32."""
    return max(LEAST_WINDOW, LOGIT_BYTES // (4 * vocab_size))


def losses(logits_TV: Tensor, window: Window) -> Tensor:
    """Return the negative log-likelihood [S] of the scored tokens, in nats."""
    rows_SV = window.predictions(logits_TV).float()
    return F.cross_entropy(rows_SV, window.targets_S.to(rows_SV.device), reduction="none")


@dataclass(slots=True)
class Perplexity:
    """Gathers losses, window by window."""

    nats: float = 0.0
    count: int = 0

    def add(self, logits_TV: Tensor, window: Window) -> None:
        """Add the losses of one window, logits_TV [T, V]."""
        # float64, because the sum is over many thousands of tokens.
        self.nats += float(losses(logits_TV, window).double().sum())
        self.count += window.scored

    @property
    def value(self) -> float:
        """Return exp of the mean loss."""
        return math.exp(self.nats / self.count)

    def bits_per_byte(self, bytes_per_text_token: float) -> float:
        """Return the mean loss in bits per byte of text, which does not depend on the tokenizer."""
        return self.nats / self.count / math.log(2) / bytes_per_text_token


KEEP = 512
_TINY = 1e-7  # float32 sums of probabilities are no finer


@dataclass(frozen=True, slots=True)
class Prediction:
    """The yardstick's distributions at a window's scored positions: tokens and log [S, K], rest [S]."""

    tokens: Tensor
    log: Tensor
    rest: Tensor | None

    @classmethod
    def of(cls, rows_SV: Tensor) -> Prediction:
        """Return what to remember of logits."""
        log_SV = rows_SV.float().log_softmax(-1)
        log_SK, tokens_SK = log_SV.topk(min(KEEP, log_SV.shape[-1]))
        # A vocabulary of at most KEEP tokens is remembered in full, and has no rest.
        rest = _rest_log_probability(log_SK) if log_SV.shape[-1] > KEEP else None
        # int32, because the predictions of all windows are kept until the last scheme is measured.
        return cls(tokens_SK.int(), log_SK.clone(), rest)

    def kl(self, rows_SV: Tensor) -> Tensor:
        """Return KL(yardstick || rows) [S] at each position."""
        # Normalised over the full vocabulary before the yardstick's tokens are taken.
        log_SK = rows_SV.float().log_softmax(-1).gather(-1, self.tokens.long())
        kl_S = (self.log.exp() * (self.log - log_SK)).sum(-1)
        if self.rest is not None:
            kl_S += self.rest.exp() * (self.rest - _rest_log_probability(log_SK))
        # Rounding leaves tiny negative values where the two are the same.
        return kl_S.clamp_min(0.0)

    def same(self, rows_SV: Tensor) -> Tensor:
        """Return whether [S] the likeliest token is the same."""
        return rows_SV.argmax(-1) == self.tokens[:, 0]


def _rest_log_probability(log_SK: Tensor) -> Tensor:
    """Return the log-probability of everything but the remembered tokens."""
    return (1.0 - log_SK.exp().sum(-1)).clamp_min(_TINY).log()


@dataclass(slots=True)
class Agreement:
    """Gathers comparisons, window by window."""

    hits: int = 0
    nats: float = 0.0
    count: int = 0
    worst: list[Tensor] = field(default_factory=list)

    def add(self, rows_SV: Tensor, reference: Prediction) -> None:
        """Add the predictions rows_SV [S, V] of one window, compared with the reference's."""
        kl_S = reference.kl(rows_SV)
        self.hits += int(reference.same(rows_SV).sum())
        self.nats += float(kl_S.double().sum())
        self.count += len(kl_S)
        self.worst.append(kl_S)

    @property
    def top1(self) -> float:
        """Return the share of positions with the same likeliest token."""
        return self.hits / self.count

    @property
    def kl(self) -> float:
        """Return the mean KL divergence in nats."""
        return self.nats / self.count

    @property
    def kl_p99(self) -> float:
        """Return the KL divergence that one position in a hundred exceeds: damage is rarely spread evenly."""
        return float(torch.cat(self.worst).quantile(0.99))


Scheme = tuple[Plan, KVScales]
"""The plan and the scales of a scheme."""


class Shadow(hook.Observer):
    """Attends as the yardstick does, and notes what each scheme would have answered."""

    def __init__(
        self,
        yardstick: Scheme,
        schemes: Mapping[str, Scheme],
        tokens: int,
        device: torch.device,
        rank: Rank | None = None,
    ) -> None:
        super().__init__()
        self._rank = rank
        self._baseline = prompt_context(*yardstick, tokens, device)
        self._schemes = {name: prompt_context(*scheme, tokens, device) for name, scheme in schemes.items()}
        self.errors: dict[str, dict[int, float]] = {name: {} for name in schemes}

    def observe(self, call: hook.Call) -> Tensor:
        """Return the yardstick's output [1, T, H, Dv] for a query [1, H, T, D] and streams [1, G, T, D]."""
        expected = hook.attend(self._baseline, call)
        for name, context in self._schemes.items():
            output = hook.attend(context, call)
            self.errors[name][call.layer] = relative_error(output, expected, self._rank)
        # The model goes on with the yardstick's answer, so no layer's input has the error of one before it.
        return expected[None]

    def observe_recurrent(self, call: RecurrentCall) -> Tensor:
        """Return what the yardstick's states answer; schemes are compared where layers attend."""
        return hook.keep_state(self._baseline, call)


def relative_error(output: Tensor, expected: Tensor, rank: Rank | None = None) -> float:
    """Return ||output - expected|| / ||expected||, over all tokens and heads.

    Args:
        output: of the heads that are here.
        expected: the same.
        rank: where other ranks have others.
    """
    lengths = torch.stack([(output.double() - expected.double()).norm(), expected.double().norm()])
    if rank:
        lengths = rank.group.all_reduce(lengths.square()).sqrt()
    return float(lengths[0] / lengths[1])


def prompt_context(plan: Plan, scales: KVScales, tokens: int, device: torch.device) -> StepContext:
    """Return a step that computes one whole prompt, on pages in order, so that slot t holds token t."""
    pages = cdiv(tokens, plan.page_size)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    batch = AttentionBatch.from_lens(Phase.PREFILL, 0, (tokens,), (tokens,), table)
    slot_mapping_T = torch.arange(tokens, device=device)
    exact, exact_slots_T = None, None
    if plan.window:
        # The whole prompt is one step, so nothing of it need be kept but sinks: they have the first exact pages.
        exact = ExactCache.empty(plan, device)
        exact_slots_T = slot_mapping_T.where(slot_mapping_T < exact.sinks, -1)
        batch = replace(batch, exact_table_BN=table.clamp(max=exact.empty_page))
    meta = AttentionMetadata(slot_mapping_T, (batch,), exact_slot_mapping_T=exact_slots_T)
    pool = PagedPool(plan.layout, pages, scales, device, exact=exact.pool if exact else None)
    return StepContext(
        plan, pool, adapters(plan), meta, exact=exact, recurrent=_prompt_states(plan, tokens, device)
    )


def _prompt_states(plan: Plan, tokens: int, device: torch.device) -> RecurrentStates | None:
    """Return recurrent states for one whole prompt, where layers have any."""
    if not plan.states:
        return None
    pool = StatePool(plan.states, 1, plan.state_format, plan.dtype, device)
    return RecurrentStates(pool.layers, StateBatch((0,), (0,), (tokens,), (0,), (tokens,)))


@torch.inference_mode()
def observed_logits(
    model: nn.Module, ids: Sequence[int], observer: hook.Observer | StepContext, keep: Tensor | int = 0
) -> Tensor:
    """Return logits [T, V] of a prompt whose attention is what `observer` says, or that of a step.

    Args:
        model: with Nibble's attention.
        ids: the prompt.
        observer: attends in each layer's place; a step attends over its own pages.
        keep: rows whose logits are computed; 0 for all.
    """
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    logits: Tensor = model(
        input_ids=tokens,
        position_ids=torch.arange(len(ids), device=tokens.device)[None],
        attention_mask=attention_mask_for(model, tokens, observer),
        use_cache=False,
        logits_to_keep=keep,
        **{hook.CONTEXT: observer},
    ).logits
    return logits[0]


def attention_errors(
    engine_plan: EnginePlan,
    model: nn.Module,
    rank: Rank | None,
    ids: Sequence[int],
    yardstick: Scheme,
    schemes: Mapping[str, Scheme],
) -> dict[str, tuple[float, ...]]:
    """Return the relative error ||o - o_ref|| / ||o_ref|| of each layer's attention output, by scheme.

    Args:
        engine_plan: of the engine that has the model.
        model: with Nibble's attention.
        rank: where the model is divided: all ranks must call this.
        ids: the prompt.
        yardstick: the plan and scales that the others are compared with.
        schemes: plan and scales by name.
    """
    device = next(model.parameters()).device
    if rank:
        part = partial(_part, engine_plan.model_spec.kv_heads, rank.shard)
        yardstick, schemes = part(yardstick), {name: part(scheme) for name, scheme in schemes.items()}
    shadow = Shadow(yardstick, schemes, len(ids), device, rank)
    # Nobody reads the logits, so only one row of them is computed.
    observed_logits(model, ids, shadow, keep=torch.tensor([len(ids) - 1], device=device))
    return {
        name: tuple(error for _, error in sorted(errors.items())) for name, errors in shadow.errors.items()
    }


def _part(kv_heads: Sequence[int], shard: Shard, scheme: Scheme) -> Scheme:
    """Return a scheme with the scales of a rank's heads."""
    plan, scales = scheme
    return plan, kv_scales.part(scales, plan.layout, kv_heads, shard.rank, shard.size)
