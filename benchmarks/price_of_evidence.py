"""The cost of the gain test in accuracy, and the best start of recovery.

    python benchmarks/price_of_evidence.py                     # design configurations of the scoreboard, one seed each
    python benchmarks/price_of_evidence.py --most 12 --task digits --task camps

Each federation is played four times with the same seed:

    nothing held out    FedAvg, detection = delta: the clients' accuracy without lindt
    held out            FedAvg, detection = gain: the cost of the validation parts
    warning, verdict    guarded prediction, recovery on_evidence, started by the early warning or by the verdict

The score is the mean accuracy over honest clients of the model that each predicts with, on its test data, over the last
ten scored rounds. Healthy and negative federations, by the sign of beta with `held out`, are reported separately.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from lindt.plan.plan import METHODS, Method, Plan
from lindt.protocols import Adaptation, Recovery
from lindt.registry import component
from lindt.runs.play import RunEnded, run_plan
from lindt.server.detection.divergence import Delta
from lindt_experiments.detectors.configurations import TASKS, configurations


@dataclass(frozen=True)
class Scores:
    beta: float
    local: float
    recovered: bool  # recovery was on in some round


def variants(plan: Plan) -> dict[str, Plan]:
    """The plan of a configuration records FedAvg with detection = gain."""
    guarded = component(Adaptation, "guarded")
    follow = {
        start: Method(guarded, recovery=component(Recovery, "on_evidence", start=start))
        for start in ("warning", "verdict")
    }
    return {
        "nothing held out": replace(plan, detection=Delta(), method=METHODS["fedavg"]),
        "held out": plan,
        **{start: replace(plan, method=method) for start, method in follow.items()},
    }


def played(plan: Plan, folder: Path, cache: Path) -> Scores:
    *_, ended = run_plan(plan, folder, cache=cache, engine="inprocess")
    assert isinstance(ended, RunEnded)
    found = ended.summary
    follows = getattr(plan.method.recovery, "needs_reports", False)
    return Scores(found["beta"], found["local"], follows and found["recovery_rounds"] > 0)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=sorted(TASKS), help="by default all of them")
    parser.add_argument("--most", type=int, default=8, help="configurations a task")
    wanted = parser.parse_args()
    rows: list[dict[str, Scores]] = []
    with tempfile.TemporaryDirectory() as place:
        for task in wanted.task or TASKS:
            design = [one for one in configurations("cpu") if one.task == task and one.part == "design"]
            chosen = design[:: max(1, len(design) // wanted.most)][: wanted.most]
            for number, one in enumerate(chosen):
                runs = variants(one.plan(0))
                where = Path(place) / f"{task}-{number}"
                row = {name: played(plan, where / name, Path(place) / "cache") for name, plan in runs.items()}
                rows.append(row)
                say(f"{one.name}: " + ", ".join(f"{n} {100 * s.local:.1f}" for n, s in row.items()))
    for label, some in (
        ("healthy", [row for row in rows if row["held out"].beta >= 0]),
        ("negative", [row for row in rows if row["held out"].beta < 0]),
    ):
        say(f"\n{label}: {len(some)} federations; local accuracy in points against `held out`, mean (standard error)")
        for name in ("nothing held out", "warning", "verdict"):
            gains = [100 * (row[name].local - row["held out"].local) for row in some]
            if len(gains) > 1:
                worst, on = min(gains), sum(row[name].recovered for row in some)
                say(
                    f"  {name:18s} {fmean(gains):+.2f} ({stdev(gains) / len(gains) ** 0.5:.2f}), least {worst:+.1f}, "
                    f"recovery on in {on}"
                )


if __name__ == "__main__":
    main()
