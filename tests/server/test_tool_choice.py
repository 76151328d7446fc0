"""Tool choices and structured answers of a real server, through OpenAI's own client. The bundled model was not taught
to call tools: what it says here is what grammars make of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest

from conftest import running  # type: ignore[attr-defined]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
PING = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
SCHEMAS = {"get_weather": WEATHER, "ping": PING}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
ASKED: dict[str, Any] = {
    "model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "temperature": 1.0,
    "seed": 1, "tools": TOOLS,
}  # fmt: skip
CLOSED = {**PING, "additionalProperties": False}
PING_CHOICE = {"type": "function", "function": {"name": "ping"}}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return client_of(server)


TEMPLATE = """{# [TOOL_CALLS]name[ARGS] and [THINK] #}{% for message in messages %}{{ message['role'] }}:
{{ message['content'] }}{% for call in message.tool_calls or [] %}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- call.function.arguments | tojson }}{% endfor %}
{% endfor %}assistant:
"""


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The bundled model with a tokenizer that has Mistral's marks as special tokens."""
    folder = tmp_path_factory.mktemp("marked") / "demo"
    shutil.copytree(Path(__file__).parents[2] / "models/demo", folder)
    names = {"<|user|>": "[TOOL_CALLS]", "<|assistant|>": "[ARGS]", "<|end|>": "[/THINK]"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for old, new in names.items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("generation_config.json", "config.json"):
        held = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**held, "eos_token_id": 0}))
    with running(
        "--kv-format", "nvfp4", "--kv-memory", "32MiB", "--served-model-name", "demo", model=str(folder)
    ) as url:
        yield client_of(url)


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    """Of a whole answer, and all of them fit their schemas."""
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    for name, arguments in found:
        assert jsonschema_rs.is_valid(SCHEMAS[name], arguments), (name, arguments)
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("where", "seed"), [("client", 1), ("marked", 2)])
def test_a_call_must_come(where: str, seed: int, request: pytest.FixtureRequest) -> None:
    client, asked = request.getfixturevalue(where), {**ASKED, "seed": seed}
    if where == "marked":
        asked["extra_body"] = {"logit_bias": {"3": 100}}  # [/THINK]: it thinks no longer than it must
    one = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(one.choices[0])) == 1
    named = client.chat.completions.create(**asked, tool_choice=PING_CHOICE)
    assert [name for name, _ in calls_of(named.choices[0])] == ["ping"]
    pieces, names = "", []
    for chunk in client.chat.completions.create(**asked, tool_choice=PING_CHOICE, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            names += [call.function.name] if call.function.name else []
            pieces += call.function.arguments or ""
        assert not chunk.choices[0].delta.content
    assert names == ["ping"] and pieces == named.choices[0].message.tool_calls[0].function.arguments
    many = client.chat.completions.create(**{**asked, "max_tokens": 400}, tool_choice="required")
    assert many.choices[0].finish_reason in {"tool_calls", "length"} and many.choices[0].message.tool_calls


@pytest.mark.slow
def test_the_next_turn_takes_the_call(marked: openai.OpenAI) -> None:
    asked = {**ASKED, "extra_body": {"logit_bias": {"3": 100}}}
    first = marked.chat.completions.create(**asked, tool_choice=PING_CHOICE).choices[0].message
    assert re.fullmatch("[a-zA-Z0-9]{9}", first.tool_calls[0].id)
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "pong"}
    messages = [*ASKED["messages"], first.model_dump(exclude_none=True), result]
    second = marked.chat.completions.create(**{**asked, "messages": messages, "tools": openai.NOT_GIVEN})
    assert second.choices[0].finish_reason in {"stop", "length"}


def test_marks_are_text_only_where_they_are_asked_for(marked: openai.OpenAI) -> None:
    """A grammar makes it write marks, reasoning and a call."""
    said = 'start: "so" <[3]> "x" <[1]> "ping" <[2]> "{\\"on\\": true}" <[1]> "?"'
    asked = {key: value for key, value in ASKED.items() if key != "tools"}
    extra = {"guided_grammar": said}
    prompt = {"model": "demo", "prompt": "a", "max_tokens": 50, "temperature": 0}
    assert marked.completions.create(**prompt, extra_body=extra).choices[0].text == 'soxping{"on": true}?'
    shown = marked.completions.create(**prompt, extra_body={**extra, "skip_special_tokens": False})
    assert shown.choices[0].text == 'so[/THINK]x[TOOL_CALLS]ping[ARGS]{"on": true}[TOOL_CALLS]?'
    plain = marked.chat.completions.create(**asked, extra_body=extra).choices[0].message
    assert "[TOOL_CALLS]" not in plain.content and "[ARGS]" not in plain.content


@pytest.mark.slow
def test_tools_that_may_be_called(client: openai.OpenAI, marked: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-format"):
        client.chat.completions.create(**ASKED)
    none = client.chat.completions.create(**{**ASKED, "max_tokens": 4}, tool_choice="none")
    assert none.choices[0].message.tool_calls is None
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    bias = {"logit_bias": {"3": 100, "1": 100}}
    found = marked.chat.completions.create(**{**ASKED, "tools": strict, "max_tokens": 150}, extra_body=bias)
    calls = found.choices[0].message.tool_calls
    assert calls and jsonschema_rs.is_valid(
        SCHEMAS[calls[0].function.name], json.loads(calls[0].function.arguments)
    )
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CLOSED}}
    either = marked.chat.completions.create(**{**ASKED, "max_tokens": 300}, response_format=form,
                                            extra_body={"logit_bias": {"3": 100}}).choices[0]  # fmt: skip
    if not either.message.tool_calls:
        assert jsonschema_rs.is_valid(PING, json.loads(either.message.content))


def test_reasoning_comes_before_the_form(marked: openai.OpenAI) -> None:
    asked = {key: value for key, value in ASKED.items() if key != "tools"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CLOSED}}
    found = marked.chat.completions.create(
        **asked, response_format=form, extra_body={"logit_bias": {"3": 100}}
    )
    assert jsonschema_rs.is_valid(PING, json.loads(found.choices[0].message.content))


@pytest.mark.parametrize(
    ("parameters", "choice"),
    [
        ({"type": "object", "properties": {"x": {"type": "nothing"}}, "required": ["x"]}, "required"),
        ({"type": "object", "properties": {"x": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["x"]}, "required"),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}, "required": ["x"]}, PING_CHOICE),
        ({"type": "object", "properties": {"x": {"pattern": "("}}, "required": ["x"]}, "required"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_followed(parameters: Any, choice: Any, client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "ping", "parameters": parameters}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="grammar"):
            client.chat.completions.create(**{**ASKED, "tools": [tool]}, tool_choice=choice, stream=stream)
    assert client.chat.completions.create(**{**ASKED, "max_tokens": 2}, tool_choice="none").choices
