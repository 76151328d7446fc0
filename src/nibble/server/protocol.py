"""Models of requests in OpenAI's shape, and how they become SamplingParams.

See https://platform.openai.com/docs/api-reference. Fields that OpenAI does not have (min_p, top_k, repetition_penalty,
stop_token_ids, ignore_eos, skip_special_tokens, cache_salt, priority) are named as other servers name them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nibble.config import SamplingParams
from nibble.server.tools import StructuredFields, ToolFields

MAX_STOPS, MAX_LOGPROBS, MAX_CHOICES, MAX_PROMPTS, MAX_BIASES = 16, 20, 128, 1024, 1 << 14
MAX_TOKENS, MAX_FIELDS, MAX_STOP_TOKENS = 1 << 20, 1000, 4096
Token = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
# One wrong token is reported, not a million: all other requests wait while a body is checked.
Tokens = Annotated[list[Token], Field(max_length=MAX_TOKENS, fail_fast=True)]
Prompts = Field(max_length=MAX_PROMPTS, fail_fast=True)
Stop = Annotated[list[str], Field(max_length=MAX_STOPS)]

RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs",
    "tools", "truncation",
}  # fmt: skip
"""Arguments of Transformers' apply_chat_template, which a template's own must not replace."""


def _allow_null(schema: dict[str, Any]) -> None:
    """Let a JSON Schema allow null for what may be left out."""
    for name, field in schema["properties"].items():
        kinds = field.get("anyOf", [field])
        if "default" in field and not any(kind.get("type") == "null" for kind in kinds):
            common = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            schema["properties"][name] = {**common, "anyOf": [field, {"type": "null"}]}


class StreamOptions(BaseModel):
    """What the chunks of a stream have."""

    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool = False
    """A last chunk with usage and no choices, and null in the others."""
    continuous_usage_stats: bool = False
    """Usage so far in each chunk, as vLLM has it."""


class Sampling(StructuredFields):
    """The fields that both kinds of completions share."""

    # An unknown field might change the answer, so it is refused and never ignored.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, json_schema_extra=_allow_null)

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, json_schema_extra={"maxProperties": MAX_BIASES})
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | Stop | None = None
    top_k: int = Field(0, ge=-1, le=1 << 30)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = Field("", max_length=256)
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31, description="Lower ones are served before.")
    timeout: float | None = Field(
        None, gt=0, description="Seconds after which the request ends with an error."
    )

    # Clients send these; they change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        # Clients send null for what they do not set.
        body = {key: value for key, value in body.items() if value is not None or key not in cls.model_fields}
        # Each unknown field, and each wrong bias, would be an error of its own.
        biases = body.get("logit_bias")
        for name, value, limit in (("a request", body, MAX_FIELDS), ("logit_bias", biases, MAX_BIASES)):
            if isinstance(value, dict) and len(value) > limit:
                raise ValueError(f"{name} may have {limit} entries at most, not {len(value)}")
        return body

    def params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return how to sample; raises RequestError.

        Args:
            max_tokens: of an answer.
            logprobs: how many of the likeliest tokens are reported; None for no log-probabilities.
        """
        bias = {key: max(-100.0, min(100.0, value)) for key, value in (self.logit_bias or {}).items()}
        values = self.model_dump(include={field.name for field in fields(SamplingParams)})
        values |= {"max_tokens": max_tokens, "logprobs": logprobs, "grammar": self.grammar()}
        return SamplingParams(**values | {"top_k": max(self.top_k, 0), "logit_bias": bias})


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], Prompts] | Tokens | Annotated[list[Tokens], Prompts]
    """A text, texts, token ids, or lists of these."""
    max_tokens: int | None = Field(16, ge=1, le=1 << 30)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    suffix: None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_served(self) -> Self:
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
        """Return the prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)


class TextPart(BaseModel):
    """A text among the parts of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    # Fields that templates know (tool_calls, name, reasoning_content) pass through.
    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the turn as chat templates take it, with its content as one text."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        return {**self.model_dump(exclude_none=True), "content": text}


class ChatRequest(ToolFields, Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=10_000, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 30)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_served(self) -> Self:
        # A template is a program: no client may replace it, nor how it is called.
        if wrong := next((name for name in self.chat_template_kwargs or () if name in RESERVED), None):
            raise ValueError(f"chat_template_kwargs must not have {wrong!r}")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    def num_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens are reported; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt, or messages for the chat template."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, max_length=10_000, fail_fast=True)

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    tokens: Tokens
