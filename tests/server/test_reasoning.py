"""Reasoning in answers, whole and cut anywhere, and before tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tools import WEATHER, cut, everywhere, hermes, texts

from nibble.errors import ConfigError
from nibble.server import reasoning
from nibble.server.reasoning import AnswerReader, ReasoningReader, Thought, delta_of, message_of, style_of
from nibble.server.tool_reader import CallDelta, Text, ToolReader
from nibble.server.tools import PARSERS


def test_guesses_the_reasoning_by_the_template() -> None:
    assert reasoning.guess(None) is reasoning.guess("<｜Assistant｜>") is None
    assert reasoning.guess("{{'<｜Assistant｜><think>\\n'}}") == "deepseek_r1"
    assert reasoning.guess("<｜Assistant｜>{% if not thinking %}</think>{% endif %}") == "deepseek_v31"
    assert (
        reasoning.guess("<｜Assistant｜>{% if '</think>' in content %}") == "qwen3"
    )  # answers say where they begin
    assert reasoning.guess("{%- if enable_thinking %}'<think>\\n\\n</think>'") == "qwen3"
    assert reasoning.guess("[THINK]") == "magistral"
    with pytest.raises(ConfigError, match="unknown reasoning parser"):
        style_of("none")


def think(style: str, prompt: str, pieces: Sequence[str]) -> tuple[str, str]:
    reader = ReasoningReader(style_of(style), inside=style_of(style).inside(prompt))
    events = [event for piece in pieces for event in reader.add(piece)] + reader.finish()
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
    st.sampled_from(sorted(reasoning.STYLES)), st.sampled_from(["", "<think>", "</think>"]), texts, st.data()
)
def test_any_cutting_gives_the_same_reasoning(
    style: str, prompt: str, text: str, data: st.DataObject
) -> None:
    whole = think(style, prompt, [text])
    assert think(style, prompt, cut(data, text)) == whole == think(style, prompt, list(text))


def answer(pieces: Sequence[str]) -> tuple[AnswerReader, list[list[Any]]]:
    reader = AnswerReader(ReasoningReader(style_of("qwen3"), inside=False), ToolReader(PARSERS["hermes"]))
    return reader, [reader.add(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]


def test_reasoning_and_then_calls() -> None:
    text = f"<think>\nnot {hermes('no', '{}')}\n</think>\n\nI look.\n{hermes('f', WEATHER)}"
    for pieces in everywhere(text):
        reader, found = answer(pieces)
        message = message_of(event for events in found for event in events)
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
        assert reader.called
        deltas = [delta_of(events) for events in found]
        assert "".join(delta.get("content", "") for delta in deltas) == "I look."
        parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
        assert "".join(part["function"]["arguments"] for part in parts) == WEATHER
        assert [("id" in part, "name" in part["function"]) for part in parts] == [
            (i == 0, i == 0) for i in range(len(parts))
        ]


def test_answers_without_either() -> None:
    reader = AnswerReader(None, None)
    assert (
        reader.add("<think>") == [Text("<think>")] and reader.add("", last=True) == [] and not reader.called
    )
    assert delta_of([]) == {}
    assert message_of([Text("a")]) == {"role": "assistant", "content": "a", "refusal": None}
    assert message_of([]) == {"role": "assistant", "content": "", "refusal": None}
    assert message_of([CallDelta(0, "i", "f", "{}")])["content"] is None
