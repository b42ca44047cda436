"""Close connections whose request is incomplete after some seconds, and the oldest idle ones where there are many.

uvicorn waits without limit for the rest of a request. A few hundred connections with incomplete requests would use up
all connections, and the server would answer no one else.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SLOWEST: Final = 10.0  # seconds from a request's first byte, or from the connection, to its last byte
MOST_IDLE: Final = 256  # connections without a request that is being answered; half of all places


@final
class TimeoutProtocol(H11Protocol):
    """One connection. A response is never cut off, however long it takes."""

    _giving_up: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._since = self.loop.time()
        self._watch()
        self._make_room()

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

    def _make_room(self) -> None:
        """Close the idle connections that are older than the newest `MOST_IDLE`."""
        idle = [one for one in self.connections if isinstance(one, TimeoutProtocol) and one._is_idle()]
        for one in sorted(idle, key=lambda one: one._since)[: max(0, len(idle) - MOST_IDLE)]:
            one.transport.close()

    def _is_idle(self) -> bool:
        if self.transport.is_closing():
            return False
        # uvicorn's `cycle` is the request that is answered, None before the first.
        return self._giving_up is not None or self.cycle is None or self.cycle.response_complete

    def _forget(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
