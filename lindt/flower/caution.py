"""What a user should know about Delta before trusting it, said once a run, in Flower's own log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import final

from flwr.serverapp.strategy import Strategy

from lindt.detection import Statistic

_LOG = logging.getLogger("flwr")  # where a Flower user looks


def say(text: str, *, warn: bool = False) -> None:
    _LOG.log(logging.WARNING if warn else logging.INFO, "lindt: %s", text)


@final
class Caution:
    def __init__(self, statistic: Statistic, links: Sequence[Strategy]) -> None:
        self.statistic, self.links = statistic, links
        self.said: set[str] = set()
        self._clipped = self._updates = 0.0
        own = [type(link).__name__ for link in links if type(link).start is not Strategy.start]
        if own:
            self._once("start", f"{', '.join(own)} has a start() of its own, which is not called: the detector's is")

    def clipping(self, share: float, updates: int) -> None:
        self._clipped, self._updates = self._clipped + share * updates, self._updates + updates
        if self._updates >= 10 and self._clipped > self._updates / 10 and self.statistic != "spread":
            found = 100 * self._clipped / self._updates
            self._once("clipping", f"{found:.0f}% of the updates are clipped: {self._limit()}")

    def no_mean(self) -> None:
        if self.statistic != "spread":
            name = type(self.links[-1]).__name__
            self._once("mean", f"{name} does not take the mean of the updates: {self._limit()}")

    def resumed(self) -> None:
        if any(getattr(link, "accountant", None) is not None for link in self.links):
            self._once("accountant", "the privacy accountant starts anew: add what was spent before the restart")

    def _limit(self) -> str:
        return (
            f"{self.statistic} then has no limit of zero, so choose epsilon against a healthy control, or watch "
            'statistic="spread", which has'
        )

    def _once(self, key: str, text: str) -> None:
        if key not in self.said:
            self.said.add(key)
            say(text, warn=True)
