"""`lindt reproduce settings`: one search for the settings of other methods where their authors' fail, on V_i.

The rule, of 19 November 2026, before any of its runs:

1. Each method of CANDIDATES is played in the default NFL of CIFAR with its authors' settings and the design seeds 10,
   11 and 12, with which nothing else is reported. V_i is held out, and no model trains on it.
2. The score of a run is the gain on V_i of what honest clients predict with over their private models, which train
   without V_i too: the mean over the reports of the last half of the rounds, weighted by their samples. Test data are
   not used.
3. The authors' settings fail if the mean score over the three seeds is below 0: clients would do better alone.
4. Where they fail, and only there, each candidate is played with the same seeds. The settings with the highest mean
   score are used: the authors' where no candidate is higher, and the first of equal ones.
5. The scoreboard of recovery then has a second row of that method, `NAME-searched` (cells.SEARCHED). The row with the
   authors' settings stays.

FL-GUARD has no settings. FedAvg and FedProx are not searched: their clients predict with w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple, final

from lindt.errors import UserError
from lindt.plan.plan import Plan, Scoring
from lindt.protocols import Detection
from lindt.registry import component
from lindt.runs.files import write_whole
from lindt.runs.store import Store, read_lines
from lindt_experiments.boards import Grid
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job
from lindt_experiments.recovery.board import estimate
from lindt_experiments.recovery.cells import SEARCHED, RecoveryCell
from lindt_experiments.recovery.cells import plan_for as plan_on_board
from lindt_experiments.results.kept_lines import KeptLines
from lindt_experiments.tables.sheets import Sheet, as_markdown

NAME: Final = "settings"
TITLE: Final = "the settings of other methods where their authors' fail, searched on validation data"
AUTHORS: Final = "authors"
SCALES: Final = ("smoke", "cpu")
SEEDS: Final = (10, 11, 12)
WORLD: Final = "nfl"
# By method: the fields of its adaptation that each candidate changes.
CANDIDATES: Final[Mapping[str, tuple[Mapping[str, Any], ...]]] = {
    "apfl": ({"alpha": 0.1}, {"alpha": 0.5}, {"v_loss": "own"}),
    "fb": ({"rate": 0.01}, {"rate": 0.1}),
    "ditto": ({"pull": 0.1}, {"pull": 10.0}),
    "fedper": ({"private": ("fc2", "fc3")},),
    "fedrep": ({"rate": 0.02}, {"epochs": 5}),
    "fedbabu": ({"rate": 0.02}, {"epochs": 10}),
    "fedala": ({"layers": 2}, {"eta": 0.1}),
    "fine-tune": ({"rate": 0.1}, {"rate": 0.005}),
}


class SettingCell(NamedTuple):
    world: str
    method: str
    setting: str  # "authors", or the changed fields


@final
@dataclass(frozen=True)
class SettingOutcome:
    """One run: the gain on V_i of what honest clients predict with, over their private models."""

    world: str
    method: str
    setting: str
    scale: str
    seed: int
    plan: str  # content key
    gain: float | None  # a fraction; None where no client reported in recovery
    samples: int  # the validation samples behind it
    command: str
    commit: str
    date: str
    seconds: float

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.world, self.method, self.setting

    @property
    def place(self) -> tuple[tuple[str, str, str], int]:
        return self.cell, self.seed


KEPT: Final = KeptLines(NAME, SettingOutcome, "a run of the search for settings")


def in_words(changed: Mapping[str, Any]) -> str:
    values = {name: "+".join(value) if isinstance(value, tuple) else value for name, value in changed.items()}
    return ", ".join(f"{name} = {value}" for name, value in values.items())


@cache
def cells(scale: str) -> tuple[SettingCell, ...]:
    """The authors' settings of all methods first, then the candidates."""
    if scale not in SCALES:
        raise UserError(f"--scale {scale}: the search has {' and '.join(SCALES)}")
    authors = [SettingCell(WORLD, method, AUTHORS) for method in CANDIDATES]
    others = [SettingCell(WORLD, method, in_words(one)) for method, found in CANDIDATES.items() for one in found]
    return (*authors, *others)


@cache
def plan_for(cell: SettingCell, scale: str, seed: int) -> Plan:
    """The scoreboard's plan of the method, with V_i held out and with these settings."""
    plan = plan_on_board(RecoveryCell(cell.world, cell.method), scale, seed)
    changed = next((one for one in CANDIDATES[cell.method] if in_words(one) == cell.setting), {})
    adaptation: Any = plan.method.adaptation
    return replace(
        plan,
        name=f"settings-{cell.method}-{(AUTHORS, *map(in_words, CANDIDATES[cell.method])).index(cell.setting)}-{scale}",
        method=replace(plan.method, adaptation=replace(adaptation, **changed)),
        detection=component(Detection, "gain"),
        alone=replace(plan.alone, with_validation=False),
        scoring=Scoring(every=plan.rounds, last=1),
    )


def gain_on_validation(lines: Sequence[Mapping[str, Any]]) -> tuple[float | None, int]:
    """The mean gain of the reports of the last half of the rounds, by sample, and the number of samples."""
    late = lines[len(lines) // 2 :]
    found = [(one["adapted_private"]["mean"], one["samples"]) for line in late for one in line["reports"] or ()
             if one["adapted_private"] is not None]  # fmt: skip
    samples = sum(n for _, n in found)
    return (sum(mean * n for mean, n in found) / samples if samples else None), samples


def outcome_of(cell: SettingCell, job: Job, scale: str, origin: Origin) -> SettingOutcome:
    gain, samples = gain_on_validation(Store.open(job.folder).rounds())
    seconds = round(sum(float(line["seconds"]) for line in read_lines(job.folder / "timing.jsonl")), 1)
    return SettingOutcome(*cell, scale, job.plan.seed, job.key, gain, samples,
                          origin.command, origin.commit, origin.date, seconds)  # fmt: skip


def score(kept: Sequence[SettingOutcome], method: str, setting: str) -> float | None:
    """The mean gain over the design seeds; None until all of them are played."""
    gains = {one.seed: one.gain for one in kept if (one.method, one.setting) == (method, setting)}
    known = [gain for seed in SEEDS if (gain := gains.get(seed)) is not None]
    return fmean(known) if len(known) == len(SEEDS) else None


def fails(kept: Sequence[SettingOutcome], method: str) -> bool | None:
    """Whether the authors' settings fail; None until all design seeds are played."""
    found = score(kept, method, AUTHORS)
    return None if found is None else found < 0


def needed(cell: SettingCell, kept: Sequence[SettingOutcome]) -> bool:
    """Candidates are played only where the authors' settings fail."""
    return cell.setting == AUTHORS or fails(kept, cell.method) is True


def chosen(kept: Sequence[SettingOutcome], method: str) -> Mapping[str, Any] | None:
    """The changed fields that are used, empty for the authors'; None while a run is missing."""
    failing = fails(kept, method)
    if failing is None:
        return None
    if not failing:
        return {}
    settings = ({}, *CANDIDATES[method])
    scores = [score(kept, method, in_words(one) or AUTHORS) for one in settings]
    known = [one for one in scores if one is not None]
    return settings[scores.index(max(known))] if len(known) == len(scores) else None


def conclusions(kept: Sequence[SettingOutcome]) -> list[str]:
    """One sentence per method."""
    return [_conclusion(kept, method) for method in CANDIDATES]


def _conclusion(kept: Sequence[SettingOutcome], method: str) -> str:
    failing, found = fails(kept, method), chosen(kept, method)
    if failing is None:
        return f"{method}: not played with all of the seeds {', '.join(map(str, SEEDS))}."
    if not failing:
        return f"{method}: its authors' settings stay."
    if found is None:
        return f"{method}: its authors' settings fail; candidates are left to play."
    if not found:
        return f"{method}: its authors' settings fail, and no candidate is better: they stay."
    name, row = f"{method}-searched", "" if f"{method}-searched" in SEARCHED else "; cells.SEARCHED lacks it"
    return f"{method}: its authors' settings fail; {in_words(found)} is used, as {name}{row}."


def path_of(results: Path, scale: str) -> Path:
    return results / "tables" / f"{scale}-settings.md"


def write(kept: Sequence[SettingOutcome], scale: str, results: Path) -> Path:
    path = path_of(results, scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for cell in cells(scale):
        mine = {one.seed: one for one in kept if one.cell == cell}
        if mine:
            gains = [_points(mine[seed].gain if seed in mine else None) for seed in SEEDS]
            mean = _points(score(kept, cell.method, cell.setting))
            samples = f"{sum(one.samples for one in mine.values()):,}"
            rows.append((f"`{cell.method}`", cell.setting, *gains, mean, samples))
    columns = ("method", "settings", *(f"seed {seed}" for seed in SEEDS), "mean", "samples")
    sheet = Sheet("Gain on V_i over training alone, in points", columns, tuple(rows), tuple(conclusions(kept)))
    commits = ", ".join(sorted({one.commit for one in kept}))
    command = f"lindt reproduce {NAME} --scale {scale} --seeds {len(SEEDS)}"
    origin = (
        f"Written by `{command}` from `results/{NAME}-{scale}.jsonl`: {len(kept)} runs, commit {commits}. "
        "Test data are not used."
    )
    write_whole(path, as_markdown([sheet], "Settings of other methods", [origin, _rule()]).encode())
    return path


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f}"


def _rule() -> str:
    """The rule of this module's docstring, as one paragraph a point."""
    assert __doc__ is not None
    return __doc__.partition("\n\n")[2].strip()


GRID: Final = Grid(
    NAME, cells, plan_for, KEPT, outcome_of, write, conclusions, estimate,
    short=lambda scale: scale == "smoke", first_seed=SEEDS[0], needed=needed,
)  # fmt: skip
