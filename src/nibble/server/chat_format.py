"""The formats in which models write tool calls and reasoning, and what they mean for the answers to a conversation.

A chat template is given tools and calls as it takes them; an answer that must hold calls, or a form, gets a grammar.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import string
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from nibble.config import SamplingParams
from nibble.engine.structured_output import Grammars
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import ConfigError, RequestError, unknown
from nibble.server.chat_grammar import Marks, lark_text, possible_calls, required_calls, text_until
from nibble.server.chat_parser import AnswerParser, CallFormat, Layout, ReasoningFormat
from nibble.server.harmony import HARMONY, Harmony, HarmonyAnswers
from nibble.server.protocol import Tool, ToolFields
from nibble.server.streaming import Parser

AUTO, NONE = "auto", "none"
TAIL_TOKENS = 16
"""Tokens at the end of a conversation in which reasoning may have begun."""
PASTES_ARGUMENTS = re.compile(r"""\barguments['"]?\]?\s*(?:\+|~|-?\}\})""")
PRINTS_ARGUMENTS = re.compile(r"""\barguments['"]?\]?\s*\|\s*(?:tojson|items|dictsort)""")
NO_PARAMETERS = {"type": "object", "properties": {}}

MAX_CHECKED = 256
"""Grammars that passed the check, and are not checked again."""


def _short_id() -> str:
    """Return an id as Mistral's templates want it."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
HERMES = ("<tool_call>", "</tool_call>")
GLM = (*HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
LLAMA = "<|python_tag|>"
PYTHON = ("<|python_start|>", "<|python_end|>")
DSML = "｜DSML｜"

OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
MISTRAL_LIST = Layout(OBJECT, "[TOOL_CALLS][", ", ", "]")
MISTRAL_NAME = Layout("[TOOL_CALLS]NAME[ARGS]ARGUMENTS")
DEEPSEEK_FENCE = Layout(
    "{1}function{2}NAME\n```json\nARGUMENTS\n```{3}".format(*DEEPSEEK), DEEPSEEK[0], "\n", DEEPSEEK[4]
)
DEEPSEEK_NAME = Layout("{1}NAME{2}ARGUMENTS{3}".format(*DEEPSEEK), DEEPSEEK[0], "", DEEPSEEK[4])

CALL_FORMATS = {
    call_format.name: call_format
    for call_format in (
        CallFormat("deepseek_v3", DEEPSEEK[:2], DEEPSEEK, (DEEPSEEK_FENCE, DEEPSEEK_NAME), (DEEPSEEK[0], "```json")),
        CallFormat("deepseek_v31", DEEPSEEK[:2], DEEPSEEK, (DEEPSEEK_NAME,), (DEEPSEEK[0],)),
        CallFormat("deepseek_v32", (f"<{DSML}function_calls>",), (DSML,), (
            Layout(f'<{DSML}invoke name="NAME">\nARGUMENTS</{DSML}invoke>\n',
                   f"<{DSML}function_calls>\n", "", f"</{DSML}function_calls>",
                   f'<{DSML}parameter name="KEY" string="FLAG">VALUE</{DSML}parameter>\n'),),
            (f"<{DSML}(?:function_calls|invoke)",)),
        CallFormat("kimi_k2", KIMI[:2], KIMI,
                   (Layout("{1}functions.NAME:NUMBER{2}ARGUMENTS{3}".format(*KIMI), KIMI[0], "", KIMI[4]),),
                   (re.escape(KIMI[0]),)),
        CallFormat("mistral_v13", MISTRAL[:1], MISTRAL, (MISTRAL_NAME, MISTRAL_LIST),
                   (r"\[TOOL_CALLS\]", r"\[ARGS\]"), bare_start="[", new_id=_short_id),
        CallFormat("mistral", MISTRAL[:1], MISTRAL, (MISTRAL_LIST, MISTRAL_NAME), (r"\[TOOL_CALLS\]",), bare_start="[",
                   new_id=_short_id),
        CallFormat("minimax_m2", MINIMAX[:1], MINIMAX, (
            Layout('<invoke name="NAME">\nARGUMENTS</invoke>\n', f"{MINIMAX[0]}\n", "", MINIMAX[1],
                   '<parameter name="KEY">VALUE</parameter>\n'),), ("minimax:tool_call",)),
        CallFormat("qwen3_coder", ("<tool_call>", "<function="), HERMES, (
            Layout("<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>", separator="\n",
                   argument="<parameter=KEY>\nVALUE\n</parameter>\n"),), ("<tool_call>", "<function=")),
        CallFormat("glm47", HERMES[:1], GLM, (
            Layout("<tool_call>NAMEARGUMENTS</tool_call>",
                   argument="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"),),
            ("<tool_call>", "</arg_key><arg_value>")),
        CallFormat("glm45", HERMES[:1], GLM, (
            Layout("<tool_call>NAME\nARGUMENTS</tool_call>", separator="\n",
                   argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),),
            ("<tool_call>", "<arg_key>")),
        CallFormat("hermes", HERMES[:1], HERMES, (Layout(f"<tool_call>\n{OBJECT}\n</tool_call>", separator="\n"),),
                   ("<tool_call>",)),
        CallFormat("pythonic", PYTHON[:1], PYTHON,
                   (Layout("NAME(ARGUMENTS)", "[", ", ", "]", "KEY=VALUE", ", "),), (r"\[func\w*\(",), bare_start="[",
                   last_marker=PYTHON[1]),
        CallFormat("llama3", (LLAMA,), (LLAMA,), (Layout('{"name": "NAME", "parameters": ARGUMENTS}', separator=None),),
                   (r'<\|(?:start_header_id|header_start)\|>(?s:.*)"parameters": |<\|python_tag\|>',), bare_start="{"),
    )
}  # fmt: skip
"""By name; of formats that fit a chat template, the first counts."""
JSON_LIST = CallFormat("json", (), (), (Layout(OBJECT, "[", ", ", "]"),), bare_start="[")
"""For models whose own format is not known: only a grammar makes them write it."""

REASONING_FORMATS = {
    reasoning.name: reasoning
    for reasoning in (
        ReasoningFormat("magistral", "[THINK]", "[/THINK]", (r"\[THINK\]",)),
        ReasoningFormat("deepseek_v31", signs=("think>", "<｜Assistant｜>", "thinking")),
        ReasoningFormat("deepseek_r1", signs=("<｜Assistant｜><think>",), always=True),
        ReasoningFormat("qwen3", signs=("think>",)),
    )
}


Format = TypeVar("Format", CallFormat, ReasoningFormat)


def guess_format(formats: Mapping[str, Format], chat_template: str | None) -> Format | None:
    """Return the format of a model with this template; None where it has none, or one that is not known."""
    template = chat_template or ""
    fitting = (one for one in formats.values() if all(re.search(sign, template) for sign in one.signs))
    return next(fitting, None)


def find_format(formats: Mapping[str, Format], name: str, chat_template: str | None = None) -> Format | None:
    """Return a format by its name.

    Args:
        formats: of calls or of reasoning.
        name: one of them, `auto` (by the chat template) or `none`.
        chat_template: the model's, if it has one.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == AUTO:
        return guess_format(formats, chat_template)
    if name not in (*formats, HARMONY, NONE):
        kind = "tool format" if formats is CALL_FORMATS else "reasoning parser"
        raise ConfigError(unknown(kind, name, (*formats, HARMONY)))
    return formats.get(name)


class ChatFormat:
    """A model's formats.

    Args:
        tokens: its tokenizer.
        call_format: a name, `auto` (by the chat template) or `none`.
        reasoning_format: the same.

    Raises:
        ConfigError: a name is unknown.
    """

    def __init__(self, tokens: Tokenizer | None, call_format: str, reasoning_format: str) -> None:
        self._tokens = tokens
        template = tokens.chat_template if tokens else None
        self.calls = find_format(CALL_FORMATS, call_format, template)
        self.reasoning = find_format(REASONING_FORMATS, reasoning_format, template)
        self.harmony = Harmony.find(tokens, {call_format, reasoning_format}) if tokens else None

    def encode(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the tokens of a conversation: by the chat template, or by harmony.

        Args:
            turns: of message_for_template().
            tools: of tools_for_template().
            kwargs: for the template.
        """
        assert self._tokens
        encode = self.harmony.encode if self.harmony and self.harmony.encode else self._tokens.chat
        return encode(turns, tools, **kwargs)

    @property
    def takes_arguments_as_text(self) -> bool:
        """Return whether encode() takes the arguments of calls as text."""
        if self.harmony and self.harmony.encode:
            return True
        return arguments_as_text(self._tokens.chat_template if self._tokens else None)

    def answer_format(
        self, request: ToolFields, prompt: Sequence[int], continued: str | None = None
    ) -> AnswerFormat | HarmonyAnswers:
        """Return what holds for the answers to one conversation.

        Args:
            request: the tools, and which must be called.
            prompt: the conversation's tokens.
            continued: the last message, where the answer goes on with it.

        Raises:
            RequestError: there are tools that may be called or not, and the model has no format for calls.
        """
        if self.harmony:
            return self.harmony.answers(request, continued)
        tools, required = request.callable_tools(), request.required_tools()
        calls = self.calls if tools else None
        if tools and calls is None:
            if not required:
                raise RequestError(
                    "no format of tool calls is known for this model: start with --tool-format, or say that one"
                    " must be called (tool_choice 'required', or 'any' in Anthropic's API)"
                )
            calls = JSON_LIST
        assert self._tokens
        tail = self._tokens.decode(list(prompt[-TAIL_TOKENS:]), None)
        starts_inside = self.reasoning is not None and self.reasoning.starts_in(tail, continued)
        markers = calls.tokens if calls else ()
        if self.reasoning:
            markers = (*markers, self.reasoning.start, self.reasoning.end)
        marks = {marker: token for marker in markers if (token := self._tokens.token_of(marker)) is not None}
        return AnswerFormat(calls, self.reasoning, starts_inside, marks, tools, required, request.max_calls())


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers to one conversation are written."""

    calls: CallFormat | None
    """None where there can be no calls."""
    reasoning: ReasoningFormat | None
    starts_inside: bool
    """The answer begins inside it."""
    marks: Marks
    tools: Sequence[Tool]
    """What may be called."""
    required_tools: Sequence[Tool]
    """What must be called: one of these, if there are some."""
    max_calls: int | None

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return how to sample: with the marks as text, and a grammar where calls must come, or must be sound."""
        shown_tokens = tuple(sorted({*params.shown_tokens, *self.marks.values()}))
        return replace(params, shown_tokens=shown_tokens, grammar=self._grammar(params.grammar))

    def parsers(self, eager: bool) -> Callable[[], Parser]:
        """Return a function that makes parsers of answers; eager: arguments of calls come as they grow."""
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools}

        return partial(
            AnswerParser,
            self.calls,
            self.reasoning,
            starts_inside=self.starts_inside,
            eager=eager,
            tools=schemas,
            max_calls=self.max_calls,
        )

    def _grammar(self, body: str | None) -> str | None:
        """Return what the answer follows; body: what its text must follow."""
        rules, start = self._rules(body)
        if not start:
            return None
        parts = {"body": body} if "@body" in start else {}
        if self.reasoning:
            # Reasoning is free; what is asked for begins after it.
            rules += [text_until("thought", self.reasoning.end, self.marks), r"gap: /[ \n]{0,3}/"]
            opening = lark_text(self.reasoning.start, self.marks)
            # The start may stand in the prompt already.
            lead = f"({opening})? thought gap" if self.starts_inside else f"({opening} thought gap)?"
            start = f"{lead} ({start})"
        elif start == "@body":
            return body
        lark = "\n".join([f"start: {start}", *rules])
        return "composed:" + json.dumps({"lark": lark, "parts": parts}) if parts else f"lark:{lark}"

    def _rules(self, body: str | None) -> tuple[list[str], str]:
        """Return rules, and what the answer is after its reasoning."""
        tools = [tool.function for tool in self.required_tools or self.tools]
        if self.calls and (self.required_tools or body):
            rules = required_calls(self.calls, tools, self.max_calls, self.marks)
            return rules, "calls" if self.required_tools else "calls | @body"
        if self.calls and any(tool.strict for tool in tools):
            return possible_calls(self.calls, tools, self.max_calls, self.marks), "mixed"
        return [], "@body" if body else ""


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
