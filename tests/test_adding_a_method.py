"""docs/adding-a-method.md cannot rot: its code is the file of Ditto, which does what the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from registered import by_path, own_components
from torch import Tensor
from torch.nn.functional import cross_entropy
from worlds import tiny, tiny_runtime

from lindt.client.adaptations.ditto import Ditto
from lindt.data.examples import LocalWork
from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.plan import file
from lindt.plan.file import resolve
from lindt.plan.models import SmallCnn
from lindt.plan.plan import METHODS, Alone, Method, Plan
from lindt.plan.problem import Problem, first_model, problem_for
from lindt.server.federation import federate
from lindt.weights import trainable

ROOT = Path(__file__).parent.parent
FILE = ROOT / "src" / "lindt" / "client" / "adaptations" / "ditto.py"


@pytest.fixture
def registered(tmp_path: Path) -> Iterator[ModuleType]:
    """The file under another name, as a user's own module, and nothing else."""
    (tmp_path / "mine.py").write_text(FILE.read_text().replace("Ditto", "Mine").replace("ditto", "mine"))
    with own_components():
        yield by_path(tmp_path / "mine.py")


def plan_with(pull: float, rounds: int = 2) -> Plan:
    """`tiny` on the small CNN, everyone honest and active, no noise: a client's path can be followed by hand."""
    return tiny(
        Method(adaptation=Ditto(pull=pull)),
        model=SmallCnn(),
        rounds=rounds,
        environment=Environment(Sampled(rate=1.0)),
        alone=Alone(private=False),
    )


def played(plan: Plan) -> tuple[list[Tensor], list[Tensor], Problem]:
    """The global w after each round, and every client's last v_i, flat."""
    problem = problem_for(plan)
    engine = InProcess(plan, problem)
    w = [state.w for state, _ in federate(plan, problem=problem, engine=engine)]
    names = [name for name, _ in first_model(problem, plan).named_parameters()]
    kept = [engine.versions.read(i, plan.rounds)[0] for i in engine.available()]
    return w, [torch.cat([v[name].reshape(-1) for name in names]) for v in kept], problem


def test_the_page_shows_the_file() -> None:
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    first = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    assert first == FILE.read_text()


def test_without_a_pull_v_is_a_model_trained_alone() -> None:
    """Against torch's own SGD and clipping, on the batches that the client draws."""
    plan = plan_with(pull=0.0)
    _, v, problem = played(plan)
    for i, (train, _) in enumerate(problem.data[:2]):
        model = first_model(problem, plan).train()
        for r in range(1, plan.rounds + 1):
            optimiser = torch.optim.SGD(model.parameters(), lr=plan.training.rate_at(r))
            generator = torch.Generator().manual_seed(plan.seed_for("train", r, i))
            for x, y in LocalWork(train, 1).batches(plan.training.batch, generator):
                optimiser.zero_grad()
                cross_entropy(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), plan.training.max_norm)
                optimiser.step()
        alone = torch.cat([p.detach().reshape(-1) for p in trainable(model)])
        torch.testing.assert_close(v[i], alone, atol=1e-6, rtol=1e-5)


def test_with_a_huge_pull_v_is_the_w_received() -> None:
    w, v, _ = played(plan_with(pull=1e9, rounds=3))
    for v_i in v:
        assert torch.equal(v_i, w[-2])
    assert not torch.equal(w[-2], w[-1])


def test_a_pull_keeps_v_nearer_to_w() -> None:
    w, free, _ = played(plan_with(pull=0.0))
    _, held, _ = played(plan_with(pull=1.0))
    for near, far in zip(held, free, strict=True):
        assert 0 < (near - w[-2]).norm() < (far - w[-2]).norm()


def test_v_does_not_touch_w() -> None:
    plan = plan_with(pull=0.5)
    w, _, _ = played(plan)
    fedavg = [state.w for state, _ in federate(replace(plan, method=METHODS["fedavg"]))]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(w, fedavg, strict=True))


def test_it_recovers_once_nfl_is_detected() -> None:
    """As the page says: put into a plan whose method watches, it starts after the detection."""
    plan = tiny_runtime(rounds=4)
    plan = replace(plan, method=replace(plan.method, adaptation=Ditto()))
    results = [result for _, result in federate(plan)]
    assert [result.recovering for result in results] == [False, False, True, True]
    assert results[-1].scores is not None
    assert results[-1].scores.local > results[1].scores.local  # type: ignore[union-attr]


def test_its_file_alone_names_it_in_plans(registered: ModuleType) -> None:
    table = file.to_dict(replace(plan_with(pull=0.5), method=Method(adaptation=registered.Mine(pull=0.5))))
    assert table["method"]["adaptation"] == {"kind": "mine", "pull": 0.5}
    assert file.from_dict(table).method.adaptation == registered.Mine(pull=0.5)
    with pytest.raises(file.PlanError, match=r"method\.adaptation\.pull = -1\.0: the pull"):
        file.from_dict(file.override(table, "method.adaptation.pull=-1"))


def test_its_file_alone_names_the_method(registered: ModuleType) -> None:
    named = resolve("digits-nfl", ["method=mine"]).method
    assert named == METHODS["mine"] == Method(adaptation=registered.Mine(pull=1.0))
    assert list(METHODS)[-1] == "mine"  # after the package's own
    watched = resolve("digits-nfl", ["method.adaptation=mine"])
    assert watched.method == replace(resolve("digits-nfl").method, adaptation=registered.Mine())
