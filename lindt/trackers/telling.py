"""The events of a run, passed on; the trackers hear them on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lindt.records import round_line
from lindt.running import Ended, Event, Followed, Played, Started
from lindt.trackers.choice import Tracking


def tracked(events: Iterator[Event], names: Sequence[str], say: Callable[[str], None]) -> Iterator[Event]:
    tracking = Tracking(names, say)
    try:
        for event in events:
            if isinstance(event, Started):
                store = event.store
                tracking.begin(store.folder, store.run, store.plan_table(), event.round)
            elif isinstance(event, Played):
                tracking.round(round_line(event.result))
            elif isinstance(event, Followed):
                tracking.round(event.line)
            elif isinstance(event, Ended):
                tracking.end(event.summary)
            yield event
    finally:
        tracking.close()
