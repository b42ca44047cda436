"""The privacy budget that a run has spent: from its summary, or for one that has not ended computed from its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lindt.errors import UserError
from lindt.report.kept_plan import number_at, word_at
from lindt.report.reading import Run


@final
@dataclass(frozen=True)
class Spent:
    words: str
    epsilon: float | None = None
    delta: float | None = None


def spent(run: Run) -> Spent:
    """What the files say, at once: the summary's budget, or why there is none."""
    if run.summary and run.summary.get("privacy"):
        found = run.summary["privacy"]
        return Spent(found["words"], found.get("epsilon"), found.get("delta"))
    if word_at(run.plan, "environment", "privacy", "kind") != "gaussian" or not _sigma(run):
        return Spent("no guarantee: no noise is added")
    return Spent("not computed yet: the run has not ended")


def is_open(run: Run) -> bool:
    """Whether `spent_so_far` would know more than `spent`."""
    noisy = word_at(run.plan, "environment", "privacy", "kind") == "gaussian" and bool(_sigma(run))
    return noisy and not (run.summary and run.summary.get("privacy"))


def spent_so_far(run: Run) -> Spent:
    """The budget of the rounds played so far. It takes a second or two, as it imports the plan's components."""
    buffers = run.about.get("float_buffers")
    if not isinstance(buffers, bool):
        return spent(run)  # written before run.json said so
    if not run.rounds:
        return Spent("nothing yet: no round was played")
    from lindt.planfile import from_dict
    from lindt.records import privacy_budget

    try:
        plan = from_dict(run.plan)
        clients = len(run.about["clients"])
        found = privacy_budget(plan, clients, list(run.rounds), buffers)
    except UserError as error:  # a plan of another version, or damaged: its budget is not ours to say
        return Spent(f"not known: {error}")
    return Spent(f"so far {found['words']}", found["epsilon"], found["delta"])


def _sigma(run: Run) -> float | None:
    return number_at(run.plan, "environment", "privacy", "sigma")
