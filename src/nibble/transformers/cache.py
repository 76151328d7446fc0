"""NibbleCache: what `past_key_values` of Transformers can be, so that generate() runs over Nibble's pages.

A model that is given one computes the call as the engine computes a step (models/forward.py, attention/layer.py):
tokens without padding, K and V written to the pool and read back from it by the planned backends. The cache keeps the
books of rows and columns. Owns NibbleCache. Must not know of text, of sampling or of the engine's requests.

Shape suffixes: B rows of the batch, Q new columns, L columns seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from nibble.attention.layer import StepContext
from nibble.attention.planner import explain
from nibble.cache.scales import KVScales
from nibble.engine.build import adapters
from nibble.errors import ConfigError, NibbleError, PromptTooLong, RequestError
from nibble.hardware import format_bytes
from nibble.kernels.types import AttentionParams
from nibble.models.forward import plain
from nibble.transformers.design import Prompt, design, scales_for
from nibble.transformers.patching import attach
from nibble.transformers.step import Step, counted, pack
from nibble.transformers.store import Row, Store

IGNORED = frozenset({"cache_position", "use_cache", "return_dict"})
"""Keywords that change nothing in what is computed."""


class NibbleCache(Cache):  # type: ignore[misc]
    """A quantised, paged cache for one model of Transformers.

        cache = NibbleCache(model, kv_format="mxfp4")
        model.generate(**inputs, past_key_values=cache)

    kv_format: the scheme; None: the engine's default. kv_memory: bytes for pages, as "2GiB", taken at once; None: the
    cache grows as it fills. calibrate: texts, or lists of token ids, to measure KV scales on. options: kv_layers,
    kv_scales, page_size, attention_backend, prefill_backend, decode_backend, allow_staging, max_context, as in
    nibble.Config. Raises ConfigError (Unsupported, ScaleError) where
    the model or the scheme cannot be had, with the reason.
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
        made = design(model, {"kv_memory": kv_memory, **options})
        self.model, self.plan, self._limit = model, made.plan, made.model_spec.max_context
        with attach(model, NibbleCache).lent():
            self.scales: KVScales = scales_for(made, model, calibrate)
        self._store = Store(made.plan.layout, self.scales, model.device, made.config.kv_memory_bytes)
        self._backends = adapters(made.plan)
        self._forget()

    def _forget(self) -> None:
        self._rows: list[Row] = []
        self._seen_BL = torch.zeros(0, 0, dtype=torch.bool)

    # What it is

    @property
    def columns(self) -> int:
        """Columns of the batch that it has seen, padding included."""
        return self._seen_BL.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens that its rows have stored; a past that rows share counts for each."""
        return sum(row.num_stored_tokens for row in self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated for pages."""
        return self._store.pool.nbytes

    @property
    def words(self) -> str:
        """The plan, what staging costs if there is any, and how full it is, for people."""
        staged = map(str, explain.staging_costs(self.plan, self._limit))
        return "\n".join((explain.as_text(self.plan), *staged, repr(self)))

    def __repr__(self) -> str:
        held, total = self._store.held, self._store.pages.num_pages
        most = "" if self._store.bounded else ", growing"
        schemes = "; ".join(dict.fromkeys(group.scheme for group in self.plan.groups))
        return (
            f"NibbleCache({schemes}: {self.tokens:,} tokens in {len(self._rows)} rows, {held:,} of {total:,} pages of "
            f"{self.plan.page_size} tokens held, {format_bytes(self.nbytes)}{most})"
        )

    # One call of the model

    def run(self, **given: Any) -> Any:
        """Computes a call of the model: stores its tokens, and answers with its logits."""
        ids_BQ, seen_BL = self._checked(given)
        start = self.columns
        new_BQ = seen_BL[:, start:]
        rows = self._rows or [Row() for _ in ids_BQ]
        self._check_room(rows, new_BQ)
        try:
            logits = self._computed(self._step(rows, new_BQ, ids_BQ, given))
        except BaseException:
            for row in rows:
                self._store.cut(row, row.num_stored_tokens)
            raise
        for row, count in zip(rows, counted(new_BQ), strict=True):
            row.num_stored_tokens += count
        self._rows, self._seen_BL = rows, seen_BL
        out = CausalLMOutputWithPast(logits=logits, past_key_values=self)
        return out.to_tuple() if given.get("return_dict") is False else out

    def _step(self, rows: Sequence[Row], new_BQ: Tensor, ids_BQ: Tensor, given: Mapping[str, Any]) -> Step:
        """The step of new tokens, over pages that are there for them."""
        self._store.reserve(rows, counted(new_BQ))
        positions = given.get("position_ids")
        return pack(
            rows,
            self.plan.page_size,
            new_BQ,
            ids_BQ,
            None if positions is None else positions.to(ids_BQ.device).expand(ids_BQ.shape),
            _columns(given.get("logits_to_keep"), new_BQ.shape[1]),
        )

    def _computed(self, step: Step) -> Tensor:
        watch = _Layers()
        ctx = StepContext(self.plan, self._store.pool, self._backends, step.meta, observer=watch)
        found = plain(self.model)(step.ids_T[None], step.positions_T[None], step.keep_S, ctx)
        if missing := set(range(len(self.plan.owner))) - watch.seen:
            raise ConfigError(
                f"{len(missing)} layers of this {type(self.model).__name__} did not ask Nibble for attention: they "
                "chose theirs when the model was loaded, and it cannot be served from a NibbleCache"
            )
        return step.unpacked(found)

    def _checked(self, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The ids, and which columns are tokens, on the host; raises NibbleError for what cannot be done right."""
        self._check_model()
        if given.get("use_cache") is False:
            raise RequestError("use_cache=False contradicts past_key_values; leave one of them out")
        known = IGNORED | {"input_ids", "attention_mask", "position_ids", "logits_to_keep"}
        if others := sorted(
            name for name, x in given.items() if name not in known and x is not None and x is not False
        ):
            raise RequestError(
                f"a NibbleCache does not honour {', '.join(others)}: it computes logits of input_ids, with "
                "attention_mask and position_ids of two dimensions"
            )
        ids, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
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
        return ids, self._tokens_of(ids, mask)

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

    def _tokens_of(self, ids_BQ: Tensor, mask: Tensor | None) -> Tensor:
        """attention_mask as bool [B, L] on the host, checked against what is stored."""
        past_BL = self._seen_BL if self._rows else self._seen_BL.new_zeros(len(ids_BQ), 0)
        wanted = (len(ids_BQ), past_BL.shape[1] + ids_BQ.shape[1])
        if mask is not None and tuple(mask.shape) != wanted:
            raise RequestError(
                f"attention_mask must be {list(wanted)}: the {past_BL.shape[1]} columns in the cache and the "
                f"{ids_BQ.shape[1]} new ones, not {list(mask.shape)}"
            )
        seen_BL = (
            past_BL.new_ones(wanted) if mask is None else (mask != 0).cpu()
        )  # no mask: no padding, says generate()
        if not torch.equal(seen_BL[:, : past_BL.shape[1]], past_BL):
            raise RequestError(
                "attention_mask (all ones, if left out) says otherwise than before of columns in the cache: tokens "
                "cannot be hidden once they are stored; crop() or reset() the cache"
            )
        if not bool(seen_BL[:, past_BL.shape[1] :].any()):
            raise RequestError("all new columns are padding; there is nothing to compute")
        if bool((seen_BL.any(1) & ~seen_BL[:, -1]).any()):
            raise RequestError(
                "a row ends in padding, where the next token would follow: pad on the left "
                '(tokenizer.padding_side = "left")'
            )
        return seen_BL

    def _check_room(self, rows: Sequence[Row], new_BQ: Tensor) -> None:
        longest = max(row.num_stored_tokens + count for row, count in zip(rows, counted(new_BQ), strict=True))
        if longest > self._limit:
            raise PromptTooLong(
                f"a row would have {longest} tokens, and the cache was made for {self._limit} (max_context, or the "
                "model's own limit)"
            )

    # What Transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._limit

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def update(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"this NibbleCache was made for another model than the one that uses it, a {type(self.model).__name__}; "
            "make one for each"
        )

    def reset(self) -> None:
        """Forgets everything; pages are free, and their memory is kept for what comes."""
        for row in self._rows:
            self._store.cut(row, 0)
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last columns, as many as a negative number says; a positive one says how many to keep."""
        keep = (
            self.columns + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.columns)
        )
        self._seen_BL = self._seen_BL[:, : max(keep, 0)]
        for row, count in zip(self._rows, counted(self._seen_BL), strict=True):
            self._store.cut(row, count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become those of beam_idx; what they have in common is stored once."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self._rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self._rows:
            return
        chosen = torch.arange(len(self._rows))[indices.cpu()]
        found, before = [self._store.fork(self._rows[i]) for i in chosen.tolist()], self._rows
        self._rows, self._seen_BL = found, self._seen_BL[chosen]
        for row in before:
            self._store.cut(row, 0)

    @property
    def batch_size(self) -> int:
        return len(self._rows) or -1

    @property
    def is_initialized(self) -> bool:
        return bool(self._rows)

    def __len__(self) -> int:
        return len(self.plan.owner)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> NibbleCache:
        """A cache with the same past, which is stored once: what is written to one is not seen in the other."""
        found = type(self).__new__(type(self))
        found.__dict__.update(self.__dict__)
        found._rows = [self._store.fork(row) for row in self._rows]
        return found

    def __reduce__(self) -> Any:
        raise NibbleError("a NibbleCache cannot be pickled: its pages belong to this process")

    def __del__(self) -> None:
        if "_rows" in self.__dict__:
            self._store.leave(self._rows)


class _Layers:
    """Which layers asked for attention."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def observe(
        self, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], spec: AttentionParams, out_THD: Tensor
    ) -> None:
        self.seen.add(layer)


def _columns(keep: Any, width: int) -> Tensor:
    """logits_to_keep as columns: the last so many, 0 or None for all, or a tensor of them."""
    if isinstance(keep, Tensor):
        return torch.arange(width)[keep.cpu()]
    return torch.arange(width)[-keep:] if keep else torch.arange(width)
