"""One round as a straight line: what the server does with what clients send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from worlds import Scripted, tiny, tiny_runtime

from lindt.client.adaptations.dual import Dual
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.environment.threats import Backdoor
from lindt.errors import PlanError, UserError
from lindt.plan.models import Mlp
from lindt.plan.plan import METHODS, Alone, Method, Plan, Scoring, Training, attackers_of, scored_clients
from lindt.plan.problem import Problem, problem_for
from lindt.protocols import Buffers, Detection, RecoveryState, Reply, Task
from lindt.server.aggregation import TrimmedMean
from lindt.server.detection.divergence import Delta
from lindt.server.detection.gain import Gain
from lindt.server.federation import _SharedPart, begin, federate, play_round
from lindt.server.recovery import OnDetection
from lindt.server.state import RunState

NONE = Buffers(torch.empty(0), torch.empty(0, dtype=torch.int64))


def line(slope: float = 0.0) -> nn.Module:
    """y = slope * x, one weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, slope)
    return model


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output[:, 0] - y).square().mean()


def one_weight(clients: int = 3, **changes: object) -> tuple[Plan, Problem]:
    """Clients with one sample pair (x = 1, y = i): everything fits on a slip of paper."""
    data = [((torch.ones(2, 1), torch.full((2,), float(i))),) * 2 for i in range(clients)]
    problem = Problem(data, line, squared, metric=lambda out, y: -(out[:, 0] - y).abs())
    plan = Plan(
        rounds=1,
        training=Training(rate=0.1, decay=1.0, batch=10, max_norm=1e9),
        environment=Environment(Sampled(rate=1.0)),
        alone=Alone(private=False),
        scoring=Scoring(last=1),
    )
    return replace(plan, **changes), problem  # type: ignore[arg-type]


def test_a_rounds_cosine_is_that_of_the_clipped_updates_of_the_last_layer() -> None:
    """The same numbers from the replies of each client, pair by pair."""
    environment = Environment(Sampled(rate=1.0), privacy=Gaussian(S=0.05, sigma=0.0))
    plan = tiny(model=Mlp(64, 8), environment=environment)
    problem = problem_for(plan)
    engine, state = InProcess(plan, problem), begin(plan, problem)
    replies = list(
        engine.dispatch([Task("train", "", i, 1, state.w, state.buffers, False) for i in engine.available()])
    )
    last = sum(p.numel() for p in list(problem.model().parameters())[-2:])
    updates = [(reply.w - state.w)[-last:].double() for reply in replies if reply.w is not None]
    pairs = [torch.cosine_similarity(a, b, dim=0) for i, a in enumerate(updates) for b in updates[:i]]
    _, result = play_round(state, plan, problem, InProcess(plan, problem))
    assert result.seen is not None
    assert len(pairs) > 1
    assert result.seen.cosine == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-4)


def test_one_round_of_fedavg_by_hand() -> None:
    # w = 0; client i steps on (w - i)^2: w_i = 0.1 * 2 * i = 0, 0.2, 0.4; their mean is 0.2.
    plan, problem = one_weight()
    ((state, result),) = federate(plan, problem=problem)
    assert state.w.tolist() == pytest.approx([0.2])
    # |0 - 0.2|, 0, |0.4 - 0.2|: w_div = 0.4 / 3, no noise.
    assert result.seen is not None
    assert result.seen.delta == result.seen.w_div == pytest.approx(0.4 / 3)
    # central: -(0.2 + 0.8 + 1.8) / 3 over all test samples.
    assert result.scores is not None
    assert result.scores.central == pytest.approx(-2.8 / 3)


def test_two_epochs_and_the_decayed_rate_by_hand() -> None:
    # Round 2 starts at w = 0.2 with half the rate: client i moves by 0.05 * 2 * (i - w).
    plan, problem = one_weight(rounds=2, training=Training(rate=0.1, decay=0.5, batch=10, max_norm=1e9))
    *_, (state, _) = federate(plan, problem=problem)
    assert state.w.tolist() == pytest.approx([0.2 + 0.1 * (1 - 0.2)])


def test_clip_noise_and_delta_by_hand() -> None:
    env = Environment(Sampled(rate=1.0), privacy=Gaussian(S=0.3, sigma=0.5))
    plan, problem = one_weight(environment=env)
    ((state, result),) = federate(plan, problem=problem)
    noise = float(env.privacy.noise(torch.zeros(1), plan.seed_for("noise", 1)))
    assert state.w.tolist() == pytest.approx([(0.0 + 0.2 + 0.3) / 3 + noise])  # Eq. 4: 0.4 is clipped to 0.3
    assert result.seen is not None
    w = float(state.w)
    w_div = (abs(0 - w) + abs(0.2 - w) + abs(0.4 - w)) / 3  # Eq. 5 takes w_i as it was sent, before clipping
    assert result.seen.w_div == pytest.approx(w_div)
    assert result.seen.delta == pytest.approx(w_div - abs(noise))  # Eq. 7
    assert result.seen.clipped == pytest.approx(1 / 3)


def answers(*weights: float, round: int = 1) -> list[Reply]:
    return [Reply(i, round, 10, torch.tensor([w]), NONE) for i, w in enumerate(weights)]


def state_of(w: float, recovery: RecoveryState | None = None) -> RunState:
    return RunState("", 0, torch.tensor([w]), NONE, recovery or RecoveryState())


def without_scores(plan: Plan) -> Plan:
    return replace(plan, rounds=100, scoring=Scoring(every=100, last=1))


BROKEN = {
    "NaN": (torch.tensor([float("nan")]), "NaN or infinity"),
    "infinity": (torch.tensor([float("inf")]), "NaN or infinity"),
    "too long": (torch.tensor([1.0, 2.0]), "it has 2 weights, the model 1"),
    "none": (None, "no weights"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_update_is_refused_by_name_and_the_round_goes_on(case: str) -> None:
    w, reason = BROKEN[case]
    replies = answers(1.0, 0.0, 3.0)
    replies[1] = Reply(1, 1, 10, w, NONE)
    plan, problem = one_weight()
    state, result = play_round(state_of(0.0), without_scores(plan), problem, Scripted(replies))
    assert state.w.tolist() == [2.0]
    assert result.answered == (0, 2)
    assert [(one.client, reason in one.reason) for one in result.refused] == [(1, True)]


def test_late_double_and_unasked_answers_are_refused() -> None:
    late, unasked = Reply(1, 7, 10, torch.tensor([5.0]), NONE), Reply(9, 1, 10, torch.tensor([5.0]), NONE)
    replies = [*answers(1.0), *answers(5.0), late, unasked]
    plan, problem = one_weight()
    state, result = play_round(state_of(0.0), without_scores(plan), problem, Scripted(replies))
    assert state.w.tolist() == [1.0]
    assert [one.client for one in result.refused] == [0, 1, 9]
    assert "a reply to round 7" in result.refused[1].reason


def test_an_update_too_long_to_measure_is_refused() -> None:
    env = Environment(Sampled(rate=1.0))
    plan, problem = one_weight(environment=env)
    two = Buffers(torch.empty(0), torch.empty(0, dtype=torch.int64))
    replies = [Reply(0, 1, 1, torch.tensor([3e38]), two), Reply(1, 1, 1, torch.tensor([1.0]), two)]
    _, result = play_round(state_of(-1e17), without_scores(plan), problem, Scripted(replies))
    assert [one.client for one in result.refused] == [0]
    assert result.answered == (1,)


def test_a_round_without_a_valid_update_keeps_w_and_the_count() -> None:
    env = Environment(Sampled(rate=1.0), privacy=Gaussian(sigma=0.5))
    plan, problem = one_weight(environment=env, method=Method(recovery=OnDetection(epsilon=0.1, patience=5)))
    before = RecoveryState(count=3, quiet=0)
    state, result = play_round(state_of(4.0, before), without_scores(plan), problem, Scripted([]))
    assert state.w.tolist() == [4.0]  # no noise either
    assert result.seen is None
    assert result.answered == ()
    assert state.recovery == before


def test_the_order_of_arrival_does_not_matter() -> None:
    plan, problem = one_weight(method=METHODS["trimmed-mean"])
    forth = play_round(state_of(0.0), without_scores(plan), problem, Scripted(answers(0.1, 0.7, 0.3)))
    back = play_round(state_of(0.0), without_scores(plan), problem, Scripted(answers(0.1, 0.7, 0.3)[::-1]))
    assert torch.equal(forth[0].w, back[0].w)
    assert forth[1] == back[1]


def test_over_selection_takes_the_first_k_answers() -> None:
    env = Environment(Sampled(active_clients=2, over_select=1))
    plan, problem = one_weight(environment=env, method=Method())  # the default would measure what it suspects
    engine = Scripted(answers(1.0, 2.0, 30.0))
    state, result = play_round(state_of(0.0), without_scores(plan), problem, engine)
    assert len(engine.tasks) == 3
    assert result.answered == (0, 1)
    assert state.w.tolist() == [1.5]


def test_the_flag_reaches_the_clients_in_the_round_after_detection() -> None:
    plan, problem = one_weight(method=Method(recovery=OnDetection(epsilon=0.1, patience=0)))
    plan = without_scores(plan)
    engine = Scripted(answers(0.0, 1.0))
    state, result = play_round(state_of(0.0), plan, problem, engine)
    # A suspicion is measured at once, before the cure; these clients have no tally to give, so there is no score.
    assert {(t.kind, t.recovering) for t in engine.tasks} == {("train", False), ("evaluate", False)}
    assert result.scores is None
    assert (result.recovering, state.recovery.on) == (False, True)


class Reversed:
    """The real clients, answering in the opposite order."""

    def __init__(self, inner: InProcess) -> None:
        self.inner = inner

    def available(self) -> Sequence[int]:
        return self.inner.available()

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        return self.inner.dispatch(tasks[::-1])

    def forget_after(self, round: int) -> None:
        self.inner.forget_after(round)


QUICK = {"fb": Method(adaptation=FineTuneHead(rate=0.05, epochs=5))}


@pytest.mark.parametrize("method", ["fedavg", "fb", "apfl", "lindt"])
def test_clients_in_another_order_give_the_same_bytes(method: str) -> None:
    plan = tiny_runtime() if method == "lindt" else tiny(QUICK.get(method, method))
    problem = problem_for(plan)
    straight = list(federate(plan, problem=problem))
    turned = list(federate(plan, problem=problem, engine=Reversed(InProcess(plan, problem))))
    for (a, x), (b, y) in zip(straight, turned, strict=True):
        assert torch.equal(a.w, b.w)
        assert x == y


def nbytes(message: Task | Reply) -> int:
    assert message.w is not None
    assert message.buffers is not None
    return message.w.nbytes + message.buffers.nbytes


class Weighed(Reversed):
    def __init__(self, inner: InProcess) -> None:
        super().__init__(inner)
        self.sent: list[int] = []
        self.received: list[tuple[int, set[str]]] = []

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        for reply in self.inner.dispatch(tasks):
            if reply.w is not None:
                self.sent += [nbytes(task) for task in tasks if task.client == reply.client]
                filled = {name for name in Reply.__dataclass_fields__ if getattr(reply, name) is not None}
                self.received.append((nbytes(reply), filled))
            yield reply


def test_lindt_exchanges_not_one_byte_more_than_fedavg() -> None:
    weighed = {}
    for name in ("fedavg", "lindt"):
        plan = replace(tiny_runtime(alone=Alone(private=False)), method=METHODS[name])
        engine = Weighed(InProcess(plan, problem_for(plan)))
        list(federate(plan, engine=engine))
        weighed[name] = (engine.sent, engine.received)
    assert weighed["lindt"] == weighed["fedavg"]
    assert weighed["lindt"][0][0] == 13_706 * 4


def test_always_is_detection_with_no_patience_but_for_the_first_round() -> None:
    always, detected = (tiny_runtime(patience, alone=Alone(private=False)) for patience in (1, 0))
    always = replace(always, method=replace(always.method, recovery=METHODS["lindt"].recovery))
    flags = {name: [r.recovering for _, r in federate(plan)] for name, plan in (("a", always), ("d", detected))}
    assert flags == {"a": [True] * 4, "d": [False, True, True, True]}


def test_attackers_train_w_only() -> None:
    plan = replace(tiny_runtime(alone=Alone(private=False)), method=METHODS["lindt"], rounds=6)
    problem = problem_for(plan)
    engine = InProcess(plan, problem)
    list(federate(plan, problem=problem, engine=engine))
    with_v = {i for i in engine.available() if engine.versions.rounds(i)}
    (attacker,) = attackers_of(plan, 6)
    assert attacker not in with_v
    assert len(with_v) >= 3


def test_a_resumed_state_goes_on_to_the_same_numbers() -> None:
    plan = tiny_runtime(rounds=6)
    problem = problem_for(plan)
    straight = list(federate(plan, problem=problem))
    engine = InProcess(plan, problem)
    states = [state for (state, _), _ in zip(federate(plan, problem=problem, engine=engine), range(4), strict=False)]
    # Round 4 was played, but the server lost it: go back to the state after round 3.
    engine.forget_after(3)
    resumed = list(federate(plan, problem=problem, engine=engine, state=states[2]))
    assert [r for _, r in resumed] == [r for _, r in straight[3:]]
    assert torch.equal(resumed[-1][0].w, straight[-1][0].w)


def test_a_state_without_reports_is_refused_by_a_plan_that_tests_them() -> None:
    """The test would take the rounds that it knows nothing of for rounds without a single report."""
    plan = tiny(rounds=2)
    problem = problem_for(plan)
    state, _ = next(iter(federate(plan, problem=problem)))
    tested = replace(plan, detection=Gain())
    with pytest.raises(UserError, match="needs their reports from round 1 on; continue with detection=delta"):
        next(iter(federate(tested, problem=problem, state=state)))


def test_your_own_clients_model_loss_and_metric() -> None:
    data = [((torch.ones(2, 1), torch.full((2,), float(i))),) * 2 for i in range(2)]
    plan, _ = one_weight(rounds=3)
    *_, (state, result) = federate(
        plan, clients=data, model=line, loss=squared, metric=lambda o, y: -(o[:, 0] - y).abs()
    )
    assert 0 < float(state.w) < 0.5
    assert result.scores is not None
    assert result.scores.local < 0


def test_what_only_the_data_can_tell_is_checked_before_anything_trains() -> None:
    def complaint(plan: Plan) -> str:
        with pytest.raises(PlanError) as caught:
            next(federate(plan))
        return str(caught.value)

    env = tiny().environment
    assert "environment.participation.active_clients = 7: there are 6 clients; give 6 or fewer" in complaint(
        tiny(environment=replace(env, participation=Sampled(active_clients=7)))
    )
    dual = Method(adaptation=Dual(points=("fc9",)))
    assert "method.adaptation.points = 'fc9': no such submodule" in complaint(tiny(method=dual))
    weights = Scoring(weighting="given", weights=(1.0,) * 5)
    assert "scoring.weights" in complaint(tiny(scoring=weights))
    assert complaint(tiny(scoring=Scoring(weighting="given"))) == (
        "scoring.weights = (): weighting is 'given': give one weight for each client, or weights= beside clients="
    )
    with pytest.raises(UserError, match="give both"):
        next(federate(tiny(), model=line))


def test_a_trimmed_mean_of_the_attackers_share() -> None:
    plan, problem = one_weight(clients=5, method=replace(METHODS["fedavg"], aggregator=TrimmedMean(share=0.2)))
    # Client i sends 0.2 i: without the smallest and the largest the mean of 0.2, 0.4, 0.6.
    ((state, _),) = federate(plan, problem=problem)
    assert state.w.tolist() == pytest.approx([0.4])


def test_begin_is_the_same_for_every_method() -> None:
    plan = tiny()
    problem = problem_for(plan)
    first = [begin(replace(plan, method=method), problem).w for method in METHODS.values()]
    assert all(torch.equal(first[0], w) for w in first)


def test_those_who_come_too_late_have_trained_for_nothing() -> None:
    env = Environment(Sampled(active_clients=2, over_select=1))
    plan, problem = one_weight(environment=env)
    ((state, result),) = federate(plan, problem=problem)
    (late,) = set(result.asked) - set(result.answered)
    assert late == result.asked[2]  # the drawn order is the order of arrival
    assert state.w.tolist() == pytest.approx([sum(0.2 * i for i in result.answered) / 2])


@pytest.mark.parametrize("detection", [Delta(), Gain()])
def test_a_panel_is_scored_as_everyone_would_be_and_changes_nothing_else(detection: Detection) -> None:
    """The same w and reports to the last bit, and for each member the scores that it has without a panel."""
    plan = tiny("fedavg", rounds=2, detection=detection)
    whole = list(federate(plan))
    some = list(federate(replace(plan, scoring=replace(plan.scoring, panel=4))))
    members = scored_clients(replace(plan, scoring=replace(plan.scoring, panel=4)), 6)
    assert len(members) == 4
    for (state, result), (panel_state, panel_result) in zip(whole, some, strict=True):
        assert torch.equal(state.w, panel_state.w)
        assert result.reports == panel_result.reports
    scores, panel = whole[-1][1].scores, some[-1][1].scores
    assert scores is not None
    assert panel is not None
    assert panel.clients == tuple(one for one in scores.clients if one.client in members)
    assert scores.panel is None
    assert panel.panel is not None
    counted = 6 - len(attackers_of(plan, 6))
    assert (panel.panel.clients, panel.panel.of) == (len(panel.clients), counted)
    asked = replace(plan, scoring=replace(plan.scoring, panel=6))  # all, when asked
    assert list(federate(asked))[-1][1].scores == scores


def test_a_panel_of_attackers_alone_is_refused() -> None:
    plan = tiny("fedavg", environment=replace(tiny().environment, threat=Backdoor(share=0.84)))
    with pytest.raises(PlanError, match=r"scoring.panel.*all clients of the panel attack"):
        next(iter(federate(replace(plan, scoring=replace(plan.scoring, panel=2)))))


def test_the_shared_part_of_each_update_is_packed_into_the_rows_that_it_came_from() -> None:
    updates_KP = torch.arange(15.0).view(3, 5)
    part = _SharedPart(torch.tensor([1, 2, 4]), [("a", 2), ("c", 1)])
    packed_KP = part.of_rows(updates_KP)
    assert packed_KP.tolist() == [[1, 2, 4], [6, 7, 9], [11, 12, 14]]
    assert packed_KP.data_ptr() == updates_KP.data_ptr()  # no second stack
    assert _SharedPart(None, [("a", 5)]).of_rows(updates_KP) is updates_KP


def test_spread_and_step_are_those_of_clipped_updates_and_delta_of_the_sent_ones() -> None:
    """All updates are longer than S: the distances from their mean are at most 2 S, and w moves by at most S."""
    S = 0.001
    plan = tiny(environment=Environment(Sampled(rate=1.0), privacy=Gaussian(S=S, sigma=0.0)), rounds=1)
    before = begin(plan, problem_for(plan)).w
    ((after, result),) = federate(plan)
    assert result.seen is not None
    assert result.seen.clipped == 1.0
    assert 0 < result.seen.spread <= 2 * S
    assert 0 < float(torch.linalg.vector_norm(after.w - before)) <= S * (1 + 1e-3)  # of rounding of w
    assert result.seen.delta > 10 * S
