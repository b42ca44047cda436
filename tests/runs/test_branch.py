"""A run that branches from a kept checkpoint has the bytes of a run played straight through, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from worlds import tiny, tiny_runtime

from lindt.errors import UserError
from lindt.plan.models import SmallCnn
from lindt.plan.plan import METHODS, Plan, Scoring
from lindt.runs.branch import Branch
from lindt.runs.play import RunEnded, run_plan
from lindt.runs.store import Store, kept_in, load_checkpoint
from lindt.server.recovery import EveryoneTreated, OnDetection


def finish(plan: Plan | None, folder: Path, **options: Any) -> Store:
    *_, last = run_plan(plan, folder, **options)
    assert isinstance(last, RunEnded)
    return last.store


def runtime(**recovery: Any) -> Plan:
    """The dual model from round 4 on, after three rounds above epsilon."""
    plan = tiny_runtime(patience=2, rounds=6)
    return replace(plan, method=replace(plan.method, recovery=replace(plan.method.recovery, **recovery)))


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """FedAvg, with the checkpoints of rounds 1 and 2 kept."""
    folder = tmp_path_factory.mktemp("kept") / "fedavg"
    return finish(tiny(model=SmallCnn(), rounds=6), folder, keep=[2, 1])


def same_bytes(one: Store, other: Store) -> None:
    for name in ("plan.toml", "rounds.jsonl", "summary.json"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    ours, theirs = (load_checkpoint(store.folder / "checkpoint", store.run) for store in (one, other))
    assert ours is not None
    assert theirs is not None
    assert ours.state.w.equal(theirs.state.w)
    assert ours.state.recovery == theirs.state.recovery
    files = [sorted(path.name for path in (store.private / store.run).rglob("*.safetensors")) for store in (one, other)]
    assert files[0] == files[1]


def test_recovery_branches_from_fedavg_to_the_same_bytes(fedavg: Store, tmp_path: Path) -> None:
    plan = runtime()
    assert kept_in(fedavg.folder) == [1, 2]
    straight = finish(plan, tmp_path / "straight")
    branched = finish(plan, tmp_path / "branch", branch=Branch(fedavg.folder))
    assert [line["recovering"] for line in straight.rounds()] == [False] * 3 + [True] * 3
    assert [line["count"] for line in straight.rounds()][:3] == [1, 2, 3]  # FedAvg's own lines have 0
    same_bytes(branched, straight)
    assert Store.open(branched.folder).about["branched"] == {"run": fedavg.run, "name": "tiny", "round": 2}
    assert "branched" not in Store.open(straight.folder).about


def test_a_branch_of_a_branch_and_one_that_was_stopped(fedavg: Store, tmp_path: Path) -> None:
    first, plan = runtime(), runtime(stop=EveryoneTreated())
    base = finish(first, tmp_path / "base", branch=Branch(fedavg.folder, 1), keep=[1, 3])
    assert kept_in(base.folder) == [1, 3]
    events = run_plan(plan, tmp_path / "branch", branch=Branch(base.folder, 1))
    list(islice(events, 1 + 5 + 1))
    events.close()
    resumed = finish(plan, tmp_path / "branch", branch=Branch(base.folder), resume=True)
    same_bytes(resumed, finish(plan, tmp_path / "straight"))
    with pytest.raises(UserError, match="was not begun as this branch"):
        finish(None, tmp_path / "branch", branch=Branch(fedavg.folder), resume=True)
    # Recovery is switched on after round 3, which is scored for that reason.
    with pytest.raises(UserError, match="recovery of this plan begins by round 3; keep an earlier checkpoint"):
        finish(plan, tmp_path / "late", branch=Branch(base.folder, 3))
    assert not (tmp_path / "late").exists()


def test_a_longer_run_branches_where_its_rounds_are_scored_alike(tmp_path: Path) -> None:
    base, longer = finish(tiny(), tmp_path / "base", keep=[2]), tiny(rounds=5)
    same_bytes(finish(longer, tmp_path / "b", branch=Branch(base.folder)), finish(longer, tmp_path / "straight"))
    with pytest.raises(UserError, match="only one of the two plans scores round 1"):
        finish(replace(longer, scoring=Scoring(every=1)), tmp_path / "c", branch=Branch(base.folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "seed is 1, and was 0 in that run, so the rounds up to 2 differ"),
        ({"training": {"rate": 0.2}}, "training.rate is 0.2, and was 0.1"),
        ({"method": "lindt-tm"}, "method.aggregator"),
        ({"method": "fedprox"}, "method.penalty"),
        ({"method": "lindt"}, "recovery of this plan begins by round 1"),
        ({"rounds": 2}, "it is kept after round 2, and the plan has 2 rounds"),
        ({"detection": "gain"}, "detection"),
        ({"model": "linear"}, "model"),
    ],
)
def test_other_first_rounds_are_refused(fedavg: Store, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    plan = tiny(model=SmallCnn(), rounds=6)
    if "training" in change:
        plan = replace(plan, training=replace(plan.training, **change["training"]))
    elif "method" in change:
        plan = replace(plan, method=METHODS[change["method"]])
    elif "detection" in change:
        from lindt.server.detection.gain import Gain

        plan = replace(plan, detection=Gain())
    else:
        plan = tiny(rounds=6) if "model" in change else replace(plan, **change)
    with pytest.raises(UserError, match=said):
        finish(plan, tmp_path / "run", branch=Branch(fedavg.folder))
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_branched_from_is_said(fedavg: Store, tmp_path: Path) -> None:
    plan = runtime()
    with pytest.raises(UserError, match=r"--at 3: .* keeps the checkpoints of 1, 2; choose one"):
        finish(plan, tmp_path / "run", branch=Branch(fedavg.folder, 3))
    with pytest.raises(UserError, match="--keep-checkpoint 7: the run has rounds 1 to 6"):
        finish(plan, tmp_path / "new", keep=[7])
    plain = finish(tiny(), tmp_path / "plain")
    with pytest.raises(UserError, match="it keeps no checkpoint; play it with --keep-checkpoint ROUND"):
        finish(plan, tmp_path / "run", branch=Branch(plain.folder))
    recovering = finish(replace(plan, method=METHODS["lindt"], rounds=2), tmp_path / "recovering", keep=[1])
    with pytest.raises(UserError, match="recovery was on by round 1, and the v_i of that round are not kept"):
        finish(replace(plan, method=METHODS["lindt"]), tmp_path / "run", branch=Branch(recovering.folder))


def test_a_round_that_was_played_before_cannot_be_kept_any_more(tmp_path: Path) -> None:
    events = run_plan(tiny(), tmp_path / "run")
    list(islice(events, 1 + 5 + 3))
    events.close()
    with pytest.raises(UserError, match=r"--keep-checkpoint 1: .* has played round 3"):
        finish(None, tmp_path / "run", resume=True, keep=[1])
    assert kept_in(finish(None, tmp_path / "run", resume=True, keep=[3]).folder) == [3]  # round 3 is still there


def test_a_damaged_kept_checkpoint_and_an_edited_line_are_refused(fedavg: Store, tmp_path: Path) -> None:
    base = finish(tiny(), tmp_path / "base", keep=[2])
    lines = (base.folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (base.folder / "rounds.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(UserError, match="lacks some of the first 2 rounds"):
        finish(replace(tiny(), rounds=5), tmp_path / "run", branch=Branch(base.folder))
    (path,) = (base.folder / "kept").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged"):
        finish(replace(tiny(), rounds=5), tmp_path / "run", branch=Branch(base.folder))
    assert isinstance(json.loads((base.folder / "run.json").read_text())["keeps"], list)
    assert isinstance(runtime().method.recovery, OnDetection)
