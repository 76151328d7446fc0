"""Structured answers: which tokens may come next, so that an answer is what a grammar says.

A grammar is written as `kind:body`: `json_schema:{...}`, `json_object:`, `regex:...`, `choice:["a", "b"]` (a JSON list
of texts) or `lark:...` (llguidance's syntax). Owns Grammars and Matcher, over llguidance, which follows tokens through
a grammar in some microseconds each. Must not know of logits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from nibble.engine.tokenizer import Tokenizer
from nibble.errors import RequestError

KINDS = ("json_schema", "json_object", "regex", "choice", "lark")
LONGEST = 1 << 18
"""Characters of a grammar."""


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._seen = inner, 0

    def fork(self) -> Matcher:
        """Another answer's, from the beginning."""
        return Matcher(self._inner.deep_copy())

    def allowed(self, answer: Sequence[int]) -> bytes:
        """Bits of the tokens that may follow `answer`, the first token in the lowest bit; of the end alone where the
        answer is complete."""
        self._inner.consume_tokens(list(answer[self._seen :]))
        self._seen = len(answer)
        found: bytes = self._inner.compute_bitmask()
        return found


class Grammars:
    """Makes matchers for one tokenizer. vocabulary: tokens that the model has; eos_ids: those that end an answer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._eos_ids = tokenizer, vocabulary, eos_ids
        self._inner: Any = None

    def matcher(self, grammar: str) -> Matcher:
        """The matcher of a grammar; raises RequestError where it cannot be understood."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise RequestError("structured answers need a package: pip install llguidance", 501) from error
        if len(grammar) > LONGEST:
            raise RequestError(f"a grammar may have {LONGEST} characters at most")
        if self._inner is None:
            self._inner = self._tokenizer.for_grammars(self._vocabulary, sorted(self._eos_ids))
        made = LLMatcher(self._inner, _compiled(grammar))
        if made.is_error():
            raise RequestError(f"the grammar cannot be followed: {made.get_error()}")
        return Matcher(made)


def _compiled(grammar: str) -> str:
    """A grammar in llguidance's own words."""
    from llguidance import LLMatcher

    kind, colon, body = grammar.partition(":")
    if not colon or kind not in KINDS:
        raise RequestError(f"a grammar is written as KIND:BODY, where KIND is one of {', '.join(KINDS)}")
    try:
        if kind == "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
        if kind == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(json.dumps(json.loads(body))))
        if kind == "choice":
            return str(LLMatcher.grammar_from_regex("|".join(map(re.escape, _texts(body)))))
        return str(
            LLMatcher.grammar_from_regex(body) if kind == "regex" else LLMatcher.grammar_from_lark(body)
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"the grammar {kind} cannot be read: {error}") from error


def _texts(body: str) -> list[str]:
    found = json.loads(body)
    if not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
        raise RequestError("a choice is a JSON list of texts")
    return found
