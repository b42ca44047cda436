"""NFLDetector(strategy): the test of the gains that clients report with their training, on the server's side."""

from __future__ import annotations

import json
import math
import random
import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fake_grid import FakeGrid
from flwr.app import ConfigRecord, Context, Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, FedAvgM
from small_apps import arrays, heard, pushing

from lindt.errors import PlanError, UserError
from lindt.flower import NFLDetector
from lindt.flower.protocol import attach_gain
from lindt.flower.recorder import load_newest
from lindt.protocols import Decision, DetectionState, Evidence, GainReport, Paired, VerdictState
from lindt.report.reading import read_run
from lindt.runs.schema import ROUND, SUMMARY, fits
from lindt.seeds import seed_for
from lindt.server.detection.divergence import Delta
from lindt.server.detection.gain import Gain

ZERO = {"w": [0.0, 0.0]}
APART = pushing([300, 400], [-300, -400], [0, 0])  # a Delta far above any epsilon


@dataclass(frozen=True)
class Summing:
    """A test small enough for the head: "hurts" when the sum of the rounds' mean gains is -1 or less, "helps" at 1.

    It warns when the sum is -0.5 or less.
    """

    alpha: float = 0.05
    reports = True

    def begin(self) -> DetectionState:
        return DetectionState()

    def judge(self, state: DetectionState | None, evidence: Evidence) -> DetectionState:
        assert state is not None
        numbers = dict(state.numbers)

        def answer(question: str, before: Decision | None) -> Decision | None:
            found = [(r.samples, getattr(r, question)) for r in evidence.reports.values() if getattr(r, question)]
            if not found:
                return before
            gain = sum(pair.mean for _, pair in found) / len(found)
            total = numbers[question] = numbers.get(question, 0.0) + gain
            said: VerdictState = "hurts" if total <= -1 else "helps" if total >= 1 else "undecided"
            same = before is not None and before.state == said
            since = before.since if same and before else evidence.round if said != "undecided" else None
            return Decision(said, since, gain, 0.25, len(found), sum(samples for samples, _ in found))

        verdict = answer("private", state.verdict)
        assert verdict is not None
        warned = numbers.get("private", 0.0) <= -0.5
        return DetectionState(
            verdict,
            state.warning or (evidence.round if warned else None),
            answer("adapted", state.recovery),
            answer("adapted_private", state.recovered),
            numbers,
            state.reports | {i: (evidence.round, report) for i, report in evidence.reports.items()},
        )


def report(gain: float, adapted: float | None = None) -> GainReport:
    pair = Paired(gain, max(abs(gain), gain * gain))
    own = None if adapted is None else Paired(adapted, abs(adapted))
    return GainReport(20, pair, pair, own, own)


Says = Callable[[int, int, bool], GainReport | None]  # of a client, in a round, while recovery is on or not


def reporting(says: Says, app: Callable[[Message, Context], Message] = APART) -> Callable[[Message, Context], Message]:
    def answer(message: Message, context: Context) -> Message:
        reply, config = app(message, context), message.content["config"]
        if message.metadata.message_type == "train" and config.get("lindt-reports"):
            client = int(context.node_config["partition-id"])
            found = says(client, int(config["lindt-round"]), bool(config["lindt-recovering"]))
            if found is not None:
                attach_gain(reply.content, found)
        return reply

    return answer


def start(detector: NFLDetector, app: Any, rounds: int = 3, nodes: int = 3) -> tuple[Any, FakeGrid]:
    grid = FakeGrid(app, nodes)
    return detector.start(grid, arrays(**ZERO), num_rounds=rounds), grid


def numbers_of(detector: NFLDetector, grid: FakeGrid) -> dict[int, int]:
    """From a client's partition to its number on the server: by node id."""
    return {int(grid.contexts[node].node_config["partition-id"]): n for n, node in enumerate(sorted(grid.contexts))}


def test_reports_reach_the_test_and_nothing_reaches_the_strategy() -> None:
    class Watching(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            assert all(set(reply.content) == {"arrays", "metrics"} for reply in replies)
            return super().aggregate_train(server_round, replies)

    gains = {0: -0.25, 1: 0.125, 2: -0.5}
    detector = NFLDetector(Watching(), detection=Summing())
    result, grid = start(detector, reporting(lambda i, r, on: report(gains[i])), rounds=1)
    assert detector.found is not None
    at = numbers_of(detector, grid)
    assert {i: detector.found.reports[at[i]] for i in gains} == {i: (1, report(g)) for i, g in gains.items()}
    metrics = result.train_metrics_clientapp[1]
    assert metrics["lindt-gain"] == pytest.approx(-0.625 / 3)
    assert (metrics["lindt-reports"], metrics["lindt-validation-samples"], metrics["lindt-gain-error"]) == (3, 60, 0.25)
    assert (metrics["lindt-verdict"], metrics["lindt-too-early"], metrics["lindt-negative"]) == (0, 0, 0)
    assert metrics["lindt-delta"] == pytest.approx(1000 / 3)
    assert "lindt-count" not in metrics
    plain, _ = start(NFLDetector(FedAvg(), 1e9), APART, rounds=1)
    assert result.arrays["w"].data == plain.arrays["w"].data


def test_a_message_asks_for_reports_only_where_gains_are_tested() -> None:
    for settings, asked in (({}, True), ({"epsilon": 1e9}, None)):
        _, grid = start(NFLDetector(FedAvg(), **settings), APART, rounds=1)  # type: ignore[arg-type]
        assert [m.content["config"].get("lindt-reports") for m in grid.sent] == [asked] * 6


def told(grid: FakeGrid, kind: str, name: str) -> list[dict[int, Any]]:
    """What the messages of each round said under a name, by node; None where they said nothing."""
    rounds: dict[int, dict[int, Any]] = {}
    for m in grid.of(kind):
        config = m.content["config"]
        rounds.setdefault(int(config["lindt-round"]), {})[m.metadata.dst_node_id] = config.get(f"lindt-{name}")
    return list(rounds.values())


class TestPanel:
    def test_half_of_the_clients_the_same_ones_in_each_round(self, tmp_path: Path) -> None:
        """By what messages say, and by whose reports count: here every client reports, asked or not."""
        app, detection = reporting(lambda i, r, on: report(-0.25), pushing(*[[0.0, 0.0]] * 8)), Gain(panel=0.5)
        detector = NFLDetector(FedAvg(), detection=detection, folder=tmp_path / "run")
        _, grid = start(detector, app, rounds=3, nodes=8)
        first, *others = told(grid, "train", "panel")
        chosen = {node for node, panel in first.items() if panel is None}  # by default on it
        assert len(chosen) == 4
        assert all(panel is False for node, panel in first.items() if node not in chosen)
        assert others == [first, first]
        assert told(grid, "evaluate", "panel") == [first] * 3
        assert all(reports is True for one in told(grid, "train", "reports") for reports in one.values())
        assert detector.found is not None
        assert {sorted(grid.contexts)[number] for number in detector.found.reports} == chosen
        assert detector.found.verdict.clients == 4

        again = NFLDetector(FedAvg(), detection=detection, folder=tmp_path / "run")
        later = FakeGrid(app, 8)
        again.start(later, arrays(**ZERO), num_rounds=5)
        assert told(later, "train", "panel") == [first] * 2  # after a restart of the server

    @pytest.mark.parametrize("share", [0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0])
    def test_its_share_holds_for_any_number_of_nodes_and_runs_differ(self, share: float) -> None:
        found = []
        for run in range(60):
            detector = NFLDetector(FedAvg(), detection=Gain(panel=share))
            detector._panel_start = seed_for(0, f"run {run}", "panel") / 2**63
            on = [detector._on_panel(1000 + node) for node in range(60)]
            for nodes in (1, 7, 20, 60):
                assert abs(sum(on[:nodes]) - share * nodes) < 1 + 1e-9
            found.append(on)
        if share < 1:
            # Every node is chosen in its share of the runs: 60 draws, four standard errors.
            each = [sum(on[node] for on in found) / 60 for node in (0, 1, 17)]
            assert all(abs(part - share) < 4 * math.sqrt(share * (1 - share) / 60) for part in each)
        else:
            assert all(all(on) for on in found)

    def test_one_that_nobody_is_on_is_said(self) -> None:
        with heard() as said:
            for _ in range(40):  # a panel of 0.1 has one of three nodes in three tenths of the runs
                start(NFLDetector(FedAvg(), detection=Gain(panel=0.1)), APART, rounds=2, nodes=3)
        empty = [text for text in said if "none of the 3 connected clients is on the panel of 0.1" in text]
        assert 0 < len(empty) < 40
        with heard() as said:
            start(NFLDetector(FedAvg(), detection=Gain(panel=0.5)), APART)
        assert not any("panel" in text for text in said)


class TestNoise:
    def test_clients_are_told_its_scale_and_the_test_counts_its_variance(self) -> None:
        app = reporting(lambda i, r, on: GainReport(20, Paired(-0.25, 1.0), Paired(-0.25, 1.0)))
        errors = []
        for noise in (0.0, 0.3):
            detector = NFLDetector(FedAvg(), detection=Gain(noise=noise, start=1))
            _, grid = start(detector, app, rounds=4)
            assert told(grid, "train", "noise") == [dict.fromkeys(grid.contexts, noise or None)] * 4
            assert detector.verdict is not None
            assert detector.verdict.error is not None
            errors.append(detector.verdict.error)
        # The variance 2 b^2 of each of three clients, in the variance of their mean.
        assert errors[1] ** 2 - errors[0] ** 2 == pytest.approx(2 * 0.3**2 / 3)

    def test_what_it_buys_is_said(self, tmp_path: Path) -> None:
        wrapped = DifferentialPrivacyServerSideFixedClipping(
            FedAvg(), noise_multiplier=0.1, clipping_norm=1.0, num_sampled_clients=3
        )
        app = pushing([300, 400], [-300, -400], [1, 0])
        with heard() as said:
            start(NFLDetector(wrapped, detection=Gain(noise=0.5), folder=tmp_path), app)
        assert sum("gain reports are 4-DP, each number by itself: outside the privacy" in text for text in said) == 1
        words = json.loads((tmp_path / "summary.json").read_text())["privacy"]["words"]
        assert "gain reports are 4-DP, each number by itself, and are not part of its guarantee" in words


def test_a_report_is_small() -> None:
    found = replace(report(-1 / 3, 1 / 7), first_batch=-1 / 9)
    assert len(json.dumps(asdict(found))) < 450


def test_without_reports_it_is_undecided_whatever_delta_says() -> None:
    detector = NFLDetector(FedAvg())
    with heard() as said:
        result, grid = start(detector, APART, rounds=6)
    assert [text for text in said if "reports" in text and "round" in text] == ["round 1: undecided: no client reports"]
    assert detector.verdict is not None
    assert (detector.verdict.state, detector.negative, detector.state.on) == ("undecided", False, False)
    assert [m["lindt-verdict"] for m in result.train_metrics_clientapp.values()] == [0] * 6
    assert [m["lindt-too-early"] for m in result.train_metrics_clientapp.values()] == [0] * 6
    assert not any(m.content["config"]["lindt-recovering"] for m in grid.sent)


def test_a_client_without_reports_counts_for_nothing() -> None:
    detector = NFLDetector(FedAvg(), detection=Summing())
    start(detector, reporting(lambda i, r, on: None if i == 1 else report(-0.25)), rounds=1)
    assert detector.verdict == Decision("undecided", None, -0.25, 0.25, 2, 40)


class TestLiars:
    def test_a_report_beyond_its_bounds_is_clipped(self) -> None:
        liar = GainReport(20, Paired(-99.0, 0.0), Paired(-99.0, 7.0))
        detector = NFLDetector(FedAvg(), detection=Summing())
        _, grid = start(detector, reporting(lambda i, r, on: liar if i == 0 else report(0.5)), rounds=1)
        assert detector.found is not None
        kept = detector.found.reports[numbers_of(detector, grid)[0]][1]
        assert (kept.private, kept.equal_age) == (Paired(-1.0, 1.0), Paired(-1.0, 1.0))

    def test_a_mean_square_that_cannot_be_is_the_smallest_possible(self) -> None:
        """The same numbers as of a client whose differences are all -0.3; the server goes on."""
        liar = GainReport(20, Paired(-0.3, 0.01), Paired(0.2, -5.0))
        detector = NFLDetector(FedAvg(), detection=Summing())
        _, grid = start(detector, reporting(lambda i, r, on: liar if i == 0 else report(0.5)), rounds=1)
        assert detector.found is not None
        kept = detector.found.reports[numbers_of(detector, grid)[0]][1]
        assert (kept.private, kept.equal_age) == (Paired(-0.3, 0.3 * 0.3), Paired(0.2, 0.2 * 0.2))

    @pytest.mark.parametrize(
        "written",
        [
            json.dumps(asdict(report(math.nan))),
            json.dumps(asdict(report(0.5)) | {"samples": 0}),
            json.dumps(asdict(report(0.5)) | {"samples": "many"}),
            json.dumps(asdict(report(0.5)) | {"secret": [1]}),
            json.dumps(asdict(report(0.5)) | {"private": {"mean": 1e999, "square": 1}}),
            "[" * 3000,
            "{",
            "{}",
            "null",
            " " * 5000,
            7,
        ],
    )
    def test_what_is_no_report_is_told_and_the_update_counts(self, written: Any) -> None:
        def app(message: Message, context: Context) -> Message:
            reply = reporting(lambda i, r, on: report(0.25))(message, context)
            if context.node_config["partition-id"] == 0 and message.metadata.message_type == "train":
                reply.content["lindt"] = ConfigRecord({"gain": written})
            return reply

        detector = NFLDetector(FedAvg(), detection=Summing())
        with heard() as said:
            result, grid = start(detector, app, rounds=1)
        liar = next(n for n, c in grid.contexts.items() if c.node_config["partition-id"] == 0)
        assert any(f"! round 1: node {liar} sent a malformed gain report" in text for text in said)
        assert detector.verdict == Decision("undecided", None, 0.25, 0.25, 2, 40)
        assert result.arrays["w"].numpy().tolist() == [0.0, 0.0]  # of three updates

    def test_before_recovery_nobody_decides_whether_it_helps(self) -> None:
        """A liar alone would answer the question, and switch recovery off in its first round."""
        detector = NFLDetector(FedAvg(), detection=Summing())

        def says(client: int, round: int, on: bool) -> GainReport:
            return report(-0.125, -1.0 if client == 0 else 0.5 if on else None)

        start(detector, reporting(says), rounds=4)
        assert detector.state.on  # from round 4 on: the sum of the gains is -0.5
        assert detector.found is not None
        assert (detector.found.recovery, detector.found.recovered) == (None, None)
        detector = NFLDetector(FedAvg(), detection=Summing())
        start(detector, reporting(says), rounds=5)
        assert detector.found is not None
        assert detector.found.recovery is not None
        assert detector.found.recovery.gain == 0.0  # of -1, 0.5 and 0.5

    def test_a_client_whose_update_is_refused_has_no_say(self) -> None:
        app = reporting(lambda i, r, on: report(-1.0 if i == 0 else 0.25), pushing([math.nan, 0], [1, 1], [1, 1]))
        detector = NFLDetector(FedAvg(), detection=Summing())
        start(detector, app, rounds=1)
        assert detector.verdict == Decision("undecided", None, 0.25, 0.25, 2, 40)

    def test_under_the_papers_rule_a_report_is_taken_out_and_forgotten(self) -> None:
        def app(message: Message, context: Context) -> Message:
            reply = APART(message, context)
            if message.metadata.message_type == "train":
                attach_gain(reply.content, report(-1.0))
            return reply

        detector = NFLDetector(FedAvg(), 1e9)
        start(detector, app)
        assert (detector.verdict, detector.negative) == (None, False)


class TestVerdictAndRecovery:
    def test_the_states_in_log_and_metrics(self) -> None:
        detector = NFLDetector(FedAvg(), detection=Summing(), recover_at="verdict")
        with heard() as said:
            result, grid = start(detector, reporting(lambda i, r, on: report(-0.25)), rounds=5)
        words = "-0.250 +- 0.250, 3 clients, 60 validation samples"
        assert [text for text in said if "gain" in text] == [
            "tests the gains that clients report, at level 0.05; recovery starts at the verdict",
            f"round 1: undecided: gain {words}",
            f"! round 4: federation hurts, since round 4, at level 0.05: gain {words}",
        ]
        assert [text for text in said if "warning" in text] == [
            "! round 2: early warning: the shared model seems worse than private models of its age"
        ]
        metrics = result.train_metrics_clientapp
        assert [metrics[r]["lindt-verdict"] for r in range(1, 6)] == [0, 0, 0, -1, -1]
        assert [metrics[r]["lindt-negative"] for r in range(1, 6)] == [0, 0, 0, 1, 1]
        assert [metrics[r]["lindt-warning"] for r in range(1, 6)] == [0, 1, 1, 1, 1]
        assert [m.content["config"]["lindt-recovering"] for m in grid.of("train")[::3]] == [False] * 4 + [True]

    @pytest.mark.parametrize(("rounds", "told"), [(5, 1), (6, 0)])
    def test_a_run_with_too_few_rounds_for_the_test_is_told_before_it_begins(self, rounds: int, told: int) -> None:
        detector = NFLDetector(FedAvg())
        with heard() as said:
            detector.begin(arrays(w=[0.0, 0.0]), rounds)
        few = "! the test needs the reports of two rounds from round 5 on, but the run has 5: plan more rounds"
        assert said.count(few) == told

    def test_by_default_it_starts_at_the_early_warning(self) -> None:
        detector = NFLDetector(FedAvg(), detection=Summing())
        _, grid = start(detector, reporting(lambda i, r, on: report(-0.25)), rounds=4)
        assert [m.content["config"]["lindt-recovering"] for m in grid.of("train")[::3]] == [False] * 2 + [True] * 2

    def test_a_federation_that_helps_stays_as_it_is(self) -> None:
        detector = NFLDetector(FedAvg(), detection=Summing())
        result, grid = start(detector, reporting(lambda i, r, on: report(0.5)), rounds=3)
        assert [m["lindt-verdict"] for m in result.train_metrics_clientapp.values()] == [0, 1, 1]
        assert not any(m.content["config"]["lindt-recovering"] for m in grid.sent)

    def test_recovery_that_makes_it_worse_is_switched_off_for_good(self) -> None:
        says: Says = lambda i, r, on: report(-0.5, -0.5 if on else None)  # noqa: E731
        detector = NFLDetector(FedAvg(), detection=Summing())
        with heard() as said:
            result, grid = start(detector, reporting(says), rounds=6)
        # Warned after round 1; adapted predictors lose 0.5 in rounds 2 and 3, which sums up to -1.
        flags = [m.content["config"]["lindt-recovering"] for m in grid.of("train")[::3]]
        assert flags == [False, True, True, False, False, False]
        assert sum("recovery is off" in text for text in said) == 1
        assert any("! round 3: what clients predict with, against the shared model: worse, since" in t for t in said)
        metrics = result.train_metrics_clientapp[3]
        assert (metrics["lindt-recovery-verdict"], metrics["lindt-recovery-gain"]) == (-1, -0.5)
        assert metrics["lindt-recovering"] == 0

    def test_recovery_that_helps_stays_on(self) -> None:
        detector = NFLDetector(FedAvg(), detection=Summing())
        result, _ = start(detector, reporting(lambda i, r, on: report(-0.5, 0.5 if on else None)), rounds=5)
        last = result.train_metrics_clientapp[5]
        assert (last["lindt-verdict"], last["lindt-recovery-verdict"], last["lindt-recovered-verdict"]) == (-1, 1, 1)
        assert last["lindt-recovering"] == 1


class Killed(BaseException):
    """The process is gone."""


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def wandering(client: int, round: int, on: bool) -> GainReport:
    gain = random.Random(f"{client} {round}").uniform(-0.6, 0.3)
    return report(gain, gain / 3 if on else None)


@pytest.mark.parametrize("test", [Summing(), Gain()])
def test_killed_and_started_again_the_test_goes_on_bit_by_bit(test: Any, tmp_path: Path) -> None:
    def detector(name: str) -> NFLDetector:
        return NFLDetector(FedAvg(fraction_train=0.6), detection=test, folder=tmp_path / name)

    random.seed(5)
    whole = detector("whole")
    whole.start(FakeGrid(reporting(wandering, pushing(*[[1, 1]] * 6)), 6), arrays(**ZERO), num_rounds=9)

    def killing(message: Message, context: Context) -> Message:
        if message.content["config"]["lindt-round"] == 6:
            raise Killed
        return reporting(wandering, pushing(*[[1, 1]] * 6))(message, context)

    random.seed(5)
    with pytest.raises(Killed):
        detector("cut").start(FakeGrid(killing, 6), arrays(**ZERO), num_rounds=9)
    random.seed(99)
    again = detector("cut")
    with heard() as said:
        again.start(FakeGrid(reporting(wandering, pushing(*[[1, 1]] * 6)), 6), arrays(**ZERO), num_rounds=9)
    assert any(text.startswith("continues after round 5, verdict ") for text in said)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert (again.found, again.state) == (whole.found, whole.state)
    kept = [(tmp_path / name / "checkpoint" / "round-000009.safetensors") for name in ("cut", "whole")]
    states = [load_newest(path.parent, json.loads((path.parents[1] / "run.json").read_text())["run"]) for path in kept]
    assert states[0][0] is not None
    assert states[1][0] is not None
    assert states[0][0].detection == states[1][0].detection == whole.found


def test_a_checkpoint_of_an_earlier_version_goes_on_with_a_new_test(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(Path(__file__).parent / "unsealed_run", folder)
    detector = NFLDetector(FedAvgM(server_momentum=0.9), detection=Summing(), folder=folder)
    app = reporting(lambda i, r, on: report(-0.25), pushing(*[[1, 1]] * 6))
    detector.start(FakeGrid(app, 6), arrays(**ZERO), num_rounds=5)
    assert detector.found is not None
    assert detector.found.numbers == {"private": -0.5}
    assert [line.get("detection") is not None for line in lines(folder)] == [False] * 3 + [True] * 2


def test_the_folder_reads_like_one_of_our_own_runs(tmp_path: Path) -> None:
    detector = NFLDetector(FedAvg(), detection=Summing(), folder=tmp_path)
    start(detector, reporting(lambda i, r, on: report(-0.5, 0.25 if on else None)), rounds=4)
    found = lines(tmp_path)
    assert all(fits(line, ROUND) for line in found)
    assert [line["detection"]["verdict"]["state"] for line in found] == ["undecided", "hurts", "hurts", "hurts"]
    assert found[1]["detection"]["verdict"]["since"] == 2
    assert [len(line["reports"]) for line in found] == [3] * 4
    assert found[0]["reports"][0] == {"client": 0, **asdict(report(-0.5))}
    assert [line["flag"] for line in found] == [True] * 4  # from the warning after round 1 on
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert fits(summary, SUMMARY)
    assert summary["detection"]["verdict"]["state"] == "hurts"
    assert summary["detected_at"] is None
    assert "gain reports" in summary["privacy"]["words"]
    plan = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert plan["detection"] == {"kind": "summing", "alpha": 0.05}
    assert plan["method"]["recovery"]["kind"] == "on_evidence"
    assert read_run(tmp_path).state == "ended"


def test_the_papers_rule_is_in_the_plan_by_name(tmp_path: Path) -> None:
    start(NFLDetector(FedAvg(), 3.0, folder=tmp_path), APART, rounds=1)
    plan = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert (plan["detection"], plan["method"]["recovery"]["epsilon"]) == ({"kind": "delta"}, 3.0)
    assert "detection" not in lines(tmp_path)[0]


def test_reports_lie_outside_a_privacy_guarantee_and_the_log_says_so() -> None:
    def wrapped() -> Any:
        return DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.5, 1.0, 3)

    with heard() as said:
        start(NFLDetector(wrapped()), APART)
    assert sum("outside the privacy guarantee" in text for text in said) == 1
    assert not any("epsilon" in text for text in said)  # clipping is no matter of the test
    with heard() as said:
        start(NFLDetector(wrapped(), 1.0), APART)
    assert not any("outside the privacy guarantee" in text for text in said)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"patience": 3}, "patience = 3: only the paper's rule uses it"),
        ({"statistic": "spread"}, "give epsilon as well"),
        ({"again": "once"}, "give epsilon as well"),
        ({"epsilon": 1.0, "recover_at": "verdict"}, "recover_at"),
        ({"epsilon": 1.0, "detection": Gain()}, "leave out one of the two"),
        ({"detection": Delta()}, "it needs no reports"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: Mapping[str, Any], complaint: str) -> None:
    with pytest.raises((PlanError, UserError), match=complaint):
        NFLDetector(FedAvg(), **settings)
