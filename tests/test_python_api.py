"""The Python API as a person uses it from a notebook: resuming, own problems, own loops, second calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import tiny, tiny_runtime

from lindt import Detector, PlanError, Problem, RoundResult, RunState, UserError, federate, intertwine, is_negative
from lindt.client.private_models import centralized
from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.threats import Backdoor, LabelFlip, ModelReplacement, Threat, Until
from lindt.plan.plan import METHODS, Alone, Plan, Scoring, Training
from lindt.plan.problem import problem_for
from lindt.server.recovery import EveryoneTreated, OnDetection

ALONE = Alone(private=False)  # P_i takes most of the time, and has nothing to do with these tests
Rounds = list[tuple[RunState, RoundResult]]


def same(resumed: Rounds, straight: Rounds) -> None:
    assert [result for _, result in resumed] == [result for _, result in straight]
    for (mine, _), (theirs, _) in zip(resumed, straight, strict=True):
        assert torch.equal(mine.w, theirs.w)
        assert mine.recovery == theirs.recovery


def lindt_plan(rounds: int = 6) -> Plan:
    return replace(tiny_runtime(alone=ALONE), method=METHODS["lindt"], rounds=rounds)


RESUMED = {"all the time": lindt_plan(), "on detection": tiny_runtime(alone=ALONE, rounds=6)}


class TestResume:
    @pytest.mark.parametrize("name", RESUMED)
    def test_a_run_resumed_from_its_folder_equals_the_uninterrupted_run(self, name: str, tmp_path: Path) -> None:
        plan = RESUMED[name]
        straight = list(federate(plan))
        first = list(islice(federate(plan, folder=tmp_path), 4))
        resumed = list(federate(plan, state=first[-1][0], folder=tmp_path))
        same([*first, *resumed], straight)

    def test_v_i_written_after_the_state_are_not_used(self, tmp_path: Path) -> None:
        plan = lindt_plan()
        straight = list(federate(plan))
        first = list(islice(federate(plan, folder=str(tmp_path)), 4))
        same(list(federate(plan, state=first[2][0], folder=str(tmp_path))), straight[3:])

    def test_two_runs_in_one_folder_do_not_mix(self, tmp_path: Path) -> None:
        plan = lindt_plan()
        first = list(islice(federate(plan, folder=tmp_path), 3))
        other = list(federate(replace(plan, seed=1), folder=tmp_path))
        assert first[0][0].run != other[0][0].run
        same(list(federate(plan, state=first[-1][0], folder=tmp_path)), list(federate(plan))[3:])

    def test_a_state_without_the_clients_v_i_is_refused(self) -> None:
        for plan in RESUMED.values():
            *_, (state, _) = islice(federate(plan), 4)
            with pytest.raises(UserError, match=r"have stored a v_i.*folder="):
                next(federate(plan, state=state))

    def test_a_folder_without_the_v_i_is_refused(self, tmp_path: Path) -> None:
        plan = lindt_plan()
        *_, (state, _) = islice(federate(plan, folder=tmp_path / "mine"), 4)
        list(islice(federate(plan, folder=tmp_path / "other"), 4))
        with pytest.raises(UserError, match="other: it holds no v_i of this run"):
            next(federate(plan, state=state, folder=tmp_path / "other"))

    def test_a_folder_without_the_v_i_is_refused_after_recovery_has_stopped(self, tmp_path: Path) -> None:
        recovery = OnDetection(epsilon=1e-6, patience=0, stop=EveryoneTreated(), again="once")
        plan = tiny_runtime(alone=ALONE, rounds=20, environment=Environment(Sampled(rate=0.5)))
        plan = replace(plan, method=replace(plan.method, recovery=recovery))
        state = next(
            state
            for state, _ in federate(plan, folder=tmp_path / "mine")
            if state.recovery.detections and not state.recovery.on
        )
        with pytest.raises(UserError, match="it holds no v_i of this run"):
            next(federate(plan, state=state, folder=tmp_path / "other"))
        assert next(federate(plan, state=state, folder=tmp_path / "mine"))[1].round == state.round + 1

    def test_a_state_older_than_the_last_two_is_refused(self, tmp_path: Path) -> None:
        plan = lindt_plan()
        rounds = list(federate(plan, folder=tmp_path))
        with pytest.raises(UserError, match=r"round 1.*the last two"):
            next(federate(plan, state=rounds[0][0], folder=tmp_path))

    def test_a_method_that_keeps_nothing_resumes_without_a_folder(self) -> None:
        for method in ("fedavg", "watch"):
            plan = tiny(method, rounds=6)
            straight = list(federate(plan))
            same(list(federate(plan, state=straight[2][0])), straight[3:])

    def test_a_run_whose_recovery_was_never_on_resumes_without_a_folder(self) -> None:
        plan = tiny_runtime(patience=100, alone=ALONE, rounds=4)
        straight = list(federate(plan))
        same(list(federate(plan, state=straight[1][0])), straight[2:])

    def test_a_folder_and_an_engine_are_refused_together(self, tmp_path: Path) -> None:
        plan = tiny()
        problem = problem_for(plan)
        with pytest.raises(UserError, match="folder"):
            next(federate(plan, problem=problem, engine=InProcess(plan, problem), folder=tmp_path))

    def test_a_state_of_another_model_is_refused(self) -> None:
        *_, (state, _) = federate(tiny(rounds=1))
        with pytest.raises(UserError, match="weights"):
            next(federate(replace(tiny_runtime(), method=METHODS["fedavg"]), state=state))


def pair(n: int, classes: int = 3, seed: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A client's (train, test), where label c is the largest of `classes` features."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n + 4, classes, generator=draw)
    y = x.argmax(1)
    return (x[:n], y[:n]), (x[n:], y[n:])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def own(method: str = "fedavg", **changes: Any) -> Plan:
    """Two rounds with every client of the caller's own problem."""
    everyone = Environment(Sampled(rate=1.0))
    plan = Plan(rounds=2, environment=everyone, method=METHODS[method], alone=ALONE, scoring=Scoring(last=1))
    return replace(plan, **changes)


CLIENTS = [pair(12, seed=i) for i in range(3)]


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class Counting(nn.Linear):
    """Notes the number of threads that it runs with."""

    threads: ClassVar[set[int]] = set()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.threads.add(torch.get_num_threads())
        return super().forward(x)


@pytest.mark.usefixtures("_two_threads")
class TestThreads:
    def test_the_callers_number_of_threads_is_left_alone_between_rounds_and_after(self) -> None:
        Counting.threads.clear()
        rounds = federate(own(), clients=CLIENTS, model=lambda: Counting(3, 3))
        for _ in rounds:
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
        assert Counting.threads == {1}  # plan.threads

    def test_and_after_a_failure(self) -> None:
        trained = count()

        def loss(output: Tensor, y: Tensor) -> Tensor:
            if output.requires_grad and next(trained):  # the first step is the trial before the rounds
                raise RuntimeError("no")
            return output.sum()

        with pytest.raises(RuntimeError, match="no"):
            next(federate(own(), clients=CLIENTS, model=net, loss=loss, preflight=False))
        assert torch.get_num_threads() == 2

    def test_an_engine_and_centralized_training_leave_it_too(self) -> None:
        Counting.threads.clear()
        problem = Problem(CLIENTS, lambda: Counting(3, 3))
        InProcess(own(), problem)
        centralized(own(alone=Alone(epochs=2)), problem)
        assert torch.get_num_threads() == 2
        assert Counting.threads == {1}


class TestRefusedBeforeTraining:
    def test_float_targets_with_a_metric_of_classes(self) -> None:
        clients = [((x, x.sum(1)), (u, u.sum(1))) for (x, _), (u, _) in CLIENTS]

        def loss(output: Tensor, y: Tensor) -> Tensor:
            return (output[:, 0] - y).square().mean()

        with pytest.raises(UserError, match=r"client 0: .*floats.*metric="):
            next(federate(own(), clients=clients, model=lambda: nn.Linear(3, 1), loss=loss))
        rounds = federate(
            own(), clients=clients, model=lambda: nn.Linear(3, 1), loss=loss, metric=lambda o, y: -(o[:, 0] - y).abs()
        )
        assert len(list(rounds)) == 2

    def test_more_targets_a_sample_than_the_metric_has_predictions(self) -> None:
        clients = [((x, torch.stack([y, y], 1)), (x, torch.stack([y, y], 1))) for (x, y), _ in CLIENTS]

        def loss(output: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(output, y[:, 0])

        with pytest.raises(UserError, match=r"client 0: .*metric="):
            next(federate(own(), clients=clients, model=net, loss=loss))

    @pytest.mark.parametrize(
        ("threat", "field"),
        [
            (LabelFlip(share=0.4, classes=2), "environment.threat.classes = 2"),
            (Until(1, LabelFlip(share=0.4, classes=2)), "environment.threat.threat.classes = 2"),
            (
                ModelReplacement(2.0, Backdoor(share=0.4, relabel=((9, 1),), per_batch=1)),
                "environment.threat.threat.relabel",
            ),
        ],
    )
    def test_a_threat_that_does_not_fit_the_labels(self, threat: Threat, field: str) -> None:
        plan = own(environment=Environment(Sampled(rate=1.0), threat))
        with pytest.raises(PlanError, match=re.escape(field)):
            next(federate(plan, clients=CLIENTS, model=net))

    def test_a_client_too_small_for_batch_norm(self) -> None:
        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

        clients = [*CLIENTS, pair(2)]
        with pytest.raises(UserError, match=r"client 3: .*batch of 1 sample.*alone.private"):
            next(federate(own(alone=Alone(epochs=2)), clients=clients, model=model))
        with pytest.raises(UserError, match=r"training.batch"):
            next(federate(own(training=Training(batch=1)), clients=CLIENTS, model=model))
        assert len(list(federate(own(), clients=clients, model=model))) == 2  # trained together, two are enough
        assert len(list(federate(own(alone=Alone(epochs=2)), clients=clients, model=net))) == 2


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ({"plan": "digits-nfl"}, "plan: it is of type str"),
            ({"plan": replace(own(), method="lindt")}, "method = 'lindt': give a Method"),  # type: ignore[arg-type]
            ({"clients": 3}, "clients: it is of type int"),
            ({"model": net()}, "model: it is of type Sequential"),
            ({"model": lambda: 3}, "model: it builds an object of type int"),
            ({"model": lambda: net().requires_grad_(False)}, "model: it has no parameter to train"),
            ({"problem": CLIENTS, "clients": None, "model": None}, "problem: it is of type list"),
            ({"problem": Problem(CLIENTS, net)}, "problem: it was given with clients"),
            ({"state": (1, 2)}, "state: it is of type tuple"),
            ({"engine": "inprocess"}, "engine: it is of type str"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_federate_cannot_take_is_told_in_a_sentence(self, arguments: dict[str, Any], complaint: str) -> None:
        given: dict[str, Any] = {"plan": own(), "clients": CLIENTS, "model": net, **arguments}
        with pytest.raises(UserError, match=re.escape(complaint)):
            next(federate(given.pop("plan"), **given))

    def test_a_model_that_is_not_built_anew_is_refused(self) -> None:
        one = net()  # the second run, and every client's private model, would begin where the last one ended
        with pytest.raises(UserError, match="model: it returns the same module"):
            next(federate(own(), clients=CLIENTS, model=lambda: one))

    def test_models_that_share_weights_are_refused(self) -> None:
        backbone = nn.Linear(3, 3)
        kept = torch.zeros(3)

        def tied() -> nn.Module:
            return nn.Sequential(backbone, nn.Linear(3, 3))

        def part() -> nn.Module:
            model = net()
            model.register_buffer("mean", kept[1:])  # another tensor each time, of the same memory
            return model

        for model, name in ((tied, "0.weight"), (part, "mean")):
            with pytest.raises(UserError, match=f"model: two calls return modules that share {name}; build a new one"):
                next(federate(own(), clients=CLIENTS, model=model))
        assert torch.equal(kept, torch.zeros(3))

    def test_models_that_do_not_follow_the_seed_are_refused(self) -> None:
        draw = np.random.default_rng(0)

        def model() -> nn.Module:
            found = net()
            with torch.no_grad():
                found[0].weight.copy_(torch.from_numpy(draw.normal(size=tuple(found[0].weight.shape))))
            return found

        with pytest.raises(UserError, match=r"model: two calls with the same seed differ at 0\.weight; draw"):
            next(federate(own(), clients=CLIENTS, model=model))
        sizes = count(4)
        with pytest.raises(UserError, match=r"model: two calls with the same seed differ at 0\.weight; draw"):
            next(federate(own(), clients=CLIENTS, model=lambda: nn.Sequential(nn.Linear(3, next(sizes)))))

    def test_intertwine_knows_its_words(self) -> None:
        with pytest.raises(PlanError, match="scale = 'x'"):
            intertwine(net(), net(), scale="x")  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="position = 'x'"):
            intertwine(net(), net(), position="x")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="local_model: it is of type int"):
            intertwine(net(), 3)  # type: ignore[arg-type]
        assert list(intertwine(net(), net(), "1").points) == ["1"]
        with pytest.raises(PlanError, match="points = 'fc1'"):
            intertwine(net(), net(), "fc1")

    def test_the_detector_knows_its_words(self) -> None:
        with pytest.raises(PlanError, match="statistic = 'x'"):
            Detector(0.1, statistic="x")  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="counting = 'x'"):
            Detector(0.1, counting="x")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("clients", "new_global", "complaint"),
        [
            ([net()], net(), "it is a module (Sequential); give its weights, model.state_dict()"),
            ([None], torch.zeros(2), "type NoneType"),
            ({"a": torch.zeros(2)}, torch.zeros(2), "clients: it is of type dict"),
            ([{"a": torch.ones(2), "b": torch.ones(3)}], {"a": torch.ones(3), "b": torch.ones(2)}, "'a'"),
            ([{"a": torch.ones(2)}], {"b": torch.ones(2)}, "'a'"),
        ],
    )
    def test_weights_that_are_none(self, clients: Any, new_global: Any, complaint: str) -> None:
        with pytest.raises(UserError, match=re.escape(complaint)):
            Detector(0.1).observe(clients, new_global)

    def test_is_negative(self) -> None:
        assert is_negative(np.array([1.0, -2.0]))
        with pytest.raises(ValueError, match="last"):
            is_negative([1.0, -2.0], last=0)
        with pytest.raises(ValueError, match="a round has no beta"):
            is_negative([1.0, None])  # type: ignore[list-item]


class TestTheCallersTorch:
    def test_federate_trains_where_the_caller_has_switched_gradients_off(self) -> None:
        expected = list(federate(own("lindt"), clients=CLIENTS, model=net))
        with torch.no_grad():
            found = list(federate(own("lindt"), clients=CLIENTS, model=net))
            assert not torch.is_grad_enabled()
        same(found, expected)

    def test_inference_mode_is_refused(self) -> None:
        with torch.inference_mode(), pytest.raises(UserError, match="inference_mode"):
            next(federate(own(), clients=CLIENTS, model=net))

    def test_the_callers_random_numbers_and_modes_are_left_alone(self) -> None:
        torch.manual_seed(3)
        before = torch.random.get_rng_state()
        for _ in federate(own("lindt", alone=Alone(epochs=2)), clients=iter(CLIENTS), model=lambda: net().eval()):  # type: ignore[arg-type]
            assert torch.equal(torch.random.get_rng_state(), before)
        one, other = net().eval(), net()
        generator = torch.random.get_rng_state()
        intertwine(one, other)(torch.ones(2, 3))
        assert (one.training, other.training) == (False, True)
        assert torch.equal(torch.random.get_rng_state(), generator)

    def test_a_second_call_with_the_same_engine_and_one_after_a_failure(self) -> None:
        plan, problem = own("lindt"), Problem(CLIENTS, net)
        engine = InProcess(plan, problem)
        first = list(federate(plan, problem=problem, engine=engine))
        abandoned = federate(plan, problem=problem, engine=engine)
        next(abandoned)
        abandoned.close()  # type: ignore[attr-defined]
        same(list(federate(plan, problem=problem, engine=engine)), first)
