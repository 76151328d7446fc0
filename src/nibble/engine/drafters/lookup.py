"""Look-up: what followed the last few tokens when the request had them before, in its prompt or its answer.

It needs no model, and finds what answers copy: code that is edited, documents that are quoted, tool calls that are
repeated (Saxena 2023, prompt lookup decoding; Oliaro et al. 2024, SuffixDecoding). Each request has an index of its
n-grams, to which tokens are added as they come, so that a step takes some microseconds whatever the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from nibble.engine.drafters.base import DrafterInfo, DraftTask
from nibble.engine.request import Request

NGRAM = 3
"""Last tokens that must have been there before."""
CANDIDATES = 16
"""Places that are compared, the newest ones."""
LONGEST = 32
"""Tokens beyond which a longer match says nothing more."""
TRUST = 4
"""Draft tokens for each token that matches."""


class NgramIndex:
    """Where n-grams of a list of tokens that only grows are followed by another token."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._starts: set[tuple[int, ...]] = set()
        self._num_indexed = NGRAM

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the n-grams of new tokens."""
        for place in range(self._num_indexed, len(tokens)):
            self._places.setdefault(tuple(tokens[place - NGRAM : place]), []).append(place)
            self._starts.add(tuple(tokens[place - NGRAM : place - 1]))
        self._num_indexed = max(self._num_indexed, len(tokens))

    def may_match(self, tokens: Sequence[int]) -> bool:
        """Return whether there is a token after which the last ones match."""
        return len(tokens) >= NGRAM and tuple(tokens[1 - NGRAM :]) in self._starts

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the place after the longest match of the last tokens, the newest of equals, and its length; 0, 0."""
        best, longest = 0, 0
        for place in reversed(self._places.get(tuple(tokens[-NGRAM:]), ())[-CANDIDATES:]):
            length = max(NGRAM, longest + 1)
            # A slice at a time: only a longer match than the best one is looked at token by token.
            if length > min(place, LONGEST) or tokens[place - length : place] != tokens[-length:]:
                continue
            while length < min(place, LONGEST) and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            best, longest = place, length
        return best, longest


class Lookup:
    """The drafter."""

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return for each task what followed its last tokens before."""
        return [self._propose(task.request, task.limit) for task in tasks]

    def may_propose(self, request: Request) -> bool:
        """Return whether the last tokens may match once there is one more."""
        return self._index(request).may_match(request.token_ids)

    def _index(self, request: Request) -> NgramIndex:
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = NgramIndex()
        index.extend(request.token_ids)
        return index

    def _propose(self, request: Request, limit: int) -> list[int]:
        tokens, index = request.token_ids, self._index(request)
        place, length = index.match(tokens)
        if not length:
            return []
        count = min(limit, TRUST * length)
        drafts = tokens[place : place + count]
        # A match that reaches the end of what there is repeats itself.
        period = len(tokens) - place
        while len(drafts) < count:
            drafts.append(drafts[len(drafts) - period])
        return drafts


DRAFTER = DrafterInfo(
    name="lookup",
    summary="what followed the last tokens before, in prompt and answer; no model",
    drafter=Lookup,
    max_tokens=15,
)
