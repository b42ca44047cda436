"""What the detector's log and `lindt show` say: what is missing, what cannot happen, what is true by construction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from fake_grid import FakeGrid
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from small_apps import arrays, heard, pushing

import lindt.flower
from lindt.flower import NFLDetector, wrap
from lindt.flower.protocol import ClientReport
from lindt.flower.recorder import RunRecorder
from lindt.protocols import ClientTally
from lindt.report.reading import method_words, read_run
from lindt.report.verdict import verdict

UNWRAPPED = "no client's app is wrapped, so nothing is tested: add app = lindt.flower.wrap(app)"


def said_by(detector: NFLDetector, app: Any, rounds: int = 2) -> list[str]:
    with heard() as said:
        detector.start(FakeGrid(app, 3), arrays(w=[0.0]), num_rounds=rounds)
    return said


def app_of(function: Any) -> ClientApp:
    app = ClientApp()
    app.train()(function)
    app.evaluate()(function)
    return app


PLAIN = pushing([1.0], [2.0], [3.0])


class TestWrapForgotten:
    @pytest.mark.parametrize("settings", [{}, {"recover": False}])
    def test_it_is_said_once_and_the_run_goes_on(self, settings: dict[str, Any]) -> None:
        said = said_by(NFLDetector(FedAvg(), **settings), PLAIN)
        assert sum(UNWRAPPED in text for text in said) == 1
        assert any(text.startswith(f"! round 1: {UNWRAPPED}") and "pyproject.toml" in text for text in said)

    @pytest.mark.parametrize("settings", [{"epsilon": 0.1, "recover": False}, {"epsilon": 0.1}])
    def test_the_papers_rule_needs_no_reports(self, settings: dict[str, Any]) -> None:
        assert not any(UNWRAPPED in text for text in said_by(NFLDetector(FedAvg(), patience=1, **settings), PLAIN))

    def test_not_where_it_is_wrapped(self, tmp_path: Path) -> None:
        app = wrap(app_of(PLAIN), folder=tmp_path)
        assert not any(UNWRAPPED in text for text in said_by(NFLDetector(FedAvg()), app))
        panel = NFLDetector(FedAvg(), detection=lindt.flower.Gain(panel=0.3))
        assert not any(UNWRAPPED in text for text in said_by(panel, app))


def test_a_rule_that_can_never_fire_is_told_before_round_1() -> None:
    text = "! NFL is detected in more than r' = 2 rounds above epsilon, but the run has 2: plan more rounds, or give a"
    told = said_by(NFLDetector(FedAvg(), epsilon=1e-9, patience=2), PLAIN, rounds=2)
    assert told[0].startswith(text)
    said = said_by(NFLDetector(FedAvg(), epsilon=1e-9, patience=2), PLAIN, rounds=3)
    assert not any("but the run has" in text for text in said)
    assert any("NFL suspected" in text for text in said)  # in the last round


def test_gain_is_found_where_the_docs_import_it() -> None:
    from lindt.server.detection.gain import Gain

    assert lindt.flower.Gain is Gain


def report(client: int, local: float, private: float, *, chosen: bool) -> ClientReport:
    sums = [torch.tensor([score, 4.0], dtype=torch.float64) for score in (1.0, local, private)]
    tally = ClientTally(4, sums[0], sums[1], sums[2], wins=0, losses=0)
    return ClientReport(f"ward-{client}", tally, paired=False, chosen=chosen)


class TestChosenOnTheSameData:
    CHOSEN = "best of w, v_i and P_i on this data, so that none can score worse than alone on it"

    def said(self, *reports: ClientReport) -> str:
        with heard() as said:
            RunRecorder(None).scored(3, dict(enumerate(reports)))
        return said[0]

    def test_that_nobody_is_worse_off_is_no_finding(self) -> None:
        good = report(0, 3.0, 2.0, chosen=True)
        assert self.said(good).endswith(f"; clients predict with the {self.CHOSEN}")
        fixed = replace(good, client="ward-1", chosen=False)
        assert self.said(fixed).endswith("; no client is worse off than alone")
        assert self.said(good, fixed).endswith(f"; clients in recovery predict with the {self.CHOSEN}")
        worse = self.said(good, report(1, 1.0, 3.0, chosen=False))
        assert worse.endswith("with models chosen on the same data; worse off than alone: ward-1 (-0.500)")

    def test_the_verdicts_sentence_says_so(self, tmp_path: Path) -> None:
        def app(message: Message, context: Context) -> Message:
            reply = PLAIN(message, context)
            if message.metadata.message_type == "evaluate":
                client = int(context.node_config["partition-id"])
                made = report(client, 3.0, 2.0, chosen=True)
                made.attach(reply.content)
                reply.content["lindt"]["chosen"] = True
            return reply

        detector = NFLDetector(FedAvg(), epsilon=1e9, patience=1, folder=tmp_path / "run")
        detector.start(FakeGrid(app, 3), arrays(w=[0.0]), num_rounds=2)
        sentence = verdict(read_run(tmp_path / "run")).sentence
        assert (
            "worse off 0 (clearly 0); the clients predict with the best of w, v_i and P_i on these data, so" in sentence
        )


def test_all_calls_for_a_message_have_its_id_and_the_apps_own_is_the_first(tmp_path: Path) -> None:
    """docs/flower-own-app.md shows how an app keeps side effects out of the extra calls."""
    calls: list[tuple[str, str, float]] = []

    def app(message: Message, context: Context) -> Message:
        w = float(message.content["arrays"]["w"].numpy()[0])
        calls.append((message.metadata.message_id, message.metadata.message_type, w))
        return PLAIN(message, context)

    class Numbered(FakeGrid):
        def _answer(self, message: Message) -> Message | None:
            message.metadata.__dict__["_message_id"] = f"id-{len(self.sent)}"  # as a SuperLink does
            return super()._answer(message)

    grid = Numbered(wrap(app_of(app), folder=tmp_path), 2)
    NFLDetector(FedAvg()).start(grid, arrays(w=[0.0]), num_rounds=3)
    assert len(calls) > len(grid.sent) == 12
    assert {id for id, _, _ in calls} == {f"id-{number}" for number in range(12)}
    seen = set[str]()
    own = [call for call in calls if not (call[0] in seen or seen.add(call[0]))]  # type: ignore[func-returns-value]
    sent = [(m.metadata.message_type, float(m.content["arrays"]["w"].numpy()[0])) for m in grid.sent]
    assert [(kind, w) for _, kind, w in own] == sent


@pytest.mark.parametrize("settings", [{}, {"epsilon": 0.1, "patience": 1}])
def test_a_run_that_only_detects_is_called_so(settings: dict[str, Any], tmp_path: Path) -> None:
    said_by(NFLDetector(FedAvg(), recover=False, folder=tmp_path / "run", **settings), PLAIN, rounds=3)
    run = read_run(tmp_path / "run")
    assert method_words(run.plan) == "detection only"
    assert "recovery on" not in verdict(run).sentence


def test_a_client_without_test_samples_is_named_and_not_called_malformed(tmp_path: Path) -> None:
    def empty(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "evaluate" and context.node_config["partition-id"] == 2:
            metrics = MetricRecord({"num-examples": 0, "acc": 0.0})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        return PLAIN(message, context)

    said = said_by(NFLDetector(FedAvg()), wrap(app_of(empty), folder=tmp_path))
    assert "! round 1: client 2 has no test samples; its evaluation is left out" in said
    assert not any("malformed" in text for text in said)
    plain = said_by(NFLDetector(FedAvg()), empty)
    assert sum("has no test samples" in text and text.startswith("! round 1: node ") for text in plain) == 1
