"""What the user requests: frozen dataclasses. A field's doc is its command-line help and its row in the docs.

A Config keeps strings and is validated by parsing them; CacheSpec (spec.py) is the parsed form.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any

from nibble.drafts import SpeculativeSpec
from nibble.errors import ConfigError, RequestError, unknown
from nibble.quality import parse_quality

BUNDLED = ("demo", "demo-mla", "demo-hybrid")
"""Models that come with Nibble."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZED_WEIGHTS, ACTIVATIONS = ("auto", "packed", "unpacked"), ("auto", "bf16", "fp8")
STATE_FORMATS, EXACT_STATES = ("fp32", "bf16", "fp8", "int8"), "fp32"
"""How recurrent states are kept (kernels/state_formats.py), and what keeps them as the model computes them."""
WEIGHTS = ("fp8", "int4", "nvfp4", "mxfp4")
"""Formats that matrices can be quantised to as they load."""
MAX_WINDOW, MAX_SINKS = 4096, 1024
"""Most tokens of an exact window, and most first tokens that all queries read exactly."""
GREEDY_BELOW = 1e-6
"""A temperature below this is 0: dividing logits by it would overflow."""
_FLOAT32_MAX = 3.4028234663852886e38
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?$", re.IGNORECASE)


def option(default: Any, doc: str) -> Any:
    """Return a dataclass field with a default and a help text."""
    return field(default=default, metadata={"doc": doc})


def doc_of(option: Field[Any]) -> str:
    """Return the help text of a Config or SamplingParams field."""
    return str(option.metadata["doc"])


def default_of(option: Field[Any]) -> Any:
    """Return the default value of a field, None for a required one."""
    return None if option.default is MISSING else option.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How to serve one model. Raises ConfigError where a value is malformed.

    Paths are taken for names, and a number of bytes for kv_memory; both are stored as text.
    """

    model: str = option(
        MISSING,
        "Local folder or hub name of a Transformers checkpoint; `demo`, `demo-mla` and `demo-hybrid` are bundled.",
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model; `main` if left out.")
    download_dir: str | None = option(
        None, "Folder that hub models are downloaded to; the Hugging Face cache if left out."
    )
    trust_remote_code: bool = option(
        False,
        "Run the Python code that a checkpoint brings, also where it is planned. Such code may do anything on this "
        "machine; what Nibble replaces in it is compared with the code itself as weights are loaded.",
    )
    chat_template: str | None = option(
        None, "Template of conversations: a file, or the text of one in Jinja; the model's own if left out."
    )
    kv_format: str = option(
        "bf16",
        "KV cache scheme: `nibble formats` lists them; `+rot`, `+kmean` add transforms, `K:V` names two formats. Or a "
        "JSON file with one for each layer, of `nibble tune-precision` or ModelOpt; auto: the checkpoint's own such "
        "file, else bf16.",
    )
    kv_layers: str = option("", "Other schemes for some layers, as `0,1,-1=fp8_e4m3`; more rules after `;`.")
    kv_window: int | None = option(
        None,
        "Newest tokens that a query reads in the compute dtype beside the quantised cache; 0: none. Left out: 64 where "
        "any layer is stored in 4 bits and this can be served, else none (docs/quality.md).",
    )
    kv_sinks: int = option(
        0,
        "First tokens, rounded up to whole pages, that all queries read in the compute dtype, for models whose first "
        "keys are far larger (attention sinks); needs an exact window, of 64 tokens where --kv-window is left out.",
    )
    kv_encoder: str = option(
        "auto",
        "How block scales of 4-bit formats are chosen; any reader reads all: auto (sweep), sweep (the least error), "
        "4over6 (NVFP4: the better of two), or amax (the bytes of other engines' appends).",
    )
    kv_transforms: str = option(
        "auto",
        "Transforms of K for schemes that name none, as `kmean+rot`, or none; auto: of K in 4 bits, those that the "
        "model and its KV scales allow.",
    )
    kv_scales: str = option(
        "auto",
        "Global KV scales: auto (the checkpoint's, else kv_scales.json beside it, else measured at the start), a JSON "
        "file, calibrate (measured), or one (1.0).",
    )
    state_format: str = option(
        EXACT_STATES,
        "Recurrent states of hybrid models: fp32, bf16, fp8 or int8 (with a scale for each row). They are rounded "
        "every 16 tokens, not at each.",
    )
    state_interval: int = option(
        2048,
        "Tokens of a prompt after which a snapshot of recurrent states is kept for requests that begin alike, in whole "
        "pages; 0: only where prompts branch or end.",
    )
    page_size: int | None = option(None, "Tokens per page; chosen jointly with the backends if left out.")
    packing: str | None = option(
        None,
        "How pages are laid out: nhd, hnd, record, or trtllm (V scales of NVFP4 interleaved by four tokens, as SM100's "
        "native kernels read them); chosen jointly with the backends if left out.",
    )
    attention_backend: str = option("auto", "Attention backend of all phases.")
    prefill_backend: str | None = option(None, "Backend of PREFILL and EXTEND, where it differs.")
    decode_backend: str | None = option(None, "Backend of DECODE and VERIFY, where it differs.")
    tuned: bool = option(
        True, "Let `auto` follow the times that `nibble tune` measured on this machine, where there are some."
    )
    allow_staging: bool = option(False, "Allow a decode backend that needs pages dequantised first (slow).")
    dtype: str = option("auto", "Compute dtype: auto (float32 on a CPU, else the checkpoint's), or a name.")
    device: str = option("auto", "auto, cpu or cuda.")
    weights: str | None = option(
        None,
        "Quantise the linear layers and experts of a BF16 or FP16 checkpoint as it loads: fp8 (blocks of 128 x 128), "
        "int4 (groups of 128), nvfp4 or mxfp4. Where kernels do not serve them, they are unpacked again "
        "(docs/weights.md).",
    )
    quantized_weights: str = option(
        "auto",
        "Quantised matrices in memory: packed (as they are stored; on a GPU humming-kernels multiplies those of linear "
        "layers), unpacked (to the compute dtype), or auto (packed on a GPU that can, else unpacked).",
    )
    activations: str = option(
        "auto",
        "Inputs of packed FP8 weights: fp8 (quantised first, and multiplied as FP8 by tensor cores), bf16 (left in the "
        "compute dtype), or auto (fp8 where the checkpoint asks for it and the GPU can).",
    )
    tp: int = option(1, "GPUs of this host that share each layer, a process for each (docs/parallel.md).")
    expert_parallel: bool = option(
        False,
        "With --tp: divide experts by number, whole ones to each GPU, and not each of them (docs/parallel.md).",
    )
    attention_dp: bool = option(
        False,
        "With --tp: divide attention by requests: a GPU keeps the cache of its own requests alone, with all heads, so "
        "that latents of MLA are stored once (docs/parallel.md).",
    )
    kv_memory: str | None = option(
        None, "Memory for the KV cache, as 2GiB; else what is free, within reason."
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the GPU's memory, from 0 to 1, for weights, workspaces and KV cache together; else all of it, less a "
        "reserve.",
    )
    threads: int | None = option(
        None,
        "Threads that a CPU computes with; left out: OMP_NUM_THREADS, else as many as the model has work for, and no "
        "more than there are idle CPUs.",
    )
    max_context: int | None = option(None, "Longest prompt + answer in tokens; the model's own if left out.")
    max_running: int = option(256, "Most requests that decode at the same time.")
    token_budget: int | None = option(
        None,
        "Most tokens computed in one step: 8192 on a GPU, 512 on a CPU; longer prompts are cut into chunks.",
    )
    index_topk: int | None = option(
        None, "Tokens that each query of sparse attention (DSA) looks at; the model's own if left out."
    )
    hisparse: str = option(
        "",
        "Keep the cache of sparse attention (DSA) in host memory, and hot tokens on the device, once that is full: on, "
        "or settings as buffer=4096,host_memory=64GiB,host_format=FORMAT; off if left out.",
    )
    speculative: str = option(
        "",
        "Draft tokens that a step verifies, for the same answers sooner: lookup (what followed the last tokens "
        "before), draft:PATH (a smaller model), mtp (the checkpoint's head), eagle3:PATH (a head); none if left out.",
    )
    speculative_tokens: str = option("auto", "Most drafts of a request and step; auto: by what was accepted.")
    prefix_cache: bool = option(True, "Share pages between requests with the same beginning.")
    compile: bool = option(True, "On a GPU: compile the model with torch.compile, once for all lengths.")
    compile_cache: bool = option(
        False,
        "On a GPU: keep the compiled model in the cache folder, so that the next start neither traces nor compiles it. "
        "Shown on CPUs only.",
    )
    graphs: bool = option(
        True, "On a GPU: record decode steps as CUDA graphs, where the backend can be recorded."
    )
    deterministic: bool = option(
        False,
        "On a GPU: give a request the same bits whatever else is computed with it, and however its prompt was cut, "
        "cached or computed again. It is slower.",
    )
    watch_fidelity: float = option(
        0.0,
        "Share of requests, from 0 to 1, whose attention is compared with rows in the model's own precision as they "
        "are served.",
    )
    fidelity_alert: float | None = option(
        None,
        "Relative error of a layer's attention from which to warn; left out: twice what its format makes of the same "
        "rows.",
    )
    require_quality: str = option(
        "",
        "Refuse to start without a certificate (`nibble certify`) of this very cache with at most kl=0.01,kl_p99=0.2 "
        "(nats), ppl=1.006 (times BF16's), and at least top1=0.98 (same top tokens), recall=0.97 (of BF16's).",
    )
    seed: int = option(0, "Seed of requests that name none.")
    generation_config: str = option(
        "auto",
        "Sampling defaults of requests: auto (the model's generation_config.json), none, or a folder with such a "
        "file.",
    )

    def __post_init__(self) -> None:
        self._to_text()
        for option in fields(self):
            annotation, value = str(option.type), getattr(self, option.name)
            if not _fits(annotation, value):
                kind = type(value).__name__
                raise ConfigError(f"{option.name} must be {_expected(annotation)}, not {value!r} ({kind})")
        self._check_names()
        counts = ("tp", "max_running", "token_budget", "page_size", "max_context", "index_topk", "threads")
        for name in counts:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.state_interval < 0:
            raise ConfigError(f"state_interval must be a number of tokens or 0, not {self.state_interval}")
        if self.kv_window is not None and not 0 <= self.kv_window <= MAX_WINDOW:
            raise ConfigError(f"kv_window must lie in [0, {MAX_WINDOW}], not {self.kv_window}")
        if not 0 <= self.kv_sinks <= MAX_SINKS:
            raise ConfigError(f"kv_sinks must lie in [0, {MAX_SINKS}], not {self.kv_sinks}")
        if self.kv_sinks and self.kv_window == 0:
            raise ConfigError("kv_sinks needs an exact window; leave kv_window out, or above 0")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is a share of the memory, above 0 and up to 1, not {share}"
            )
        _ = self.kv_memory_bytes, self.offload, self.quality, self.drafts  # raise where the text is malformed
        self._check_watch()

    def _to_text(self) -> None:
        for name in ("model", "kv_scales", "generation_config", "download_dir", "chat_template"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        # Callers from Python give bytes and tokens as numbers.
        for name in ("kv_memory", "speculative_tokens"):
            if _is("int", getattr(self, name)):
                object.__setattr__(self, name, str(getattr(self, name)))

    def _check_names(self) -> None:
        choices = (
            ("dtype", DTYPES), ("quantized_weights", QUANTIZED_WEIGHTS), ("activations", ACTIVATIONS),
            ("state_format", STATE_FORMATS),
        )  # fmt: skip
        for name, names in choices:
            if getattr(self, name) not in names:
                raise ConfigError(unknown(name, getattr(self, name), names))
        if self.weights is not None and self.weights not in WEIGHTS:
            raise ConfigError(unknown("weights", self.weights, WEIGHTS))

    def _check_watch(self) -> None:
        share, alert = self.watch_fidelity, self.fidelity_alert
        if not 0 <= share <= 1:
            raise ConfigError(f"watch_fidelity is a share of requests, from 0 to 1, not {share}")
        if alert is not None and not 0 < alert < math.inf:
            raise ConfigError(f"fidelity_alert must be a number above 0, as 0.2, not {alert}")
        if alert is not None and not share:
            raise ConfigError(
                "fidelity_alert needs watch_fidelity, which says what share of requests is watched"
            )

    @property
    def kv_memory_bytes(self) -> int | None:
        """Bytes of the pool, None where the memory plan decides."""
        return None if self.kv_memory is None else parse_bytes(self.kv_memory)

    @property
    def offload(self) -> OffloadSpec | None:
        """The host tier, if one is requested."""
        return OffloadSpec.parse(self.hisparse)

    def with_plain_cache(self, format: str) -> Config:
        """Return the same with a cache that stores all layers unquantised, in the plain format `format`."""
        return replace(
            self, kv_format=format, kv_layers="", kv_encoder="auto", kv_transforms="none", kv_window=0,
            kv_sinks=0,
        )  # fmt: skip

    @property
    def drafts(self) -> SpeculativeSpec | None:
        """Who drafts, if anybody does."""
        return SpeculativeSpec.parse(self.speculative, self.speculative_tokens)

    @property
    def quality(self) -> Mapping[str, float]:
        """The bounds that a certificate must hold, by the names of QUALITY; none where nothing is required."""
        return parse_quality(self.require_quality)

    def backend_for(self, decode: bool) -> str:
        """Return the backend of DECODE and VERIFY (decode=True), or of PREFILL and EXTEND; `auto` is any."""
        return (self.decode_backend if decode else self.prefill_backend) or self.attention_backend


_TYPES = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
_SWITCH = {"on": True, "true": True, "off": False, "false": False}
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: _SWITCH[text.lower()],
}
_SETTINGS = re.compile(r",(?=\s*[a-z][a-z_-]*=)")
"""Commas between settings; a value may have commas too."""
_TITLES = {"str": "a text", "int": "an integer", "float": "a number", "bool": "True or False"}


def _is(kind: str, value: Any) -> bool:
    """Whether `value` is of a kind of _TYPES; True and False are no numbers, although Python says so."""
    return isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "bool")


def _expected(annotation: str) -> str:
    """Return what values of a field with this annotation are, for people."""
    kind, _, optional = annotation.partition(" | ")
    return _TITLES[kind] + (" or None" if optional else "")


def _fits(annotation: str, value: Any) -> bool:
    """Whether `value` is of the type that a field is annotated with."""
    kind, _, optional = annotation.partition(" | ")
    return bool(optional and value is None) or _is(kind, value)


def parse_settings(text: str) -> dict[str, Any]:
    """Return values of Config as `kv_scales=one,page_size=32` has them, each in its field's type; raise ConfigError."""
    items = [item.partition("=") for item in _SETTINGS.split(text)]
    settings = {name.strip().replace("-", "_"): value.strip() for name, _, value in items}
    if len(settings) < len(items):
        raise ConfigError(f"{text!r} says something twice")
    _check_names("option", settings, Config, ConfigError)
    kinds = {option.name: str(option.type) for option in fields(Config)}
    return {name: parse_setting(name, value, kinds[name]) for name, value in settings.items()}


def parse_setting(name: str, text: str, annotation: str) -> Any:
    """Return the value of a field with this annotation; raise ConfigError where the text is none."""
    kind, _, optional = annotation.partition(" | ")
    # `none` is a text of its own where texts are taken.
    if optional and kind != "str" and text == "none":
        return None
    try:
        return _PARSERS[kind](text)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} must be {_expected(annotation)}, not {text!r}") from None


def configured(**values: Any) -> Config:
    """Return a Config from loose values; raise ConfigError with the nearest option for an unknown name."""
    _check_names("option", values, Config, ConfigError)
    return Config(**values)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `2GiB`, `512MB` or `4096`; raise ConfigError."""
    match = _SIZE.match(text.strip())
    if not match:
        raise ConfigError(f"cannot read {text!r} as a size; write it as 2GiB, 512MB or a number of bytes")
    unit = (match[2] or "B").upper()
    base = 1000 if len(unit) == 2 and unit != "B" else 1024  # KB is 1000 bytes; KiB, and K alone, are 1024
    return int(float(match[1]) * base ** " KMGT".index(unit[0] if unit != "B" else " "))


def format_size(size: int) -> str:
    """Return `size` bytes as an option takes them, exactly: `2GiB`, `1536MiB`, `2500000`."""
    for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        count, remainder = divmod(size, 1024**exponent)
        if count and not remainder:
            return f"{count}{unit}"
    return str(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSpec:
    """What `hisparse` says. None: the plan decides."""

    buffer: int | None = None
    """Tokens of a request's hot buffer."""
    host_memory: int | None = None
    """Bytes of the host's memory."""
    host_format: str | None = None
    """Format of latents on the host."""

    @classmethod
    def parse(cls, text: str) -> OffloadSpec | None:
        """Parse `on`, or `key=value` settings between commas; None for `off` and the empty text. Raise ConfigError."""
        if text in {"", "off"}:
            return None
        items = [item.partition("=") for item in map(str.strip, text.split(",")) if item != "on"]
        settings = {name.strip(): value.strip() for name, _, value in items}
        # A dictionary keeps the last value of a name.
        if len(settings) < len(items):
            raise ConfigError(f"hisparse says something twice: {text!r}")
        _check_names("setting of hisparse", settings, cls, ConfigError)
        for name, value in settings.items():
            if not value:
                raise ConfigError(
                    f"hisparse {name} has no value; write it as {name}=VALUE, or hisparse as `on`"
                )
        buffer, host_memory = settings.get("buffer"), settings.get("host_memory")
        if buffer is not None and not (buffer.isdecimal() and int(buffer)):
            raise ConfigError(f"hisparse buffer must be a number of tokens, not {buffer!r}")
        return cls(
            buffer=int(buffer) if buffer else None,
            host_memory=parse_bytes(host_memory) if host_memory else None,
            host_format=settings.get("host_format"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose an answer's tokens. Raises RequestError (status 400) where a value is malformed or out of range.

    An object is complete: what it leaves out has the defaults below, and not those of a model's generation_config.json.
    A temperature below 1e-6 is stored as 0.0; a single stop string as a tuple; keys of logit_bias as integers,
    though they may be texts, as JSON has them. None for stop, logit_bias and lists of tokens means none.
    """

    max_tokens: int = option(128, "Most tokens to generate; 0: the prompt is only stored and scored.")
    min_tokens: int = option(
        0, "Fewest tokens to generate: before, no stop token is chosen, and no stop string ends the answer."
    )
    temperature: float = option(1.0, "0 (or below 1e-6) is greedy; higher is more random.")
    top_k: int = option(0, "Keep the k most likely tokens; 0 keeps all.")
    top_p: float = option(1.0, "Keep the likeliest tokens whose probabilities sum to p.")
    min_p: float = option(0.0, "Drop tokens less likely than min_p times the likeliest.")
    repetition_penalty: float = option(
        1.0, "Divide (multiply, if negative) logits of tokens seen in prompt or answer."
    )
    presence_penalty: float = option(0.0, "Subtract from logits of tokens that the answer holds.")
    frequency_penalty: float = option(0.0, "Subtract from logits, per occurrence in the answer.")
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"doc": "Add to logits, by token id."}
    )
    seed: int | None = option(None, "Seed of this request; the same seed gives the same answer in any batch.")
    stop: tuple[str, ...] = option((), "Strings that end the answer; not part of it.")
    stop_token_ids: tuple[int, ...] = option((), "Tokens that end the answer; not part of it.")
    include_stop_str_in_output: bool = option(
        False, "Leave the stop string or stop token that ended the answer in it."
    )
    bad_words: tuple[str, ...] = option(
        (), "Words that the answer must not have, at the beginning of a word and within one."
    )
    ignore_eos: bool = option(False, "Go on after the model's end-of-text token.")
    logprobs: int | None = option(
        None, "Return log-probabilities of this many likeliest tokens (0: the chosen one only)."
    )
    prompt_logprobs: int | None = option(
        None,
        "Return log-probabilities of the prompt's tokens, and of this many likeliest at each position; such a prompt "
        "is computed, and not read from the prefix cache.",
    )
    logprob_start_len: int = option(
        0,
        "Position from which prompt_logprobs are returned; what lies before may come from the prefix cache.",
    )
    grammar: str | None = option(
        None,
        "What the answer must be: json_object:, json_schema:SCHEMA, regex:REGEX, choice:[TEXTS] or lark:GRAMMAR.",
    )
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.")
    shown_tokens: tuple[int, ...] = option((), "Special tokens that are text all the same.")
    mark_tokens: bool = option(
        False, "Put U+FDD0 before each of shown_tokens, so that no text is taken for one."
    )
    truncate_prompt_tokens: int | None = option(
        None,
        "Keep only this many tokens of the prompt, its last ones; -1: as many as the context has room for.",
    )
    n: int = option(1, "Answers per prompt; they share the prompt's pages where the prefix cache is on.")

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.name in _RANGES:
                _check_range(option.name, str(option.type), getattr(self, option.name))
        # One value for greedy, so that nobody divides by almost nothing.
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        for name in ("ignore_eos", "skip_special_tokens", "mark_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, not {getattr(self, name)!r}")
        # OpenAI's clients send one string or a list.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _items("stop", stop, "strings"))
        bad_words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        object.__setattr__(self, "bad_words", _items("bad_words", bad_words, "strings"))
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids, "integers"))
        object.__setattr__(self, "shown_tokens", _items("shown_tokens", self.shown_tokens, "integers"))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise RequestError(f"grammar must be a text, not {self.grammar!r}")
        if self.top_p == 0:
            raise RequestError("top_p must be above 0; for greedy decoding use temperature 0")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty must be above 0; 1 leaves logits as they are")
        if "" in self.stop:
            raise RequestError("stop strings must not be empty")
        if not all(word.strip() for word in self.bad_words):
            raise RequestError("bad_words must be words, not empty strings")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens, and {self.min_tokens} is more than {self.max_tokens}"
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be at least 1, or -1 for what the context has room for"
            )


_RANGES = {
    "max_tokens": (0, 1 << 30), "min_tokens": (0, 1 << 30), "truncate_prompt_tokens": (-1, 1 << 30),
    "temperature": (0.0, 100.0), "top_k": (0, 1 << 30), "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0), "repetition_penalty": (0.0, 100.0), "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0), "logprobs": (0, 100), "prompt_logprobs": (0, 100),
    "logprob_start_len": (0, 1 << 30), "n": (1, 1024), "seed": (-(1 << 63), (1 << 64) - 1),
}  # fmt: skip


def _check_range(name: str, annotation: str, value: Any) -> None:
    low, high = _RANGES[name]
    bounds = f"{name} must lie in [{low}, {high}]"
    if not _fits(annotation, value):
        raise RequestError(f"{bounds} and be {_expected(annotation)}, not {value!r}")
    if value is not None and not low <= value <= high:
        raise RequestError(f"{bounds}, not {value!r}")


def _items(name: str, values: Any, kind: str) -> tuple[Any, ...]:
    """Return `values` as a tuple of strings or of integers, () for None; raise RequestError."""
    items = tuple(values) if isinstance(values, Iterable) else () if values is None else (None,)
    if not all(isinstance(item, str) if kind == "strings" else _is("int", item) for item in items):
        raise RequestError(f"{name} must be a list of {kind}, not {values!r}")
    return items


def _bias(logit_bias: Any) -> dict[int, float]:
    """Return logit_bias with integer keys, {} for None; raise RequestError."""
    if logit_bias is not None and not isinstance(logit_bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not {logit_bias!r}")
    bias: dict[int, float] = {}
    for key, value in (logit_bias or {}).items():
        # JSON has strings as keys only.
        if not (_is("int", key) or (isinstance(key, str) and key.isascii() and key.isdigit())):
            raise RequestError(f"logit_bias keys must be token ids, as 42 or '42', not {key!r}")
        if not (_is("float", value) and abs(value) <= _FLOAT32_MAX):
            raise RequestError(
                f"logit_bias values must be finite numbers, not {value!r}; use -100 to ban a token"
            )
        bias[int(key)] = value
    return bias


def _check_names(kind: str, values: Iterable[str], of: type, error: type[ConfigError | RequestError]) -> None:
    names = {option.name for option in fields(of)}
    for name in values:
        if name not in names:
            raise error(unknown(kind, name, names))


def sampling(**values: Any) -> SamplingParams:
    """Return SamplingParams from loose values; raise RequestError with all names for an unknown one."""
    _check_names("sampling parameter", values, SamplingParams, RequestError)
    return SamplingParams(**values)
