"""Grammars are tried here before the engine gets them: one that cannot be followed, or takes long to prepare, is
refused, and holds up nobody but others that have not been tried yet.

Owns GrammarCheck. Must not know of HTTP or of requests.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nibble.engine.structured_output import Grammars

REMEMBERED = 256
"""Grammars that were found good, and are not tried again."""


class GrammarCheck:
    """Tries one grammar at a time, in a thread. tokens: a tokenizer; without one the engine refuses."""

    def __init__(self, tokens: Any) -> None:
        self._tokens, self._grammars = tokens, dict[int, Grammars]()
        self._good: deque[bytes] = deque(maxlen=REMEMBERED)
        self._thread = ThreadPoolExecutor(1, "grammar-check")
        """A lock would be free again when the client of what is tried goes away, and the trying go on."""

    async def prepare(self, vocabulary: int) -> None:
        """So that the first grammar need not wait. vocabulary: tokens of the model."""
        if self._tokens is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._of(vocabulary).prepare)

    def _of(self, vocabulary: int) -> Grammars:
        if vocabulary not in self._grammars:
            self._grammars = {vocabulary: Grammars(self._tokens, vocabulary, self._tokens.eos_ids)}
        return self._grammars[vocabulary]

    async def passed(self, grammar: str, vocabulary: int) -> None:
        """Raises RequestError where the engine could not follow it."""
        digest = hashlib.sha256(grammar.encode(errors="replace")).digest()
        if self._tokens is not None and digest not in self._good:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._tried, digest, grammar, vocabulary)

    def _tried(self, digest: bytes, grammar: str, vocabulary: int) -> None:
        if digest not in self._good:  # others may have waited for the same one
            self._of(vocabulary).check(grammar)
            self._good.append(digest)
