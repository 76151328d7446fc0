"""What may be given as prompts and conversations: the shapes of vLLM, and refusals that say what would work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nibble.engine.prompts import ParsedPrompt, parse_conversations, parse_prompt, parse_prompts
from nibble.errors import RequestError

IDS = ParsedPrompt(None, (1, 2))


@pytest.mark.parametrize(
    ("prompts", "expected", "single"),
    [
        ("abc", [ParsedPrompt("abc")], True),
        ("", [ParsedPrompt("")], True),
        ({"prompt": "abc"}, [ParsedPrompt("abc")], True),
        ([1, 2], [IDS], True),
        ((1, 2), [IDS], True),
        (range(1, 3), [IDS], True),
        (np.array([1, 2]), [IDS], True),
        (torch.tensor([1, 2]), [IDS], True),
        ({"prompt_token_ids": [1, 2]}, [IDS], True),
        ({"prompt_token_ids": torch.tensor([1, 2]), "prompt": "ab"}, [ParsedPrompt("ab", (1, 2))], True),
        ([], [], False),
        (["a", [1, 2], {"prompt": "b"}], [ParsedPrompt("a"), IDS, ParsedPrompt("b")], False),
        (np.array([[1, 2], [1, 2]]), [IDS, IDS], False),
        ([[]], [ParsedPrompt(None, ())], False),
    ],
)
def test_prompts(prompts: Any, expected: Sequence[ParsedPrompt], single: bool) -> None:
    assert parse_prompts(prompts) == (expected, single)


WAY = r".*a prompt is a text, a list of token ids"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"abc", r"bytes are no text; decode them, as in prompt.decode\(\)" + WAY),
        ([b"abc"], "bytes are no text" + WAY),
        (None, "None .NoneType. cannot be served" + WAY),
        ([None], "None .NoneType. cannot be served" + WAY),
        ({3, 4}, "a set has no order.*give a list" + WAY),
        (
            (text for text in "ab"),
            r"a generator cannot be read twice; give a list, as in list\(prompts\)" + WAY,
        ),
        (iter("ab"), "a generator cannot be read twice" + WAY),
        (5, "5 .int. cannot be served" + WAY),
        (1.5, "1.5 .float. cannot be served" + WAY),
        (torch.tensor(5), "cannot be served" + WAY),
        ({"a": 1}.values(), "cannot be served" + WAY),
        ([1, "a"], "token ids are integers, not 'a' .str." + WAY),
        ([1.0, 2.0], "1.0 .float. cannot be served" + WAY),
        ([True, False], "token ids are integers, not True .bool." + WAY),
        (["a", 1], "1 .int. cannot be served" + WAY),
        ({}, "a prompt needs 'prompt' or 'prompt_token_ids'" + WAY),
        ({"prompt": 1}, "'prompt' of a prompt must be a text, not 1"),
        ({"prompt_token_ids": "ab"}, "token ids are integers, not 'a'"),
        (
            {"prompt": "a", "multi_modal_data": {}},
            r"cannot have 'multi_modal_data' \(images and audio are not served\)",
        ),
        ({"promt": "a"}, "cannot have 'promt'"),
    ],
)
def test_what_is_no_prompt_is_refused_with_the_way(prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse_prompts(prompts)
    assert caught.value.status == 400


def test_one_prompt_where_one_is_taken() -> None:
    assert parse_prompt([1, 2]) == IDS
    with pytest.raises(RequestError, match="one prompt, not a list of 2"):
        parse_prompt(["a", "b"])


HELLO = {"role": "user", "content": "hello"}


def test_conversations() -> None:
    assert parse_conversations([HELLO]) == ([[HELLO]], True)
    assert parse_conversations([[HELLO], (HELLO, HELLO)]) == ([[HELLO], [HELLO, HELLO]], False)
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    call = {"role": "assistant", "content": None, "tool_calls": [1]}
    assert parse_conversations([parts, call]) == ([[HELLO, {**call, "content": ""}]], True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "a conversation is a list of messages, not str; write it as"),
        (HELLO, "a conversation is a list of messages, not dict; write it as"),
        ([], "the conversation has no messages"),
        ([[HELLO], []], "the conversation has no messages"),
        ([5], r"5 \(int\) cannot be served; write it as \[\{'role'"),
        ([{"content": "hello"}], "a message has a role and a content, unlike {'content': 'hello'}"),
        ([HELLO, "hello"], "a message has a role and a content, unlike 'hello'"),
        ((m for m in [HELLO]), "a generator cannot be read twice"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "only text is served, .* part of type 'image_url'",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_conversations(messages)
