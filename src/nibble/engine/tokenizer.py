"""Text to tokens and back: the only file of the engine that imports Transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nibble.errors import RequestError, WeightError


class Tokenizer:
    """The tokenizer of a checkpoint folder or hub name.

    Raises:
        WeightError: there is none, or it cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise WeightError(f"cannot load the tokenizer of {path!r}: {error}") from error
        added = getattr(self._inner, "added_tokens_decoder", {})
        special = dict(zip(self._inner.all_special_tokens, self._inner.all_special_ids, strict=True))
        self._added = special | {str(token.content): int(index) for index, token in added.items()}
        self._special = {*special.values(), *(index for index, token in added.items() if token.special)}

    def __len__(self) -> int:
        return len(self._inner)

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: what to encode.
            kwargs: for Transformers.

        Raises:
            RequestError: it is not text that can be encoded.
        """
        try:
            return list(self._inner.encode(text, **kwargs))
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the prompt is not text that can be encoded: {error}") from error

    def decode(self, ids: Sequence[int], visible: frozenset[int] | None = frozenset()) -> str:
        """Return the text of tokens.

        Args:
            ids: tokens.
            visible: special tokens that are text and not left out; None: all.
        """
        if visible:
            ids = [token for token in ids if token in visible or token not in self._special]
        skip = visible is not None and not visible
        return self._inner.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    def token_of(self, word: str) -> int | None:
        """Return the token that was added to the vocabulary for this very word, if there is one."""
        return self._added.get(word)

    @property
    def chat_template(self) -> str | None:
        """Return the template of conversations; of several the one for tools, or the usual one."""
        template = self._inner.chat_template
        if isinstance(template, dict):
            return template.get("tool_use") or template.get("default")
        return template

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's answer.

        Args:
            messages: with `role` and `content`.
            tools: that the assistant may call.
            kwargs: for the template.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if not self._inner.chat_template:
            raise RequestError("this model has no chat template; use generate with a plain prompt")
        try:
            text = self._inner.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                **kwargs,
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as error:  # templates are programs, and raise what they like
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def longest(self) -> int:
        """Return the most characters that one token stands for."""
        return max(map(len, self._inner.get_vocab()), default=1)

    def for_grammars(self, vocab_size: int, eos_ids: list[int]) -> Any:
        """Return llguidance's view of the tokenizer."""
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._inner, n_vocab=vocab_size, eos_token=eos_ids or None)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer, as far as the tokenizer has them."""
        token = self._inner.eos_token_id
        return frozenset() if token is None else frozenset([token])


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return `tokenizer`, or raise RequestError where a checkpoint has none."""
    if tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer: give token ids instead of text")
    return tokenizer


class Detokenizer:
    """Text of a growing answer, piece by piece. A character whose bytes are not complete yet is held back.

    Args:
        tokenizer: of the model.
        prompt: the tokens before the answer. A token's text may depend on them, as a leading space does.
        visible: special tokens that are text, as Tokenizer.decode() takes them.
    """

    INCOMPLETE = "\ufffd"
    NUM_PROMPT_TOKENS = 6
    """Tokens of the prompt that are looked at."""
    MAX_HELD_BACK = 3
    """Most tokens that are held back: a character has at most four bytes."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), visible: frozenset[int] | None = frozenset()
    ) -> None:
        self._tokenizer, self._visible = tokenizer, visible
        self._ids = list(prompt[-self.NUM_PROMPT_TOKENS :])
        self._context = 0
        """Tokens from here on are decoded again, since neighbours change each other's text."""
        self._num_emitted = len(self._ids)
        """Tokens before this have been emitted."""

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` add."""
        self._ids += ids
        return self._emit(self._end_of_character())

    def finish(self) -> str:
        """Return what was held back, without bytes that are no character."""
        return self._emit(len(self._ids)).rstrip(self.INCOMPLETE)

    def _emit(self, end: int) -> str:
        """Return the text of the tokens before `end` that were not emitted yet."""
        before, after = self._decode(self._num_emitted), self._decode(end)
        # If the text is no longer, only special tokens were added: what stands before them is still needed.
        if len(after) > len(before):
            self._context = self._num_emitted
        self._num_emitted = end
        return after[len(before) :]

    def _end_of_character(self) -> int:
        """Return the last token at which the text ends in a complete character.

        Bytes that three more tokens have not completed are passed.
        """
        total = len(self._ids)
        first = max(self._num_emitted, total - self.MAX_HELD_BACK)
        for end in range(total, first, -1):
            if not self._decode(end).endswith(self.INCOMPLETE):
                return end
        return first

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._context : end], self._visible)


class StopStrings:
    """Looks for stop strings in a growing text, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Return text that is safe to emit, without the stop string, and whether one was reached."""
        if not self._stops:
            return text, False
        self._pending += text
        places = [at for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if places:
            safe, self._pending = self._pending[: min(places)], ""
            return safe, True
        overlap = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        cut = len(self._pending) - overlap
        safe, self._pending = self._pending[:cut], self._pending[cut:]
        return safe, False

    def finish(self) -> str:
        """Return what was held back."""
        text, self._pending = self._pending, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
