"""The formats in which models write tool calls, by name, and which of them a chat template asks for.

Owns PARSERS; ToolReader reads them out of an answer. Must not know of HTTP, requests or engines.
"""

from __future__ import annotations

import secrets
import string

from nibble.errors import ConfigError, unknown
from nibble.server.tool_reader import (
    CallDelta,
    Event,
    Malformed,
    Parser,
    Steps,
    Text,
    ToolReader,
    gathered,
    joined,
)

__all__ = [
    "PARSERS",
    "CallDelta",
    "Event",
    "Parser",
    "Text",
    "ToolReader",
    "gathered",
    "guess",
    "joined",
    "parser_of",
]


def _hermes(reader: ToolReader, _: str) -> Steps[None]:
    yield from reader.call()
    yield from reader.passed("</tool_call>")


def _llama3(reader: ToolReader, _: str) -> Steps[None]:
    yield from reader.call()
    while (yield from reader.literal(";")):
        yield from reader.call()


def _mistral(reader: ToolReader, _: str) -> Steps[None]:
    """A list of calls; newer models: name[CALL_ID]id[ARGS]{...}, both markers optional."""
    if (yield from reader.literal("[")):
        yield from reader.call()
        while (yield from reader.literal(",")):
            yield from reader.call()
        yield from reader.passed("]")
        return
    name = yield from reader.name()
    known = (yield from reader.name()) if (yield from reader.literal("[CALL_ID]")) else None
    yield from reader.literal("[ARGS]")
    yield from reader.arguments(name, known)


def _deepseek(reader: ToolReader, marker: str) -> Steps[None]:
    """name, separator, arguments (V3.1), or `function`, separator, name, arguments in a fence (V3, R1)."""
    begin, call, separator, end, last = DEEPSEEK
    if marker == begin and not (yield from reader.literal(call)):
        raise Malformed
    name = yield from reader.name()
    if not (yield from reader.literal(separator)):
        raise Malformed
    name = (yield from reader.name()) or name
    yield from reader.literal("```json")
    yield from reader.arguments(name)
    yield from reader.passed("```", end, last)


def _kimi(reader: ToolReader, marker: str) -> Steps[None]:
    """functions.NAME:NUMBER, which is the call's id too, separator, arguments."""
    begin, call, separator, end, last = KIMI
    if marker == begin and not (yield from reader.literal(call)):
        raise Malformed
    known = yield from reader.name()
    if not (yield from reader.literal(separator)):
        raise Malformed
    name = known.removeprefix("functions.")
    yield from reader.arguments(name.rpartition(":")[0] or name, known)
    yield from reader.passed(end, last)


def _short_id() -> str:
    """Mistral's templates refuse others."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
PARSERS = {
    parser.name: parser
    for parser in (
        Parser("hermes", ("<tool_call>",), _hermes, ("<tool_call>", "</tool_call>")),
        Parser("llama3", ("<|python_tag|>",), _llama3, ("<|python_tag|>",), bare="{"),
        Parser("mistral", MISTRAL[:1], _mistral, MISTRAL, bare="[", new_id=_short_id),
        Parser("deepseek_v3", DEEPSEEK[:2], _deepseek, DEEPSEEK),
        Parser("deepseek_v31", DEEPSEEK[:2], _deepseek, DEEPSEEK),
        Parser("kimi_k2", KIMI[:2], _kimi, KIMI),
    )
}


def parser_of(name: str) -> Parser:
    """A parser by its name; raises ConfigError."""
    if name not in PARSERS:
        raise ConfigError(unknown("tool call parser", name, PARSERS))
    return PARSERS[name]


def guess(chat_template: str | None) -> str | None:
    """The parser of a model with this template; None where it writes no calls, or in a form that is not known."""
    said = chat_template or ""
    if DEEPSEEK[0] in said:
        return "deepseek_v3" if "```json" in said else "deepseek_v31"
    if KIMI[0] in said:
        return "kimi_k2"
    if MISTRAL[0] in said:
        return "mistral"
    if "<tool_call>" in said:
        xml = "<function=" in said or "<arg_key>" in said  # Qwen3-Coder, GLM: arguments as XML
        return None if xml else "hermes"
    llama = "<|start_header_id|>" in said and '"parameters": ' in said
    return "llama3" if llama or "<|python_tag|>" in said else None
