"""What the user said: frozen dataclasses. A field's doc is its command-line help and its row in the docs.

Owns Config and SamplingParams and the checks that need nothing but their own values. What was decided from
them is a Plan (attention/resolve.py). Must not know of torch, models or backends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from nibble.errors import ConfigError, RequestError, unknown

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?$", re.IGNORECASE)


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


def doc_of(option: Field[Any]) -> str:
    """The help text of a Config or SamplingParams field."""
    return str(option.metadata["doc"])


def default_of(option: Field[Any]) -> Any:
    """The default value of a field, None for a required one."""
    return None if option.default is MISSING else option.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How to serve one model. Raises ConfigError where a value is malformed."""

    model: str = _option(MISSING, "Local folder or hub name of a Transformers checkpoint; `demo` is bundled.")
    kv_format: str = _option(
        "bf16", "KV cache scheme: `nibble formats` lists them; `+rot`, `+kmean` add transforms."
    )
    kv_layers: str = _option("", "Other schemes for some layers, as `0,1,-1=fp8_e4m3`; more rules after `;`.")
    kv_scales: str = _option(
        "auto", "Global KV scales: auto (the checkpoint's), a JSON file, calibrate, or one."
    )
    page_size: int | None = _option(None, "Tokens per page; chosen jointly with the backends if left out.")
    attention_backend: str = _option("auto", "Attention backend of all phases.")
    prefill_backend: str | None = _option(None, "Backend of PREFILL and EXTEND, where it differs.")
    decode_backend: str | None = _option(None, "Backend of DECODE and VERIFY, where it differs.")
    allow_staging: bool = _option(False, "Allow a decode backend that needs pages dequantised first (slow).")
    dtype: str = _option("auto", "Compute dtype: auto (float32 on a CPU, else the checkpoint's), or a name.")
    device: str = _option("auto", "auto, cpu or cuda.")
    kv_memory: str | None = _option(
        None, "Memory for the KV cache, as 2GiB; else what is free, within reason."
    )
    max_context: int | None = _option(None, "Longest prompt + answer in tokens; the model's own if left out.")
    max_running: int = _option(256, "Most requests that decode at the same time.")
    token_budget: int = _option(512, "Most tokens computed in one step; longer prompts are cut into chunks.")
    prefix_cache: bool = _option(True, "Share pages between requests with the same beginning.")
    seed: int = _option(0, "Seed of requests that name none.")

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(unknown("dtype", self.dtype, DTYPES))
        for name in ("max_running", "token_budget", "page_size", "max_context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)

    def backend_for(self, decode: bool) -> str:
        """The backend asked for in DECODE and VERIFY (decode=True), or in PREFILL and EXTEND; `auto` is any."""
        return (self.decode_backend if decode else self.prefill_backend) or self.attention_backend


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `2GiB`, `512MB` or `4096`; raises ConfigError."""
    match = _SIZE.match(text.strip())
    if not match:
        raise ConfigError(f"cannot read {text!r} as a size; write it as 2GiB, 512MB or a number of bytes")
    unit = (match[2] or "B").upper()
    base = 1000 if len(unit) == 2 and unit != "B" else 1024  # KB is 1000 bytes; KiB, and K alone, are 1024
    return int(float(match[1]) * base ** " KMGT".index(unit[0] if unit != "B" else " "))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose an answer's tokens. Raises RequestError (status 400) where a value is out of range."""

    max_tokens: int = _option(128, "Most tokens to generate.")
    temperature: float = _option(0.0, "0 is greedy; higher is more random.")
    top_k: int = _option(0, "Keep the k most likely tokens; 0 keeps all.")
    top_p: float = _option(1.0, "Keep the likeliest tokens whose probabilities sum to p.")
    min_p: float = _option(0.0, "Drop tokens less likely than min_p times the likeliest.")
    repetition_penalty: float = _option(
        1.0, "Divide (multiply, if negative) logits of tokens seen in prompt or answer."
    )
    presence_penalty: float = _option(0.0, "Subtract from logits of tokens that the answer holds.")
    frequency_penalty: float = _option(0.0, "Subtract from logits, per occurrence in the answer.")
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"doc": "Add to logits, by token id."}
    )
    seed: int | None = _option(
        None, "Seed of this request; the same seed gives the same answer in any batch."
    )
    stop: tuple[str, ...] = _option((), "Strings that end the answer; not part of it.")
    stop_token_ids: tuple[int, ...] = _option((), "Tokens that end the answer; not part of it.")
    ignore_eos: bool = _option(False, "Go on after the model's end-of-text token.")
    logprobs: int | None = _option(
        None, "Return log-probabilities of this many likeliest tokens (0: the chosen one only)."
    )
    n: int = _option(1, "Answers per prompt; they share the prompt's pages.")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and low <= value <= high):
                raise RequestError(f"{name} must lie in [{low}, {high}], not {value!r}")
        if self.top_p == 0:
            raise RequestError("top_p must be above 0; for greedy decoding use temperature 0")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty must be above 0; 1 leaves logits as they are")
        if "" in self.stop:
            raise RequestError("stop strings must not be empty")
        if not all(math.isfinite(value) for value in self.logit_bias.values()):
            raise RequestError("logit_bias values must be finite; use -100 to ban a token")


_RANGES = (
    ("max_tokens", 1, 1 << 30), ("temperature", 0.0, 100.0), ("top_k", 0, 1 << 30), ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0), ("repetition_penalty", 0.0, 100.0), ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0), ("logprobs", 0, 100), ("n", 1, 1024),
    ("seed", -(1 << 63), (1 << 64) - 1),
)  # fmt: skip


def sampling(**values: Any) -> SamplingParams:
    """SamplingParams from loose values; an unknown name is a RequestError that lists the known ones."""
    known = {option.name for option in fields(SamplingParams)}
    for name in values:
        if name not in known:
            raise RequestError(unknown("sampling parameter", name, known))
    return SamplingParams(**values)
