"""Close connections whose request is incomplete after some seconds.

uvicorn waits for ever for the rest of a request. A few hundred connections that never finish theirs would take all
places and shut everyone else out.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SLOWEST: Final = 10.0  # seconds from a request's first byte, or from the connection, to its last byte


@final
class TimeoutProtocol(H11Protocol):
    """One connection. What is answered, however long that takes, is not cut off."""

    _giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._forget()  # the request is whole, or was refused
        elif self._giving_up is None:
            self._giving_up = self.loop.call_later(SLOWEST, self.transport.close)

    def _forget(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
