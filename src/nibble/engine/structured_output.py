"""Structured answers: which tokens may come next, so that an answer is what a grammar says.

A grammar is written as `kind:body`: `json_schema:{...}`, `json_object:`, `regex:...`, `choice:["a", "b"]` (a JSON list
of texts), `lark:...` (llguidance's syntax, or GBNF), or `composed:{"lark": "start: @a", "parts": {"a": GRAMMAR}}`. Owns
Grammars and Matcher, over llguidance, which follows tokens through a grammar in some microseconds each. Must not know
of logits.
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
LONGEST = 1 << 18
"""Characters of a grammar."""
KEPT = 64
"""Grammars that are kept as they were compiled, for the next request that asks for the same."""
FUEL = 250_000
"""What llguidance may spend on the regular expressions of a grammar before the first token: some 0.2 s at most, where
its own limit lets others wait for seconds. 8,000 words to choose from are well within it."""
MOST_S = 2.0
"""Seconds that preparing a grammar may take: in the engine all others would wait for it."""


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._seen = inner, 0

    @property
    def error(self) -> str:
        """Why it cannot be followed further, if so: the answer fits no more, or it became too complex."""
        return str(self._inner.get_error()) if self._inner.is_error() else ""

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
        self._kept = lru_cache(KEPT)(self._made)

    def matcher(self, grammar: str) -> Matcher:
        """The matcher of a grammar; raises RequestError where it cannot be understood."""
        return self._kept(grammar).fork()

    def prepare(self) -> None:
        """Does now what the first grammar would wait for: a second or so, where the vocabulary is large."""
        with suppress(RequestError):  # what is missing is told to those who need it
            self._tokens()

    def check(self, grammar: str) -> None:
        """Raises RequestError where a grammar cannot be followed, or takes so long to prepare that others would wait.
        For a process in which nobody waits."""
        start = time.monotonic()
        matcher = self.matcher(grammar)
        matcher.allowed(())
        took = time.monotonic() - start
        if matcher.error:
            raise RequestError(f"the grammar cannot be followed: {matcher.error}")
        if took > MOST_S:
            raise RequestError(
                f"the grammar is too complex: it took {took:.1f} s to prepare, of {MOST_S:.0f} s"
            )

    def _made(self, grammar: str) -> Matcher:
        tokens = self._tokens()
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar) > LONGEST:
            raise RequestError(f"a grammar may have {LONGEST} characters at most")
        limits = LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
        made = LLMatcher(tokens, _compiled(grammar), log_level=0, limits=limits)
        if made.is_error():
            raise RequestError(f"the grammar cannot be followed: {made.get_error()}")
        return Matcher(made)

    def _tokens(self) -> Any:
        """llguidance's view of the tokenizer; raises RequestError where there can be none."""
        if self._inner is None:
            try:
                self._inner = self._tokenizer.for_grammars(self._vocabulary, sorted(self._eos_ids))
            except ImportError as error:
                raise RequestError(
                    "structured answers need a package: pip install llguidance", 501
                ) from error
            except ValueError as error:
                raise RequestError(f"this model's tokenizer cannot follow grammars: {error}", 501) from error
        return self._inner


def _compiled(grammar: str) -> str:
    """A grammar in llguidance's own words."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

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
        if kind == "composed":
            return _composed(json.loads(body))
        return str(
            LLMatcher.grammar_from_regex(body)
            if kind == "regex"
            else LLMatcher.grammar_from_lark(any_to_lark(body))
        )
    except RequestError:
        raise
    except Exception as error:  # readers of grammars raise whatever their parts do, Exception itself too
        raise RequestError(f"the grammar {kind} cannot be read: {error}") from error


def _composed(given: Any) -> str:
    """Several grammars, of which the first refers to the others by name."""
    found = [{"name": "composed", "lark_grammar": given["lark"]}]
    for name, grammar in given["parts"].items():
        said = _compiled(grammar)
        own = json.loads(said)["grammars"] if said.startswith("{") else [{"lark_grammar": said}]
        found.append({**own[0], "name": name})
    return json.dumps({"grammars": found})


def _texts(body: str) -> list[str]:
    found = json.loads(body)
    if not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
        raise RequestError("a choice is a JSON list of texts")
    return found
