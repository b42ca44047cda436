"""A run as the values that the page reads (page/src/types.ts): plain values, with only the digits that are visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from lindt.errors import UserError, naming_extras, plain
from lindt.report.reading import (
    Run,
    adapts,
    detection_rule,
    gain_test,
    group_of,
    method_words,
    number_at,
    repeat_command,
    whole_at,
    word_at,
)
from lindt.report.verdict import compared_by_test, facts, verdict
from lindt.runs.schema import (
    DIVERGENCE,
    NUMBER,
    ROUND,
    SCORES,
    SOMETIMES,
    STATISTICS,
    SUMMARY,
    TEXT,
    WHOLE,
    MapOf,
    Nullable,
    kind,
)

# The clients of a scored round are columns here: `locals`, `betas` and `clear` have one entry for each of `clients`.
# `clear` has a "1" where the paired test finds that beta_i is more than chance.
PAGE_SCORES: dict[str, Any] = SCORES | {
    "clients": [WHOLE],
    "locals": [NUMBER],
    "betas": [Nullable(NUMBER)],
    "clear": TEXT,
    "notes": MapOf(NUMBER),
}
# The page draws the statistics that a detector may use, and the test's results but not the reports themselves.
NOT_SHOWN = {"quiet", "reports", *SOMETIMES, *DIVERGENCE} - {*STATISTICS}
PAGE_ROUND: dict[str, Any] = {
    **{name: shape for name, shape in ROUND.items() if name not in NOT_SHOWN},
    "seconds": Nullable(NUMBER),
    "scores": Nullable(PAGE_SCORES),
}
# EXACT digits for a number that is also in the sentence: the page must round it to the same last digit. SHORT for the
# clients' numbers, which take most of the space.
EXACT, SHORT = 9, 4
PAGE_SUMMARY: dict[str, Any] = {name: SUMMARY[name] for name in ("scored_rounds", *SCORES, "counted_clients")}


def whole_run(run: Run, id: str, spent: PrivacySpent) -> dict[str, Any]:
    """All values of a run. `id` is its name in the page and in the page's addresses."""
    rule, test = detection_rule(run.plan), gain_test(run.plan)
    return {
        **progress(run, id, spent, 0),
        "name": run.name,
        "method": method_words(run.plan),
        "seed": whole_at(run.plan, "seed"),
        "group": group_of(run.plan, run.about.get("task"), run.about.get("data")),
        "planned": run.planned,
        "percent": run.percent,
        "metric": _metric(run),
        "gains": compared_by_test(run),
        "rule": asdict(rule) if rule else None,
        "test": asdict(test) if test else None,
        "adapts": adapts(run.plan),
        "clients": [_client(one) for one in run.about["clients"]],
        "class_names": run.about["class_names"],
        "versions": run.about.get("versions") or {},
        "plan": run.plan_text,
        "command": repeat_command("plan.toml", run.about.get("task")),
    }


def progress(run: Run, id: str, spent: PrivacySpent, have: int) -> dict[str, Any]:
    """The values that change while a run goes on, with the rounds after the first `have`."""
    return {
        "id": id,
        "state": run.state,
        "verdict": asdict(verdict(run)),
        "facts": [asdict(group) for group in facts(run)],
        "said": [*map(plain, run.warnings), *run.said],
        "summary": _brief(run.summary, PAGE_SUMMARY),
        "privacy": asdict(spent)
        | {
            "sigma": number_at(run.plan, "environment", "privacy", "sigma"),
            "S": number_at(run.plan, "environment", "privacy", "S"),
        },
        "rounds": [_round(line, run.seconds) for line in run.rounds[have:]],
    }


def _round(line: Mapping[str, Any], seconds: Mapping[int, float]) -> dict[str, Any]:
    scores = line.get("scores")
    own = {"seconds": seconds.get(line["round"]), "scores": _scores(scores) if scores else None}
    found: dict[str, Any] = _brief({**line, **own}, PAGE_ROUND)
    return found


def _scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    clients: Sequence[Mapping[str, Any]] = scores["clients"]
    return {
        **scores,
        "clients": [one["client"] for one in clients],
        "locals": [one["local"] for one in clients],
        "betas": [one.get("beta") for one in clients],
        "clear": "".join("1" if one["clear"] else "0" for one in clients),
    }


def _brief(value: Any, shape: Any, digits: int = EXACT) -> Any:
    """Only the fields that `shape` names, with numbers shortened by `brief_number`."""
    if value is None:
        return None
    shape = kind(shape)
    if shape is NUMBER:
        return brief_number(value, digits)
    if isinstance(shape, dict):
        return {name: _brief(value.get(name), inner) for name, inner in shape.items()}
    if isinstance(shape, MapOf):
        return {name: _brief(item, shape.shape, SHORT) for name, item in value.items()}
    if isinstance(shape, list) and shape[0] is not WHOLE:
        return [_brief(item, shape[0], SHORT) for item in value]
    return value


def _client(one: Mapping[str, Any]) -> dict[str, Any]:
    name = one.get("name") or one.get("role")
    return {
        **{field: one[field] for field in ("client", "train", "test", "attacker", "labels")},
        "name": name if isinstance(name, str) else "",
    }


def _metric(run: Run) -> str:
    """The name of the metric, for an axis. The plan does not name a task's own metric."""
    if not run.percent:
        return "score"
    return word_at(run.plan, "scoring", "metric").replace("_", " ") or "accuracy"


def brief_number(value: float | None, digits: int) -> float | int | None:
    """The number with so many significant digits, because more would not be visible."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


@final
@dataclass(frozen=True)
class PrivacySpent:
    words: str
    epsilon: float | None = None
    delta: float | None = None


def privacy_spent(run: Run) -> PrivacySpent:
    """The budget in the summary, or why there is none. Nothing is computed."""
    if run.summary and run.summary.get("privacy"):
        found = run.summary["privacy"]
        return PrivacySpent(found["words"], found.get("epsilon"), found.get("delta"))
    if word_at(run.plan, "environment", "privacy", "kind") != "gaussian" or not _sigma(run):
        return PrivacySpent("no guarantee: no noise is added")
    return PrivacySpent("not computed yet: the run has not ended")


def privacy_spent_so_far(run: Run) -> PrivacySpent:
    """The budget of the rounds played so far. It takes a second or two, as it imports the plan's components."""
    buffers = run.about.get("float_buffers")
    if not isinstance(buffers, bool):
        return privacy_spent(run)  # an earlier version, whose run.json does not have this field
    if not run.rounds:
        return PrivacySpent("nothing yet: no round was played")
    if not run.about["clients"]:
        return PrivacySpent("not known: run.json names no clients")
    try:
        with naming_extras():
            from lindt.plan.file import from_dict
            from lindt.runs.about import privacy_budget

            plan = from_dict(run.plan)
            clients = run.about.get("population") or len(run.about["clients"])
            found = privacy_budget(plan, clients, list(run.rounds), buffers, run.about)
    except UserError as error:  # the plan is damaged or of another version, or the extra `simulation` is not installed
        return PrivacySpent(f"not known: {error}")
    return PrivacySpent(f"so far {found['words']}", found["epsilon"], found["delta"])


def budget_is_open(run: Run) -> bool:
    """Whether `privacy_spent_so_far` would know more than `privacy_spent`."""
    noisy = word_at(run.plan, "environment", "privacy", "kind") == "gaussian" and bool(_sigma(run))
    return noisy and not (run.summary and run.summary.get("privacy"))


def _sigma(run: Run) -> float | None:
    return number_at(run.plan, "environment", "privacy", "sigma")
