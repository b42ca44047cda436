"""Partial sharing: federations against plain PyTorch, what stays with a client, and names that are of no layer."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import context, tiny

from lindt.client.adaptations.guarded import Guarded
from lindt.client.adaptations.partial_sharing import PartialSharing, _joined, _PrivateLayers
from lindt.client.training import Proximal
from lindt.data.examples import LocalWork, Rows
from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.errors import PlanError
from lindt.plan.file import from_dict, override, to_dict
from lindt.plan.models import SmallCnn
from lindt.plan.plan import METHODS, Alone, Method, Plan
from lindt.plan.problem import Problem, problem_for
from lindt.server.federation import federate
from lindt.weights import first_model, read_w

NAMES = ["conv1.weight", "conv1.bias", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def plan_with(method: Method | str, rounds: int = 2, **changes: object) -> Plan:
    """The small CNN, everyone honest and active, no noise: a client's path can be followed by hand."""
    environment = Environment(Sampled(rate=1.0))
    changes = {"environment": environment, "alone": Alone(private=False), **changes}
    return tiny(method, model=SmallCnn(), rounds=rounds, **changes)


def smooth() -> nn.Module:
    """Without ReLU and pooling, whose ties last bits decide."""
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(64, 16), tanh=nn.Tanh(), fc2=nn.Linear(16, 10))
    )


def descend(model: nn.Module, loss: Tensor, which: list[nn.Parameter], rate: float, max_norm: float) -> None:
    model.zero_grad()
    loss.backward()
    optimizer = torch.optim.SGD(which, lr=rate)
    torch.nn.utils.clip_grad_norm_(which, max_norm)
    optimizer.step()


def reference(plan: Plan, problem: Problem, training: str, epochs: int, mu: float = 0.0) -> tuple[Tensor, list[Tensor]]:
    """A federation of plain PyTorch with a private last layer: w after the last round, and each client's head."""
    server = first_model(problem, plan)
    body = [name for name, _ in server.named_parameters() if not name.startswith("fc2")]
    heads = [{n: p.detach().clone() for n, p in server.named_parameters() if n not in body} for _ in problem.data]
    for r in range(1, plan.rounds + 1):
        rate, clients = plan.training.rate_at(r), []
        for i, (train, _) in enumerate(problem.data):
            model = copy.deepcopy(server).train()
            model.load_state_dict({**model.state_dict(), **heads[i]})
            named = dict(model.named_parameters())
            generator = torch.Generator().manual_seed(plan.seed_for("train", r, i))
            if training == "in turn":
                for _ in range(epochs):
                    for x, y in LocalWork(train, 1).batches(plan.training.batch, generator):
                        head = [named["fc2.weight"], named["fc2.bias"]]
                        descend(model, cross_entropy(model(x), y), head, rate, plan.training.max_norm)
            steps = list(named.values()) if training == "together" else [named[name] for name in body]
            start = {name: dict(server.named_parameters())[name].detach() for name in body}
            for x, y in LocalWork(train, 1).batches(plan.training.batch, generator):
                loss = cross_entropy(model(x), y)
                if mu:
                    loss = loss + mu / 2 * sum((named[name] - start[name]).square().sum() for name in body)
                descend(model, loss, steps, rate, plan.training.max_norm)
            clients.append(model)
            heads[i] = {n: p.detach().clone() for n, p in model.named_parameters() if n not in body}
        with torch.no_grad():
            for name in body:
                mean = torch.stack([dict(one.named_parameters())[name] for one in clients]).mean(0)
                dict(server.named_parameters())[name].copy_(mean)
    return read_w(server), [torch.cat([t.flatten() for t in head.values()]) for head in heads]


@pytest.mark.parametrize("mu", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "training"), [("fedper", "together"), ("fedrep", "in turn"), ("fedbabu", "shared only")]
)
def test_a_federation_against_plain_pytorch(name: str, training: str, mu: float) -> None:
    method = METHODS[name]
    assert isinstance(method.adaptation, PartialSharing)
    method = replace(method, adaptation=replace(method.adaptation, epochs=2))
    plan = plan_with(replace(method, penalty=Proximal(mu)) if mu else method)
    problem = Problem(problem_for(plan).data, smooth)
    engine = InProcess(plan, problem)
    *_, (state, _) = federate(plan, problem=problem, engine=engine)
    w, heads = reference(plan, problem, training, 2, mu)
    torch.testing.assert_close(state.w, w, atol=2e-6, rtol=1e-5)
    head = first_model(problem, plan).get_submodule("fc2")
    size = sum(p.numel() for p in head.parameters())
    assert torch.equal(state.w[-size:], read_w(head))  # w's own never moves
    if training == "shared only":
        assert not any(engine.versions.rounds(i) for i in engine.available())
        return
    for i, theirs in enumerate(heads):
        kept, _ = engine.versions.read(i, plan.rounds)
        assert sorted(kept) == ["fc2/bias", "fc2/weight"]
        mine = torch.cat([kept["fc2/weight"].flatten(), kept["fc2/bias"]])
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)
        assert not torch.equal(mine, read_w(head))


def test_with_nothing_trained_apart_it_is_fedavg() -> None:
    """One client's round, joined layers against the model itself: the same bits, and w's private layers untouched."""
    data = problem_for(plan_with("fedavg")).data[0][0]
    model, plain = SmallCnn().build(), SmallCnn().build()
    plain.load_state_dict(model.state_dict())
    adaptation, ctx = PartialSharing(private=("conv1", "fc2")), context(data, max_norm=5.0)
    private = adaptation.begin(ctx, model)
    step, whole = adaptation.step(ctx, model, private), PartialSharing(shared=("conv1",))
    assert isinstance(private, _PrivateLayers)
    other = whole.step(ctx, plain, whole.begin(ctx, plain))
    for batch in LocalWork(data, 30).batches(10, torch.Generator().manual_seed(0)):
        step(batch)
        other(batch)
    one, two = _joined(model, private), dict(plain.named_parameters())
    assert torch.equal(one.get_parameter("conv2.weight"), model.get_parameter("conv2.weight"))
    assert torch.equal(one.get_parameter("conv1.weight"), two["conv1.weight"])  # shared there, private here
    assert not torch.equal(model.get_parameter("conv1.weight"), two["conv1.weight"])


def test_what_a_client_sends_holds_nothing_of_its_private_layers() -> None:
    plan = plan_with("fedper")
    problem = problem_for(plan)
    engine = InProcess(plan, problem)
    (state, _), *_ = federate(plan, problem=problem, engine=engine)
    from lindt.protocols import Task

    (reply,) = engine.dispatch([Task("train", "", 0, 2, state.w, state.buffers, recovering=True)])
    assert reply.w is not None
    private = len(state.w) - 650  # fc2: 64 * 10 + 10
    assert torch.equal(reply.w[private:], state.w[private:])
    assert not torch.equal(reply.w[:private], state.w[:private])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


def test_buffers_of_private_layers_stay_too() -> None:
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    data = Rows(x, torch.arange(10) % 2, torch.arange(10))
    model, adaptation, ctx = Normed(), PartialSharing(private=("head",)), context(data)
    before = copy.deepcopy(model.state_dict())
    private = adaptation.begin(ctx, model)
    assert isinstance(private, _PrivateLayers)
    adaptation.step(ctx, model, private)((x, torch.arange(10) % 2))
    after, kept = model.state_dict(), private.state_dict()
    assert torch.equal(after["head.0.running_mean"], before["head.0.running_mean"])
    assert not torch.equal(kept["head/0/running_mean"], before["head.0.running_mean"])
    assert not torch.equal(after["body.1.running_mean"], before["body.1.running_mean"])
    assert int(kept["head/0/num_batches_tracked"]) == 1


def test_fedbabu_predicts_with_a_tuned_head_and_changes_nothing() -> None:
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    y = torch.arange(10) % 2
    data = Rows(x, y, torch.arange(10))
    model = Normed().eval()
    before = copy.deepcopy(model.state_dict())
    adaptation = PartialSharing(private=("head.1",), training="shared only", epochs=3, rate=0.5)
    predict = adaptation.predictor(context(data), model, None)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        features = model.head[0](model.body(x))
    head, generator = copy.deepcopy(model.head[1]), torch.Generator().manual_seed(0)
    for _ in range(3):
        for chunk in torch.randperm(10, generator=generator).split(10):
            descend(head, cross_entropy(head(features[chunk]), y[chunk]), list(head.parameters()), 0.5, 1e9)
    assert torch.allclose(predict(x), head(features), atol=1e-6)


def test_names_by_layer_by_prefix_and_by_parameter() -> None:
    assert PartialSharing().private_names(NAMES) == {"fc2.weight", "fc2.bias"}
    assert PartialSharing(private=("fc1", "fc2.bias")).private_names(NAMES) == {"fc1.weight", "fc1.bias", "fc2.bias"}
    assert PartialSharing(shared=("conv1",)).private_names(NAMES) == set(NAMES[2:])
    nested = ["body.0.weight", "body.1.weight", "head.weight"]
    assert PartialSharing(shared=("body",)).private_names(nested) == {"head.weight"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"private": ("fc",)},
            "private = 'fc': there is no trainable layer of that name; the model has conv1, fc1, fc2",
        ),
        (
            {"shared": ("head",)},
            "shared = 'head': there is no trainable layer of that name; the model has conv1, fc1, fc2",
        ),
        ({"private": ("conv1", "fc1", "fc2")}, "no layer is left to share; the model has conv1, fc1, fc2"),
        ({"shared": ("conv1", "fc1", "fc2")}, "no layer is left private; the model has conv1, fc1, fc2"),
    ],
)
def test_names_of_no_layer(given: dict[str, tuple[str, ...]], said: str) -> None:
    with pytest.raises(PlanError) as error:
        PartialSharing(**given).private_names(NAMES)  # type: ignore[arg-type]
    assert said in str(error.value)


def test_a_wrong_name_is_told_before_anything_trains() -> None:
    table = override(to_dict(plan_with("fedper")), "method.adaptation.private=['fc9']")
    said = r"method\.adaptation\.private = 'fc9': there is no trainable layer of that name.*conv1, conv2, fc1, fc2"
    with pytest.raises(PlanError, match=said):
        next(iter(federate(from_dict(table))))
    table = override(to_dict(plan_with(Method(adaptation=Guarded(PartialSharing(private=("fc9",)))))), "rounds=1")
    with pytest.raises(PlanError, match=r"method\.adaptation\.adaptation\.private = 'fc9'"):
        next(iter(federate(from_dict(table))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.third(self.second(self.first(x)))
        return found


def test_tied_parameters_are_shared_or_private_together() -> None:
    x = torch.zeros(1, 2)
    PartialSharing().fits(Tied(), x)
    PartialSharing(private=("first", "second")).fits(Tied(), x)
    for wrong in (PartialSharing(private=("second",)), PartialSharing(shared=("first",))):
        with pytest.raises(PlanError, match=r"second\.weight.*tied to first\.weight"):
            wrong.fits(Tied(), x)


@pytest.mark.parametrize(
    "wrong", [{"private": ("a",), "shared": ("b",)}, {"training": "apart"}, {"epochs": 0}, {"rate": -1.0}]
)
def test_settings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        PartialSharing(**wrong)  # type: ignore[arg-type]


def test_noise_clipping_and_delta_cover_the_shared_layers_alone() -> None:
    """With a private body only the last layer's 650 weights have noise: its norm is about sigma * sqrt(650)."""
    noisy = Environment(Sampled(rate=1.0), privacy=Gaussian(S=1e-3, sigma=1.0))
    for adaptation, shared in ((PartialSharing(shared=("fc2",)), 650), (PartialSharing(private=("fc2",)), 13056)):
        plan = plan_with(Method(adaptation=adaptation), rounds=1, environment=noisy)
        ((state, result),) = list(federate(plan))
        assert result.seen is not None
        assert result.seen.noise_norm == pytest.approx(shared**0.5, rel=0.1)
        assert result.seen.clipped == 1.0
        # w_i - w: an update of length S at most before clipping binds on the step, and the noise
        first = first_model(problem_for(plan), plan)
        moved = (state.w != read_w(first)).nonzero().flatten()
        assert len(moved) == shared
        assert result.seen.cosine is not None
