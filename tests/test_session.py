"""A run in Python: played, read, asked for models, stopped, resumed, opened, by the code of the command line."""

from __future__ import annotations

import html
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner
from worlds import tiny

import lindt
from lindt import Plan, Problem, UserError, federate, session
from lindt.cli.main import app
from lindt.client.adaptations.dual import Dual
from lindt.client.adaptations.fine_tune import FineTune
from lindt.client.adaptations.guarded import Guarded
from lindt.client.private_models import PrivateTraining
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.plan.models import SmallCnn
from lindt.plan.plan import METHODS, Alone, Scoring
from lindt.report.reading import read_run
from lindt.report.tables import CLIENT_COLUMNS
from lindt.report.verdict import verdict
from lindt.runs import play
from lindt.runs.play import run_plan
from lindt.server.preflight import PreflightWarning
from lindt.weights import read_w

FLOWER_RUN = Path(__file__).parent / "flower" / "unsealed_run"


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINDT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def pair(client: int, samples: int = 24) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A client's (train, test): label c where feature c is the largest; clients with an odd number call it 2 - c."""
    x = torch.randn(samples + 8, 3, generator=torch.Generator().manual_seed(client))
    y = x.argmax(1) if client % 2 == 0 else 2 - x.argmax(1)
    return (x[:samples], y[:samples]), (x[samples:], y[samples:])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


CLIENTS = [pair(i) for i in range(4)]
OWN: dict[str, Any] = {"clients": CLIENTS, "model": net, "progress": False}


def plan(method: str = "fedavg", **changes: Any) -> Plan:
    """Three scored rounds with everyone; private models of one epoch."""
    found = Plan(
        name="small",
        rounds=3,
        environment=Environment(Sampled(rate=1.0)),
        method=METHODS[method],
        alone=Alone(epochs=1, patience=1),
        scoring=Scoring(every=1, last=1),
    )
    return replace(found, **changes)


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> lindt.Run:
    """A run in which every client keeps a v_i."""
    return lindt.run(plan("lindt"), out=tmp_path_factory.mktemp("mended") / "mine", **OWN)


def copied(run: lindt.Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.folder, tmp_path / "copied"))


class TestResults:
    def test_the_verdict_is_the_sentence_of_lindt_show(self, mended: lindt.Run) -> None:
        found = mended.verdict
        assert str(found) == found.sentence == verdict(read_run(mended.folder)).sentence
        said = CliRunner().invoke(app, ["show", str(mended.folder)]).output
        assert said.startswith(str(found))
        betas = {one["client"]: one["beta"] for one in last_line(mended)["scores"]["clients"]}
        assert (found.better, found.unchanged, found.worse) == (
            sum(beta > 0 for beta in betas.values()),
            sum(beta == 0 for beta in betas.values()),
            sum(beta < 0 for beta in betas.values()),
        )
        assert found.round == 3

    def test_tables_hold_what_lindt_table_writes(self, mended: lindt.Run, tmp_path: Path) -> None:
        scores, rounds = mended.scores, mended.rounds
        assert list(scores.columns) == list(CLIENT_COLUMNS)
        assert list(scores["client"]) == [0, 1, 2, 3]
        assert set(scores["round"]) == {3}
        assert list(scores["local"]) == [one["local"] for one in last_line(mended)["scores"]["clients"]]
        assert list(rounds["round"]) == [1, 2, 3]
        for per, table in (("round", rounds), ("client", scores)):
            out = tmp_path / f"{per}.csv"
            assert CliRunner().invoke(app, ["table", str(mended.folder), "--per", per, "-o", str(out)]).exit_code == 0
            assert out.read_text().splitlines()[0].split(",") == list(table.columns)

    def test_the_plan_the_summary_and_the_name(self, mended: lindt.Run) -> None:
        assert mended.plan == plan("lindt")
        assert mended.summary == json.loads((mended.folder / "summary.json").read_text())
        assert mended.state == "ended"
        assert repr(mended) == f"Run({str(mended.folder)!r}, ended, round 3 of 3, {mended.verdict.headline})"
        assert "\n" not in repr(mended)

    def test_a_notebook_shows_the_verdict_as_text(self, mended: lindt.Run) -> None:
        shown = mended.verdict._repr_html_()
        assert html.escape(mended.verdict.headline) in shown
        assert html.escape(mended.verdict.sentence) in shown

    def test_a_notebook_shows_the_verdict_and_the_scores(self, mended: lindt.Run) -> None:
        shown = mended._repr_html_()
        assert mended.verdict.headline in shown
        assert shown.count("<tr>") == 1 + 4
        assert f"better off {mended.verdict.better}, unchanged" in shown

    def test_names_from_files_are_escaped(self, mended: lindt.Run, tmp_path: Path) -> None:
        folder = copied(mended, tmp_path)
        about = json.loads((folder / "run.json").read_text())
        about["clients"][0]["name"] = about["name"] = "<script>alert(1)</script>"
        (folder / "run.json").write_text(json.dumps(about))
        shown = lindt.open(folder)._repr_html_()
        assert "<script>" not in shown
        assert shown.count("&lt;script&gt;") == 2

    def test_the_page_and_the_list_of_runs_have_it(self, mended: lindt.Run, tmp_path: Path) -> None:
        assert mended.report(tmp_path / "page.html") == tmp_path / "page.html"
        assert CliRunner().invoke(app, ["report", str(mended.folder), "-o", str(tmp_path / "cli.html")]).exit_code == 0
        assert (tmp_path / "page.html").read_bytes() == (tmp_path / "cli.html").read_bytes()
        assert "ended" in CliRunner().invoke(app, ["runs", str(mended.folder.parent)]).output

    def test_a_folder_that_is_gone_has_a_name_still(self, tmp_path: Path) -> None:
        assert repr(lindt.Run(tmp_path / "gone")) == f"Run({str(tmp_path / 'gone')!r}, unreadable)"
        with pytest.raises(UserError, match="gone is not a run"):
            lindt.open(tmp_path / "gone")


def last_line(run: lindt.Run) -> dict[str, Any]:
    return dict(json.loads((run.folder / "rounds.jsonl").read_text().splitlines()[-1]))


class TestModels:
    def test_predictions_score_what_the_run_recorded(self, mended: lindt.Run) -> None:
        for client, (_, (x, y)) in enumerate(CLIENTS):
            outputs = mended.predict(client, x)
            assert not outputs.requires_grad
            hits = float((outputs.argmax(1) == y).double().mean())
            assert hits == last_line(mended)["scores"]["clients"][client]["local"]

    def test_arrays_and_lists_are_taken_too(self, mended: lindt.Run) -> None:
        x = CLIENTS[0][1][0]
        expected = mended.predict(0, x)
        assert torch.equal(mended.predict(0, x.double().numpy()), expected)
        assert torch.equal(mended.predict(np.int64(0), x.tolist()), expected)

    def test_a_loader_or_a_dataset_gives_all_its_inputs_in_order(self, mended: lindt.Run) -> None:
        x, y = CLIENTS[0][1]
        expected, data = mended.predict(0, x), TensorDataset(x, y)
        for given in (data, DataLoader(data, batch_size=3), DataLoader(data, batch_size=3, drop_last=True)):
            assert torch.allclose(mended.predict(0, given), expected, atol=1e-6)
        with pytest.raises(UserError, match="x: the DataLoader draws its samples at random; give one without shuffle"):
            mended.predict(0, DataLoader(data, shuffle=True))

    @pytest.mark.parametrize(
        ("x", "complaint"),
        [
            (torch.zeros(3), r"x: it has shape \(3,\) of torch.float32, and a sample of the client has shape \(3,\)"),
            (torch.zeros(5, 2), r"does not take shape \(5, 2\) of torch.float32 .*; a sample .* has shape \(3,\)"),
            (torch.zeros(5, 3).double(), r"take shape \(5, 3\) of torch.float64 .* has shape \(3,\) of torch.float32"),
            (pair(0)[1], r"does not take shape \(8, 3\) of torch.float32, \(8,\) of torch.int64"),
            ([["a"]], "x: no inputs can be read from an object of type list"),
        ],
        ids=["no batch", "features", "float64", "a pair", "texts"],
    )
    def test_inputs_that_do_not_fit_are_told_beside_those_that_do(
        self, mended: lindt.Run, x: object, complaint: str
    ) -> None:
        with pytest.raises(UserError, match=complaint) as caught:
            mended.predict(1, x)
        assert "\n" not in str(caught.value)

    def test_each_client_has_its_own_model_and_no_call_changes_another(self, mended: lindt.Run) -> None:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(9))
        first = mended.model(0)
        assert not first.training
        with torch.no_grad():
            before = first(x)
            others = [mended.model(client)(x) for client in range(4)]
            assert torch.equal(first(x), before)
            assert torch.equal(others[0], before)
            assert not any(torch.equal(other, before) for other in others[1:])
            for parameter in mended.model(0).parameters():
                parameter.zero_()
        assert torch.equal(mended.predict(0, x), before)

    def test_the_global_model_has_the_last_w(self, mended: lindt.Run) -> None:
        *_, (state, _) = federate(plan("lindt"), clients=CLIENTS, model=net)
        assert torch.equal(read_w(mended.global_model()), state.w)
        assert not mended.global_model().training

    def test_it_predicts_for_a_dataset_that_is_not_torchs(self, mended: lindt.Run) -> None:
        class Rows:
            """As a dataset of Hugging Face: a length, an index, a shape, rows as dicts."""

            shape = (3, 2)

            def __len__(self) -> int:
                return 3

            def __getitem__(self, row: int) -> dict[str, Any]:
                return {"x": CLIENTS[1][1][0][row].tolist(), "label": 0}

        assert torch.equal(mended.predict(1, Rows()), mended.predict(1, CLIENTS[1][1][0][:3]))

    def test_an_export_predicts_the_same_without_lindt(self, mended: lindt.Run, tmp_path: Path) -> None:
        x = CLIENTS[1][1][0]
        about = mended.export(1, tmp_path / "client")
        found = torch.export.load(tmp_path / "client" / "model.pt2").module()(x)
        assert torch.allclose(found, mended.predict(1, x), atol=1e-6)
        assert about["recorded_score"] == about["score"]
        with pytest.raises(UserError, match="client exists already"):
            mended.export(1, tmp_path / "client")

    def test_a_client_that_is_not_there_is_named(self, mended: lindt.Run) -> None:
        for client in (4, -1):
            with pytest.raises(UserError, match=f"client {client}: the run has clients 0 to 3"):
                mended.model(client)
        with pytest.raises(UserError, match=r"client 'Berlin': no clients of .* have this name; give a number from 0"):
            mended.predict("Berlin", CLIENTS[0][1][0])

    @pytest.mark.parametrize("client", [1.5, None, [1], torch.tensor([1.5])], ids=["half", "none", "list", "tensor"])
    def test_a_client_is_a_number_or_a_name(self, client: Any, mended: lindt.Run) -> None:
        said = f"it is of type {type(client).__name__}; give a client's number, or its name as text"
        for ask in (mended.model, mended.export, lambda one: mended.predict(one, CLIENTS[0][1][0])):
            with pytest.raises(UserError, match=said):
                ask(client)

    def test_a_method_without_a_whole_global_model_has_none(self, tmp_path: Path) -> None:
        run = lindt.run(plan("fedper", rounds=1), out=tmp_path / "run", **OWN)
        with pytest.raises(UserError, match=r"share only a part of the model.*take the model of a client"):
            run.global_model()
        assert run.predict(0, CLIENTS[0][1][0]).shape == (8, 3)


@contextmanager
def task_module(problem: Any) -> Iterator[str]:
    module = ModuleType("session_task")
    module.problem = problem  # type: ignore[attr-defined]
    sys.modules["session_task"] = module
    try:
        yield "session_task:problem"
    finally:
        del sys.modules["session_task"]


class TestPlaying:
    def test_it_is_the_run_of_the_command_line_to_the_byte(self, tmp_path: Path, mended: lindt.Run) -> None:
        with task_module(lambda: Problem(CLIENTS, net)) as task:
            list(run_plan(plan("lindt"), tmp_path / "run", task=task, engine="inprocess"))
        assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == (mended.folder / "rounds.jsonl").read_bytes()

    def test_a_problem_is_as_good_as_its_parts(self, tmp_path: Path, mended: lindt.Run) -> None:
        run = lindt.run(plan("lindt"), problem=Problem(CLIENTS, net), out=tmp_path / "run", progress=False)
        assert (run.folder / "rounds.jsonl").read_bytes() == (mended.folder / "rounds.jsonl").read_bytes()

    def test_presets_files_and_overrides(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        changes = {"rounds": 1, "alone.epochs": 1, "training.rate": 0.05}
        run = lindt.run(overrides=changes, **OWN)
        assert run.folder == Path("runs/own-task-seed0")
        assert (run.plan.rounds, run.plan.training.rate) == (1, 0.05)
        again = lindt.run(run.folder / "plan.toml", overrides={"seed": 3}, **OWN)
        assert again.folder == Path("runs/own-task-seed3")
        assert again.plan == replace(run.plan, seed=3)

    def test_the_plans_own_data_are_used_where_none_are_given(self, tmp_path: Path) -> None:
        own = tiny("lindt", rounds=1, model=SmallCnn(), alone=Alone(private=False))
        run = lindt.run(own, out=tmp_path / "run", progress=False, preflight=False)
        list(run_plan(own, tmp_path / "cli", engine="inprocess", preflight=False))
        assert (tmp_path / "cli" / "rounds.jsonl").read_bytes() == (run.folder / "rounds.jsonl").read_bytes()
        opened = lindt.open(tmp_path / "cli")
        assert torch.equal(read_w(opened.global_model()), read_w(run.global_model()))
        assert opened.predict(0, torch.zeros(2, 1, 8, 8)).shape == (2, 10)
        with pytest.raises(UserError, match="the data and model that its plan names; to take models from it, give no"):
            lindt.open(tmp_path / "cli", clients=CLIENTS, model=net).model(0)

    def test_a_task_is_built_from_its_name(self, tmp_path: Path) -> None:
        with task_module(lambda: Problem(CLIENTS, net)) as task:
            run = lindt.run(plan(), task=task, out=tmp_path / "run", progress=False)
            assert json.loads((run.folder / "run.json").read_text())["task"] == task
            assert torch.equal(
                lindt.open(run.folder, task=task).predict(0, CLIENTS[0][1][0]), run.predict(0, CLIENTS[0][1][0])
            )
            words = ["export", str(run.folder), "--client", "0", "--task", task, "-o", str(tmp_path / "out")]
            assert CliRunner().invoke(app, words).exit_code == 0
        with pytest.raises(
            UserError, match="was run with the task session_task:problem; to take models from it, give the same"
        ):
            lindt.open(run.folder).model(0)

    def test_further_fields_of_a_problem_pass_through(self, tmp_path: Path) -> None:
        names = ("Bern", "Berlin", "Bonn", "Basel")
        run = lindt.run(plan(rounds=1), out=tmp_path / "run", client_names=names, class_names=("a", "b", "c"), **OWN)
        about = json.loads((run.folder / "run.json").read_text())
        assert about["class_names"] == ["a", "b", "c"]
        x = CLIENTS[1][1][0]
        assert torch.equal(run.predict("Berlin", x), run.predict(1, x))
        assert "1 Berlin" in run._repr_html_()
        assert tuple(run.scores["client_name"]) == names
        for wrong, said in (
            ((7, 8, 9, 10), "7 is of type int; give texts"),
            ("abcd", "it is of type str; give a list"),
            (("a", "b", "b", "c"), "2 clients are named 'b'; give each client its own name"),
        ):
            with pytest.raises(UserError, match=f"client_names: {said}"):
                Problem(CLIENTS, net, client_names=wrong)  # type: ignore[arg-type]
        about["clients"][3]["name"] = "Bonn"  # a Flower app may name two nodes alike
        (run.folder / "run.json").write_text(json.dumps(about))
        with pytest.raises(UserError, match=r"client 'Bonn': 2 clients of .* have this name"):
            run.model("Bonn")

    def test_any_module_can_recover_and_a_chosen_method_is_left_alone(self, tmp_path: Path) -> None:
        small = {"rounds": 1, "alone.epochs": 1}
        run = lindt.run(overrides=small, out=tmp_path / "own", **OWN)
        assert run.plan.method.adaptation == Guarded(adaptation=Dual())  # a Sequential has attach points
        linear = OWN | {"model": lambda: nn.Linear(3, 3)}
        run = lindt.run(overrides=small, out=tmp_path / "linear", **linear)
        assert run.plan.method.adaptation == Guarded(adaptation=FineTune())
        assert run.plan.method.recovery == lindt.resolve("own-task").method.recovery
        with pytest.raises(
            lindt.PlanError, match=r"a Linear has no default attach points; .* 'guarded-fine-tune', which"
        ):
            lindt.run(overrides=small | {"method": "guarded"}, out=tmp_path / "guarded", **linear)
        assert not (tmp_path / "guarded").exists()

    @pytest.mark.parametrize("before", [[], [nn.Flatten()]], ids=["a layer", "behind a Flatten"])
    def test_a_sequential_of_one_layer_has_no_attach_point(self, before: list[nn.Module], tmp_path: Path) -> None:
        one = OWN | {"model": lambda: nn.Sequential(*before, nn.Linear(3, 3)), "overrides": {"rounds": 1}}
        run = lindt.run(out=tmp_path / "own", **one)
        assert run.plan.method.adaptation == Guarded(adaptation=FineTune())
        one["overrides"]["method"] = "lindt-always"
        with pytest.raises(
            lindt.PlanError, match="a model of one layer has no attach point; name points, add a"
        ) as found:
            lindt.run(out=tmp_path / "dual", **one)
        assert str(found.value).endswith('which needs none: overrides={"method": "guarded-fine-tune"}')

    @pytest.mark.parametrize("name", ["training.rate", "training.optimizer"])
    def test_a_rate_that_would_have_no_effect_is_refused(self, name: str, tmp_path: Path) -> None:
        value = {"training.rate": 0.5, "training.optimizer": "adam"}[name]
        with pytest.raises(UserError, match=rf"overrides: {name} has no effect with optimizer="):
            lindt.run(plan(), overrides={name: value}, optimizer=torch.optim.SGD, out=tmp_path / "run", **OWN)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("given", ["clients", "problem", "task"])
    @pytest.mark.parametrize(
        "overrides",
        [{"data.clients": 10}, {"data.source": "mnist-small"}, {"data": {"clients": 10}}, {"model": "lstm"}],
        ids=str,
    )
    def test_fields_that_the_given_data_replace_are_refused(
        self, overrides: dict[str, object], given: str, tmp_path: Path
    ) -> None:
        (name,) = overrides
        texts = [f"{name}={value}" for name, value in overrides.items() if not isinstance(value, dict)]
        with task_module(lambda: Problem(CLIENTS, net)) as task:
            own = {"clients": OWN, "problem": {"problem": Problem(CLIENTS, net)}, "task": {"task": task}}[given]
            for changes in (overrides, texts) if texts else (overrides,):
                with pytest.raises(UserError, match=f"overrides: {name} has no effect with {given}=, which gives data"):
                    lindt.run(plan(), overrides=changes, out=tmp_path / "run", **own)
            assert not (tmp_path / "run").exists()

    def test_a_plan_may_describe_other_data_than_the_given_ones(self, tmp_path: Path) -> None:
        """As presets do; and overrides describe the plan's own data where only a metric or an optimizer is given."""
        for out, preset in (("preset", "digits-control"), ("file", tmp_path / "preset" / "plan.toml")):
            changes = {"rounds": 1, "alone.epochs": 1, "environment.participation.rate": 1.0}
            run = lindt.run(preset, overrides=changes, out=tmp_path / out, **OWN)
            assert (run.plan.data.clients, run.plan.data.source) == (20, "digits")
        few = changes | {"data.clients": 4}
        run = lindt.run("digits-control", overrides=few, accumulate=2, out=tmp_path / "own", progress=False)
        assert len(json.loads((run.folder / "run.json").read_text())["clients"]) == 4

    def test_a_run_that_an_earlier_version_began_with_such_a_field_goes_on(self, tmp_path: Path) -> None:
        begun = replace(plan(), data=replace(plan().data, clients=10))
        run = lindt.run(begun, out=tmp_path / "run", **OWN)
        again = lindt.run(plan(), overrides={"data.clients": 10}, out=tmp_path / "run", resume=True, **OWN)
        assert again.summary == run.summary

    @pytest.mark.parametrize("given", ["clients", "problem", "task"])
    def test_given_weights_may_be_asked_for(self, given: str, tmp_path: Path) -> None:
        weights = [1, 2, 3, 4]
        with task_module(lambda: Problem(CLIENTS, net, weights=weights)) as task:
            own = {
                "clients": OWN | {"weights": weights},
                "problem": {"problem": Problem(CLIENTS, net, weights=weights), "progress": False},
                "task": {"task": task, "progress": False, "engine": "inprocess"},
            }[given]
            run = lindt.run(plan(), overrides={"scoring.weighting": "given"}, out=tmp_path / "run", **own)
            assert (run.plan.scoring.weighting, run.plan.scoring.weights) == ("given", (1.0, 2.0, 3.0, 4.0))
            plain = lindt.run(plan(), out=tmp_path / "plain", **own)
            assert (plain.folder / "rounds.jsonl").read_bytes() == (run.folder / "rounds.jsonl").read_bytes()
            again = lindt.run(plan(), overrides=["scoring.weighting=given"], out=run.folder, resume=True, **own)
            assert again.summary == run.summary

    def test_an_optimizer_and_weights_of_ones_own_reach_the_clients(self, tmp_path: Path) -> None:
        def adam(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, lr=0.05)

        own = {"optimizer": adam, "weights": (1.0, 1.0, 2.0, 4.0)}
        run = lindt.run(plan("lindt"), out=tmp_path / "run", **OWN, **own)
        *_, (state, _) = federate(plan("lindt"), clients=CLIENTS, model=net, **own)
        assert torch.equal(read_w(run.global_model()), state.w)
        plain = lindt.run(plan("lindt"), out=tmp_path / "plain", **OWN)
        assert not torch.equal(read_w(run.global_model()), read_w(plain.global_model()))
        assert run.plan.scoring.weights == own["weights"]
        with pytest.raises(UserError, match="holds this run, and it has ended"):
            lindt.run(plan("lindt"), out=tmp_path / "run", **OWN, **own)
        again = lindt.run(plan("lindt"), out=tmp_path / "run", resume=True, **OWN, **own)
        assert again.summary == run.summary
        with pytest.raises(UserError, match="the optimizer differs from that of the rounds played"):
            lindt.open(tmp_path / "run", clients=CLIENTS, model=net, weights=own["weights"]).model(0)

    def test_on_the_plans_own_data_too(self, tmp_path: Path) -> None:
        own = tiny(rounds=1, alone=Alone(private=False))
        given: dict[str, Any] = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}
        run = lindt.run(own, out=tmp_path / "run", progress=False, preflight=False, **given)
        assert lindt.open(tmp_path / "run", **given).predict(0, torch.zeros(2, 1, 8, 8)).shape == (2, 10)
        with pytest.raises(UserError, match="data and a model given in Python"):
            lindt.open(run.folder).model(0)

    def test_samples_with_several_inputs(self, tmp_path: Path) -> None:
        class Two(nn.Module):
            attach_points = ("first",)

            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

            def forward(self, a: Tensor, b: Tensor) -> Tensor:
                return self.last(self.first(a).relu() + b)

        named = [tuple(({"a": x, "b": x.flip(1)}, y) for x, y in client) for client in CLIENTS]
        run = lindt.run(plan("lindt", rounds=1), clients=named, model=Two, out=tmp_path / "run", progress=False)
        x, y = named[2][1]
        outputs = run.predict(2, x)
        assert float((outputs.argmax(1) == y).double().mean()) == last_line(run)["scores"]["clients"][2]["local"]
        with torch.no_grad():
            assert torch.equal(run.model(2)(**x), outputs)
            assert run.global_model()(**x).shape == outputs.shape
        with pytest.raises(UserError, match="several inputs, but an exported module takes one tensor"):
            run.export(2)

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ({"model": None}, "model: it is missing beside clients; give both, or neither"),
            ({"problem": Problem(CLIENTS, net)}, "problem: it was given with clients, model"),
            ({"clients": None, "model": None, "problem": CLIENTS}, "problem: it is of type list"),
            ({"engine": "threads"}, "engine = 'threads': choose among auto, inprocess, processes"),
            ({"engine": "flower"}, "for Flower use `lindt run --engine flower`"),
            ({"engine": "processes"}, 'name a function that returns the lindt.Problem, task="module:function"'),
            ({"task": "no_such_module:problem"}, "task no_such_module:problem: No module named 'no_such_module'; run"),
            ({"overrides": "rounds=3"}, "overrides: 'rounds=3' is not a dict"),
            ({"overrides": {"round": 3}}, "round = 3"),
            ({"overrides": {3: 3}}, "overrides: 3 is not a field of a plan"),
            ({"plan": 3}, "plan: it is of type int"),
            ({"device": "tpu"}, "device = tpu: choose among cpu, cuda"),
            (
                {"clients": [train for train, _ in CLIENTS]},
                "clients[0]: it looks like one (x, y) without test data; give a pair (train, test), each of ",
            ),
            ({"clients": [(x, y.tolist()) for (x, y), _ in CLIENTS]}, "it looks like one (x, y) without test data"),
            ({"clients": [((x, x), y) for (x, y), _ in CLIENTS]}, "it looks like one (x, y) without test data"),
            ({"clients": dict(enumerate(CLIENTS))}, "clients: it is a dict; give a list of its values"),
            ({"clients": [(a, (b[0] / 0, b[1]), b) for a, b in CLIENTS]}, "client 0: the input of its validation"),
            ({"clients": [(a, (b[0][:, :2], b[1]), b) for a, b in CLIENTS]}, "client 0, validation data: the model"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_it_cannot_take_is_told_before_anything_is_written(
        self, tmp_path: Path, arguments: dict[str, Any], complaint: str
    ) -> None:
        with pytest.raises(UserError, match=re.escape(complaint)):
            lindt.run(**{"plan": plan(), "out": tmp_path / "run", **OWN, **arguments})
        assert not (tmp_path / "run").exists()

    def test_an_argument_that_is_a_field_of_the_plan_is_told_where_it_goes(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match=r"no argument 'rounds'; give fields of a plan in overrides=\{...\}"):
            lindt.run(plan(), rounds=3, out=tmp_path / "run", **OWN)

    def test_a_problem_of_objects_stays_in_this_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(play, "WORKERS_PAY_FROM", 0)
        monkeypatch.setattr(play, "Processes", None)  # would fail
        assert lindt.run(plan(rounds=1), out=tmp_path / "run", **OWN).state == "ended"

    def test_private_models_are_trained_once_for_several_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lindt.run(plan(rounds=1, seed=5), out=tmp_path / "first", **OWN)
        monkeypatch.setattr(PrivateTraining, "learn", None)  # would fail
        assert lindt.run(plan(rounds=2, seed=5), out=tmp_path / "second", **OWN).state == "ended"

    def test_what_the_checks_find_is_a_warning_and_kept(self, tmp_path: Path) -> None:
        (x, y), _ = CLIENTS[0]
        doubtful = [((x, y), (torch.cat([x[:4], CLIENTS[0][1][0][:4]]), torch.cat([y[:4], CLIENTS[0][1][1][:4]])))]
        doubtful += CLIENTS[1:]
        with pytest.warns(PreflightWarning, match="client 0"):
            run = lindt.run(plan(rounds=1), out=tmp_path / "run", **{**OWN, "clients": doubtful})
        checks, weak = run.verdict.warnings  # in one round of few samples the private models learn nothing
        assert "client 0" in checks
        assert "a gain over them says little" in weak
        assert all(html.escape(said) in run._repr_html_() for said in (checks, weak))
        with pytest.raises(UserError, match="its test data are its training data"):
            lindt.run(plan(), out=tmp_path / "other", **{**OWN, "clients": [(CLIENTS[0][0],) * 2] * 2})

    def test_nothing_trains_in_inference_mode(self, tmp_path: Path) -> None:
        with torch.inference_mode(), pytest.raises(UserError, match=r"call lindt\.run outside of it"):
            lindt.run(plan(), out=tmp_path / "run", **OWN)


class TestFolders:
    def test_a_run_that_has_ended_is_not_played_again(self, mended: lindt.Run) -> None:
        opened = "open it with resume=True in the same lindt.run(...), or give another out="
        before = (mended.folder / "rounds.jsonl").stat().st_mtime_ns
        with pytest.raises(UserError, match=re.escape(f"holds this run, and it has ended; {opened}")):
            lindt.run(plan("lindt"), out=mended.folder, **OWN)
        assert lindt.run(plan("lindt"), out=mended.folder, resume=True, **OWN).summary == mended.summary
        assert (mended.folder / "rounds.jsonl").stat().st_mtime_ns == before

    def test_a_run_of_another_plan_or_of_other_data_is_left_alone(self, mended: lindt.Run) -> None:
        other = [pair(i + 10) for i in range(4)]
        for resume in (False, True):
            with pytest.raises(UserError, match="holds a run with another plan; give another out="):
                lindt.run(plan("ditto"), out=mended.folder, resume=resume, **OWN)
            with pytest.raises(UserError, match="holds a run with other data; give another out="):
                lindt.run(plan("lindt"), out=mended.folder, resume=resume, **{**OWN, "clients": other})
            with pytest.raises(UserError, match="holds a run with other data"):
                lindt.run(plan("lindt"), out=mended.folder, resume=resume, progress=False)

    def test_a_folder_of_other_things_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "diary.txt").write_text("")
        with pytest.raises(UserError, match=r"not empty and not a run.*holds diary.txt"):
            lindt.run(plan(), out=tmp_path, **OWN)
        with pytest.raises(UserError, match=r"out = .*diary.txt: that is a file; name a folder"):
            lindt.run(plan(), out=tmp_path / "diary.txt", **OWN)
        with pytest.raises(UserError, match=r"diary.txt/run: cannot be written .*; name another folder"):
            lindt.run(plan(), out=tmp_path / "diary.txt" / "run", **OWN)

    def test_a_page_into_no_folder_names_the_argument(self, mended: lindt.Run, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"path = .*page.html: there is no folder"):
            mended.report(tmp_path / "none" / "page.html")

    def test_without_its_data_a_run_is_read_and_no_more(self, mended: lindt.Run) -> None:
        opened = lindt.open(str(mended.folder))
        assert opened.verdict == mended.verdict
        assert len(opened.scores) == 4
        assert opened.plan == mended.plan
        assert opened.resume() is opened  # it has ended
        given = re.escape(f"lindt.open({str(mended.folder)!r}, clients=..., model=...)")
        for wanted in (opened.global_model, lambda: opened.model(0), lambda: opened.export(0)):
            with pytest.raises(
                UserError, match=f"data and a model given in Python; to take models from it, use {given}"
            ):
                wanted()

    def test_with_its_data_it_gives_the_same_models_and_with_others_none(self, mended: lindt.Run) -> None:
        x = CLIENTS[2][1][0]
        assert torch.equal(lindt.open(mended.folder, clients=CLIENTS, model=net).predict(2, x), mended.predict(2, x))
        others = [*CLIENTS[:3], pair(7)]
        with pytest.raises(UserError, match="the given clients have other data than"):
            lindt.open(mended.folder, clients=others, model=net).predict(2, x)
        with pytest.raises(UserError, match="the model differs from that of the rounds played"):
            lindt.open(mended.folder, clients=CLIENTS, model=lambda: nn.Sequential(*net(), nn.ReLU())).predict(2, x)

    def test_a_run_that_was_replaced_is_noticed(self, tmp_path: Path) -> None:
        x = CLIENTS[0][1][0]
        run = lindt.run(plan(), out=tmp_path / "run", **OWN)
        before = run.predict(0, x)
        shutil.rmtree(run.folder)
        lindt.run(plan(seed=1), out=tmp_path / "run", **OWN)
        assert not torch.equal(run.predict(0, x), before)

    def test_a_flower_apps_run_is_read_and_has_no_models_here(self, tmp_path: Path) -> None:
        run = lindt.open(shutil.copytree(FLOWER_RUN, tmp_path / "app"))
        assert str(run.verdict) == verdict(read_run(FLOWER_RUN)).sentence
        assert len(run.rounds) == len(read_run(FLOWER_RUN).rounds) > 0
        assert list(run.scores.columns) == list(CLIENT_COLUMNS)
        assert run.report(tmp_path / "page.html").stat().st_size > 50_000
        assert "<div>" in run._repr_html_()
        for wanted in (run.global_model, lambda: run.predict(0, torch.zeros(1))):
            with pytest.raises(UserError, match="was played by a Flower app, which keeps its data and models"):
                wanted()
        with pytest.raises(UserError, match="which has no plan"):
            run.plan  # noqa: B018

    def test_the_command_line_cannot_go_on_with_objects_it_does_not_have(self, tmp_path: Path) -> None:
        folder = interrupted(tmp_path)
        for words in (["run", "--out", str(folder), "--resume"], ["export", str(folder), "--client", "0"]):
            result = CliRunner().invoke(app, words)
            assert isinstance(result.exception, UserError)
            assert "lindt.open(" in str(result.exception)


def stopping(rounds: int) -> Any:
    """A loss that is stopped by Ctrl-C, once, while the round after these trains."""
    left = [rounds * 4 * 3 * 2 + 12]  # four clients with three batches each, and two losses a batch

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.requires_grad:
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
        return cross_entropy(outputs, y)

    return loss


STOPPED = plan("lindt", alone=Alone(private=False))


def interrupted(tmp_path: Path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        lindt.run(STOPPED, out=tmp_path / "cut", loss=stopping(2), preflight=False, **OWN)
    return tmp_path / "cut"


class TestStopping:
    def test_ctrl_c_keeps_the_run_and_says_how_to_go_on(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = interrupted(tmp_path)
        run = lindt.open(folder)
        assert run.state == "stopped"
        played = len(run.rounds)
        assert 0 < played < 3
        said = capsys.readouterr().err
        again = f"lindt.run(..., out={str(folder)!r}, resume=True) with the same arguments continues"
        assert said == f"stopped after round {played}; finished rounds are kept: {again}\n"
        with pytest.raises(
            UserError, match=r"has not ended; continue with resume=True in the same lindt\.run\(\.\.\.\), or"
        ):
            lindt.run(STOPPED, out=folder, loss=stopping(99), **OWN)

    def test_resumed_it_is_the_run_that_was_never_stopped(self, tmp_path: Path) -> None:
        folder = interrupted(tmp_path)
        calm = stopping(99)
        straight = lindt.run(STOPPED, out=tmp_path / "straight", loss=calm, preflight=False, **OWN)
        again = shutil.copytree(folder, tmp_path / "again")
        with pytest.raises(UserError, match=r"to resume it, use lindt\.open"):
            lindt.open(folder).resume(progress=False)
        with pytest.raises(UserError, match="the given clients have other data"):
            lindt.open(folder, clients=[pair(i + 9) for i in range(4)], model=net, loss=calm).resume(progress=False)
        opened = lindt.open(folder, clients=CLIENTS, model=net, loss=calm)
        before = opened.predict(0, CLIENTS[0][1][0])
        resumed = opened.resume(progress=False, preflight=False)
        assert resumed is opened
        lindt.run(STOPPED, out=again, loss=calm, resume=True, preflight=False, **OWN)
        for other in (folder, again):
            assert (other / "rounds.jsonl").read_bytes() == (straight.folder / "rounds.jsonl").read_bytes()
        after = resumed.predict(0, CLIENTS[0][1][0])
        assert torch.equal(after, straight.predict(0, CLIENTS[0][1][0]))
        assert not torch.equal(after, before)

    def test_the_same_call_goes_on_with_an_optimizer_of_ones_own(self, tmp_path: Path) -> None:
        own = {**OWN, "optimizer": lambda params: torch.optim.Adam(params, lr=0.01), "loss": stopping(1)}
        watched = plan(alone=Alone(private=False))
        with pytest.raises(KeyboardInterrupt):
            lindt.run(watched, out=tmp_path / "run", preflight=False, **own)
        resumed = lindt.run(watched, out=tmp_path / "run", resume=True, preflight=False, **own)
        assert (resumed.state, len(resumed.rounds)) == ("ended", 3)

    def test_an_error_of_the_users_own_code_is_theirs_and_the_run_goes_on_later(self, tmp_path: Path) -> None:
        left = [20]  # losses, before one raises: more than the dry run before training computes

        def loss(outputs: Tensor, y: Tensor) -> Tensor:
            left[0] -= outputs.requires_grad
            if not left[0]:
                raise RuntimeError("out of cheese")
            return cross_entropy(outputs, y)

        with pytest.raises(RuntimeError, match="out of cheese"):
            lindt.run(STOPPED, out=tmp_path / "run", loss=loss, preflight=False, **OWN)
        left[0] = -1
        run = lindt.open(tmp_path / "run", clients=CLIENTS, model=net, loss=loss).resume(
            progress=False, preflight=False
        )
        assert run.state == "ended"


def test_the_callers_settings_are_left_as_they_were(tmp_path: Path) -> None:
    def settings() -> dict[str, Any]:
        return {
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "torch": torch.get_rng_state().tolist(),
            "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
            "python": random.getstate(),
        }

    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            before = settings()
            run = lindt.run(plan("lindt", rounds=2), out=tmp_path / "run", **OWN)
            run.model(0)
            run.predict(1, CLIENTS[1][1][0])
            run.export(2)
            run.global_model()
            assert settings() == before
            lindt.run(tiny(rounds=1), out=tmp_path / "digits", progress=False).model(0)
            assert settings() == before
    finally:
        torch.set_num_threads(1)


class TestProgress:
    def test_nothing_is_said_where_nobody_asked(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lindt.run(plan(), out=tmp_path / "run", **OWN)
        assert capsys.readouterr() == ("", "")

    def test_a_script_has_its_own_output_to_itself(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lindt.run(plan(), out=tmp_path / "run", **{**OWN, "progress": True})
        assert capsys.readouterr().out == ""

    def test_a_notebook_has_one_line_that_is_written_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert not session.in_notebook()
        shell = SimpleNamespace(kernel=object())
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
        assert session.in_notebook()
        lindt.run(plan(), out=tmp_path / "run", **{**OWN, "progress": True})
        said = capsys.readouterr().out
        written = [text.strip() for text in said.split("\r")]
        alone = [text for text in written if text.startswith("each client alone")]
        assert [text.split()[3] for text in alone] == ["0/4", "1/4", "2/4", "3/4", "4/4"]
        rounds = [text.split()[1] for text in written if text.startswith("run: ")]
        assert rounds == ["1/3", "2/3", "3/3", "3/3"]  # and at the end of the run
        assert visible(said).strip() == ""  # the line is taken away at the end
        monkeypatch.setattr(shell, "kernel", None)  # IPython in a terminal
        assert not session.in_notebook()

    def test_what_happens_stays_above_the_line(self, tmp_path: Path) -> None:
        from folders import hurts

        from lindt.runs.play import RoundFollowed, RunStarted

        file, lines = io.StringIO(), hurts(recovering=True)
        line = session.NotebookLine("mine", file)
        store: Any = SimpleNamespace(about={"metric_in_percent": True}, rounds=list)
        line.see(RunStarted(store, lindt.resolve("digits-control"), 20, 0))
        for one in lines:
            line.see(RoundFollowed(one))
        *told, last = visible(file.getvalue()).splitlines()
        assert [text[:14] for text in told] == ["mine, round 2:"] * 2 + [f"mine, round {r}:" for r in (4, 6, 8)]
        assert last.startswith(f"mine: {len(lines)}/80  gain")


def visible(text: str) -> str:
    """What a notebook shows: a carriage return goes to the beginning of the line."""
    shown = []
    for line in text.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        shown.append("".join(cells).rstrip())
    return "\n".join(shown)


def test_a_script_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Outside the repository, by a path of its own: the run lands beside it, and the command line shows it."""
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    env = os.environ | {"LINDT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "torch.Size([8, 3])"
    assert str(lindt.open(tmp_path / "runs" / "mine").verdict) == done.stdout.splitlines()[0]


SCRIPT = """\
import random

import torch
from torch import nn

import lindt

x = torch.randn(4, 32, 3, generator=torch.Generator().manual_seed(0))
clients = [((one[:24], one[:24].argmax(1)), (one[24:], one[24:].argmax(1))) for one in x]
net = lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
state = random.getstate()
run = lindt.run(clients=clients, model=net, overrides={"rounds": 2, "alone.epochs": 1}, out="runs/mine")
print(run.verdict)
run.export(0)
assert random.getstate() == state  # packages that draw from it when they are imported first
print(run.predict(0, x[0, 24:]).shape)
"""
