"""Conversations in harmony, the format of gpt-oss, by the package openai-harmony: an extra of the same name.

The package wants its vocabulary, o200k_base, from the network. It is made here from the tokenizer of the model, which
has the same one, and the package checks its digest. Content is encoded as plain text, so that what users write is never
taken for a marker, as it may be where a chat template is rendered and then encoded.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.errors import ConfigError, RequestError
from nibble.server.harmony_parser import ANALYSIS, COMMENTARY, CONSTRAIN, FINAL, FUNCTIONS

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding, Message

    from nibble.engine.tokenizer import Tokenizer

INSTALL = "pip install openai-harmony"
NUM_RANKS = 199_998
"""Tokens of o200k_base; special tokens come after them."""
O200K_BASE = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""SHA-256 of its file, o200k_base.tiktoken."""
VOCABULARY, FOLDER_VARIABLE = "o200k_base.tiktoken", "TIKTOKEN_ENCODINGS_BASE"
EFFORTS = ("low", "medium", "high")
SYSTEM_FIELDS = ("model_identity", "knowledge_cutoff", "conversation_start_date")
"""Fields of the system message that `chat_template_kwargs` may set."""


def load_encoding(tokenizer: Tokenizer) -> HarmonyEncoding | None:
    """Return openai-harmony's encoding, without network; None where the tokenizer has another vocabulary.

    Raises:
        ConfigError: the package is missing.
    """
    try:
        import openai_harmony
    except ImportError as error:
        raise ConfigError(
            f"gpt-oss's conversations need a package: {INSTALL}; or --tool-format none --reasoning-parser none, for "
            "the text as it comes"
        ) from error
    vocabulary = vocabulary_file(tokenizer)
    if hashlib.sha256(vocabulary).hexdigest() != O200K_BASE:
        return None
    before = os.environ.get(FOLDER_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="nibble-") as folder:
        (Path(folder) / VOCABULARY).write_bytes(vocabulary)
        os.environ[FOLDER_VARIABLE] = folder
        try:
            return openai_harmony.load_harmony_encoding("HarmonyGptOss")
        finally:
            del os.environ[FOLDER_VARIABLE]
            if before is not None:
                os.environ[FOLDER_VARIABLE] = before


def vocabulary_file(tokenizer: Tokenizer) -> bytes:
    """Return the file of tiktoken that has the tokenizer's vocabulary: a line a token, its bytes and its rank."""
    tokens = sorted((rank, token) for token, rank in tokenizer.vocabulary.items() if rank < NUM_RANKS)
    try:
        pieces = [(bytes(BYTES[character] for character in token), rank) for rank, token in tokens]
    except KeyError:  # of a tokenizer that is not byte-level
        return b""
    return b"".join(b"%s %d\n" % (base64.b64encode(piece), rank) for piece, rank in pieces)


def _byte_characters() -> dict[str, int]:
    """Return the byte for which a character stands in byte-level vocabularies (GPT-2, encoder.py)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_characters()


class HarmonyPrompt:
    """Renders conversations. encoding: of openai-harmony."""

    def __init__(self, encoding: HarmonyEncoding) -> None:
        self._encoding = encoding

    def encode(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        reasoning_effort: str = "medium",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Return the tokens of a conversation; reasoning of turns before the last final answer is left out.

        Args:
            turns: as chat templates take them, the arguments of calls as text.
            tools: as chat templates take them.
            reasoning_effort: low, medium or high.
            add_generation_prompt: end with what begins an answer.
            continue_final_message: end within the last message, so that the answer goes on with it.
            kwargs: SYSTEM_FIELDS; others are passed over, as templates do.

        Raises:
            RequestError: a turn or the effort cannot be rendered.
        """
        import openai_harmony as harmony

        system = {key: value for key, value in kwargs.items() if key in SYSTEM_FIELDS}
        messages = [_system(reasoning_effort, system), *_instructions(turns, tools or ()), *_messages(turns)]
        continued = [messages.pop()] if continue_final_message else []
        if continued and (continued[0].author.role != harmony.Role.ASSISTANT or continued[0].recipient):
            raise RequestError(
                "continue_final_message needs a last message of the assistant's without tool calls"
            )
        config = harmony.RenderConversationConfig(auto_drop_analysis=False)
        conversation = harmony.Conversation.from_messages(_without_old_reasoning(messages))
        render = self._encoding.render_conversation
        try:
            if continued:
                # Less the token that ends the message.
                return render(conversation, config) + self._encoding.render(continued[0])[:-1]
            if add_generation_prompt:
                return self._encoding.render_conversation_for_completion(
                    conversation, harmony.Role.ASSISTANT, config
                )
            return render(conversation, config)
        except harmony.HarmonyError as error:
            raise RequestError(f"the conversation cannot be rendered: {error}") from error


def _system(effort: str, fields: Mapping[str, Any]) -> Message:
    from openai_harmony import Message, ReasoningEffort, Role, SystemContent

    if effort not in EFFORTS:
        raise RequestError(f"reasoning_effort of this model is low, medium or high, not {effort!r}")
    content = SystemContent.new().with_reasoning_effort(ReasoningEffort(effort.capitalize()))
    content.conversation_start_date = datetime.date.today().isoformat()
    for name, value in fields.items():
        setattr(content, name, str(value))
    return Message.from_role_and_content(Role.SYSTEM, content)


def _num_instructions(turns: Sequence[Mapping[str, Any]]) -> int:
    """Return how many turns at the beginning are instructions."""
    kinds = [turn["role"] in {"system", "developer"} for turn in turns]
    return [*kinds, False].index(False)


def _instructions(
    turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Iterator[Message]:
    """Yield the developer's message, if there is one: the first instructions, and the tools."""
    from openai_harmony import ToolDescription

    text = "\n\n".join(turn["content"] for turn in turns[: _num_instructions(turns)])
    described = [
        ToolDescription.new(tool["name"], tool.get("description") or "", tool.get("parameters"))
        for tool in (tool["function"] for tool in tools)
    ]
    if text or described:
        yield _developer(text, described)


def _developer(text: str, tools: Sequence[Any] = ()) -> Message:
    from openai_harmony import DeveloperContent, Message, Role

    content = DeveloperContent.new()
    if text:
        content = content.with_instructions(text)
    return Message.from_role_and_content(
        Role.DEVELOPER, content.with_function_tools(tools) if tools else content
    )


def _messages(turns: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """Yield the messages of the turns after the first instructions."""
    from openai_harmony import Author, Message, Role

    names: dict[Any, str] = {}
    for turn in turns[_num_instructions(turns) :]:
        role, text = turn["role"], turn["content"]
        if role in {"system", "developer"}:
            yield _developer(text)
        elif role == "user":
            yield Message.from_role_and_content(Role.USER, text)
        elif role == "assistant":
            calls = turn.get("tool_calls") or []
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            yield from _answer(turn, calls)
        elif role == "tool":
            name = names.get(turn.get("tool_call_id")) or turn.get("name")
            if not name:
                raise RequestError(
                    "a message of role tool needs the tool_call_id of a call before it, or a name"
                )
            author = Author.new(Role.TOOL, FUNCTIONS + str(name))
            message = Message.from_author_and_content(author, text)
            yield message.with_channel(COMMENTARY).with_recipient("assistant")
        else:
            raise RequestError(
                f"this model knows no role {role!r}: known are system, developer, user, assistant, tool"
            )


def _answer(turn: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """Yield an assistant's reasoning, its text and its calls."""
    from openai_harmony import Message, Role

    def message(text: str, channel: str) -> Message:
        return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)

    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    if isinstance(reasoning, str):
        yield message(reasoning, ANALYSIS)
    if turn["content"] or not (reasoning or calls):
        # Text before calls is a preamble, which ends no turn.
        yield message(turn["content"], COMMENTARY if calls else FINAL)
    for call in calls:
        function = call["function"]
        to = message(function["arguments"], COMMENTARY).with_recipient(FUNCTIONS + function["name"])
        yield to.with_content_type(f"{CONSTRAIN}json")


def _without_old_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without reasoning that led to a final answer (harmony, docs/format.md)."""
    last_final = max((i for i, message in enumerate(messages) if message.channel == FINAL), default=0)
    return [message for i, message in enumerate(messages) if i > last_final or message.channel != ANALYSIS]
