"""Connections that say nothing: uvicorn's protocol, which waits for a whole head no longer than for the next request.

Owns Patient. Without it a client that never sends a whole head (a slow loris) keeps its connection for ever. Must not
know of routes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

SECONDS = 75.0
_Base: Any = AutoHTTPProtocol


class HeadTimeoutProtocol(_Base):  # type: ignore[misc]
    """Closes a connection on which no request is answered, and none has begun, between two looks."""

    timeout_s = SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._looker = self.loop.call_later(self.timeout_s, self._look, None)

    def connection_lost(self, error: Exception | None) -> None:
        self._looker.cancel()
        super().connection_lost(error)

    def _look(self, before: Any) -> None:
        """before: the request that was the last one when this was called before."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.cycle is before and not answering:
            self.transport.close()
        else:
            self._looker = self.loop.call_later(self.timeout_s, self._look, self.cycle)
