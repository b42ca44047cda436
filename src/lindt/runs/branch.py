"""A run that branches from a kept checkpoint of another run: it takes over the first rounds and plays the rest.

`lindt run --keep-checkpoint 250` keeps the state after round 250, and `lindt run --branch FOLDER` begins with it. The
branch has the bytes of a run that is played straight through. Plans may differ in name, number of rounds, scored rounds
and, where clients only trained w so far, in adaptation and recovery: the rule of recovery is judged again on the
recorded divergence. A plan whose first rounds would differ is refused.

Limits: no v_i is kept, so recovery must not have begun. Runs on a deployment are refused: their noise is secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from lindt.client.adaptations.base import GlobalOnly
from lindt.errors import UserError
from lindt.plan.file import from_run, to_dict
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem
from lindt.protocols import Divergence, Evidence, RecoveryState
from lindt.runs.schema import DIVERGENCE
from lindt.runs.store import Origin, Store, difference, kept_in, load_kept, read_lines, rewrite, save_checkpoint
from lindt.server.state import RunState

STRAIGHT = "play it as a run of its own, without --branch"


@final
@dataclass(frozen=True)
class Branch:
    """The run to branch from, and the round of the kept checkpoint; by default the last one."""

    folder: Path
    round: int | None = None


@final
@dataclass(frozen=True)
class SharedRounds:
    """The rounds of another run as the branch's own run would have played them."""

    state: RunState
    lines: Sequence[Mapping[str, Any]]
    timing: Sequence[Mapping[str, Any]]
    about: Mapping[str, Any]  # `branched` of run.json
    visited: Sequence[Mapping[str, Any]] = ()  # lines of clients.jsonl, of lazy clients
    doubts: Sequence[str] = ()  # warnings: other versions or another kind of machine

    def write(self, store: Store) -> None:
        """Write the rounds into a new run's folder. The checkpoint is last: without it the run plays all rounds."""
        rewrite(store.log.rounds, self.lines)
        rewrite(store.log.timing, self.timing)
        if self.visited:
            rewrite(store.visited, self.visited)
        store.said += [f"{store.folder}: {said}" for said in self.doubts]
        save_checkpoint(store.folder / "checkpoint", replace(self.state, run=store.run), {}, store.origin)


def shared_rounds(branch: Branch, plan: Plan, problem: Problem, origin: Origin, task: str | None) -> SharedRounds:
    """The first rounds of the other run; UserError where this plan would have played them otherwise."""
    other = Store.open(branch.folder)
    other.require_task(task, "branch from")
    if task:
        other.require_data(problem)
    if other.about.get("noise") not in (None, "plan"):
        raise UserError(f"--branch {branch.folder}: the noise of this run is secret; {STRAIGHT}")
    rounds = kept_in(branch.folder)
    if not rounds:
        raise UserError(f"--branch {branch.folder}: it keeps no checkpoint; play it with --keep-checkpoint ROUND")
    r = rounds[-1] if branch.round is None else branch.round
    if r not in rounds:
        raise UserError(f"--at {r}: {branch.folder} keeps the checkpoints of {', '.join(map(str, rounds))}; choose one")
    if r >= plan.rounds:
        raise UserError(f"--branch {branch.folder}: it is kept after round {r}, and the plan has {plan.rounds} rounds")
    loaded = load_kept(branch.folder, other.run, r)
    if loaded.origin is None:
        raise UserError(f"--branch {branch.folder}: its checkpoint does not name its plan; {STRAIGHT}")
    base = from_run(loaded.origin.plan)
    _require_same_rounds(base, plan, r, branch.folder)
    origin.require_same(replace(loaded.origin, plan=origin.plan), branch.folder)
    if loaded.private:
        raise UserError(
            f"--branch {branch.folder}: recovery was on by round {r}, and the v_i of that round are not kept; "
            "keep a checkpoint of an earlier round"
        )
    lines = other.rounds()[:r]
    if [line["round"] for line in lines] != list(range(1, r + 1)):
        raise UserError(f"--branch {branch.folder}: rounds.jsonl lacks some of the first {r} rounds; {STRAIGHT}")
    state: RunState = loaded.state
    if base.method != plan.method:
        lines, recovery = _judged_again(base, plan, lines, len(problem.data), branch.folder)
        state = replace(state, recovery=recovery)
    timing = [line for line in read_lines(branch.folder / "timing.jsonl") if line["round"] <= r]
    visited = [line for line in read_lines(other.visited) if line["round"] <= r]
    about = {"run": other.run, "name": base.name, "round": r}
    return SharedRounds(state, lines, timing, about, visited, tuple(origin.doubts(loaded.origin)))


def require_branch(store: Store, branch: Branch) -> None:
    """Refuse to resume a run that was not begun as this branch."""
    begun = store.about.get("branched") or {}
    at = begun.get("round")
    if begun.get("run") != Store.open(branch.folder).run or branch.round not in (None, at):
        raise UserError(f"{store.folder} was not begun as this branch of {branch.folder}; resume it without --branch")


def _require_same_rounds(base: Plan, plan: Plan, last: int, folder: Path) -> None:
    """Refuse plans that differ in more than the fields which may differ."""
    scoring = replace(base.scoring, every=plan.scoring.every, last=plan.scoring.last)
    ours = plan.method
    method = replace(base.method, adaptation=ours.adaptation, recovery=ours.recovery, after_stop=ours.after_stop)
    moved = replace(base, name=plan.name, rounds=plan.rounds, scoring=scoring, method=method)
    differs = difference(to_dict(plan), to_dict(moved))
    if differs is None and (plan.detection.reports or plan.early_stop.patience):
        # The test of gains depends on the planned rounds and on the flag, an early stop on the models scored.
        differs = difference(
            {"rounds": plan.rounds, "method": to_dict(plan.method)},
            {"rounds": base.rounds, "method": to_dict(base.method)},
        )
    if differs is not None:
        raise UserError(f"--branch {folder}: {differs} in that run, so the rounds up to {last} differ; {STRAIGHT}")
    for r in range(1, last + 1):
        if plan.scored(r) != base.scored(r):
            raise UserError(f"--branch {folder}: only one of the two plans scores round {r}; {STRAIGHT}")


def _judged_again(
    base: Plan, plan: Plan, lines: Sequence[dict[str, Any]], clients: int, folder: Path
) -> tuple[list[dict[str, Any]], RecoveryState]:
    """The lines and the state by the plan's own rule of recovery, on the recorded divergence of each round."""
    recovery, plain = plan.method.recovery, isinstance(plan.method.adaptation, GlobalOnly)
    was_plain = isinstance(base.method.adaptation, GlobalOnly)
    state, found = recovery.begin(), list[dict[str, Any]]()
    for line in lines:
        r = line["round"]
        measured: dict[str, Any] = {name: line.get(name) for name in DIVERGENCE}
        seen = Divergence(**measured) if "delta" in line else None
        after = recovery.judge(state, Evidence(r, seen, frozenset(line["answered"]), clients, plan.rounds))
        # Recovery trains other models, and the round in which it is switched on is scored.
        ours = (state.on and not plain) or after.detections > 0
        if ours or (line["recovering"] and not was_plain) or line["detections"] > 0:
            whose = "of this plan" if ours else "of that run"
            raise UserError(f"--branch {folder}: recovery {whose} begins by round {r}; keep an earlier checkpoint")
        found.append(
            {
                **line,
                "recovering": state.on,
                "flag": after.on,
                "count": after.count,
                "quiet": after.quiet,
                "detections": after.detections,
            }
        )
        state = after
    return found, state
