"""A run that continues with other settings would mix models and reports of different data or training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fake_grid import FakeGrid
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from small_apps import arrays, heard

from lindt.errors import UserError
from lindt.flower import NFLDetector, wrap
from lindt.flower.messages import changed_settings, settings_of
from lindt.report.reading import read_run

PROJECT = """
[project]
name = "app"
version = "1.0.0"
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "a:b"
clientapp = "a:c"
[tool.flwr.app.config]
num-server-rounds = 2
iid = 0
learning-rate = 0.1
"""


class GridWithRun(FakeGrid):
    """A Grid with the run's settings, as Flower's own have."""

    overrides: dict[str, Any]

    @property
    def run(self) -> Any:
        return SimpleNamespace(fab_id="me/app", fab_version="1.0.0", fab_hash="0" * 64, override_config=self.overrides)


def named(message: Message, context: Context) -> Message:
    w = message.content["arrays"]["w"].numpy() + 1
    if message.metadata.message_type == "evaluate":
        metrics = MetricRecord({"num-examples": 4, "acc": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)
    metrics = MetricRecord({"num-examples": 4})
    records = {"arrays": arrays(w=w.tolist()), "metrics": metrics}
    return Message(RecordDict(records), reply_to=message)


def named_app() -> ClientApp:
    app = ClientApp()
    app.train()(named)
    app.evaluate()(named)
    return app


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app as `flwr run` installs it on the server."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    folder = tmp_path / "flwr" / "apps" / "me.app.1.0.0.00000000"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)


def play(folder: Path, rounds: int, overrides: dict[str, Any], **configs: Any) -> list[str]:
    grid = GridWithRun(named, 2)
    grid.overrides = {"num-server-rounds": rounds, **overrides}
    with heard() as said:
        NFLDetector(FedAvg(), folder=folder).start(grid, arrays(w=[0.0]), num_rounds=rounds, **configs)
    return said


@pytest.mark.usefixtures("_installed")
class TestOnTheServer:
    def test_more_rounds_continue_and_other_settings_are_refused(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        play(run, 2, {})
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match=r"other settings \(run_config: iid, learning-rate changed\)"):
            play(run, 4, {"iid": 1, "learning-rate": 0.05})
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        said = play(run, 4, {"iid": 0})  # the same value, now on the command line
        assert any("continues after round 2" in text for text in said)

    def test_the_config_that_start_gets_is_compared_too(self, tmp_path: Path) -> None:
        play(tmp_path / "run", 2, {}, train_config=ConfigRecord({"lr": 0.1, "rounds": 2}))
        with pytest.raises(UserError, match=r"train_config: lr changed"):
            play(tmp_path / "run", 4, {}, train_config=ConfigRecord({"lr": 0.2, "rounds": 4}))
        play(tmp_path / "run", 4, {}, train_config=ConfigRecord({"lr": 0.1, "rounds": 4}))

    def test_a_loop_of_the_users_own_is_refused_before_the_first_message(self, tmp_path: Path) -> None:
        def loop(rounds: int, overrides: dict[str, Any]) -> GridWithRun:
            grid = GridWithRun(named, 2)
            grid.overrides = overrides
            detector = NFLDetector(FedAvg(), folder=tmp_path / "run")
            done, w = detector.begin(arrays(w=[0.0]), rounds)
            for r in range(done + 1, rounds + 1):
                replies = grid.send_and_receive(detector.configure_train(r, w, ConfigRecord(), grid))
                w = detector.aggregate_train(r, replies)[0] or w
            return grid

        loop(1, {})
        with pytest.raises(UserError, match="run_config: iid changed"):
            loop(2, {"iid": 1})
        assert len(loop(2, {}).sent) == 2

    def test_no_value_is_stored(self, tmp_path: Path) -> None:
        play(tmp_path / "run", 1, {}, train_config=ConfigRecord({"token": "hunter2"}))
        assert not any(b"hunter2" in path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())


def test_where_clients_alone_see_the_settings_they_set_their_models_aside(tmp_path: Path) -> None:
    """A Grid that does not know the run's settings: no client keeps a P_i of the old data, and the log says so."""
    app = wrap(named_app(), folder=tmp_path / "vault")

    def play(rounds: int, **config: Any) -> list[str]:
        grid = FakeGrid(app, 2, config={"num-server-rounds": rounds, **config})
        with heard() as said:
            NFLDetector(FedAvg(), folder=tmp_path / "run").start(grid, arrays(w=[0.0]), num_rounds=rounds)
        return said

    play(2, iid=0, rate=0.1)
    assert not any("set aside" in text for text in play(3, iid=0, rate=0.1))
    said = play(4, iid=1, rate=0.05)
    for client in (0, 1):
        assert (
            f"! round 4: client {client}: run_config (iid, rate) changed; its models are set aside and trained again"
            in said
        )
    assert sum("the verdict mixes reports of both; give another folder" in text for text in said) == 1
    assert any("settings changed" in note for note in read_run(tmp_path / "run").about["notes"])
    assert len(list(tmp_path.glob("vault/*/*/aside/private"))) == 2


def test_a_client_that_is_only_evaluated_is_heard_too(tmp_path: Path) -> None:
    app = wrap(named_app(), folder=tmp_path / "vault")

    class EvaluatesFirst(FedAvg):
        def configure_train(self, server_round: int, *arguments: Any) -> Any:
            messages = list(super().configure_train(server_round, *arguments))
            return messages if server_round < 3 else messages[:1]

    for rounds, iid in ((2, 0), (3, 1)):
        with heard() as said:
            grid = FakeGrid(app, 2, config={"iid": iid})
            detector = NFLDetector(EvaluatesFirst(), folder=tmp_path / "run")
            detector.start(grid, arrays(w=[0.0]), num_rounds=rounds)
    assert sum("! round 3: client" in text and "run_config (iid) changed" in text for text in said) == 2


def test_what_counts_as_a_number_of_rounds() -> None:
    keys = ["num-server-rounds", "numRounds", "round_length", "ROUNDS", "trainingRounds"]
    assert settings_of(dict.fromkeys(keys, 1)) == {}
    assert list(settings_of({"background": 1, "ground-truth": 2, "lr": 3})) == ["background", "ground-truth", "lr"]
    assert changed_settings({"a": "1", "b": "1"}, {"b": "2", "c": "1"}) == ["a", "b", "c"]
