"""Text to tokens and back: the only file of the engine that imports Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from nibble.errors import ConfigError, RequestError, WeightError
from nibble.models.hub import has_tokenizer, locate, model_file, read_json

MARK = "\ufdd0"
"""Stands before a special token in a text in which nothing else may be taken for one: a noncharacter, which Unicode
keeps for such uses."""
JSON_FILES = ("tokenizer.json", "tokenizer_config.json")
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "merges.txt")


def read_template(source: str) -> str:
    """Return a chat template from a file, or the text itself; raise ConfigError where it is neither."""
    if any(mark in source for mark in ("{{", "{%")):
        return source
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the chat template {source!r} cannot be read ({error}), and is no text in Jinja, which has {{{{ or {{%"
        ) from error


class Tokenizer:
    """The tokenizer of a checkpoint folder or hub name.

    Args:
        path: the folder or name.
        chat_template: a file or a text in Jinja, in place of the model's own template.

    Raises:
        ConfigError: the template cannot be read.
        WeightError: there is none, or it cannot be loaded.
    """

    def __init__(self, path: str, chat_template: str | None = None, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:  # every tokenizer reads its files in its own way
            if "trust_remote_code" in str(error):
                raise WeightError(
                    f"the tokenizer of {path!r} is Python code of the checkpoint: --trust-remote-code runs it, which "
                    "may do anything on this machine"
                ) from error
            raise WeightError(
                f"cannot load the tokenizer of {path!r}: {_broken_file(path, error)}"
            ) from error
        if chat_template is not None:
            self._inner.chat_template = read_template(chat_template)
            self._check_template()
        elif not self._inner.chat_template:
            self._inner.chat_template = _processor_template(path)
        added = getattr(self._inner, "added_tokens_decoder", {})
        special = dict(zip(self._inner.all_special_tokens, self._inner.all_special_ids, strict=True))
        self._added = special | {str(token.content): int(index) for index, token in added.items()}
        self._special = {*special.values(), *(index for index, token in added.items() if token.special)}

    def _check_template(self) -> None:
        """Raise ConfigError where the template is no Jinja."""
        from jinja2 import TemplateSyntaxError

        try:
            self._inner.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is malformed in line {error.lineno}: {error}") from error
        except Exception:  # it may want other messages than this one
            pass

    def __len__(self) -> int:
        return len(self._inner)

    def is_like(self, other: Tokenizer) -> bool:
        """Return whether the same numbers stand for the same tokens."""
        same: bool = self._inner.get_vocab() == other._inner.get_vocab()
        return same

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

    def token_sequences(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of words as they may stand in a text: within a word, and at the beginning of one."""
        sequences: list[list[int]] = []
        for text in texts:
            inside, start = (
                self.encode(space + text.lstrip(), add_special_tokens=False) for space in ("", " ")
            )
            sequences.append(inside)
            # A space of its own is no part of the word, which the first entry bans already.
            if len(start) == len(inside) and start[0] != inside[0]:
                sequences.append(start)
        return sequences

    def decode(self, ids: Sequence[int], visible: frozenset[int] | None = frozenset()) -> str:
        """Return the text of tokens.

        Args:
            ids: tokens.
            visible: special tokens that are text and not left out; None: all.
        """
        if visible:
            ids = [token for token in ids if token in visible or token not in self._special]
        skip = visible is not None and not visible
        return self._decode(list(ids), skip_special_tokens=skip)

    @cached_property
    def _decode(self) -> Callable[..., str]:
        """What makes a text of tokens: the fast tokenizer below Transformers' class, which takes far longer."""
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(self._inner)
        if isinstance(self._inner, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode):
            decode: Callable[..., str] = self._inner.backend_tokenizer.decode
            return decode
        return partial(self._inner.decode, clean_up_tokenization_spaces=False)

    def decode_marked(self, ids: Sequence[int], visible: frozenset[int]) -> str:
        """Return the text of tokens, with MARK before special tokens that are visible, and nowhere else."""
        pieces = []
        for is_visible, run in groupby(ids, visible.__contains__):
            if is_visible:
                pieces += [MARK + self.decode([token], visible) for token in run]
            else:
                pieces.append(self.decode(list(run)).replace(MARK, ""))
        return "".join(pieces)

    def token_of(self, word: str) -> int | None:
        """Return the token that was added to the vocabulary for this very word, if there is one."""
        return self._added.get(word)

    def info(self) -> dict[str, Any]:
        """Return the names of end, begin and padding tokens, and the chat template, as /tokenizer_info has them."""
        names = ("eos_token", "bos_token", "pad_token")
        tokens = {name: getattr(self._inner, name, None) for name in names}
        return {**tokens, "tokenizer_class": type(self._inner).__name__, "chat_template": self.chat_template}

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Return all tokens as the tokenizer writes them, with their ids."""
        vocabulary: Mapping[str, int] = self._inner.get_vocab()
        return vocabulary

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
        """Return the token ids of a conversation.

        Args:
            messages: with `role` and `content`.
            tools: that the assistant may call.
            kwargs: of render().

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        return self.encode(self.render(messages, tools, **kwargs), add_special_tokens=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the text of a conversation, ready for the assistant's answer.

        Args:
            messages: with `role` and `content`.
            tools: that the assistant may call.
            add_generation_prompt: end with what begins an answer.
            continue_final_message: end within the last message, so that the answer goes on with it.
            kwargs: for the template.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if not self._inner.chat_template:
            raise RequestError("this model has no chat template; use generate with a plain prompt")
        if self._reads_parts_alone:
            messages = [_in_parts(message) for message in messages]
        try:
            return self._render(
                messages,
                tools=list(tools) if tools else None,
                **kwargs,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
            )
        except Exception as error:  # templates are programs, and raise what they like
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def _render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        return str(self._inner.apply_chat_template(list(messages), tokenize=False, **kwargs))

    @cached_property
    def _reads_parts_alone(self) -> bool:
        """Whether the chat template takes text as a part of a message alone: a plain string would get lost in it."""
        # Templates of multimodal models do, and go through the characters of a string without a word.
        message = {"role": "user", "content": _PROBE}
        return not self._shows(message) and self._shows(_in_parts(message))

    def _shows(self, message: Mapping[str, Any]) -> bool:
        try:
            return _PROBE in self._render([message])
        except Exception:  # templates are programs, and raise what they like
            return False

    @cached_property
    def longest(self) -> int:
        """Return the most characters that one token stands for."""
        return max(map(len, self._inner.get_vocab()), default=1)

    def for_grammars(self, vocab_size: int, eos_ids: list[int]) -> Any:
        """Return llguidance's view of the tokenizer."""
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._inner, n_vocab=vocab_size, eos_token=eos_ids or None)

    @property
    def prefix_token(self) -> int | None:
        """Return the token that a text without a prompt is scored after: that of its begin, or else of its end."""
        bos = self._inner.bos_token_id
        return self._inner.eos_token_id if bos is None else bos

    @property
    def eos_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer, as far as the tokenizer has them."""
        token = self._inner.eos_token_id
        return frozenset() if token is None else frozenset([token])


_PROBE = "nibble"
"""A message of one word that templates do not have."""


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose text is one part of its content."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _processor_template(path: str) -> str | None:
    """Return the template that older multimodal checkpoints have beside their tokenizer, None if there is none."""
    file = model_file(path, "chat_template.json")
    return read_json(file).get("chat_template") if file else None


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
        marked: these have MARK before them.
    """

    INCOMPLETE = "\ufffd"
    NUM_PROMPT_TOKENS = 6
    """Tokens of the prompt that are looked at."""
    MAX_HELD_BACK = 3
    """Most tokens that are held back: a character has at most four bytes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        visible: frozenset[int] | None = frozenset(),
        *,
        marked: bool = False,
    ) -> None:
        self._tokenizer, self._visible, self._marked = tokenizer, visible, marked
        self._ids = list(prompt[-self.NUM_PROMPT_TOKENS :])
        self._context = 0
        """Tokens from here on are decoded again, since neighbours change each other's text."""
        self._num_emitted = len(self._ids)
        """Tokens before this have been emitted."""

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` add."""
        self._ids += ids
        return self._emit(*self._whole_characters())

    def finish(self) -> str:
        """Return what was held back, without bytes that are no character."""
        end = len(self._ids)
        return self._emit(end, self._decode(end)).rstrip(self.INCOMPLETE)

    def _emit(self, end: int, after: str) -> str:
        """Return the text of the tokens before `end` that were not emitted yet.

        Args:
            end: of tokens.
            after: the text up to there.
        """
        before = self._decode(self._num_emitted)
        # If the text is no longer, only special tokens were added: what stands before them is still needed.
        if len(after) > len(before):
            self._context = self._num_emitted
        self._num_emitted = end
        return after[len(before) :]

    def _whole_characters(self) -> tuple[int, str]:
        """Return the last token at which the text ends in a complete character, and the text up to there.

        Bytes that three more tokens have not completed are passed.
        """
        total = len(self._ids)
        first = max(self._num_emitted, total - self.MAX_HELD_BACK)
        for end in range(total, first, -1):
            text = self._decode(end)
            if not text.endswith(self.INCOMPLETE):
                return end, text
        return first, self._decode(first)

    def _decode(self, end: int) -> str:
        ids = self._ids[self._context : end]
        if self._marked and self._visible is not None:
            return self._tokenizer.decode_marked(ids, self._visible)
        return self._tokenizer.decode(ids, self._visible)


class StopStrings:
    """Looks for stop strings in a growing text, and holds back what may become one.

    Args:
        stops: the strings.
        include: one that is reached stays in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._pending = ""
        self.reached: str | None = None
        """The one that ended the text."""

    def add(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Return text that is safe to emit, and whether a stop string was reached.

        Args:
            text: what is new.
            may_stop: whether a stop string that ends in it counts.
        """
        if not self._stops:
            return text, False
        self._pending += text
        places = [(at, at + len(stop)) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if places and may_stop:
            start, end = min(places)
            self.reached = self._pending[start:end]
            safe, self._pending = self._pending[: end if self._include else start], ""
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


def _broken_file(path: str, error: Exception) -> str:
    """Return why a tokenizer cannot be loaded, with the file at fault where it is known, and what would work."""
    again = "download or save the tokenizer's files again"
    # Libraries write several lines.
    reason, folder = " ".join(str(error).split()) or type(error).__name__, Path(path)
    if not folder.is_dir():
        return reason
    for file in (folder / name for name in JSON_FILES):
        try:
            read_json(file)
        except WeightError:
            return f"{file.name} is no JSON object; {again}"
    # The library asks for the entries of a file one by one.
    if isinstance(error, KeyError):
        return f"{JSON_FILES[0]} has no entry {reason}; {again}"
    if not any(True for pattern in VOCABULARIES for _ in folder.glob(pattern)):
        return f"there is no vocabulary ({', '.join(VOCABULARIES)}); {again}"
    return f"{reason}; {again}, or install the package that they need"


def tokenizer_of(
    model: str, chat_template: str | None = None, trust_remote_code: bool = False
) -> Tokenizer | None:
    """Return the model's tokenizer; None for a local checkpoint that has no tokenizer files.

    Args:
        model: a folder or hub name.
        chat_template: a file or a text, in place of the model's own.
        trust_remote_code: whether code that comes with it may run.
    """
    path = Path(locate(model))
    if path.exists() and not has_tokenizer(path):
        return None
    return Tokenizer(str(path) if path.exists() else model, chat_template, trust_remote_code)


def eos_ids_of(model: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end an answer, by the tokenizer and the model's configs."""
    eos_ids: set[int] = set(tokenizer.eos_ids if tokenizer else ())
    # Some models name a further end token, that of a turn, in generation_config alone; multimodal ones in that of text.
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        eos_ids |= set(ids) if isinstance(ids, Iterable) else set() if ids is None else {ids}
    return frozenset(eos_ids)
