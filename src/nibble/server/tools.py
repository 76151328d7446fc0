"""The formats in which models write tool calls, by name, and which of them a chat template asks for.

Owns PARSERS; ToolReader reads them out of an answer. Must not know of HTTP, requests or engines.
"""

from __future__ import annotations

import re
import secrets
import string

from nibble.errors import ConfigError, unknown
from nibble.server.tool_reader import Layout, Malformed, Parser, Steps, ToolReader
from nibble.server.tool_tags import PYTHON, Tags, python_calls, tagged


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


def _listed(reader: ToolReader, _: str) -> Steps[None]:
    """A list of calls and nothing else: what a model writes whose own format is not known, made to by a grammar."""
    yield from reader.literal("[")
    yield from reader.call()
    while (yield from reader.literal(",")):
        yield from reader.call()
    yield from reader.passed("]")


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
HERMES = ("<tool_call>", "</tool_call>")
GLM = (*HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DSML = "｜DSML｜"
MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")

QWEN_TAGS = Tags(
    "<function=", ">", "<parameter=", (">",), "</parameter>", "</function>", "</tool_call>", lines=True
)
GLM_TAGS = Tags("", "", "<arg_key>", ("</arg_key>",), "</arg_value>", "</tool_call>", value="<arg_value>")
MINIMAX_TAGS = Tags(
    '<invoke name="', '">', '<parameter name="', ('">',), "</parameter>", "</invoke>", MINIMAX[1]
)
DSML_TAGS = Tags(
    f'<{DSML}invoke name="',
    '">',
    f'<{DSML}parameter name="',
    ('" string="true">', '" string="false">'),
    f"</{DSML}parameter>",
    f"</{DSML}invoke>",
    f"</{DSML}function_calls>",
)

OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
LLAMA = '{"name": "NAME", "parameters": ARGUMENTS}'
LISTED = Layout(OBJECT, "[", ", ", "]")
PARSERS = {
    parser.name: parser
    for parser in (
        Parser(
            "hermes", HERMES[:1], _hermes, HERMES, Layout(f"<tool_call>\n{OBJECT}\n</tool_call>", between="\n")
        ),
        Parser(
            "llama3", ("<|python_tag|>",), _llama3, ("<|python_tag|>",), Layout(LLAMA, between=None), bare="{"
        ),
        Parser("pythonic", PYTHON[:1], python_calls, PYTHON,
               Layout("NAME(ARGUMENTS)", "[", ", ", "]", "KEY=VALUE", ", "), bare="["),
        Parser("mistral", MISTRAL[:1], _mistral, MISTRAL, Layout(OBJECT, "[TOOL_CALLS][", ", ", "]"),
               bare="[", new_id=_short_id),
        Parser("mistral_v13", MISTRAL[:1], _mistral, MISTRAL, Layout("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
               bare="[", new_id=_short_id),
        Parser("deepseek_v3", DEEPSEEK[:2], _deepseek, DEEPSEEK,
               Layout("{1}function{2}NAME\n```json\nARGUMENTS\n```{3}".format(*DEEPSEEK),
                      DEEPSEEK[0], "\n", DEEPSEEK[4])),
        Parser("deepseek_v31", DEEPSEEK[:2], _deepseek, DEEPSEEK,
               Layout("{1}NAME{2}ARGUMENTS{3}".format(*DEEPSEEK), DEEPSEEK[0], "", DEEPSEEK[4])),
        Parser("deepseek_v32", (f"<{DSML}function_calls>",), tagged(DSML_TAGS), (DSML,),
               Layout(f'<{DSML}invoke name="NAME">\nARGUMENTS</{DSML}invoke>\n', f"<{DSML}function_calls>\n", "",
                      f"</{DSML}function_calls>",
                      f'<{DSML}parameter name="KEY" string="FLAG">VALUE</{DSML}parameter>\n')),
        Parser("kimi_k2", KIMI[:2], _kimi, KIMI,
               Layout("{1}functions.NAME:NUMBER{2}ARGUMENTS{3}".format(*KIMI), KIMI[0], "", KIMI[4])),
        Parser("qwen3_coder", ("<tool_call>", "<function="), tagged(QWEN_TAGS), HERMES,
               Layout("<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>", between="\n",
                      argument="<parameter=KEY>\nVALUE\n</parameter>\n")),
        Parser("glm45", HERMES[:1], tagged(GLM_TAGS), GLM,
               Layout("<tool_call>NAME\nARGUMENTS</tool_call>", between="\n",
                      argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")),
        Parser("glm47", HERMES[:1], tagged(GLM_TAGS), GLM,
               Layout("<tool_call>NAMEARGUMENTS</tool_call>",
                      argument="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")),
        Parser("minimax_m2", MINIMAX[:1], tagged(MINIMAX_TAGS), MINIMAX,
               Layout('<invoke name="NAME">\nARGUMENTS</invoke>\n', f"{MINIMAX[0]}\n", "", MINIMAX[1],
                      '<parameter name="KEY">VALUE</parameter>\n')),
    )
}  # fmt: skip
PLAIN = Parser("json", (), _listed, (), LISTED, bare="[")
"""For models whose own format is not known: only a grammar makes them write it."""


def parser_of(name: str) -> Parser:
    """A parser by its name; raises ConfigError."""
    if name not in PARSERS:
        raise ConfigError(unknown("tool format", name, PARSERS))
    return PARSERS[name]


def guess(chat_template: str | None) -> str | None:
    """The format of a model with this template; None where it writes no calls, or in a form that is not known."""
    said = chat_template or ""
    for name, *signs in SIGNS:
        if all(re.search(sign, said) for sign in signs):
            return name
    return None


SIGNS = (
    ("deepseek_v3", DEEPSEEK[0], "```json"),
    ("deepseek_v31", DEEPSEEK[0]),
    ("deepseek_v32", f"<{DSML}(?:function_calls|invoke)"),
    ("kimi_k2", re.escape(KIMI[0])),
    ("mistral_v13", r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("minimax_m2", "minimax:tool_call"),
    ("qwen3_coder", "<tool_call>", "<function="),
    ("glm47", "<tool_call>", "</arg_key><arg_value>"),
    ("glm45", "<tool_call>", "<arg_key>"),
    ("hermes", "<tool_call>"),
    ("pythonic", r"\[func\w*\("),
    ("llama3", r"<\|(?:start_header_id|header_start)\|>", '"parameters": '),
    ("llama3", r"<\|python_tag\|>"),
)
"""What a format's chat templates have in them; the first that fits counts."""
