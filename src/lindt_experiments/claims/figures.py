"""The paper's claims about its figures: Delta, detection, recovery and its end. Each claim is one declaration.

Delta has no absolute scale, so every check compares runs at the same rounds with the same epsilon and noise. A
detection counts only together with a healthy control run without an alarm.
"""

from __future__ import annotations

from collections.abc import Iterator

from lindt_experiments.claims.delta import (
    TWO_WORLDS,
    cured_is_no_cause,
    drops,
    fires_and_control_is_silent,
    parts_from_control,
    stops,
)
from lindt_experiments.claims.judging import Claim, Every, Gap
from lindt_experiments.claims.series import NAMES, Around, Roughness, Score, Settled
from lindt_experiments.tables.titles import TASK_TITLES

FIGURES = {"cifar": ("Fig. 3a", "figure3"), "shake": ("Fig. 6", "figure6")}
A_TENTH = 10.0  # percent of the rounds: the smallest difference between settling times that one seed can decide


def claims() -> Iterator[Claim]:
    for task in TASK_TITLES:
        yield from _curves(task)
        yield from _delta(task)
    yield from _recovery()
    yield from _lifted()


def _curves(task: str) -> Iterator[Claim]:
    cells = tuple((task, "nfl", method) for method in ("fedavg", "apfl", "lindt"))
    fedavg, *others = cells
    says = f"{TASK_TITLES[task]}, default NFL: FedAvg's local accuracy fluctuates more than APFL's and LINDT's"
    rough = {NAMES[cell[2]]: Gap(Roughness(fedavg, cells), Roughness(cell, cells)) for cell in others}
    yield Claim(f"{task}-fluctuates", "Fig. 5", says, rough, "figure5")
    says = f"{TASK_TITLES[task]}, default NFL: APFL and LINDT settle sooner than FedAvg"
    soon = {
        NAMES[cell[2]]: Gap(Settled(fedavg), Settled(cell), small=A_TENTH, unit="% of the rounds") for cell in others
    }
    yield Claim(f"{task}-settles", "Fig. 5; 'converge much quicker'", says, soon, "figure5")


def _delta(task: str) -> Iterator[Claim]:
    where, made_by = FIGURES[task]
    pair = tuple((task, world, "fedavg") for world in TWO_WORLDS[task])
    says = f"{TASK_TITLES[task]}: Delta stays above epsilon in NFL and falls below it in normal FL, at the same rounds"
    yield Claim(f"{task}-delta", where, says, {"": Every(pair, parts_from_control)}, made_by)
    says = f"{TASK_TITLES[task]}: detection fires in NFL and not in normal FL"
    yield Claim(f"{task}-detection", where, says, {"": Every(pair, fires_and_control_is_silent)}, made_by)


def _recovery() -> Iterator[Claim]:
    once, persists = ("cifar", "nfl-long", "runtime-once"), ("cifar", "nfl-long", "runtime")
    where = "Fig. 3b"
    says = "CIFAR: recovery lifts local accuracy above the private line"
    parts = {
        "before": Gap(Around(persists, "beta", "detected"), below=True),
        "at the end": Gap(Score(*persists, "beta")),
    }
    yield Claim("cifar-recovery-lifts", where, says, parts, "figure3")
    says = "CIFAR: local accuracy falls back when recovery stops after everyone was treated once"
    fall = Gap(Around(once, "local", "stopped"), Score(*once))
    yield Claim("cifar-once-falls-back", where, says, {"": fall}, "figure3")
    says = "CIFAR: after that stop the system returns to NFL"
    yield Claim("cifar-once-returns-to-nfl", where, says, {"": Gap(Score(*once, "beta"), below=True)}, "figure3")
    says = "CIFAR: persisting recovery keeps what it has gained by the round in which the other rule stops"
    kept = Gap(Score(*persists), Around(persists, "local", "stopped", of=once), at_least=True)
    yield Claim("cifar-persisting-keeps", where, says, {"": kept}, "figure3")
    says = "CIFAR: all-time LINDT is at least as good as both stopping rules"
    best = {
        NAMES[cell[2]]: Gap(Score("cifar", "nfl-long", "lindt"), Score(*cell), at_least=True)
        for cell in (persists, once)
    }
    yield Claim("cifar-all-time-leads", where, says, best, "figure3")
    says = "CIFAR: Delta does not fall merely because recovery is on"
    pair = (persists, ("cifar", "nfl-long", "fedavg"))
    yield Claim("cifar-delta-not-cured", "Fig. 7", says, {"": Every(pair, cured_is_no_cause)}, "figure7")


def _lifted() -> Iterator[Claim]:
    quiet, persists, fedavg = (("cifar", "lifted", method) for method in ("runtime-quiet", "runtime", "fedavg"))
    says = "CIFAR: with the attacks gone Delta drops below epsilon"
    yield Claim("cifar-lifted-delta-drops", "Fig. 8", says, {"": Every((quiet,), drops)}, "figure8")
    says = "CIFAR: with the attacks gone the third rule stops recovery"
    yield Claim("cifar-lifted-stops", "Fig. 9", says, {"": Every((quiet,), stops)}, "figure9")
    says = "CIFAR: stopped by the third rule it ends between FedAvg and persisting recovery"
    between = {
        "above FedAvg": Gap(Score(*quiet), Score(*fedavg)),
        "below persisting": Gap(Score(*persists), Score(*quiet)),
    }
    yield Claim("cifar-lifted-between", "Fig. 9", says, between, "figure9")
