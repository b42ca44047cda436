"""Components register where they are defined: a user's own are named in plans, and no kind has two meanings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from registered import by_path, own_components
from torch import Tensor
from typer.testing import CliRunner

from lindt import METHODS, PlanError, UserError, federate, resolve
from lindt.cli.comparison import ComparisonGrid
from lindt.cli.main import app
from lindt.data.partition import Partition
from lindt.data.sources import SOURCES
from lindt.environment.threats import SignFlip, Threat
from lindt.plan.file import from_dict, from_toml, to_dict
from lindt.plan.plan import Method, Plan
from lindt.plan.problem import METRICS
from lindt.protocols import Adaptation, Aggregator, Metric, Recovery
from lindt.registry import component, kind_of, kinds, register, register_method
from lindt.server.aggregation import Mean, TrimmedMean
from lindt.server.recovery import OnDetection, QuietRounds

OWN = '''
"""An aggregator, an attack, a partition, a metric, a source, a method: what a user writes into one file."""

from dataclasses import dataclass

import torch

from lindt.data.partition import Iid, Partition
from lindt.data.sources import SOURCES, register_source
from lindt.environment.threats import NoThreat, Threat
from lindt.plan.models import Linear
from lindt.plan.plan import Plan
from lindt.plan.problem import problem_for
from lindt.protocols import Aggregator, Metric
from lindt.registry import register, register_method


@register(Aggregator)
@dataclass(frozen=True)
class HalfMean:
    factor: float = 0.5

    def __call__(self, updates_KP, sizes_K):
        return self.factor * updates_KP.mean(0)


@register(Threat)
@dataclass(frozen=True)
class Silence:
    share: float = 0.2
    per_batch = 0
    pool, corrupt, goal = NoThreat.pool, NoThreat.corrupt, NoThreat.goal

    def report(self, update_P, seed, round):
        return torch.zeros_like(update_P)


@register(Partition)
@dataclass(frozen=True)
class Backwards:
    def split(self, train_labels_n, test_labels_n, clients, seed, roles=None):
        return Iid().split(train_labels_n, test_labels_n, clients, seed, roles)[::-1]


@register(Metric)
@dataclass(frozen=True)
class Constant:
    percent = True

    def per_sample(self, outputs_nC, y_n):
        return torch.ones(len(y_n), dtype=torch.float64)

    def tally(self, outputs_nC, y_n):
        return torch.tensor([float(len(y_n)), float(len(y_n))], dtype=torch.float64)

    def value(self, tally):
        return float(tally[0] / tally[1])


@register_source("own-digits")
def own_digits(test_share, seed, text):
    return SOURCES["digits"](test_share, seed, text)


register_method("half", aggregator={"kind": "half_mean", "factor": 0.25}, recovery="never")


def problem():
    return problem_for(Plan(model=Linear()))
'''
SETS = [
    "method=fedavg",
    "method.aggregator=half_mean",
    "environment.threat={kind='silence', share=0.1}",
    "data.allocation=backwards",
    "data.source=own-digits",
    "scoring.metric=constant",
    "model=linear",
    "rounds=1",
    "alone.private=false",
    "detection=delta",
]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ModuleType]:
    path = tmp_path / "own_components_of_a_test.py"
    path.write_text(OWN)
    with own_components():
        yield by_path(path)
    sys.modules.pop(path.stem)


def test_own_components_are_named_in_a_plan(own: ModuleType) -> None:
    plan = resolve("digits-nfl", SETS)
    assert (plan.method.aggregator, plan.environment.threat) == (own.HalfMean(), own.Silence(0.1))
    assert (plan.data.allocation, plan.data.source) == (own.Backwards(), "own-digits")
    assert from_dict(json.loads(json.dumps(to_dict(plan)))) == plan  # as a worker reads it
    ((_, result),) = federate(plan, preflight=False)
    assert result.scores is not None
    assert result.scores.central == 1.0  # the metric's constant


def test_an_own_aggregator_and_an_own_method_are_played(own: ModuleType) -> None:
    assert METHODS["half"] == Method(aggregator=own.HalfMean(0.25), recovery=METHODS["fedavg"].recovery)
    plain = ["environment.threat=no_threat", "environment.privacy=no_privacy", "rounds=1", "detection=delta"]
    plain += ["alone.private=false", "model=linear"]
    fedavg, half, before = (
        next(iter(federate(resolve("digits-nfl", [*plain, f"method={method}"]))))[0].w
        for method in ("fedavg", "half", "{aggregator={kind='half_mean', factor=0}, recovery='never'}")
    )
    torch.testing.assert_close(half - before, (fedavg - before) / 4)


def test_own_components_are_compared(own: ModuleType) -> None:
    grid = ComparisonGrid.named("half", "half_mean,krum", "silence")
    found = dict(grid.plans(resolve("digits-nfl", ["model=linear"])))
    assert list(found) == ["silence/half_mean/half", "silence/krum/half"]
    assert found["silence/krum/half"].environment.threat == own.Silence(0.25)  # the preset's share


def test_an_own_method_is_listed_after_the_packages(own: ModuleType) -> None:
    listed = CliRunner().invoke(app, ["methods", "--json"], catch_exceptions=False).stdout.splitlines()
    assert [json.loads(line)["method"] for line in listed][-2:] == ["fedala", "half"]


def test_a_wrong_value_of_an_own_component_is_named(own: ModuleType) -> None:
    with pytest.raises(PlanError, match=r"^method\.aggregator\.factor = 'a': give a number, not a str"):
        from_dict(from_toml("[method.aggregator]\nkind = 'half_mean'\nfactor = 'a'"))
    with pytest.raises(PlanError, match=r"^method\.aggregator\.factr = 1: .*did you mean 'factor'\?"):
        from_dict(from_toml("[method.aggregator]\nkind = 'half_mean'\nfactr = 1"))


@pytest.mark.slow
def test_the_module_of_a_task_may_define_them(tmp_path: Path) -> None:
    """By the command line, in processes of their own: nothing is imported but what --task names."""
    (tmp_path / "mine.py").write_text(OWN)
    sets = ["rounds=1", "alone.private=false", "detection=delta", "method=half", "environment.participation.rate=0.2"]
    words = ["run", "--task", "mine:problem", "--out", "run", "--engine", "processes", "--json"]
    words += [word for assignment in sets for word in ("--set", assignment)]
    done = subprocess.run(
        [sys.executable, "-m", "lindt.cli", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'kind = "half_mean"' in (tmp_path / "run" / "plan.toml").read_text()


# Who may register what


def test_an_unknown_kind_lists_the_choices() -> None:
    with pytest.raises(PlanError, match=r"^kind = 'medean': choose among \['geometric_median', 'krum', .*'median'\?$"):
        component(Aggregator, "medean")


def test_a_kind_that_is_taken_is_refused() -> None:
    with own_components():
        with pytest.raises(
            UserError, match=r"two components of Aggregator have the kind 'mean': lindt\.server\.aggr"
        ) as e:

            @register(Aggregator)
            @dataclass(frozen=True)
            class Mean:
                def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
                    return updates_KP.sum(0)

        assert str(e.value).endswith("Mean; give one of them another name")
        assert kinds(Aggregator)["mean"].__module__ == "lindt.server.aggregation"


def test_the_own_class_is_refused_though_the_packages_module_is_imported_later() -> None:
    code = """
from dataclasses import dataclass
from lindt.protocols import Aggregator
from lindt.registry import register
import sys
assert "lindt.server.aggregation" not in sys.modules
try:
    register(Aggregator)(dataclass(type("Median", (), {"__call__": lambda *_: None})))
except Exception as error:
    print(error)
from lindt.server.aggregation import Median
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("two components of Aggregator have the kind 'median'")


def test_a_class_that_is_defined_again_replaces_the_earlier_one() -> None:
    """A cell of a notebook that runs twice."""

    def cell(factor: float) -> type:
        @register(Aggregator)
        @dataclass(frozen=True)
        class Scaled:
            factor: float

            def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
                return self.factor * updates_KP.mean(0)

        return Scaled

    with own_components():
        first, second = cell(1.0), cell(2.0)
        assert first is not second
        assert kinds(Aggregator)["scaled"] is second
    assert "scaled" not in kinds(Aggregator)


def test_a_method_name_that_is_taken_is_refused() -> None:
    with own_components():
        register_method("lindt", adaptation="dual")  # the same again is no other method
        with pytest.raises(UserError, match="two methods have the name 'lindt'"):
            register_method("lindt", adaptation="apfl")


def test_what_is_no_component_is_refused() -> None:
    with pytest.raises(UserError, match="Plain is not a dataclass; write @register above @dataclass"):
        register(Aggregator)(type("Plain", (), {}))
    with pytest.raises(UserError, match="Empty is not a component of Adaptation: define begin, predictor, step"):
        register(Adaptation)(dataclass(type("Empty", (), {})))
    with pytest.raises(UserError, match="int is not a protocol that plans choose a component of"):
        register(int)(dataclass(type("Number", (), dict.fromkeys(vars(int)))))


# What there is


def test_components_by_hand() -> None:
    assert component(Aggregator, "trimmed_mean", share=0.3) == TrimmedMean(0.3)
    recovery = component(Recovery, "on_detection", stop={"kind": "quiet_rounds", "rounds": 4})
    assert recovery == OnDetection(stop=QuietRounds(4))
    assert list(kinds(Aggregator))[:2] == ["mean", "weighted_mean"]
    assert kinds(Threat)["sign_flip"] is SignFlip
    assert {kind_of(cls) for cls in kinds(Partition).values()} == set(kinds(Partition))
    assert set(kinds(Metric)) == set(METRICS) == {"accuracy", "macro_f1"}
    own = {"digits", "breast-cancer", "cifar10", "cifar10-half", "mnist", "mnist-small", "shakespeare"}
    own |= {"generated-pictures", "generated-text", "generated-clusters", "two-camps", "two-camps-in-part"}
    own |= {"two-camps-crowd"}
    assert set(SOURCES) == own


def test_methods_are_read_anew_and_equal() -> None:
    assert METHODS["lindt"] == METHODS["lindt"]
    assert Method().aggregator == Mean()
    assert "lint" not in METHODS
    assert Plan(method=METHODS["fedavg"]) in {Plan(method=METHODS["fedavg"])}
    with pytest.raises(KeyError):
        METHODS["lint"]


def test_a_new_file_among_the_adaptations_is_found(tmp_path: Path) -> None:
    """A package of adaptations that has one module more, as if a file had been added."""
    import lindt.client.adaptations.ditto as example

    text = Path(str(example.__file__)).read_text()
    (tmp_path / "added.py").write_text(text.replace("Ditto", "Mine").replace("ditto", "mine"))
    code = f"""
import lindt.client.adaptations as package
package.__path__.append({str(tmp_path)!r})
import lindt
print(list(lindt.METHODS)[-1], lindt.resolve("digits-nfl", ["method.adaptation=mine"]).method.adaptation)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "mine Mine(pull=0.1)\n"
