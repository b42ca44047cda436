"""The runs of `lindt compare`: each method with each aggregator, under each attack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

from lindt.environment.threats import Threat
from lindt.errors import PlanError, UserError
from lindt.plan.file import from_dict, resolve, to_dict
from lindt.plan.plan import EARLIER_NAMES, METHODS, Method, Plan
from lindt.protocols import Aggregator
from lindt.registry import kind_of, kinds
from lindt.runs.replay import papers_rule
from lindt.server.recovery import OnDetection


@final
@dataclass(frozen=True)
class ComparisonGrid:
    """The names to compare. Without aggregators each method has its own; without attacks the plan's attack is used."""

    methods: tuple[str, ...]
    aggregators: tuple[str, ...] = ()
    attacks: tuple[str, ...] = ()

    @classmethod
    def named(cls, methods: str, aggregators: str = "", attacks: str = "") -> ComparisonGrid:
        """A grid from names with commas between them."""
        if not _words(methods):
            raise UserError(f"--methods is empty; choose among {', '.join(METHODS)}")
        return cls(
            _among("--methods", _words(methods), list(METHODS), EARLIER_NAMES),
            _among("--aggregators", _words(aggregators), list(kinds(Aggregator))),
            _among("--attacks", _words(attacks), list(kinds(Threat))),
        )

    def plans(self, base: Plan) -> Iterator[tuple[str, Plan]]:
        """Each plan with its label: `lindt`, `krum/lindt`, `sign_flip/krum/lindt`."""
        for attack in self.attacks or (None,):
            attacked = base if attack is None else _under(base, attack)
            for aggregator in self.aggregators or (None,):
                for name in self.methods:
                    method = method_for(base, name)
                    if aggregator is not None:
                        method = replace(method, aggregator=_component(base, "method", "aggregator", aggregator))
                    label = "/".join(word for word in (attack, aggregator, name) if word)
                    yield label, replace(attacked, method=method)


def comparison_base(plan: str | None, sets: Sequence[str], *, task: str | None = None, **flags: int | None) -> Plan:
    """The plan that methods are compared in. Of the plan's method only the epsilon and r' of the rule on Delta count.

    So `--set detection=delta` needs no other recovery in a plan whose recovery follows the clients' reports.
    """
    own = resolve(plan, task=task).method.recovery
    return resolve(plan, sets if isinstance(own, OnDetection) else ["method=fedavg", *sets], task=task, **flags)


def method_for(base: Plan, name: str) -> Method:
    """A method by name. A method that detects by Delta takes epsilon and r' from the plan that it is compared in.

    Where the plan has none, and the plan is too short for the method's r', r' is the paper's for that many rounds.
    """
    method, recovery = METHODS[name], base.method.recovery
    if not isinstance(method.recovery, OnDetection):
        return method
    if isinstance(recovery, OnDetection):
        return replace(method, recovery=recovery)
    patience = method.recovery.patience
    reachable = patience if patience < base.rounds else papers_rule(base.rounds).patience
    return replace(method, recovery=replace(method.recovery, patience=reachable))


def _under(base: Plan, attack: str) -> Plan:
    """The plan under another attack, with as many attackers. The plan's own attack leaves it as it is."""
    environment, share = base.environment, base.environment.threat.share
    if kind_of(environment.threat) == attack:
        return base
    threat = _component(base, "environment", "threat", attack)
    if share and "share" in getattr(threat, "__dataclass_fields__", {}):
        threat = replace(threat, share=share)
    elif share and hasattr(threat, "threat"):
        threat = replace(threat, threat=replace(threat.threat, share=share))
    return replace(base, environment=replace(environment, threat=threat))


def _component(base: Plan, table: str, field: str, kind: str) -> Any:
    """A component with its default fields, built and checked as from a plan file."""
    tables = to_dict(base)
    tables[table][field] = kind
    try:
        return getattr(getattr(from_dict(tables), table), field)
    except PlanError as error:
        raise UserError(f"{kind}: {error}; write a plan with these fields, and play it with `lindt run`") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _among(
    flag: str, words: Sequence[str], known: Sequence[str], earlier: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Check the words: each is a name or an earlier name from the list, and no name is given twice."""
    names = [earlier.get(word, word) for word in words]
    for word, name in zip(words, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{flag} names {word} twice; name it once")
        if name not in known:
            raise UserError(f"{flag} {word}: choose among {', '.join(known)}")
    return tuple(words)
