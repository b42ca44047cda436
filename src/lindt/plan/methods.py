"""Methods are compositions of an adaptation, an aggregator, a penalty and a recovery. There is no class per method.

Named methods register where their components are defined (`registry.register_method`). METHODS holds all of them.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, final

from lindt.protocols import Adaptation, Aggregator, Penalty, Recovery
from lindt.registry import Named, build, component, is_protocol, kinds, method_tables


@final
@dataclass(frozen=True)
class Method:
    """What the clients learn for themselves, how the server joins it, and when recovery runs.

    `after_stop` is how clients predict once recovery has stopped: with what they learned, frozen ("adapted"),
    or with the global model alone.
    """

    adaptation: Adaptation = field(default_factory=lambda: component(Adaptation, "global_only"))
    aggregator: Aggregator = field(default_factory=lambda: component(Aggregator, "mean"))
    penalty: Penalty = field(default_factory=lambda: component(Penalty, "no_penalty"))
    recovery: Recovery = field(default_factory=lambda: component(Recovery, "always"))
    after_stop: Literal["adapted", "global"] = "adapted"


# The order of the paper's main table; other methods follow by name.
ORDER: Final = (
    "fedavg",
    "fedprox",
    "trimmed-mean",
    "fb",
    "apfl",
    "lindt",
    "lindt-tm",
    "lindt-before",
    "runtime",
    "watch",
)


def _names() -> list[str]:
    for part in typing.get_type_hints(Method).values():
        if is_protocol(part):
            kinds(part)  # imports the components, which register the methods that they stand in
    rank = {name: place for place, name in enumerate(ORDER)}
    return sorted(method_tables(), key=lambda name: (rank.get(name, len(rank)), name))


def _method(name: str) -> Method:
    method: Method = build(Method, method_tables()[name], "")
    return method


METHODS: Mapping[str, Method] = Named(_names, _method)
