"""What requests may say of the form of an answer, in the words of OpenAI, vLLM and SGLang, and the grammar it becomes.

Owns StructuredFields, which requests inherit. Must not know of HTTP, engines, or how grammars are followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nibble.errors import RequestError
from nibble.server.tool_grammar import TEXT, until, words

Schema = dict[str, Any] | bool | str
MOST_TAGS = 256


class SchemaFormat(BaseModel):
    """What response_format's json_schema says."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: str = "answer"
    body: dict[str, Any] = Field(alias="schema")


class Structure(BaseModel):
    """A tag: what begins it, the JSON in it, what ends it."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    begin: str = Field(min_length=1)
    body: dict[str, Any] = Field(alias="schema")
    end: str = ""


class StructuralTag(BaseModel):
    """Text, in which a trigger begins one of the structures."""

    model_config = ConfigDict(extra="ignore")
    structures: list[Structure] = Field(min_length=1, max_length=MOST_TAGS)
    triggers: list[str] = Field(min_length=1, max_length=MOST_TAGS)

    @model_validator(mode="after")
    def _triggered(self) -> Self:
        for one in self.structures:
            if not any(trigger and one.begin.startswith(trigger) for trigger in self.triggers):
                raise ValueError(f"the structure {one.begin!r} begins with none of the triggers")
        return self

    def lark(self) -> str:
        """As a grammar."""
        rules = [f"TAIL: {TEXT}"]
        for i, trigger in enumerate(self.triggers):
            rules += until(f"trigger_{i}", trigger, {}) if trigger else []
        for i, one in enumerate(self.structures):
            k, trigger = next((k, t) for k, t in enumerate(self.triggers) if t and one.begin.startswith(t))
            inside = f"%json {json.dumps(one.body)}"
            rest = words(one.begin.removeprefix(trigger), {})
            rules.append(f"tag_{i}: trigger_{k} {rest} {inside} {words(one.end, {})}")
        tags = " | ".join(f"tag_{i}" for i in range(len(self.structures)))
        return "\n".join([f"start: ({tags})* TAIL", *rules])


class ResponseFormat(StructuralTag):
    """text, any JSON object, one of a schema, or text with structures in it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: SchemaFormat | None = None
    structures: list[Structure] = Field(default_factory=list, max_length=MOST_TAGS)
    triggers: list[str] = Field(default_factory=list, max_length=MOST_TAGS)

    def grammar(self) -> str | None:
        """Raises RequestError."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return "json_object:"
        if self.type == "structural_tag":
            if not self.structures:
                raise RequestError("response_format structural_tag needs structures and triggers")
            return f"lark:{self.lark()}"
        if self.json_schema is None:
            raise RequestError("response_format json_schema needs a json_schema")
        return f"json_schema:{json.dumps(self.json_schema.body)}"


class StructuredOutputs(BaseModel):
    """vLLM's newer field: one of these."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    def grammars(self) -> Iterator[str]:
        """What is asked for."""
        yield from _grammars(self.schema_, self.regex, self.choice, self.grammar)
        if self.json_object:
            yield "json_object:"
        if self.structural_tag is not None:
            yield _tagged(self.structural_tag)


class StructuredFields(BaseModel):
    """The fields of a request that are about the form of its answer."""

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
        """What the answer must be; raises RequestError where more than one thing is asked for."""
        formatted = self.response_format.grammar() if self.response_format else None
        found = [
            *([formatted] if formatted else []),
            *(self.structured_outputs.grammars() if self.structured_outputs else []),
            *_grammars(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
            *_grammars(self.json_schema, self.regex, None, self.ebnf),
            *([_tagged(self.structural_tag)] if self.structural_tag is not None else []),
        ]
        if len(found) > 1:
            raise RequestError("an answer can follow one of response_format, guided_... and the like only")
        return found[0] if found else None


def _grammars(
    schema: Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[str]:
    if schema is not None:
        yield f"json_schema:{schema if isinstance(schema, str) else json.dumps(schema)}"
    if regex is not None:
        yield f"regex:{regex}"
    if choice is not None:
        yield f"choice:{json.dumps(choice)}"
    if grammar is not None:
        yield f"lark:{grammar}"


def _tagged(text: str) -> str:
    """Of a structural tag, given as JSON's text."""
    try:
        return f"lark:{StructuralTag.model_validate_json(text).lark()}"
    except ValueError as error:
        raise RequestError(f"the structural_tag cannot be read: {error}") from error
