"""What callers in Python give as prompts and conversations, checked: the shapes that vLLM takes, and no others."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from nibble.errors import RequestError

WAY = "a prompt is a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """The same as text, for Output alone."""


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""One prompt."""
Message = Mapping[str, Any]
"""A turn of a conversation: `role`, `content`, and what else the model's chat template reads."""


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt in one form: text, or token ids and the text that they stand for, if it was given."""

    text: str | None
    token_ids: tuple[int, ...] | None = None


def parse_prompts(prompts: object) -> tuple[list[ParsedPrompt], bool]:
    """Return all prompts, and whether it was one that stood for itself. Raise RequestError."""
    if isinstance(prompts, str | Mapping):
        return [_parse(prompts)], True
    items = _as_list(prompts)
    # A list of integers is one prompt, and an empty list is no prompts at all.
    if items and hasattr(items[0], "__index__"):
        return [_parse(items)], True
    return [_parse(item) for item in items], False


def parse_prompt(prompt: object) -> ParsedPrompt:
    """Return the one prompt that is given; raise RequestError."""
    prompts, single = parse_prompts(prompt)
    if not single:
        raise RequestError(f"this takes one prompt, not a list of {len(prompts)}; {WAY}")
    return prompts[0]


def parse_conversations(messages: object) -> tuple[list[list[Message]], bool]:
    """Return all conversations, and whether it was one that stood for itself. Raise RequestError."""
    if isinstance(messages, str | Mapping):
        raise RequestError(
            f"a conversation is a list of messages, not {type(messages).__name__}; {_MESSAGES}"
        )
    items = _as_list(messages, _MESSAGES)
    single = not items or isinstance(items[0], Mapping)
    conversations = [items] if single else [_as_list(item, _MESSAGES) for item in items]
    return [_messages(conversation) for conversation in conversations], single


_MESSAGES = "write it as [{'role': 'user', 'content': 'hello'}]"


def _as_list(value: Any, way: str = WAY) -> list[Any]:
    """Return a sequence as a list; arrays of NumPy and torch are sequences too."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise RequestError(f"bytes are no text; decode them, as in prompt.decode(): {way}")
    if isinstance(value, Iterator):
        raise RequestError(f"a generator cannot be read twice; give a list, as in list(prompts): {way}")
    if isinstance(value, Set):
        raise RequestError(f"a set has no order, and answers come in that of the prompts; give a list: {way}")
    if isinstance(value, Sequence):
        return list(value)
    items = value.tolist() if hasattr(value, "tolist") else None
    if not isinstance(items, list):
        raise RequestError(f"{_shown(value)} cannot be served; {way}")
    return items


def _parse(prompt: Any) -> ParsedPrompt:
    if isinstance(prompt, str):
        return ParsedPrompt(prompt)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(None, _tokens(prompt))
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if unknown := [name for name in prompt if name not in ("prompt", "prompt_token_ids")]:
        media = " (images and audio are not served)" if "multi_modal_data" in unknown else ""
        raise RequestError(f"a prompt cannot have {unknown[0]!r}{media}; {WAY}")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"'prompt' of a prompt must be a text, not {_shown(text)}")
    if ids is None and text is None:
        raise RequestError(f"a prompt needs 'prompt' or 'prompt_token_ids'; {WAY}")
    return ParsedPrompt(text, None if ids is None else _tokens(ids))


def _tokens(ids: Any) -> tuple[int, ...]:
    items = _as_list(ids)
    # Looked at one by one, the tokens of long prompts would keep a GPU waiting for a tenth of a second.
    return tuple(items) if set(map(type, items)) <= {int} else tuple(map(_token, items))


def _token(token: Any) -> int:
    # True is an integer to Python, and no token to anybody.
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise RequestError(f"token ids are integers, not {_shown(token)}; {WAY}")
    return operator.index(token)


def _messages(conversation: Sequence[Any]) -> list[Message]:
    if not conversation:
        raise RequestError(f"the conversation has no messages; {_MESSAGES}")
    for message in conversation:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message has a role and a content, unlike {_shown(message)}; {_MESSAGES}")
    return [{**message, "content": _text_of(message.get("content"))} for message in conversation]


def _text_of(content: Any) -> str:
    """Return a message's content as one text, as chat templates take it; raise RequestError."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in _as_list(content, _MESSAGES):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"only text is served, and a message has a part of type {kind!r}")
        texts.append(part["text"])
    return "".join(texts)


def _shown(value: object) -> str:
    """Return a value for a message, cut short."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
