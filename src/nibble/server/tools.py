"""Tools and structured answers in requests.

Tools: what clients may say of them, what chat templates are given, and the grammars of calls. Structured answers: what
requests may say of an answer's form, the grammar it becomes, and whether that is sound.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nibble.engine.structured_output import Grammars
from nibble.errors import RequestError
from nibble.server.chat_parser import CallFormat, Layout
from nibble.server.tool_arguments import types_of

MAX_TOOLS = 512
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
PASTES_ARGUMENTS = re.compile(r"""\barguments['"]?\]?\s*(?:\+|~|-?\}\})""")
PRINTS_ARGUMENTS = re.compile(r"""\barguments['"]?\]?\s*\|\s*(?:tojson|items|dictsort)""")
NO_PARAMETERS = {"type": "object", "properties": {}}

TEXT = r"/(.|\n)*/"
"""Any text, in Lark."""
PLACES = re.compile("(NAME|NUMBER|ARGUMENTS)")
WHITESPACE = {"whitespace_pattern": "[ \\n]{0,16}"}
"""In arguments: without a bound a model may write white space for ever."""
DEFINITIONS = ("$defs", "definitions")
"""What a schema's parts refer to."""

Marks = Mapping[str, int]
"""Markers that are one token each, which text in a grammar would not be taken for."""


class Function(BaseModel):
    """What a tool does."""

    model_config = ConfigDict(extra="ignore")

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

    model_config = ConfigDict(extra="ignore")

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
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise ValueError(f"two tools are named {twice!r}")
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not names:
            raise ValueError("this tool_choice needs tools")
        unknown = [name for name in self._choice_names() if name not in names]
        if unknown:
            raise ValueError(f"tool_choice names {unknown[0]!r}, which is none of the tools")
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


# For chat templates


def tools_for_template(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Return the argument `tools` of a chat template; None, as templates expect it, where there are none."""
    functions = [tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in tools]
    for function in functions:
        # Templates print parameters even where there are none.
        function["parameters"] = function.get("parameters") or NO_PARAMETERS
    return [{"type": "function", "function": function} for function in functions] or None


def arguments_as_text(chat_template: str | None) -> bool:
    """Return whether a template needs a call's arguments as JSON's text, for it joins them to other text (DeepSeek's
    do), where others print them as JSON, and need a mapping."""
    template = chat_template or ""
    return bool(PASTES_ARGUMENTS.search(template)) and not PRINTS_ARGUMENTS.search(template)


def message_for_template(message: Mapping[str, Any], *, as_text: bool = False) -> dict[str, Any]:
    """Return a message as templates take it.

    Args:
        message: `Message.plain()`; the arguments of its calls are text in OpenAI's API.
        as_text: leave arguments text, where most templates take a mapping.

    Raises:
        RequestError: its calls are malformed.
    """
    plain = dict(message)
    calls = plain.pop("tool_calls", None)
    if not calls:
        return plain
    if not isinstance(calls, list):
        raise RequestError("tool_calls of a message must be a list")
    return plain | {"tool_calls": [_call_for_template(call, as_text) for call in calls]}


def _call_for_template(call: Any, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("each of a message's tool_calls must have a function with a name")
    arguments = function.get("arguments") or "{}"
    with suppress(ValueError, RecursionError):  # a model gets back as it was what it wrote wrong
        if isinstance(arguments, str) and not as_text:
            arguments = json.loads(arguments)
        elif not isinstance(arguments, str) and as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


# Grammars, in Lark. StructTag of llguidance cannot write these: it knows a marker by its text, not as a token of any
# name and place, has nothing for arguments between tags, and no form for an answer that must be a call.


def lark_text(text: str, marks: Marks) -> str:
    """Return a text in Lark, marks as the tokens that they are."""
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def text_until(rule: str, end: str, marks: Marks) -> str:
    """Return a rule: any text up to a mark, and the mark.

    Args:
        rule: its name.
        end: the mark, text before it included.
        marks: markers that are tokens.
    """
    # A lazy lexeme ends with the first mark that is text; a token ends any text by itself.
    mark = next((mark for mark in marks if mark in end), None)
    if mark is None:
        return f"{rule}[lazy]: {TEXT} {lark_text(end, {})}"
    before = re.escape(end[: end.index(mark)]).replace("/", r"\/")
    return f"{rule}: {TEXT[:-1]}{before}/ {lark_text(end[end.index(mark) :], marks)}"


def required_calls(
    call_format: CallFormat, tools: Sequence[Function], max_calls: int | None, marks: Marks
) -> list[str]:
    """Return rule `calls`: one or more calls, and no text.

    Args:
        call_format: how the model writes calls.
        tools: what may be called.
        max_calls: 1 or any number.
        marks: markers that are tokens.
    """
    layout = call_format.layout
    calls = f"{lark_text(layout.begin, marks)} {_several(layout, max_calls, marks)}"
    return [f"calls: {calls}", *_call_rules(layout, layout.call, "call", tools, marks)]


def possible_calls(
    call_format: CallFormat, tools: Sequence[Function], max_calls: int | None, marks: Marks
) -> list[str]:
    """Return rule `mixed`: text, in which a marker begins a call.

    Args:
        call_format: how the model writes calls.
        tools: what may be called.
        max_calls: 1 or any number.
        marks: markers that are tokens.
    """
    layout = call_format.layout
    opening = layout.begin + layout.call
    marker = next((marker for marker in call_format.markers if opening.startswith(marker)), None)
    # Without a marker a call is the complete answer, known by its first character.
    if marker is None:
        other = rf'other: /[^\s{re.escape(call_format.bare_start)}](.|\n)*/ | ""'
        return ["mixed: calls | other", other, *required_calls(call_format, tools, max_calls, marks)]
    repeat = "?" if max_calls == 1 else "*"
    rules = [f"mixed: block{repeat} TAIL", f"TAIL: {TEXT}", text_until("before", marker, marks)]
    if layout.begin:
        begin = lark_text(layout.begin.removeprefix(marker), marks)
        rules.append(f"block: before {begin} {_several(layout, max_calls, marks)}")
        return rules + _call_rules(layout, layout.call, "call", tools, marks)
    rules.append("block: before rest")
    return rules + _call_rules(layout, layout.call.removeprefix(marker), "rest", tools, marks)


def _several(layout: Layout, max_calls: int | None, marks: Marks) -> str:
    one = max_calls == 1 or layout.separator is None
    more = "" if one else f"({lark_text(layout.separator or '', marks)} call)*"
    return f"call {more} {lark_text(layout.end, marks)}"


def _call_rules(layout: Layout, text: str, rule: str, tools: Sequence[Function], marks: Marks) -> list[str]:
    """Return rule `rule`, one of the tools' calls, and those of the arguments."""
    rules = [f"{rule}: " + " | ".join(f"{rule}_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        places = {"NAME": json.dumps(tool.name), "NUMBER": "/[0-9]{1,3}/", "ARGUMENTS": f"arguments_{i}"}
        parts = [places.get(part) or lark_text(part, marks) for part in PLACES.split(text) if part]
        rules.append(f"{rule}_{i}: " + " ".join(parts))
        if layout.argument:
            rules += _argument_rules(layout, tool, f"arguments_{i}", marks)
        else:
            rules.append(f"arguments_{i}: %json {json.dumps(tool.argument_schema())}")
    return rules


def _argument_rules(layout: Layout, tool: Function, rule: str, marks: Marks) -> Iterator[str]:
    """Yield rule `rule`: arguments between tags or in Python, in the schema's order, some of them optional."""
    schema = tool.parameters or {}
    properties = schema.get("properties") or {}
    required = [key for key in schema.get("required") or () if isinstance(key, str)]
    keys = list(dict.fromkeys([*properties, *required]))
    for i, key in enumerate(keys):
        yield from _value_rules(layout, tool, key, properties.get(key), f"{rule}_{i}", marks)
    if not layout.argument_separator:
        optional = (f"{rule}_{i}" + "?" * (key not in required) for i, key in enumerate(keys))
        yield f"{rule}: " + (" ".join(optional) or '""')
        return
    # `first_i` are arguments from i on, `more_i` are those after another one: so no separator stands alone.
    yield f'{rule}_first_{len(keys)}: ""'
    yield f'{rule}_more_{len(keys)}: ""'
    for i, key in enumerate(keys):
        skip = ["", ""] if key in required else [f" | {rule}_first_{i + 1}", f" | {rule}_more_{i + 1}"]
        here = f"{rule}_{i} {rule}_more_{i + 1}"
        yield f"{rule}_first_{i}: {here}{skip[0]}"
        yield f"{rule}_more_{i}: {json.dumps(layout.argument_separator)} {here}{skip[1]}"
    yield f"{rule}: {rule}_first_0"


def _value_rules(
    layout: Layout, tool: Function, key: str, schema: Any, rule: str, marks: Marks
) -> Iterator[str]:
    """Yield rule `rule`: one argument with its key."""
    root = tool.parameters or {}
    types = types_of(schema, root)
    is_text = not layout.argument_separator and (not types or "string" in types)
    places = {"KEY": key, "FLAG": str(is_text).lower()}
    around = layout.argument.split("VALUE")
    before, after = (re.sub("KEY|FLAG", lambda place: places[place[0]], part) for part in around)
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if is_text and isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        value = "(" + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices) + ")"
    elif is_text:
        end = after.strip("\n")
        yield text_until(f"{rule}_text", end, marks)
        value, after = f"{rule}_text", after.partition(end)[2]
    elif layout.argument_separator and types == {"boolean"}:
        value = '("True" | "False")'
    else:
        definitions = {name: root[name] for name in DEFINITIONS if name in root}
        schema = schema if isinstance(schema, Mapping) else {}
        value = f"%json {json.dumps(tool.with_options({**definitions, **schema}))}"
    yield f"{rule}: {lark_text(before, marks)} {value} {lark_text(after, marks)}"


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
        grammars = [self.response_format.grammar()] if self.response_format else []
        for fields in (self.structured_outputs or (), self):
            grammars += [_grammar(name, value) for name, value in fields if name in GRAMMAR_KINDS]
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
