"""Answers of gpt-oss that are held to a form: grammars over channels, and a tiny model that follows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harmony import save_small_tokenizer
from nibble import LLM, RequestError, SamplingParams
from nibble.engine.structured_output import Grammars
from nibble.engine.tokenizer import Tokenizer
from nibble.server.chat_format import ChatFormat
from nibble.server.protocol import ChatRequest
from nibble.server.streaming import message_of
from tiny import save_model

F = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
G = {"name": "g", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": one} for one in (F, G)]
STRICT = [{"type": "function", "function": {**F, "strict": True}}]
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {
    "n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}}}  # fmt: skip
THINKS = "<|channel|>analysis<|message|>well {<|end|><|start|>assistant"
FINAL, TYPED = "<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"
CALL_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
CALL_F_AS_RENDERED = ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}'
CALL_G = "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-gpt-oss")
    save_model(folder, "gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    return save_small_tokenizer(folder)


@pytest.fixture(scope="module")
def chat_format(folder: Path) -> ChatFormat:
    chat_format = ChatFormat(Tokenizer(str(folder)), "auto", "auto")
    assert chat_format.harmony and chat_format.harmony.encode is None, "another vocabulary than gpt-oss's"
    return chat_format


def params_of(chat_format: ChatFormat, continued: str | None = None, **fields: Any) -> SamplingParams:
    request = ChatRequest(messages=[{"role": "user", "content": "x"}], **fields)
    return chat_format.answer_format(request, [], continued).params(SamplingParams(grammar=request.grammar()))


def takes(folder: Path, grammar: str | None, text: str) -> bool:
    """Whether a grammar takes an answer up to its end."""
    tokenizer = Tokenizer(str(folder))
    assert grammar
    matcher = Grammars(tokenizer, 320, tokenizer.eos_ids).matcher(grammar)
    ids = tokenizer.encode(text)
    ends = [*ids, *tokenizer.eos_ids]
    return all(matcher.allowed(ids[:i])[token // 8] >> token % 8 & 1 for i, token in enumerate(ends))


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"response_format": JSON},
            (
                TYPED + '{"n":1}',
                FINAL + '{"n":2}',
                THINKS + FINAL + '{"n":1}',
                THINKS + THINKS + FINAL + '{"n":1}',
            ),
            (FINAL + "words", FINAL + '{"n":3}', '{"n":1}', CALL_F, THINKS, FINAL + '{"n":1}<|end|>'),
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            (CALL_F, CALL_G, THINKS + CALL_F, CALL_F_AS_RENDERED, CALL_F.replace("<|constrain|>", "")),
            (
                FINAL + "words",
                CALL_F.replace("1", '"x"'),
                CALL_F.replace("functions.f", "functions.h"),
                THINKS,
            ),
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            (CALL_F, THINKS + CALL_F),
            (CALL_G, FINAL + "words"),
        ),
        ({"tools": TOOLS, "response_format": JSON}, (CALL_F, TYPED + '{"n":1}'), (FINAL + "words",)),
        ({"tools": STRICT}, (CALL_F, FINAL + "words"), (CALL_F.replace("1", '"x"'), CALL_G)),
    ],
)
def test_forms(folder: Path, chat_format: ChatFormat, fields: Any, good: Any, bad: Any) -> None:
    grammar = params_of(chat_format, **fields).grammar
    assert [text for text in good if not takes(folder, grammar, text)] == []
    assert [text for text in bad if takes(folder, grammar, text)] == []


def test_forms_of_answers_that_go_on(folder: Path, chat_format: ChatFormat) -> None:
    final = params_of(chat_format, "so ", response_format=JSON).grammar
    assert takes(folder, final, '{"n":1}') and not takes(folder, final, FINAL + '{"n":1}')
    thought = params_of(chat_format, "", response_format=JSON).grammar
    assert takes(folder, thought, "hm<|end|><|start|>assistant" + FINAL + '{"n":1}')
    with pytest.raises(RequestError, match="goes on with a message cannot be held to a call"):
        params_of(chat_format, "so ", tools=TOOLS, tool_choice="required")


def test_what_is_free_has_no_grammar(chat_format: ChatFormat) -> None:
    assert chat_format.harmony
    marks = chat_format.harmony.marks
    params = params_of(chat_format, tools=TOOLS)
    assert params.grammar is None and params.mark_tokens and set(params.shown_tokens) == set(marks.values())
    assert params.stop_token_ids == (marks["<|return|>"], marks["<|call|>"])


def test_a_model_that_is_held_to_channels(folder: Path, chat_format: ChatFormat) -> None:
    """A random model, whose thoughts end at once because they must."""
    llm = LLM(
        str(folder), kv_format="fp8_e4m3", kv_scales="one", kv_memory="2MiB", max_running=4, device="cpu"
    )
    assert chat_format.harmony
    marks = chat_format.harmony.marks
    ids = llm.tokenizer.chat([{"role": "user", "content": "hi"}])
    for fields, calls in (({"response_format": JSON}, 0), ({"tools": TOOLS, "tool_choice": "required"}, 1)):
        request = ChatRequest(
            messages=[{"role": "user", "content": "x"}],
            logit_bias={str(marks["<|end|>"]): 60, "91": 40},
            temperature=1,
            seed=3,
            **fields,
        )
        answers = chat_format.answer_format(request, ids)
        params = answers.params(request.params(200, None, llm.engine.sampling_defaults))
        parser = answers.parsers(eager=True)()
        pieces = list(llm.stream(ids, params))
        events = [event for piece in pieces for event in parser.feed(piece.text)] + parser.feed("", last=True)
        message = message_of(events)
        assert pieces[-1].finish_reason == "stop" and parser.num_calls == calls
        if calls:
            (call,) = message["tool_calls"]
            assert call["function"]["name"] in {"f", "g"} and isinstance(
                json.loads(call["function"]["arguments"]), dict
            )
        else:
            assert json.loads(message["content"])["n"] in {1, 2}
