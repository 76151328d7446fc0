"""OpenAI's types: what requests may say, and what is answered. https://platform.openai.com/docs/api-reference

Owns the models of requests, and how they become SamplingParams. Fields that OpenAI does not have (min_p, top_k,
repetition_penalty, stop_token_ids, ignore_eos, skip_special_tokens, cache_salt) are named as other servers name them. A
field that would change the answer and is not known is refused, never ignored; those that change nothing are listed.
Must not know of engines.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nibble.config import SamplingParams
from nibble.errors import RequestError
from nibble.server.structured import StructuredFields
from nibble.server.tool_types import ToolFields

MOST_STOPS, MOST_LOGPROBS, MOST_CHOICES = 16, 20, 128
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Stop = Annotated[list[str], Field(max_length=MOST_STOPS)]


class StreamOptions(BaseModel):
    """include_usage: a last chunk with usage and no choices."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Sampling(StructuredFields):
    """What both kinds of completions share."""

    model_config = ConfigDict(extra="forbid")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | Stop | None = None
    top_k: int = Field(0, ge=-1, le=1 << 30)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = Field("", max_length=256)
    timeout: float | None = Field(None, gt=0, description="Seconds after which the answer ends as it stands.")

    # said by clients, without a meaning here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

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


class CompletionRequest(Sampling):
    """POST /v1/completions. prompt: a text, texts, token ids, or lists of these."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: int | None = Field(16, ge=1, le=1 << 30)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    suffix: None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself; raises RequestError where there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        if not self.prompt:
            raise RequestError("prompt is empty")
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation. Fields that templates know (tool_calls, name, reasoning_content) pass through."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart] | None = None

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

    messages: list[Message] = Field(min_length=1, max_length=10_000)
    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 30)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told; raises RequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(BaseModel):
    """POST /tokenize: of a prompt, or of messages by the chat template."""

    model_config = ConfigDict(extra="ignore")
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="ignore")
    model: str | None = None
    tokens: list[Token]
