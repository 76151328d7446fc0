"""Reasoning in answers, whole and cut anywhere, and before tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tools import WEATHER, cut, everywhere, hermes, texts

from nibble.errors import ConfigError
from nibble.server.chat_format import CALL_FORMATS, REASONING_FORMATS, find_format, guess_format
from nibble.server.chat_parser import AnswerParser
from nibble.server.streaming import CallDelta, Text, Thought, delta_of, message_of


def guess_reasoning_format(template: str | None) -> str | None:
    return getattr(guess_format(REASONING_FORMATS, template), "name", None)


def test_guesses_the_reasoning_by_the_template() -> None:
    assert guess_reasoning_format(None) is guess_reasoning_format("<｜Assistant｜>") is None
    assert guess_reasoning_format("{{'<｜Assistant｜><think>\\n'}}") == "deepseek_r1"
    assert guess_reasoning_format("<｜Assistant｜>{% if not thinking %}</think>{% endif %}") == "deepseek_v31"
    assert (
        guess_reasoning_format("<｜Assistant｜>{% if '</think>' in content %}") == "qwen3"
    )  # answers say where they begin
    assert guess_reasoning_format("{%- if enable_thinking %}'<think>\\n\\n</think>'") == "qwen3"
    assert guess_reasoning_format("[THINK]") == "magistral"
    with pytest.raises(ConfigError, match="unknown reasoning parser"):
        find_format(REASONING_FORMATS, "nothing")


def think(style: str, prompt: str, pieces: Sequence[str]) -> tuple[str, str]:
    reader = AnswerParser(
        None, REASONING_FORMATS[style], starts_inside=REASONING_FORMATS[style].starts_in(prompt)
    )
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.feed("", last=True)
    kinds = [type(event) for event in events]
    assert Text not in kinds or Thought not in kinds[kinds.index(Text) :]
    return tuple("".join(e.text for e in events if isinstance(e, kind)) for kind in (Thought, Text))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("style", "prompt", "text", "thought", "content"),
    [
        ("qwen3", "assistant\n", "<think>\nSo  \nit is.\n</think>\n\nYes  \n", "So  \nit is.", "Yes  \n"),
        ("qwen3", "assistant\n", "<think>\n\n</think>\n\nYes", "", "Yes"),
        ("qwen3", "assistant\n", "Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("qwen3", "assistant\n", " <thing>", "", " <thing>"),
        ("qwen3", "assistant\n", "<thi", "", "<thi"),
        ("qwen3", "assistant\n", "\n<think>not done </thi", "not done </thi", ""),
        ("qwen3", "assistant\n<think>\n", "a < b</think>c</think>d", "a < b", "c</think>d"),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "Yes", "", "Yes"),
        ("deepseek_r1", "<｜Assistant｜>", "First\n</think>\nThen", "First", "Then"),
        ("deepseek_r1", "<｜Assistant｜>", "<think>First</think>Then", "First", "Then"),
        ("deepseek_r1", "<｜Assistant｜><think>\n", "never ends \n", "never ends \n", ""),
        ("deepseek_v31", "<｜Assistant｜></think>", "Yes</think>", "", "Yes</think>"),
        ("deepseek_v31", "<｜Assistant｜><think>", "Hm</think>Yes", "Hm", "Yes"),
        ("magistral", "[/INST]", "[THINK]é🌞[/THINK]ok", "é🌞", "ok"),
        ("qwen3", "", "", "", ""),
    ],
)
def test_reasoning_cut_anywhere(style: str, prompt: str, text: str, thought: str, content: str) -> None:
    for pieces in everywhere(text):
        assert think(style, prompt, pieces) == (thought, content), pieces


@settings(deadline=None)
@given(
    st.sampled_from(sorted(REASONING_FORMATS)), st.sampled_from(["", "<think>", "</think>"]), texts, st.data()
)
def test_any_cutting_gives_the_same_reasoning(
    style: str, prompt: str, text: str, data: st.DataObject
) -> None:
    whole = think(style, prompt, [text])
    assert think(style, prompt, cut(data, text)) == whole == think(style, prompt, list(text))


def answer(pieces: Sequence[str]) -> tuple[AnswerParser, list[list[Any]]]:
    reader = AnswerParser(CALL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    return reader, [reader.feed(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]


def test_reasoning_and_then_calls() -> None:
    text = f"<think>\nnot {hermes('no', '{}')}\n</think>\n\nI look.\n{hermes('f', WEATHER)}"
    for pieces in everywhere(text):
        reader, found = answer(pieces)
        message = message_of([event for events in found for event in events])
        call = message["tool_calls"][0]
        assert message == {
            "role": "assistant",
            "content": "I look.",
            "refusal": None,
            "reasoning_content": f"not {hermes('no', '{}')}",
            "tool_calls": [
                {"id": call["id"], "type": "function", "function": {"name": "f", "arguments": WEATHER}}
            ],
        }
        assert reader.num_calls
        deltas = [delta_of(events) for events in found]
        assert "".join(delta.get("content", "") for delta in deltas) == "I look."
        parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
        assert "".join(part["function"]["arguments"] for part in parts) == WEATHER
        assert [("id" in part, "name" in part["function"]) for part in parts] == [
            (i == 0, i == 0) for i in range(len(parts))
        ]


def test_answers_without_either() -> None:
    reader = AnswerParser()
    assert (
        reader.feed("<think>") == [Text("<think>")]
        and reader.feed("", last=True) == []
        and not reader.num_calls
    )
    assert delta_of([]) == {}
    assert message_of([Text("a")]) == {"role": "assistant", "content": "a", "refusal": None}
    assert message_of([]) == {"role": "assistant", "content": "", "refusal": None}
    assert message_of([CallDelta(0, "i", "f", "{}")])["content"] is None
