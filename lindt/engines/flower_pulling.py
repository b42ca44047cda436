"""Looking for answers without being held up by one of them.

Flower's Grid announces an answer before its weights are there. Where a node dies while it sends them, pulling that
answer waits for minutes, whatever the caller's deadline. So every pull has a thread of its own, and a pull that does
not return in a moment is left to itself and asked again later.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Thread
from typing import final

from flwr.app import Message
from flwr.serverapp import Grid

MOMENT = 1.0  # seconds


@final
class Pulls:
    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._running: dict[str, Future[list[Message]]] = {}

    def look(self, message: str) -> list[Message]:
        """The answer to a message, if it is there; raises what pulling it raised."""
        known = self._running.pop(message, None)
        pull = known or self._begin(message)
        try:
            return pull.result(0 if known else MOMENT)
        except TimeoutError:
            if pull.done():  # it was the pull's own
                raise
            self._running[message] = pull
            return []

    def give_up(self, messages: Sequence[str]) -> None:
        """Nobody waits for these any more; a pull that is still running ends by itself, or with the process."""
        for message in messages:
            self._running.pop(message, None)

    def _begin(self, message: str) -> Future[list[Message]]:
        pull: Future[list[Message]] = Future()

        def work() -> None:
            try:
                pull.set_result(list(self._grid.pull_messages([message])))
            except BaseException as error:  # noqa: BLE001  # raised where the result is looked at
                pull.set_exception(error)

        Thread(target=work, daemon=True, name=f"pull {message[:12]}").start()
        return pull
