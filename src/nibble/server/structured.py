"""Structured answers: what requests may say of an answer's form, the grammar it becomes, and whether that is sound."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nibble.engine.structured_output import Grammars
from nibble.errors import RequestError

Schema = dict[str, Any] | bool | str
MAX_TAGS = 256
MAX_CHECKED = 256
"""Grammars that passed the check, and are not checked again."""


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

    def grammars(self) -> Iterator[str]:
        """Yield the grammar, if there is one; raises RequestError."""
        if self.type == "json_object":
            yield "json_object:"
        elif self.type == "structural_tag":
            if not self.structures:
                raise RequestError("response_format structural_tag needs structures and triggers")
            yield self.grammar()
        elif self.type == "json_schema":
            if self.json_schema is None:
                raise RequestError("response_format json_schema needs a json_schema")
            yield f"json_schema:{json.dumps(self.json_schema.body)}"


class StructuredOutputs(BaseModel):
    """vLLM's newer field: one of these."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
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
        outputs = self.structured_outputs or StructuredOutputs.model_validate({})
        grammars = [
            *(self.response_format.grammars() if self.response_format else ()),
            *_grammars(outputs.schema_, outputs.regex, outputs.choice, outputs.grammar),
            *(["json_object:"] if outputs.json_object else []),
            *_grammars(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
            *_grammars(self.json_schema, self.regex, None, self.ebnf),
            *(_tagged(text) for text in (outputs.structural_tag, self.structural_tag) if text is not None),
        ]
        if len(grammars) > 1:
            raise RequestError("an answer can follow one of response_format, guided_... and the like only")
        return grammars[0] if grammars else None


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
    """Return the grammar of a structural tag, written in JSON."""
    try:
        return StructuralTag.model_validate_json(text).grammar()
    except ValueError as error:
        raise RequestError(f"the structural_tag cannot be read: {error}") from error


class GrammarCheck:
    """Tries grammars before the engine gets them, one at a time, in a thread.

    One that cannot be followed, or takes long to prepare, is refused, and holds up only others that are still to be
    tried.

    Args:
        tokens: a tokenizer; without one the engine refuses.
    """

    def __init__(self, tokens: Any) -> None:
        self._tokens, self._grammars = tokens, dict[int, Grammars]()
        self._good: deque[bytes] = deque(maxlen=MAX_CHECKED)
        # Not a lock: it would be free again when a client goes away, while its grammar is still tried.
        self._thread = ThreadPoolExecutor(1, "grammar-check")

    async def prepare(self, vocab_size: int) -> None:
        """Do now what the first grammar would wait for."""
        if self._tokens is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._grammars_for(vocab_size).prepare)

    async def check(self, grammar: str, vocab_size: int) -> None:
        """Raise RequestError where the engine could not follow a grammar."""
        digest = hashlib.sha256(grammar.encode(errors="replace")).digest()
        if self._tokens is not None and digest not in self._good:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._try, digest, grammar, vocab_size)

    def _grammars_for(self, vocab_size: int) -> Grammars:
        if vocab_size not in self._grammars:
            self._grammars = {vocab_size: Grammars(self._tokens, vocab_size, self._tokens.eos_ids)}
        return self._grammars[vocab_size]

    def _try(self, digest: bytes, grammar: str, vocab_size: int) -> None:
        # Others may have waited for the same one.
        if digest not in self._good:
            self._grammars_for(vocab_size).check(grammar)
            self._good.append(digest)
