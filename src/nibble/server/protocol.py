"""OpenAI's types: what requests may say, and what is answered. https://platform.openai.com/docs/api-reference

Owns the models of requests, and how they become SamplingParams. Fields that OpenAI does not have (min_p, top_k,
repetition_penalty, stop_token_ids, ignore_eos, skip_special_tokens, cache_salt, priority) are named as other servers
name them. A field that would change the answer and is not known is refused, never ignored; those that change nothing
are listed. Must not know of engines.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nibble.config import SamplingParams
from nibble.server.structured import StructuredFields
from nibble.server.tools import ToolFields

MOST_STOPS, MOST_LOGPROBS, MOST_CHOICES, MOST_PROMPTS, MOST_BIASES = 16, 20, 128, 1024, 1 << 14
MOST_TOKENS, MOST_FIELDS, MOST_STOP_TOKENS = 1 << 20, 1000, 4096
Token = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Tokens = Annotated[list[Token], Field(max_length=MOST_TOKENS, fail_fast=True)]
"""One wrong token is told, not a million: what is wrong with a body is found while all others wait."""
Prompts = Field(max_length=MOST_PROMPTS, fail_fast=True)
Stop = Annotated[list[str], Field(max_length=MOST_STOPS)]

RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs",
    "tools", "truncation",
}  # fmt: skip
"""Arguments of Transformers' apply_chat_template, which a template's own must not replace."""


def _or_null(schema: dict[str, Any]) -> None:
    """Tells in a JSON Schema that what may be left out may be null."""
    for name, said in schema["properties"].items():
        kinds = said.get("anyOf", [said])
        if "default" in said and not any(kind.get("type") == "null" for kind in kinds):
            about = {key: said.pop(key) for key in ("title", "description", "default") if key in said}
            schema["properties"][name] = {**about, "anyOf": [said, {"type": "null"}]}


class StreamOptions(BaseModel):
    """include_usage: a last chunk with usage and no choices, and null in the others. continuous_usage_stats, vLLM's:
    each chunk tells usage so far."""

    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(StructuredFields):
    """What both kinds of completions share. Null is as good as nothing: clients send it for what they do not set."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, json_schema_extra=_or_null)

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, json_schema_extra={"maxProperties": MOST_BIASES})
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | Stop | None = None
    top_k: int = Field(0, ge=-1, le=1 << 30)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = Field("", max_length=256)
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31, description="Lower ones are served before.")
    timeout: float | None = Field(
        None, gt=0, description="Seconds after which the request ends with an error."
    )

    # said by clients, without a meaning here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        """Each unknown field, and each wrong bias, would be an error of its own."""
        for what, most in ((given, MOST_FIELDS), (_field(given, "logit_bias"), MOST_BIASES)):
            if isinstance(what, dict) and len(what) > most:
                name = "a request" if what is given else "logit_bias"
                raise ValueError(f"{name} may have {most} entries at most, not {len(what)}")
        return given

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value for name, value in given.items() if value is not None or name not in cls.model_fields
        }

    def params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """How to sample; raises RequestError."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        bias = {key: max(-100.0, min(100.0, value)) for key, value in (self.logit_bias or {}).items()}
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=bias,  # type: ignore[arg-type]  # keys may be texts
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            grammar=self.grammar(),
            n=self.n,
        )


def _field(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, dict) else None


class CompletionRequest(Sampling):
    """POST /v1/completions. prompt: a text, texts, token ids, or lists of these."""

    prompt: str | Annotated[list[str], Prompts] | Tokens | Annotated[list[Tokens], Prompts]
    max_tokens: int | None = Field(16, ge=1, le=1 << 30)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    suffix: None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.prompt == []:
            raise ValueError("prompt is empty")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not served, unless it is n: ask for n answers")
        if self.echo and self.logprobs is not None:
            raise ValueError(
                "logprobs are told of answers only, and not of a prompt: leave out echo, or logprobs"
            )
        return self

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation. Fields that templates know (tool_calls, name, reasoning_content) pass through."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: content as one text."""
        said = self.model_dump(exclude_none=True)
        content = self.content
        said["content"] = (
            "".join(part.text for part in content) if isinstance(content, list) else content or ""
        )
        return said


class ChatRequest(ToolFields, Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=10_000, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 30)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _served(self) -> Self:
        """A template is a program, which no client may replace, nor how it is called."""
        if wrong := next((name for name in self.chat_template_kwargs or () if name in RESERVED), None):
            raise ValueError(f"chat_template_kwargs must not have {wrong!r}")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(BaseModel):
    """POST /tokenize: of a prompt, or of messages by the chat template."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, max_length=10_000, fail_fast=True)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    tokens: Tokens
