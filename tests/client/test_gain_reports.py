"""A client's report of its gain: V_i trains nothing, the numbers are those of the models, on every engine."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from worlds import tiny

from lindt.client.private_models import PrivateModelCache, PrivateTraining
from lindt.client.training import forward_all
from lindt.data.examples import pool, stratified
from lindt.engines.inprocess import InProcess
from lindt.engines.processes.engine import Processes
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.threats import Backdoor
from lindt.errors import PlanError
from lindt.plan.models import SmallCnn
from lindt.plan.plan import METHODS, Alone, Method, Plan, reporting_clients
from lindt.plan.problem import (
    METRICS,
    MeanOf,
    Problem,
    backdoor_of,
    paired,
    problem_for,
    sample_values,
    split_validation,
    validation_samples,
)
from lindt.protocols import GainReport, Paired, Reply, Task
from lindt.registry import component
from lindt.runs.play import run_plan
from lindt.server.detection.divergence import Delta
from lindt.server.detection.gain import Gain
from lindt.server.federation import begin, federate
from lindt.server.recovery import Always, OnEvidence
from lindt.server.updates import clipped_report, pack_reply, unpack_report
from lindt.weights import first_model


def test_the_size_of_a_validation_part() -> None:
    sizes = {1: 0, 4: 0, 5: 2, 10: 3, 27: 9, 100: 30, 300: 30, 301: 31, 1000: 100}
    assert {n: validation_samples(n) for n in sizes} == sizes


def test_training_and_validation_part_are_all_of_the_data_once() -> None:
    plan = tiny(detection=Gain())
    problem = problem_for(plan)
    for client, (whole, _) in enumerate(problem.data):
        train, validation = split_validation(plan, problem, client)
        assert validation is not None
        assert len(validation) == validation_samples(len(whole))
        rows = torch.cat([train.rows, validation.rows])  # type: ignore[attr-defined]
        assert sorted(rows.tolist()) == sorted(whole.rows.tolist())  # type: ignore[attr-defined]


def test_each_class_has_its_share_of_the_validation_part() -> None:
    labels = torch.tensor([0] * 10 + [1] * 20 + [2] * 3 + [3] * 7)[torch.randperm(40)]
    drawn = torch.zeros(40)
    for seed in range(400):
        chosen = stratified(labels, 12, seed)
        counts = labels[chosen].bincount(minlength=4).tolist()
        assert (sum(counts), counts[0], counts[1]) == (12, 3, 6)  # 0.3 of 10, of 20
        assert counts[2] in (0, 1, 2)  # 0.9, within one sample
        assert counts[3] in (1, 2, 3)  # 2.1
        drawn += chosen
    # Each sample is as likely as any other: 12 / 40, give or take four standard errors.
    assert float((drawn / 400 - 0.3).abs().max()) < 4 * math.sqrt(0.3 * 0.7 / 400)


def test_targets_of_a_regression_are_spread_and_those_without_an_order_drawn_at_random() -> None:
    targets = torch.linspace(0, 1, 100)[torch.randperm(100)]
    assert abs(float(targets[stratified(targets, 10, 0)].mean()) - 0.5) < 0.1
    assert int(stratified(torch.zeros(20, 3), 6, 0).sum()) == 6
    assert not torch.equal(stratified(torch.zeros(20, 3), 6, 0), stratified(torch.zeros(20, 3), 6, 1))


def test_a_delta_run_holds_out_nothing() -> None:
    plan = tiny()
    assert plan.detection == Delta()
    problem = problem_for(plan)
    assert [split_validation(plan, problem, i) for i in range(6)] == [(train, None) for train, _ in problem.data]
    (_, result), *_ = federate(plan, problem=problem)
    assert (result.reports, result.detection) == (None, None)


def _spoiled(plan: Plan) -> Problem:
    """The same problem, with another input in every sample of every V_i; the labels decide who is in V_i."""
    problem = problem_for(plan)
    pairs = []
    for client, (whole, test) in enumerate(problem.data):
        _, validation = split_validation(plan, problem, client)
        assert validation is not None
        x, y = whole.take(torch.arange(len(whole)))
        held_out = torch.isin(whole.rows, validation.rows)  # type: ignore[attr-defined]
        pairs.append(((torch.where(held_out.view(-1, *[1] * (x.dim() - 1)), 1 - x, x), y), test))
    return Problem(pairs, problem.model)


@pytest.mark.parametrize(("attack", "with_validation"), [("none", False), ("backdoor", False), ("none", True)])
def test_nothing_trains_on_the_validation_part(attack: str, with_validation: bool) -> None:
    # Everyone answers and recovery is on: w, v_i, P_i and the attackers' pool would show a changed label.
    threat = Backdoor(share=0.17, epochs=2) if attack == "backdoor" else component_none()
    method = Method(adaptation=component_dual(), recovery=Always())
    plan = tiny(
        method, model=SmallCnn(), rounds=2, detection=Gain(), environment=Environment(Sampled(rate=1.0), threat)
    )
    if not with_validation:
        plan = replace(plan, alone=replace(plan.alone, with_validation=False))
    (_, _), (clean, right) = federate(plan, problem=problem_for(plan))
    (_, _), (spoiled, wrong) = federate(plan, problem=_spoiled(plan))
    assert torch.equal(clean.w, spoiled.w)
    assert right.scores is not None
    assert wrong.scores is not None
    local, private = ([[getattr(one, name) for one in of.scores.clients] for of in (right, wrong)]
                      for name in ("local", "private"))  # fmt: skip
    assert local[0] == local[1]
    assert (private[0] != private[1]) is with_validation  # the second P_i alone
    assert right.reports != wrong.reports


def component_dual() -> object:
    from lindt.protocols import Adaptation

    return component(Adaptation, "dual")


def component_none() -> object:
    return Environment().threat


def test_the_attackers_pool_has_no_validation_sample() -> None:
    plan = tiny(detection=Gain())
    problem = problem_for(plan)
    wanted = plan.environment.threat.pool(pool([split_validation(plan, problem, i)[0] for i in range(6)]))
    found = backdoor_of(plan, problem)
    assert found is not None
    assert wanted is not None
    everyone = plan.environment.threat.pool(pool([train for train, _ in problem.data]))
    assert everyone is not None
    assert len(found) == len(wanted) < len(everyone)


def test_a_report_is_what_the_models_say_of_the_validation_part() -> None:
    plan = tiny(rounds=1, detection=Gain(), alone=Alone(epochs=6, patience=6), environment=Environment(Sampled(1.0)))
    problem = problem_for(plan)
    (_, result), *_ = federate(plan, problem=problem)
    assert result.reports is not None
    assert sorted(result.reports) == list(range(6))
    for client, report in result.reports.items():
        train, validation = split_validation(plan, problem, client)
        assert validation is not None
        cpu = torch.device("cpu")
        training = PrivateTraining(f"client {client}", train, problem.data[client][1], plan, problem, cpu, validation)
        alone = training.learn()
        assert alone.w_P is not None
        private, y = first_model(problem, plan), validation.labels
        nn.utils.vector_to_parameters(alone.w_P, private.parameters())
        hits_w = (forward_all(first_model(problem, plan).eval(), validation, cpu).argmax(-1) == y).double()
        hits_p = (forward_all(private.eval(), validation, cpu).argmax(-1) == y).double()
        won, lost = int((hits_w > hits_p).sum()), int((hits_w < hits_p).sum())
        n = len(y)
        assert report.samples == n
        assert report.private.mean == pytest.approx((won - lost) / n)
        assert report.private.square == pytest.approx((won + lost) / n)
        assert alone.validation_en is not None
        assert len(alone.validation_en) == alone.epochs
        young = alone.validation_en[0]  # round 1, E = 1: P_i after one epoch
        assert report.equal_age.mean == pytest.approx(float((hits_w - young).mean()))
        assert (report.adapted, report.adapted_private) == (None, None)


def test_while_recovery_is_on_clients_report_what_they_predict_with() -> None:
    method = Method(adaptation=component_dual(), recovery=Always())
    plan = tiny(method, model=SmallCnn(), rounds=3, detection=Gain())
    results = [result for _, result in federate(plan)]
    attacker = {1, 2, 3, 4, 5, 0} - {score.client for score in results[1].scores.clients}  # type: ignore[union-attr]
    for result in results:
        for client, report in (result.reports or {}).items():
            assert (report.adapted is None) == (client in attacker)
            if report.adapted is not None and report.adapted_private is not None:
                # (adapted - w) + (w - P_i) = adapted - P_i
                assert report.adapted.mean + report.private.mean == pytest.approx(report.adapted_private.mean)


@pytest.mark.slow
def test_every_engine_brings_the_same_reports(tmp_path: Path) -> None:
    plan = tiny(replace(METHODS["lindt"], recovery=Always()), model=SmallCnn(), rounds=2, detection=Gain())
    problem = problem_for(plan)
    here = [result for _, result in federate(plan, problem=problem)]
    with Processes(plan, problem, workers=2) as engine:
        there = [result for _, result in federate(plan, problem=problem, engine=engine)]
    assert here == there
    assert all(result.reports for result in here)


def test_a_resumed_run_writes_the_same_bytes(tmp_path: Path) -> None:
    method = Method(adaptation=component_dual(), recovery=OnEvidence())
    plan = tiny(method=method, model=SmallCnn(), rounds=6, detection=Gain())
    list(run_plan(plan, tmp_path / "whole", cache=tmp_path / "cache"))
    events = run_plan(plan, tmp_path / "cut", cache=tmp_path / "cache")
    for event in events:
        if getattr(event, "line", {}).get("round") == 3:
            break
    events.close()  # type: ignore[attr-defined]
    list(run_plan(None, tmp_path / "cut", resume=True, cache=tmp_path / "cache"))
    whole, cut = ((tmp_path / name / "rounds.jsonl").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    assert all(json.loads(line)["reports"] for line in whole.splitlines())


def test_a_kept_private_model_reports_the_same(tmp_path: Path) -> None:
    plan = tiny(rounds=1, detection=Gain())
    problem = problem_for(plan)
    training = PrivateTraining(
        "client 0", *_parts(plan, problem), plan, problem, torch.device("cpu"), split_validation(plan, problem, 0)[1]
    )
    first, again = (PrivateModelCache(tmp_path).learned(training) for _ in range(2))
    for name in ("outputs", "validation_en", "w_P"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    plain = replace(training, validation=None)
    assert plain.key() != training.key()
    assert PrivateModelCache(tmp_path).learned(plain).validation_en is None


def _parts(plan: Plan, problem: Problem) -> tuple[object, object]:
    return split_validation(plan, problem, 0)[0], problem.data[0][1]


def test_a_panel_is_a_share_of_the_clients_and_the_others_hold_out_nothing() -> None:
    plan = tiny(detection=Gain(panel=0.5), environment=Environment(Sampled(1.0)), rounds=1)
    panel = reporting_clients(plan, 6)
    assert len(panel) == 3
    problem = problem_for(plan)
    assert {i for i in range(6) if split_validation(plan, problem, i)[1] is not None} == panel
    (_, result), *_ = federate(plan, problem=problem)
    assert set(result.reports or {}) == panel
    # Guarded prediction chooses on V_i: all clients hold one out, and still only the panel reports.
    guarded = replace(plan, method=METHODS["guarded-fine-tune"])
    assert all(split_validation(guarded, problem, i)[1] is not None for i in range(6))
    *_, (_, result) = federate(guarded, problem=problem)
    assert set(result.reports or {}) == panel


def test_a_client_with_too_few_samples_reports_nothing_and_the_rest_goes_on() -> None:
    plan = tiny(detection=Gain(), environment=Environment(Sampled(1.0)), rounds=1)
    problem = problem_for(plan)
    (train, test), *others = problem.data
    x, y = train.take(torch.arange(4))
    few = Problem([((x, y), test), *others], problem.model)
    (_, result), *_ = federate(plan, problem=few)
    assert result.answered == (0, 1, 2, 3, 4, 5)
    assert sorted(result.reports or {}) == [1, 2, 3, 4, 5]


def test_the_pair_of_a_bounded_metric_and_of_another() -> None:
    first, second = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert paired(METRICS["accuracy"], first, second) == Paired(0.25, 0.75)
    own = MeanOf(lambda outputs, y: -(outputs - y).abs())
    assert paired(own, torch.tensor([-9.0, -1.0, 0.0, 0.0]), torch.tensor([-1.0, -500.0, 0.0, 0.0])) == Paired(0.0, 0.5)


def test_a_w_that_overflows_loses_and_its_report_is_not_dropped() -> None:
    """An attacker that makes w huge would silence all honest clients, whose reports would hold NaN."""
    y = torch.tensor([0, 0, 1, 1])
    broken = torch.tensor([[math.nan, math.nan]]).expand(4, 2)  # argmax of NaN is 0
    right = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    of_w, alone = (sample_values(METRICS["accuracy"], outputs, y) for outputs in (broken, right))
    assert paired(METRICS["accuracy"], of_w, alone) == Paired(-1.0, 1.0)
    assert METRICS["accuracy"].tally(broken, y).tolist() == [0.0, 4.0]
    own = MeanOf(lambda outputs, y: -(outputs[:, 0] - y).square())
    of_w, alone = (sample_values(own, outputs, y) for outputs in (broken, right))
    assert of_w.tolist() == [-math.inf] * 4
    assert paired(own, of_w, alone) == Paired(-1.0, 1.0)
    assert paired(own, of_w, of_w) == Paired(0.0, 0.0)
    report = GainReport(4, paired(own, of_w, alone), paired(own, of_w, alone))
    assert clipped_report(report) == report


def test_a_report_is_clipped_and_one_with_nan_is_dropped() -> None:
    pair = Paired(0.5, 0.5)
    far = GainReport(8, Paired(-7.0, 0.0), pair, first_batch=3.0)
    assert clipped_report(far) == GainReport(8, Paired(-1.0, 1.0), pair, first_batch=1.0)
    assert clipped_report(GainReport(8, pair, Paired(0.5, 0.0))) == GainReport(8, pair, Paired(0.5, 0.25))
    for bad in (Paired(math.nan, 0.5), Paired(0.5, math.inf)):
        assert clipped_report(GainReport(8, bad, pair)) is None
        assert clipped_report(GainReport(8, pair, pair, adapted=bad)) is None
    assert clipped_report(GainReport(0, pair, pair)) is None


def test_a_report_travels_as_json() -> None:
    report = GainReport(8, Paired(-0.1, 0.3), Paired(1 / 3, 0.5), Paired(0.0, 0.0), Paired(0.25, 0.25), -0.125)
    packed = json.loads(json.dumps(pack_reply(Reply(3, 7, 20, report=report))))
    assert unpack_report(packed["report"]) == report
    assert "report" not in pack_reply(Reply(3, 7, 20))
    for change in ({"samples": -1}, {"samples": True}, {"private": None}, {"private": {"mean": 0.1}}, {"extra": 1}):
        with pytest.raises(ValueError, match=r"samples|gain|mean|report"):
            unpack_report(packed["report"] | change)
    with pytest.raises(ValueError, match="mean"):
        unpack_report(packed["report"] | {"private": {"mean": "x", "square": 1.0}})


def test_an_update_counts_without_a_report_that_cannot_be_read() -> None:
    plan = tiny(detection=Gain(), rounds=1)
    problem = problem_for(plan)
    engine = InProcess(plan, problem)
    inner, state = engine.dispatch, begin(plan, problem)

    class Liar:
        available, forget_after = engine.available, engine.forget_after

        def dispatch(self, tasks: list[Task]) -> list[Reply]:
            bad = GainReport(8, Paired(math.nan, 1.0), Paired(0.0, 0.0))
            return [replace(reply, report=bad) if reply.report else reply for reply in inner(tasks)]

    (_, result), *_ = federate(plan, problem=problem, engine=Liar(), state=state)
    assert len(result.answered) == 3
    assert result.reports == {}


def test_recovery_that_follows_reports_needs_them() -> None:
    with pytest.raises(PlanError, match=r"detection.*gain"):
        replace(tiny(), method=Method(adaptation=component_dual(), recovery=OnEvidence()))
    with pytest.raises(PlanError, match=r"alone\.private"):
        tiny(detection=Gain(), alone=Alone(private=False))


def test_a_metric_of_ones_own_reports_shares_won_less_lost() -> None:
    plan = tiny(detection=Gain(), rounds=1, environment=Environment(Sampled(1.0)))
    problem = problem_for(plan)

    def likelihood(outputs: Tensor, y: Tensor) -> Tensor:
        return 100 * outputs.log_softmax(-1).gather(1, y[:, None])[:, 0]

    own = Problem(problem.clients, problem.model, metric=likelihood)
    (_, result), *_ = federate(plan, problem=own)
    for report in (result.reports or {}).values():
        assert -1 <= report.private.mean <= 1
        share = report.private.mean * report.samples
        assert share == pytest.approx(round(share), abs=1e-9)


def test_noise_on_reports_has_the_stated_scale_and_hides_the_squares() -> None:
    plan = tiny(detection=Gain(), rounds=20, alone=Alone(epochs=1, patience=1), environment=Environment(Sampled(1.0)))
    problem = problem_for(plan)
    clean = [result.reports or {} for _, result in federate(plan, problem=problem)]
    noisy_plan = replace(plan, detection=Gain(noise=0.05))
    noisy = [result.reports or {} for _, result in federate(noisy_plan, problem=problem)]
    again = [result.reports or {} for _, result in federate(noisy_plan, problem=problem)]
    assert noisy == again  # a simulation repeats itself
    pairs = [(a[i].private, b[i].private) for a, b in zip(clean, noisy, strict=True) for i in a]
    assert {b.square for _, b in pairs} == {1.0}
    added = torch.tensor([b.mean - a.mean for a, b in pairs if abs(b.mean) < 1])
    assert len(added) > 80
    assert 0.03 < float(added.abs().mean()) < 0.07  # E|Laplace(b)| = b


def test_far_from_the_server_the_noise_is_drawn_anew_and_from_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a seed of 63 bits torch's generator keeps 32: the server could try them all."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 7)
    plan = tiny(detection=Gain(noise=0.05), rounds=1, environment=Environment(Sampled(1.0)))
    problem = problem_for(plan)

    def reports() -> object:
        engine = InProcess(plan, problem, far_away=True)
        return next(iter(federate(plan, problem=problem, engine=engine)))[1].reports

    assert reports() != reports()
