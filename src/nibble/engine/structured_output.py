"""Structured answers: which tokens may come next, so that an answer follows a grammar.

A grammar is written as `kind:body`: `json_schema:{...}`, `json_object:`, `regex:...`, `choice:["a", "b"]` (a JSON list
of texts), `lark:...` (llguidance's syntax, or GBNF), or `composed:{"lark": "start: @a", "parts": {"a": GRAMMAR}}`.
llguidance follows tokens through a grammar in some microseconds each.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from nibble.engine.tokenizer import Tokenizer
from nibble.errors import RequestError

KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "composed")
MAX_LENGTH = 1 << 18
"""Most characters of a grammar."""
NUM_CACHED = 64
"""Compiled grammars that are kept for the next request with the same one."""
FUEL = 250_000
"""What llguidance may spend on the regular expressions of a grammar before the first token: some 0.2 s at most, where
its own limit lets other requests wait for seconds. 8,000 words to choose from are well within it."""
MAX_SECONDS = 2.0
"""Seconds that preparing a grammar may take: in the engine all other requests would wait for it."""


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._num_consumed = inner, 0

    @property
    def error(self) -> str:
        """Return why it cannot be followed further, if so: the answer does not fit, or it became too complex."""
        return str(self._inner.get_error()) if self._inner.is_error() else ""

    def fork(self) -> Matcher:
        """Return the matcher of another answer, from the beginning."""
        return Matcher(self._inner.deep_copy())

    def allowed(self, answer: Sequence[int], drafts: Sequence[int] = ()) -> bytes:
        """Return one bit for each token that may follow `answer` and `drafts`, the first token in the lowest bit.

        Where the answer is complete, only its end may follow.

        Args:
            answer: tokens that stay.
            drafts: tokens that may be taken back; the grammar allows them (num_valid).
        """
        self._consume(answer)
        if not drafts:
            mask: bytes = self._inner.compute_bitmask()
            return mask
        self._inner.consume_tokens(list(drafts))
        mask = self._inner.compute_bitmask()
        self._inner.rollback(len(drafts))
        return mask

    def num_valid(self, answer: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many of the first drafts the grammar allows after `answer`, and can be followed on."""
        self._consume(answer)
        # A copy, because a limit that only drafts reach must not end the answer.
        inner = self._inner.deep_copy()
        for count, token in enumerate(drafts):
            if inner.is_error() or not inner.validate_tokens([token]):
                return count
            inner.consume_tokens([token])
            inner.compute_bitmask()
            if inner.is_error():
                return count
        return len(drafts)

    def _consume(self, answer: Sequence[int]) -> None:
        # Only what is new: the inner matcher keeps its place from step to step.
        self._inner.consume_tokens(list(answer[self._num_consumed :]))
        self._num_consumed = len(answer)


class Grammars:
    """Makes matchers for one tokenizer.

    Args:
        tokenizer: of the model.
        vocab_size: tokens that the model has.
        eos_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._inner: Any = None
        self._cached = lru_cache(NUM_CACHED)(self._compile)

    def matcher(self, grammar: str) -> Matcher:
        """Return the matcher of a grammar.

        Raises:
            RequestError: the grammar cannot be followed.
        """
        # A fork, because the cached matcher must stay at its beginning.
        return self._cached(grammar).fork()

    def prepare(self) -> None:
        """Do now what the first grammar would wait for: a second or so, where the vocabulary is large."""
        # Only a request with a grammar gets to know that a package is missing.
        with suppress(RequestError):
            self._tokens()

    def check(self, grammar: str) -> None:
        """Compile a grammar in a process where no request waits for it.

        Raises:
            RequestError: the grammar cannot be followed, or takes too long to prepare.
        """
        # Of this thread, since a machine that has much else to do makes no grammar too complex.
        start = time.thread_time()
        matcher = self.matcher(grammar)
        # The first mask is part of what the engine would wait for.
        matcher.allowed(())
        seconds = time.thread_time() - start
        if matcher.error:
            raise RequestError(f"the grammar cannot be followed: {matcher.error}")
        if seconds > MAX_SECONDS:
            raise RequestError(
                f"the grammar is too complex: it took {seconds:.1f} s to prepare, of {MAX_SECONDS:.0f} s"
            )

    def _compile(self, grammar: str) -> Matcher:
        tokens = self._tokens()
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar) > MAX_LENGTH:
            raise RequestError(f"a grammar may have {MAX_LENGTH} characters at most")
        limits = LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
        matcher = LLMatcher(tokens, _to_llguidance(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {matcher.get_error()}")
        return Matcher(matcher)

    def _tokens(self) -> Any:
        """Return llguidance's view of the tokenizer, or raise RequestError where there can be none."""
        if self._inner is None:
            try:
                self._inner = self._tokenizer.for_grammars(self._vocab_size, sorted(self._eos_ids))
            except ImportError as error:
                raise RequestError(
                    "structured answers need a package: pip install llguidance", 501
                ) from error
            except ValueError as error:
                raise RequestError(f"this model's tokenizer cannot follow grammars: {error}", 501) from error
        return self._inner


def _to_llguidance(grammar: str) -> str:
    """Return a grammar in llguidance's own notation."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind, colon, body = grammar.partition(":")
    if not colon or kind not in KINDS:
        raise RequestError(f"a grammar is written as KIND:BODY, where KIND is one of {', '.join(KINDS)}")
    try:
        if kind == "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
        if kind == "json_schema":
            # Parsed here first, so that malformed JSON is reported as such.
            return str(LLMatcher.grammar_from_json_schema(json.dumps(json.loads(body))))
        if kind == "choice":
            return str(LLMatcher.grammar_from_regex("|".join(map(re.escape, _texts(body)))))
        if kind == "composed":
            return _compose(json.loads(body))
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(body))
        return str(LLMatcher.grammar_from_lark(any_to_lark(body)))
    except RequestError:
        raise
    except Exception as error:  # readers of grammars raise whatever their parts do, Exception itself too
        raise RequestError(f"the grammar {kind} cannot be read: {error}") from error


def _compose(body: Any) -> str:
    """Return several grammars, of which the first refers to the other ones by name."""
    grammars = [{"name": "composed", "lark_grammar": body["lark"]}]
    for name, grammar in body["parts"].items():
        text = _to_llguidance(grammar)
        parts = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
        grammars.append({**parts[0], "name": name})
    return json.dumps({"grammars": grammars})


def _texts(body: str) -> list[str]:
    texts = json.loads(body)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("a choice is a JSON list of texts")
    return texts
