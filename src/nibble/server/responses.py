"""Answers in OpenAI's shape: from pieces of the engine to choices, chunks, usage and log-probabilities.

Views of the engine's counts: the cache for `GET /v1/cache`, the fidelity watch for Prometheus and for `/health`.

They are made of `messages.Stats.numbers` and `messages.Ready.about`. Counters run over the engine's life, so a client
that wants rates takes the difference of two answers.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nibble.engine.request import Delta, Logprob
from nibble.server.chat_parser import AnswerParser
from nibble.server.engine_client import EngineClient, State
from nibble.server.streaming import delta_of, message_of

MODEL_LABEL = "model_name"
FIDELITY_PREFIX = "fidelity_"
FIDELITY_KEY = f"{FIDELITY_PREFIX}samples"
"""Present in the counts only with --watch-fidelity."""
FIDELITY_GAUGES = {
    "error": "Error of a layer's attention over the cache, relative to rows in the model's precision.",
    "own": "The same for what the layer's format makes of these rows, with scales that fit them.",
    "limit": "The error from which the watch warns.",
}
FIDELITY_COUNTERS = {
    "samples": "Requests whose attention was compared.",
    "alerts": "Times that the error of a layer rose above its limit.",
}
MAX_LIMIT = 1e9


def cache_view(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of `GET /v1/cache`; `at` is in seconds on the engine's clock, None before the first counts."""
    return {
        "at": stats.get("time"),
        "pages": _pages(stats, about),
        "prefix": _prefix(stats),
        "requests": {
            name: int(stats.get(name, 0))
            for name in ("running", "waiting", "finished", "preemptions", "preempted_tokens")
        },
        "tokens": {
            "prompt": int(stats.get("prompt_tokens", 0)),
            "decode": int(stats.get("decode_tokens", 0)),
        },
        "steps": int(stats.get("steps", 0)),
        "bytes_per_token": about.get("bytes_per_token"),
        "bytes_per_token_16bit": about.get("bytes_per_token_16bit"),
        "groups": [_group(group) for group in about.get("groups", ())],
        "host": _host(stats, about),
    }


def _pages(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, int]:
    """Return counts of pages, where total = free + held + idle and held = own + shared; size: tokens of a page."""
    total = int(stats.get("cache_total", about.get("budget", {}).get("pages", 0)))
    free, idle = int(stats.get("cache_free", total)), int(stats.get("cache_idle", 0))
    num_held = total - free - idle
    # Cached pages are idle, or shared by the prefix cache and open requests.
    shared = min(num_held, int(stats.get("cache_cached", 0)) - idle)
    return {
        "total": total,
        "free": free,
        "held": num_held,
        "own": num_held - shared,
        "shared": shared,
        "idle": idle,
        "size": int(about.get("page_size", 0)),
    }


def _prefix(stats: Mapping[str, float]) -> dict[str, Any]:
    """Return counts of the prefix cache; hit_rate is None before the first lookup."""
    lookups, hits = int(stats.get("cache_lookup_tokens", 0)), int(stats.get("cache_hit_tokens", 0))
    return {
        "lookup_tokens": lookups,
        "hit_tokens": hits,
        "hit_rate": hits / lookups if lookups else None,
        "evicted_pages": int(stats.get("cache_evicted", 0)),
    }


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return one group of layers; bytes_per_token: of one layer, 0 where the layers read the pages of others."""
    streams: Mapping[str, Mapping[str, Any]] = group["streams"]
    return {
        "name": group["name"],
        "kind": group["kind"],
        "layers": len(group["layers"]),
        "window": group["window"],
        "format": group["scheme"],
        "streams": {name: stream["format"] for name, stream in streams.items()},
        "bytes_per_token": sum(stream["bytes_per_token"] for stream in streams.values()),
    }


def _host(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return counts of the host tier, where frames = free + idle + hot + pinned; None without one."""
    tier = about.get("hisparse")
    if not tier:
        return None
    frames = int(stats.get("tier_frames", tier["frames"]))
    free, idle = int(stats.get("tier_free", frames)), int(stats.get("tier_idle", 0))
    hot = int(stats.get("tier_hot", 0))
    used_pages = int(stats.get("cache_total", 0)) - int(stats.get("cache_free", 0))
    return {
        "frames": frames,
        "free": free,
        "idle": idle,
        "hot": hot,
        "pinned": frames - free - idle - hot,
        "only_host_pages": max(0, used_pages - (frames - free - hot)),
        "host_bytes": tier["host"],
        "formats": list(tier["host_format"]),
        **{name: int(stats.get(f"tier_{name}", 0)) for name in ("spilled", "saved", "loaded", "dropped")},
    }


class FidelityCollector(Collector):
    """The results of the fidelity watch (engine/error_monitor.py), as the engine last sent them."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client, self._model = client, model

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; none without --watch-fidelity."""
        stats = self._client.stats
        if FIDELITY_KEY not in stats:
            return
        for name, doc in FIDELITY_COUNTERS.items():
            counter = CounterMetricFamily(f"nibble:kv_fidelity_{name}", doc, labels=[MODEL_LABEL])
            counter.add_metric([self._model], stats[FIDELITY_PREFIX + name])
            yield counter
        skipped = CounterMetricFamily(
            "nibble:kv_fidelity_skipped",
            "Requests that were drawn and not compared.",
            labels=[MODEL_LABEL, "reason"],
        )
        for reason, count in _fidelity_parts(stats, "skipped").items():
            skipped.add_metric([self._model, reason], count)
        yield skipped
        # The gauges of an engine that is gone would look like its present state.
        if self._client.state is State.READY:
            yield from self._gauges(stats)

    def _gauges(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        alert = GaugeMetricFamily(
            "nibble:kv_fidelity_alert", "Whether a layer is above its limit.", labels=[MODEL_LABEL]
        )
        alert.add_metric([self._model], stats[f"{FIDELITY_PREFIX}alert"])
        yield alert
        groups = self._client.ready.about.get("groups", ()) if self._client.ready else ()
        schemes = {str(layer): group["scheme"] for group in groups for layer in group["layers"]}
        for name, doc in FIDELITY_GAUGES.items():
            labels = [MODEL_LABEL, "layer", "scheme"]
            family = GaugeMetricFamily(f"nibble:kv_fidelity_{name}", doc, labels=labels)
            for layer, value in _fidelity_parts(stats, name).items():
                family.add_metric([self._model, layer, schemes.get(layer, "")], value)
            yield family


def fidelity_warning(stats: Mapping[str, float]) -> str | None:
    """Return the warning of /health while a layer is above its limit; None else."""
    if not stats.get(f"{FIDELITY_PREFIX}alert"):
        return None
    limits, errors = _fidelity_parts(stats, "limit"), _fidelity_parts(stats, "error")
    # A limit may be infinite, and quotients of two such layers could not be compared.
    layer = max(errors, key=lambda layer: errors[layer] / min(limits[layer], MAX_LIMIT))
    return (
        f"attention over the KV cache is off by {errors[layer]:.1%} of its norm in layer {layer}, where "
        f"{limits[layer]:.1%} is allowed; the engine's log and docs/serving.md say more"
    )


def _fidelity_parts(stats: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the numbers `fidelity_NAME_PART`, by part."""
    prefix = f"{FIDELITY_PREFIX}{name}_"
    return {key.removeprefix(prefix): value for key, value in stats.items() if key.startswith(prefix)}


Decode = Callable[[Sequence[int]], str]


class Writer(ABC):
    """One request's answers, which are numbered prompt by prompt.

    Args:
        model: its name.
        decode: returns the text of tokens.
        prompts: tokens of each prompt.
        collect: for body(), where no chunks are sent.
    """

    prefix: str
    """Of the answer's id."""
    body_object: str
    chunk_object: str

    def __init__(self, model: str, decode: Decode, prompts: Sequence[int], collect: bool) -> None:
        self.id, self.model, self.created = f"{self.prefix}-{uuid.uuid4().hex}", model, int(time.time())
        self.decode, self._collect = decode, collect
        self.prompt_tokens, self.cached = sum(prompts), 0
        self.completion_tokens = 0
        self._choices: dict[int, dict[str, Any]] = {}

    def take(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """Add a piece to an answer, and return the choice of a chunk; None where there is nothing to show yet."""
        self.completion_tokens += len(delta.token_ids)
        return self._choice(index, delta, delta.finish_reason)

    def chunk_fields(self) -> dict[str, Any]:
        """Return the fields of all chunks."""
        return self._common(self.chunk_object)

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk with usage."""
        return self.chunk_fields() | {"choices": [], "usage": self.usage()}

    def body(self) -> dict[str, Any]:
        """Return all answers at once."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self._common(self.body_object) | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the tokens used so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def _common(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @abstractmethod
    def _choice(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any] | None: ...


class TextWriter(Writer):
    """Answers of /v1/completions.

    Args:
        model: its name.
        decode: returns the text of tokens.
        prompts: tokens of each prompt.
        echoes: by answer, the text before it; none without echo.
        logprobs: report log-probabilities.
        collect: for body(), where no chunks are sent.
    """

    prefix, body_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        decode: Decode,
        prompts: Sequence[int],
        echoes: Sequence[str],
        logprobs: bool,
        collect: bool = True,
    ) -> None:
        super().__init__(model, decode, prompts, collect)
        self._echoes, self._logprobs = dict(enumerate(echoes)), logprobs
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any]:
        text = self._echoes.pop(index, "") + delta.text
        logprobs = self._logprob_lists(index, delta.logprobs) if self._logprobs else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if not self._collect:
            return choice
        total = self._choices.get(index)
        if total is None:
            # A copy: its lists grow with the answer.
            lists = logprobs and {key: list(values) for key, values in logprobs.items()}
            self._choices[index] = {**choice, "logprobs": lists}
        else:
            total["text"] += text
            total["finish_reason"] = reason
            for key, values in (logprobs or {}).items():
                total["logprobs"][key] += values
        return choice

    def _logprob_lists(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, list[Any]]:
        texts = [self.decode([entry.token]) for entry in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in logprobs],
            # The sampled token is always one of them.
            "top_logprobs": [
                {self.decode([token]): value for token, value in entry.top} | {text: entry.logprob}
                for text, entry in zip(texts, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


class ChatWriter(Writer):
    """Answers of /v1/chat/completions.

    Args:
        model: its name.
        decode: returns the text of tokens.
        prompts: tokens of each prompt.
        logprobs: report log-probabilities.
        new_parser: returns a parser of one answer's text, for reasoning and tool calls.
        collect: for body(), where no chunks are sent.
    """

    prefix, body_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        decode: Decode,
        prompts: Sequence[int],
        logprobs: bool,
        new_parser: Callable[[], AnswerParser],
        collect: bool = True,
    ) -> None:
        super().__init__(model, decode, prompts, collect)
        self._logprobs, self._new_parser = logprobs, new_parser
        self._parsers: dict[int, AnswerParser] = {}
        self._events: dict[int, list[Any]] = {}

    def _choice(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any] | None:
        first = index not in self._parsers
        if first:
            self._begin(index)
        # A marker, or a half of one, may stand in several deltas, so each answer has a parser of its own.
        parser = self._parsers[index]
        events = parser.feed(delta.text, last=delta.finish_reason is not None)
        if reason == "stop" and parser.num_calls:
            reason = "tool_calls"
        logprobs = {"content": [self._entry(entry) for entry in delta.logprobs]} if self._logprobs else None
        if self._collect:
            total = self._choices[index]
            total["finish_reason"] = reason
            self._events[index] += events
            if logprobs:
                total["logprobs"]["content"] += logprobs["content"]
        chat_delta = delta_of(events)
        if first:
            chat_delta = {"role": "assistant", "content": "", **chat_delta}
        # The parser holds back text that may be a marker.
        if not (chat_delta or reason or delta.logprobs):
            return None
        return {"index": index, "delta": chat_delta, "logprobs": logprobs, "finish_reason": reason}

    def _begin(self, index: int) -> None:
        self._parsers[index], self._events[index] = self._new_parser(), []
        logprobs: Any = {"content": [], "refusal": None} if self._logprobs else None
        self._choices[index] = {"index": index, "message": {}, "logprobs": logprobs, "finish_reason": None}

    def body(self) -> dict[str, Any]:
        """Return all answers at once."""
        for index, choice in self._choices.items():
            choice["message"] = message_of(self._events[index])
        return super().body()

    def _entry(self, entry: Logprob) -> dict[str, Any]:
        token = self._token(entry.token, entry.logprob)
        return {**token, "top_logprobs": [self._token(token, value) for token, value in entry.top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
