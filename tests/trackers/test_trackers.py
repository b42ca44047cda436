"""What trackers are told, and what a failing one costs: nothing but itself."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from folders import helps, hurts, mended, plan, summary, undecided
from worlds import tiny

from lindt.errors import UserError
from lindt.runs.play import RunEnded, run_plan
from lindt.trackers import base, mlflow_, tensorboard_
from lindt.trackers.base import check_trackers, end_values, round_values, settings, track_events


def test_a_round_by_name() -> None:
    lines = mended()
    assert round_values(lines[0]) == {
        "detection/delta": 0.2, "detection/w_div": 0.5, "detection/clean": 0.3, "detection/spread": 0.3,
        "detection/clipped": 0.0, "detection/noise_norm": 0.3, "detection/count": 1.0, "detection/recovering": 0.0,
        "clients/answered": 2.0, "clients/refused": 0.0,
    }  # fmt: skip
    last = round_values(lines[-1])
    assert (last["scores/beta"], last["scores/clearly_harmed"]) == (pytest.approx(0.32 / 3), 0.0)
    assert (last["adaptation/score/fc1"], last["detection/recovering"]) == (0.9, 1.0)
    assert "attack/local" not in last  # nobody attacks


def test_the_verdict_is_a_number() -> None:
    last = hurts(recovering=True)[-1]
    found = {name: value for name, value in round_values(last).items() if name.startswith("detection/")}
    told = {"verdict": -1, "since": 4, "gain": -0.12, "gain_error": 0.01, "validation_samples": 400, "warning": 2}
    assert found.items() >= {f"detection/{name}": value for name, value in told.items()}.items()
    assert (found["detection/recovery"], found["detection/recovered"]) == (1, 1)
    assert round_values(undecided()[-1])["detection/verdict"] == 0
    assert "detection/verdict" not in round_values(mended()[-1])
    end = end_values(summary(helps(), detection=helps()[-1]["detection"]))
    assert (end["end/verdict"], end["end/since"], end["end/median_gain"]) == (1, 5, 0.1)


def test_the_end_and_the_settings() -> None:
    found = end_values(summary(mended(), detected_at=[3]))
    assert (found["end/detected_at"], found["end/local"]) == (3.0, pytest.approx(0.8 + 0.32 / 3))
    assert "end/detected_at" not in end_values(summary(mended(), detected_at=None))
    flat = settings(plan())
    assert (flat["method.recovery.epsilon"], flat["rounds"]) == (0.1, 10)


class Heard:
    """A tracker that keeps what it is told."""

    def __init__(self, fails_at: int = 0) -> None:
        self.told: list[object] = []
        self.fails_at = fails_at

    def round(self, round: int, values: Mapping[str, float]) -> None:
        if round == self.fails_at:
            raise ConnectionError("gone\nfor good")
        self.told.append((round, values["detection/delta"]))

    def end(self, values: Mapping[str, float]) -> None:
        self.told.append("end")

    def close(self) -> None:
        self.told.append("closed")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Heard]:
    trackers = {"good": Heard(), "bad": Heard(fails_at=2)}
    monkeypatch.setattr(base, "TRACKERS", dict.fromkeys(trackers, "json"))
    for name, tracker in trackers.items():
        module = types.ModuleType(name)
        module.open_run = lambda *_, tracker=tracker: tracker  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"lindt.trackers.{name}_", module)
    return trackers


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tmp_path: Path, offered: dict[str, Heard]) -> None:
    said: list[str] = []
    *_, last = track_events(run_plan(tiny(), tmp_path / "run"), ["good", "bad"], said.append)
    assert isinstance(last, RunEnded)
    deltas = [(line["round"], line["delta"]) for line in last.store.rounds()]
    assert offered["good"].told == [*deltas, "end", "closed"]
    assert offered["bad"].told == deltas[:1]
    assert said == ["--track bad failed, and the run goes on without it: ConnectionError gone"]


def test_tracking_changes_no_number(tmp_path: Path, offered: dict[str, Heard]) -> None:
    for name, told in (("a", ["good"]), ("b", [])):
        list(track_events(run_plan(tiny(), tmp_path / name), told, print))
    assert (tmp_path / "a" / "rounds.jsonl").read_bytes() == (tmp_path / "b" / "rounds.jsonl").read_bytes()


def test_a_run_that_is_stopped_closes_its_trackers(tmp_path: Path, offered: dict[str, Heard]) -> None:
    events = track_events(run_plan(tiny(), tmp_path / "run"), ["good"], print)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert offered["good"].told == ["closed"]


def test_a_tracker_that_is_not_there_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="choose among tensorboard, mlflow, wandb"):
        check_trackers(["excel"])
    monkeypatch.setattr(base, "TRACKERS", {"mlflow": "no_such_package"})
    with pytest.raises(UserError, match=r"pip install 'lindt\[mlflow\]'"):
        check_trackers(["mlflow"])


def test_a_run_that_is_resumed_after_its_last_round_keeps_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped between the last round and the summary: no round is left to play."""
    told: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            assert purge_step == 5

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

    class Client:
        def log_batch(self, run_id: str, metrics: Sequence[tuple[str, float, int, int]] = ()) -> None:
            told.extend((name, value, step) for name, value, _, step in metrics)

        def update_run(self, run_id: str, status: str) -> None: ...

    fakes = {"torch.utils.tensorboard": {"SummaryWriter": Writer}, "mlflow": {}, "mlflow.entities": {}}
    fakes["mlflow.entities"] = {"Metric": lambda *fields: fields, "Param": lambda *fields: fields}
    for name, members in fakes.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    tensorboard_.open_run(tmp_path, "id", "plan", {}, done=4).end({"end/beta": 0.5})
    mlflow_.Mlflow(Client(), "id", {}, done=4).end({"end/beta": 0.5})
    assert told == [("end/beta", 0.5, 4)] * 2
