"""Models of requests in OpenAI's shape, and how they become SamplingParams and grammars.

See https://platform.openai.com/docs/api-reference. Fields that OpenAI does not have (min_p, top_k, repetition_penalty,
stop_token_ids, min_tokens, bad_words, ignore_eos, skip_special_tokens, cache_salt, priority...) are named as other
servers name them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from nibble.config import SamplingParams
from nibble.errors import RequestError
from nibble.models.generation_config import SamplingDefaults

MAX_STOPS, MAX_LOGPROBS, MAX_CHOICES, MAX_PROMPTS, MAX_BIASES = 16, 20, 128, 1024, 1 << 14
MAX_TOKENS, MAX_FIELDS, MAX_STOP_TOKENS, MAX_BAD_WORDS = 1 << 20, 1000, 4096, 1024
MAX_PROMPT_LOGPROBS = 1 << 20
"""Log-probabilities of prompts in an answer, alternatives included."""
Token = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
# One wrong token is reported, not a million: all other requests wait while a body is checked.
Tokens = Annotated[list[Token], Field(max_length=MAX_TOKENS, fail_fast=True)]
Prompts = Field(max_length=MAX_PROMPTS, fail_fast=True)
Stop = Annotated[list[str], Field(max_length=MAX_STOPS)]
MODEL_DEFAULT = "If left out: the model's own (/v1/models, default_sampling_params), else no effect or 1."
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs",
    "tools", "truncation",
}  # fmt: skip
"""Arguments of Transformers' apply_chat_template, which a template's own must not replace."""
MAX_TOOLS, MAX_TAGS = 512, 256
NAME = r"^[a-zA-Z0-9_-]{1,128}$"
WHITESPACE = {"whitespace_pattern": "[ \\n]{0,16}"}
"""In arguments: without a bound a model may write white space for ever."""
Schema = dict[str, Any] | bool | str


class Function(BaseModel):
    """What a tool does."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Hold arguments to the schema as it stands, or refuse it. Else what is not understood in it is passed over."""

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        """Arguments are an object, so its schema must be one's."""
        for name, kind, kind_name in (("properties", dict, "an object"), ("required", list, "a list")):
            if not isinstance((schema or {}).get(name, kind()), kind):
                raise ValueError(f"`{name}` of a JSON Schema must be {kind_name}")
        if (schema or {}).get("type", "object") != "object":
            raise ValueError("the JSON Schema of parameters must have type 'object'")
        return schema

    def argument_schema(self) -> dict[str, Any]:
        """Return the schema that a grammar follows: properties without a name are not made up, unless it says so."""
        return self.with_options({"additionalProperties": False, **(self.parameters or {}), "type": "object"})

    def with_options(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a schema with llguidance's options."""
        return {"x-guidance": {**WHITESPACE, "lenient": not self.strict}, **schema}


class Tool(BaseModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    """A function by its name."""

    name: str


class NamedTool(BaseModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedToolList(BaseModel):
    """Tools by their names, and whether one must be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(BaseModel):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ToolFields(BaseModel):
    """The fields of a request that are about tools."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two tools are named {twice!r}")
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not names:
            raise ValueError("this tool_choice needs tools")
        if (unknown := next((name for name in self._choice_names() if name not in names), None)) is not None:
            raise ValueError(f"tool_choice names {unknown!r}, which is none of the tools")
        return self

    def _choice_names(self) -> list[str]:
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [self.tool_choice.function.name] if isinstance(self.tool_choice, NamedTool) else []

    def callable_tools(self) -> list[Tool]:
        """Return the tools that the model may call: none for tool_choice `none`, some where they are listed."""
        if self.tool_choice == "none" or not self.tools:
            return []
        names = self._choice_names() if isinstance(self.tool_choice, AllowedTools) else None
        return [tool for tool in self.tools if names is None or tool.function.name in names]

    def required_tools(self) -> list[Tool]:
        """Return those of which the answer must call one: all for `required`, or the one of tool_choice."""
        choice, tools = self.tool_choice, self.callable_tools()
        if isinstance(choice, NamedTool):
            return [tool for tool in tools if tool.function.name in self._choice_names()]
        required = isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required"
        return tools if required or choice == "required" else []

    def max_calls(self) -> int | None:
        """Return how many calls an answer may have; None: any number."""
        return None if self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool) else 1


class SchemaFormat(BaseModel):
    """What response_format's json_schema says."""

    name: str = "answer"
    body: dict[str, Any] = Field(alias="schema")


class Structure(BaseModel):
    """A tag: what begins it, the JSON in it, what ends it."""

    model_config = ConfigDict(extra="forbid")
    begin: str = Field(min_length=1)
    body: dict[str, Any] = Field(alias="schema")
    end: str = ""


class StructuralTag(BaseModel):
    """Text, in which a trigger begins one of the structures."""

    structures: list[Structure] = Field(min_length=1, max_length=MAX_TAGS)
    triggers: list[str] = Field(min_length=1, max_length=MAX_TAGS)

    @model_validator(mode="after")
    def _check_triggers(self) -> Self:
        for structure in self.structures:
            if not self._trigger(structure):
                raise ValueError(f"the structure {structure.begin!r} begins with none of the triggers")
        return self

    def _trigger(self, structure: Structure) -> str:
        return next((trigger for trigger in self.triggers if structure.begin.startswith(trigger)), "")

    def grammar(self) -> str:
        """Return the tags as a grammar."""
        from llguidance import StructTag

        tags = [
            StructTag(trigger=self._trigger(one), begin=one.begin, grammar=one.body, end=one.end)
            for one in self.structures
        ]
        return f"lark:{StructTag.to_grammar(tags, assume_special=False)}"


class ResponseFormat(StructuralTag):
    """text, any JSON object, one of a schema, or text with structures in it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: SchemaFormat | None = None
    structures: list[Structure] = Field(default_factory=list, max_length=MAX_TAGS)
    triggers: list[str] = Field(default_factory=list, max_length=MAX_TAGS)

    def grammar(self) -> str:
        """Return the grammar, empty for text; raises RequestError."""
        if self.type == "structural_tag":
            if not self.structures:
                raise RequestError("response_format structural_tag needs structures and triggers")
            return super().grammar()
        if self.type == "json_schema":
            if self.json_schema is None:
                raise RequestError("response_format json_schema needs a json_schema")
            return f"json_schema:{json.dumps(self.json_schema.body)}"
        return "json_object:" if self.type == "json_object" else ""


class StructuredOutputs(BaseModel):
    """vLLM's newer field: one of these."""

    model_config = ConfigDict(extra="forbid")
    schema_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class StructuredFields(BaseModel):
    """The fields of a request that are about the form of its answer, in the words of OpenAI, vLLM and SGLang."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="Lark, as llguidance has it, or GBNF.")
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    def grammar(self) -> str | None:
        """Return what the answer must follow.

        Raises:
            RequestError: more than one grammar is asked for, or one is malformed.
        """
        grammars = [self.response_format.grammar()] if self.response_format else []
        for model in (self.structured_outputs or (), self):
            grammars += [_grammar(name, value) for name, value in model if name in GRAMMAR_KINDS]
        grammars = [grammar for grammar in grammars if grammar]
        if len(grammars) > 1:
            raise RequestError("an answer can follow one of response_format, guided_... and the like only")
        return grammars[0] if grammars else None


GRAMMAR_KINDS = {
    "schema_": "json_schema", "guided_json": "json_schema", "json_schema": "json_schema", "json_object": "json_object",
    "regex": "regex", "guided_regex": "regex", "choice": "choice", "guided_choice": "choice", "grammar": "lark",
    "guided_grammar": "lark", "ebnf": "lark", "structural_tag": "structural_tag",
}  # fmt: skip
"""Fields that ask for a grammar, and its kind (engine/structured_output.py)."""


def _grammar(name: str, value: Any) -> str:
    """Return the grammar of a field; empty where the field was left out."""
    kind = GRAMMAR_KINDS[name]
    if value is None or (kind == "json_object" and not value):
        return ""
    if kind == "json_object":
        return "json_object:"
    if kind != "structural_tag":
        return f"{kind}:{value if isinstance(value, str) else json.dumps(value)}"
    try:
        return StructuralTag.model_validate_json(value).grammar()
    except ValueError as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise RequestError(f"the structural_tag cannot be read: {why}") from error


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


class GenerationFields(BaseModel):
    """The fields that all requests for answers share."""

    # An unknown field might change the answer, so it is refused and never ignored.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, json_schema_extra=_allow_null)

    model: str | None = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2, description=MODEL_DEFAULT)
    top_p: float | None = Field(None, gt=0, le=1, description=MODEL_DEFAULT)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, json_schema_extra={"maxProperties": MAX_BIASES})
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | Stop | None = None
    top_k: int | None = Field(None, ge=-1, le=1 << 30, description=MODEL_DEFAULT)
    min_p: float | None = Field(None, ge=0, le=1, description=MODEL_DEFAULT)
    repetition_penalty: float | None = Field(None, gt=0, le=10, description=MODEL_DEFAULT)
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    min_tokens: int = Field(0, ge=0, le=1 << 30)
    include_stop_str_in_output: bool = False
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=1 << 30)
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


class Sampling(StructuredFields, GenerationFields):
    """The fields that both kinds of completions share."""

    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs come with whole answers only: leave out stream")
        return self

    def num_prompt_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens are reported of the prompt; None for none of it."""
        return self.prompt_logprobs

    def params(self, max_tokens: int, logprobs: int | None, defaults: SamplingDefaults) -> SamplingParams:
        """Return how to sample; raises RequestError.

        Args:
            max_tokens: of an answer.
            logprobs: how many of the likeliest tokens are reported; None for no log-probabilities.
            defaults: of what the request leaves out.
        """
        bias = {key: max(-100.0, min(100.0, value)) for key, value in (self.logit_bias or {}).items()}
        names = {field.name for field in fields(SamplingParams)}
        values = self.model_dump(include=names, exclude_none=True)
        values |= {"max_tokens": max_tokens, "logprobs": logprobs, "grammar": self.grammar()}
        values["prompt_logprobs"] = self.num_prompt_logprobs()
        if self.top_k == -1:
            values["top_k"] = 0
        return defaults.params(**values | {"logit_bias": bias})


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], Prompts] | Tokens | Annotated[list[Tokens], Prompts]
    """A text, texts, token ids, or lists of these."""
    max_tokens: int | None = Field(16, ge=0, le=1 << 30, description="0: the prompt alone, for echo.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="With echo also of the prompt.")
    echo: bool = False
    suffix: None = Field(None, description="Not served.")
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_served(self) -> Self:
        if self.prompt == []:
            raise ValueError("prompt is empty")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not served, unless it is n: ask for n answers")
        return self

    def num_prompt_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens are reported of the prompt: what echo and prompt_logprobs need."""
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in counts if count is not None), default=None)

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


MEDIA = {
    "image_url": "images are", "image": "images are", "input_image": "images are", "input_audio": "audio is",
    "audio_url": "audio is", "video_url": "video is", "file": "files are", "input_file": "files are",
    "document": "documents are",
}  # fmt: skip
"""What the types of parts are called, in the words of OpenAI, vLLM and Anthropic, that are understood and refused."""
MediaType = Literal[
    "image_url",
    "image",
    "input_image",
    "input_audio",
    "audio_url",
    "video_url",
    "file",
    "input_file",
    "document",
]


class MediaPart(BaseModel):
    """A part of a message that is no text; such requests are refused."""

    model_config = ConfigDict(extra="allow")
    type: MediaType


def type_of(value: Any) -> str:
    """Return the `type` of an object of a request, read or not yet read; empty where it has none."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else ""


def _part_tag(part: Any) -> str | None:
    kind = type_of(part)
    return "text" if kind == "text" else "media" if kind in MEDIA else None


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[MediaPart, Tag("media")],
    Discriminator(
        _part_tag,
        custom_error_type="part_type",
        custom_error_message="a part must be an object of type 'text'",
    ),
]


class Message(BaseModel):
    """One turn of a conversation."""

    # Fields that templates know (tool_calls, name, reasoning_content) pass through.
    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None

    def media(self) -> str | None:
        """Return what the message holds beside text, as "images are"; None where it is text."""
        parts = self.content if isinstance(self.content, list) else ()
        return next((MEDIA[part.type] for part in parts if isinstance(part, MediaPart)), None)

    def plain(self) -> dict[str, Any]:
        """Return the turn as chat templates take it, with its content as one text."""
        content = self.content
        parts = [part for part in content if isinstance(part, TextPart)] if isinstance(content, list) else []
        text = content if isinstance(content, str) else "".join(part.text for part in parts)
        return {**self.model_dump(exclude_none=True), "content": text}


class ChatRequest(ToolFields, Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=10_000, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 30)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_served(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        # A template is a program: no client may replace it, nor how it is called.
        if wrong := next((name for name in self.chat_template_kwargs or () if name in RESERVED), None):
            raise ValueError(f"chat_template_kwargs must not have {wrong!r}")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    def template_kwargs(self) -> dict[str, Any]:
        """Return arguments of the chat template. One that does not know `reasoning_effort` passes over it."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        add = self.add_generation_prompt is not False
        turn = {"add_generation_prompt": add, "continue_final_message": self.continue_final_message}
        return effort | (self.chat_template_kwargs or {}) | turn

    def num_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens are reported; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt, or messages for the chat template."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
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
