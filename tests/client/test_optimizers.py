"""Optimizers of torch in a client's steps: the plan's and the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lindt import Problem, federate
from lindt.client.optimizers import OptimizerStates, split_states, stepping
from lindt.client.private_models import PrivateModelCache, PrivateTraining
from lindt.client.training import Adam, Adamw, Sgd
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.errors import PlanError, UserError
from lindt.plan.file import from_dict, resolve, to_dict
from lindt.plan.plan import METHODS, Alone, Method, Plan, Scoring, Training
from lindt.protocols import Optimizer
from lindt.registry import component

CPU = torch.device("cpu")
ADAMW: Optimizer = lambda params: torch.optim.AdamW(params, lr=1e-2)  # noqa: E731


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def clients(number: int = 3, samples: int = 20) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(number):
        x = torch.randn(samples, 4, generator=generator)
        y = (x[:, 0] + 0.3 * torch.randn(samples, generator=generator) > 0).long()
        made.append(((x[: samples // 2], y[: samples // 2]), (x[samples // 2 :], y[samples // 2 :])))
    return made


def plan(method: str | Method = "fedavg", rounds: int = 3, **training: object) -> Plan:
    return Plan(
        rounds=rounds,
        training=replace(Training(rate=0.05, batch=4), **training),  # type: ignore[arg-type]
        method=METHODS[method] if isinstance(method, str) else method,
        environment=Environment(Sampled(rate=1.0)),
        alone=Alone(epochs=3, patience=1),
        scoring=Scoring(every=1, last=1),
    )


def last_w(plan: Plan, **given: Any) -> Tensor:
    if "problem" not in given:
        given |= {"clients": clients(), "model": net}
    return [state.w for state, _ in federate(plan, preflight=False, **given)][-1]


# The plan's optimizers.


def test_a_plan_without_an_optimizer_is_written_as_before() -> None:
    table = to_dict(resolve("digits-nfl"))["training"]
    assert sorted(table) == ["batch", "decay", "epochs", "max_norm", "rate"]
    assert "optimizer" not in repr(Training())


def test_a_plan_with_an_optimizer_survives_its_tables() -> None:
    wanted = replace(Plan(), training=Training(optimizer=Adam(betas=(0.8, 0.9)), accumulate=2))
    table = to_dict(wanted)
    assert table["training"]["optimizer"] == {"kind": "adam", "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.0}
    assert from_dict(table) == wanted


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["training.optimizer=adam"], Adam()),
        (["training.optimizer.momentum=0.9"], Sgd(momentum=0.9)),
        (["training.optimizer=adamw", "training.optimizer.weight_decay=0.2"], Adamw(weight_decay=0.2)),
        (["training.optimizer={kind = 'sgd', momentum = 0.5, nesterov = true}"], Sgd(0.5, nesterov=True)),
    ],
)
def test_set_chooses_the_optimizer(settings: list[str], expected: object) -> None:
    assert resolve("digits-nfl", settings).training.optimizer == expected


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"kind": "sgd", "momentum": 1.0}, "training.optimizer.momentum"),
        ({"kind": "sgd", "nesterov": True}, "training.optimizer.nesterov"),
        ({"kind": "adam", "betas": [0.9, 1.0]}, "training.optimizer.betas"),
        ({"kind": "adam", "eps": 0.0}, "training.optimizer.eps"),
        ({"kind": "adamw", "weight_decay": -1.0}, "training.optimizer.weight_decay"),
        ({"kind": "lion"}, "training.optimizer.kind"),
    ],
)
def test_wrong_settings_name_their_field(table: dict[str, object], field: str) -> None:
    with pytest.raises(PlanError, match=field):
        from_dict({"training": {"optimizer": table}})


def test_one_round_is_a_loop_of_ones_own_with_adam() -> None:
    """Parity with PyTorch's own words: one client's batches, a fresh Adam, clipped gradients."""
    asked = plan(rounds=1, optimizer=Adam(), max_norm=0.5)
    (x, y), _ = clients()[0]
    torch.manual_seed(asked.seed_for("model"))
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(asked.seed_for("train", 1, 0))
    for rows in torch.randperm(len(x), generator=generator).split(4):
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [clients()[0], clients()[0]]
    problem = Problem(both, net)
    from lindt.engines.inprocess import InProcess
    from lindt.server.federation import _task, begin

    (reply,) = InProcess(asked, problem).dispatch([_task("train", begin(asked, problem), 0, 1)])
    assert reply.w is not None
    torch.testing.assert_close(reply.w, expected, rtol=1e-6, atol=1e-7)


def test_momentum_of_zero_is_plain_and_recorded_as_before() -> None:
    assert torch.equal(last_w(plan()), last_w(plan(optimizer=Sgd())))
    assert not torch.equal(last_w(plan()), last_w(plan(optimizer=Sgd(momentum=0.9))))


def test_the_plans_rate_decays_for_a_users_own_optimizer_too() -> None:
    rates: list[float] = []

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    asked = replace(plan(rounds=3, decay=0.5), alone=Alone(private=False))
    last_w(asked, clients=clients(2), model=net, optimizer=lambda params: Noted(params, lr=0.1))
    assert sorted(set(rates[2:]), reverse=True) == [0.1, 0.05, 0.025]  # the first two steps are tried before


def test_a_schedule_begins_anew_in_each_round() -> None:
    rates: list[float] = []

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append(round(self.param_groups[0]["lr"], 6))
            return super().step(closure)

    asked = replace(plan(rounds=2, decay=1.0, batch=5), alone=Alone(private=False))
    last_w(
        asked,
        clients=clients(2),
        model=net,
        optimizer=lambda params: Noted(params, lr=0.1),
        schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    assert rates[-8:] == [0.1, 0.05] * 4  # two rounds of two clients with two batches each


# Accumulation.


def test_accumulated_batches_step_as_one_large_batch() -> None:
    small, large = plan(batch=2, accumulate=5), plan(batch=10, optimizer=Sgd(weight_decay=1e-30))
    torch.testing.assert_close(last_w(small), last_w(large), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("samples", "sizes"), [(10, [4, 4, 2]), (9, [4, 5]), (3, [3]), (5, [5])])
def test_a_steps_batches_and_their_shares(samples: int, sizes: list[int]) -> None:
    """No batch has a lone sample, and the shares make the mean over all samples."""
    model, seen = nn.Linear(4, 2), list[int]()
    x, y = torch.randn(samples, 4), torch.randint(2, (samples,))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(y))
        return cross_entropy(model(x), y)

    make: Optimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    expected = torch.autograd.grad(cross_entropy(model(x), y), model.weight)[0]
    (found,) = stepping(loss, [list(model.parameters())], make, None, 4, 3, 1e9)((x, y))
    assert seen == sizes
    assert found[0] is not None
    torch.testing.assert_close(found[0], expected)


def test_gradients_are_clipped_and_told_as_they_were() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    make: Optimizer = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731
    step = stepping(lambda x, y: 10 * (model(x) - y).sum(), [list(model.parameters())], make, None, 1, 1, 2.0)
    ((gradient,),) = step((torch.ones(1, 1), torch.zeros(1, 1)))
    assert gradient is not None
    assert gradient.item() == 10
    assert model.weight.item() == pytest.approx(-2, abs=1e-5)
    assert model.weight.grad is None


# What is kept between rounds.


@pytest.mark.parametrize(("method", "own"), [("lindt", False), ("fedrep", True)])
def test_a_resumed_run_equals_the_uninterrupted_one(method: str, own: bool, tmp_path: Path) -> None:
    asked = plan(method, rounds=4, **({} if own else {"optimizer": Adam(), "accumulate": 2}))
    asked = replace(asked, alone=Alone(private=False))
    problem = Problem(clients(), net, **({"optimizer": ADAMW, "accumulate": 2} if own else {}))
    played = list(federate(asked, problem=problem, folder=tmp_path / "whole", preflight=False))
    begun = []
    for state, result in federate(asked, problem=problem, folder=tmp_path / "parts", preflight=False):
        begun.append((state, result))
        if state.round == 2:
            break
    resumed = federate(asked, problem=problem, folder=tmp_path / "parts", state=begun[-1][0], preflight=False)
    for (state, result), (other, same) in zip(played, [*begun, *resumed], strict=True):
        assert torch.equal(state.w, other.w)
        assert result.scores == same.scores


@pytest.mark.parametrize("method", ["fedper", "fedbabu", "fedala", "fine-tune", "fedprox", "guarded"])
def test_other_methods_step_with_the_optimizer(method: str) -> None:
    asked = replace(plan(method, rounds=2), alone=Alone(private=False))
    found, plain = last_w(asked, clients=clients(), model=net, optimizer=ADAMW), last_w(asked)
    assert torch.isfinite(found).all()
    assert not torch.equal(found, plain)


def test_v_keeps_its_moments_and_w_does_not(tmp_path: Path) -> None:
    """After three rounds with three batches each v's Adam has taken nine steps."""
    asked = plan(Method(adaptation=component(type_of("adaptation"), "separate")), optimizer=Adam())
    for _ in federate(asked, clients=clients(), model=net, folder=tmp_path, preflight=False):
        pass
    from lindt.client.private_store import FolderStore

    (home,) = tmp_path.iterdir()
    own, states = split_states(FolderStore(tmp_path, home.name).read(0, 3)[0])
    assert sorted(own) == sorted(net().state_dict())
    steps = {name: tensor.item() for name, tensor in states.items() if '"step"' in name}
    assert len(steps) == 4
    assert set(steps.values()) == {9.0}


def type_of(field: str) -> Any:
    import typing

    return typing.get_type_hints(Method)[field]


def test_states_come_back_with_numbers_and_tensors() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {
        "count": 3,
        "slow": 0.1,
        "on": True,
        "none": None,
        "mean": torch.tensor([[1.0, 2.0]]),
    }
    states = OptimizerStates()
    states.begin(model)
    states._optimizers.append(optimizer)
    kept = states.tensors()
    again, other = OptimizerStates(), torch.optim.SGD(model.parameters(), lr=0.1)
    again.begin(model, kept)
    again.restore(other)
    found = dict(other.state[model.weight])
    assert torch.equal(found.pop("mean"), torch.tensor([[1.0, 2.0]]))
    assert found == {"count": 3, "slow": 0.1, "on": True}
    assert all(name.startswith(".") for name in kept)


def test_a_state_that_is_not_finite_is_not_kept() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"mean": torch.tensor([[float("nan"), 2.0]])}
    states = OptimizerStates()
    states.begin(model)
    states._optimizers.append(optimizer)
    assert states.tensors() == {}


# What is refused before anything trains.


@pytest.mark.parametrize("method", ["apfl", "ditto", "fl-guard"])
def test_a_method_with_a_rule_of_its_own_says_so(method: str) -> None:
    with pytest.raises(PlanError, match=r"method.adaptation = .* plain SGD only, not with adam;"):
        last_w(plan(method, optimizer=Adam()))


def fixed() -> Callable[[Any], torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    return lambda _params: optimizer


class Drifting(torch.optim.SGD):
    """It keeps what it learned in its settings."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["momentum"] += 0.1
        return super().step(closure)


class Hoarding(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]] = {"seen": [1]}
        return super().step(closure)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"optimizer": torch.optim.SGD(net().parameters(), lr=1)}, "optimizer: it is of type SGD; give a function"),
        ({"optimizer": "adam"}, "optimizer: it is of type str; give a function"),
        ({"optimizer": lambda params: 3}, "optimizer: it builds a int"),
        ({"optimizer": fixed()}, "optimizer: it builds an optimizer of other parameters"),
        ({"optimizer": torch.optim.LBFGS}, r"samples fails \(TypeError.*whose step\(\) needs no argument"),
        ({"optimizer": Drifting}, "optimizer: Drifting changes momentum of its param_groups"),
        ({"optimizer": Hoarding}, "optimizer: Hoarding keeps a list as 'seen'"),
        ({"schedule": 3}, "schedule: it is of type int"),
        (
            {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau},
            r"schedule: a step .* fails \(TypeError.*needs no arg",
        ),
        ({"accumulate": 0}, "accumulate: it is 0"),
        ({"accumulate": 2.0}, "accumulate: it is 2.0"),
    ],
)
def test_what_cannot_step_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        last_w(plan(), problem=Problem(clients(), net, **given))


def test_two_optimizers_are_one_too_many() -> None:
    with pytest.raises(PlanError, match=r"training.optimizer = 'adam': the problem has an optimizer of its own"):
        last_w(plan(optimizer=Adam()), problem=Problem(clients(), net, optimizer=ADAMW))
    with pytest.raises(PlanError, match=r"training.accumulate = 3: the problem says accumulate = 2"):
        last_w(plan(accumulate=3), problem=Problem(clients(), net, accumulate=2))


# Private models.


def key(asked: Plan, **given: Any) -> str:
    problem = Problem(clients(), net, **given)
    train, test = problem.data[0]
    return PrivateTraining("client 0", train, test, asked, problem, CPU).key()


def scheduled(gamma: float, every: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, every, gamma)


def test_the_key_of_a_private_model_holds_the_optimizer_and_its_settings() -> None:
    keys = [
        key(plan()),
        key(plan(optimizer=Adam())),
        key(plan(optimizer=Adam(betas=(0.9, 0.99)))),
        key(plan(accumulate=2)),
        key(plan(), optimizer=lambda params: torch.optim.Adam(params, lr=0.05, betas=(0.8, 0.9))),
        key(plan(), optimizer=lambda params: torch.optim.Adam(params, lr=0.06, betas=(0.8, 0.9))),
        key(plan(), optimizer=lambda params: torch.optim.Adam(params[:1], lr=0.06, betas=(0.8, 0.9))),
        key(plan(), optimizer=Drifting),
        key(plan(), schedule=scheduled(0.5, 1)),
        key(plan(), schedule=scheduled(0.5, 2)),  # of the epoch's three steps the third is the first to differ
        key(plan(), schedule=scheduled(0.4, 2)),
    ]
    assert len(set(keys)) == len(keys)
    assert key(plan(), optimizer=ADAMW) == key(plan(), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))


def test_an_optimizer_of_the_users_own_class_is_known_by_what_it_does() -> None:
    def made(late: float) -> Callable[[Any], torch.optim.Optimizer]:
        class Late(torch.optim.SGD):
            steps = 0

            def step(self, closure: Any = None) -> Any:
                self.steps += 1
                if self.steps == 9:
                    self.param_groups[0]["params"][0].data.add_(late)
                return super().step(closure)

        return lambda params: Late(params, lr=0.1)

    assert key(plan(), optimizer=made(0.1)) == key(plan(), optimizer=made(0.1))
    assert key(plan(), optimizer=made(0.1)) != key(plan(), optimizer=made(0.2))


def test_a_private_model_trains_with_the_optimizer_as_a_loop_of_ones_own_does() -> None:
    asked = replace(plan(optimizer=Adamw(), decay=0.9), alone=Alone(epochs=2, patience=2, refit=False))
    problem = Problem(clients(), net)
    train, test = problem.data[0]
    training = PrivateTraining("client 0", train, test, asked, problem, CPU)
    torch.manual_seed(asked.seed_for("model"))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    from lindt.seeds import seed_for

    generator = torch.Generator().manual_seed(seed_for(training.seed, "batches"))
    (x, y), _ = clients()[0]
    for (_, found), rate in zip(training._epochs(train, 2), (0.05, 0.05 * 0.9), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for rows in torch.randperm(len(x), generator=generator).split(4):
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        for mine, theirs in zip(model.parameters(), found.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_private_models_with_an_optimizer_are_cached(tmp_path: Path) -> None:
    problem = Problem(clients(), net, optimizer=ADAMW)
    train, test = problem.data[0]
    training = PrivateTraining("client 0", train, test, plan(), problem, CPU)
    learned = PrivateModelCache(tmp_path).learned(training)
    again = PrivateModelCache(tmp_path).learned(PrivateTraining("client 0", train, test, plan(), problem, CPU))
    assert torch.equal(learned.outputs, again.outputs)
    assert len(list(tmp_path.glob("sealed/*.safetensors"))) == 1


# Weights of clients.


def test_weights_of_clients_are_the_plans() -> None:
    asked = plan(rounds=1)
    given = replace(asked, scoring=replace(asked.scoring, weighting="given", weights=(1.0, 2.0, 0.0)))
    ((_, found),) = federate(asked, clients=clients(), model=net, weights=[1, 2, 0], preflight=False)
    ((_, expected),) = federate(given, clients=clients(), model=net, preflight=False)
    assert found.scores == expected.scores
    without = replace(asked, scoring=replace(asked.scoring, weighting="given"))
    ((_, again),) = federate(without, clients=clients(), model=net, weights=[1, 2, 0], preflight=False)
    assert again.scores == expected.scores
    with pytest.raises(PlanError, match=r"scoring.weights = .*: give one weight for each of 3 clients"):
        last_w(asked, problem=Problem(clients(), net, weights=[1, 2]))
    with pytest.raises(PlanError, match=r"scoring.weighting = 'size': the problem has weights"):
        last_w(replace(asked, scoring=Scoring(weighting="size")), problem=Problem(clients(), net, weights=[1, 2, 3]))


def test_device_goes_to_the_clients() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device: this machine"):
            last_w(plan(), clients=clients(), model=net, device="cuda")
    with pytest.raises(UserError, match="device: it is 'gpu'"):
        last_w(plan(), clients=clients(), model=net, device="gpu")


def test_run_json_names_what_the_plan_cannot_say() -> None:
    from lindt.runs.about import about_run

    own = Problem(clients(), net, optimizer=ADAMW, schedule=scheduled(0.5, 2), accumulate=2)
    assert about_run(plan(), own, None)["optimizer"] == "AdamW, StepLR, 2 batches a step"
    assert "optimizer" not in about_run(plan(optimizer=Adam()), Problem(clients(), net), None)
