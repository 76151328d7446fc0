"""One request's stream: what is sent in a conversation, and what is noted of each chunk that comes back.

Owns Talk, Events, take(), settle(), and the kinds of failures. Must not know when anything is sent, and must not
import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from nibble.evals.load_report import Record
from nibble.evals.load_workloads import Prompt, joined


class Failed(Exception):
    """What became of a request: the kind, and a detail."""

    def __init__(self, kind: str, detail: str = "") -> None:
        self.kind, self.detail = kind, detail
        super().__init__(kind)


class Events:
    """Server-sent events out of bytes, however these are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, raw: bytes) -> Iterator[bytes]:
        """The data of each event's lines that are complete."""
        *lines, self._rest = (self._rest + raw).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Talk:
    """A conversation in the shape in which it is sent."""

    def __init__(self, chat: bool) -> None:
        self._chat = chat
        self._messages: list[dict[str, str]] = []
        self._text: Prompt | None = None

    def say(self, prompt: Prompt) -> dict[str, Any]:
        """What is asked after the client says `prompt`."""
        if self._chat:
            assert isinstance(prompt, str)
            self._messages.append({"role": "user", "content": prompt})
            return {"messages": self._messages}
        self._text = prompt if self._text is None else joined(self._text, prompt)
        return {"prompt": self._text}

    def hear(self, answer: str) -> None:
        """The server's own answer, which the next turn follows."""
        if self._chat:
            self._messages.append({"role": "assistant", "content": answer})
        elif isinstance(self._text, str):
            self._text += answer


def take(record: Record, now: float, chunk: Any) -> str:
    """Notes a chunk that came at `now`; the text that it carries. Raises Failed where it tells an error."""
    if error := chunk.get("error"):
        raise Failed("in the stream", str(error.get("message", error) if isinstance(error, dict) else error))
    if usage := chunk.get("usage"):
        record.input_tokens, record.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if not chunk.get("choices"):
        return ""
    choice = chunk["choices"][0]
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else delta.get("content")
    shown = text or (delta or {}).get("reasoning_content") or (delta or {}).get("reasoning") or ""
    record.finish = choice.get("finish_reason") or record.finish
    only_role = delta is not None and not shown and "role" in delta and not choice.get("finish_reason")
    if not only_role:  # a server may greet before it has computed anything
        record.marks.append((now, len(shown)))
    return text or ""


def settle(record: Record) -> None:
    """Leaves out a last chunk that says only that the answer has ended, and is no token.

    It is one where chunks and tokens are equally many; and, of fewer chunks, where an unseen token ended the answer.
    """
    tokens, chunks = record.output_tokens or 0, len(record.marks)
    is_token = chunks == tokens or (chunks < tokens and record.finish != "length")
    if chunks > 1 and not record.marks[-1][1] and not is_token:
        record.marks.pop()
    if not record.marks:
        raise Failed("no answer", "the stream has no token")


def kind_of(error: Exception) -> tuple[str, str]:
    """An error in the words in which it is counted, and its detail."""
    import httpx

    if isinstance(error, Failed):
        return error.kind, error.detail
    kinds: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
        (httpx.ConnectError, "no connection"),
        ((TimeoutError, httpx.TimeoutException), "timeout"),
        (httpx.TransportError, "connection lost"),
        ((ValueError, AttributeError, KeyError, TypeError, IndexError), "not understood"),
    )
    kind = next((name for group, name in kinds if isinstance(error, group)), type(error).__name__)
    return kind, str(error) or type(error).__name__


def message_of(said: str) -> str:
    """The message of an error's body, in OpenAI's shape or not."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        found = json.loads(said)
        error = found.get("error", found)
        said = error["message"] if isinstance(error, dict) else error
    return str(said)[:300]
