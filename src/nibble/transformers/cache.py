"""NibbleCache: what `cache` (or `past_key_values`) of Transformers can be, so that generate() runs over Nibble's pages.

A model that gets one computes the call as the engine computes a step (models/forward.py, attention/layer.py): tokens
without padding, K and V written to the pool and read back from it by the planned backends, recurrent states brought
forward in slots. The cache keeps the books of rows and columns.

For the time of such a call the model's attention is Nibble's, and layers that expand a latent, select tokens or keep a
state get what the engine would have replaced in them (models/hook.py). Nothing of that stays: weights, names and other
callers see the model as it is.

Shape suffixes: B rows of the batch, Q new columns, L columns of the batch so far.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from nibble.attention import backends
from nibble.attention.planner import evidence, explain
from nibble.attention.planner.resolve import require_runnable, resolve
from nibble.attention.step import StepContext
from nibble.cache import scales as kv_scales
from nibble.cache.scales import KVScales
from nibble.config import Config, configured
from nibble.engine.build import CHUNK
from nibble.engine.cache_plan import CachePlan
from nibble.engine.calibration import CALIBRATION_TOKENS, builtin_texts, measure_scales, start_tokens
from nibble.engine.model_runner import adapters
from nibble.engine.plan import with_usable_transforms
from nibble.engine.scale_source import AUTO, Origin, find_source, resolve_scales
from nibble.engine.tokenizer import tokenizer_of
from nibble.errors import ConfigError, NibbleError, PromptTooLong, RequestError, ScaleError
from nibble.hardware import format_bytes, probe
from nibble.kernels.types import AttentionParams
from nibble.model_spec import NO_LAYER
from nibble.models import equivalence, hook
from nibble.models.checkpoint import download
from nibble.models.forward import plain
from nibble.models.observe import BYTES, observe_skeleton, skeleton
from nibble.models.refusals import check_config
from nibble.transformers.states import TAKE_BACK, StateStore
from nibble.transformers.store import Row, Store, count_tokens, kept_columns, pack

IGNORED = frozenset({"cache_position", "use_cache", "return_dict"})
"""Keywords that change nothing in what is computed."""
HONOURED = frozenset({"input_ids", "attention_mask", "position_ids", "logits_to_keep"})
OPTIONS = (
    "kv_format", "kv_layers", "kv_encoder", "kv_transforms", "kv_scales", "kv_memory", "state_format", "page_size",
    "attention_backend", "prefill_backend", "decode_backend", "allow_staging", "max_context", "tuned",
)  # fmt: skip
"""Fields of Config about a cache alone; all other fields are about an engine, or facts of the model."""

CACHES = ("cache", "past_key_values")
"""What Transformers calls a cache; the second is its older name."""
CACHE = next(name for name in CACHES if name in {entry.name for entry in fields(CausalLMOutputWithPast)})
"""What the installed version calls it."""
_IMPLEMENTATION = "_attn_implementation_internal"

Prompt = str | Sequence[int]
"""Text or token ids."""


class NibbleCache(Cache):  # type: ignore[misc]
    """A quantised, paged cache for one model of Transformers.

        cache = NibbleCache(model, kv_format="mxfp4")
        model.generate(**inputs, past_key_values=cache)

    Args:
        model: a model of Transformers that generates.
        kv_format: the scheme; None: the engine's default.
        kv_memory: bytes for pages, as "2GiB", allocated at once; None: the cache grows as it fills. Recurrent states,
            a slot for each row, come beside them.
        calibrate: texts, or lists of token ids, to measure KV scales on.
        options: kv_layers, kv_encoder, kv_transforms, kv_scales, state_format, page_size, attention_backend,
            prefill_backend, decode_backend, allow_staging, max_context and tuned, as in nibble.Config.

    Raises:
        ConfigError: the model or the scheme cannot be had (Unsupported), or KV scales are missing (ScaleError).
    """

    def __init__(
        self,
        model: Any,
        kv_format: str | None = None,
        *,
        kv_memory: str | int | None = None,
        calibrate: Sequence[Prompt] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(layers=[])
        options |= {} if kv_format is None else {"kv_format": kv_format}
        cache_plan = _plan_cache(model, {"kv_memory": kv_memory, **options}, calibrated=calibrate is not None)
        if cache_plan.plan.states and not cache_plan.hardware.is_cpu:
            raise ConfigError(
                f"{type(model).__name__} has layers that keep a recurrent state, and a NibbleCache has those on CPUs "
                "alone; nibble.LLM and nibble serve have them on GPUs too"
            )
        self.model, self.plan, self._limit = model, cache_plan.plan, cache_plan.model_spec.max_context
        own = _own_outputs(model, cache_plan) if cache_plan.plan.states else None
        # Calibration runs the model over a pool, for which it needs Nibble's attention.
        with _attach(model).patched():
            if own:
                equivalence.check(model, cache_plan.model_spec, own)
            self.scales: KVScales = _scales_for(cache_plan, model, calibrate)
        plan, memory = cache_plan.plan, cache_plan.config.kv_memory_bytes
        states = (
            StateStore(plan.states, plan.state_format, model.dtype, model.device) if plan.states else None
        )
        self._store = Store(plan.layout, self.scales, model.device, memory, states)
        self._backends = adapters(plan)
        self._clear()

    def _clear(self) -> None:
        self._rows: list[Row] = []
        self._is_token_BL = torch.zeros(0, 0, dtype=torch.bool)
        """Which columns are tokens and not padding, on the host."""

    # Facts

    @property
    def columns(self) -> int:
        """Return the number of columns of the batch so far, padding included."""
        return self._is_token_BL.shape[1]

    @property
    def tokens(self) -> int:
        """Return the number of stored tokens; a past that rows share counts for each."""
        return sum(row.num_stored_tokens for row in self._rows)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are allocated for pages and recurrent states."""
        states = self._store.states
        return self._store.pool.nbytes + (states.nbytes if states else 0)

    @property
    def summary(self) -> str:
        """Return the plan, what staging costs if there is any, and how full the cache is, for people."""
        staged = map(str, explain.staging_costs(self.plan, self._limit))
        return "\n".join((explain.as_text(self.plan), *staged, repr(self)))

    def __repr__(self) -> str:
        num_used, total = self._store.num_used_pages, self._store.pages.num_pages
        growth = "" if self._store.bounded else ", growing"
        schemes = "; ".join(dict.fromkeys(group.scheme for group in self.plan.groups))
        return (
            f"NibbleCache({schemes}: {self.tokens:,} tokens in {len(self._rows)} rows, {num_used:,} of {total:,} "
            f"pages of {self.plan.page_size} tokens held, {format_bytes(self.nbytes)}{growth})"
        )

    # One call of the model

    def run(self, **arguments: Any) -> Any:
        """Compute a call of the model: store its tokens, and return its logits."""
        ids_BQ, is_token_BL = self._check(arguments)
        new_BQ = is_token_BL[:, self.columns :]
        rows = self._rows or [Row() for _ in ids_BQ]
        self._check_room(rows, new_BQ)
        try:
            logits = self._compute(rows, new_BQ, ids_BQ, arguments)
        except BaseException:
            for row in rows:
                # Pages that the failed call reserved; what was stored before it stays.
                self._store.cut(row, row.num_stored_tokens)
            raise
        # Only a call that has succeeded counts as stored.
        for row, count in zip(rows, count_tokens(new_BQ), strict=True):
            row.num_stored_tokens += count
        self._rows, self._is_token_BL = rows, is_token_BL
        out = CausalLMOutputWithPast(logits=logits, **{CACHE: self})
        return out.to_tuple() if arguments.get("return_dict") is False else out

    def _compute(
        self, rows: Sequence[Row], new_BQ: Tensor, ids_BQ: Tensor, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Return the logits of new tokens, once there are pages for them and they are stored."""
        self._store.reserve(rows, count_tokens(new_BQ))
        columns_C = kept_columns(arguments.get("logits_to_keep"), new_BQ.shape[1])
        step = pack(rows, self.plan.page_size, new_BQ, ids_BQ, arguments.get("position_ids"), columns_C)
        layers = _LayerObserver()
        with self._store.recurrent(rows, step.order, count_tokens(new_BQ)) as states:
            ctx = StepContext(
                self.plan, self._store.pool, self._backends, step.meta, observer=layers, recurrent=states
            )
            logits_SV = plain(self.model)(
                step.token_ids_T[None], step.positions_T[None], step.logit_rows_S, ctx
            )
            self._check_layers(layers.observed)
        return step.unpack(logits_SV)

    def _check_layers(self, observed: set[int]) -> None:
        attending = {layer for layer, owner in enumerate(self.plan.owner) if owner != NO_LAYER}
        if missing := attending - observed:
            raise ConfigError(
                f"{len(missing)} layers of this {type(self.model).__name__} did not ask Nibble for attention: they "
                "chose theirs when the model was loaded, and it cannot be served from a NibbleCache"
            )

    def _check(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the ids, and which columns are tokens; raise NibbleError for what cannot be done right."""
        self._check_model()
        if arguments.get("use_cache") is False:
            raise RequestError(f"use_cache=False contradicts {CACHE}; leave one of them out")
        used = {name for name, x in arguments.items() if x is not None and x is not False}
        if unsupported := sorted(used - IGNORED - HONOURED):
            raise RequestError(
                f"a NibbleCache does not honour {', '.join(unsupported)}: it computes logits of input_ids, with "
                "attention_mask and position_ids of two dimensions"
            )
        ids, positions = arguments.get("input_ids"), arguments.get("position_ids")
        if ids is None or ids.dim() != 2 or not ids.numel():
            raise RequestError(
                "there are no new tokens: input_ids must hold what follows the "
                f"{self.columns} columns in the cache, or (for generate) those columns too"
            )
        if positions is not None and positions.dim() != 2:
            raise RequestError("position_ids must have two dimensions, [rows, columns]")
        if self._rows and len(self._rows) != len(ids):
            raise RequestError(
                f"the cache holds {len(self._rows)} rows, and the batch has {len(ids)}: reset() it, or repeat or "
                "select its rows by batch_repeat_interleave() and batch_select_indices()"
            )
        return ids, self._check_mask(ids, arguments.get("attention_mask"))

    def _check_model(self) -> None:
        if self.model.training:
            raise ConfigError(
                "the model is in training mode, and a cache is for inference: call model.eval()"
            )
        device = self._store.pool.device
        if self.model.device != device:
            raise ConfigError(
                f"the model has moved to {self.model.device}, and its cache lies on {device}: make a new NibbleCache"
            )

    def _check_mask(self, ids_BQ: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention_mask as bool [B, L] on the host, checked against what is stored."""
        past_BL = self._is_token_BL if self._rows else self._is_token_BL.new_zeros(len(ids_BQ), 0)
        shape = (len(ids_BQ), past_BL.shape[1] + ids_BQ.shape[1])
        if mask is not None and tuple(mask.shape) != shape:
            raise RequestError(
                f"attention_mask must be {list(shape)}: the {past_BL.shape[1]} columns in the cache and the "
                f"{ids_BQ.shape[1]} new ones, not {list(mask.shape)}"
            )
        # generate() leaves the mask out where there is no padding.
        is_token_BL = past_BL.new_ones(shape) if mask is None else (mask != 0).cpu()
        if not torch.equal(is_token_BL[:, : past_BL.shape[1]], past_BL):
            raise RequestError(
                "attention_mask (all ones, if left out) says otherwise than before of columns in the cache: tokens "
                "cannot be hidden once they are stored; crop() or reset() the cache"
            )
        if not bool(is_token_BL[:, past_BL.shape[1] :].any()):
            raise RequestError("all new columns are padding; there is nothing to compute")
        if bool((is_token_BL.any(1) & ~is_token_BL[:, -1]).any()):
            raise RequestError(
                "a row ends in padding, where the next token would follow: pad on the left "
                '(tokenizer.padding_side = "left")'
            )
        return is_token_BL

    def _check_room(self, rows: Sequence[Row], new_BQ: Tensor) -> None:
        counts = count_tokens(new_BQ)
        longest = max(row.num_stored_tokens + count for row, count in zip(rows, counts, strict=True))
        if longest > self._limit:
            raise PromptTooLong(
                f"a row would have {longest} tokens, and the cache was made for {self._limit} (max_context, or the "
                "model's own limit)"
            )

    # What Transformers calls

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns so far."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the most tokens of a row."""
        return self._limit

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the columns of an attention mask, and its offset."""
        return self.columns + query_length, 0

    def update(self, *_: Any, **__: Any) -> Any:
        """Raise ConfigError: only a foreign model writes to the cache by itself."""
        raise ConfigError(
            f"this NibbleCache was made for another model than the one that uses it, a {type(self.model).__name__}; "
            "make one for each"
        )

    def reset(self) -> None:
        """Drop all tokens; pages are free, and their memory is kept for the next call."""
        for row in self._rows:
            self._store.cut(row, 0)
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last columns, as many as a negative number says; a positive one says how many to keep."""
        keep = tokens_to_remove if tokens_to_remove > 0 else max(self.columns + tokens_to_remove, 0)
        counts = count_tokens(self._is_token_BL[:, :keep])
        for row, count in zip(self._rows, counts, strict=True):
            if 0 < count < (least := self._store.least_tokens(row)):
                raise RequestError(
                    f"a row cannot be cut to {count} tokens: its recurrent layers have gone on from there, and keep "
                    f"what takes back the last {TAKE_BACK} of a call, here as far as {least}; reset() the cache"
                )
        self._is_token_BL = self._is_token_BL[:, :keep]
        for row, count in zip(self._rows, counts, strict=True):
            self._store.cut(row, count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace rows by those of beam_idx; what they have in common is stored once."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; the past is stored once."""
        self.batch_select_indices(torch.arange(len(self._rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace rows by those of `indices`; what they have in common is stored once."""
        if not self._rows:
            return
        selected = torch.arange(len(self._rows))[indices.cpu()]
        old_rows = self._rows
        # Before the old rows are cut, or a page that stays would be free for a moment.
        self._rows = [self._store.fork(old_rows[i]) for i in selected.tolist()]
        self._is_token_BL = self._is_token_BL[selected]
        for row in old_rows:
            self._store.cut(row, 0)

    @property
    def batch_size(self) -> int:
        """Return the number of rows, -1 before the first call."""
        return len(self._rows) or -1

    @property
    def is_linear(self) -> list[bool]:
        """Return of each layer whether it keeps a state alone: generate() leaves stored columns out for others."""
        return [owner == NO_LAYER for owner in self.plan.owner]

    @property
    def is_initialized(self) -> bool:
        """Return whether there are rows."""
        return bool(self._rows)

    def __len__(self) -> int:
        return len(self.plan.owner)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> NibbleCache:
        """Return a cache with the same past, which is stored once until one of them writes."""
        copy = type(self).__new__(type(self))
        # Model, plan and pool are shared; only the books of rows are the copy's own.
        copy.__dict__.update(self.__dict__)
        copy._rows = [self._store.fork(row) for row in self._rows]
        return copy

    def __reduce__(self) -> Any:
        raise NibbleError("a NibbleCache cannot be pickled: its pages belong to this process")

    def __del__(self) -> None:
        # __init__ may have raised before there were rows.
        if "_rows" in self.__dict__:
            self._store.release_later(self._rows)


class PatchedForward:
    """The forward() of `model` that also takes NibbleCaches."""

    _lock: threading.RLock
    _adaptations: list[tuple[Any, dict[str, Any]]] | None

    def __init__(self, model: Any) -> None:
        self.model, self.plain = model, model.forward
        # generate() reads the signature.
        functools.update_wrapper(self, self.plain)
        self.__setstate__({})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model for one call of generate()."""
        arguments = kwargs
        if args:
            arguments = inspect.signature(self.plain).bind_partial(*args).arguments | kwargs
        cache = next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)
        if not isinstance(cache, NibbleCache):
            return self.plain(*args, **kwargs)
        if cache.model is not self.model:
            raise ConfigError(
                f"this NibbleCache was made for another {type(cache.model).__name__}; make one for each"
            )
        if torch.compiler.is_compiling():
            raise ConfigError("a NibbleCache cannot be used in a compiled model; call the model itself")
        with self.patched(), torch.no_grad():
            return cache.run(**{name: value for name, value in arguments.items() if name not in CACHES})

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Give the model Nibble's attention while the caller runs it."""
        # One call at a time: another one would meet a half changed model.
        with self._lock:
            if self._adaptations is None:
                self._adaptations = hook.adaptations(self.model)
            patches, configs = self._adaptations, _configs(self.model)
            before = [getattr(config, _IMPLEMENTATION) for config in configs]
            own = [
                {name: vars(module)[name] for name in attributes if name in vars(module)}
                for module, attributes in patches
            ]
            try:
                for config in configs:
                    setattr(config, _IMPLEMENTATION, hook.NAME)
                # Attributes are looked up before parameters and modules, and are none of them.
                for module, attributes in patches:
                    module.__dict__.update(attributes)
                yield
            finally:
                for (module, attributes), earlier in zip(patches, own, strict=True):
                    for name in attributes:
                        module.__dict__.pop(name, None)
                    # What a module had of its own: an index, or what another library has put there.
                    module.__dict__.update(earlier)
                for config, name in zip(configs, before, strict=True):
                    setattr(config, _IMPLEMENTATION, name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this very model: a copy of the model makes its own."""
        return {name: x for name, x in self.__dict__.items() if name not in {"_lock", "_adaptations"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        self.refresh()

    def refresh(self) -> None:
        """Adapt the model anew in the next call: its weights may have changed."""
        self._adaptations = None


def _attach(model: Any) -> PatchedForward:
    """Let `model` take NibbleCaches; once is enough. Raise ConfigError for a compiled model."""
    if getattr(model, "_compiled_call_impl", None) or hasattr(model.forward, "_torchdynamo_orig_callable"):
        raise ConfigError("the model is compiled; make the NibbleCache for it without torch.compile")
    if isinstance(model.forward, PatchedForward):
        model.forward.refresh()
        return model.forward
    model.forward = patched = PatchedForward(model)
    return patched


def _configs(model: Any) -> list[Any]:
    """Return the configs in which the model's modules look up their attention."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }
    return [config for config in configs.values() if hasattr(config, _IMPLEMENTATION)]


class _LayerObserver:
    """Records which layers called attention."""

    def __init__(self) -> None:
        self.observed: set[int] = set()

    def observe(
        self, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], spec: AttentionParams, out_THD: Tensor
    ) -> None:
        self.observed.add(layer)


def _plan_cache(model: Any, options: dict[str, Any], *, calibrated: bool) -> CachePlan:
    """Plan a cache for `model`, or raise ConfigError (Unsupported) with the reason."""
    config = _config(model, options)
    hardware = probe(config.device)
    check_config(model.config)
    # skeleton() changes the config that it gets.
    bare: Any = skeleton(deepcopy(model.config))
    # A wrapped or patched class may attend differently from what was observed.
    if type(bare) is not type(model):
        raise ConfigError(
            f"the model is a {type(model).__name__}, and Nibble can only judge what Transformers makes of its config, "
            f"a {type(bare).__name__}; give that model itself, as AutoModelForCausalLM loads it"
        )
    model_spec = observe_skeleton(bare, config.model, config.dtype, config.max_context)
    table = backends.available_backends()
    times = evidence.load_tuned(hardware, table) if config.tuned else evidence.NO_RANKINGS
    plan = resolve(config, model_spec, hardware, table, measured=times)
    cache_plan = CachePlan(config, hardware, model_spec, plan, times=times)
    if not calibrated:
        folder_of = download if _has_checkpoint(model) else _no_folder
        cache_plan = with_usable_transforms(cache_plan, folder_of, measures=_may_measure(model, config))
    require_runnable(cache_plan.plan)
    return cache_plan


def _config(model: Any, options: dict[str, Any]) -> Config:
    of_engines = {option.name for option in fields(Config)} - set(OPTIONS)
    if unsupported := sorted(of_engines & options.keys()):
        raise ConfigError(
            f"{', '.join(unsupported)} is an option of Nibble's engine, not of a cache; options here: "
            f"{', '.join(OPTIONS)}"
        )
    # There is no ring of exact pages here, so an exact window is no default either.
    return configured(model=_name(model), dtype=_dtype(model), device=_device(model), kv_window=0, **options)


def _own_outputs(model: Any, cache_plan: CachePlan) -> equivalence.Recorded:
    """Return what the family's own code computes, for recurrent layers run other code around their own."""
    was_training = model.training
    try:
        return equivalence.own_outputs(model, cache_plan.model_spec)
    finally:
        model.train(was_training)


def _has_checkpoint(model: Any) -> bool:
    """Return whether there is a checkpoint to look at: a model without a name has none."""
    return bool(getattr(model, "name_or_path", ""))


def _may_measure(model: Any, config: Config) -> bool:
    """Return whether scales may be measured on the built-in text."""
    return _has_checkpoint(model) or config.kv_scales != AUTO


def _no_folder(name: str) -> None:
    return None


def _name(model: Any) -> str:
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise ConfigError(
            f"a NibbleCache is made for a model of Transformers that generates, not for a {type(model).__name__}; of a "
            "wrapped model (PEFT, torch.compile) give the inner one"
        )
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def _dtype(model: Any) -> str:
    name = str(model.dtype).removeprefix("torch.")
    if name not in BYTES:
        raise ConfigError(f"the model computes in {name}; a NibbleCache needs one of {', '.join(BYTES)}")
    return name


def _device(model: Any) -> str:
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1:
        raise ConfigError(
            f"the model lies on {', '.join(sorted(devices))}; a NibbleCache needs all of it on one device "
            "(from_pretrained without device_map='auto', or with one GPU visible)"
        )
    kind = torch.device(devices.pop()).type
    if kind not in {"cpu", "cuda"}:
        raise ConfigError(f"the model lies on {kind}, and Nibble runs on cpu and cuda; move it there first")
    return kind


def _scales_for(cache_plan: CachePlan, model: Any, calibrate: Sequence[Prompt] | None) -> KVScales:
    """Return KV scales of the plan, or raise ScaleError where some are missing.

    Args:
        cache_plan: the plan, and the model that it is for.
        model: with Nibble's attention.
        calibrate: texts or token ids to measure on.
    """
    most = CALIBRATION_TOKENS
    if calibrate is None:
        source = find_source(cache_plan, download if _has_checkpoint(model) else _no_folder)
        if source.origin is not Origin.MEASURED:
            return resolve_scales(cache_plan, source)
        if not _may_measure(model, cache_plan.config):
            kv_scales.require(cache_plan.plan.layout, kv_scales.NONE)
        calibrate, most = builtin_texts(), start_tokens(cache_plan.hardware.device)
    return measure_scales(cache_plan, model, _encode(cache_plan, calibrate), CHUNK, most)


def _encode(cache_plan: CachePlan, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
    if isinstance(prompts, str):
        raise ScaleError("calibrate must be a list of texts, or of lists of token ids, not one text")
    if not any(isinstance(prompt, str) for prompt in prompts):
        return list(prompts)  # type: ignore[arg-type]
    if (tokenizer := tokenizer_of(cache_plan.config.model)) is None:
        raise ScaleError(
            f"calibration on text needs a tokenizer, and {cache_plan.config.model} has none; give calibrate=[token ids]"
        )
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
