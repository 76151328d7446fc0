"""Text to tokens and back: the only file of the engine that knows Transformers.

Owns Tokenizer, with what it knows of special tokens, Detokenizer (which never emits half a character) and StopStrings.
Must not know of caches or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nibble.errors import RequestError, WeightError


class Tokenizer:
    """The tokenizer of a checkpoint folder or hub name; raises WeightError where there is none."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise WeightError(f"cannot load the tokenizer of {path!r}: {error}") from error
        added = getattr(self._inner, "added_tokens_decoder", {})
        named = dict(zip(self._inner.all_special_tokens, self._inner.all_special_ids, strict=True))
        self._added = named | {str(token.content): int(index) for index, token in added.items()}
        self._special = {*named.values(), *(index for index, token in added.items() if token.special)}

    def __len__(self) -> int:
        return len(self._inner)

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Raises RequestError. kwargs: for Transformers."""
        try:
            return list(self._inner.encode(text, **kwargs))
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the prompt is not text that can be encoded: {error}") from error

    def decode(self, ids: Sequence[int], shown: frozenset[int] | None = frozenset()) -> str:
        """Text of tokens. shown: special tokens that are text and not left out; None: all."""
        if shown:
            ids = [token for token in ids if token in shown or token not in self._special]
        skip = shown is not None and not shown
        return str(
            self._inner.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        )

    def token_of(self, word: str) -> int | None:
        """The token that was added to the vocabulary for this very word, if there is one."""
        return self._added.get(word)

    @property
    def chat_template(self) -> str | None:
        """The template of conversations; of several that for tools, or the usual one."""
        found = self._inner.chat_template
        return found.get("tool_use") or found.get("default") if isinstance(found, dict) else found

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation with the model's chat template, ready for the assistant's answer. tools: that the
        assistant may call. kwargs: for the template."""
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
        """Most characters that one token stands for."""
        return max(map(len, self._inner.get_vocab()), default=1)

    def for_grammars(self, vocabulary: int, eos_ids: list[int]) -> Any:
        """llguidance's view of it."""
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._inner, n_vocab=vocabulary, eos_token=eos_ids or None)

    @property
    def eos_ids(self) -> frozenset[int]:
        found = self._inner.eos_token_id
        return frozenset() if found is None else frozenset([found])


def required(found: Tokenizer | None) -> Tokenizer:
    """A tokenizer, where text was given; raises RequestError where a checkpoint has none."""
    if found is None:
        raise RequestError("this checkpoint has no tokenizer: give token ids instead of text")
    return found


class Detokenizer:
    """Text of a growing answer, piece by piece. A character whose bytes are not all there yet is held back.

    prompt: the tokens before the answer, since a token's text may depend on what stands before it (a leading space).
    shown: special tokens that are text, as Tokenizer.decode() takes them.
    """

    INCOMPLETE = "\ufffd"
    LEFT = 6
    """Tokens of the prompt that are looked at."""
    HELD = 3
    """Most tokens that are held back: a character has at most four bytes."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), shown: frozenset[int] | None = frozenset()
    ) -> None:
        self._tokenizer, self._special = tokenizer, shown
        self._ids = list(prompt[-self.LEFT :])
        self._context = 0  # tokens from here on are decoded again, since neighbours change each other's text
        self._shown = len(self._ids)  # tokens before this have been emitted

    def add(self, ids: Sequence[int]) -> str:
        """The text that `ids` add."""
        self._ids += ids
        return self._emit(final=False)

    def finish(self) -> str:
        """What was held back; bytes that are no whole character are dropped."""
        return self._emit(final=True).rstrip(self.INCOMPLETE)

    def _emit(self, final: bool) -> str:
        before = self._decode(self._shown)
        end = len(self._ids) if final else self._whole()
        now = self._decode(end)
        if len(now) > len(
            before
        ):  # else only special tokens were added: what stands before them is still needed
            self._context = self._shown
        self._shown = end
        return now[len(before) :]

    def _whole(self) -> int:
        """Up to which token the text ends in a whole character; past bytes that three more have not made one."""
        total = len(self._ids)
        for end in range(total, max(self._shown, total - self.HELD), -1):
            if not self._decode(end).endswith(self.INCOMPLETE):
                return end
        return max(self._shown, total - self.HELD)

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._context : end], self._special)


class StopStrings:
    """Finds stop strings in a growing text, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was reached); the stop string is not shown."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """What was held back."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
