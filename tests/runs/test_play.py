"""A run in its folder: begun, interrupted, resumed, ended, refused."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from worlds import tiny, tiny_runtime

from lindt.errors import UserError
from lindt.plan.plan import Alone, Plan, attackers_of
from lindt.plan.problem import load_task, problem_for, split_validation
from lindt.protocols import Reply
from lindt.report.reading import is_locked, read_run
from lindt.runs.play import PrivateModelTrained, RoundPlayed, RunEnded, RunStarted, private_cost, run_plan
from lindt.runs.store import Store
from lindt.server.detection.gain import Gain

FILES = {"plan.toml", "run.json", "rounds.jsonl", "timing.jsonl", "summary.json", "checkpoint", "private", "lock"}


def finish(plan: Plan | None, folder: Path, **options: object) -> Store:
    *_, last = run_plan(plan, folder, **options)  # type: ignore[arg-type]
    assert isinstance(last, RunEnded)
    return last.store


def test_a_run_is_a_folder(tmp_path: Path) -> None:
    plan = tiny_runtime()
    store = finish(plan, tmp_path / "run")
    assert {path.name for path in store.folder.iterdir()} == FILES
    assert store.plan() == plan
    lines = store.rounds()
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert {"asked", "answered", "refused", "w_div", "delta", "clean", "spread", "clipped", "count"} <= lines[0].keys()
    # patience 1: two rounds above epsilon, flagged after round 2, the dual model trains from round 3.
    assert [line["recovering"] for line in lines] == [False, False, True, True]
    assert "score/relu1" in lines[-1]["scores"]["notes"]
    assert "gradient/head" in lines[-1]["scores"]["notes"]
    summary = store.summary()
    assert summary["detected_at"] == [2]
    assert summary["recovery_rounds"] == 2
    assert summary["beta"] == pytest.approx(lines[-1]["scores"]["beta"])
    assert sum(client["attacker"] for client in store.about["clients"]) == 1
    assert sum(client["train"] + client["test"] for client in store.about["clients"]) == 1797


def test_events_come_in_order(tmp_path: Path) -> None:
    kinds = [type(event) for event in run_plan(tiny(), tmp_path / "run")]
    assert kinds == [RunStarted, *[PrivateModelTrained] * 5, *[RoundPlayed] * 4, RunEnded]


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    plan = tiny_runtime()
    first, second = finish(plan, tmp_path / "a"), finish(plan, tmp_path / "b")
    assert (first.folder / "rounds.jsonl").read_bytes() == (second.folder / "rounds.jsonl").read_bytes()
    other = finish(tiny_runtime(seed=1), tmp_path / "c")
    assert (first.folder / "rounds.jsonl").read_bytes() != (other.folder / "rounds.jsonl").read_bytes()


@pytest.mark.parametrize("played", [0, 1, 3])
def test_stopped_and_resumed_is_straight_through(tmp_path: Path, played: int) -> None:
    plan = tiny_runtime(rounds=5)
    straight = finish(plan, tmp_path / "straight")
    events = run_plan(plan, tmp_path / "run")
    for _ in islice(events, 1 + 5 + played):
        pass
    events.close()
    resumed = finish(None, tmp_path / "run", resume=True)
    for name in ("rounds.jsonl", "summary.json"):
        assert (resumed.folder / name).read_bytes() == (straight.folder / name).read_bytes()


def test_a_line_written_without_its_checkpoint_is_played_again(tmp_path: Path) -> None:
    plan = tiny_runtime(rounds=5)
    straight = finish(plan, tmp_path / "straight")
    events = run_plan(plan, tmp_path / "run")
    for _ in islice(events, 1 + 5 + 4):
        pass
    events.close()
    # A crash between the line of round 4 and its checkpoint; half a line of round 5 besides.
    (tmp_path / "run" / "checkpoint" / "round-000004.safetensors").unlink()
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "asked"')
    resumed = finish(None, tmp_path / "run", resume=True)
    assert (resumed.folder / "rounds.jsonl").read_bytes() == (straight.folder / "rounds.jsonl").read_bytes()


def test_resume_starts_where_there_is_none_and_leaves_an_ended_run_alone(tmp_path: Path) -> None:
    store = finish(tiny(), tmp_path / "run", resume=True)
    before = (store.folder / "rounds.jsonl").stat().st_mtime_ns
    (ended,) = run_plan(None, tmp_path / "run", resume=True)
    assert isinstance(ended, RunEnded)
    assert ended.summary == store.summary()
    assert (store.folder / "rounds.jsonl").stat().st_mtime_ns == before


def test_what_is_saved_is_not_overwritten(tmp_path: Path) -> None:
    store = finish(tiny(), tmp_path / "run")
    kept = (store.folder / "rounds.jsonl").read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        next(run_plan(tiny(), tmp_path / "run"))
    with pytest.raises(UserError, match="another plan"):
        next(run_plan(tiny(seed=5), tmp_path / "run", resume=True))
    with pytest.raises(UserError, match="no plan was given to start one"):
        next(run_plan(None, tmp_path / "nowhere", resume=True))
    assert (store.folder / "rounds.jsonl").read_bytes() == kept


def test_two_processes_on_one_run_are_refused(tmp_path: Path) -> None:
    events = run_plan(tiny(), tmp_path / "run")
    next(events)
    with pytest.raises(UserError, match="another process"):
        next(run_plan(None, tmp_path / "run", resume=True))
    events.close()
    finish(None, tmp_path / "run", resume=True)


def test_without_its_lock_a_run_is_still_taken(tmp_path: Path) -> None:
    events = run_plan(tiny(), tmp_path / "run")
    next(events)
    (tmp_path / "run" / "lock").unlink()
    with pytest.raises(UserError, match="another process"):
        next(run_plan(None, tmp_path / "run", resume=True))
    assert is_locked(tmp_path / "run")  # readers see it too
    events.close()
    assert not is_locked(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("run.json", b"{", "no readable run.json"),
        ("run.json", b'{"format": 99}', "another format"),
        ("rounds.jsonl", b"{damaged}\n", "damaged line"),
        ("rounds.jsonl", b"", "0 of the 2 rounds"),
        ("rounds.jsonl", b'[1]\n{"round": 2}\n', "damaged line"),
        ("run.json", b'{"format": 1}', "run.json is damaged"),
        ("plan.toml", b"\xff\xfe", "cannot be read"),
        ("summary.json", b"{}", "summary.json is damaged"),
        ("plan.toml", b"rounds = 'x'", "rounds = 'x': give a whole number"),
    ],
)
def test_a_damaged_folder_gets_a_sentence(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    events = run_plan(tiny(), tmp_path / "run")
    for _ in islice(events, 1 + 5 + 2):
        pass
    events.close()
    (tmp_path / "run" / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        list(run_plan(None, tmp_path / "run", resume=True))


def test_a_damaged_checkpoint_is_put_aside_and_costs_a_round(tmp_path: Path) -> None:
    finish(tiny(), tmp_path / "straight")
    events = run_plan(tiny(), tmp_path / "run")
    for _ in islice(events, 1 + 5 + 2):
        pass
    events.close()
    folder = tmp_path / "run" / "checkpoint"
    (folder / "round-000002.safetensors").write_bytes(b"\0" * 64)
    started = next(again := run_plan(None, tmp_path / "run", resume=True))
    assert isinstance(started, RunStarted)
    assert started.round == 1
    (said,) = started.store.said
    assert "round-000002.safetensors is damaged" in said
    assert said.endswith("it was renamed to .damaged, and the run continues from round 1")
    assert (folder / "round-000002.damaged").read_bytes() == b"\0" * 64
    list(again)
    assert (tmp_path / "run/rounds.jsonl").read_bytes() == (tmp_path / "straight/rounds.jsonl").read_bytes()


def test_with_no_whole_checkpoint_nothing_is_touched(tmp_path: Path) -> None:
    events = run_plan(tiny(), tmp_path / "run")
    for _ in islice(events, 1 + 5 + 2):
        pass
    events.close()
    for path in (tmp_path / "run" / "checkpoint").iterdir():
        path.write_bytes(b"\0" * 64)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="every older checkpoint is damaged too"):
        list(run_plan(None, tmp_path / "run", resume=True))
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_an_unwritable_folder_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        next(run_plan(tiny(), tmp_path / "file" / "run"))


def test_private_models_are_trained_once_for_all_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lindt.client.private_models import PrivateTraining

    trained: list[str] = []
    real = PrivateTraining.learn
    monkeypatch.setattr(PrivateTraining, "learn", lambda lesson: trained.append(lesson.name) or real(lesson))
    finish(tiny("fedavg"), tmp_path / "a", cache=tmp_path / "cache")
    finish(tiny("apfl"), tmp_path / "b", cache=tmp_path / "cache")
    (attacker,) = attackers_of(tiny(), 6)  # whose gain does not count, so that it needs no private model
    assert trained == [f"client {i}" for i in range(6) if i != attacker]


def test_rounds_have_no_clock_times(tmp_path: Path) -> None:
    store = finish(tiny(), tmp_path / "run")
    timing = [json.loads(line) for line in (store.folder / "timing.jsonl").read_text().splitlines()]
    assert [line["round"] for line in timing] == [1, 2, 3, 4]
    assert all(line["seconds"] > 0 for line in timing)
    assert "seconds" not in (store.folder / "rounds.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nocolon", "package.module:function"),
        ("no.such:thing", "No module"),
        ("json:nothing", "has no function nothing"),
    ],
)
def test_a_task_that_is_not_there(name: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load_task(name)


def test_a_task_that_is_no_problem() -> None:
    with pytest.raises(UserError, match=r"returned an object of type str; return a lindt\.Problem"):
        load_task("platform:node")


def test_the_cost_of_a_private_model_is_said_in_multiples_of_the_federated_work() -> None:
    # 4 rounds in which 3 of 6 clients answer: 2 visits of one epoch of 20 samples. Alone 200 samples: 5 times that.
    assert private_cost(tiny(), 6, Reply(0, 0, 20, notes={"samples_seen": 200.0})) == 5.0
    assert private_cost(tiny(), 6, Reply(0, 0, 20)) is None


def test_a_run_says_what_private_models_took(tmp_path: Path) -> None:
    plan = tiny(detection=Gain(), alone=Alone(epochs=3, patience=3))
    costs = {e.client: e.cost for e in run_plan(plan, tmp_path / "run") if isinstance(e, PrivateModelTrained)}
    assert sorted(costs) == [0, 1, 2, 3, 4, 5]  # attackers too: they report
    problem = problem_for(plan)
    for client, cost in costs.items():
        train, _ = split_validation(plan, problem, client)
        assert cost is not None
        # All three epochs choose, on nine tenths; the chosen ones, 1 to 3, are trained again. 2 visits a client.
        # A P_i is trained without V_i, and one with it.
        sizes = len(train), len(problem.data[client][0])
        choosing = sum(3 * (size - max(1, round(0.1 * size))) for size in sizes)
        again = {float(sizes[0] * one + sizes[1] * two) for one in (1, 2, 3) for two in (1, 2, 3)}
        assert round(cost * 2 * len(train) - choosing, 6) in again


def test_a_run_that_is_left_is_stopped_and_the_mark_goes_when_it_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    events = run_plan(tiny(rounds=3), folder, engine="inprocess")
    assert next(event for event in events if isinstance(event, RoundPlayed)).result.round == 1
    assert (read_run(folder).state, "stopped" in json.loads((folder / "run.json").read_text())) == ("running", False)
    events.close()  # type: ignore[attr-defined]
    assert read_run(folder).state == "stopped"
    resumed = run_plan(None, folder, engine="inprocess", resume=True)
    next(resumed)
    assert "stopped" not in json.loads((folder / "run.json").read_text())
    assert isinstance(list(resumed)[-1], RunEnded)
    assert read_run(folder).state == "ended"
